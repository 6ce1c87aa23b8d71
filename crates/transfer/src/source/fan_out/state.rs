//! The state of the hosts of a chain at the source.

use super::HostEnd;
use super::comparisons::Comparisons;
use super::moves::Moves;
use super::rate::MemberRate;
use crate::chain::{FrameQueue, Link};
use crate::direct::{DirectAnswer, Successor};
use crate::message::ChainReport;
use crate::source::requested::Requested;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A host that gets nothing for so long fails, though the host before has frames: longer than the
/// sync of a slow disk.
pub const STALL_MAX: Duration = Duration::from_secs(60);

/// The state of the hosts of a chain at the source.
pub struct State {
    pub members: Vec<Member>,
    /// The hosts of the chain, each before the host that it sends to.
    pub chain: Vec<usize>,
    /// The number of orders so far.
    pub orders: u64,
    /// The number of the last order of the source's connection.
    pub source_order: u64,
    /// The regular files of each list that was not answered by all hosts.
    pub lists: VecDeque<u32>,
    /// The number of lists that all hosts answered.
    pub lists_answered: u64,
    pub comparisons: Comparisons,
    /// The frames that all hosts have.
    pub released: u64,
    pub moves: Moves,
    pub is_over: bool,
}

/// A host.
pub struct Member {
    pub name: String,
    /// Whether this is the host of the source.
    pub is_local: bool,
    /// How the host before connects to the host.
    pub successor: Option<Successor>,
    pub end: Option<HostEnd>,
    /// Whether the host is out of the chain.
    pub is_out: bool,
    pub abort: Option<Box<dyn FnOnce() + Send>>,
    /// Answers to lists, until all hosts answered.
    pub answers: VecDeque<Requested>,
    /// The number of answers so far.
    pub answered: u64,
    pub report: ChainReport,
    /// The number of the last order to the host.
    pub order: u64,
    pub heard: Instant,
    /// When the host got a frame, or had all frames of the host before.
    pub progressed: Instant,
    pub rate: MemberRate,
}

impl State {
    /// The hosts that get content.
    pub fn open_hosts(&self) -> Vec<usize> {
        let is_open = |member: &Member| !member.is_out && member.end.is_none();
        (0..self.members.len()).filter(|&number| is_open(&self.members[number])).collect()
    }

    /// A host that the host before cannot reach.
    pub fn unreachable(&self, link: Option<(&Link, &FrameQueue)>) -> Option<(usize, String)> {
        let mut before: Option<&Member> = None;
        for &number in &self.chain {
            let (failure, order) = match before {
                Some(before) => (before.report.failure.clone(), before.order),
                None => (link.and_then(|(link, _)| link.failure()), self.source_order),
            };
            // A report may be older than the last order.
            let failure = failure.filter(|(number, _)| *number == order).map(|(_, text)| text);
            if let Some(failure) = failure {
                let before = before.map_or("this host", |before| &before.name);
                let reason = format!("{before} cannot send to it: {failure} (see --data-port)");
                return Some((number, reason));
            }
            before = Some(&self.members[number]);
        }
        None
    }

    /// A host that lacks frames of the host before, and gets none.
    pub fn stalled(&mut self, now: Instant, has_source_unsent: bool) -> Option<usize> {
        let frames = self.chain.iter().map(|&number| self.members[number].report.frames);
        let frames: Vec<_> = std::iter::once(u64::MAX).chain(frames).collect();
        for (place, &number) in self.chain.iter().enumerate() {
            let member = &mut self.members[number];
            let has_all = match place {
                0 => !has_source_unsent,
                place => member.report.frames >= frames[place],
            };
            if has_all {
                member.progressed = now;
            } else if now - member.progressed > STALL_MAX {
                return Some(number);
            }
        }
        None
    }
}

impl Member {
    /// A host that answered about connections.
    pub fn new(name: &str, is_local: bool, answer: Option<&DirectAnswer>) -> Self {
        let host = name.rsplit('@').next().unwrap_or(name).to_owned();
        let successor = match answer {
            Some(DirectAnswer::Listens(listening)) => {
                Some(Successor { host, listening: listening.clone() })
            }
            _ => None,
        };
        Self {
            name: name.to_owned(),
            is_local,
            successor,
            end: None,
            is_out: false,
            abort: None,
            answers: VecDeque::new(),
            answered: 0,
            report: ChainReport::default(),
            order: 0,
            heard: Instant::now(),
            progressed: Instant::now(),
            rate: MemberRate::default(),
        }
    }
}
