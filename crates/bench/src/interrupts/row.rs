//! A row of the experiment `interrupts`: its JSON fields and its table columns.

use super::{
    DATAGRAMS_PER_SECOND, GROUP_DATAGRAMS, GROUPS_PER_SECOND, InterruptsCase, InterruptsRound,
    RECEIVE_SETTINGS, SendCall, Traffic,
};
use crate::rounds::{RoundCost, Series};
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, copied_after_all, number, ratio};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of one way to group packets, under one kind of traffic.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct InterruptsRow {
    /// How packets were grouped.
    pub path: String,
    /// The traffic: `transmit`, `datagrams`, `stream` or `messages`.
    pub traffic: String,
    /// The commands that apply the receiving host's configuration; `null` for `transmit`, which
    /// compares the sender's calls.
    pub setting: Option<String>,
    /// Rounds measured; 0 if the row was refused.
    pub rounds: usize,
    /// Median CPU use of other programs in the disturbed rounds, in percent of one CPU. Only set if
    /// too few rounds were undisturbed; such a row does not have intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// The reason why nothing was measured.
    pub refused: Option<String>,
    /// Packets received per second: datagrams, segments of the stream, or messages in one
    /// direction.
    pub packets_per_second: Option<Estimate>,
    /// Interrupts on the receiving host's CPU per second, without timer interrupts.
    pub interrupts_per_second: Option<Estimate>,
    /// Packets received per interrupt.
    pub packets_per_interrupt: Option<Estimate>,
    /// Packets received per `NET_RX` softirq.
    pub packets_per_poll: Option<Estimate>,
    /// Load of the receiving host's CPU.
    pub receiver_load_percent: Option<Estimate>,
    /// CPU time of the receiving host per 1000 packets.
    pub receiver_us_per_1000_packets: Option<Estimate>,
    /// CPU time of the sending host per 1000 packets; `null` for `datagrams`, whose sender
    /// busy-waits for the time of each one.
    pub sender_us_per_1000_packets: Option<Estimate>,
    /// Packets per system call of the sender.
    pub packets_per_call: Option<Estimate>,
    /// The share of the datagrams that reached the receiving program.
    pub delivered_percent: Option<Estimate>,
    /// The share of the lent bytes that the kernel copied; `null` if nothing was lent.
    pub copied_percent: Option<f64>,
    /// Median of the messages' round-trip times.
    pub latency_p50_us: Option<Estimate>,
    /// 99th percentile of the messages' round-trip times.
    pub latency_p99_us: Option<Estimate>,
    /// The cost of 1000 packets on both hosts divided by the cost of the first row of the same
    /// traffic; `null` for `datagrams`, whose sender busy-waits.
    #[serde(default)]
    pub both_ratio: Option<Estimate>,
    /// The cost of 1000 packets (the sender's in `transmit`, else the receiver's) divided by the
    /// cost of the first row of the same traffic.
    pub ratio: Option<Estimate>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

/// The name of a send call in reports.
pub(super) fn send_call_name(call: SendCall) -> &'static str {
    match call {
        SendCall::Send => "one a call",
        SendCall::Lend | SendCall::LendAndWait => "one a call, lent",
        SendCall::Group => "sendmmsg",
        SendCall::Segments => "UDP_SEGMENT",
        SendCall::LendSegments => "UDP_SEGMENT, lent",
    }
}

impl Traffic {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Transmit(_) => "transmit",
            Self::Datagrams => "datagrams",
            Self::Stream => "stream",
            Self::Messages => "messages",
        }
    }
}

/// The row of a series; `all` holds the series that it is compared with.
pub(super) fn of(
    series: &Series<InterruptsCase, InterruptsRound>,
    all: &[Series<InterruptsCase, InterruptsRound>],
) -> InterruptsRow {
    let InterruptsCase { setting, traffic } = series.case;
    let first = all
        .iter()
        .find(|other| other.case.traffic.name() == traffic.name() && !other.rounds.is_empty());
    let is_transmit = matches!(traffic, Traffic::Transmit(_));
    let is_datagrams = is_transmit || traffic == Traffic::Datagrams;
    let completed_bytes: u64 = series
        .rounds
        .iter()
        .map(|(_, round)| round.sent.copied_bytes + round.sent.zero_copied_bytes)
        .sum();
    let copied_bytes: u64 = series.rounds.iter().map(|(_, round)| round.sent.copied_bytes).sum();
    // Rates multiplied by the counted time, divided by counts: both belong to the same window.
    let per = |packets: fn(&InterruptsRound) -> f64, of: fn(&InterruptsRound) -> u64| {
        series.estimate(move |round| {
            packets(round) * round.counted_seconds / (of(round) as f64).max(1.0)
        })
    };
    InterruptsRow {
        path: series.case.name(),
        traffic: traffic.name().into(),
        setting: (!is_transmit).then(|| setting.commands.into()),
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        refused: series.failure_reason(),
        packets_per_second: series.estimate(|round| round.received_per_second),
        interrupts_per_second: series
            .estimate(|round| round.counters.interrupts as f64 / round.counted_seconds),
        packets_per_interrupt: per(
            |round| round.received_per_second,
            |round| round.counters.interrupts,
        ),
        packets_per_poll: per(|round| round.received_per_second, |round| round.counters.polls),
        receiver_load_percent: series.estimate(|round| round.costs.receiver.load_percent),
        receiver_us_per_1000_packets: series.estimate(InterruptsRound::receiver_us_per_1000),
        // The sender of `datagrams` busy-waits for the time of each one, so its load shows nothing.
        sender_us_per_1000_packets: series
            .estimate(InterruptsRound::sender_us_per_1000)
            .filter(|_| traffic != Traffic::Datagrams),
        packets_per_call: per(|round| round.sent_per_second, |round| round.sent.calls)
            .filter(|_| is_datagrams),
        delivered_percent: series
            .estimate(|round| 100.0 * (round.received_per_second / round.sent_per_second).min(1.0))
            .filter(|_| is_datagrams),
        copied_percent: (completed_bytes > 0)
            .then(|| 100.0 * copied_bytes as f64 / completed_bytes as f64),
        latency_p50_us: series.estimate_of_some(|round| Some(round.latency?.p50_us)),
        latency_p99_us: series.estimate_of_some(|round| Some(round.latency?.p99_us)),
        round_costs: series.round_costs(InterruptsRound::cost, |round| {
            let other =
                if is_transmit { round.receiver_us_per_1000() } else { round.sender_us_per_1000() };
            (traffic != Traffic::Datagrams).then_some(other)
        }),
        both_ratio: first
            .filter(|_| traffic != Traffic::Datagrams)
            .and_then(|first| series.ratio_to_method(first, InterruptsRound::both_us_per_1000)),
        ratio: first.and_then(|first| series.ratio_to(first, InterruptsRound::cost)),
    }
}

const COLUMNS: [Column<InterruptsRow>; 13] = [
    Column::narrow("variant", |row| row.path.clone()),
    Column::narrow("packets/\ninterrupt", |row| number(row.packets_per_interrupt, 1.0, 1)),
    Column::narrow("sender\nµs/1000", |row| number(row.sender_us_per_1000_packets, 1.0, 0)),
    Column::narrow("receiver\nµs/1000", |row| number(row.receiver_us_per_1000_packets, 1.0, 0)),
    Column::narrow("× first\n(interval)", |row| ratio(row.ratio)),
    Column::narrow("p50\nµs", |row| number(row.latency_p50_us, 1.0, 1)),
    Column::wide("packets\n/poll", |row| number(row.packets_per_poll, 1.0, 1)),
    Column::wide("p99\nµs", |row| number(row.latency_p99_us, 1.0, 1)),
    Column::wide("1000\npackets/s", |row| number(row.packets_per_second, 1e3, 1)),
    Column::wide("packets\n/call", |row| number(row.packets_per_call, 1.0, 1)),
    Column::wide("arrived\n%", |row| number(row.delivered_percent, 1.0, 0)),
    Column::wide("copied\n%", |row| {
        row.copied_percent.map_or(String::new(), |percent| format!("{percent:.0}"))
    }),
    Column::wide("interrupts\n/s", |row| number(row.interrupts_per_second, 1.0, 0)),
];

impl TableRow for InterruptsRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["one a call", "plain"];
    const COLUMNS_EXPLAINED: &'static str = "\
        µs/1000: CPU time of a host for 1000 packets, interrupts included. p50: median round \
        trip of a message.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str = "µs of CPU for 1000 packets, interrupts included.";

    fn cost_unit(&self) -> &'static str {
        "cpu-us/1000-packets"
    }

    fn name(&self) -> String {
        self.path.clone()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        match self.traffic.as_str() {
            "transmit" => {
                format!(
                    "sending {} datagrams of 1472 bytes a second",
                    GROUPS_PER_SECOND * GROUP_DATAGRAMS as u32
                )
            }
            "datagrams" => {
                format!("receiving {DATAGRAMS_PER_SECOND} datagrams of 1472 bytes a second")
            }
            "stream" => "receiving a TCP stream at MTU 1500".into(),
            _ => "one message of 64 bytes at a time, there and back".into(),
        }
    }

    fn axis_key(&self) -> u64 {
        self.traffic.bytes().map(u64::from).sum()
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
            Bar::of(
                "sender",
                self.sender_us_per_1000_packets,
                copied_after_all(self.copied_percent),
            ),
            Bar::of("receiver", self.receiver_us_per_1000_packets, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn notes(_: &[Self]) -> Vec<String> {
        let commands = |name: &str| {
            let setting = RECEIVE_SETTINGS.iter().find(|setting| setting.name == name);
            setting.map_or("", |setting| setting.commands)
        };
        vec![
            format!(
                "gro: {}. deferred: {} (delays later packets). threaded: {}. busy polling: {} \
                 (keeps the CPU busy all the time).",
                commands("gro"),
                commands("gro, deferred"),
                commands("gro, threaded"),
                commands("gro, busy polling")
            ),
            "× first compares the sending host in the first table, the receiving host in the \
             others."
                .into(),
            "interrupts are those of the receiving host without its timer's; in the lab they are \
             the calls by which one CPU passes packets to the other."
                .into(),
        ]
    }
}
