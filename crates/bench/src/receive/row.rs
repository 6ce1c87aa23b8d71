//! A row of `receive`: the contract, and how people are shown it.

use super::method::ReceiveMethod;
use super::{PageOrder, ReceiveCase, ReceiveCondition, ReceiveRound, SentBy};
use crate::quantity::Size;
use crate::rounds::Series;
use crate::stats::Figure;
use crate::view::{Bar, Column, Tabled, interval, number, ratio, share, speed};
use serde::{Deserialize, Serialize};

/// One way of receiving under one condition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReceiveRow {
    /// The way's name.
    pub path: String,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// How it was sent.
    pub sent_by: SentBy,
    /// How the network stack took pages.
    pub page_order: PageOrder,
    /// The memory that was filled round and round.
    pub buffer_bytes: u64,
    /// Whether the program looked at every byte.
    pub touched: bool,
    /// Rounds measured. 0 for a row that was refused.
    pub rounds: usize,
    /// What other programs used of a host's CPU, where too few windows were clean. Such a row has no intervals.
    #[serde(default)]
    pub disturbed_percent: Option<f64>,
    /// Interrupts of both hosts' CPUs for each MiB, other than their timers': the regime ([`crate::regime`]).
    #[serde(default)]
    pub interrupts_per_mib: Option<Figure>,
    /// What arrives with a reader that is as fast as it can be; `null` where the row was measured so.
    #[serde(default)]
    pub full_speed_bits_per_second: Option<f64>,
    /// Why nothing was measured.
    pub refused: Option<String>,
    /// Payload received in all windows together.
    pub mib: f64,
    /// All windows together.
    pub seconds: f64,
    /// The share of the bytes that came by mapping pages.
    pub mapped_percent: Option<f64>,
    /// The share that was copied on the receiving host.
    pub copied_percent: Option<f64>,
    /// Payload that reached the program, the file, or nobody.
    pub throughput_bits_per_second: Option<Figure>,
    /// Load of the receiving host's CPU.
    pub receiver_load_percent: Option<Figure>,
    /// CPU time of the receiving host per MiB of payload, interrupts included.
    pub receiver_us_per_mib: Option<Figure>,
    /// CPU time of the sending host per MiB of payload.
    pub sender_us_per_mib: Option<Figure>,
    /// How much slower the meter's spinner went in what was left of the receiving host's CPU.
    pub receiver_interference_percent: Option<Figure>,
    /// What `getrusage` charged the receiving process per MiB in user mode.
    pub user_us_per_mib: Option<Figure>,
    /// The same in the kernel.
    pub system_us_per_mib: Option<Figure>,
    /// How often the receiving process gave up its CPU or lost it, per MiB.
    pub context_switches_per_mib: Option<Figure>,
    /// System calls of the receiving process per MiB.
    pub syscalls_per_mib: Option<f64>,
    /// `receiver_us_per_mib` over that of `read` in the same round: the median of the rounds' ratios.
    pub receiver_us_ratio: Option<Figure>,
}

/// The row that a series comes to, beside all the others.
pub(super) fn of(
    series: &Series<ReceiveCase, ReceiveRound>,
    all: &[Series<ReceiveCase, ReceiveRound>],
) -> ReceiveRow {
    let ReceiveCase { way, condition } = series.case;
    let sum = |of: &dyn Fn(&ReceiveRound) -> f64| {
        series.rounds.iter().fold(0.0, |sum, (_, round)| sum + of(round))
    };
    let (mib, mapped) = (
        sum(&|round| round.received.mib()),
        sum(&|round| round.received.mapped_bytes as f64 / crate::MIB),
    );
    let mapped_percent = (mib > 0.0).then(|| 100.0 * mapped / mib);
    let copied_percent = mapped_percent.map(|mapped| match way {
        ReceiveMethod::Discard => 0.0,
        _ => 100.0 - mapped,
    });
    let plain = all.iter().find(|other| {
        other.case.way == ReceiveMethod::Read
            && other.case.condition == condition
            && !other.rounds.is_empty()
    });
    let per_mib =
        |of: fn(&ReceiveRound) -> f64| series.figure(|round| of(round) / round.received.mib());
    ReceiveRow {
        path: way.name().into(),
        mtu: condition.mtu,
        sent_by: condition.sent_by,
        page_order: condition.page_order,
        buffer_bytes: condition.buffer.0,
        touched: condition.touch,
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        interrupts_per_mib: series.figure_of_some(|round| round.costs.both_interrupts_per_mib()),
        full_speed_bits_per_second: None,
        refused: series.why_none(),
        mib,
        seconds: sum(&|round| round.received.seconds),
        mapped_percent,
        copied_percent,
        throughput_bits_per_second: series.figure(|round| round.costs.bytes_per_second * 8.0),
        receiver_load_percent: series.figure(|round| round.costs.receiver.load_percent),
        receiver_us_per_mib: series.figure(|round| round.costs.receiver_us_per_mib),
        sender_us_per_mib: series.figure(|round| round.costs.sender_us_per_mib),
        receiver_interference_percent: series
            .figure_of_some(|round| round.costs.receiver.interference_percent),
        user_us_per_mib: per_mib(|round| round.received.user_seconds * 1e6),
        system_us_per_mib: per_mib(|round| round.received.system_seconds * 1e6),
        context_switches_per_mib: per_mib(|round| round.received.context_switches as f64),
        syscalls_per_mib: per_mib(|round| round.received.calls as f64).map(|figure| figure.median),
        receiver_us_ratio: plain.and_then(|plain| {
            series.ratio_to_method(plain, |round| round.costs.receiver_us_per_mib)
        }),
    }
}

impl ReceiveRow {
    /// What the row was measured under.
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

impl Tabled for ReceiveRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str = "µs of CPU per MiB, interrupts included. All charts share a scale.";

    fn name(&self) -> String {
        self.path.clone()
    }

    fn group(&self) -> String {
        self.condition().to_string()
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
            "Every way is woken once an eighth of the buffer has arrived (SO_RCVLOWAT).".into(),
            "user and system are what getrusage charges the receiving process; µs/MiB is what its CPU was kept from doing.".into(),
            crate::regime::HELD.into(),
        ]
    }
}
