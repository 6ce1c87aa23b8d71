//! A plan for programs: what it costs by each path to send a file or memory of several sizes; measured, then put to the test.
//!
//! The test is a measurement of its own, after the one that the plan is made of, with sizes between those that were measured:
//! what is measured together is alike in ways that the next day is not.

use crate::congestion::{DEFAULT_CONGESTION_FILE, paces};
use crate::matrix::{CHUNK_DEFAULT, SendSelection};
use crate::quantity::Size;
use crate::send::prediction::{self, is_same_distance};
use crate::send::{SendReport, SendRow};
use crate::tested_method::TestedMethod;
use crate::warning::Kind;
use crate::workload::Workload;
use crate::{BenchError, HostFacts, Pace, Progress, send};
pub use description::{describe, describe_rate, describe_tests};
use fit::is_clean;
pub use fit::of;
use haul::SendMethod;
pub use haul::plan::Plan;
use haul::plan::{Network, call_bytes};
use haul_lab::Offloads;
use std::fs;
use std::sync::atomic::AtomicBool;

mod description;
mod fit;

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
/// How often the test is repeated where the hypervisor has moved the CPUs since the plan was measured.
const TEST_REPEATS_MAX: usize = 4;
/// Rounds of each row unless the caller asks for more: the fewest that a verdict takes, since there are a hundred rows.
pub const ROUNDS: usize = crate::stats::VERDICT_ROUNDS_MIN;

/// A plan and what it was made of.
#[derive(Debug, Clone)]
pub struct Made {
    /// The plan, with its tests and the measurement's warnings.
    pub plan: Plan,
    /// What it was made of.
    pub report: SendReport,
}

/// Measures what a plan needs, makes it and puts it to the test; [`ROUNDS`] take about four minutes.
pub fn make(
    rounds: usize,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Made, BenchError> {
    if rounds < ROUNDS {
        return Err(BenchError::BadInput(format!(
            "--rounds {rounds} is too few: a plan takes {ROUNDS} rounds or more"
        )));
    }
    let pace = Pace { rounds, ..Pace::QUICK };
    let measured = send::SendPlan { pace, observer_pairs: 0, ..send::SendPlan::new(selections()) };
    let report = send::run(&measured, is_stopped, progress)?;
    let mut plan =
        of(&report).ok_or_else(|| BenchError::Failed("no row could be measured cleanly".into()))?;
    let tests = TESTS.map(|workload| SendSelection {
        paths: vec![TestedMethod::Planned],
        // The planned way makes calls of its own size; a chunk beyond the file would be refused all the same.
        chunks: vec![Size(workload.sizes()[0]).min(CHUNK_DEFAULT)],
        workloads: vec![workload],
        ..SendSelection::plain()
    });
    let tested = send::SendPlan {
        pace,
        observer_pairs: 0,
        planned: Some(plan.clone()),
        ..send::SendPlan::new(tests.into())
    };
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
    let measured = |row: &&SendRow| {
        is_clean(row) && row.sender_us_per_mib.is_some_and(|figure| figure.has_interval())
    };
    plan.tests = tested
        .rows
        .iter()
        .filter(measured)
        .filter_map(|row| prediction::test(&plan, row))
        .collect();
    // The tests' distance is warned of above.
    let of_tests = tested.warnings.iter().filter(|warning| warning.kind != Kind::Plan);
    let warnings = report.warnings.iter().chain(of_tests);
    let warnings = warnings.map(|warning| format!("{}: {}", warning.kind, warning.detail));
    plan.warnings.extend(warnings);
    Ok(Made { plan, report })
}

/// Whether two runs were at the same distance of the CPUs, as far as that is known.
fn are_alike(one: &SendReport, other: &SendReport) -> bool {
    let ns = |report: &SendReport| Some(report.lab.as_ref()?.cache_line_round_trip_ns?.median);
    is_same_distance(ns(one), ns(other))
}

/// The rows that a plan is made of.
fn selections() -> Vec<SendSelection> {
    let row = |path: SendMethod, workload: Workload, size: Size, offloads| SendSelection {
        paths: vec![path.into()],
        chunks: vec![Size(call_bytes(path) as u64).min(size)],
        workloads: vec![workload],
        corks: vec![false],
        offloads: vec![offloads],
    };
    let of_files = [
        SendMethod::ReadWrite,
        SendMethod::ReadSend,
        SendMethod::MmapSend,
        SendMethod::Sendfile,
        SendMethod::Splice,
        SendMethod::Vmsplice,
    ];
    let of_memory = [
        SendMethod::ReadWrite,
        SendMethod::ReadSend,
        SendMethod::Sendfile,
        SendMethod::Splice,
        SendMethod::Vmsplice,
    ];
    let mut selections = Vec::new();
    for (index, (count, size)) in FILES.into_iter().enumerate() {
        // Without offloads two sizes will do: few network cards are like that.
        for offloads in
            if index % 4 == 1 { &[Offloads::On, Offloads::Off][..] } else { &[Offloads::On] }
        {
            let files = || Workload::Equal { count, size };
            selections.extend(of_files.iter().map(|&path| row(path, files(), size, *offloads)));
        }
    }
    for (index, size) in MEMORY.into_iter().enumerate() {
        for offloads in
            if index % 4 == 1 { &[Offloads::On, Offloads::Off][..] } else { &[Offloads::On] }
        {
            let memory = || Workload::Memory(size);
            selections.extend(of_memory.iter().map(|&path| row(path, memory(), size, *offloads)));
        }
    }
    selections
}

/// How many of a plan's tests it missed, and how many there were; a test that could not be measured cleanly counts as
/// missed.
pub fn misses(plan: &Plan) -> (usize, usize) {
    let met =
        plan.tests.iter().filter(|test| test.error_percent().abs() <= ERROR_PERCENT_MAX).count();
    (TESTS.len() - met.min(TESTS.len()), TESTS.len())
}

/// Whether a plan has stood its tests: it has missed at most a third of them.
pub fn has_stood(plan: &Plan) -> bool {
    let (missed, all) = misses(plan);
    3 * missed <= all
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
    let list =
        |devices: &[String]| if devices.is_empty() { "none".into() } else { devices.join(", ") };
    compare("network cards", &list(&plan.devices), &list(&devices));
    changes
}

/// The reason why a plan's costs may not be those of this host's sockets: its default congestion control paces them, and the
/// plan was measured without pacing.
pub fn pacing_note(plan: &Plan) -> Option<String> {
    pacing_note_for(
        plan.network.as_ref()?,
        fs::read_to_string(DEFAULT_CONGESTION_FILE).ok()?.trim(),
    )
}

fn pacing_note_for(Network { congestion, .. }: &Network, default: &str) -> Option<String> {
    (paces(default) && !paces(congestion)).then(|| {
        format!(
            "measured with {congestion}, which does not pace; this host's default, {default}, does, and then every path costs \
             more (set TCP_CONGESTION before connect or listen)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_that_paces_is_a_note_beside_a_plan_that_was_not_paced() {
        let network = |congestion: &str| Network {
            congestion: congestion.into(),
            mtu: 9000,
            rate_bits_per_second: None,
            cache_line_round_trip_ns: None,
            reading: None,
        };
        assert!(pacing_note_for(&network("cubic"), "bbr").is_some_and(|note| note.contains("bbr")));
        assert_eq!(pacing_note_for(&network("cubic"), "reno"), None);
        assert_eq!(pacing_note_for(&network("bbr"), "bbr"), None);
    }
}
