//! A row of the experiment `checksum`: its JSON fields and its table columns.

use crate::rounds::{RoundCost, Series};
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, ratio};
use haul_units::Size;
use haul_workers::checksum_operation::Operation;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of one operation on bytes of one size.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ChecksumRow {
    /// The name of the operation.
    pub path: String,
    /// The number of a combination of copying and summing, 1 to 7; `null` for other operations.
    pub number: Option<u8>,
    /// The bytes that a call worked on, repeatedly.
    pub bytes: u64,
    /// Rounds measured.
    pub rounds: usize,
    /// Time per KiB of payload.
    pub ns_per_kib: Option<Estimate>,
    /// Payload per second, in 10⁹ bytes.
    pub gigabytes_per_second: Option<Estimate>,
    /// The speed divided by the speed of only reading every byte, in the same round.
    pub read_bandwidth_share: Option<Estimate>,
    /// The time divided by the time of `memcpy` in the same round.
    pub memcpy_ratio: Option<Estimate>,
    /// The speed divided by the speed of the crate internet-checksum in the same round, for rows
    /// that only compute this checksum.
    pub crate_speedup: Option<Estimate>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

/// The row of a series; `all` holds the series of the same size.
pub(super) fn of(
    series: &Series<Operation, f64>,
    size: Size,
    all: &[Series<Operation, f64>],
) -> ChecksumRow {
    let series_of = |operation: Operation| all.iter().find(|other| other.case == operation);
    let inverse = |estimate: Estimate| Estimate {
        median: 1.0 / estimate.median,
        low: if estimate.has_interval() { 1.0 / estimate.high } else { estimate.low },
        high: if estimate.has_interval() { 1.0 / estimate.low } else { estimate.high },
        ..estimate
    };
    let ratio_to =
        |operation: Operation| series.ratio_to(series_of(operation)?, |&seconds| seconds);
    let is_sum = matches!(series.case, Operation::Checksum | Operation::ChecksumBy(_));
    ChecksumRow {
        path: series.case.name().into(),
        number: series.case.number(),
        bytes: size.0,
        rounds: series.rounds.len(),
        ns_per_kib: series.estimate(|seconds| seconds * 1e9 * 1024.0 / size.0 as f64),
        gigabytes_per_second: series.estimate(|seconds| size.0 as f64 / seconds / 1e9),
        read_bandwidth_share: ratio_to(Operation::Read).map(inverse),
        memcpy_ratio: ratio_to(Operation::Memcpy),
        round_costs: series.round_costs(|seconds| seconds * 1e9 * 1024.0 / size.0 as f64, |_| None),
        crate_speedup: ratio_to(Operation::InternetChecksum).filter(|_| is_sum).map(inverse),
    }
}

const COLUMNS: [Column<ChecksumRow>; 7] = [
    Column::narrow("operation", ChecksumRow::title),
    Column::narrow("ns/KiB", |row| one_decimal(row.ns_per_kib)),
    Column::narrow("GB/s", |row| one_decimal(row.gigabytes_per_second)),
    Column::narrow("× memcpy\n(interval)", |row| ratio(row.memcpy_ratio)),
    Column::wide("share of the\nread bandwidth", |row| ratio(row.read_bandwidth_share)),
    Column::wide("× the crate\ninternet-checksum", |row| {
        row.crate_speedup.map_or(String::new(), |estimate| ratio(Some(estimate)))
    }),
    Column::wide("rounds", |row| row.rounds.to_string()),
];

fn one_decimal(estimate: Option<Estimate>) -> String {
    estimate.map_or("?".into(), |estimate| format!("{:.1}", estimate.median))
}

impl ChecksumRow {
    fn title(&self) -> String {
        match self.number {
            Some(number) => format!("{number} {}", self.path),
            None => self.path.clone(),
        }
    }
}

impl TableRow for ChecksumRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["4 memcpy"];
    /// In the caches the speed of a copy depends on where the buffers lie.
    const RUN_DEVIATION: f64 = 0.25;
    const COLUMNS_EXPLAINED: &'static str = "\
        ns/KiB: time for each KiB of payload. × memcpy: that time divided by a copy's, with \
        its 95 % interval.";
    const LEGEND: &'static [(&'static str, &'static str)] = &[("sender", "time")];
    const UNIT: &'static str = "ns per KiB. Each size has a scale of its own. The numbers 1 to 7 \
        are those of the original question.";
    const IS_SORTED: bool = false;

    fn cost_unit(&self) -> &'static str {
        "ns/KiB"
    }

    fn name(&self) -> String {
        self.title()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        format!("{} at a time", Size(self.bytes))
    }

    fn axis_key(&self) -> u64 {
        self.bytes
    }

    fn round_count(&self) -> usize {
        self.rounds
    }

    fn refusal_reason(&self) -> Option<&str> {
        None
    }

    fn bars(&self) -> Vec<Bar> {
        Bar::of("sender", self.ns_per_kib, String::new()).into_iter().collect()
    }
}
