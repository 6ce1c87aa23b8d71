//! The experiment `loan`: the size from which a loan to the kernel costs less than a copy. It also
//! measures the cost of waiting for each loan, and the gain of loans over `sendfile`.
//!
//! There are two destinations. On the veth the bytes reach the other host, and the kernel copies
//! what was lent, because that host might keep it. The rows report this copy and its cost. The
//! other device accepts packets as a network card does and drops them. There nothing lent is
//! copied, which shows the gain of loans where zero-copy works. TCP needs a peer that acknowledges,
//! so only datagrams are sent to that device.

use crate::congestion;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flow::{Flow, FlowError, FlowNode, Sample, WARM_UP};
use crate::regime::{self, FullSpeedThroughputs, Reading};
use crate::rounds::{Costs, Experiment, Pace, Part, Progress, Run, Series};
use crate::stats::RUN_TO_RUN_DEVIATION;
use crate::topology::Loads;
use haul::SendMethod;
use haul_lab::{Lab, Settings};
use haul_soak::Meter;
use haul_units::Size;
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::memory_sender::{MemorySendTask, Schedule, SendCall};
use haul_workers::worker::{
    Outcome, Task, datagram_sink::DatagramSinkTask, receiver::ReceiveTask, sender::SendTask,
};
use haul_workers::workload::{Opened, Workload};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

mod answer;
mod row;
mod verdict;

#[cfg(test)]
pub(crate) use verdict::{REAL_CARD, copied_statement};

pub use row::LoanRow;

/// The report of the experiment `loan`.
pub type LoanReport = crate::report::Report<LoanRow>;

/// The payload of a datagram at MTU 9000, without the headers of IPv4 and UDP.
const DATAGRAM_BYTES: u16 = 8972;
/// The largest amount that one call sends with `UDP_SEGMENT`: seven datagrams fit 64 KiB.
const SEGMENTED_SIZE: Size = Size(7 * DATAGRAM_BYTES as u64);
/// Batches per second to the other host, about half a Gbit/s in all. At full speed most datagrams
/// would be dropped on the way, and a datagram that is dropped early costs less.
const BATCHES_PER_SECOND: u32 = 1000;
/// The port of the discard service. No process listens on it.
const DISCARD_PORT: u16 = 9;
/// The largest accepted piece.
const PIECE_MAX: Size = Size(4 << 20);

/// The destination and the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Destination {
    /// A TCP stream to the other host.
    Tcp,
    /// UDP datagrams to the other host.
    Udp,
    /// UDP datagrams to a device that drops them.
    Sink,
}

/// The deviation of ratios over TCP from run to run: a lent send is in one regime of interrupts or
/// another. Source: docs/measurements/repeatability.md, "Two reports of one build".
const TCP_RUN_DEVIATION: f64 = 0.25;

impl Destination {
    /// The deviation of the logarithm of a ratio of two rows from run to run.
    fn run_deviation(self) -> f64 {
        match self {
            Self::Tcp => TCP_RUN_DEVIATION,
            Self::Udp | Self::Sink => RUN_TO_RUN_DEVIATION,
        }
    }
}

/// How the sender passes memory, or a file, to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LoanMethod {
    Memory(SendCall),
    Sendfile,
}

/// One row: a method, a destination and a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LoanCase {
    destination: Destination,
    method: LoanMethod,
    piece: Size,
}

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct LoanParameters {
    /// The sizes of a loan.
    pub pieces: Vec<Size>,
    /// Whether to measure only the rows of the verdict: `send` and `lend`.
    pub verdict_only: bool,
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// The sockets' congestion control; `None` for the first of cubic and reno that can be set.
    pub congestion: Option<String>,
}

impl LoanParameters {
    /// The default: sizes from 1 KiB, less than a page, to 1 MiB.
    pub fn new(pace: Pace) -> Self {
        let pieces = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20].map(Size);
        Self { pieces: pieces.into(), verdict_only: false, pace, congestion: None }
    }

    /// A short measurement: one size, and the rows of the verdict.
    pub fn quick(pace: Pace) -> Self {
        let pieces = vec![Size(64 << 10)];
        Self { pieces, verdict_only: true, ..Self::new(pace) }
    }

    fn cases(&self) -> Vec<LoanCase> {
        let mut cases = Vec::new();
        let mut pieces = self.pieces.clone();
        pieces.sort();
        for destination in [Destination::Tcp, Destination::Udp, Destination::Sink] {
            for &piece in &pieces {
                let segmented = |call: SendCall| match destination {
                    Destination::Tcp => Some(LoanMethod::Memory(call)),
                    // Larger pieces are segmented by the device, up to the largest amount of one
                    // call.
                    _ if piece.0 <= DATAGRAM_BYTES.into() => Some(LoanMethod::Memory(call)),
                    _ => match call {
                        SendCall::Send => Some(LoanMethod::Memory(SendCall::Segments)),
                        SendCall::Lend => Some(LoanMethod::Memory(SendCall::LendSegments)),
                        _ => None,
                    },
                };
                let calls = [SendCall::Send, SendCall::Lend, SendCall::LendAndWait]
                    .into_iter()
                    .filter_map(segmented);
                let is_tcp = destination == Destination::Tcp;
                let sendfile = is_tcp.then_some(LoanMethod::Sendfile);
                let size = if is_tcp { piece } else { piece.min(SEGMENTED_SIZE) };
                let is_wanted = |method: &LoanMethod| {
                    !self.verdict_only || matches!(method.name(), "send" | "lend")
                };
                for method in calls.chain(sendfile).filter(is_wanted) {
                    let case = LoanCase { destination, method, piece: size };
                    if !cases.contains(&case) {
                        cases.push(case);
                    }
                }
            }
        }
        cases
    }
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &LoanParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<LoanReport, BenchError> {
    parameters.pace.check()?;
    if let Some(piece) =
        parameters.pieces.iter().find(|piece| !(Size(1)..=PIECE_MAX).contains(piece))
    {
        return Err(BenchError::BadInput(format!("piece {piece} is outside 1B to {PIECE_MAX}")));
    }
    let started = crate::report::now();
    let lab = Lab::open(&Settings::default())?;
    let congestion = congestion::choose(&lab, parameters.congestion.as_deref())?;
    let mut run = Run::new(&lab, parameters.pace)?;
    let sink = lab
        .add_sink()
        .map(|address| SocketAddr::new(address, DISCARD_PORT))
        .map_err(|error| error.to_string());
    let file = Workload::Files { count: 1, average: PIECE_MAX }.open()?;
    let mut experiment = LoanExperiment {
        lab: &lab,
        sink,
        file,
        congestion,
        pace: parameters.pace,
        piece_max: parameters.pieces.iter().copied().max().unwrap_or(PIECE_MAX),
        full_speeds: FullSpeedThroughputs::default(),
    };
    let cases = parameters.cases();
    let rows = run.measure_cases(&mut experiment, cases, is_stopped, progress)?;
    let row = |series: &Series<LoanCase, LoanRound>| LoanRow {
        full_speed_bits_per_second: experiment.full_speeds.bits_per_second(&series.case),
        ..row::of(series, &rows)
    };
    let verdict = verdict::of(&rows, &run);
    let rows = rows.iter().map(row).collect();
    let mut report = LoanReport::of_run("loan", started, run, &experiment.congestion, None, rows);
    report.add_verdicts(verdict);
    report.answers = answer::of(&report);
    Ok(report)
}

#[derive(Debug, Clone, Copy)]
struct LoanRound {
    costs: Costs,
    sent: Outcome,
    /// The share of the sent bytes that was received.
    delivered_share: f64,
}

struct LoanExperiment<'a> {
    lab: &'a Lab,
    /// An address behind the device that drops packets, or the reason why there is none.
    sink: Result<SocketAddr, String>,
    file: Opened,
    congestion: String,
    pace: Pace,
    piece_max: Size,
    full_speeds: FullSpeedThroughputs<LoanCase>,
}

impl LoanExperiment<'_> {
    /// The largest piece of a destination, which a verdict is about.
    fn largest_piece(&self, destination: Destination) -> Size {
        match destination {
            Destination::Tcp => self.piece_max,
            Destination::Udp | Destination::Sink => self.piece_max.min(SEGMENTED_SIZE),
        }
    }
}

impl Experiment for LoanExperiment<'_> {
    type Case = LoanCase;
    type Round = LoanRound;

    fn name(&self, case: &LoanCase) -> String {
        case.method.name().into()
    }

    fn description(&self, case: &LoanCase) -> String {
        case.to_string()
    }

    fn measure(&mut self, case: &LoanCase, meter: &Meter) -> Result<Sample, FlowError> {
        let to = match case.destination {
            Destination::Sink => Some(self.sink.clone().map_err(FlowError::Refused)?),
            _ => None,
        };
        let send_task = match case.method {
            LoanMethod::Sendfile => Task::Send(SendTask {
                path: TestedMethod::from(SendMethod::Sendfile).name().into(),
                chunk_bytes: case.piece.0 as usize,
                cork: false,
                rate_bits_per_second: None,
                pieces: self.file.handed_over(),
                plan: None,
            }),
            LoanMethod::Memory(by) => Task::Give(MemorySendTask {
                is_tcp: case.destination == Destination::Tcp,
                by,
                piece_bytes: case.piece.0 as usize,
                datagram_bytes: DATAGRAM_BYTES,
                to,
                beat: match case.destination {
                    Destination::Udp => Schedule::Batches {
                        pieces: (SEGMENTED_SIZE.0 / case.piece.0).max(1) as u32,
                        per_second: BATCHES_PER_SECOND,
                    },
                    _ => Schedule::Free,
                },
            }),
        };
        let (lab, window) = (self.lab, self.pace.window);
        let socket = Reading::Held.socket(&self.congestion);
        let flow = |receive_task: Option<Task>| {
            let receiver =
                receive_task.map(|task| FlowNode { host: Endpoint::Lab(&lab.receiver), task });
            let sender = FlowNode { host: Endpoint::Lab(&lab.sender), task: send_task.clone() };
            let nodes = receiver.into_iter().chain([sender]).collect();
            Flow { nodes, socket: socket.clone(), warm_up: WARM_UP, window, program: None }
        };
        match case.destination {
            Destination::Tcp => {
                let stream = |receiving| flow(Some(Task::Receive(receiving)));
                let unthrottled = stream(ReceiveTask::plainly());
                let full_speed = self.full_speeds.get_or_measure(case, &unthrottled)?;
                let warm_up = regime::warm_up(full_speed);
                Flow { warm_up, ..stream(regime::held(&ReceiveTask::plainly(), full_speed)) }
            }
            Destination::Udp => flow(Some(Task::Take(DatagramSinkTask { busy_poll_us: 0 }))),
            Destination::Sink => flow(None),
        }
        .run(Some(meter))
    }

    fn costs(round: &LoanRound) -> Option<&Costs> {
        Some(&round.costs)
    }

    fn part(&self, case: &LoanCase) -> Option<Part> {
        let name = case.method.name();
        let is_largest = case.piece == self.largest_piece(case.destination);
        let is_asked = case.destination != Destination::Udp && is_largest;
        (is_asked && matches!(name, "send" | "lend")).then(|| Part {
            question: format!("{} {}", case.destination.name(), case.piece),
            is_baseline: name == "send",
        })
    }

    fn compared_cost(round: &LoanRound) -> f64 {
        round.costs.sender_us_per_mib
    }

    fn evaluate(&self, _: &LoanCase, sample: &Sample, loads: &Loads) -> Option<LoanRound> {
        let (sent, received) = (sample.outcomes.last()?, sample.outcomes.first()?);
        let costs = Costs::of(loads, sent.bytes_per_second())?;
        Some(LoanRound {
            costs,
            sent: *sent,
            delivered_share: received.bytes_per_second() / sent.bytes_per_second(),
        })
    }
}

impl LoanMethod {
    fn name(self) -> &'static str {
        match self {
            Self::Memory(SendCall::Send | SendCall::Group | SendCall::Segments) => "send",
            Self::Memory(SendCall::Lend | SendCall::LendSegments) => "lend",
            Self::Memory(SendCall::LendAndWait) => "lend, waiting for each",
            Self::Sendfile => "sendfile",
        }
    }
}

impl Destination {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sink => "udp to a sink",
        }
    }
}

impl fmt::Display for LoanCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {} {}", self.destination.name(), self.piece, self.method.name())
    }
}
