//! The experiment `interrupts`: packets per interrupt and per poll, their cost, and the effect of
//! grouping them.
//!
//! The receiving side varies GRO, deferred interrupts, threaded NAPI and busy polling. The sending
//! side varies datagrams per call: one, several, or one large packet that the device segments;
//! copied or lent.
//!
//! A veth does not raise interrupts. The interrupts counted here are the calls by which
//! the other CPU passes packets to the host. All other interrupts of that CPU except the timer's
//! are included.

use crate::congestion;
use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flow::{Flow, FlowError, FlowNode, Sample, WARM_UP};
use crate::rounds::{Costs, Experiment, Pace, Part, Progress, Run};
use crate::topology::Loads;
use haul::SendMethod;
use haul_lab::{Lab, Reception, Settings};
use haul_soak::Meter;
use haul_units::Size;
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::memory_sender::{MemorySendTask, Schedule, SendCall};
use haul_workers::worker::ping_pong::{EchoTask, Latency, PingTask};
use haul_workers::worker::socket::SocketOptions;
use haul_workers::worker::{
    Outcome, Task, datagram_sink::DatagramSinkTask, receiver::ReceiveTask, sender::SendTask,
};
use haul_workers::workload::{Opened, Workload};
use std::sync::atomic::AtomicBool;

mod answer;
mod row;
mod verdict;

pub use row::InterruptsRow;

/// The report of the experiment `interrupts`.
pub type InterruptsReport = crate::report::Report<InterruptsRow>;

/// The payload of an Ethernet packet of 1500 bytes, without the headers of IPv4 and UDP.
const DATAGRAM_BYTES: u16 = 1472;
/// The payload of a TCP packet of 1500 bytes, without 52 bytes of headers.
const SEGMENT_BYTES: f64 = 1448.0;
/// Datagrams in a group: as many as fit the 64 KiB of a packet that the device segments.
const GROUP_DATAGRAMS: usize = 44;
/// Datagrams per second when the receiver's settings are compared: a few tenths of what the
/// receiver can handle.
const DATAGRAMS_PER_SECOND: u32 = 20_000;
/// Groups per second when the send calls are compared: 100,000 datagrams, which every call can send
/// and a receiver can handle. At full speed most would be dropped, and a datagram that is dropped
/// early costs the sender less.
const GROUPS_PER_SECOND: u32 = 100_000 / GROUP_DATAGRAMS as u32;
/// The size of a small message.
const MESSAGE_SIZE: Size = Size(64);
/// The time that a receiver polls before it waits.
const BUSY_POLL_US: u32 = 50;
/// The memory that the sender of the stream sends repeatedly.
const STREAM_SIZE: Size = Size(1 << 20);

/// A configuration of the receiving host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReceiveSetting {
    name: &'static str,
    reception: Reception,
    busy_poll_us: u32,
    /// The commands that apply it to a device DEV.
    pub commands: &'static str,
}

/// The lab's default, then each kind of interrupt mitigation.
const RECEIVE_SETTINGS: [ReceiveSetting; 5] = {
    let plain = Reception { gro: false, defer_hard_irqs: 0, flush_timeout_ns: 0, threaded: false };
    let gro = Reception { gro: true, ..plain };
    [
        ReceiveSetting {
            name: "plain",
            reception: plain,
            busy_poll_us: 0,
            commands: "ethtool -K DEV gro off",
        },
        ReceiveSetting {
            name: "gro",
            reception: gro,
            busy_poll_us: 0,
            commands: "ethtool -K DEV gro on",
        },
        ReceiveSetting {
            name: "gro, deferred",
            reception: Reception { defer_hard_irqs: 2, flush_timeout_ns: 50_000, ..gro },
            busy_poll_us: 0,
            commands: "ethtool -K DEV gro on; echo 2 > /sys/class/net/DEV/napi_defer_hard_irqs; \
                       echo 50000 > /sys/class/net/DEV/gro_flush_timeout",
        },
        ReceiveSetting {
            name: "gro, threaded",
            reception: Reception { threaded: true, ..gro },
            busy_poll_us: 0,
            commands: "ethtool -K DEV gro on; echo 1 > /sys/class/net/DEV/threaded",
        },
        ReceiveSetting {
            name: "gro, busy polling",
            reception: gro,
            busy_poll_us: BUSY_POLL_US,
            commands: "ethtool -K DEV gro on; SO_BUSY_POLL 50 on the socket, or \
                       sysctl -w net.core.busy_read=50",
        },
    ]
};

/// The traffic to the receiving host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Traffic {
    /// Groups of datagrams at a fixed rate, to compare the sender's calls.
    Transmit(SendCall),
    /// Datagrams at a fixed rate.
    Datagrams,
    /// A TCP stream at full speed, segmented into packets of 1500 bytes before the device.
    Stream,
    /// Round trips of one small message at a time.
    Messages,
}

/// One row: traffic under a setting of the receiving host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InterruptsCase {
    setting: ReceiveSetting,
    traffic: Traffic,
}

/// The calls that pass datagrams to the kernel.
const SEND_CALLS: [SendCall; 5] =
    [SendCall::Send, SendCall::Lend, SendCall::Group, SendCall::Segments, SendCall::LendSegments];

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct InterruptsParameters {
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// The sockets' congestion control; `None` for the first of cubic and reno that can be set.
    pub congestion: Option<String>,
    /// Whether to measure fewer rows: copying calls, GRO and deferred interrupts.
    pub is_quick: bool,
}

fn cases(is_quick: bool) -> Vec<InterruptsCase> {
    let transmit = SEND_CALLS
        .into_iter()
        .filter(|call| !is_quick || !matches!(call, SendCall::Lend | SendCall::LendSegments))
        .map(|call| InterruptsCase {
            setting: RECEIVE_SETTINGS[0],
            traffic: Traffic::Transmit(call),
        });
    let receive = [Traffic::Datagrams, Traffic::Stream, Traffic::Messages].into_iter().flat_map(
        move |traffic| {
            let cases = RECEIVE_SETTINGS.map(|setting| InterruptsCase { setting, traffic });
            // Only the receiver of datagrams supports busy polling.
            cases
                .into_iter()
                .take(if is_quick { 3 } else { cases.len() })
                .filter(move |case| case.setting.busy_poll_us == 0 || traffic == Traffic::Datagrams)
        },
    );
    transmit.chain(receive).collect()
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &InterruptsParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<InterruptsReport, BenchError> {
    parameters.pace.check()?;
    let started = crate::report::now();
    let lab = Lab::open(&Settings::default().with_mtu(1500))?;
    let congestion = congestion::choose(&lab, parameters.congestion.as_deref())?;
    let mut run = Run::new(&lab, parameters.pace)?;
    let memory = Workload::Memory(STREAM_SIZE).open()?;
    let mut experiment =
        InterruptsExperiment { lab: &lab, memory, congestion, pace: parameters.pace };
    let cases = cases(parameters.is_quick);
    let rows = run.measure_cases(&mut experiment, cases, is_stopped, progress)?;
    let verdict = verdict::of(&rows, &run);
    let rows = rows.iter().map(|series| row::of(series, &rows)).collect();
    let mut report =
        InterruptsReport::of_run("interrupts", started, run, &experiment.congestion, None, rows);
    report.add_verdicts(verdict);
    report.answers = answer::of(&report);
    Ok(report)
}

impl InterruptsCase {
    fn name(&self) -> String {
        match self.traffic {
            Traffic::Transmit(call) => row::send_call_name(call).into(),
            _ => self.setting.name.into(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct InterruptsRound {
    costs: Costs,
    /// Packets sent and packets received per second. They differ if datagrams are lost.
    sent_per_second: f64,
    received_per_second: f64,
    counters: Counters,
    /// The time in which `counters` were counted.
    counted_seconds: f64,
    sent: Outcome,
    latency: Option<Latency>,
    is_transmit: bool,
}

impl InterruptsRound {
    /// The sending host's cost per 1000 packets sent.
    fn sender_us_per_1000(&self) -> f64 {
        self.costs.sender.load_percent / 100.0 * 1e6 / (self.sent_per_second / 1000.0)
    }

    /// The receiving host's cost per 1000 packets received.
    fn receiver_us_per_1000(&self) -> f64 {
        self.costs.receiver.load_percent / 100.0 * 1e6 / (self.received_per_second / 1000.0)
    }

    /// The cost of both hosts per 1000 packets.
    fn both_us_per_1000(&self) -> f64 {
        self.sender_us_per_1000() + self.receiver_us_per_1000()
    }

    /// The cost by which rows of one kind of traffic are compared: the cost of the host whose
    /// configuration differs.
    fn cost(&self) -> f64 {
        if self.is_transmit { self.sender_us_per_1000() } else { self.receiver_us_per_1000() }
    }
}

struct InterruptsExperiment<'a> {
    lab: &'a Lab,
    memory: Opened,
    congestion: String,
    pace: Pace,
}

impl InterruptsExperiment<'_> {
    /// The tasks of the receiving and of the sending worker.
    fn tasks(&self, case: &InterruptsCase) -> (Task, Task) {
        let send_task = |call, datagrams: usize, schedule| {
            Task::Give(MemorySendTask {
                is_tcp: false,
                by: call,
                piece_bytes: datagrams * usize::from(DATAGRAM_BYTES),
                datagram_bytes: DATAGRAM_BYTES,
                to: None,
                beat: schedule,
            })
        };
        let receive_task =
            || Task::Take(DatagramSinkTask { busy_poll_us: case.setting.busy_poll_us });
        match case.traffic {
            // The same datagrams at the same times for every call, in as many calls as it needs.
            Traffic::Transmit(call) => {
                let is_single =
                    matches!(call, SendCall::Send | SendCall::Lend | SendCall::LendAndWait);
                let (datagrams, pieces) =
                    if is_single { (1, GROUP_DATAGRAMS) } else { (GROUP_DATAGRAMS, 1) };
                let schedule =
                    Schedule::Batches { pieces: pieces as u32, per_second: GROUPS_PER_SECOND };
                (receive_task(), send_task(call, datagrams, schedule))
            }
            Traffic::Datagrams => (
                receive_task(),
                send_task(
                    SendCall::Send,
                    1,
                    Schedule::Exact { pieces_per_second: DATAGRAMS_PER_SECOND },
                ),
            ),
            Traffic::Stream => (
                Task::Receive(ReceiveTask::plainly()),
                Task::Send(SendTask {
                    path: TestedMethod::from(SendMethod::ReadSend).name().into(),
                    chunk_bytes: 64 << 10,
                    cork: false,
                    rate_bits_per_second: None,
                    pieces: self.memory.handed_over(),
                    plan: None,
                }),
            ),
            Traffic::Messages => (
                Task::Answer(EchoTask {}),
                Task::Ask(PingTask { message_bytes: MESSAGE_SIZE.0 as usize }),
            ),
        }
    }
}

impl Experiment for InterruptsExperiment<'_> {
    type Case = InterruptsCase;
    type Round = InterruptsRound;

    fn name(&self, case: &InterruptsCase) -> String {
        case.name()
    }

    fn description(&self, case: &InterruptsCase) -> String {
        format!("{} ({})", case.name(), case.traffic.name())
    }

    fn measure(&mut self, case: &InterruptsCase, meter: &Meter) -> Result<Sample, FlowError> {
        let receiver = &self.lab.receiver;
        if self.lab.kind() == haul_lab::Kind::Loopback {
            return Err(FlowError::Refused("loopback has no device to configure".into()));
        }
        let refused = |error: haul_lab::LabError| FlowError::Refused(error.to_string());
        receiver.set_reception(case.setting.reception).map_err(refused)?;
        // A veth with segmentation offload passes large packets on as they are. Its peer then
        // neither polls nor merges packets.
        let is_transmit = matches!(case.traffic, Traffic::Transmit(_));
        self.lab.set_segmentation(is_transmit).map_err(refused)?;
        let (receive_task, send_task) = self.tasks(case);
        let flow = Flow {
            socket: SocketOptions::with_congestion(&self.congestion),
            nodes: vec![
                FlowNode { host: Endpoint::Lab(receiver), task: receive_task },
                FlowNode { host: Endpoint::Lab(&self.lab.sender), task: send_task },
            ],
            warm_up: WARM_UP,
            window: self.pace.window,
            program: None,
        };
        flow.run(Some(meter))
    }

    fn part(&self, case: &InterruptsCase) -> Option<Part> {
        let Traffic::Transmit(call) = case.traffic else { return None };
        verdict::CALLS.contains(&call).then(|| Part {
            question: case.traffic.name().into(),
            is_baseline: call == SendCall::Send,
        })
    }

    fn compared_cost(round: &InterruptsRound) -> f64 {
        round.cost()
    }

    fn evaluate(
        &self,
        case: &InterruptsCase,
        sample: &Sample,
        loads: &Loads,
    ) -> Option<InterruptsRound> {
        let [received, sent] = sample.outcomes.as_slice() else { return None };
        let is_transmit = matches!(case.traffic, Traffic::Transmit(_));
        let (sent_per_second, received_per_second) = match case.traffic {
            Traffic::Transmit(_) | Traffic::Datagrams => (
                sent.bytes_per_second() / f64::from(DATAGRAM_BYTES),
                received.messages as f64 / received.seconds,
            ),
            Traffic::Stream => [received.bytes_per_second() / SEGMENT_BYTES; 2].into(),
            Traffic::Messages => [received.bytes_per_second() / MESSAGE_SIZE.0 as f64; 2].into(),
        };
        let bytes_per_second =
            if received.bytes > 0 { received.bytes_per_second() } else { sent.bytes_per_second() };
        let account = sample.account_of(self.lab.receiver.cpu())?;
        Some(InterruptsRound {
            costs: Costs::of(loads, bytes_per_second)?,
            sent_per_second,
            received_per_second,
            counters: account.counters,
            counted_seconds: account.seconds,
            sent: *sent,
            latency: sent.latency,
            is_transmit,
        })
    }
}
