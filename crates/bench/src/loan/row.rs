//! A row of the experiment `loan`: its JSON fields and its table columns.

use super::{LoanCase, LoanMethod, LoanRound, TCP_RUN_DEVIATION};
use crate::rounds::{RoundCost, Series};
use crate::stats::Estimate;
use crate::view::{Bar, Column, TableRow, copied_after_all, number, ratio, share, speed};
use haul_units::Size;
use haul_workers::worker::memory_sender::SendCall;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of one method, with pieces of one size, to one destination.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct LoanRow {
    /// `send`, `lend`, `lend, waiting for each` or `sendfile`.
    pub path: String,
    /// `tcp`, `udp`, or `udp to a sink`.
    pub to: String,
    /// The bytes that one call passes to the kernel.
    pub piece_bytes: u64,
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
    /// The share of the sent bytes that was copied. `send` copies all of them. For loans it is the
    /// share that the completions report; on a veth the receiving host makes that copy. `sendfile`
    /// copies none, which `haul bench send` proves.
    pub copied_percent: Option<f64>,
    /// The share of the datagrams that reached the receiving program; `null` for a stream, and if
    /// no program receives.
    pub delivered_percent: Option<Estimate>,
    /// Payload that was sent.
    pub throughput_bits_per_second: Option<Estimate>,
    /// CPU time of the sending host per sent MiB, interrupts included.
    pub sender_us_per_mib: Option<Estimate>,
    /// CPU time of the receiving host per sent MiB; `null` without a receiver.
    pub receiver_us_per_mib: Option<Estimate>,
    /// System calls of the sender per MiB, including those that read completions.
    pub syscalls_per_mib: Option<f64>,
    /// `sender_us_per_mib` divided by `sender_us_per_mib` of `send` in the same round.
    pub send_ratio: Option<Estimate>,
    /// `sender_us_per_mib` divided by `sender_us_per_mib` of `sendfile` in the same round.
    pub sendfile_ratio: Option<Estimate>,
    /// The cost in each round.
    #[serde(default)]
    pub round_costs: Vec<RoundCost>,
}

/// The row of a series; `all` holds the series that it is compared with.
pub(super) fn of(
    series: &Series<LoanCase, LoanRound>,
    all: &[Series<LoanCase, LoanRound>],
) -> LoanRow {
    let LoanCase { destination, method, piece } = series.case;
    let row_of = |name: &str| {
        all.iter().find(|other| {
            let case = other.case;
            case.destination == destination
                && case.piece == piece
                && case.method.name() == name
                && !other.rounds.is_empty()
        })
    };
    let ratio_to = |name: &str| {
        let cost = |round: &LoanRound| round.costs.sender_us_per_mib;
        series.ratio_with_deviation(row_of(name)?, destination.run_deviation(), cost)
    };
    let sum = |of: fn(&LoanRound) -> u64| {
        series.rounds.iter().map(|(_, round)| of(round)).sum::<u64>() as f64
    };
    let (copied, zero_copied) =
        (sum(|round| round.sent.copied_bytes), sum(|round| round.sent.zero_copied_bytes));
    let copied_percent = match method {
        LoanMethod::Memory(SendCall::Send | SendCall::Segments | SendCall::Group) => Some(100.0),
        // A veth passes a file's pages on without a copy; `haul bench send` proves it.
        LoanMethod::Sendfile => Some(0.0),
        LoanMethod::Memory(_) => {
            let completed = copied + zero_copied;
            (completed > 0.0).then(|| 100.0 * copied / completed)
        }
    };
    let has_receiver = destination != super::Destination::Sink;
    LoanRow {
        path: method.name().into(),
        to: destination.name().into(),
        piece_bytes: piece.0,
        rounds: series.rounds.len(),
        disturbed_percent: series.disturbed_percent,
        interrupts_per_mib: series.estimate_of_some(|round| round.costs.both_interrupts_per_mib()),
        full_speed_bits_per_second: None,
        refused: series.failure_reason(),
        copied_percent: copied_percent.filter(|_| !series.rounds.is_empty()),
        // A stream loses nothing: a difference is data that is still in its buffers.
        delivered_percent: series
            .estimate(|round| 100.0 * round.delivered_share.min(1.0))
            .filter(|_| destination == super::Destination::Udp),
        throughput_bits_per_second: series.estimate(|round| round.costs.bytes_per_second * 8.0),
        sender_us_per_mib: series.estimate(|round| round.costs.sender_us_per_mib),
        receiver_us_per_mib: series
            .estimate(|round| round.costs.receiver_us_per_mib)
            .filter(|_| has_receiver),
        round_costs: series.round_costs(
            |round| round.costs.sender_us_per_mib,
            |round| has_receiver.then_some(round.costs.receiver_us_per_mib),
        ),
        syscalls_per_mib: series
            .estimate(|round| round.sent.calls as f64 / round.sent.mib())
            .map(|estimate| estimate.median),
        send_ratio: ratio_to("send"),
        sendfile_ratio: ratio_to("sendfile"),
    }
}

const COLUMNS: [Column<LoanRow>; 11] = [
    Column::narrow("method", |row| row.path.clone()),
    Column::narrow("sender\nµs/MiB", |row| number(row.sender_us_per_mib, 1.0, 0)),
    Column::narrow("× send\n(interval)", |row| ratio(row.send_ratio)),
    Column::narrow("copied\n%", |row| share(row.copied_percent)),
    Column::narrow("Gbit/s", |row| number(row.throughput_bits_per_second, 1e9, 1)),
    Column::wide("× sendfile\n(interval)", |row| {
        row.sendfile_ratio.map_or(String::new(), |estimate| ratio(Some(estimate)))
    }),
    Column::wide("receiver\nµs/MiB", |row| number(row.receiver_us_per_mib, 1.0, 0)),
    Column::wide("arrived\n%", |row| number(row.delivered_percent, 1.0, 0)),
    Column::wide("calls\n/MiB", |row| {
        row.syscalls_per_mib.map_or("?".into(), |calls| format!("{calls:.1}"))
    }),
    Column::wide("inter-\nrupts", |row| number(row.interrupts_per_mib, 1.0, 0)),
    Column::wide("full speed\nGbit/s", |row| speed(row.full_speed_bits_per_second)),
];

impl TableRow for LoanRow {
    const COLUMNS: &'static [Column<Self>] = &COLUMNS;
    const BASELINES: &'static [&'static str] = &["send"];
    const RUN_DEVIATION: f64 = TCP_RUN_DEVIATION;
    const COLUMNS_EXPLAINED: &'static str = "\
        sender µs/MiB: CPU time of the sending host for each MiB, interrupts included. × send: \
        that cost divided by a plain send's, with its 95 % interval. copied %: bytes that the \
        kernel copied although they were lent.";
    const LEGEND: &'static [(&'static str, &'static str)] =
        &[("sender", "sending host"), ("receiver", "receiving host")];
    const UNIT: &'static str =
        "µs of CPU per MiB sent, interrupts included. Each size has a scale of its own.";

    fn name(&self) -> String {
        self.path.clone()
    }

    fn round_costs(&self) -> &[RoundCost] {
        &self.round_costs
    }

    fn group(&self) -> String {
        let to = match self.to.as_str() {
            "tcp" => "TCP to the other host",
            "udp" => "UDP to the other host",
            _ => "UDP to a device that drops packets",
        };
        format!("{to}, {} at a time", Size(self.piece_bytes))
    }

    fn axis_key(&self) -> u64 {
        self.piece_bytes
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
        let is_loan = self.path.starts_with("lend");
        let copied = if is_loan { copied_after_all(self.copied_percent) } else { String::new() };
        [
            Bar::of("sender", self.sender_us_per_mib, copied),
            Bar::of("receiver", self.receiver_us_per_mib, String::new()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
