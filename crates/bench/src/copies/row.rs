//! A row of the experiment `copies`: its JSON fields and its table columns.

use crate::rounds::RoundCost;
use crate::send::SendRow;
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, interval, number, ratio};
use haul_units::Size;
use haul_workers::workload::Workload;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The pages that the proof sends and overwrites.
const PROVED_PAGES: f64 = 16.0;
/// The name of the row that sends from memory, without a file.
const SEND: &str = "send";
/// The share of the rounds in which `sendfile` must have a gain, so that a share of the gain is
/// stated.
const GAIN_ROUNDS_MIN: f64 = 0.75;

/// The result of one send method for one file.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct CopiesRow {
    /// The name of the send method; `send` for memory that no file is read into.
    pub path: String,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Where the file is: `tmpfs` with folios of 4 KiB, or `tmpfs-huge`; empty for memory.
    pub place: String,
    /// The most bytes that one call sends.
    pub chunk_bytes: u64,
    /// Size of both sockets' buffers, if the row has a size.
    #[serde(default)]
    pub buffer_bytes: Option<u64>,
    /// The copies that the sending host makes of each byte, by the design of the method. `null` if
    /// the proof contradicts the design, or for `floor`, which does not send a file.
    pub copies: Option<u8>,
    /// The pages, of sixteen, that were lent and not copied: overwritten after they were sent, they
    /// arrived changed. `null` if the proof was not possible.
    pub lent_pages: Option<u32>,
    /// Rounds measured; 0 if the row was refused.
    pub rounds: usize,
    /// The reason why nothing was measured.
    pub refused: Option<String>,
    /// CPU time of the sending host per MiB of payload, interrupts included.
    pub sender_us_per_mib: Option<Estimate>,
    /// CPU time of the receiving host per MiB of payload. On a veth the receiving host also reads
    /// the lent pages for the first time.
    pub receiver_us_per_mib: Option<Estimate>,
    /// `sender_us_per_mib` divided by the cost of `read+write` in the same round.
    pub sender_us_ratio: Option<Estimate>,
    /// Of a row with one copy: the share of `sendfile`'s gain over `read+write` that the row keeps,
    /// round by round. 1: all of the gain. 0: none. Below 0: the row costs more than `read+write`.
    /// `null` if the gain itself was not shown.
    #[serde(default)]
    pub kept: Option<Estimate>,
    /// Median CPU use of other programs in the disturbed rounds, in percent of one CPU. Only set if
    /// too few rounds were undisturbed.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

impl CopiesRow {
    /// The conditions that the rows of one ladder share. Memory belongs to every place.
    fn condition(&self) -> (u64, u64, Option<u64>) {
        (self.file_bytes, self.chunk_bytes, self.buffer_bytes)
    }

    /// The row of another method in the same ladder.
    pub(super) fn other<'r>(&self, path: &str, rows: &'r [Self]) -> Option<&'r Self> {
        rows.iter().find(|row| {
            row.path == path && row.condition() == self.condition() && row.place == self.place
        })
    }
}

/// The rows of a report of `send`.
pub(super) fn of_all(sent: &[SendRow]) -> Vec<CopiesRow> {
    let mut rows: Vec<CopiesRow> = sent.iter().filter_map(row).collect();
    let kept: Vec<Option<Estimate>> = rows.iter().map(|row| kept(row, &rows)).collect();
    let ratios: Vec<Option<Estimate>> = rows.iter().map(|row| memory_ratio(row, &rows)).collect();
    for (row, (kept, ratio)) in rows.iter_mut().zip(kept.into_iter().zip(ratios)) {
        row.kept = kept;
        row.sender_us_ratio = row.sender_us_ratio.or(ratio);
    }
    rows
}

/// The ratio of `send` to `read+write`, which has another workload.
fn memory_ratio(row: &CopiesRow, rows: &[CopiesRow]) -> Option<Estimate> {
    if row.path != SEND {
        return None;
    }
    let plain = rows
        .iter()
        .find(|other| other.path == "read+write" && other.condition() == row.condition())?;
    let ratios = by_round([row, plain]).map(|[cost, plain]| cost / plain);
    Some(Estimate::of(&ratios.collect::<Vec<_>>())?.widen_for_runs(1))
}

fn row(sent: &SendRow) -> Option<CopiesRow> {
    let (place, size, path) = match sent.workload.parse().ok()? {
        Workload::PageCache { size, folios } => (folios.prefix(), size, sent.path.as_str()),
        Workload::Memory(size) => ("", size, SEND),
        _ => return None,
    };
    let lent_pages = sent
        .copied_percent
        .filter(|_| sent.copied_known_by.as_deref() == Some("proof"))
        .map(|copied| (PROVED_PAGES * (1.0 - copied / 100.0)).round() as u32);
    let copies = match (path, lent_pages) {
        ("read+write", Some(0)) => Some(2),
        ("mapped+write" | "sendfile-copied" | SEND, Some(0)) => Some(1),
        ("sendfile" | "splice", Some(lent)) if f64::from(lent) >= PROVED_PAGES => Some(0),
        _ => None,
    };
    Some(CopiesRow {
        path: path.into(),
        file_bytes: size.0,
        place: place.into(),
        chunk_bytes: sent.chunk_bytes,
        buffer_bytes: sent.buffer_bytes,
        copies,
        lent_pages,
        rounds: sent.rounds,
        refused: sent.refused.clone(),
        sender_us_per_mib: sent.sender_us_per_mib,
        receiver_us_per_mib: sent.receiver_us_per_mib,
        sender_us_ratio: sent.sender_us_ratio.filter(|_| path != SEND),
        kept: None,
        disturbed_percent: sent.disturbed_percent,
        round_costs: sent.round_costs.clone(),
    })
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
    if row.copies != Some(1) || row.path == SEND || row.disturbed_percent.is_some() {
        return None;
    }
    let (plain, sendfile) = (row.other("read+write", rows)?, row.other("sendfile", rows)?);
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

const COLUMNS: [Column<CopiesRow>; 7] = [
    Column::narrow("path", |row| row.path.clone()),
    Column::narrow("copies", |row| row.copies.map_or("?".into(), |copies| copies.to_string())),
    Column::narrow("sender\nµs/MiB", |row| number(row.sender_us_per_mib, 1.0, 0)),
    Column::narrow("× read+write\n(interval)", |row| ratio(row.sender_us_ratio)),
    Column::narrow("kept\n(interval)", |row| {
        row.kept.map_or(String::new(), |kept| ratio(Some(kept)))
    }),
    Column::wide("receiver\nµs/MiB", |row| number(row.receiver_us_per_mib, 1.0, 0)),
    Column::wide("sender µs/MiB\ninterval", |row| interval(row.sender_us_per_mib)),
];

impl TableRow for CopiesRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["read+write"];
    const COLUMNS_EXPLAINED: &'static str = "\
        copies: of each byte on the sending host, proved by overwriting sixteen pages after they \
        were sent. sender µs/MiB: CPU time of the sending host for each MiB that arrived, \
        interrupts included. × read+write: that cost divided by read+write's, round by round, with \
        its 95 % interval. kept: the share of sendfile's gain that a row with one copy keeps; \
        below 0 the row costs more than read+write. send: from memory, without a file.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str =
        "µs of CPU per MiB, interrupts included. Charts of one call size share a scale.";

    fn name(&self) -> String {
        self.path.clone()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        let (file, chunk) = (Size(self.file_bytes), Size(self.chunk_bytes));
        let buffers = self
            .buffer_bytes
            .map_or(String::new(), |bytes| format!(", socket buffers of {}", Size(bytes)));
        let place = match self.place.as_str() {
            "tmpfs-huge" => " with huge folios",
            _ => "",
        };
        format!("file of {file}{place} in calls of {chunk}{buffers}")
    }

    fn axis_key(&self) -> u64 {
        self.chunk_bytes
    }

    fn round_count(&self) -> usize {
        self.rounds
    }

    fn is_disturbed(&self) -> bool {
        self.disturbed_percent.is_some()
    }

    fn refusal_reason(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn bars(&self) -> Vec<Bar> {
        [
            Bar::of("sender", self.sender_us_per_mib, String::new()),
            Bar::of("receiver", self.receiver_us_per_mib, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            buffer_bytes: None,
            copies: Some(copies),
            lent_pages: None,
            rounds: costs.len(),
            refused: None,
            sender_us_per_mib: None,
            receiver_us_per_mib: None,
            sender_us_ratio: None,
            kept: None,
            disturbed_percent: None,
            round_costs: round_costs.collect(),
        }
    }

    #[test]
    fn a_copy_keeps_what_lies_between_read_and_sendfile() {
        let plain = with_costs("read+write", 2, &[200.0; 11]);
        let mut sendfile = with_costs("sendfile", 0, &[100.0; 11]);
        sendfile.sender_us_ratio = Estimate::of(&[0.5; 11]);
        let half = with_costs("mapped+write", 1, &[150.0; 11]);
        let rows = [plain, sendfile, half];
        let kept_of = |row: &CopiesRow, rows: &[CopiesRow]| kept(row, rows).map(|kept| kept.median);
        assert_eq!(kept_of(&rows[2], &rows), Some(0.5));
        assert_eq!(kept_of(&rows[0], &rows), None, "two copies");
        let mut doubtful = rows.clone();
        doubtful[1].sender_us_ratio = Estimate::of(&[0.5; 3]);
        assert_eq!(kept_of(&doubtful[2], &doubtful), None, "the gain is not shown");
    }
}
