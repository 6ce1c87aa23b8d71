//! The experiment `forward`: the CPU cost of each forward method on the forwarder's host, and the
//! latency of small messages through the forwarder.
//!
//! The forwarder runs alone on the lab's sending host, or on the other machine if there are two.
//! The source and the destination of the stream share the other host. So at full speed these two
//! limit the throughput, and the rows are compared by the forwarder's load per MiB.

use crate::congestion;
use crate::error::BenchError;
use crate::flow::{Flow, FlowError, FlowNode, Sample, WARM_UP};
use crate::pair::Pair;
use crate::regime::{self, FullSpeedThroughputs, Reading};
use crate::rounds::{Costs, Experiment, Pace, Part, Progress, Run, Series};
use crate::topology::{Loads, Topology};
use haul::SendMethod;
use haul_lab::{Lab, Settings};
use haul_soak::Meter;
use haul_units::{Rate, Size};
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::forwarder::ForwardTask;
use haul_workers::worker::ping_pong::{EchoTask, Latency, PingTask};
use haul_workers::worker::tls_sender::TlsSendTask;
use haul_workers::worker::{Outcome, Task, receiver::ReceiveTask, sender::SendTask};
use haul_workers::workload::{Opened, Workload};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

mod answer;
pub use haul_workers::forward_method as method;
mod proof;
mod row;
mod verdict;

use method::TestedForwardMethod;
pub use row::ForwardRow;

/// The report of the experiment `forward`.
pub type ForwardReport = crate::report::Report<ForwardRow>;

/// The memory that the source sends repeatedly in a bulk transfer. It stays in the source's cache.
const SENT_SIZE: Size = Size(1 << 20);
/// The bytes that one call sends.
const CHUNK_BYTES: usize = 64 << 10;
/// The largest accepted buffer or pipe.
const BUFFER_MAX: Size = Size(64 << 20);
/// The largest accepted message. A message is sent back while its rest still arrives, so both parts
/// must fit the sockets' buffers.
const MESSAGE_MAX: Size = Size(256 << 10);

/// The traffic through the forwarder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Traffic {
    /// A bulk transfer in one direction, at full speed or at the requested rate.
    Bulk,
    /// A bulk transfer whose source sends TLS; the forwarder decrypts it.
    Tls,
    /// Round trips of one message of this size at a time.
    Messages(Size),
}

/// One row: a method under conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ForwardCase {
    /// The forward method.
    pub method: TestedForwardMethod,
    /// The size of the pipe or the buffer; `None` if the method has none or chooses it.
    pub buffer: Option<Size>,
    /// The traffic.
    pub traffic: Traffic,
}

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct ForwardParameters {
    /// The forward methods.
    pub methods: Vec<TestedForwardMethod>,
    /// The sizes of pipes and buffers.
    pub buffers: Vec<Size>,
    /// The kinds of traffic.
    pub traffic: Vec<Traffic>,
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// The rate that the sender holds in bulk transfers; `None` for full speed.
    pub rate: Option<Rate>,
    /// The other machine to measure with, instead of the lab's second host.
    pub peer: Option<Arc<Pair>>,
    /// The lab's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that can be set.
    pub congestion: Option<String>,
}

impl ForwardParameters {
    /// The default configuration of `haul bench forward`.
    pub fn new(pace: Pace) -> Self {
        Self {
            methods: TestedForwardMethod::ALL.into(),
            buffers: vec![Size(16 << 10), Size(64 << 10), Size(256 << 10), Size(1 << 20)],
            traffic: vec![
                Traffic::Bulk,
                Traffic::Messages(Size(64)),
                Traffic::Messages(Size(4 << 10)),
                Traffic::Messages(Size(64 << 10)),
            ],
            pace,
            rate: None,
            peer: None,
            mtu: Settings::default().mtu,
            congestion: None,
        }
    }

    /// A short measurement: one size of pipe and buffer, bulk transfers and small messages.
    pub fn quick(pace: Pace) -> Self {
        Self {
            buffers: vec![Size(256 << 10)],
            traffic: vec![Traffic::Bulk, Traffic::Messages(Size(64))],
            ..Self::new(pace)
        }
    }

    fn cases(&self) -> Vec<ForwardCase> {
        let mut cases = Vec::new();
        for &traffic in &self.traffic {
            for &method in self.methods.iter().filter(|&&method| traffic.suits(method)) {
                let buffers = match traffic {
                    _ if !method.has_buffer() => vec![None],
                    Traffic::Bulk | Traffic::Tls => {
                        self.buffers.iter().copied().map(Some).collect()
                    }
                    // A buffer that a message fits takes one call, so larger ones make no
                    // difference.
                    Traffic::Messages(size) => {
                        let smallest = self.buffers.iter().filter(|&&buffer| buffer >= size).min();
                        vec![smallest.or(self.buffers.last()).copied()]
                    }
                };
                cases.extend(buffers.into_iter().map(|buffer| ForwardCase {
                    method,
                    buffer,
                    traffic,
                }));
            }
        }
        cases
    }

    fn check(&self) -> Result<(), BenchError> {
        self.pace.check()?;
        for buffer in &self.buffers {
            if !(Size(4 << 10)..=BUFFER_MAX).contains(buffer) {
                return Err(BenchError::BadInput(format!(
                    "buffer {buffer} is outside 4KiB to {BUFFER_MAX}"
                )));
            }
        }
        for traffic in &self.traffic {
            if !self.methods.iter().any(|&method| traffic.suits(method)) {
                let suitable = TestedForwardMethod::ALL
                    .map(|method| traffic.suits(method).then(|| method.name()));
                return Err(BenchError::BadInput(format!(
                    "none of the paths forwards the traffic {traffic}: name one of {}",
                    suitable.into_iter().flatten().collect::<Vec<_>>().join(", ")
                )));
            }
            if let Traffic::Messages(size) = traffic
                && !(Size(1)..=MESSAGE_MAX).contains(size)
            {
                return Err(BenchError::BadInput(format!(
                    "message {size} is outside 1B to {MESSAGE_MAX}"
                )));
            }
        }
        Ok(())
    }
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &ForwardParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<ForwardReport, BenchError> {
    parameters.check()?;
    let started = crate::report::now();
    let lab;
    let topology = if let Some(pair) = parameters.peer.as_deref() {
        Topology::TurnedPair(pair)
    } else {
        lab = Lab::open(&Settings::default().with_mtu(parameters.mtu))?;
        Topology::Lab(&lab)
    };
    let congestion = congestion::choose(topology, parameters.congestion.as_deref())?;
    let mut run = Run::new(topology, parameters.pace)?;
    // The copy proof needs a lab: it cannot use the other machine's sockets.
    let proofs = topology
        .lab()
        .map_or_else(HashMap::new, |lab| proof::copied_percents(lab, &parameters.methods));
    let workload = Workload::Memory(SENT_SIZE).open()?;
    let mut experiment = ForwardExperiment {
        topology,
        workload,
        congestion,
        parameters,
        full_speeds: FullSpeedThroughputs::default(),
    };
    let cases = parameters.cases();
    let rows = run.measure_cases(&mut experiment, cases, is_stopped, progress)?;
    let row = |series: &Series<ForwardCase, ForwardRound>| ForwardRow {
        full_speed_bits_per_second: experiment.full_speeds.bits_per_second(&series.case),
        ..row::of(series, &rows, &proofs)
    };
    let verdict = verdict::of(&rows, &run, topology.has_two_hosts());
    let rows = rows.iter().map(row).collect();
    let mut report = ForwardReport::of_run(
        "forward",
        started,
        run,
        &experiment.congestion,
        parameters.rate,
        rows,
    );
    report.add_verdicts(verdict);
    report.answers = answer::of(&report);
    Ok(report)
}

#[derive(Debug, Clone, Copy)]
struct ForwardRound {
    /// `sender` is the forwarder's host and `receiver` the other host. Bytes count once, even if a
    /// message returns.
    costs: Costs,
    forwarded: Outcome,
    latency: Option<Latency>,
    messages_per_second: f64,
}

impl ForwardRound {
    fn us_per_message(&self) -> f64 {
        self.costs.sender.load_percent / 100.0 * 1e6 / self.messages_per_second
    }

    /// The cost that rows of one kind of traffic are compared by.
    fn cost(&self) -> f64 {
        if self.latency.is_some() { self.us_per_message() } else { self.costs.sender_us_per_mib }
    }
}

/// The experiment's state: hosts, workload and settings.
struct ForwardExperiment<'a> {
    topology: Topology<'a>,
    workload: Opened,
    congestion: String,
    parameters: &'a ForwardParameters,
    full_speeds: FullSpeedThroughputs<ForwardCase>,
}

impl Experiment for ForwardExperiment<'_> {
    type Case = ForwardCase;
    type Round = ForwardRound;

    fn name(&self, case: &ForwardCase) -> String {
        case.method.name().into()
    }

    fn description(&self, case: &ForwardCase) -> String {
        case.to_string()
    }

    fn measure(&mut self, case: &ForwardCase, meter: &Meter) -> Result<Sample, FlowError> {
        let forwarding =
            ForwardTask { by: case.method, buffer_bytes: case.buffer.map(|size| size.0 as usize) };
        let (sink, source) = match case.traffic {
            Traffic::Tls => {
                let sending = TlsSendTask {
                    chunk_bytes: CHUNK_BYTES,
                    rate_bits_per_second: self.parameters.rate.map(|rate| rate.0),
                };
                (None, Task::SendTls(sending))
            }
            Traffic::Bulk => {
                let sending = SendTask {
                    path: TestedMethod::from(SendMethod::ReadSend).name().into(),
                    chunk_bytes: CHUNK_BYTES,
                    cork: false,
                    rate_bits_per_second: self.parameters.rate.map(|rate| rate.0),
                    pieces: self.workload.handed_over(),
                    plan: None,
                };
                (None, Task::Send(sending))
            }
            Traffic::Messages(size) => (
                Some(Task::Answer(EchoTask {})),
                Task::Ask(PingTask { message_bytes: size.0 as usize }),
            ),
        };
        let (topology, window) = (self.topology, self.parameters.pace.window);
        let has_messages = case.traffic.message_size().is_some();
        let reading = if has_messages { Reading::Free } else { Reading::Held };
        let socket = reading.socket(&self.congestion);
        let flow = |sink: Task| Flow {
            socket: socket.clone(),
            nodes: vec![
                FlowNode { host: topology.receiver(), task: sink },
                FlowNode { host: topology.sender(), task: Task::Forward(forwarding.clone()) },
                FlowNode { host: topology.receiver(), task: source.clone() },
            ],
            warm_up: WARM_UP,
            window,
            program: None,
        };
        // If the sender holds a rate, that rate already determines the regime.
        let flow = match sink {
            Some(sink) => flow(sink),
            None if self.parameters.rate.is_some() => flow(Task::Receive(ReceiveTask::plainly())),
            None => {
                let receiving = |receiving| flow(Task::Receive(receiving));
                let unthrottled = receiving(ReceiveTask::plainly());
                let full_speed = self.full_speeds.get_or_measure(case, &unthrottled)?;
                // The buffers of two connections must be filled.
                let warm_up = 2 * regime::warm_up(full_speed);
                Flow { warm_up, ..receiving(regime::held(&ReceiveTask::plainly(), full_speed)) }
            }
        };
        flow.run(Some(meter))
    }

    /// Messages are excluded: their interrupts per MiB cannot be compared.
    fn costs(round: &ForwardRound) -> Option<&Costs> {
        round.latency.is_none().then_some(&round.costs)
    }

    fn part(&self, case: &ForwardCase) -> Option<Part> {
        verdict::CANDIDATES.contains(&case.method).then(|| Part {
            question: case.traffic.to_string(),
            is_baseline: case.method == TestedForwardMethod::Copy,
        })
    }

    fn compared_cost(round: &ForwardRound) -> f64 {
        round.cost()
    }

    fn evaluate(&self, case: &ForwardCase, sample: &Sample, loads: &Loads) -> Option<ForwardRound> {
        let [sink, forwarded, source] = sample.outcomes.as_slice() else { return None };
        let bytes_per_second = sink.bytes_per_second();
        let message_size = case.traffic.message_size();
        let messages_per_second = message_size.map_or(0.0, |size| bytes_per_second / size.0 as f64);
        let costs = Costs::of(loads, bytes_per_second)?;
        if message_size.is_some() && source.latency.is_none() {
            return None;
        }
        Some(ForwardRound {
            costs,
            forwarded: *forwarded,
            latency: source.latency,
            messages_per_second,
        })
    }
}

impl fmt::Display for ForwardCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, buffer, traffic } = self;
        match buffer {
            Some(buffer) => write!(formatter, "{method} {buffer} ({traffic})"),
            None => write!(formatter, "{method} ({traffic})"),
        }
    }
}

impl Traffic {
    /// The size of the messages; `None` for a bulk transfer.
    fn message_size(self) -> Option<Size> {
        match self {
            Self::Bulk | Self::Tls => None,
            Self::Messages(size) => Some(size),
        }
    }

    /// Whether this method forwards such traffic.
    fn suits(self, method: TestedForwardMethod) -> bool {
        (self == Self::Tls) == method.ends_tls()
    }

    /// The method whose cost the others are divided by.
    fn baseline(self) -> TestedForwardMethod {
        if self == Self::Tls { TestedForwardMethod::TlsCopy } else { TestedForwardMethod::Copy }
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bulk => formatter.write_str("bulk"),
            Self::Tls => formatter.write_str("tls"),
            Self::Messages(size) => write!(formatter, "messages:{size}"),
        }
    }
}

impl FromStr for Traffic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown =
            || format!("unknown traffic {text:?}: write bulk, tls or messages:SIZE (messages:64B)");
        match text.split_once(':') {
            None if text == "bulk" => Ok(Self::Bulk),
            None if text == "tls" => Ok(Self::Tls),
            Some(("messages", size)) => size.parse().map(Self::Messages).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}
