//! The share of the bytes that each row copied on the sending host, and the evidence for it.

use super::{CaseWithProof, SendExperiment, SendSeries};
use crate::matrix::SendCase;
use haul::{CopyProof, Copying, ProofError};
use haul_lab::{Lab, Offloads};
use haul_workers::tested_method::TestedMethod;
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
pub(super) fn prove(
    experiment: &mut SendExperiment<'_>,
    cases: &[SendCase],
    proves_all: bool,
) -> Vec<Option<f64>> {
    let Some(lab) = experiment.topology.lab() else { return vec![None; cases.len()] };
    let mut proofs: HashMap<(TestedMethod, Offloads), Option<f64>> = HashMap::new();
    cases
        .iter()
        .map(|case| {
            let is_memory = is_memory(case);
            let method = case.method.method_to_prove(is_memory);
            let offloads = case.condition.offloads;
            let is_known = method.copying(is_memory) == Copying::Always && !is_one_copy(method);
            if is_known && !proves_all || experiment.set_offloads(offloads).is_err() {
                return None;
            }
            // A refused method reports its reason in its own row.
            let attempt = || prove_method(lab, method).ok().map(|proof| proof.copied_percent());
            *proofs.entry((method, offloads)).or_insert_with(attempt)
        })
        .collect()
}

fn prove_method(lab: &Lab, method: TestedMethod) -> Result<CopyProof, ProofError> {
    let (from, to) = lab.connect().map_err(|error| ProofError::Connection {
        step: "connecting the hosts",
        error: io::Error::other(error),
    })?;
    method.prove(&from, &to)
}

/// Whether a row compares the cost of a copy, so that the copy is proved.
fn is_one_copy(method: TestedMethod) -> bool {
    matches!(method, TestedMethod::OneCopy(_))
}

fn is_memory(case: &SendCase) -> bool {
    matches!(case.condition.workload, Workload::Memory(_))
}

impl CaseWithProof {
    /// Whether the row's method copies by design.
    pub(super) fn copying(&self) -> Copying {
        self.case.method.copying(is_memory(&self.case))
    }
}

pub(super) fn copied_share(series: &SendSeries) -> Option<CopiedShare> {
    if series.rounds.is_empty() {
        return None;
    }
    match series.case.copying() {
        Copying::Always | Copying::Pages => {
            let proved = series.case.proved_copied_percent;
            let by_proof = proved.map(|percent| CopiedShare { percent, known_by: "proof" });
            let is_known =
                series.case.copying() == Copying::Always && !is_one_copy(series.case.case.method);
            let by_program = CopiedShare { percent: 100.0, known_by: "program" };
            by_proof.or(is_known.then_some(by_program))
        }
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
