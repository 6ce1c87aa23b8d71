//! The experiment `receive`: the CPU cost of each receive method, on the sending and the receiving
//! host.
//!
//! The sender and the link decide whether pages can be mapped: each page must hold payload and
//! nothing else. So the rows vary the link's MTU, how the sender's kernel allocates pages, and
//! their order. `buffer_bytes` is the memory that is filled repeatedly, because a copy into a cache
//! costs less than one into memory.

use crate::congestion;
use crate::error::BenchError;
use crate::flow::{Flow, FlowError, Sample};
use crate::pair::Pair;
use crate::regime::{self, FullSpeedThroughputs, Reading};
use crate::rounds::{Costs, Experiment, Pace, Part, Progress, Run, Series};
use crate::topology::{Loads, Topology};
use haul::SendMethod;
use haul_lab::{HostSetting, Kind, Lab, Settings};
use haul_soak::Meter;
use haul_units::Size;
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::{Outcome, receiver::ReceiveTask, sender};
use haul_workers::workload::{Opened, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

mod answer;
pub use haul_workers::receive_method as method;
mod row;
mod verdict;

#[cfg(test)]
pub(crate) use verdict::unmapped_statement;

use method::ReceiveMethod;
pub use row::ReceiveRow;

/// The smallest share of mapped bytes for which mapping counts as possible, in percent. Below it,
/// mapping is a copy with more calls.
const MAPPED_PERCENT_MIN: f64 = 90.0;

/// The report of the experiment `receive`.
pub type ReceiveReport = crate::report::Report<ReceiveRow>;

/// The MTU at which the payload of a segment is one page: 4096 bytes, and 52 bytes of IPv4 and TCP
/// headers with timestamps.
pub const PAGE_MTU: u32 = 4148;
/// The largest accepted buffer: several times the largest last-level cache.
const BUFFER_MAX: Size = Size(4 << 30);
/// The smallest accepted buffer: the memory of an io_uring ring of four one-page buffers.
const BUFFER_MIN: Size = Size(16 << 10);
/// The memory that the sender sends repeatedly. It stays in the sender's cache, so that the sender
/// is never the bottleneck.
const SENT_SIZE: Size = Size(1 << 20);
/// The bytes that one call sends.
const CHUNK_BYTES: usize = 64 << 10;
/// The sysctl that makes the network stack allocate memory one page at a time (Linux 5.14).
const PAGE_ORDER_SYSCTL: &str = "net.core.high_order_alloc_disable";
const PAGE_ORDER_FILE: &str = "/proc/sys/net/core/high_order_alloc_disable";
/// The buffer size divided by the bytes that wake a receiver (`SO_RCVLOWAT`), as
/// [`haul::Receiver::expect`] sets it. It is equal for all methods: those that are woken less often
/// would seem cheaper.
const LOW_WATER_DIVISOR: usize = 8;

/// How the sender's kernel puts payload into pages.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum SentBy {
    /// `send`: the kernel copies the payload into pages that it allocates.
    Send,
    /// `MSG_ZEROCOPY`: on a veth the kernel copies the pages on the way, one by one.
    Zerocopy,
    /// `sendfile`: page-cache pages of a file, which can never be mapped.
    Sendfile,
}

/// The size of the network stack's page allocations.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum PageOrder {
    /// The kernel's default: pieces of 32 KiB, whose pages cannot be mapped.
    Default,
    /// Single pages: `net.core.high_order_alloc_disable` is 1. This sysctl applies to the whole
    /// machine and is restored afterwards.
    Single,
}

/// The conditions of a row, apart from its method. Rows of equal conditions can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveCondition {
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The sender's method.
    pub sent_by: SentBy,
    /// The size of the network stack's page allocations.
    pub page_order: PageOrder,
    /// The memory that is filled repeatedly.
    pub buffer: Size,
    /// Whether the program reads every received byte.
    pub touch: bool,
}

/// A set of rows: every combination of the listed conditions and methods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveSelection {
    /// The receive methods.
    pub methods: Vec<ReceiveMethod>,
    /// The MTUs.
    pub mtus: Vec<u32>,
    /// The sender's methods.
    pub sent_by: Vec<SentBy>,
    /// The page allocation sizes.
    pub page_orders: Vec<PageOrder>,
    /// The buffer sizes.
    pub buffers: Vec<Size>,
    /// Whether the program reads every received byte: the values to measure.
    pub touches: Vec<bool>,
}

/// One row: a method under conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveCase {
    /// The receive method.
    pub method: ReceiveMethod,
    /// The conditions.
    pub condition: ReceiveCondition,
}

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct ReceiveParameters {
    /// The rows to measure.
    pub selections: Vec<ReceiveSelection>,
    /// Whether the user asked for the MTUs of the rows. Where the MTU cannot be set, such rows are
    /// refused; other rows are measured at the MTU of the link.
    pub are_mtus_requested: bool,
    /// The other machine to measure with, instead of the lab's second host.
    pub peer: Option<Arc<Pair>>,
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// The sockets' congestion control; `None` for the first of cubic and reno that can be set.
    pub congestion: Option<String>,
}

impl ReceiveSelection {
    /// Every method, at the MTU of one page per segment, sent by `send`, into 128 KiB that the
    /// program does not read.
    pub fn every_method() -> Self {
        Self {
            methods: ReceiveMethod::ALL.into(),
            mtus: vec![PAGE_MTU],
            sent_by: vec![SentBy::Send],
            page_orders: vec![PageOrder::Default],
            buffers: vec![Size(128 << 10)],
            touches: vec![false],
        }
    }

    /// The default rows of `haul bench receive`. Every method at the lab's default MTU and at
    /// [`PAGE_MTU`]; `read`, `mapped` and `auto` at MTU 1500 and with the other two senders. With
    /// single pages every method, and `read` and `mapped` through buffers from the second-level
    /// cache to larger than the last-level cache, read by the program or not.
    pub fn default_set() -> Vec<Self> {
        let read_and_mapped = vec![ReceiveMethod::Read, ReceiveMethod::Mapped];
        let common = vec![ReceiveMethod::Read, ReceiveMethod::Mapped, ReceiveMethod::Auto];
        vec![
            Self { mtus: vec![Settings::default().mtu, PAGE_MTU], ..Self::every_method() },
            Self { mtus: vec![1500], methods: common.clone(), ..Self::every_method() },
            Self {
                sent_by: vec![SentBy::Zerocopy, SentBy::Sendfile],
                methods: common,
                ..Self::every_method()
            },
            Self { page_orders: vec![PageOrder::Single], ..Self::every_method() },
            Self {
                page_orders: vec![PageOrder::Single],
                methods: read_and_mapped,
                buffers: vec![Size(128 << 10), Size(4 << 20), Size(128 << 20)],
                touches: vec![false, true],
                ..Self::every_method()
            },
        ]
    }

    fn cases(&self) -> impl Iterator<Item = ReceiveCase> {
        self.page_orders.iter().flat_map(move |&page_order| {
            self.mtus.iter().flat_map(move |&mtu| {
                self.sent_by.iter().flat_map(move |&sent_by| {
                    self.buffers.iter().flat_map(move |&buffer| {
                        self.touches.iter().flat_map(move |&touch| {
                            let condition =
                                ReceiveCondition { mtu, sent_by, page_order, buffer, touch };
                            let methods = self
                                .methods
                                .iter()
                                .filter(move |method| !touch || method.exposes_bytes());
                            methods.map(move |&method| ReceiveCase { method, condition })
                        })
                    })
                })
            })
        })
    }
}

/// The rows of several selections, each once. They are sorted by page order, so that the machine's
/// sysctl changes once a round.
fn cases(selections: &[ReceiveSelection]) -> Vec<ReceiveCase> {
    let mut cases: Vec<ReceiveCase> = Vec::new();
    for case in selections.iter().flat_map(ReceiveSelection::cases) {
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    cases.sort_by_key(|case| case.condition.page_order);
    cases
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &ReceiveParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<ReceiveReport, BenchError> {
    parameters.pace.check()?;
    let mut cases = cases(&parameters.selections);
    for ReceiveCase { condition: ReceiveCondition { buffer, .. }, .. } in &cases {
        if !(BUFFER_MIN..=BUFFER_MAX).contains(buffer) {
            return Err(BenchError::BadInput(format!(
                "buffer {buffer} is outside {BUFFER_MIN} to {BUFFER_MAX}"
            )));
        }
    }
    let started = crate::report::now();
    let labs = match &parameters.peer {
        Some(_) => BTreeMap::new(),
        None => open_labs(&mut cases, parameters.are_mtus_requested)?,
    };
    let topologies = Topologies { labs: &labs, pair: parameters.peer.as_deref() };
    let topology = cases.first().and_then(|case| topologies.of(case.condition.mtu));
    let nothing = || BenchError::BadInput("there is nothing to measure".into());
    let topology = topology.ok_or_else(nothing)?;
    let congestion = congestion::choose(topology, parameters.congestion.as_deref())?;
    let mut experiment = ReceiveExperiment {
        topologies,
        memory: Workload::Memory(SENT_SIZE).open()?,
        file: Workload::Files { count: 1, average: SENT_SIZE }.open()?,
        congestion,
        pace: parameters.pace,
        page_order: PageOrderState::Unchanged,
        full_speeds: FullSpeedThroughputs::default(),
    };
    let mut run = Run::new(topology, parameters.pace)?;
    let rows = run.measure_cases(&mut experiment, cases, is_stopped, progress)?;
    let row = |series: &Series<ReceiveCase, ReceiveRound>| ReceiveRow {
        full_speed_bits_per_second: experiment.full_speeds.bits_per_second(&series.case),
        ..row::of(series, &rows)
    };
    let verdict = verdict::of(&rows, &run, topology.has_two_hosts());
    let rows = rows.iter().map(row).collect();
    let mut report =
        ReceiveReport::of_run("receive", started, run, &experiment.congestion, None, rows)
            .with_reading(Reading::Held);
    report.add_verdicts(verdict);
    report.answers = answer::of(&report);
    Ok(report)
}

/// Opens a lab for each MTU, all on the same two CPUs. On loopback, the rows take the MTU of the
/// device unless the user asked for their MTU.
fn open_labs(
    cases: &mut Vec<ReceiveCase>,
    are_mtus_requested: bool,
) -> Result<BTreeMap<u32, Lab>, BenchError> {
    let mut labs: BTreeMap<u32, Lab> = BTreeMap::new();
    let mut index = 0;
    while let Some(mtu) = cases.get(index).map(|case| case.condition.mtu) {
        index += 1;
        if labs.contains_key(&mtu) {
            continue;
        }
        let cpus = labs.values().next().map(Lab::cpus);
        let lab = Lab::open(&Settings::default().with_mtu(mtu).with_cpus(cpus))?;
        if lab.kind() == Kind::Loopback && !are_mtus_requested {
            let mut distinct: Vec<ReceiveCase> = Vec::new();
            for case in cases.iter().copied() {
                let condition = ReceiveCondition { mtu: lab.mtu(), ..case.condition };
                let case = ReceiveCase { condition, ..case };
                if !distinct.contains(&case) {
                    distinct.push(case);
                }
            }
            *cases = distinct;
            return Ok(BTreeMap::from([(lab.mtu(), lab)]));
        }
        labs.insert(mtu, lab);
    }
    Ok(labs)
}

#[derive(Debug, Clone, Copy)]
struct ReceiveRound {
    costs: Costs,
    received: Outcome,
}

/// The state of the machine's page order sysctl in this run.
enum PageOrderState {
    Unchanged,
    Changed(HostSetting),
    /// The sysctl cannot be changed and keeps this value.
    Refused {
        value: String,
        reason: String,
    },
}

/// The hosts that rows run on: a lab for each MTU, or the single link between two machines.
#[derive(Clone, Copy)]
struct Topologies<'a> {
    labs: &'a BTreeMap<u32, Lab>,
    pair: Option<&'a Pair>,
}

impl<'a> Topologies<'a> {
    fn of(self, mtu: u32) -> Option<Topology<'a>> {
        match self.pair {
            Some(pair) => Some(Topology::Pair(pair)),
            None => self.labs.get(&mtu).map(Topology::Lab),
        }
    }
}

/// The experiment's state: hosts, workloads and settings.
struct ReceiveExperiment<'a> {
    topologies: Topologies<'a>,
    memory: Opened,
    file: Opened,
    congestion: String,
    pace: Pace,
    page_order: PageOrderState,
    full_speeds: FullSpeedThroughputs<ReceiveCase>,
}

impl ReceiveExperiment<'_> {
    fn set_page_order(&mut self, wanted: PageOrder) -> Result<(), FlowError> {
        let value = if wanted == PageOrder::Single { "1" } else { "0" };
        if let PageOrderState::Unchanged = self.page_order {
            // A kernel before 5.14 has no such sysctl and behaves as if it were 0.
            let now = fs::read_to_string(PAGE_ORDER_FILE)
                .map_or("0".into(), |text| text.trim().to_owned());
            if now == value {
                return Ok(());
            }
            self.page_order = match HostSetting::override_until_drop(PAGE_ORDER_SYSCTL) {
                Ok(setting) => PageOrderState::Changed(setting),
                Err(error) => PageOrderState::Refused { value: now, reason: error.to_string() },
            };
        }
        match &self.page_order {
            PageOrderState::Changed(setting) => Ok(setting.set(value)?),
            PageOrderState::Refused { value: current, reason } if current != value => {
                Err(FlowError::Refused(reason.clone()))
            }
            _ => Ok(()),
        }
    }
}

impl Experiment for ReceiveExperiment<'_> {
    type Case = ReceiveCase;
    type Round = ReceiveRound;

    fn name(&self, case: &ReceiveCase) -> String {
        case.method.name().into()
    }

    fn description(&self, case: &ReceiveCase) -> String {
        case.to_string()
    }

    fn measure(&mut self, case: &ReceiveCase, meter: &Meter) -> Result<Sample, FlowError> {
        let ReceiveCase { method, condition } = *case;
        if self.topologies.pair.is_none() {
            self.set_page_order(condition.page_order)?;
        }
        let no_topology =
            || FlowError::Refused(format!("there is no link of MTU {}", condition.mtu));
        let topology = self.topologies.of(condition.mtu).ok_or_else(no_topology)?;
        if topology.mtu() != condition.mtu {
            let (wanted, found) = (condition.mtu, topology.mtu());
            let reason =
                format!("the MTU cannot be set to {wanted} on loopback, where it is {found}");
            return Err(FlowError::Refused(reason));
        }
        let (send_method, workload) = match condition.sent_by {
            SentBy::Send => (SendMethod::ReadSend, &self.memory),
            SentBy::Zerocopy => (SendMethod::Zerocopy, &self.memory),
            SentBy::Sendfile => (SendMethod::Sendfile, &self.file),
        };
        let sending = sender::SendTask {
            path: TestedMethod::from(send_method).name().into(),
            chunk_bytes: CHUNK_BYTES,
            cork: false,
            rate_bits_per_second: None,
            pieces: workload.handed_over(),
            plan: None,
        };
        let buffer_bytes = condition.buffer.0 as usize;
        let low_water_bytes = buffer_bytes / LOW_WATER_DIVISOR;
        let touch = condition.touch;
        let receiving =
            ReceiveTask { method, buffer_bytes, touch, low_water_bytes, ..ReceiveTask::plainly() };
        let socket = Reading::Held.socket(&self.congestion);
        let window = self.pace.window;
        let flow = |receiving| {
            let from = (topology.sender(), sending.clone());
            let to = (topology.receiver(), receiving);
            Flow::stream(from, to, socket.clone(), window)
        };
        let full_speed = self.full_speeds.get_or_measure(case, &flow(receiving.clone()))?;
        let warm_up = regime::warm_up(full_speed);
        Flow { warm_up, ..flow(regime::held(&receiving, full_speed)) }.run(Some(meter))
    }

    /// Groups rows by page order, so that the machine's sysctl changes once a round.
    fn block(&self, case: &ReceiveCase) -> usize {
        usize::from(case.condition.page_order == PageOrder::Single)
    }

    fn costs(round: &ReceiveRound) -> Option<&Costs> {
        Some(&round.costs)
    }

    fn part(&self, case: &ReceiveCase) -> Option<Part> {
        verdict::CANDIDATES.contains(&case.method).then(|| Part {
            question: case.condition.to_string(),
            is_baseline: case.method == ReceiveMethod::Read,
        })
    }

    fn compared_cost(round: &ReceiveRound) -> f64 {
        round.costs.receiver_us_per_mib
    }

    fn evaluate(&self, _: &ReceiveCase, sample: &Sample, loads: &Loads) -> Option<ReceiveRound> {
        let received = *sample.outcomes.first()?;
        let costs = Costs::of(loads, received.bytes_per_second())?;
        Some(ReceiveRound { costs, received })
    }
}

impl fmt::Display for ReceiveCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({})", self.method, self.condition)
    }
}

impl fmt::Display for ReceiveCondition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mtu, sent_by, page_order, buffer, touch } = self;
        write!(formatter, "MTU {mtu}, sent by {sent_by}, into {buffer}")?;
        if *page_order == PageOrder::Single {
            formatter.write_str(", single pages")?;
        }
        formatter.write_str(if *touch { ", every byte looked at" } else { "" })
    }
}

impl fmt::Display for SentBy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Send => "send",
            Self::Zerocopy => "zerocopy",
            Self::Sendfile => "sendfile",
        })
    }
}

impl FromStr for SentBy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::Send, Self::Zerocopy, Self::Sendfile];
        let found = known.into_iter().find(|method| method.to_string() == text);
        found.ok_or_else(|| format!("unknown sender {text:?}: send, zerocopy or sendfile"))
    }
}

impl FromStr for PageOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "default" => Ok(Self::Default),
            "single" => Ok(Self::Single),
            _ => Err(format!("unknown page order {text:?}: default or single")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_that_deliver_no_bytes_have_no_touched_rows() {
        let touched = ReceiveSelection { touches: vec![true], ..ReceiveSelection::every_method() };
        let methods: Vec<ReceiveMethod> =
            cases(&[touched]).iter().map(|case| case.method).collect();
        assert!(
            !methods.contains(&ReceiveMethod::Discard) && methods.contains(&ReceiveMethod::Mapped),
            "{methods:?}"
        );
    }

    #[test]
    fn the_page_order_changes_once_a_round() {
        let cases = cases(&ReceiveSelection::default_set());
        let changes = cases
            .windows(2)
            .filter(|pair| pair[0].condition.page_order != pair[1].condition.page_order)
            .count();
        assert_eq!(changes, 1);
    }
}
