//! Which rows copied on the sending host, and how that is known.

use super::{Copying, Run, Series};
use crate::workload::Workload;
use haul::Path;
use haul::ProofError;
use haul_lab::Offloads;
use std::io;

/// The share that was copied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Copies {
    pub percent: f64,
    pub known_by: &'static str,
}

impl Run<'_> {
    /// Puts each path that may go without a copy to the proof, once for each state of the offloads.
    pub(super) fn prove_copies(&mut self) {
        for offloads in [Offloads::On, Offloads::Off] {
            let is_wanted = |series: &Series| {
                series.cell.condition.offloads == offloads && series.copying() != Copying::Always
            };
            if !self.series.iter().any(is_wanted) || self.set_offloads(offloads).is_err() {
                continue;
            }
            let mut proved: Vec<(Path, Option<f64>)> = Vec::new();
            for index in 0..self.series.len() {
                if !is_wanted(&self.series[index]) {
                    continue;
                }
                let path = self.series[index].proved_path();
                let known = proved.iter().find(|(other, _)| *other == path).map(|(_, percent)| *percent);
                let percent = known.unwrap_or_else(|| {
                    // A path that is refused says so in its row.
                    let percent = self.prove(path).ok().map(|proved| proved.copied_percent());
                    proved.push((path, percent));
                    percent
                });
                self.series[index].proved_copied_percent = percent;
            }
        }
    }

    fn prove(&self, path: Path) -> Result<haul::Proved, ProofError> {
        let failed = |step| move |source| ProofError::Connection { step, source };
        let (from, to) =
            self.lab.connect().map_err(|error| failed("connecting the hosts")(io::Error::other(error)))?;
        haul::prove(path, &from, &to)
    }
}

impl Series {
    /// The path that stands for the row in a proof.
    fn proved_path(&self) -> Path {
        self.cell.path.proved_path(matches!(self.cell.condition.workload, Workload::Memory(_)))
    }

    /// Whether the row's path copies by nature.
    pub(super) fn copying(&self) -> Copying {
        self.proved_path().copying()
    }
}

pub(super) fn copies_of(series: &Series) -> Option<Copies> {
    if series.rounds.is_empty() {
        return None;
    }
    match series.copying() {
        Copying::Always => Some(Copies { percent: 100.0, known_by: "program" }),
        Copying::Pages => series.proved_copied_percent.map(|percent| Copies { percent, known_by: "proof" }),
        Copying::KernelTells => {
            let copied: u64 = series.rounds.iter().map(|round| round.copied_bytes).sum();
            let zero_copied: u64 = series.rounds.iter().map(|round| round.zero_copied_bytes).sum();
            let told = copied + zero_copied;
            let notice = Copies { percent: 100.0 * copied as f64 / told.max(1) as f64, known_by: "notice" };
            // Without scatter-gather the stack copies packets together after it has promised not to, and
            // the notice does not say so. Where the two differ, what was seen stands.
            match series.proved_copied_percent {
                Some(percent) if percent > notice.percent => Some(Copies { percent, known_by: "proof" }),
                _ => (told > 0).then_some(notice),
            }
        }
    }
}
