//! A row of `checksum`: the contract, and how people are shown it.

use super::work::Work;
use crate::quantity::Size;
use crate::rounds::Series;
use crate::stats::Figure;
use crate::view::{Bar, Column, Tabled, ratio};
use serde::{Deserialize, Serialize};

/// One way of looking at bytes and copying them, at one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChecksumRow {
    /// What was done.
    pub path: String,
    /// Which of the original question's seven ways it is.
    pub number: Option<u8>,
    /// How many bytes a call worked on, over and over.
    pub bytes: u64,
    /// Rounds measured.
    pub rounds: usize,
    /// Time for each KiB of payload.
    pub ns_per_kib: Option<Figure>,
    /// Payload a second, 10⁹ bytes.
    pub gigabytes_per_second: Option<Figure>,
    /// Its speed over that of reading every byte and doing nothing with it, in the same round.
    pub read_bandwidth_share: Option<Figure>,
    /// Its time over that of `memcpy` in the same round.
    pub memcpy_ratio: Option<Figure>,
    /// Its speed over that of the crate internet-checksum in the same round, for what computes that sum alone.
    pub crate_speedup: Option<Figure>,
}

/// The row that a series comes to, beside all the others of its size.
pub(super) fn of(series: &Series<Work, f64>, size: Size, all: &[Series<Work, f64>]) -> ChecksumRow {
    let of = |work: Work| all.iter().find(|other| other.case == work);
    let inverse = |figure: Figure| Figure {
        median: 1.0 / figure.median,
        low: if figure.has_interval() { 1.0 / figure.high } else { figure.low },
        high: if figure.has_interval() { 1.0 / figure.low } else { figure.high },
        ..figure
    };
    let ratio_to = |work: Work| series.ratio_to(of(work)?, |&seconds| seconds);
    let is_sum = matches!(series.case, Work::Checksum | Work::ChecksumBy(_));
    ChecksumRow {
        path: series.case.name().into(),
        number: series.case.number(),
        bytes: size.0,
        rounds: series.rounds.len(),
        ns_per_kib: series.figure(|seconds| seconds * 1e9 * 1024.0 / size.0 as f64),
        gigabytes_per_second: series.figure(|seconds| size.0 as f64 / seconds / 1e9),
        read_bandwidth_share: ratio_to(Work::Read).map(inverse),
        memcpy_ratio: ratio_to(Work::Memcpy),
        crate_speedup: ratio_to(Work::InternetChecksum).filter(|_| is_sum).map(inverse),
    }
}

const COLUMNS: [Column<ChecksumRow>; 7] = [
    Column::narrow("way", ChecksumRow::title),
    Column::narrow("ns/KiB", |row| precise(row.ns_per_kib)),
    Column::narrow("GB/s", |row| precise(row.gigabytes_per_second)),
    Column::narrow("× memcpy\n(interval)", |row| ratio(row.memcpy_ratio)),
    Column::wide("share of the\nread bandwidth", |row| ratio(row.read_bandwidth_share)),
    Column::wide("× the crate\ninternet-checksum", |row| {
        row.crate_speedup.map_or(String::new(), |figure| ratio(Some(figure)))
    }),
    Column::wide("rounds", |row| row.rounds.to_string()),
];

fn precise(figure: Option<Figure>) -> String {
    figure.map_or("?".into(), |figure| format!("{:.1}", figure.median))
}

impl ChecksumRow {
    fn title(&self) -> String {
        match self.number {
            Some(number) => format!("{number} {}", self.path),
            None => self.path.clone(),
        }
    }
}

impl Tabled for ChecksumRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const LEGEND: &'static [(&'static str, &'static str)] = &[("sender", "time")];
    const UNIT: &'static str = "ns for each KiB. Each size has a scale of its own. The numbers are the original question's.";

    fn name(&self) -> String {
        self.title()
    }

    fn group(&self) -> String {
        format!("{} at a time", Size(self.bytes))
    }

    fn scale(&self) -> u64 {
        self.bytes
    }

    fn rounds(&self) -> usize {
        self.rounds
    }

    fn refused(&self) -> Option<&str> {
        None
    }

    fn bars(&self) -> Vec<Bar> {
        Bar::of("sender", self.ns_per_kib, String::new()).into_iter().collect()
    }
}
