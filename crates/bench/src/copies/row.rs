//! A row of the experiment `copies`: its JSON fields and its table columns.

use crate::rounds::RoundCost;
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, interval, number, ratio};
use haul_units::Size;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The name of the row that sends from memory, without a file.
pub(super) const SEND: &str = "send";

/// How the cost of a row is measured.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum CopiesMeter {
    /// Two hosts, and the CPU time that all their work takes, interrupts included. Other programs
    /// must leave the two CPUs alone.
    #[default]
    Spinner,
    /// One thread on one CPU sends a batch over loopback and then receives the batch. The sending
    /// is timed, and the lower quartile of the batches counts, so other programs may run.
    Cycles,
}

impl CopiesMeter {
    /// The name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spinner => "spinner",
            Self::Cycles => "cycles",
        }
    }
}

/// The result of one send method for one file.
#[derive(Debug, Clone, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct CopiesRow {
    /// How the cost was measured.
    #[serde(default)]
    pub meter: CopiesMeter,
    /// The name of the send method; `send` for memory that no file is read into.
    pub path: String,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Where the file is: `tmpfs` with folios of 4 KiB, or `tmpfs-huge`; empty for memory.
    pub place: String,
    /// The most bytes that one call sends.
    pub chunk_bytes: u64,
    /// Size of both sockets' buffers, if the row has a size. With the meter `cycles` it is the size
    /// of a batch.
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
    /// CPU time of the sending host per MiB of payload, interrupts included. With the meter
    /// `cycles` the time of the sending calls.
    pub sender_us_per_mib: Option<Estimate>,
    /// CPU time of the receiving host per MiB of payload. On a veth the receiving host also reads
    /// the lent pages for the first time. With the meter `cycles` the time of the receiving calls.
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
        let buffers =
            self.buffer_bytes.map_or(String::new(), |bytes| format!(", {} in flight", Size(bytes)));
        let place = match self.place.as_str() {
            "tmpfs-huge" => " with huge folios",
            _ => "",
        };
        let meter = match self.meter {
            CopiesMeter::Spinner => "",
            CopiesMeter::Cycles => ", in lock step on one CPU (--meter cycles)",
        };
        format!("file of {file}{place} in calls of {chunk}{buffers}{meter}")
    }

    fn axis_key(&self) -> u64 {
        self.chunk_bytes
    }

    fn other_cost_unit(&self) -> String {
        match self.meter {
            CopiesMeter::Spinner => format!("other-host-{}", self.cost_unit()),
            CopiesMeter::Cycles => format!("receiving-{}", self.cost_unit()),
        }
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
