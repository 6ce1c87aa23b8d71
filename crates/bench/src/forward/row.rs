//! A row of the experiment `forward`: its JSON fields and its table columns.

use super::method::TestedForwardMethod;
use super::{ForwardCase, ForwardRound, Traffic};
use crate::rounds::{RoundCost, Series};
use crate::stats::Estimate;
use crate::verdict::Question;
use crate::view::{Bar, Column, TableRow, number, ratio, share, speed};
use haul_units::Size;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The result of one forward method under one kind of traffic.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ForwardRow {
    /// The name of the forward method.
    pub path: String,
    /// The size of the pipe or the buffer; `null` if the method has none or chooses it.
    pub buffer_bytes: Option<u64>,
    /// `bulk`, `tls` (bulk that the forwarder decrypts), or `messages:SIZE`.
    pub traffic: String,
    /// Rounds measured; 0 if the row was refused.
    pub rounds: usize,
    /// Median CPU use of other programs in the disturbed rounds, in percent of one CPU. Only set if
    /// too few rounds were undisturbed; such a row does not have intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// Interrupts on both hosts' CPUs per MiB, without timer interrupts. They show the regime of
    /// interrupts (docs/guide.md, "How the receiver reads").
    #[serde(default)]
    pub interrupts_per_mib: Option<Estimate>,
    /// Throughput with an unthrottled reader; `null` if the row itself was measured that way.
    #[serde(default)]
    pub full_speed_bits_per_second: Option<f64>,
    /// The reason why nothing was measured.
    pub refused: Option<String>,
    /// The share of the bytes that was copied on the forwarder's host.
    pub copied_percent: Option<f64>,
    /// The evidence for `copied_percent`: `proof` (pages were overwritten behind the forwarder) or
    /// `program` (the forwarder's own report).
    pub copied_known_by: Option<String>,
    /// Payload that reached the receiving program.
    pub throughput_bits_per_second: Option<Estimate>,
    /// Load of the forwarder's CPU.
    pub forwarder_load_percent: Option<Estimate>,
    /// CPU time of the forwarder's host per forwarded MiB, interrupts included.
    pub forwarder_us_per_mib: Option<Estimate>,
    /// CPU time of the host that sends and receives, per MiB.
    pub peers_us_per_mib: Option<Estimate>,
    /// CPU time of the forwarder's host per round trip of a message.
    pub forwarder_us_per_message: Option<Estimate>,
    /// Round trips of messages per second.
    pub messages_per_second: Option<Estimate>,
    /// Median of the messages' round-trip times.
    pub latency_p50_us: Option<Estimate>,
    /// 99th percentile of the messages' round-trip times.
    pub latency_p99_us: Option<Estimate>,
    /// System calls of the forwarder per MiB; `null` if the kernel forwards.
    pub syscalls_per_mib: Option<f64>,
    /// The forwarder's cost (per MiB, or per message) divided by the cost of the first `copy` row
    /// (`tls-copy` for `tls`) in the same round.
    pub forwarder_us_ratio: Option<Estimate>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

/// The row of a series; `all` holds the series that it is compared with.
pub(super) fn of(
    series: &Series<ForwardCase, ForwardRound>,
    all: &[Series<ForwardCase, ForwardRound>],
    proofs: &HashMap<TestedForwardMethod, f64>,
) -> ForwardRow {
    let ForwardCase { method, buffer, traffic } = series.case;
    let is_bulk = traffic.message_size().is_none();
    let plain = all.iter().find(|other| {
        other.case.method == traffic.baseline()
            && other.case.traffic == traffic
            && !other.rounds.is_empty()
    });
    let sum = |of: fn(&ForwardRound) -> u64| {
        series.rounds.iter().map(|(_, round)| of(round)).sum::<u64>() as f64
    };
    let (bytes, spliced) =
        (sum(|round| round.forwarded.bytes), sum(|round| round.forwarded.spliced_bytes));
    let is_measured = !series.rounds.is_empty();
    let (copied_percent, copied_known_by) = match proofs.get(&method) {
        Some(&percent) if is_measured => (Some(percent), Some("proof".to_owned())),
        None if bytes > 0.0 => (Some(100.0 * (1.0 - spliced / bytes)), Some("program".to_owned())),
        _ => (None, None),
    };
    ForwardRow {
        path: method.name().into(),
        buffer_bytes: buffer.map(|size| size.0),
        traffic: traffic.to_string(),
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        interrupts_per_mib: series.estimate_of_some(|round| round.costs.both_interrupts_per_mib()),
        full_speed_bits_per_second: None,
        refused: series.failure_reason(),
        copied_percent,
        copied_known_by,
        throughput_bits_per_second: series.estimate(|round| round.costs.bytes_per_second * 8.0),
        forwarder_load_percent: series.estimate(|round| round.costs.sender.load_percent),
        forwarder_us_per_mib: series.estimate(|round| round.costs.sender_us_per_mib),
        peers_us_per_mib: series.estimate(|round| round.costs.receiver_us_per_mib),
        forwarder_us_per_message: series
            .estimate(ForwardRound::us_per_message)
            .filter(|_| !is_bulk),
        messages_per_second: series
            .estimate(|round| round.messages_per_second)
            .filter(|_| !is_bulk),
        latency_p50_us: series.estimate_of_some(|round| Some(round.latency?.p50_us)),
        latency_p99_us: series.estimate_of_some(|round| Some(round.latency?.p99_us)),
        syscalls_per_mib: series
            .estimate_of_some(|round| {
                let ForwardRound { forwarded, .. } = round;
                (forwarded.bytes > 0).then(|| forwarded.calls as f64 / forwarded.mib())
            })
            .map(|estimate| estimate.median),
        round_costs: series.round_costs(ForwardRound::cost, |round| {
            round.latency.is_none().then_some(round.costs.receiver_us_per_mib)
        }),
        forwarder_us_ratio: plain
            .and_then(|plain| series.ratio_to_method(plain, ForwardRound::cost)),
    }
}

const COLUMNS: [Column<ForwardRow>; 13] = [
    Column::narrow("path", ForwardRow::title),
    Column::narrow("forwarder\ncost, µs", |row| {
        number(row.cost(), 1.0, usize::from(row.has_messages()))
    }),
    Column::narrow("× copy\n(interval)", |row| ratio(row.forwarder_us_ratio)),
    Column::narrow("Gbit/s", |row| number(row.throughput_bits_per_second, 1e9, 2)),
    Column::narrow("p50\nµs", |row| number(row.latency_p50_us, 1.0, 1)),
    Column::narrow("p99\nµs", |row| number(row.latency_p99_us, 1.0, 1)),
    Column::narrow("copied\n%", |row| share(row.copied_percent)),
    Column::wide("forwarder\nµs/MiB", |row| number(row.forwarder_us_per_mib, 1.0, 0)),
    Column::wide("forwarder\nload %", |row| number(row.forwarder_load_percent, 1.0, 1)),
    Column::wide("peers\nµs/MiB", |row| number(row.peers_us_per_mib, 1.0, 0)),
    Column::wide("calls\n/MiB", |row| {
        row.syscalls_per_mib.map_or("?".into(), |calls| format!("{calls:.1}"))
    }),
    Column::wide("inter-\nrupts", |row| number(row.interrupts_per_mib, 1.0, 0)),
    Column::wide("full speed\nGbit/s", |row| speed(row.full_speed_bits_per_second)),
];

impl ForwardRow {
    /// The method, and the size of its pipe or buffer.
    pub fn title(&self) -> String {
        match self.buffer_bytes {
            Some(bytes) => format!("{} {}", self.path, Size(bytes)),
            None => self.path.clone(),
        }
    }

    /// Whether the traffic is messages, and no bulk transfer.
    fn has_messages(&self) -> bool {
        self.traffic.contains(':')
    }

    /// The cost that rows of one kind of traffic are compared by.
    pub fn cost(&self) -> Option<Estimate> {
        self.forwarder_us_per_message.or(self.forwarder_us_per_mib)
    }
}

impl TableRow for ForwardRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["copy", "tls-copy"];
    const COLUMNS_EXPLAINED: &'static str = "\
        forwarder cost: CPU time of the forwarder's host, interrupts included: for each MiB of \
        a bulk transfer, or for each round trip of a message. × copy: that cost divided by \
        copy's (tls-copy's for TLS), with its 95 % interval. p50, p99: round-trip times.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "the forwarder's host"), ("receiver", "latency of a message, median")];
    const UNIT: &'static str = "µs of the forwarder's CPU per MiB of a bulk transfer, or per round \
        trip of a message, beside its latency in µs.";
    const HAS_SCALE_PER_CLASS: bool = true;

    fn cost_unit(&self) -> &'static str {
        if self.has_messages() { "cpu-us/round-trip" } else { "cpu-us/MiB" }
    }

    fn name(&self) -> String {
        self.title()
    }

    fn method(&self) -> String {
        self.path.clone()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        match self.traffic.split_once(':') {
            Some((_, size)) => format!("one message of {size} at a time, there and back"),
            None if self.traffic == "tls" => "a bulk transfer one way, decrypted (TLS)".into(),
            None => "a bulk transfer one way".into(),
        }
    }

    /// True for bulk transfers only, because the verdict does not use other rows.
    fn answers(&self, _question: Question) -> bool {
        self.traffic == Traffic::Bulk.to_string()
    }

    /// Rows of one kind of traffic share an axis.
    fn axis_key(&self) -> u64 {
        let traffic = self.traffic.parse::<Traffic>().ok();
        traffic.and_then(Traffic::message_size).map_or(0, |size| size.0)
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

    fn notes(_: &[Self]) -> Vec<String> {
        vec![crate::regime::HELD_NOTE.into()]
    }

    fn bars(&self) -> Vec<Bar> {
        [
            Bar::of("sender", self.cost(), String::new()),
            Bar::of("receiver", self.latency_p50_us, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
