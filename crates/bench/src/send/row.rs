//! A row of the experiment `send`: its JSON fields and its table columns.

use crate::regime::HELD_NOTE;
use crate::rounds::RoundCost;
use crate::stats::Estimate;
use crate::verdict::Question;
use crate::view::{Bar, Column, TableRow, copied_after_all, interval, number, ratio, share, speed};
use haul_units::Size;
use haul_workers::tested_method::AUTO;
use haul_workers::worker::Paced;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of one send method under one condition.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SendRow {
    /// The name of the send method.
    pub path: String,
    /// The most bytes that one call sends.
    pub chunk_bytes: u64,
    /// The name of the workload.
    pub workload: String,
    /// Whether `TCP_CORK` was set.
    pub cork: bool,
    /// The sending device's offloads: `on` or `off`.
    pub offloads: String,
    /// Size of both sockets' buffers, if the row has a size.
    #[serde(default)]
    pub buffer_bytes: Option<u64>,
    /// The method that sent most of the bytes, if the library chose it; several, if rounds differ.
    #[serde(default)]
    pub taken: Option<String>,
    /// Rounds measured; 0 if the row was refused.
    pub rounds: usize,
    /// The reason why nothing was measured.
    pub refused: Option<String>,
    /// The share of the bytes that was copied on the sending host.
    pub copied_percent: Option<f64>,
    /// The evidence for `copied_percent`. `program`: the method always copies, through a buffer or
    /// a mapping. `notice`: the kernel's completion of each send. `proof`: before the rounds, a
    /// memory file was sent by the same method and then overwritten; bytes that arrived changed had
    /// not been copied.
    pub copied_known_by: Option<String>,
    /// Payload that reached the receiving program.
    pub throughput_bits_per_second: Option<Estimate>,
    /// Load of the sending host's CPU.
    pub sender_load_percent: Option<Estimate>,
    /// Load of the receiving host's CPU; `null` if both hosts share one CPU.
    pub receiver_load_percent: Option<Estimate>,
    /// CPU time of the sending host per MiB of payload, interrupts included.
    pub sender_us_per_mib: Option<Estimate>,
    /// CPU time of the receiving host per MiB of payload; `null` if both hosts share one CPU.
    pub receiver_us_per_mib: Option<Estimate>,
    /// Interference on the sending host: how much slower the meter's spinner ran in the CPU time
    /// left to it, because others used the caches and the memory. `null` if too little time was
    /// left to measure it.
    pub sender_interference_percent: Option<Estimate>,
    /// Interference on the receiving host.
    pub receiver_interference_percent: Option<Estimate>,
    /// CPU time per MiB that `getrusage` charged to the sending thread, which is what common tools
    /// report.
    pub rusage_us_per_mib: Option<Estimate>,
    /// System calls of the sending thread per MiB.
    pub syscalls_per_mib: Option<f64>,
    /// `sender_us_per_mib` divided by `sender_us_per_mib` of `read+write` in the same round, or of
    /// `read+send` without such a row: the median of the rounds' ratios.
    pub sender_us_ratio: Option<Estimate>,
    /// `sender_us_per_mib` divided by `sender_us_per_mib` of the cheapest method under the same
    /// conditions, in the same round. The intervals of one condition cover jointly with 95 %,
    /// because the cheapest row was selected among them. `null` for the cheapest row.
    #[serde(default)]
    pub cheapest_us_ratio: Option<Estimate>,
    /// Interrupts on the sending host's CPU per MiB, without timer interrupts: mostly for arriving
    /// acknowledgements. With the receiver's interrupts they determine most of the cost of a MiB.
    #[serde(default)]
    pub sender_interrupts_per_mib: Option<Estimate>,
    /// Interrupts on the receiving host's CPU per MiB, without timer interrupts.
    #[serde(default)]
    pub receiver_interrupts_per_mib: Option<Estimate>,
    /// Local timer interrupts on the sending CPU per MiB, beyond the tick: a paced socket has one
    /// for each group of packets.
    #[serde(default)]
    pub sender_timer_interrupts_per_mib: Option<Estimate>,
    /// Packets that the sender received per MiB, which are the acknowledgements.
    #[serde(default)]
    pub acknowledgements_per_mib: Option<Estimate>,
    /// Throughput with an unthrottled reader; `null` if the row itself was measured that way.
    #[serde(default)]
    pub full_speed_bits_per_second: Option<f64>,
    /// The reason why timers sent the packets: `rate` (pacing was requested), `congestion-control`
    /// (it paces, as BBR does) or `leftover` (an earlier congestion control left pacing on). `null`
    /// if the socket was not paced.
    #[serde(default)]
    pub paced: Option<Paced>,
    /// Median CPU use of other programs in the disturbed rounds, in percent of one CPU. Only set if
    /// too few rounds were undisturbed; such a row does not have intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

impl SendRow {
    /// The conditions of the row. Rows with equal conditions differ only in their method.
    pub fn condition(&self) -> (&str, u64, bool, &str, Option<u64>) {
        (&self.workload, self.chunk_bytes, self.cork, &self.offloads, self.buffer_bytes)
    }
}

/// The columns: first those for a narrow terminal, then those for a wide one.
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

impl TableRow for SendRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["read+write", "read+send"];
    const COLUMNS_EXPLAINED: &'static str = "\
        sender µs/MiB: CPU time of the sending host for each MiB that arrived, interrupts \
        included. × plain: that cost divided by read+write's, round by round, with its 95 % \
        interval. interrupts: of both CPUs for each MiB. copied %: bytes that were copied on \
        the sending host.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str =
        "µs of CPU per MiB, interrupts included. Charts of one chunk size share a scale.";

    fn name(&self) -> String {
        self.path.clone()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        let corked = if self.cork { "corked, " } else { "" };
        let (workload, chunk) = (&self.workload, Size(self.chunk_bytes));
        format!("{workload} in chunks of {chunk}, {corked}offloads {}", self.offloads)
    }

    /// The verdicts are about a device with offloads.
    fn answers(&self, question: Question) -> bool {
        let is_memory = self.workload.starts_with("memory:");
        self.offloads == "on" && is_memory == (question == Question::SendMemory)
    }

    /// One scale per chunk size: small chunks cost ten times as much, so on a shared scale the
    /// other bars would vanish.
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
        let auto = "auto is the library's own choice, in calls of the size that it chooses: the \
                    chunk size does not apply.";
        let is_held = rows.iter().any(|row| row.full_speed_bits_per_second.is_some());
        let held_note = is_held.then(|| HELD_NOTE.into());
        is_chosen.then(|| auto.into()).into_iter().chain(held_note).collect()
    }
}
