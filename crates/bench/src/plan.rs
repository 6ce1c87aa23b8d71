//! A plan for programs: what each path costs for a call, and for a MiB; measured, fitted, put to the test, and told.

use crate::matrix::Selection;
use crate::quantity::{Rate, Size};
use crate::send::{Report, Row};
use crate::stats::Figure;
use crate::way::Way;
use crate::workload::Workload;
use crate::{BenchError, HostFacts, MIB, Pace, Progress, send};
pub use haul::plan::Plan;
use haul::plan::{Condition, Cost, SCHEMA, SourceKind, Spread, call_bytes};
use haul::{Copying, Path};
use haul_lab::Offloads;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::AtomicBool;

/// The chunks of memory that are measured, up to the size of a plan's own calls.
const CHUNKS: [Size; 4] = [Size(4 << 10), Size(16 << 10), Size(64 << 10), Size(1 << 20)];
/// What the costs of files are measured on: from small ones to one that is some caches large, each set with the most that a
/// call sends of it. A file's last call is short and pushes a packet that is not full, so that many files cost more
/// than one in calls of the same size (docs/findings.md).
const FILES: [(Workload, Size); 5] = {
    const fn files(count: usize, average: u64) -> Workload {
        Workload::Files { count, average: Size(average) }
    }
    [
        (files(128, 4 << 10), Size(16 << 10)),
        (files(128, 16 << 10), Size(64 << 10)),
        (files(128, 64 << 10), Size(256 << 10)),
        (files(24, 1 << 20), Size(1 << 20)),
        (files(1, 24 << 20), Size(1 << 20)),
    ]
};
/// As much memory.
const MEMORY: Workload = Workload::Memory(Size(16 << 20));
/// What the plan is put to the test with: many files of all sizes, on which nothing was fitted.
const MIXED: Workload = Workload::USUAL;

/// A plan, and how well it told what it was not made of.
#[derive(Debug, Clone)]
pub struct Made {
    /// The plan.
    pub plan: Plan,
    /// What it was made of.
    pub report: Report,
    /// Predicted and measured for each path, in µs per MiB.
    pub tests: Vec<Tested>,
}

/// A prediction put to the test.
#[derive(Debug, Clone)]
pub struct Tested {
    /// The path.
    pub path: Path,
    /// What the plan says that the mixed workload costs by it, per MiB.
    pub predicted_us_per_mib: f64,
    /// What it cost, in the same run as all that the plan was made of.
    pub measured_us_per_mib: Figure,
}

/// Measures what a plan needs and makes it, in under three minutes.
pub fn make(
    pace: Pace,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Made, BenchError> {
    let rows = |paths: &[Path], chunks: &[Size], workload: &Workload, offloads| Selection {
        paths: paths.iter().copied().map(Way::from).collect(),
        chunks: chunks.into(),
        workloads: vec![workload.clone()],
        corks: vec![false],
        offloads: vec![offloads],
    };
    let files =
        [Path::ReadWrite, Path::ReadSend, Path::MmapSend, Path::Sendfile, Path::Splice, Path::Vmsplice];
    let memory = [Path::ReadWrite, Path::ReadSend, Path::Sendfile, Path::Splice, Path::Vmsplice];
    let ends = [CHUNKS[0], CHUNKS[2], CHUNKS[3]];
    let mut selections =
        vec![rows(&memory, &CHUNKS, &MEMORY, Offloads::On), rows(&memory, &ends, &MEMORY, Offloads::Off)];
    for path in files {
        let own = Size(call_bytes(path) as u64);
        for (index, (workload, most)) in FILES.iter().enumerate() {
            selections.push(rows(&[path], &[own.min(*most)], workload, Offloads::On));
            if index % 2 == 0 {
                selections.push(rows(&[path], &[own.min(*most)], workload, Offloads::Off));
            }
        }
        // Interleaved with the rest: what a machine does at one time says little of another.
        selections.push(rows(&[path], &[own], &MIXED, Offloads::On));
    }
    let what = send::Plan { pace, observer_pairs: 0, ..send::Plan::new(selections) };
    let report = send::run(&what, is_stopped, progress)?;
    let mixed = MIXED.to_string();
    let (tests, made_of): (Vec<Row>, Vec<Row>) =
        report.rows.iter().cloned().partition(|row| row.workload == mixed);
    let made_of = Report { rows: made_of, ..report };
    let plan = of(&made_of).ok_or_else(|| BenchError::Failed("nothing could be measured".into()))?;
    let sizes: Vec<u64> = MIXED.sizes();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    let tests = tests.iter().filter_map(|row| {
        let (path, measured_us_per_mib) = (path_of(row)?, row.sender_us_per_mib?);
        let only = Plan {
            costs: plan.costs.iter().filter(|cost| cost.path == path).copied().collect(),
            ..plan.clone()
        };
        let condition = Condition { source: SourceKind::File, offloads: true };
        let predicted_us_per_mib = only.predict(condition, sizes.iter().copied())?.median / mib;
        Some(Tested { path, predicted_us_per_mib, measured_us_per_mib })
    });
    let tests = tests.collect();
    Ok(Made { plan, tests, report: made_of })
}

/// How the tests came out, for people.
pub fn describe_tests(tests: &[Tested]) -> String {
    let mut text = format!("Put to the test with {MIXED}, which it was not made of:\n");
    for Tested { path, predicted_us_per_mib, measured_us_per_mib } in tests {
        let (median, interval) = (measured_us_per_mib.median, measured_us_per_mib.interval(0));
        let _ = writeln!(
            text,
            "{path}: {predicted_us_per_mib:.0} µs a MiB predicted, {median:.0} measured ({interval}): {:+.0} %",
            100.0 * (predicted_us_per_mib / median - 1.0)
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
    changes
}

/// Which end of an interval a line is fitted to.
type End = fn(Figure) -> f64;

/// The plan that a report's rows support; `None` where no row was measured.
///
/// A row says what a MiB costs in so many calls. Rows of one path with several give a line over calls per
/// MiB: its slope is the cost of a call. With a single size the calls' cost cannot be told apart and stays
/// within the MiB's.
pub fn of(report: &Report) -> Option<Plan> {
    let mut points: BTreeMap<(Path, bool, bool), Vec<(f64, Figure)>> = BTreeMap::new();
    for row in report.rows.iter().filter(|row| !row.cork) {
        let (Some(path), Some(figure)) = (path_of(row), row.sender_us_per_mib) else { continue };
        let key = (path, row.workload.starts_with("memory:"), row.offloads == "on");
        points.entry(key).or_default().push((calls_per_mib(row), figure));
    }
    let costs: Vec<Cost> = points
        .into_iter()
        .map(|((path, is_memory, offloads), points)| {
            let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
            cost(path, Condition { source, offloads }, &points)
        })
        .collect();
    (!costs.is_empty()).then(|| Plan {
        schema: SCHEMA.into(),
        kernel: report.host.kernel.clone(),
        cpu: report.host.cpu.clone(),
        devices: crate::host::devices(),
        measured: report.started.clone(),
        costs,
    })
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
    let surely = if cost.low > own.high { "surely" } else { "not surely" };
    if percent >= 0.0 {
        format!("in long transfers {surely} cheaper than {next}, which costs {percent:.0} % more")
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
