//! Makes the plan by which programs choose send methods (`haul plan`): measures each method's
//! cost for files and memory of several sizes, then tests the model.
//!
//! The test is a separate measurement after the one that the model is fitted to, with sizes between
//! the measured ones. Rounds of one measurement share conditions that a later day does not have.

use crate::congestion::{DEFAULT_CONGESTION_FILE, paces};
use crate::error::BenchError;
use crate::host::HostFacts;
use crate::matrix::{CHUNK_DEFAULT, SendSelection};
use crate::rounds::{Pace, Progress, TimeLimit};
use crate::send;
use crate::send::prediction::{self, is_same_cpu_distance};
use crate::send::{SendReport, SendRow};
use crate::warning::Kind;
pub use description::{describe, describe_rate, describe_tests};
use fit::is_undisturbed_and_unpaced;
pub use fit::of;
use haul::SendMethod;
pub use haul::plan::Plan;
use haul::plan::{ERROR_PERCENT_MAX, Network, call_bytes};
use haul_lab::Offloads;
use haul_units::Size;
use haul_workers::tested_method::TestedMethod;
use haul_workers::workload::Workload;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

mod description;
mod fit;

/// The measured files: number and size, all of one size in each row. They range from small ones to
/// one that is several times larger than the caches. Costs are not linear between 16 and 256 KiB,
/// where one packet becomes several.
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
/// The measured sizes of memory.
const MEMORY: [Size; 6] =
    [Size(2 << 10), Size(16 << 10), Size(64 << 10), Size(256 << 10), Size(1 << 20), Size(16 << 20)];
/// The workloads of the test: sizes that the model was not fitted to.
const TESTS: [Workload; 6] = [
    Workload::Equal { count: 512, size: Size(3_000) },
    Workload::Equal { count: 256, size: Size(30_000) },
    Workload::Equal { count: 32, size: Size(500_000) },
    Workload::Equal { count: 1, size: Size(37_000_000) },
    Workload::Memory(Size(3_000)),
    Workload::Memory(Size(200_000)),
];
/// The most repetitions of the test if the hypervisor has moved the CPUs since the model was
/// measured.
const TEST_REPEATS_MAX: usize = 4;
/// Target precision of a row's interval, in percent. A plan needs an interval of any width, so the
/// target is loose.
const PRECISION_PERCENT: f64 = 100.0;
/// The number of rounds for each row: the fewest that a verdict needs, since there are
/// about a hundred rows.
pub const ROUNDS: usize = crate::stats::VERDICT_ROUNDS_MIN;

/// A plan and the measurement that it was made from.
#[derive(Debug, Clone)]
pub struct MeasuredPlan {
    /// The plan. The plan contains the results of its tests, and the warnings of the measurement.
    pub plan: Plan,
    /// The measurement that it was made from.
    pub report: SendReport,
    /// The measurement of its tests; `None` if the run was stopped before they were complete.
    pub tested: Option<SendReport>,
}

/// The share of the time that the test gets.
const TEST_SHARE: f64 = 0.15;

/// How long a plan is measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Effort {
    /// Every row is measured this often.
    Rounds(usize),
    /// Every row is measured [`ROUNDS`] times, or less often if the time is over.
    Time(Duration),
}

impl Effort {
    /// The pace of the measurement, and of its test.
    fn paces(self) -> Result<[Pace; 2], BenchError> {
        match self {
            Self::Rounds(rounds) if rounds < ROUNDS => Err(BenchError::BadInput(format!(
                "--rounds {rounds} is too few: a plan needs {ROUNDS} rounds or more"
            ))),
            Self::Rounds(rounds) => Ok([Pace { rounds, ..Pace::QUICK }; 2]),
            Self::Time(time) => {
                let end_of =
                    |share| TimeLimit::starting_now(time.mul_f64(share), PRECISION_PERCENT);
                Ok([1.0 - TEST_SHARE, 1.0].map(|share| Pace::QUICK.with_limit(end_of(share))))
            }
        }
    }
}

/// Measures the costs, makes the plan and tests it. If `is_stopped` becomes true, the plan is made
/// from the rounds that were measured until then, and not tested.
///
/// [`ROUNDS`] rounds take about four minutes.
pub fn make(
    effort: Effort,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<MeasuredPlan, BenchError> {
    let [pace, test_pace] = effort.paces()?;
    let measurement =
        send::SendParameters { pace, observer_pairs: 0, ..send::SendParameters::new(selections()) };
    let report = send::run(&measurement, is_stopped, progress)?;
    let plan = of(&report).ok_or_else(|| {
        let has_too_few = report.warnings.iter().any(|warning| warning.kind == Kind::TooFewRounds);
        if is_stopped.load(Relaxed) {
            BenchError::Stopped
        } else if has_too_few {
            let reason = "too few rounds fit into the time (measure longer, with --for 5m)";
            BenchError::Unmeasured(reason.into())
        } else {
            BenchError::Unmeasured("no row could be measured undisturbed".into())
        }
    })?;
    if is_stopped.load(Relaxed) {
        return Ok(MeasuredPlan { plan, report, tested: None });
    }
    test(plan, report, test_pace, is_stopped, progress)
}

/// Tests a plan by a separate measurement.
fn test(
    mut plan: Plan,
    report: SendReport,
    pace: Pace,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<MeasuredPlan, BenchError> {
    let selections = TESTS.map(|workload| SendSelection {
        paths: vec![TestedMethod::Planned],
        // The method `planned` chooses the size of its calls, but a chunk larger than the file
        // would still be refused.
        chunks: vec![Size(workload.sizes()[0]).min(CHUNK_DEFAULT)],
        workloads: vec![workload],
        ..SendSelection::plain()
    });
    let test = send::SendParameters {
        pace,
        observer_pairs: 0,
        planned: Some(plan.clone()),
        ..send::SendParameters::new(selections.into())
    };
    let mut tested = send::run(&test, is_stopped, progress)?;
    for _ in 0..TEST_REPEATS_MAX {
        if have_same_cpu_distance(&report, &tested) || pace.is_over() || is_stopped.load(Relaxed) {
            break;
        }
        tested = send::run(&test, is_stopped, progress)?;
    }
    if !have_same_cpu_distance(&report, &tested) {
        let detail = "the hypervisor moved the hosts' CPUs before the plan was tested: its tests \
                      were measured under other conditions than its costs";
        plan.warnings.push(format!("{}: {detail}", Kind::Moved));
    }
    let is_usable = |row: &&SendRow| {
        is_undisturbed_and_unpaced(row)
            && row.sender_us_per_mib.is_some_and(|estimate| estimate.has_interval())
    };
    plan.tests = tested
        .rows
        .iter()
        .filter(is_usable)
        .filter_map(|row| prediction::test(&plan, row))
        .collect();
    // A warning about the tests' CPU distance was already added above.
    let of_tests = tested.warnings.iter().filter(|warning| warning.kind != Kind::Plan);
    let warnings = report.warnings.iter().chain(of_tests);
    let warnings = warnings.map(|warning| format!("{}: {}", warning.kind, warning.detail));
    plan.warnings.extend(warnings);
    let tested = Some(tested).filter(|_| !is_stopped.load(Relaxed));
    Ok(MeasuredPlan { plan, report, tested })
}

/// Whether the CPUs had the same distance in two runs. Also true if a distance is unknown.
fn have_same_cpu_distance(one: &SendReport, other: &SendReport) -> bool {
    let ns = |report: &SendReport| Some(report.lab.as_ref()?.cache_line_round_trip_ns?.median);
    is_same_cpu_distance(ns(one), ns(other))
}

/// The rows that a plan is made from.
fn selections() -> Vec<SendSelection> {
    let selection = |method: SendMethod, workload: Workload, size: Size, offloads| SendSelection {
        paths: vec![method.into()],
        chunks: vec![Size(call_bytes(method) as u64).min(size)],
        workloads: vec![workload],
        corks: vec![false],
        offloads: vec![offloads],
        buffers: vec![None],
    };
    let file_methods = [
        SendMethod::ReadWrite,
        SendMethod::ReadSend,
        SendMethod::MmapSend,
        SendMethod::Sendfile,
        SendMethod::Splice,
        SendMethod::Vmsplice,
    ];
    let memory_methods = [
        SendMethod::ReadWrite,
        SendMethod::ReadSend,
        SendMethod::Sendfile,
        SendMethod::Splice,
        SendMethod::Vmsplice,
    ];
    let mut selections = Vec::new();
    for (index, (count, size)) in FILES.into_iter().enumerate() {
        // Two sizes are enough without offloads, since few network cards lack them.
        for offloads in
            if index % 4 == 1 { &[Offloads::On, Offloads::Off][..] } else { &[Offloads::On] }
        {
            let files = || Workload::Equal { count, size };
            let rows = file_methods.map(|method| selection(method, files(), size, *offloads));
            selections.extend(rows);
        }
    }
    for (index, size) in MEMORY.into_iter().enumerate() {
        for offloads in
            if index % 4 == 1 { &[Offloads::On, Offloads::Off][..] } else { &[Offloads::On] }
        {
            let memory = || Workload::Memory(size);
            let rows = memory_methods.map(|method| selection(method, memory(), size, *offloads));
            selections.extend(rows);
        }
    }
    selections
}

/// The number of tests that a plan missed, and the number of all tests. A test without an
/// undisturbed measurement counts as missed.
fn misses(plan: &Plan) -> (usize, usize) {
    let passed =
        plan.tests.iter().filter(|test| test.error_percent().abs() <= ERROR_PERCENT_MAX).count();
    (TESTS.len() - passed.min(TESTS.len()), TESTS.len())
}

impl MeasuredPlan {
    /// What forbids the use of the plan, as a clause; `None` if nothing does. The plan may miss a
    /// third of its tests, and the noise of the measurement has the bounds that a verdict has.
    pub fn obstacle(&self) -> Option<String> {
        let (missed, all) = misses(&self.plan);
        let tests = || {
            let is_missed = 3 * missed > all;
            is_missed.then(|| format!("the plan missed {missed} of its {all} tests"))
        };
        let Some(tested) = &self.tested else {
            return Some("the run was stopped before the plan was tested".into());
        };
        noise_obstacle(&self.report).or_else(|| noise_obstacle(tested)).or_else(tests)
    }
}

/// The noise that forbids a plan of a report, as a clause.
pub fn noise_obstacle(report: &SendReport) -> Option<String> {
    report.noise.as_ref()?.obstacle()
}

/// The changes of the machine since a plan was measured, one line each; empty if there are
/// none.
pub fn changes(plan: &Plan) -> Vec<String> {
    let host = HostFacts::here();
    let devices = crate::host::devices();
    let mut changes = Vec::new();
    let mut compare = |what: &str, then: &str, now: &str| {
        if then != now {
            changes.push(format!("{what}: {then} when it was measured, {now} now"));
        }
    };
    compare("kernel", &plan.kernel, &host.kernel);
    compare("CPU", &plan.cpu, &host.cpu);
    let list =
        |devices: &[String]| if devices.is_empty() { "none".into() } else { devices.join(", ") };
    compare("network cards", &list(&plan.devices), &list(&devices));
    changes
}

/// A note if this host's default congestion control paces sockets, but the plan was measured
/// without pacing. Then its costs may not apply to this host's sockets.
pub fn pacing_note(plan: &Plan) -> Option<String> {
    pacing_note_for(
        plan.network.as_ref()?,
        fs::read_to_string(DEFAULT_CONGESTION_FILE).ok()?.trim(),
    )
}

fn pacing_note_for(Network { congestion, .. }: &Network, default: &str) -> Option<String> {
    (paces(default) && !paces(congestion)).then(|| {
        format!(
            "measured with {congestion}, which does not pace; this host's default, {default}, \
             does, and then every path costs more (set TCP_CONGESTION before connect or listen)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pacing_default_gives_a_note_if_the_plan_was_not_paced() {
        let network = |congestion: &str| Network::new(congestion, 9000);
        assert!(pacing_note_for(&network("cubic"), "bbr").is_some_and(|note| note.contains("bbr")));
        assert_eq!(pacing_note_for(&network("cubic"), "reno"), None);
        assert_eq!(pacing_note_for(&network("bbr"), "bbr"), None);
    }
}
