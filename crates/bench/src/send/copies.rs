//! The share of the bytes that each row copied on the sending host, and the evidence for it.

use super::{CaseWithProof, SendExperiment, SendSeries};
use crate::matrix::SendCase;
use haul::{Copying, ProofError, SendMethod};
use haul_lab::{Lab, Offloads};
use haul_workers::workload::Workload;
use std::collections::HashMap;
use std::io;

/// The share of the bytes that was copied, and the evidence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CopiedShare {
    pub percent: f64,
    pub known_by: &'static str,
}

/// Runs the copy proof for every method that may avoid a copy, once for each state of the offloads.
/// Returns the copied share in percent for each case, `None` if it is unknown. Between two machines
/// it is always unknown: bytes that have left on a wire can no longer be overwritten.
pub(super) fn prove(experiment: &mut SendExperiment<'_>, cases: &[SendCase]) -> Vec<Option<f64>> {
    let Some(lab) = experiment.topology.lab() else { return vec![None; cases.len()] };
    let mut proofs: HashMap<(SendMethod, Offloads), Option<f64>> = HashMap::new();
    cases
        .iter()
        .map(|case| {
            let (method, offloads) = (method_to_prove(case), case.condition.offloads);
            if method.copying() == Copying::Always || experiment.set_offloads(offloads).is_err() {
                return None;
            }
            // A refused method reports its reason in its own row.
            let attempt = || prove_method(lab, method).ok().map(|proof| proof.copied_percent());
            *proofs.entry((method, offloads)).or_insert_with(attempt)
        })
        .collect()
}

fn prove_method(lab: &Lab, method: SendMethod) -> Result<haul::CopyProof, ProofError> {
    let failed = |step| move |error| ProofError::Connection { step, error };
    let (from, to) =
        lab.connect().map_err(|error| failed("connecting the hosts")(io::Error::other(error)))?;
    haul::prove(method, &from, &to)
}

/// The method that is proved in place of the row's: for `auto` and `planned`, the one that the
/// built-in plan chooses.
fn method_to_prove(case: &SendCase) -> SendMethod {
    case.method.method_to_prove(matches!(case.condition.workload, Workload::Memory(_)))
}

impl CaseWithProof {
    /// Whether the row's method copies by design.
    pub(super) fn copying(&self) -> Copying {
        method_to_prove(&self.case).copying()
    }
}

pub(super) fn copied_share(series: &SendSeries) -> Option<CopiedShare> {
    if series.rounds.is_empty() {
        return None;
    }
    match series.case.copying() {
        Copying::Always => Some(CopiedShare { percent: 100.0, known_by: "program" }),
        Copying::Pages => series
            .case
            .proved_copied_percent
            .map(|percent| CopiedShare { percent, known_by: "proof" }),
        // By what the kernel reports, as every method of an unknown kind.
        _ => {
            let copied: u64 = series.rounds.iter().map(|(_, round)| round.copied_bytes).sum();
            let zero_copied: u64 =
                series.rounds.iter().map(|(_, round)| round.zero_copied_bytes).sum();
            let reported_bytes = copied + zero_copied;
            let percent = 100.0 * copied as f64 / reported_bytes.max(1) as f64;
            let by_completion = CopiedShare { percent, known_by: "notice" };
            // Without scatter-gather the stack linearizes packets after it has accepted them as
            // zero-copy, and the completion does not report that copy. If the proof shows a larger
            // share, it counts.
            match series.case.proved_copied_percent {
                Some(percent) if percent > by_completion.percent => {
                    Some(CopiedShare { percent, known_by: "proof" })
                }
                _ => (reported_bytes > 0).then_some(by_completion),
            }
        }
    }
}
