//! The hosts of a chain as the source sees them: what each host answered, how far each host is, and
//! which host follows which.

use super::broadcast::Broadcast;
use super::{Host, HostEnd, HostResult};
use crate::chain::{FrameQueue, Link};
use crate::direct::{DirectAnswer, Successor};
use crate::error::Error;
use crate::message::{ChainReport, Held, ToDestination, ToSource};
use crate::source::jobs::Jobs;
use crate::summary::Summary;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A host without a message for so long is lost. Each host sends a message at least each second.
const SILENCE_MAX: Duration = Duration::from_secs(6);
/// The time over which the rates of hosts are compared.
const RATE_TIME: Duration = Duration::from_secs(2);
/// The most bytes that a host may be behind the host before, however slow it is: the buffers of
/// sockets and the sync of a disk.
const BEHIND_BYTES_MAX: u64 = 32 << 20;
/// A host is slow if the host before is so many times faster.
const SLOW_RATIO: f64 = 3.0;

/// The hosts of a chain.
pub struct Members<'s> {
    state: Mutex<State>,
    jobs: &'s Jobs,
    broadcast: &'s Broadcast,
    /// The connection to the first host; `None` in a dry run.
    link: Option<(&'s Link, &'s FrameQueue)>,
}

struct State {
    members: Vec<Member>,
    /// The frames that all hosts have.
    released: u64,
    is_over: bool,
}

struct Member {
    name: String,
    /// How the host before connects to the host.
    successor: Option<Successor>,
    end: Option<HostEnd>,
    /// Whether the host is out of the chain.
    is_out: bool,
    abort: Option<Box<dyn FnOnce() + Send>>,
    /// Answers to lists, until all hosts answered.
    answers: VecDeque<Requested>,
    report: ChainReport,
    heard: Instant,
    /// The bytes that the host had, each [`Members::examine`].
    history: VecDeque<(Instant, u64)>,
    /// The highest rate so far, in bytes per second.
    rate_max: f64,
}

/// The answer of a host to a list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requested {
    count: u32,
    bits: Vec<u8>,
    held: Vec<Held>,
}

impl<'s> Members<'s> {
    /// These hosts, in the order of the chain.
    pub fn new<R, W>(
        hosts: &[Host<R, W>],
        jobs: &'s Jobs,
        broadcast: &'s Broadcast,
        link: Option<(&'s Link, &'s FrameQueue)>,
    ) -> Self {
        let members = hosts.iter().map(|host| Member::new(&host.name, host.answer.as_ref()));
        let state = State { members: members.collect(), released: 0, is_over: false };
        Self { state: Mutex::new(state), jobs, broadcast, link }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what ends the streams of a host.
    pub fn set_abort(&self, number: usize, abort: Box<dyn FnOnce() + Send>) {
        self.state().members[number].abort = Some(abort);
    }

    /// Tells each host which host follows.
    pub fn order_all(&self) {
        let mut state = self.state();
        let unable: Vec<_> = if self.link.is_some() {
            let members = state.members.iter().enumerate();
            members.filter(|(_, member)| member.successor.is_none()).map(|(at, _)| at).collect()
        } else {
            Vec::new()
        };
        for number in unable {
            let reason = "it cannot listen for connections (see --data-port)".to_owned();
            self.remove(&mut state, number, HostEnd::Failed(reason));
        }
        let chain: Vec<_> = state.chain().collect();
        for place in 0..=chain.len() {
            let before = place.checked_sub(1).map(|before| chain[before]);
            self.order(&state, before, chain.get(place).copied());
        }
    }

    /// Makes `next` follow a host, or the source.
    fn order(&self, state: &State, before: Option<usize>, next: Option<usize>) {
        let Some((link, queue)) = self.link else { return };
        let successor = next.and_then(|next| state.members[next].successor.clone());
        match before {
            Some(before) => self.broadcast.send_to(before, &ToDestination::Successor(successor)),
            None => link.order(queue, successor),
        }
    }

    /// Takes a message of a host.
    pub fn take(&self, number: usize, answer: ToSource) {
        let mut state = self.state();
        let member = &mut state.members[number];
        member.heard = Instant::now();
        if member.is_out {
            return;
        }
        match answer {
            ToSource::Requested { count, bits, held } => {
                member.answers.push_back(Requested { count, bits, held });
                self.merge(&mut state);
            }
            ToSource::Times(_) => {}
            ToSource::Chain(report) => member.report = report,
            ToSource::Done(summary) => {
                member.end = Some(HostEnd::Complete(Box::new(summary)));
                self.merge(&mut state);
            }
            ToSource::BadDestination { path, problem } => {
                let reason = format!("{path}: {problem}");
                self.remove(&mut state, number, HostEnd::Failed(reason));
            }
            ToSource::GaveUp(reason) => self.remove(&mut state, number, HostEnd::Failed(reason)),
        }
    }

    /// Records that the streams of a host failed.
    pub fn fail(&self, number: usize, error: &Error) {
        let mut state = self.state();
        if !state.is_over {
            self.remove(&mut state, number, HostEnd::Failed(error.to_string()));
        }
    }

    /// Takes a host out of the chain. The host before then sends to the host behind. A host that
    /// has the copy keeps the copy.
    fn remove(&self, state: &mut State, number: usize, end: HostEnd) {
        let member = &mut state.members[number];
        if std::mem::replace(&mut member.is_out, true) {
            return;
        }
        member.end.get_or_insert(end);
        if let Some(abort) = member.abort.take() {
            abort();
        }
        self.broadcast.leave(number);
        let before = state.chain().take_while(|&other| other < number).last();
        let next = state.chain().find(|&other| other > number);
        self.order(state, before, next);
        self.merge(state);
    }

    /// Gives the session what all hosts answered.
    fn merge(&self, state: &mut State) {
        loop {
            let open =
                || state.members.iter().filter(|member| !member.is_out && member.end.is_none());
            if open().count() == 0 || open().any(|member| member.answers.is_empty()) {
                break;
            }
            let answers = state.members.iter_mut().filter(|one| !one.is_out && one.end.is_none());
            let answers: Vec<_> = answers.filter_map(|one| one.answers.pop_front()).collect();
            let Some(Requested { count, bits, held }) = union(answers) else {
                self.jobs.end_answers(Error::Protocol("answers to different lists"));
                return;
            };
            self.jobs.add_answer(ToSource::Requested { count, bits, held });
        }
        if state.is_over || state.members.iter().any(|member| member.end.is_none()) {
            return;
        }
        state.is_over = true;
        let is_complete = |member: &Member| matches!(member.end, Some(HostEnd::Complete(_)));
        if state.members.iter().any(is_complete) {
            self.jobs.add_answer(ToSource::Done(Summary::default()));
        } else {
            self.jobs.end_answers(Error::Connection(std::io::ErrorKind::NotConnected.into()));
        }
    }

    /// Removes hosts that are silent, slow or out of reach, and releases frames.
    pub fn examine(&self) {
        let mut state = self.state();
        if state.is_over || self.link.is_none() {
            return;
        }
        let now = Instant::now();
        for number in 0..state.members.len() {
            state.members[number].measure(now);
            if !state.members[number].is_out && now - state.members[number].heard > SILENCE_MAX {
                let seconds = SILENCE_MAX.as_secs();
                let reason = format!("no message for {seconds} s, so the connection is cut");
                self.remove(&mut state, number, HostEnd::Failed(reason));
            }
        }
        if let Some((number, end)) = state.unreachable(self.link).or_else(|| state.slow()) {
            self.remove(&mut state, number, end);
        }
        let chain = state.chain();
        let frames = chain.map(|number| state.members[number].report.frames).min();
        if let (Some(frames), Some((_, queue))) = (frames, self.link)
            && frames > state.released
        {
            state.released = frames;
            queue.release(frames);
            self.broadcast.send(&ToDestination::Released(frames));
        }
    }

    /// Ends the streams of all hosts, which may go on without the source only if something failed.
    pub fn end(&self, is_success: bool) {
        let mut state = self.state();
        state.is_over = true;
        for member in &mut state.members {
            if let Some(abort) = member.abort.take().filter(|_| !is_success || member.is_out) {
                abort();
            }
        }
    }

    /// How the transfer to each host ended.
    pub fn into_results(self) -> Vec<HostResult> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let result = |member: Member| {
            let stopped = || HostEnd::Failed("the transfer ended before".to_owned());
            HostResult { name: member.name, end: member.end.unwrap_or_else(stopped) }
        };
        state.members.into_iter().map(result).collect()
    }
}

impl State {
    /// The hosts of the chain, in order.
    fn chain(&self) -> impl Iterator<Item = usize> {
        let members = self.members.iter().enumerate();
        members.filter(|(_, member)| !member.is_out).map(|(number, _)| number)
    }

    /// A host that the host before cannot reach.
    fn unreachable(&self, link: Option<(&Link, &FrameQueue)>) -> Option<(usize, HostEnd)> {
        let mut before: Option<usize> = None;
        for number in self.chain() {
            let failure = match before {
                Some(before) => self.members[before].report.failure.clone(),
                None => link.and_then(|(link, _)| link.failure()),
            };
            if let Some(failure) = failure {
                let before = before.map_or("this host", |before| &self.members[before].name);
                let reason = format!("{before} cannot send to it: {failure} (see --data-port)");
                return Some((number, HostEnd::Failed(reason)));
            }
            before = Some(number);
        }
        None
    }

    /// A host that is much slower than the host before.
    fn slow(&self) -> Option<(usize, HostEnd)> {
        let chain: Vec<_> = self.chain().collect();
        for pair in chain.windows(2) {
            let (before, member) = (&self.members[pair[0]], &self.members[pair[1]]);
            let behind = before.report.bytes.saturating_sub(member.report.bytes);
            let Some(rate) = member.rate() else { continue };
            if behind > BEHIND_BYTES_MAX && rate * SLOW_RATIO < before.rate_max {
                let mib = |rate: f64| rate / f64::from(1 << 20);
                let reason = format!(
                    "it received {:.1} MiB/s, where {} received {:.1} MiB/s",
                    mib(rate),
                    before.name,
                    mib(before.rate_max)
                );
                return Some((pair[1], HostEnd::Slow(reason)));
            }
        }
        None
    }
}

impl Member {
    fn new(name: &str, answer: Option<&DirectAnswer>) -> Self {
        let host = name.rsplit('@').next().unwrap_or(name).to_owned();
        let successor = match answer {
            Some(DirectAnswer::Listens(listening)) => {
                Some(Successor { host, listening: listening.clone() })
            }
            _ => None,
        };
        Self {
            name: name.to_owned(),
            successor,
            end: None,
            is_out: false,
            abort: None,
            answers: VecDeque::new(),
            report: ChainReport::default(),
            heard: Instant::now(),
            history: VecDeque::new(),
            rate_max: 0.0,
        }
    }

    /// Records how far the host is now.
    fn measure(&mut self, now: Instant) {
        self.history.push_back((now, self.report.bytes));
        while self.history.front().is_some_and(|(at, _)| now - *at > RATE_TIME) {
            self.history.pop_front();
        }
        self.rate_max = self.rate_max.max(self.rate().unwrap_or(0.0));
    }

    /// The bytes per second over [`RATE_TIME`]; `None` before.
    fn rate(&self) -> Option<f64> {
        let ((begin, first), (end, last)) = (self.history.front()?, self.history.back()?);
        let seconds = (*end - *begin).as_secs_f64();
        let is_long = seconds > 0.8 * RATE_TIME.as_secs_f64();
        is_long.then(|| (last - first) as f64 / seconds)
    }
}

/// The files that at least one host requests, and the ranges that all of these hosts have. `None`
/// if the answers are not about the same list.
fn union(answers: Vec<Requested>) -> Option<Requested> {
    let mut answers = answers.into_iter();
    let mut all = answers.next()?;
    let has_bit = |bits: &[u8], at: u32| {
        bits.get(at as usize / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
    };
    for answer in answers {
        if answer.count != all.count || answer.bits.len() != all.bits.len() {
            return None;
        }
        let ranges_of = |held: &[Held], index| {
            held.iter().find(|held| held.index == index).map(|held| held.ranges.clone())
        };
        let mut held = Vec::new();
        let indices = all.held.iter().chain(&answer.held).map(|held| held.index);
        let indices: std::collections::BTreeSet<_> = indices.collect();
        for index in indices {
            let ours = ranges_of(&all.held, index).unwrap_or_default();
            let theirs = ranges_of(&answer.held, index).unwrap_or_default();
            let ranges = match (has_bit(&all.bits, index), has_bit(&answer.bits, index)) {
                (true, true) => intersection(&ours, &theirs),
                (true, false) => ours,
                (false, true) => theirs,
                (false, false) => continue,
            };
            if !ranges.is_empty() {
                held.push(Held { index, ranges });
            }
        }
        for (ours, theirs) in all.bits.iter_mut().zip(&answer.bits) {
            *ours |= theirs;
        }
        all.held = held;
    }
    Some(all)
}

/// The common parts of two lists of ranges in order.
fn intersection(ours: &[(u64, u64)], theirs: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut ours, mut theirs) =
        (ours.iter().copied().peekable(), theirs.iter().copied().peekable());
    let mut common = Vec::new();
    while let (Some(&one), Some(&other)) = (ours.peek(), theirs.peek()) {
        let (begin, end) = (one.0.max(other.0), one.1.min(other.1));
        if begin < end {
            common.push((begin, end));
        }
        if one.1 < other.1 {
            ours.next()
        } else {
            theirs.next()
        };
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requested(bits: u8, held: &[(u32, &[(u64, u64)])]) -> Requested {
        let held =
            held.iter().map(|(index, ranges)| Held { index: *index, ranges: ranges.to_vec() });
        Requested { count: 8, bits: vec![bits], held: held.collect() }
    }

    #[test]
    fn a_file_is_sent_if_one_host_requests_it_without_what_all_of_these_have() {
        let answers = vec![
            requested(0b0111, &[(0, &[(0, 10)]), (1, &[(0, 10), (20, 30)])]),
            requested(0b1010, &[(1, &[(5, 25)]), (3, &[(0, 7)])]),
        ];
        let expected =
            requested(0b1111, &[(0, &[(0, 10)]), (1, &[(5, 10), (20, 25)]), (3, &[(0, 7)])]);
        assert_eq!(union(answers), Some(expected));
        let other = Requested { count: 9, bits: vec![0, 0], held: Vec::new() };
        assert_eq!(union(vec![requested(0, &[]), other]), None);
    }

    proptest! {
        #[test]
        fn an_intersection_has_what_both_have(
            ours in prop::collection::btree_set(0_u64..60, 0..20),
            theirs in prop::collection::btree_set(0_u64..60, 0..20),
        ) {
            let ranges = |edges: &std::collections::BTreeSet<u64>| {
                let edges: Vec<_> = edges.iter().copied().collect();
                let (pairs, _) = edges.as_chunks::<2>();
                pairs.iter().map(|[begin, end]| (*begin, *end)).collect::<Vec<_>>()
            };
            let (ours, theirs) = (ranges(&ours), ranges(&theirs));
            let common = intersection(&ours, &theirs);
            let has = |ranges: &[(u64, u64)], at| ranges.iter().any(|one| one.0 <= at && at < one.1);
            for at in 0..60 {
                prop_assert_eq!(has(&common, at), has(&ours, at) && has(&theirs, at));
            }
        }
    }
}
