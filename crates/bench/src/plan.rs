//! A plan for programs: what it costs by each path to send a file or memory of several sizes; measured, then put to the test.
//!
//! The test is a measurement of its own, after the one that the plan is made of, with sizes between those that were measured:
//! what is measured together is alike in ways that the next day is not.

use crate::matrix::{CHUNK_DEFAULT, Selection};
use crate::quantity::{Rate, Size};
use crate::send::{Report, Row};
use crate::stats::Figure;
use crate::warning::Kind;
use crate::way::Way;
use crate::workload::Workload;
use crate::{BenchError, HostFacts, MIB, Pace, Progress, send};
pub use haul::plan::Plan;
use haul::plan::{Condition, Cost, Network, Point, SCHEMA, SourceKind, Spread, Test, call_bytes};
use haul::{Copying, Path};
use haul_lab::Offloads;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::AtomicBool;

/// The files that are measured, all of one size in each row: from small ones to one that is some caches large. Costs bend
/// between 16 and 256 KiB, where one packet becomes several.
const FILES: [(usize, Size); 8] = [
    (512, Size(2 << 10)),
    (512, Size(8 << 10)),
    (256, Size(24 << 10)),
    (128, Size(64 << 10)),
    (64, Size(128 << 10)),
    (48, Size(256 << 10)),
    (24, Size(1 << 20)),
    (1, Size(24 << 20)),
];
/// The same of memory.
const MEMORY: [Size; 6] =
    [Size(2 << 10), Size(16 << 10), Size(64 << 10), Size(256 << 10), Size(1 << 20), Size(16 << 20)];
/// What the plan is put to the test with: sizes on which nothing was fitted.
const TESTS: [Workload; 6] = [
    Workload::Equal { count: 512, size: Size(3_000) },
    Workload::Equal { count: 256, size: Size(30_000) },
    Workload::Equal { count: 32, size: Size(500_000) },
    Workload::Equal { count: 1, size: Size(37_000_000) },
    Workload::Memory(Size(3_000)),
    Workload::Memory(Size(200_000)),
];
/// A prediction further off than this misses.
const ERROR_PERCENT_MAX: f64 = 15.0;
/// A cache line's round trip that differs by this factor is of CPUs that were moved.
const DISTANCE_FACTOR: f64 = 2.0;
/// How often the test is repeated where the hypervisor has moved the CPUs since the plan was measured.
const TEST_REPEATS_MAX: usize = 4;
/// Rounds of each row: the fewest that a verdict takes, since there are a hundred rows.
const ROUNDS: usize = crate::stats::VERDICT_ROUNDS_MIN;

/// A plan and what it was made of.
#[derive(Debug, Clone)]
pub struct Made {
    /// The plan, with its tests and the measurement's warnings.
    pub plan: Plan,
    /// What it was made of.
    pub report: Report,
}

/// Measures what a plan needs, makes it and puts it to the test, in about four minutes.
pub fn make(is_stopped: &AtomicBool, progress: &mut dyn FnMut(Progress)) -> Result<Made, BenchError> {
    let pace = Pace { rounds: ROUNDS, ..Pace::QUICK };
    let measured = send::Plan { pace, observer_pairs: 0, ..send::Plan::new(selections()) };
    let report = send::run(&measured, is_stopped, progress)?;
    let mut plan =
        of(&report).ok_or_else(|| BenchError::Failed("no row could be measured cleanly".into()))?;
    let tests = TESTS.map(|workload| Selection {
        paths: vec![Way::Planned],
        // The planned way makes calls of its own size; a chunk beyond the file would be refused all the same.
        chunks: vec![Size(workload.sizes()[0]).min(CHUNK_DEFAULT)],
        workloads: vec![workload],
        ..Selection::plain()
    });
    let tested =
        send::Plan { pace, observer_pairs: 0, planned: Some(plan.clone()), ..send::Plan::new(tests.into()) };
    let mut result = send::run(&tested, is_stopped, progress)?;
    for _ in 0..TEST_REPEATS_MAX {
        if are_alike(&report, &result) {
            break;
        }
        result = send::run(&tested, is_stopped, progress)?;
    }
    let tested = result;
    if !are_alike(&report, &tested) {
        let words = "the hypervisor had moved the hosts' CPUs when the plan was tested: its tests are of another machine";
        plan.warnings.push(format!("{}: {words}", Kind::Moved));
    }
    plan.tests = tested.rows.iter().filter_map(|row| test(&plan, row)).collect();
    let warnings = report.warnings.iter().chain(&tested.warnings);
    let warnings = warnings.map(|warning| format!("{}: {}", warning.kind, warning.detail));
    plan.warnings.extend(warnings);
    Ok(Made { plan, report })
}

/// Whether two runs were at the same distance of the CPUs, as far as that is known.
fn are_alike(one: &Report, other: &Report) -> bool {
    let ns = |report: &Report| Some(report.lab.as_ref()?.cache_line_round_trip_ns?.median);
    match (ns(one), ns(other)) {
        (Some(one), Some(other)) => one < DISTANCE_FACTOR * other && other < DISTANCE_FACTOR * one,
        _ => true,
    }
}

/// The rows that a plan is made of.
fn selections() -> Vec<Selection> {
    let row = |path: Path, workload: Workload, size: Size, offloads| Selection {
        paths: vec![path.into()],
        chunks: vec![Size(call_bytes(path) as u64).min(size)],
        workloads: vec![workload],
        corks: vec![false],
        offloads: vec![offloads],
    };
    let of_files =
        [Path::ReadWrite, Path::ReadSend, Path::MmapSend, Path::Sendfile, Path::Splice, Path::Vmsplice];
    let of_memory = [Path::ReadWrite, Path::ReadSend, Path::Sendfile, Path::Splice, Path::Vmsplice];
    let mut selections = Vec::new();
    for (index, (count, size)) in FILES.into_iter().enumerate() {
        // Without offloads two sizes will do: few network cards are like that.
        for offloads in if index % 4 == 1 { &[Offloads::On, Offloads::Off][..] } else { &[Offloads::On] } {
            let files = || Workload::Equal { count, size };
            selections.extend(of_files.iter().map(|&path| row(path, files(), size, *offloads)));
        }
    }
    for (index, size) in MEMORY.into_iter().enumerate() {
        for offloads in if index % 4 == 1 { &[Offloads::On, Offloads::Off][..] } else { &[Offloads::On] } {
            let memory = || Workload::Memory(size);
            selections.extend(of_memory.iter().map(|&path| row(path, memory(), size, *offloads)));
        }
    }
    selections
}

/// What the plan says of a workload beside what it cost; `None` where it was not measured cleanly.
fn test(plan: &Plan, row: &Row) -> Option<Test> {
    let workload: Workload = row.workload.parse().ok()?;
    let measured = row.sender_us_per_mib.filter(Figure::has_interval).filter(|_| is_clean(row))?;
    let (predicted_us_per_mib, _) = predict(plan, &workload)?;
    Some(Test { workload: row.workload.clone(), predicted_us_per_mib, measured_us_per_mib: spread(measured) })
}

/// What the plan says that a MiB of a workload costs, and whether it is memory.
fn predict(plan: &Plan, workload: &Workload) -> Option<(f64, SourceKind)> {
    let source = if matches!(workload, Workload::Memory(_)) { SourceKind::Memory } else { SourceKind::File };
    let sizes = workload.sizes();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    let predicted = plan.predict(Condition { source, offloads: true }, sizes)?;
    Some((predicted.median / mib, source))
}

fn spread(figure: Figure) -> Spread {
    Spread { median: figure.median, low: figure.low, high: figure.high }
}

/// How many of a plan's tests it missed, and how many there were; a test that could not be measured cleanly counts as
/// missed.
pub fn misses(plan: &Plan) -> (usize, usize) {
    let met = plan.tests.iter().filter(|test| test.error_percent().abs() <= ERROR_PERCENT_MAX).count();
    (TESTS.len() - met.min(TESTS.len()), TESTS.len())
}

/// Whether a plan has stood its tests: it has missed at most a third of them.
pub fn has_stood(plan: &Plan) -> bool {
    let (missed, all) = misses(plan);
    3 * missed <= all
}

/// How the tests came out, for people.
pub fn describe_tests(plan: &Plan) -> String {
    let (missed, all) = misses(plan);
    let mut text = format!(
        "Put to the test with what it was not made of, in a measurement after that: {} of {all} within {ERROR_PERCENT_MAX:.0} %.\n",
        all - missed
    );
    for test in &plan.tests {
        let Spread { median, low, high } = test.measured_us_per_mib;
        let _ = writeln!(
            text,
            "{}: {:.0} µs a MiB predicted, {median:.0} measured ({low:.0} to {high:.0}): {:+.0} %",
            test.workload,
            test.predicted_us_per_mib,
            test.error_percent()
        );
    }
    text
}

/// How many of the sender's cores a rate takes by each path, for people.
pub fn describe_rate(plan: &Plan, rate: Rate) -> String {
    let mut text = format!(
        "Cores of the sending host for {rate} in long transfers, by what was measured of one connection:\n"
    );
    for (source, name) in [(SourceKind::File, "files"), (SourceKind::Memory, "memory")] {
        for (path, Spread { median, low, high }) in plan.ranking(Condition { source, offloads: true }) {
            let cores = |us_per_mib: f64| rate.0 as f64 / 8.0 / MIB * us_per_mib / 1e6;
            let _ = writeln!(
                text,
                "{name}, {path}: {:.2} cores ({:.2} to {:.2})",
                cores(median),
                cores(low),
                cores(high)
            );
        }
    }
    text
}

/// What has changed of the machine since a plan was measured, one line each; none where it still holds.
pub fn changes(plan: &Plan) -> Vec<String> {
    let here = HostFacts::here();
    let devices = crate::host::devices();
    let mut changes = Vec::new();
    let mut compare = |what: &str, then: &str, now: &str| {
        if then != now {
            changes.push(format!("{what}: {then} when it was measured, {now} now"));
        }
    };
    compare("kernel", &plan.kernel, &here.kernel);
    compare("CPU", &plan.cpu, &here.cpu);
    let list = |devices: &[String]| if devices.is_empty() { "none".into() } else { devices.join(", ") };
    compare("network cards", &list(&plan.devices), &list(&devices));
    let own = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    if let Some(Network { congestion, .. }) = &plan.network
        && own.trim().starts_with("bbr")
        && !congestion.starts_with("bbr")
    {
        changes.push(format!(
            "congestion control: measured with {congestion}, which does not pace; this host's default, {}, does, and then every \
             path costs more (set TCP_CONGESTION before connect or listen)",
            own.trim()
        ));
    }
    changes
}

/// Which end of an interval a line is fitted to.
type End = fn(Figure) -> f64;

/// The plan that a report's rows support; `None` where no row was measured cleanly.
///
/// Rows of files of one size, or of memory, are points: what one such file costs. Of other rows, and for people, there is a
/// line over calls for each MiB: its slope is the cost of a call.
pub fn of(report: &Report) -> Option<Plan> {
    /// A path, whether it is memory, whether offloads are on.
    type Key = (Path, bool, bool);
    let mut rows: BTreeMap<Key, Vec<(&Row, Figure)>> = BTreeMap::new();
    for row in report.rows.iter().filter(|row| !row.cork && is_clean(row)) {
        let Some(path) = path_of(row) else { continue };
        let Some(figure) = row.sender_us_per_mib.filter(Figure::has_interval) else { continue };
        let key = (path, row.workload.starts_with("memory:"), row.offloads == "on");
        rows.entry(key).or_default().push((row, figure));
    }
    let costs: Vec<Cost> = rows
        .into_iter()
        .map(|((path, is_memory, offloads), rows)| {
            let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
            let line: Vec<(f64, Figure)> =
                rows.iter().map(|(row, figure)| (calls_per_mib(row), *figure)).collect();
            let mut points: Vec<Point> =
                rows.iter().filter_map(|(row, figure)| point(row, *figure)).collect();
            points.sort_by_key(|point| point.bytes);
            points.dedup_by_key(|point| point.bytes);
            // One point says nothing of other sizes, which a line at least guesses.
            points = if points.len() > 1 { points } else { Vec::new() };
            Cost { points, ..cost(path, Condition { source, offloads }, &line) }
        })
        .collect();
    let network = report.lab.as_ref().map(|lab| Network {
        congestion: lab.congestion.clone(),
        mtu: lab.mtu,
        rate_bits_per_second: lab.rate_bits_per_second,
        cache_line_round_trip_ns: lab.cache_line_round_trip_ns.map(|figure| figure.median),
    });
    (!costs.is_empty()).then(|| Plan {
        schema: SCHEMA.into(),
        kernel: report.host.kernel.clone(),
        cpu: report.host.cpu.clone(),
        devices: crate::host::devices(),
        measured: report.started.clone(),
        network,
        tests: Vec::new(),
        warnings: report
            .warnings
            .iter()
            .map(|warning| format!("{}: {}", warning.kind, warning.detail))
            .collect(),
        costs,
    })
}

/// Whether a row is the path's cost alone: without other programs, and without timers that nobody asked for.
fn is_clean(row: &Row) -> bool {
    row.disturbed_percent.is_none() && row.paced.is_none()
}

/// What one file, or one piece of memory, of a row costs, where all are of one size.
fn point(row: &Row, figure: Figure) -> Option<Point> {
    let bytes = match row.workload.parse().ok()? {
        Workload::Equal { size, .. } | Workload::Memory(size) => size.0,
        Workload::Files { .. } | Workload::File(_) => return None,
    };
    // In calls of the path's own size, since that is what a program makes.
    let own = (call_bytes(row.path.parse().ok()?) as u64).min(bytes);
    let mib = bytes as f64 / MIB;
    let us = Spread { median: figure.median * mib, low: figure.low * mib, high: figure.high * mib };
    (row.chunk_bytes == own).then_some(Point { bytes, us })
}

/// How many calls a row makes for a MiB: each file's last one is as short as what is left of it.
fn calls_per_mib(row: &Row) -> f64 {
    let sizes = row.workload.parse::<Workload>().map(|workload| workload.sizes()).unwrap_or_default();
    let calls: u64 = sizes.iter().map(|size| size.div_ceil(row.chunk_bytes)).sum();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    // Of a file that is not known here all calls count as full.
    if mib > 0.0 { calls as f64 / mib } else { MIB / row.chunk_bytes as f64 }
}

/// The row's path, if it is one to choose: `floor` sends nothing, and `auto` is the choice.
fn path_of(row: &Row) -> Option<Path> {
    row.path.parse().ok().filter(|&path| path != Path::Floor)
}

fn cost(path: Path, condition: Condition, points: &[(f64, Figure)]) -> Cost {
    let ends: [End; 3] = [|figure| figure.median, |figure| figure.low, |figure| figure.high];
    let [middle, low, high] = ends
        .map(|end| line(&points.iter().map(|(calls, figure)| (*calls, end(*figure))).collect::<Vec<_>>()));
    // Lines through the ends of intervals may cross the one through the middles.
    let spread = |median: f64, low: f64, high: f64| Spread {
        median,
        low: median.min(low).min(high),
        high: median.max(low).max(high),
    };
    Cost {
        path,
        condition,
        us_per_call: spread(middle.0, low.0, high.0),
        us_per_mib: spread(middle.1, low.1, high.1),
        points: Vec::new(),
    }
}

/// The line through points of calls per MiB and µs per MiB that is nearest in proportion; as µs per call and
/// µs per MiB, neither below 0.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    // Each point weighs as one over its square, so that a cheap row counts as much as a dear one.
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        points.iter().map(|&(calls, us)| of(calls, us) / (us * us).max(f64::MIN_POSITIVE)).sum()
    };
    let (n, x, y) = (sum(&|_, _| 1.0), sum(&|calls, _| calls), sum(&|_, us| us));
    let (xx, xy) = (sum(&|calls, _| calls * calls), sum(&|calls, us| calls * us));
    let determinant = n * xx - x * x;
    let has_one_size = points.windows(2).all(|pair| pair[0].0.total_cmp(&pair[1].0).is_eq());
    let slope =
        if has_one_size || determinant <= 0.0 { 0.0 } else { ((n * xy - x * y) / determinant).max(0.0) };
    let rest = (y - slope * x) / n;
    if rest < 0.0 { (xy / xx, 0.0) } else { (slope, rest) }
}

/// What the plan says, for people: which path for which size, and what it is expected to cost.
pub fn describe(plan: &Plan) -> String {
    let cards =
        if plan.devices.is_empty() { String::new() } else { format!(", {}", plan.devices.join(", ")) };
    let mut text = format!("Measured on Linux {}, {}{cards}\n", plan.kernel, plan.cpu);
    for (source, name) in [(SourceKind::File, "a file"), (SourceKind::Memory, "memory")] {
        for offloads in [true, false] {
            let condition = Condition { source, offloads };
            for (sizes, path) in choices(plan, condition) {
                let state = if offloads { "on" } else { "off" };
                let _ = writeln!(
                    text,
                    "{name}, offloads {state}, {sizes}: {}; {}",
                    expectation(plan, condition, path),
                    confidence(plan, condition, path)
                );
            }
        }
    }
    text.push_str("zerocopy and the io_uring paths are never chosen, only taken by hand.\n");
    text
}

/// The paths that are chosen from the smallest piece to the largest, each with the sizes it is chosen for.
fn choices(plan: &Plan, condition: Condition) -> Vec<(String, Path)> {
    let mut runs: Vec<(u64, Path)> = Vec::new();
    for bytes in (10..=24).map(|power| 1u64 << power) {
        let chosen = plan.choose(condition, bytes, |_| true);
        if let Some(path) = chosen.filter(|path| runs.last().is_none_or(|(_, last)| last != path)) {
            runs.push((bytes, path));
        }
    }
    let ends = runs.iter().skip(1).map(|(bytes, _)| Some(Size(*bytes))).chain([None]);
    let sizes = runs.iter().zip(ends).enumerate().map(|(index, ((from, _), end))| match (index, end) {
        (0, None) => "of any size".into(),
        (0, Some(end)) => format!("under {end}"),
        (_, None) => format!("from {}", Size(*from)),
        (_, Some(end)) => format!("from {} to {end}", Size(*from)),
    });
    sizes.zip(runs.iter().map(|(_, path)| *path)).collect()
}

/// How sure the choice is: how far the next path is, and whether their intervals touch.
fn confidence(plan: &Plan, condition: Condition, path: Path) -> String {
    let ranking = plan.ranking(condition);
    let Some((_, own)) = ranking.iter().find(|(other, _)| *other == path) else { return "alone".into() };
    let next = ranking
        .iter()
        .filter(|(other, _)| *other != path)
        .min_by(|(_, one), (_, other)| one.median.total_cmp(&other.median));
    let Some((next, cost)) = next else { return "nothing else was measured".into() };
    let percent = 100.0 * (cost.median / own.median - 1.0);
    if percent >= 0.0 && cost.low > own.high {
        format!("in long transfers {next} costs {percent:.0} % more")
    } else if percent >= 0.0 {
        format!("in long transfers no difference from {next} was shown")
    } else {
        format!("in long transfers {next} costs {:.0} % less", -percent)
    }
}

fn expectation(plan: &Plan, condition: Condition, path: Path) -> String {
    let copies = if path.copying() == Copying::Always { "copies" } else { "moves pages" };
    let Some(cost) = plan.costs.iter().find(|cost| cost.path == path && cost.condition == condition) else {
        return path.to_string();
    };
    let Spread { median, low, high } = cost.us_per_mib;
    let call = if cost.us_per_call.median > 0.0 {
        format!("{:.1} µs a call and ", cost.us_per_call.median)
    } else {
        // One chunk size, or rows too unsteady for a line.
        "a call's cost is not known; ".into()
    };
    format!("{path} ({copies}), {call}{median:.0} µs a MiB ({low:.0} to {high:.0})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_size_gives_no_cost_of_a_call() {
        let (call, mib) = line(&[(16.0, 400.0), (16.0, 420.0)]);
        assert!(call.abs() < 1e-9 && (400.0..420.0).contains(&mib), "{call} {mib}");
    }

    #[test]
    fn nothing_costs_less_than_nothing() {
        let (call, mib) = line(&[(256.0, 100.0), (1.0, 500.0)]);
        assert!(call >= 0.0 && mib >= 0.0, "{call} {mib}");
        let (call, mib) = line(&[(256.0, 4000.0), (16.0, 10.0), (1.0, 1.0)]);
        assert!(call > 0.0 && mib >= 0.0, "{call} {mib}");
    }

    proptest! {
        #[test]
        fn the_line_that_made_the_points_is_found(call in 0.01f64..50.0, mib in 1.0f64..2000.0) {
            let points: Vec<(f64, f64)> =
                [256.0, 64.0, 16.0, 1.0].iter().map(|&calls| (calls, mib + call * calls)).collect();
            let (found_call, found_mib) = line(&points);
            prop_assert!((found_call - call).abs() < 1e-6 * call.max(1.0), "{found_call} for {call}");
            prop_assert!((found_mib - mib).abs() < 1e-6 * mib, "{found_mib} for {mib}");
        }
    }
}
