//! A row of the experiment `receive`: its JSON fields and its table columns.

use super::method::ReceiveMethod;
use super::{PageOrder, ReceiveCase, ReceiveCondition, ReceiveRound, SentBy};
use crate::rounds::{RoundCost, Series};
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, interval, number, ratio, share, speed};
use haul_units::Size;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of one receive method under one condition.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ReceiveRow {
    /// The name of the receive method.
    pub path: String,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The sender's method.
    pub sent_by: SentBy,
    /// The size of the network stack's page allocations.
    pub page_order: PageOrder,
    /// The memory that was filled repeatedly.
    pub buffer_bytes: u64,
    /// Whether the program read every received byte.
    pub touched: bool,
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
    /// Payload received in all windows together, in MiB.
    pub mib: f64,
    /// The length of all windows together.
    pub seconds: f64,
    /// The share of the bytes that were received by mapping pages.
    pub mapped_percent: Option<f64>,
    /// The share of the bytes that was copied on the receiving host.
    pub copied_percent: Option<f64>,
    /// Payload that was received: read, mapped, written to the file, or discarded.
    pub throughput_bits_per_second: Option<Estimate>,
    /// Load of the receiving host's CPU.
    pub receiver_load_percent: Option<Estimate>,
    /// CPU time of the receiving host per MiB of payload, interrupts included.
    pub receiver_us_per_mib: Option<Estimate>,
    /// CPU time of the sending host per MiB of payload.
    pub sender_us_per_mib: Option<Estimate>,
    /// Interference on the receiving host: how much slower the meter's spinner ran in the CPU time
    /// left to it.
    pub receiver_interference_percent: Option<Estimate>,
    /// CPU time in user mode that `getrusage` charged to the receiving process per MiB.
    pub user_us_per_mib: Option<Estimate>,
    /// CPU time in the kernel that `getrusage` charged to the receiving process per MiB.
    pub system_us_per_mib: Option<Estimate>,
    /// Context switches of the receiving process per MiB, voluntary and involuntary.
    pub context_switches_per_mib: Option<Estimate>,
    /// System calls of the receiving process per MiB.
    pub syscalls_per_mib: Option<f64>,
    /// `receiver_us_per_mib` divided by `receiver_us_per_mib` of `read` in the same round: the
    /// median of the rounds' ratios.
    pub receiver_us_ratio: Option<Estimate>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

/// The row of a series; `all` holds the series that it is compared with.
pub(super) fn of(
    series: &Series<ReceiveCase, ReceiveRound>,
    all: &[Series<ReceiveCase, ReceiveRound>],
) -> ReceiveRow {
    let ReceiveCase { method, condition } = series.case;
    let sum = |of: &dyn Fn(&ReceiveRound) -> f64| {
        series.rounds.iter().fold(0.0, |sum, (_, round)| sum + of(round))
    };
    let (mib, mapped) = (
        sum(&|round| round.received.mib()),
        sum(&|round| round.received.mapped_bytes as f64 / haul_units::MIB),
    );
    let mapped_percent = (mib > 0.0).then(|| 100.0 * mapped / mib);
    let copied_percent = mapped_percent.map(|mapped| match method {
        ReceiveMethod::Discard => 0.0,
        _ => 100.0 - mapped,
    });
    let plain = all.iter().find(|other| {
        other.case.method == ReceiveMethod::Read
            && other.case.condition == condition
            && !other.rounds.is_empty()
    });
    let per_mib =
        |of: fn(&ReceiveRound) -> f64| series.estimate(|round| of(round) / round.received.mib());
    ReceiveRow {
        path: method.name().into(),
        mtu: condition.mtu,
        sent_by: condition.sent_by,
        page_order: condition.page_order,
        buffer_bytes: condition.buffer.0,
        touched: condition.touch,
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        interrupts_per_mib: series.estimate_of_some(|round| round.costs.both_interrupts_per_mib()),
        full_speed_bits_per_second: None,
        refused: series.failure_reason(),
        mib,
        seconds: sum(&|round| round.received.seconds),
        mapped_percent,
        copied_percent,
        throughput_bits_per_second: series.estimate(|round| round.costs.bytes_per_second * 8.0),
        receiver_load_percent: series.estimate(|round| round.costs.receiver.load_percent),
        receiver_us_per_mib: series.estimate(|round| round.costs.receiver_us_per_mib),
        sender_us_per_mib: series.estimate(|round| round.costs.sender_us_per_mib),
        receiver_interference_percent: series
            .estimate_of_some(|round| round.costs.receiver.interference_percent),
        user_us_per_mib: per_mib(|round| round.received.user_seconds * 1e6),
        system_us_per_mib: per_mib(|round| round.received.system_seconds * 1e6),
        context_switches_per_mib: per_mib(|round| round.received.context_switches as f64),
        syscalls_per_mib: per_mib(|round| round.received.calls as f64)
            .map(|estimate| estimate.median),
        round_costs: series.round_costs(
            |round| round.costs.receiver_us_per_mib,
            |round| Some(round.costs.sender_us_per_mib),
        ),
        receiver_us_ratio: plain.and_then(|plain| {
            series.ratio_to_method(plain, |round| round.costs.receiver_us_per_mib)
        }),
    }
}

impl ReceiveRow {
    /// The conditions that the row was measured under.
    pub fn condition(&self) -> ReceiveCondition {
        ReceiveCondition {
            mtu: self.mtu,
            sent_by: self.sent_by,
            page_order: self.page_order,
            buffer: Size(self.buffer_bytes),
            touch: self.touched,
        }
    }
}

const COLUMNS: [Column<ReceiveRow>; 16] = [
    Column::narrow("path", |row| row.path.clone()),
    Column::narrow("receiver\nµs/MiB", |row| number(row.receiver_us_per_mib, 1.0, 0)),
    Column::narrow("× read\n(interval)", |row| ratio(row.receiver_us_ratio)),
    Column::narrow("mapped\n%", |row| share(row.mapped_percent)),
    Column::narrow("copied\n%", |row| share(row.copied_percent)),
    Column::narrow("Gbit/s", |row| number(row.throughput_bits_per_second, 1e9, 1)),
    Column::narrow("switches\n/MiB", |row| number(row.context_switches_per_mib, 1.0, 2)),
    Column::wide("user\nµs/MiB", |row| number(row.user_us_per_mib, 1.0, 0)),
    Column::wide("system\nµs/MiB", |row| number(row.system_us_per_mib, 1.0, 0)),
    Column::wide("MiB", |row| format!("{:.0}", row.mib)),
    Column::wide("seconds", |row| format!("{:.2}", row.seconds)),
    Column::wide("receiver µs/MiB\ninterval", |row| interval(row.receiver_us_per_mib)),
    Column::wide("sender\nµs/MiB", |row| number(row.sender_us_per_mib, 1.0, 0)),
    Column::wide("calls\n/MiB", |row| {
        row.syscalls_per_mib.map_or("?".into(), |calls| format!("{calls:.1}"))
    }),
    Column::wide("inter-\nrupts", |row| number(row.interrupts_per_mib, 1.0, 0)),
    Column::wide("full speed\nGbit/s", |row| speed(row.full_speed_bits_per_second)),
];

impl TableRow for ReceiveRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["read"];
    const COLUMNS_EXPLAINED: &'static str = "\
        receiver µs/MiB: CPU time of the receiving host for each MiB, interrupts included. × \
        read: that cost divided by read's, round by round, with its 95 % interval. mapped %: \
        bytes whose pages were mapped instead of copied. switches: context switches of the \
        receiving process.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str = "µs of CPU per MiB, interrupts included. All charts share a scale.";

    fn name(&self) -> String {
        self.path.clone()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        self.condition().to_string()
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
        let mapped = self.mapped_percent.filter(|&percent| percent > 1.0);
        let remark = mapped.map_or(String::new(), |percent| format!("mapped {percent:.0} %"));
        [
            Bar::of("receiver", self.receiver_us_per_mib, remark),
            Bar::of("sender", self.sender_us_per_mib, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn notes(_: &[Self]) -> Vec<String> {
        vec![
            "Every method is woken once an eighth of the buffer has arrived (SO_RCVLOWAT).".into(),
            "user and system: CPU times that getrusage charges to the receiving process.".into(),
            crate::regime::HELD_NOTE.into(),
        ]
    }
}
