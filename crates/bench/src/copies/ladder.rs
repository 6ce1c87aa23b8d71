//! The ladder: the rows of one file in calls of one size, and what they show together.

use super::row::{CopiesMeter, CopiesRow, SEND};
use crate::send::SendRow;
use crate::stats::Estimate;
use haul_units::Size;
use haul_workers::page_cache::Folios;
use haul_workers::workload::Workload;

/// The pages that the proof sends and overwrites.
const PROVED_PAGES: f64 = 16.0;
/// The share of the rounds in which `sendfile` must have a gain, so that a share of the gain is
/// stated.
const GAIN_ROUNDS_MIN: f64 = 0.75;
/// Standard deviation, from run to run, of the logarithm of a ratio by the meter `cycles`. Source:
/// docs/measurements/copies.md.
const CYCLES_DEVIATION: f64 = 0.05;
/// The method with which the other methods are compared.
pub(super) const PLAIN: &str = "read+write";

impl CopiesRow {
    /// The conditions that the rows of one ladder share. Memory belongs to every place.
    fn condition(&self) -> (CopiesMeter, u64, u64, Option<u64>) {
        (self.meter, self.file_bytes, self.chunk_bytes, self.buffer_bytes)
    }

    /// The row of another method in the same ladder.
    pub(super) fn other<'r>(&self, path: &str, rows: &'r [Self]) -> Option<&'r Self> {
        rows.iter().find(|row| row.path == path && self.is_in_ladder_of(row))
    }

    fn is_in_ladder_of(&self, row: &Self) -> bool {
        let is_same_place = row.place == self.place || self.path == SEND;
        row.condition() == self.condition() && is_same_place
    }

    /// The row of the same method in the same ladder, measured by another meter.
    pub(super) fn by_meter<'r>(&self, meter: CopiesMeter, rows: &'r [Self]) -> Option<&'r Self> {
        let condition = (meter, self.file_bytes, self.chunk_bytes, self.buffer_bytes);
        rows.iter().find(|row| {
            row.path == self.path && row.place == self.place && row.condition() == condition
        })
    }

    /// Sets the pages that the proof found lent, and the copies if the pages agree with the design
    /// of the method.
    pub(super) fn set_proof(&mut self, copied_percent: Option<f64>) {
        self.lent_pages =
            copied_percent.map(|copied| (PROVED_PAGES * (1.0 - copied / 100.0)).round() as u32);
        self.copies = match (self.path.as_str(), self.lent_pages) {
            (PLAIN, Some(0)) => Some(2),
            ("mapped+write" | "sendfile-copied" | SEND, Some(0)) => Some(1),
            ("sendfile" | "splice", Some(lent)) if f64::from(lent) >= PROVED_PAGES => Some(0),
            _ => None,
        };
    }
}

/// The rows of a report of `send`, for files of these sizes. The row that sends from memory belongs
/// to the ladder of every file that is not smaller than its calls.
pub(super) fn of_sent(sent: &[SendRow], files: &[Size]) -> Vec<CopiesRow> {
    let mut rows = Vec::new();
    for row in sent {
        match row.workload.parse() {
            Ok(Workload::PageCache { size, folios }) => {
                rows.push(of_one(row, &row.path, size, folios.prefix()));
            }
            Ok(Workload::Memory(_)) => {
                let files = files.iter().filter(|file| file.0 >= row.chunk_bytes);
                rows.extend(files.map(|&file| of_one(row, SEND, file, "")));
            }
            _ => {}
        }
    }
    set_ratios(&mut rows);
    set_kept(&mut rows);
    rows
}

fn of_one(sent: &SendRow, path: &str, file: Size, place: &str) -> CopiesRow {
    let mut row = CopiesRow {
        path: path.into(),
        file_bytes: file.0,
        place: place.into(),
        chunk_bytes: sent.chunk_bytes,
        buffer_bytes: sent.buffer_bytes,
        rounds: sent.rounds,
        refused: sent.refused.clone(),
        sender_us_per_mib: sent.sender_us_per_mib,
        receiver_us_per_mib: sent.receiver_us_per_mib,
        sender_us_ratio: sent.sender_us_ratio.filter(|_| path != SEND),
        disturbed_percent: sent.disturbed_percent,
        round_costs: sent.round_costs.clone(),
        ..CopiesRow::default()
    };
    let is_proved = sent.copied_known_by.as_deref() == Some("proof");
    row.set_proof(sent.copied_percent.filter(|_| is_proved));
    row
}

/// Sorts the rows by ladder, and compares each row with `read+write` unless the row is compared
/// already.
pub(super) fn set_ratios(rows: &mut [CopiesRow]) {
    rows.sort_by_key(|row| (row.condition(), row.place == Folios::Huge.prefix()));
    let ratios: Vec<Option<Estimate>> =
        rows.iter().map(|row| row.sender_us_ratio.or_else(|| ratio_to_plain(row, rows))).collect();
    for (row, ratio) in rows.iter_mut().zip(ratios) {
        row.sender_us_ratio = ratio;
    }
}

/// Computes what the rows with one copy keep of `sendfile`'s gain, where the gain is shown.
pub(super) fn set_kept(rows: &mut [CopiesRow]) {
    let kept: Vec<Option<Estimate>> = rows.iter().map(|row| kept(row, rows)).collect();
    for (row, kept) in rows.iter_mut().zip(kept) {
        row.kept = kept;
    }
}

fn ratio_to_plain(row: &CopiesRow, rows: &[CopiesRow]) -> Option<Estimate> {
    let plain = row.other(PLAIN, rows)?;
    let ratios = by_round([row, plain]).map(|[cost, plain]| cost / plain);
    let ratio = Estimate::of(&ratios.collect::<Vec<_>>())?;
    Some(match row.meter {
        _ if row.path == PLAIN => ratio,
        CopiesMeter::Spinner => ratio.widen_for_runs(1),
        CopiesMeter::Cycles => ratio.widen(CYCLES_DEVIATION, 1),
    })
}

/// The number of rounds that a row shares with the `read+write` of its ladder.
pub(super) fn paired_rounds(row: &CopiesRow, rows: &[CopiesRow]) -> usize {
    row.other(PLAIN, rows).map_or(row.round_costs.len(), |plain| by_round([row, plain]).count())
}

/// The costs of several rows in the rounds that all of them have.
fn by_round<const N: usize>(rows: [&CopiesRow; N]) -> impl Iterator<Item = [f64; N]> + '_ {
    let cost = |row: &CopiesRow, round: usize| {
        row.round_costs.iter().find(|cost| cost.round == round).map(|cost| cost.cost)
    };
    rows[0].round_costs.iter().filter_map(move |first| {
        let costs = rows.map(|row| cost(row, first.round));
        costs.iter().all(Option::is_some).then(|| costs.map(Option::unwrap_or_default))
    })
}

/// The share of `sendfile`'s gain that a row with one copy keeps.
fn kept(row: &CopiesRow, rows: &[CopiesRow]) -> Option<Estimate> {
    let is_compared = row.sender_us_ratio.is_some() && row.disturbed_percent.is_none();
    if row.copies != Some(1) || row.path == SEND || !is_compared {
        return None;
    }
    let (plain, sendfile) = (row.other(PLAIN, rows)?, row.other("sendfile", rows)?);
    if !sendfile.sender_us_ratio.is_some_and(|ratio| ratio.is_below(1.0)) {
        return None;
    }
    let rounds: Vec<[f64; 3]> = by_round([row, plain, sendfile]).collect();
    let shares: Vec<f64> = rounds
        .iter()
        .filter(|[_, plain, sendfile]| plain > sendfile)
        .map(|[cost, plain, sendfile]| (plain - cost) / (plain - sendfile))
        .collect();
    let has_gain = shares.len() as f64 >= GAIN_ROUNDS_MIN * rounds.len() as f64;
    Estimate::of(&shares).filter(|_| has_gain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::RoundCost;

    fn with_costs(path: &str, copies: u8, costs: &[f64]) -> CopiesRow {
        let round_costs = costs.iter().enumerate().map(|(round, &cost)| RoundCost {
            round,
            cost,
            other_host_cost: None,
            is_at_other_distance: false,
        });
        CopiesRow {
            path: path.into(),
            file_bytes: 1 << 20,
            place: "tmpfs".into(),
            chunk_bytes: 1 << 16,
            copies: Some(copies),
            rounds: costs.len(),
            round_costs: round_costs.collect(),
            ..CopiesRow::default()
        }
    }

    #[test]
    fn a_copy_keeps_what_lies_between_read_and_sendfile() {
        let plain = with_costs("read+write", 2, &[200.0; 11]);
        let mut sendfile = with_costs("sendfile", 0, &[100.0; 11]);
        sendfile.sender_us_ratio = Estimate::of(&[0.5; 11]);
        let mut half = with_costs("mapped+write", 1, &[150.0; 11]);
        half.sender_us_ratio = Estimate::of(&[0.75; 11]);
        let rows = [plain, sendfile, half];
        let kept_of = |row: &CopiesRow, rows: &[CopiesRow]| kept(row, rows).map(|kept| kept.median);
        assert_eq!(kept_of(&rows[2], &rows), Some(0.5));
        assert_eq!(kept_of(&rows[0], &rows), None, "two copies");
        let mut withheld = rows.clone();
        withheld[2].sender_us_ratio = None;
        assert_eq!(kept_of(&withheld[2], &withheld), None, "the row's own ratio is withheld");
        let mut doubtful = rows.clone();
        doubtful[1].sender_us_ratio = Estimate::of(&[0.5; 3]);
        assert_eq!(kept_of(&doubtful[2], &doubtful), None, "the gain is not shown");
    }
}
