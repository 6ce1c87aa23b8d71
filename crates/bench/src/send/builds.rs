//! The comparison of two builds of haul: the same send methods, performed by the workers of either
//! build in the same rounds.
//!
//! Two runs of one build differ by more than two builds usually do (docs/measurements/
//! repeatability.md). Rounds that hold both builds share the state of the machine, so their ratio
//! needs only the small part by which one build differs from itself.

use super::{CaseWithProof, SendExperiment, SendParameters, SendRound, SendRow, open_workloads};
use crate::congestion;
use crate::error::BenchError;
use crate::host::HostFacts;
use crate::matrix::{self, SendCase};
use crate::report::LabFacts;
use crate::rounds::{Progress, Run, Series, Steps};
use crate::stats::Estimate;
use crate::topology::Topology;
use crate::warning::{Kind, Warning};
use haul_lab::{Lab, Settings};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// A warning says so if the numbers of two builds' usable rounds differ by more than the larger one
/// divided by this.
const ROUNDS_DIFFERENCE_DIVISOR: usize = 5;

/// The rows of two builds.
pub(crate) struct BuildRows {
    pub started: String,
    pub host: HostFacts,
    pub lab: LabFacts,
    pub rows: Vec<BuildRow>,
    pub warnings: Vec<Warning>,
}

/// A row measured with both builds.
pub(crate) struct BuildRow {
    /// The row of the first build.
    pub row: SendRow,
    /// The sender's cost with the second build.
    pub other_cost: Option<Estimate>,
    /// The second build's cost divided by the first's, round by round.
    pub ratio: Option<Estimate>,
    /// The same, with an interval that holds for all rows jointly.
    pub joint_ratio: Option<Estimate>,
    /// The reason why a build did not measure it.
    pub refused: Option<String>,
}

/// Measures the rows of `parameters` with both builds.
pub(crate) fn measure(
    builds: &[PathBuf; 2],
    parameters: &SendParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<BuildRows, BenchError> {
    parameters.pace.check()?;
    let cases = matrix::cases(&parameters.selections);
    let workloads = open_workloads(&cases)?;
    let started = crate::report::now();
    let lab = Lab::open(&Settings::default().with_mtu(parameters.mtu))?;
    let topology = Topology::Lab(&lab);
    let congestion = congestion::choose(topology, parameters.congestion.as_deref())?;
    let mut run = Run::new(topology, parameters.pace)?;
    let mut experiment = SendExperiment::new(topology, workloads, congestion, parameters, builds);
    let row = |case: &SendCase, build| {
        Series::new(CaseWithProof { case: case.clone(), proved_copied_percent: None, build })
    };
    let mut rows: Vec<Series<CaseWithProof, SendRound>> =
        cases.iter().flat_map(|case| [row(case, 0), row(case, 1)]).collect();
    let mut steps =
        Steps::new(run.steps(rows.len()), is_stopped, progress).with_limit(parameters.pace.limit);
    run.measure_all(&mut experiment, &mut rows, &mut steps)?;
    let cost = |round: &SendRound| round.costs.sender_us_per_mib;
    run.warn(&rows, |case| super::warnings::name(&case.case), cost);
    let obstacle = run.obstacle();
    if let Some(obstacle) = &obstacle {
        run.warnings.push(Warning::new(Kind::Unsteady, format!("no finding: {obstacle}")));
    }
    for pair in rows.chunks_exact(2) {
        let usable = [&pair[0], &pair[1]].map(Series::ratio_rounds);
        if usable[0].abs_diff(usable[1]) > usable[0].max(usable[1]) / ROUNDS_DIFFERENCE_DIVISOR {
            let detail = format!(
                "{}: {} rounds of the first build and {} of the second are usable; the others were \
                 in another regime of interrupts or disturbed, which may be the difference",
                super::warnings::name(&pair[0].case.case),
                usable[0],
                usable[1]
            );
            run.warnings.push(Warning::new(Kind::Regime, detail));
        }
    }
    let supported =
        |ratio: Estimate| if obstacle.is_some() { ratio.drop_interval() } else { ratio };
    let compare = |pair: &[Series<CaseWithProof, SendRound>]| BuildRow {
        row: super::rows::row(&pair[0], &rows, &experiment),
        other_cost: pair[1].estimate(cost),
        ratio: pair[1].ratio_to(&pair[0], cost).map(|ratio| supported(ratio.widen_for_builds(1))),
        joint_ratio: pair[1]
            .ratio_among(&pair[0], cases.len(), cost)
            .map(|ratio| supported(ratio.widen_for_builds(cases.len()))),
        refused: pair.iter().find_map(Series::failure_reason),
    };
    let compared = rows.chunks_exact(2).map(compare).collect();
    Ok(BuildRows {
        started,
        lab: LabFacts::of(&run, &experiment.congestion, parameters.rate),
        host: run.host,
        rows: compared,
        warnings: run.warnings,
    })
}
