//! Which rows copied on the sending host, and how that is known.

use super::{Candidate, SendSeries, Sends};
use crate::matrix::SendCase;
use crate::workload::Workload;
use haul::{Copying, ProofError, SendMethod};
use haul_lab::{Lab, Offloads};
use std::collections::HashMap;
use std::io;

/// The share that was copied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Copies {
    pub percent: f64,
    pub known_by: &'static str,
}

/// Puts each path that may go without a copy to the proof, once for each state of the offloads: the share that
/// was copied, for each case, where that is known. Between two machines nothing is: what has left through a wire cannot
/// be changed any more.
pub(super) fn prove(sends: &mut Sends<'_>, cases: &[SendCase]) -> Vec<Option<f64>> {
    let Some(lab) = sends.site.lab() else { return vec![None; cases.len()] };
    let mut proved: HashMap<(SendMethod, Offloads), Option<f64>> = HashMap::new();
    cases
        .iter()
        .map(|case| {
            let (path, offloads) = (proved_path(case), case.condition.offloads);
            if path.copying() == Copying::Always || sends.set_offloads(offloads).is_err() {
                return None;
            }
            // A path that is refused says so in its row.
            let attempt = || prove_path(lab, path).ok().map(|proved| proved.copied_percent());
            *proved.entry((path, offloads)).or_insert_with(attempt)
        })
        .collect()
}

fn prove_path(lab: &Lab, path: SendMethod) -> Result<haul::Proved, ProofError> {
    let failed = |step| move |source| ProofError::Connection { step, source };
    let (from, to) =
        lab.connect().map_err(|error| failed("connecting the hosts")(io::Error::other(error)))?;
    haul::prove(path, &from, &to)
}

/// The path that stands for the row in a proof.
fn proved_path(case: &SendCase) -> SendMethod {
    case.path.proved_path(matches!(case.condition.workload, Workload::Memory(_)))
}

impl Candidate {
    /// Whether the row's path copies by nature.
    pub(super) fn copying(&self) -> Copying {
        proved_path(&self.case).copying()
    }
}

pub(super) fn copies_of(series: &SendSeries) -> Option<Copies> {
    if series.rounds.is_empty() {
        return None;
    }
    match series.case.copying() {
        Copying::Always => Some(Copies { percent: 100.0, known_by: "program" }),
        Copying::Pages => {
            series.case.proved_copied_percent.map(|percent| Copies { percent, known_by: "proof" })
        }
        Copying::KernelTells => {
            let copied: u64 = series.rounds.iter().map(|(_, round)| round.copied_bytes).sum();
            let zero_copied: u64 =
                series.rounds.iter().map(|(_, round)| round.zero_copied_bytes).sum();
            let told = copied + zero_copied;
            let notice =
                Copies { percent: 100.0 * copied as f64 / told.max(1) as f64, known_by: "notice" };
            // Without scatter-gather the stack copies packets together after it has promised not to, and
            // the notice does not say so. Where the two differ, what was seen stands.
            match series.case.proved_copied_percent {
                Some(percent) if percent > notice.percent => {
                    Some(Copies { percent, known_by: "proof" })
                }
                _ => (told > 0).then_some(notice),
            }
        }
    }
}
