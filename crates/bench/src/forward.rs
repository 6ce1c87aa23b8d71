//! The experiment `forward`: what each way of passing on a stream costs the host in the middle, and how long small
//! messages take through it.
//!
//! The forwarder has the lab's sending host to itself (the other machine, where there are two); who sends and who receives share the other. So at full
//! speed it is mostly those two that bound the throughput, and the forwarder's load per MiB is what to compare.

use crate::flow::{Flow, FlowError, Part, Sample, WARM_UP};
use crate::pair::Pair;
use crate::quantity::{Rate, Size};
use crate::regime::{self, FullSpeeds, Reading};
use crate::rounds::{Costs, Pace, Progress, Run, Series, Steps, Subject};
use crate::tested_method::TestedMethod;
use crate::topology::{Loads, Topology};
use crate::worker::forwarder::Forwarding;
use crate::worker::messages::{Answering, Asking, Latency};
use crate::worker::{Outcome, Task, receiver::Receiving, sender::Sending};
use crate::workload::{Opened, Workload};
use crate::{BenchError, congestion};
use haul::SendMethod;
use haul_lab::{Lab, Settings};
use haul_soak::Meter;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

mod answer;
pub mod method;
mod proof;
mod row;

use method::TestedForwardMethod;
pub use row::ForwardRow;

/// The result of `forward`.
pub type ForwardReport = crate::report::Report<ForwardRow>;

/// What the source sends over and over in a bulk transfer: memory that stays in its cache.
const SENT: Size = Size(1 << 20);
/// How much a call sends.
const CHUNK_BYTES: usize = 64 << 10;
/// The largest buffer or pipe that can be asked for.
const BUFFER_MAX: Size = Size(64 << 20);
/// The largest message: one that is on its way back while the rest is still going there must fit the sockets' buffers.
const MESSAGE_MAX: Size = Size(256 << 10);

/// What passes through the forwarder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Traffic {
    /// As much as goes, one way.
    Bulk,
    /// One message of this size at a time, there and back.
    Messages(Size),
}

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ForwardCase {
    /// The way.
    pub way: TestedForwardMethod,
    /// The size of the pipe or the buffer; `None` where there is none or the library chooses.
    pub buffer: Option<Size>,
    /// What passes through.
    pub traffic: Traffic,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct ForwardPlan {
    /// The ways.
    pub ways: Vec<TestedForwardMethod>,
    /// Sizes of pipes and buffers.
    pub buffers: Vec<Size>,
    /// What passes through.
    pub traffic: Vec<Traffic>,
    /// How often and how long.
    pub pace: Pace,
    /// The rate to hold in bulk transfers, or full speed.
    pub rate: Option<Rate>,
    /// The machine to measure with, instead of the lab's second host.
    pub peer: Option<Arc<Pair>>,
    /// The lab's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
}

impl ForwardPlan {
    /// What `haul bench forward` runs unless told otherwise.
    pub fn new(pace: Pace) -> Self {
        Self {
            ways: TestedForwardMethod::ALL.into(),
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

    /// A quick look: one size of pipe and buffer, bulk and small messages.
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
            for &way in &self.ways {
                let buffers = match traffic {
                    _ if !way.has_buffer() => vec![None],
                    Traffic::Bulk => self.buffers.iter().copied().map(Some).collect(),
                    // One that fits takes one call, whatever more the buffer could hold.
                    Traffic::Messages(size) => {
                        let fits = self.buffers.iter().filter(|&&buffer| buffer >= size).min();
                        vec![fits.or(self.buffers.last()).copied()]
                    }
                };
                cases.extend(buffers.into_iter().map(|buffer| ForwardCase {
                    way,
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

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then
/// reported.
pub fn run(
    plan: &ForwardPlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<ForwardReport, BenchError> {
    plan.check()?;
    let started = crate::now();
    let lab;
    let site = if let Some(pair) = plan.peer.as_deref() {
        Topology::TurnedPair(pair)
    } else {
        lab = Lab::open(&Settings { mtu: plan.mtu, cpus: None })?;
        Topology::Lab(&lab)
    };
    let congestion = congestion::choose(site, plan.congestion.as_deref())?;
    let mut run = Run::new(site, plan.pace)?;
    // The other machine's sockets are out of reach for a proof.
    let proved = site.lab().map_or_else(HashMap::new, |lab| proof::of(lab, &plan.ways));
    let workload = Workload::Memory(SENT).open()?;
    let mut forwards =
        Forwards { site, workload, congestion, plan, full_speeds: FullSpeeds::default() };
    let mut rows: Vec<Series<ForwardCase, ForwardRound>> =
        plan.cases().into_iter().map(Series::new).collect();
    let mut steps = Steps::new(run.steps(rows.len()), is_stopped, progress);
    run.all(&mut forwards, &mut rows, &mut steps)?;
    run.warn(&rows, ForwardCase::to_string, ForwardRound::cost);
    let row = |series: &Series<ForwardCase, ForwardRound>| ForwardRow {
        full_speed_bits_per_second: forwards.full_speeds.bits_per_second(&series.case),
        ..row::of(series, &rows, &proved)
    };
    let rows = rows.iter().map(row).collect();
    let mut report =
        ForwardReport::of_run("forward", started, run, &forwards.congestion, plan.rate, rows);
    report.answers = answer::of(&report);
    Ok(report)
}

#[derive(Debug, Clone, Copy)]
struct ForwardRound {
    /// The forwarder's host is the lab's sender, the other's its receiver. The bytes are those that went through
    /// once; a message that comes back counts once.
    costs: Costs,
    forwarded: Outcome,
    latency: Option<Latency>,
    messages_per_second: f64,
}

impl ForwardRound {
    fn us_per_message(&self) -> f64 {
        self.costs.sender.load_percent / 100.0 * 1e6 / self.messages_per_second
    }

    /// What rows of one kind of traffic are compared by.
    fn cost(&self) -> f64 {
        if self.latency.is_some() { self.us_per_message() } else { self.costs.sender_us_per_mib }
    }
}

/// What forwards.
struct Forwards<'a> {
    site: Topology<'a>,
    workload: Opened,
    congestion: String,
    plan: &'a ForwardPlan,
    full_speeds: FullSpeeds<ForwardCase>,
}

impl Subject for Forwards<'_> {
    type Case = ForwardCase;
    type Round = ForwardRound;

    fn name(&self, case: &ForwardCase) -> String {
        case.way.name().into()
    }

    fn measure(&mut self, case: &ForwardCase, meter: &Meter) -> Result<Sample, FlowError> {
        let forwarding =
            Forwarding { by: case.way, buffer_bytes: case.buffer.map(|size| size.0 as usize) };
        let (last, first) = match case.traffic {
            Traffic::Bulk => {
                let sending = Sending {
                    path: TestedMethod::from(SendMethod::ReadSend).name().into(),
                    chunk_bytes: CHUNK_BYTES,
                    cork: false,
                    rate_bits_per_second: self.plan.rate.map(|rate| rate.0),
                    pieces: self.workload.handed_over(),
                    plan: None,
                };
                (None, Task::Send(sending))
            }
            Traffic::Messages(size) => (
                Some(Task::Answer(Answering {})),
                Task::Ask(Asking { message_bytes: size.0 as usize }),
            ),
        };
        let (site, window) = (self.site, self.plan.pace.window);
        let socket = match case.traffic {
            Traffic::Bulk => Reading::Held.socket(&self.congestion),
            Traffic::Messages(_) => Reading::Free.socket(&self.congestion),
        };
        let flow = |last: Task| Flow {
            socket: socket.clone(),
            parts: vec![
                Part { host: site.receiver(), task: last },
                Part { host: site.sender(), task: Task::Forward(forwarding.clone()) },
                Part { host: site.receiver(), task: first.clone() },
            ],
            warm_up: WARM_UP,
            window,
        };
        // A rate that the sender holds is the regime that was asked for.
        let flow = match last {
            Some(last) => flow(last),
            None if self.plan.rate.is_some() => flow(Task::Receive(Receiving::plainly())),
            None => {
                let receiving = |receiving| flow(Task::Receive(receiving));
                let full_speed = self.full_speeds.of(case, &receiving(Receiving::plainly()))?;
                // There are two connections to fill.
                let warm_up = 2 * regime::warm_up(full_speed);
                Flow { warm_up, ..receiving(regime::held(&Receiving::plainly(), full_speed)) }
            }
        };
        flow.run(Some(meter))
    }

    /// Messages have no interrupts for each MiB that could be compared.
    fn costs(round: &ForwardRound) -> Option<&Costs> {
        round.latency.is_none().then_some(&round.costs)
    }

    fn judge(&self, case: &ForwardCase, sample: &Sample, loads: &Loads) -> Option<ForwardRound> {
        let [last, forwarded, first] = sample.outcomes.as_slice() else { return None };
        let bytes_per_second = last.bytes_per_second();
        let messages_per_second = match case.traffic {
            Traffic::Bulk => 0.0,
            Traffic::Messages(size) => bytes_per_second / size.0 as f64,
        };
        let costs = Costs::of(loads, bytes_per_second)?;
        if case.traffic != Traffic::Bulk && first.latency.is_none() {
            return None;
        }
        Some(ForwardRound {
            costs,
            forwarded: *forwarded,
            latency: first.latency,
            messages_per_second,
        })
    }
}

impl fmt::Display for ForwardCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { way, buffer, traffic } = self;
        match buffer {
            Some(buffer) => write!(formatter, "{way} {buffer} ({traffic})"),
            None => write!(formatter, "{way} ({traffic})"),
        }
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bulk => formatter.write_str("bulk"),
            Self::Messages(size) => write!(formatter, "messages:{size}"),
        }
    }
}

impl FromStr for Traffic {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("unknown traffic {text:?}: write bulk or messages:SIZE (messages:64B)");
        match text.split_once(':') {
            None if text == "bulk" => Ok(Self::Bulk),
            Some(("messages", size)) => size.parse().map(Self::Messages).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}
