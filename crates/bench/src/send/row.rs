//! A row of `send`: the contract, and how people are shown it.

use crate::quantity::Size;
use crate::regime::HELD;
use crate::stats::Figure;
use crate::tested_method::AUTO;
use crate::view::{Bar, Column, Tabled, copied_after_all, interval, number, ratio, share, speed};
use crate::worker::Paced;
use serde::{Deserialize, Serialize};

/// One path under one condition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SendRow {
    /// The path's name.
    pub path: String,
    /// At most how much a call.
    pub chunk_bytes: u64,
    /// The workload's name.
    pub workload: String,
    /// Whether `TCP_CORK` was set.
    pub cork: bool,
    /// `on` or `off`.
    pub offloads: String,
    /// For the library's choice, the path that most bytes took; several where rounds differ.
    #[serde(default)]
    pub taken: Option<String>,
    /// Rounds measured. 0 for a row that was refused.
    pub rounds: usize,
    /// Why nothing was measured.
    pub refused: Option<String>,
    /// The share of the bytes that was copied on the sending host.
    pub copied_percent: Option<f64>,
    /// How that is known: `program` (it copies through a buffer or a mapping), `notice` (the kernel said so
    /// for each send), `proof` (before the rounds, a memory file was sent the same way and overwritten
    /// afterwards: what arrived changed was never copied).
    pub copied_known_by: Option<String>,
    /// Payload that reached the receiving program.
    pub throughput_bits_per_second: Option<Figure>,
    /// Load of the sending host's CPU.
    pub sender_load_percent: Option<Figure>,
    /// Load of the receiving host's CPU; `null` where both hosts share one.
    pub receiver_load_percent: Option<Figure>,
    /// CPU time of the sending host per MiB of payload, interrupts included.
    pub sender_us_per_mib: Option<Figure>,
    /// CPU time of the receiving host per MiB of payload; `null` where both hosts share one.
    pub receiver_us_per_mib: Option<Figure>,
    /// How much slower the meter's spinner went in what was left of the sending host's CPU, because others
    /// used the caches and the memory; `null` where too little was left to tell.
    pub sender_interference_percent: Option<Figure>,
    /// The same of the receiving host's.
    pub receiver_interference_percent: Option<Figure>,
    /// What `getrusage` charged the sending thread per MiB: what the usual tools report.
    pub rusage_us_per_mib: Option<Figure>,
    /// System calls of the sending thread per MiB.
    pub syscalls_per_mib: Option<f64>,
    /// `sender_us_per_mib` over that of `read+write` (of `read+send` where there is nothing to read) in the
    /// same round: the median of the rounds' ratios.
    pub sender_us_ratio: Option<Figure>,
    /// `sender_us_per_mib` over that of the cheapest path under the same conditions, in the same round. All these intervals
    /// of a condition together cover with 95 %, since the cheapest was picked among them; `null` for the cheapest itself.
    #[serde(default)]
    pub cheapest_us_ratio: Option<Figure>,
    /// Interrupts of the sending host's CPU for each MiB, other than its timer's: packets that arrive, acknowledgements
    /// mostly. Together with the receiver's they decide most of what a MiB costs.
    #[serde(default)]
    pub sender_interrupts_per_mib: Option<Figure>,
    /// The same of the receiving host's CPU.
    #[serde(default)]
    pub receiver_interrupts_per_mib: Option<Figure>,
    /// Interrupts of the sending CPU's local timer for each MiB, beyond the tick: one for each group of packets where they are
    /// paced.
    #[serde(default)]
    pub sender_timer_interrupts_per_mib: Option<Figure>,
    /// Packets that came back to the sender for each MiB.
    #[serde(default)]
    pub acknowledgements_per_mib: Option<Figure>,
    /// What arrives at full speed, with a reader that is as fast as it can be; `null` where the rows were
    /// measured so.
    #[serde(default)]
    pub full_speed_bits_per_second: Option<f64>,
    /// Why packets left by timers: `rate` (asked for), `congestion-control` (as BBR does), `leftover` (of an earlier one);
    /// `null` where they did not.
    #[serde(default)]
    pub paced: Option<Paced>,
    /// What other programs used of a host's CPU, where too few windows were clean. Such a row has no intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
}

impl SendRow {
    /// What a row is compared under: rows with the same conditions differ in their path only.
    pub fn condition(&self) -> (&str, u64, bool, &str) {
        (&self.workload, self.chunk_bytes, self.cork, &self.offloads)
    }
}

/// The columns that fit a narrow terminal, then those for more room.
const COLUMNS: [Column<SendRow>; 16] = [
    Column::narrow("path", |row| {
        let taken = row.taken.as_ref().map_or(String::new(), |taken| format!(" ({taken})"));
        let paced = row.paced.map_or("", |_| ", paced");
        format!("{}{taken}{paced}", row.path)
    }),
    Column::narrow("sender\nµs/MiB", |row| number(row.sender_us_per_mib, 1.0, 0)),
    Column::narrow("× plain\n(interval)", |row| ratio(row.sender_us_ratio)),
    Column::narrow("sender\nload %", |row| number(row.sender_load_percent, 1.0, 1)),
    Column::narrow("receiver\nµs/MiB", |row| number(row.receiver_us_per_mib, 1.0, 0)),
    Column::narrow("inter-\nrupts", |row| {
        match (row.sender_interrupts_per_mib, row.receiver_interrupts_per_mib) {
            (Some(sender), Some(receiver)) => format!("{:.0}", sender.median + receiver.median),
            _ => "?".into(),
        }
    }),
    Column::narrow("copied\n%", |row| share(row.copied_percent)),
    Column::wide("sender µs/MiB\ninterval", |row| interval(row.sender_us_per_mib)),
    Column::wide("receiver\nload %", |row| number(row.receiver_load_percent, 1.0, 1)),
    Column::wide("getrusage\nµs/MiB", |row| number(row.rusage_us_per_mib, 1.0, 0)),
    Column::wide("calls\n/MiB", |row| {
        row.syscalls_per_mib.map_or("?".into(), |calls| format!("{calls:.1}"))
    }),
    Column::wide("held\nGbit/s", |row| number(row.throughput_bits_per_second, 1e9, 1)),
    Column::wide("full speed\nGbit/s", |row| speed(row.full_speed_bits_per_second)),
    Column::wide("acks\n/MiB", |row| number(row.acknowledgements_per_mib, 1.0, 1)),
    Column::wide("timer\n/MiB", |row| number(row.sender_timer_interrupts_per_mib, 1.0, 1)),
    Column::wide("copied,\nknown by", |row| row.copied_known_by.clone().unwrap_or_default()),
];

impl Tabled for SendRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str =
        "µs of CPU per MiB, interrupts included. Charts of one chunk size share a scale.";

    fn name(&self) -> String {
        self.path.clone()
    }

    fn group(&self) -> String {
        let corked = if self.cork { "corked, " } else { "" };
        let (workload, chunk) = (&self.workload, Size(self.chunk_bytes));
        format!("{workload} in chunks of {chunk}, {corked}offloads {}", self.offloads)
    }

    /// Small chunks cost ten times as much: one scale for all would leave nothing to see of the rest.
    fn scale(&self) -> u64 {
        self.chunk_bytes
    }

    fn rounds(&self) -> usize {
        self.rounds
    }

    fn is_disturbed(&self) -> bool {
        self.disturbed_percent.is_some()
    }

    fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn bars(&self) -> Vec<Bar> {
        let copied = match self.copied_known_by.as_deref() {
            Some("notice" | "proof") => copied_after_all(self.copied_percent),
            _ => String::new(),
        };
        [
            Bar::of("sender", self.sender_us_per_mib, copied),
            Bar::of("receiver", self.receiver_us_per_mib, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn notes(rows: &[Self]) -> Vec<String> {
        let is_chosen = rows.iter().any(|row| row.path == AUTO && row.rounds > 0);
        let auto = "auto is the library's own choice, in calls of the size it chooses: the chunk does not bind it.";
        let is_held = rows.iter().any(|row| row.full_speed_bits_per_second.is_some());
        is_chosen.then(|| auto.into()).into_iter().chain(is_held.then(|| HELD.into())).collect()
    }
}
