//! The comparison of two builds of haul: the same send methods, performed by the workers of either
//! build in the same rounds.
//!
//! Two runs of one build differ by more than two builds usually do (docs/measurements/
//! repeatability.md). Rounds that hold both builds share the state of the machine, so their ratio
//! needs no part from run to run.

use super::{CaseWithProof, SendExperiment, SendParameters, SendRound, open_workloads};
use crate::compare::{Comparison, Finding, RowComparison, Side};
use crate::congestion;
use crate::error::BenchError;
use crate::matrix;
use crate::regime::{FullSpeedThroughputs, Reading};
use crate::report::LabFacts;
use crate::rounds::{Progress, Run, Series, Steps};
use crate::topology::Topology;
use crate::view::TableRow;
use haul_lab::{Lab, Settings};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// Measures the rows of `parameters` with both builds. A ratio above 1 means that the second build
/// costs more.
pub(crate) fn compare(
    builds: &[PathBuf; 2],
    parameters: &SendParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Comparison, BenchError> {
    parameters.pace.check()?;
    let cases = matrix::cases(&parameters.selections);
    let workloads = open_workloads(&cases)?;
    let started = crate::report::now();
    let lab = Lab::open(&Settings::default().with_mtu(parameters.mtu))?;
    let topology = Topology::Lab(&lab);
    let congestion = congestion::choose(topology, parameters.congestion.as_deref())?;
    let mut run = Run::new(topology, parameters.pace)?;
    let mut experiment = SendExperiment {
        topology,
        workloads,
        congestion,
        rate: parameters.rate,
        reading: if parameters.rate.is_some() { Reading::Free } else { parameters.reading },
        full_speeds: FullSpeedThroughputs::default(),
        planned: None,
        builds,
        pace: parameters.pace,
        offloads: None,
    };
    let mut rows: Vec<Series<CaseWithProof, SendRound>> = cases
        .iter()
        .flat_map(|case| [0, 1].map(|build| (case, build)))
        .map(|(case, build)| {
            Series::new(CaseWithProof { case: case.clone(), proved_copied_percent: None, build })
        })
        .collect();
    let mut steps =
        Steps::new(run.steps(rows.len()), is_stopped, progress).with_limit(parameters.pace.limit);
    run.measure_all(&mut experiment, &mut rows, &mut steps)?;
    let cost = |round: &SendRound| round.costs.sender_us_per_mib;
    run.warn(&rows, |case| super::warnings::name(&case.case), cost);
    let pairs: Vec<_> = rows.chunks_exact(2).collect();
    let compared = pairs
        .iter()
        .map(|pair| {
            let ratio = pair[1].ratio_to(&pair[0], cost);
            let jointly = pair[1].ratio_among(&pair[0], pairs.len(), cost);
            let row = super::rows::row(&pair[0], &rows, &experiment);
            RowComparison {
                experiment: "send".into(),
                group: row.group(),
                name: row.name(),
                compared_with: None,
                a: pair[0].estimate(cost),
                b: pair[1].estimate(cost),
                ratio,
                finding: Finding::of(ratio, jointly),
                refused: pair.iter().find_map(Series::failure_reason),
            }
        })
        .collect();
    let facts = LabFacts::of(&run, &experiment.congestion, parameters.rate);
    let side = |build: &PathBuf| Side {
        name: build.display().to_string(),
        started: started.clone(),
        haul: String::new(),
        commit: String::new(),
        command: haul_version::command_line(),
        host: run.host.clone(),
        lab: Some(facts.clone()),
    };
    Ok(Comparison {
        schema: crate::compare::SCHEMA.into(),
        a: side(&builds[0]),
        b: side(&builds[1]),
        is_interleaved: true,
        differences: Vec::new(),
        rows: compared,
        not_in_both: Vec::new(),
        warnings: run.warnings,
    })
}
