//! The experiment `receive`: what each way of taking bytes out of a socket costs the two hosts.
//!
//! What can be mapped is decided by the sender and the link before the receiver has a say: each page must hold
//! payload and nothing else. So the rows differ in the link's MTU, in how the sender's kernel makes pages, and in
//! their order. `buffer_bytes` is the memory that is filled round and round, because a copy into a cache costs
//! less than one into memory.

use crate::flow::{Flow, FlowError, Sample};
use crate::pair::Pair;
use crate::quantity::Size;
use crate::regime::{self, FullSpeeds, Reading};
use crate::rounds::{Costs, Pace, Progress, Run, Series, Steps, Subject};
use crate::tested_method::TestedMethod;
use crate::topology::{Loads, Topology};
use crate::worker::{Outcome, receiver::Receiving, sender};
use crate::workload::{Opened, Workload};
use crate::{BenchError, congestion};
use haul::SendMethod;
use haul_lab::{HostSetting, Lab, Settings};
use haul_soak::Meter;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

mod answer;
pub mod method;
mod row;

use method::ReceiveMethod;
pub use row::ReceiveRow;

/// The result of `receive`.
pub type ReceiveReport = crate::report::Report<ReceiveRow>;

/// The MTU at which a segment's payload is one page: 4096 bytes and 52 of IPv4 and TCP headers with timestamps.
pub const MTU_OF_A_PAGE: u32 = 4148;
/// The largest buffer that makes sense: some times the largest last-level cache.
const BUFFER_MAX: Size = Size(4 << 30);
/// The smallest: what a ring of four pages takes.
const BUFFER_MIN: Size = Size(16 << 10);
/// What the sender sends over and over: memory that stays in its cache, so that it is never what holds up.
const SENT: Size = Size(1 << 20);
/// How much a call sends.
const CHUNK_BYTES: usize = 64 << 10;
/// Whether the network stack takes memory a page at a time (Linux 5.14).
const PAGE_ORDER_SYSCTL: &str = "net.core.high_order_alloc_disable";
const PAGE_ORDER_FILE: &str = "/proc/sys/net/core/high_order_alloc_disable";
/// What a receiver is woken for, as a share of its buffer: the same for every way, or those that are woken less would seem
/// the cheaper. It is what [`haul::Receiver::expect`] sets.
const LOW_WATER_DIVISOR: usize = 8;

/// How the sending side puts payload into pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SentBy {
    /// `send`: the kernel copies into memory of its own.
    Send,
    /// `MSG_ZEROCOPY`: on a veth the pages are copied on the way, one by one.
    Zerocopy,
    /// `sendfile`: pages of a file, which can never be mapped.
    Sendfile,
}

/// How many pages the network stack takes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageOrder {
    /// As the kernel does it: 32 KiB in one piece, of which no page can be mapped.
    Default,
    /// One: `net.core.high_order_alloc_disable` is 1. It is the whole machine's setting and put back afterwards.
    Single,
}

/// The conditions of a row, apart from its way: rows that share them can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveCondition {
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// How it is sent.
    pub sent_by: SentBy,
    /// How pages are taken.
    pub page_order: PageOrder,
    /// The memory that is filled round and round.
    pub buffer: Size,
    /// Whether the program looks at every byte.
    pub touch: bool,
}

/// A product of conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveSelection {
    /// The ways.
    pub ways: Vec<ReceiveMethod>,
    /// The MTUs.
    pub mtus: Vec<u32>,
    /// How it is sent.
    pub sent_by: Vec<SentBy>,
    /// How pages are taken.
    pub page_orders: Vec<PageOrder>,
    /// The buffers.
    pub buffers: Vec<Size>,
    /// Whether bytes are looked at.
    pub touches: Vec<bool>,
}

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveCase {
    /// The way.
    pub way: ReceiveMethod,
    /// Its conditions.
    pub condition: ReceiveCondition,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct ReceivePlan {
    /// The rows.
    pub selections: Vec<ReceiveSelection>,
    /// The machine to measure with, instead of the lab's second host.
    pub peer: Option<Arc<Pair>>,
    /// How often and how long.
    pub pace: Pace,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
}

impl ReceiveSelection {
    /// Every way, on a link whose segments are a page, sent by `send`, into 128 KiB that nobody looks at.
    pub fn plain() -> Self {
        Self {
            ways: ReceiveMethod::ALL.into(),
            mtus: vec![MTU_OF_A_PAGE],
            sent_by: vec![SentBy::Send],
            page_orders: vec![PageOrder::Default],
            buffers: vec![Size(128 << 10)],
            touches: vec![false],
        }
    }

    /// What `haul bench receive` runs unless told otherwise: every way at three MTUs and with both senders whose
    /// pages can be mapped; reading and mapping with single pages, through buffers from the second-level cache
    /// to past the last, touched or not.
    pub fn default_set() -> Vec<Self> {
        let two = vec![ReceiveMethod::Read, ReceiveMethod::Mapped];
        let three = vec![ReceiveMethod::Read, ReceiveMethod::Mapped, ReceiveMethod::Auto];
        vec![
            Self { mtus: vec![Settings::default().mtu, MTU_OF_A_PAGE], ..Self::plain() },
            Self { mtus: vec![1500], ways: three.clone(), ..Self::plain() },
            Self {
                sent_by: vec![SentBy::Zerocopy, SentBy::Sendfile],
                ways: three,
                ..Self::plain()
            },
            Self { page_orders: vec![PageOrder::Single], ..Self::plain() },
            Self {
                page_orders: vec![PageOrder::Single],
                ways: two,
                buffers: vec![Size(128 << 10), Size(4 << 20), Size(128 << 20)],
                touches: vec![false, true],
                ..Self::plain()
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
                            let ways =
                                self.ways.iter().filter(move |way| !touch || way.shows_bytes());
                            ways.map(move |&way| ReceiveCase { way, condition })
                        })
                    })
                })
            })
        })
    }
}

/// Every row of several selections, each once; the machine's setting changes once a round.
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

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then
/// reported.
pub fn run(
    plan: &ReceivePlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<ReceiveReport, BenchError> {
    plan.pace.check()?;
    let cases = cases(&plan.selections);
    for ReceiveCase { condition: ReceiveCondition { buffer, .. }, .. } in &cases {
        if !(BUFFER_MIN..=BUFFER_MAX).contains(buffer) {
            return Err(BenchError::BadInput(format!(
                "buffer {buffer} is outside {BUFFER_MIN} to {BUFFER_MAX}"
            )));
        }
    }
    let started = crate::now();
    let mut labs: BTreeMap<u32, Lab> = BTreeMap::new();
    let mtus = cases.iter().map(|case| case.condition.mtu).filter(|_| plan.peer.is_none());
    for mtu in mtus {
        if !labs.contains_key(&mtu) {
            // All on the same two CPUs.
            let cpus = labs.values().next().map(Lab::cpus);
            labs.insert(mtu, Lab::open(&Settings { mtu, cpus })?);
        }
    }
    let sites = Sites { labs: &labs, pair: plan.peer.as_deref() };
    let site = cases.first().and_then(|case| sites.of(case.condition.mtu));
    let site = site.ok_or_else(|| BenchError::BadInput("there is nothing to measure".into()))?;
    let congestion = congestion::choose(site, plan.congestion.as_deref())?;
    let mut receives = Receives {
        sites,
        memory: Workload::Memory(SENT).open()?,
        file: Workload::Files { count: 1, average: SENT }.open()?,
        congestion,
        pace: plan.pace,
        page_order: Settled::Untouched,
        full_speeds: FullSpeeds::default(),
    };
    let mut run = Run::new(site, plan.pace)?;
    let mut rows: Vec<Series<ReceiveCase, ReceiveRound>> =
        cases.into_iter().map(Series::new).collect();
    let mut steps = Steps::new(run.steps(rows.len()), is_stopped, progress);
    run.all(&mut receives, &mut rows, &mut steps)?;
    run.warn(&rows, ReceiveCase::to_string, |round| round.costs.receiver_us_per_mib);
    let row = |series: &Series<ReceiveCase, ReceiveRound>| ReceiveRow {
        full_speed_bits_per_second: receives.full_speeds.bits_per_second(&series.case),
        ..row::of(series, &rows)
    };
    let rows = rows.iter().map(row).collect();
    let mut report =
        ReceiveReport::of_run("receive", started, run, &receives.congestion, None, rows)
            .with_reading(Reading::Held);
    report.answers = answer::of(&report);
    Ok(report)
}

#[derive(Debug, Clone, Copy)]
struct ReceiveRound {
    costs: Costs,
    received: Outcome,
}

/// Whether the machine's page order was changed for this run.
enum Settled {
    Untouched,
    Held(HostSetting),
    /// It cannot be changed and stays at this value.
    Refused {
        value: String,
        reason: String,
    },
}

/// Where rows run: in a lab of their MTU, or on the one link there is between two machines.
#[derive(Clone, Copy)]
struct Sites<'a> {
    labs: &'a BTreeMap<u32, Lab>,
    pair: Option<&'a Pair>,
}

impl<'a> Sites<'a> {
    fn of(self, mtu: u32) -> Option<Topology<'a>> {
        match self.pair {
            Some(pair) => Some(Topology::Pair(pair)),
            None => self.labs.get(&mtu).map(Topology::Lab),
        }
    }
}

/// What receives.
struct Receives<'a> {
    sites: Sites<'a>,
    memory: Opened,
    file: Opened,
    congestion: String,
    pace: Pace,
    page_order: Settled,
    full_speeds: FullSpeeds<ReceiveCase>,
}

impl Receives<'_> {
    fn set_page_order(&mut self, wanted: PageOrder) -> Result<(), FlowError> {
        let value = if wanted == PageOrder::Single { "1" } else { "0" };
        if let Settled::Untouched = self.page_order {
            // A kernel before 5.14 has no such setting, and is as if it were 0.
            let now = fs::read_to_string(PAGE_ORDER_FILE)
                .map_or("0".into(), |text| text.trim().to_owned());
            if now == value {
                return Ok(());
            }
            self.page_order = match HostSetting::hold(PAGE_ORDER_SYSCTL) {
                Ok(setting) => Settled::Held(setting),
                Err(error) => Settled::Refused { value: now, reason: error.to_string() },
            };
        }
        match &self.page_order {
            Settled::Held(setting) => Ok(setting.set(value)?),
            Settled::Refused { value: stays, reason } if stays != value => {
                Err(FlowError::Refused(reason.clone()))
            }
            _ => Ok(()),
        }
    }
}

impl Subject for Receives<'_> {
    type Case = ReceiveCase;
    type Round = ReceiveRound;

    fn name(&self, case: &ReceiveCase) -> String {
        case.way.name().into()
    }

    fn measure(&mut self, case: &ReceiveCase, meter: &Meter) -> Result<Sample, FlowError> {
        let ReceiveCase { way, condition } = *case;
        if self.sites.pair.is_none() {
            self.set_page_order(condition.page_order)?;
        }
        let no_site = || FlowError::Refused(format!("there is no link of MTU {}", condition.mtu));
        let site = self.sites.of(condition.mtu).ok_or_else(no_site)?;
        let (path, workload) = match condition.sent_by {
            SentBy::Send => (SendMethod::ReadSend, &self.memory),
            SentBy::Zerocopy => (SendMethod::Zerocopy, &self.memory),
            SentBy::Sendfile => (SendMethod::Sendfile, &self.file),
        };
        let sending = sender::Sending {
            path: TestedMethod::from(path).name().into(),
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
            Receiving { way, buffer_bytes, touch, low_water_bytes, ..Receiving::plainly() };
        let socket = Reading::Held.socket(&self.congestion);
        let window = self.pace.window;
        let flow = |receiving| {
            let (from, to) = ((site.sender(), sending.clone()), (site.receiver(), receiving));
            Flow::stream(from, to, socket.clone(), window)
        };
        let full_speed = self.full_speeds.of(case, &flow(receiving.clone()))?;
        let warm_up = regime::warm_up(full_speed);
        Flow { warm_up, ..flow(regime::held(&receiving, full_speed)) }.run(Some(meter))
    }

    /// The machine's setting of the page order is changed once a round.
    fn block(&self, case: &ReceiveCase) -> usize {
        usize::from(case.condition.page_order == PageOrder::Single)
    }

    fn costs(round: &ReceiveRound) -> Option<&Costs> {
        Some(&round.costs)
    }

    fn judge(&self, _: &ReceiveCase, sample: &Sample, loads: &Loads) -> Option<ReceiveRound> {
        let received = *sample.outcomes.first()?;
        let costs = Costs::of(loads, received.bytes_per_second())?;
        Some(ReceiveRound { costs, received })
    }
}

impl fmt::Display for ReceiveCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({})", self.way, self.condition)
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
        let found = known.into_iter().find(|way| way.to_string() == text);
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
    fn rows_that_nobody_could_look_at_are_not_touched() {
        let touched = ReceiveSelection { touches: vec![true], ..ReceiveSelection::plain() };
        let ways: Vec<ReceiveMethod> = cases(&[touched]).iter().map(|case| case.way).collect();
        assert!(
            !ways.contains(&ReceiveMethod::Discard) && ways.contains(&ReceiveMethod::Mapped),
            "{ways:?}"
        );
    }

    #[test]
    fn the_machines_setting_changes_once_a_round() {
        let cases = cases(&ReceiveSelection::default_set());
        let changes = cases
            .windows(2)
            .filter(|pair| pair[0].condition.page_order != pair[1].condition.page_order)
            .count();
        assert_eq!(changes, 1);
    }
}
