//! The experiment `interrupts`: how many packets the kernel handles for each interrupt and each poll, what that costs,
//! and what grouping them does: to the receiver (GRO, deferred interrupts, polling threads, busy polling) and to the
//! sender (one datagram a call, several, or one large one that the device cuts; copied or lent).
//!
//! A veth has no interrupt of its own. What interrupts a host of the lab is the call by which the other CPU hands it
//! packets, and that is what is counted here, with whatever else interrupts it but the clock.

use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::flow::{Flow, FlowError, Part, Sample, WARM_UP};
use crate::quantity::Size;
use crate::rounds::{Costs, Pace, Progress, Run, Series, Steps, Subject};
use crate::tested_method::TestedMethod;
use crate::topology::Loads;
use crate::worker::giver::{Beat, Giving, Hand};
use crate::worker::messages::{Answering, Asking, Latency};
use crate::worker::socket::SocketOptions;
use crate::worker::{Outcome, Task, receiver::Receiving, sender::Sending, taker::Taking};
use crate::workload::{Opened, Workload};
use crate::{BenchError, congestion};
use haul::SendMethod;
use haul_lab::{Lab, Reception, Settings};
use haul_soak::Meter;
use std::sync::atomic::AtomicBool;

mod answer;
mod row;

pub use row::InterruptsRow;

/// The result of `interrupts`.
pub type InterruptsReport = crate::report::Report<InterruptsRow>;

/// What an Ethernet packet carries after the headers of IPv4 and UDP.
const DATAGRAM_BYTES: u16 = 1472;
/// What a TCP packet of 1500 bytes carries after 52 of headers.
const SEGMENT_BYTES: f64 = 1448.0;
/// Datagrams in a group: as many as fit the 64 KiB of a packet that the device cuts.
const GROUP: usize = 44;
/// The rate at which datagrams come where the receiver's settings are compared: some tenths of what it could take.
const DATAGRAMS_PER_SECOND: u32 = 20_000;
/// Groups a second where the ways of sending are compared: 100,000 datagrams, which every way can send and a receiver can
/// take. At full speed most would be dropped, and what is dropped early costs the sender less.
const GROUPS_PER_SECOND: u32 = 100_000 / GROUP as u32;
/// A small message.
const MESSAGE: Size = Size(64);
/// How long a receiver polls before it waits.
const BUSY_POLL_US: u32 = 50;
/// What a stream is made of.
const SENT: Size = Size(1 << 20);

/// How the receiving host is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    name: &'static str,
    reception: Reception,
    busy_poll_us: u32,
    /// The commands that set it on a device DEV, and what it risks.
    pub how: &'static str,
}

/// The lab's own setting, then each way of mitigation.
const SETTINGS: [Setting; 5] = {
    let plain = Reception { gro: false, defer_hard_irqs: 0, flush_timeout_ns: 0, threaded: false };
    let gro = Reception { gro: true, ..plain };
    [
        Setting { name: "plain", reception: plain, busy_poll_us: 0, how: "ethtool -K DEV gro off" },
        Setting { name: "gro", reception: gro, busy_poll_us: 0, how: "ethtool -K DEV gro on" },
        Setting {
            name: "gro, deferred",
            reception: Reception { defer_hard_irqs: 2, flush_timeout_ns: 50_000, ..gro },
            busy_poll_us: 0,
            how: "ethtool -K DEV gro on; echo 2 > /sys/class/net/DEV/napi_defer_hard_irqs; echo 50000 > /sys/class/net/DEV/gro_flush_timeout",
        },
        Setting {
            name: "gro, threaded",
            reception: Reception { threaded: true, ..gro },
            busy_poll_us: 0,
            how: "ethtool -K DEV gro on; echo 1 > /sys/class/net/DEV/threaded",
        },
        Setting {
            name: "gro, busy polling",
            reception: gro,
            busy_poll_us: BUSY_POLL_US,
            how: "ethtool -K DEV gro on; SO_BUSY_POLL 50 on the socket, or sysctl -w net.core.busy_read=50",
        },
    ]
};

/// What comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Traffic {
    /// Groups of datagrams at a held rate: the sender is what is compared.
    Transmit(Hand),
    /// Datagrams at a held rate.
    Datagrams,
    /// A TCP stream, cut into packets of 1500 bytes before it leaves, at full speed.
    Stream,
    /// One small message at a time, there and back.
    Messages,
}

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InterruptsCase {
    setting: Setting,
    traffic: Traffic,
}

/// Each way of handing datagrams to the kernel.
const HANDS: [Hand; 5] = [Hand::Send, Hand::Lend, Hand::Group, Hand::Segments, Hand::LendSegments];

/// What to run.
#[derive(Debug, Clone)]
pub struct InterruptsPlan {
    /// How often and how long.
    pub pace: Pace,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
}

fn cases() -> Vec<InterruptsCase> {
    let transmit =
        HANDS.map(|hand| InterruptsCase { setting: SETTINGS[0], traffic: Traffic::Transmit(hand) });
    let receive =
        [Traffic::Datagrams, Traffic::Stream, Traffic::Messages].into_iter().flat_map(|traffic| {
            let cases = SETTINGS.map(|setting| InterruptsCase { setting, traffic });
            // Only a taker of datagrams has a socket that can be told to poll.
            cases
                .into_iter()
                .filter(move |case| case.setting.busy_poll_us == 0 || traffic == Traffic::Datagrams)
        });
    transmit.into_iter().chain(receive).collect()
}

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then reported.
pub fn run(
    plan: &InterruptsPlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<InterruptsReport, BenchError> {
    plan.pace.check()?;
    let started = crate::now();
    let lab = Lab::open(&Settings { mtu: 1500, cpus: None })?;
    let congestion = congestion::choose(&lab, plan.congestion.as_deref())?;
    let mut run = Run::new(&lab, plan.pace)?;
    let memory = Workload::Memory(SENT).open()?;
    let mut packets = Packets { lab: &lab, memory, congestion, pace: plan.pace };
    let mut rows: Vec<Series<InterruptsCase, InterruptsRound>> =
        cases().into_iter().map(Series::new).collect();
    let mut steps = Steps::new(run.steps(rows.len()), is_stopped, progress);
    run.all(&mut packets, &mut rows, &mut steps)?;
    run.warn(
        &rows,
        |case| format!("{} ({})", case.name(), case.traffic.name()),
        InterruptsRound::cost,
    );
    let rows = rows.iter().map(|series| row::of(series, &rows)).collect();
    let mut report =
        InterruptsReport::of_run("interrupts", started, run, &packets.congestion, None, rows);
    report.answers = answer::of(&report);
    Ok(report)
}

impl InterruptsCase {
    fn name(&self) -> String {
        match self.traffic {
            Traffic::Transmit(hand) => row::hand_name(hand).into(),
            _ => self.setting.name.into(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct InterruptsRound {
    costs: Costs,
    /// What was sent and what was taken; they differ where datagrams are lost.
    sent_per_second: f64,
    taken_per_second: f64,
    counters: Counters,
    /// How long they were counted.
    counted_seconds: f64,
    sent: Outcome,
    latency: Option<Latency>,
    is_transmit: bool,
}

impl InterruptsRound {
    /// For 1000 packets that were sent.
    fn sender_us_per_1000(&self) -> f64 {
        self.costs.sender.load_percent / 100.0 * 1e6 / (self.sent_per_second / 1000.0)
    }

    /// For 1000 packets that were taken.
    fn receiver_us_per_1000(&self) -> f64 {
        self.costs.receiver.load_percent / 100.0 * 1e6 / (self.taken_per_second / 1000.0)
    }

    /// What rows of one kind are compared by: the cost of the host that differs.
    fn cost(&self) -> f64 {
        if self.is_transmit { self.sender_us_per_1000() } else { self.receiver_us_per_1000() }
    }
}

struct Packets<'a> {
    lab: &'a Lab,
    memory: Opened,
    congestion: String,
    pace: Pace,
}

impl Packets<'_> {
    /// Who takes and who gives.
    fn tasks(&self, case: &InterruptsCase) -> (Task, Task) {
        let giving = |by, datagrams: usize, beat| {
            Task::Give(Giving {
                is_tcp: false,
                by,
                piece_bytes: datagrams * usize::from(DATAGRAM_BYTES),
                datagram_bytes: DATAGRAM_BYTES,
                to: None,
                beat,
            })
        };
        let taking = || Task::Take(Taking { busy_poll_us: case.setting.busy_poll_us });
        match case.traffic {
            // The same datagrams at the same moments, in as many calls as the way takes.
            Traffic::Transmit(by) => {
                let is_single = matches!(by, Hand::Send | Hand::Lend | Hand::LendAndWait);
                let (datagrams, pieces) = if is_single { (1, GROUP) } else { (GROUP, 1) };
                let beat = Beat::Batches { pieces: pieces as u32, per_second: GROUPS_PER_SECOND };
                (taking(), giving(by, datagrams, beat))
            }
            Traffic::Datagrams => (
                taking(),
                giving(Hand::Send, 1, Beat::Exact { pieces_per_second: DATAGRAMS_PER_SECOND }),
            ),
            Traffic::Stream => (
                Task::Receive(Receiving::plainly()),
                Task::Send(Sending {
                    path: TestedMethod::from(SendMethod::ReadSend).name().into(),
                    chunk_bytes: 64 << 10,
                    cork: false,
                    rate_bits_per_second: None,
                    pieces: self.memory.handed_over(),
                    plan: None,
                }),
            ),
            Traffic::Messages => (
                Task::Answer(Answering {}),
                Task::Ask(Asking { message_bytes: MESSAGE.0 as usize }),
            ),
        }
    }
}

impl Subject for Packets<'_> {
    type Case = InterruptsCase;
    type Round = InterruptsRound;

    fn name(&self, case: &InterruptsCase) -> String {
        case.name()
    }

    fn measure(&mut self, case: &InterruptsCase, meter: &Meter) -> Result<Sample, FlowError> {
        let receiver = &self.lab.receiver;
        if self.lab.kind() == haul_lab::Kind::Loopback {
            return Err(FlowError::Refused("loopback has no device to set".into()));
        }
        let refused = |error: haul_lab::LabError| FlowError::Refused(error.to_string());
        receiver.set_reception(case.setting.reception).map_err(refused)?;
        // A veth that segments passes large packets on as they are, and its peer then neither polls nor puts any together.
        let is_transmit = matches!(case.traffic, Traffic::Transmit(_));
        self.lab.set_segmentation(is_transmit).map_err(refused)?;
        let (taker, giver) = self.tasks(case);
        let flow = Flow {
            socket: SocketOptions::with_congestion(&self.congestion),
            parts: vec![
                Part { host: Endpoint::Lab(receiver), task: taker },
                Part { host: Endpoint::Lab(&self.lab.sender), task: giver },
            ],
            warm_up: WARM_UP,
            window: self.pace.window,
        };
        flow.run(Some(meter))
    }

    fn judge(
        &self,
        case: &InterruptsCase,
        sample: &Sample,
        loads: &Loads,
    ) -> Option<InterruptsRound> {
        let [taken, sent] = sample.outcomes.as_slice() else { return None };
        let is_transmit = matches!(case.traffic, Traffic::Transmit(_));
        let (sent_per_second, taken_per_second) = match case.traffic {
            Traffic::Transmit(_) | Traffic::Datagrams => (
                sent.bytes_per_second() / f64::from(DATAGRAM_BYTES),
                taken.messages as f64 / taken.seconds,
            ),
            Traffic::Stream => [taken.bytes_per_second() / SEGMENT_BYTES; 2].into(),
            Traffic::Messages => [taken.bytes_per_second() / MESSAGE.0 as f64; 2].into(),
        };
        let bytes_per_second =
            if taken.bytes > 0 { taken.bytes_per_second() } else { sent.bytes_per_second() };
        let account = sample.account_of(self.lab.receiver.cpu())?;
        Some(InterruptsRound {
            costs: Costs::of(loads, bytes_per_second)?,
            sent_per_second,
            taken_per_second,
            counters: account.counters,
            counted_seconds: account.seconds,
            sent: *sent,
            latency: sent.latency,
            is_transmit,
        })
    }
}
