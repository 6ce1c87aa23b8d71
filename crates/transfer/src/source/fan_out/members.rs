//! The hosts of a chain as the source sees them: what each host answered, how far each host is, and
//! which host follows which.

use super::broadcast::Broadcast;
use super::comparisons::{Comparisons, Ranges};
use super::moves::Moves;
use super::state::{Member, STALL_MAX, State};
use super::{Host, HostEnd, HostResult};
use crate::chain::{FrameQueue, Link};
use crate::direct::Notice;
use crate::error::Error;
use crate::message::{BlocksPlace, ToDestination, ToSource};
use crate::progress::Progress;
use crate::source::jobs::Jobs;
use crate::source::requested::{Requested, union};
use crate::summary::Summary;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A host without a message for so long is lost. Each host sends a message at least each second.
const HOST_SILENCE_MAX: Duration = Duration::from_secs(8);

/// The hosts of a chain.
pub struct Members<'s> {
    state: Mutex<State>,
    jobs: &'s Jobs,
    progress: &'s Progress,
    broadcast: &'s Broadcast,
    notice: Notice,
    /// The connection to the first host; `None` in a dry run.
    link: Option<(&'s Link, &'s FrameQueue)>,
}

impl<'s> Members<'s> {
    /// These hosts, in the order of the chain.
    pub fn new<R, W>(
        hosts: &[Host<R, W>],
        jobs: &'s Jobs,
        progress: &'s Progress,
        broadcast: &'s Broadcast,
        link: Option<(&'s Link, &'s FrameQueue)>,
        notice: Notice,
    ) -> Self {
        let members =
            hosts.iter().map(|host| Member::new(&host.name, host.is_local, host.answer.as_ref()));
        let state = State {
            members: members.collect(),
            chain: (0..hosts.len()).collect(),
            orders: 0,
            source_order: 0,
            lists: VecDeque::new(),
            lists_answered: 0,
            comparisons: Comparisons::default(),
            released: 0,
            moves: Moves::default(),
            is_over: false,
        };
        Self { state: Mutex::new(state), jobs, progress, broadcast, link, notice }
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
        if self.link.is_some() {
            for number in 0..state.members.len() {
                if state.members[number].successor.is_none() {
                    let reason = "it cannot listen for connections (see --data-port)".to_owned();
                    self.remove(&mut state, number, HostEnd::Failed(reason));
                }
            }
        }
        for place in 0..=state.chain.len() {
            self.order(&mut state, place);
        }
    }

    /// Tells the host before a place of the chain, or the source, which host has the place.
    fn order(&self, state: &mut State, place: usize) {
        let Some((link, queue)) = self.link else { return };
        state.orders += 1;
        let order = state.orders;
        let next = state.chain.get(place);
        let successor = next.and_then(|&next| state.members[next].successor.clone());
        if let Some(before) = place.checked_sub(1) {
            let before = state.chain[before];
            state.members[before].order = order;
            self.broadcast.send_to(before, &ToDestination::Successor { order, successor });
        } else {
            state.source_order = order;
            link.order(queue, order, successor);
        }
    }

    /// Records that a list with so many regular files is sent. The hosts answer if there are any.
    pub fn add_list(&self, files: u32) {
        if files > 0 {
            self.state().lists.push_back(files);
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
            ToSource::Requested { count, bits, held, comparable } => {
                let answer = Requested { count, bits, held, comparable };
                self.take_requested(&mut state, number, answer);
            }
            ToSource::Differing { place, ranges } => {
                self.take_differing(&mut state, number, place, ranges);
            }
            ToSource::Times(_) => {}
            ToSource::Chain(report) => {
                if report.frames > member.report.frames {
                    member.progressed = Instant::now();
                }
                member.report = report;
            }
            ToSource::Done(summary) => {
                member.end = Some(HostEnd::Complete(Box::new(summary)));
                self.go_on_without(&mut state);
            }
            ToSource::BadDestination { path, problem } => {
                let reason = format!("{path}: {problem}");
                self.remove(&mut state, number, HostEnd::Failed(reason));
            }
            ToSource::GaveUp(reason) => self.remove(&mut state, number, HostEnd::Failed(reason)),
        }
    }

    /// Takes the answer of a host to a list.
    fn take_requested(&self, state: &mut State, number: usize, answer: Requested) {
        let State { members, lists, lists_answered, .. } = &mut *state;
        let member = &mut members[number];
        // A host that announced its end answers nothing.
        let list = member.answered.checked_sub(*lists_answered).filter(|_| member.end.is_none());
        let files = list.and_then(|list| lists.get(list as usize)).copied();
        let checked = files.ok_or("an answer to nothing").and_then(|files| answer.check(files));
        if let Err(problem) = checked {
            let reason = Error::Protocol(problem).to_string();
            return self.remove(state, number, HostEnd::Failed(reason));
        }
        member.answered += 1;
        member.answers.push_back(answer);
        self.merge(state);
    }

    /// Takes the ranges that a host lacks. A host that did not request the file answers no ranges.
    fn take_differing(&self, state: &mut State, number: usize, place: BlocksPlace, ranges: Ranges) {
        let asked = (place, self.jobs.comparison_end(place));
        if let Err(problem) = state.comparisons.add(number, asked, ranges) {
            let reason = Error::Protocol(problem).to_string();
            return self.remove(state, number, HostEnd::Failed(reason));
        }
        let hosts = state.open_hosts();
        if let Some(ranges) = state.comparisons.take(place, &hosts) {
            self.end_comparison(place, ranges);
        }
    }

    /// Ends a comparison, whose answers were examined when they arrived.
    fn end_comparison(&self, place: BlocksPlace, ranges: Ranges) {
        match self.jobs.end_comparison(place, ranges) {
            Ok(equal_bytes) => self.progress.add_bytes(equal_bytes),
            Err(error) => self.jobs.fail(error),
        }
    }

    /// Records that the streams of a host failed.
    pub fn fail(&self, number: usize, error: &Error) {
        let mut state = self.state();
        if state.is_over {
            return;
        }
        let reason = match error {
            Error::Connection(failure) => format!("its connection ended early ({failure})"),
            error => error.to_string(),
        };
        self.remove(&mut state, number, HostEnd::Failed(reason));
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
        if let Some(place) = state.chain.iter().position(|&other| other == number) {
            state.chain.remove(place);
            state.measure_again(place);
            self.order(state, place);
        }
        self.go_on_without(state);
    }

    /// Ends what waited for a host that ended.
    fn go_on_without(&self, state: &mut State) {
        let hosts = state.open_hosts();
        if !hosts.is_empty() {
            for (place, ranges) in state.comparisons.take_answered(&hosts) {
                self.end_comparison(place, ranges);
            }
        }
        self.merge(state);
    }

    /// Makes a host the last of the chain. The host has at least the frames of every host behind,
    /// so it lacks only frames that the last host will get.
    fn move_last(&self, state: &mut State, place: usize) {
        let number = state.chain.remove(place);
        state.chain.push(number);
        state.measure_again(place);
        let last = state.chain.len();
        // The host that moves stops first, because two hosts must not send to one.
        self.order(state, last);
        self.order(state, place);
        self.order(state, last - 1);
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
            let Some(Requested { count, bits, held, comparable }) = union(answers) else { break };
            state.lists.pop_front();
            state.lists_answered += 1;
            self.jobs.add_answer(ToSource::Requested { count, bits, held, comparable });
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

    /// Removes hosts that are silent or out of reach, moves slow hosts, and releases frames.
    pub fn examine(&self) {
        let mut state = self.state();
        if state.is_over {
            return;
        }
        let now = Instant::now();
        for number in 0..state.members.len() {
            let Member { is_out, heard, .. } = state.members[number];
            if !is_out && now - heard > HOST_SILENCE_MAX {
                let seconds = HOST_SILENCE_MAX.as_secs();
                let reason = format!("no message for {seconds} s, so the connection is cut");
                self.remove(&mut state, number, HostEnd::Failed(reason));
            }
        }
        let Some((_, queue)) = self.link else { return };
        if let Some(number) = state.stalled(now, queue.has_unsent()) {
            let seconds = STALL_MAX.as_secs();
            let reason = format!("nothing arrives there for {seconds} s, though it answers");
            self.remove(&mut state, number, HostEnd::Failed(reason));
        }
        if let Some((number, reason)) = state.unreachable(self.link) {
            self.remove(&mut state, number, HostEnd::Failed(reason));
        }
        self.examine_rates(&mut state, now);
        let frames = state.chain.iter().map(|&number| state.members[number].report.frames).min();
        if let Some(frames) = frames
            && frames > state.released
        {
            state.released = frames;
            queue.release(frames);
            // The number fits into a frame.
            let _ = self.broadcast.send(&ToDestination::Released(frames));
        }
    }

    /// Moves a slow host to the end of the chain, where it delays no other host.
    fn examine_rates(&self, state: &mut State, now: Instant) {
        for member in &mut state.members {
            member.rate.measure(now, member.report.bytes);
        }
        if let Some(text) = state.end_move(now) {
            (self.notice)(&text);
        }
        if state.has_move() {
            return;
        }
        if let Some((place, reason)) = state.slow(now) {
            let number = state.chain[place];
            let before = place.checked_sub(1).map(|before| state.chain[before]);
            let is_full = before.is_some_and(|before| state.members[before].report.is_full);
            if state.may_move(place) {
                state.begin_move(place, now);
                self.move_last(state, place);
            } else if is_full {
                // Small files wait in memory.
                self.remove(state, number, HostEnd::Slow(reason));
            }
            return;
        }
        if let Some(place) = state.trial(now, self.progress.snapshot().bytes_requested) {
            state.begin_move(place, now);
            self.move_last(state, place);
        }
    }

    /// Ends the transfer. What the hosts send afterwards does not count.
    pub fn end(&self) {
        self.state().is_over = true;
    }

    /// Ends the streams of all hosts.
    pub fn abort(&self) {
        for member in &mut self.state().members {
            if let Some(abort) = member.abort.take() {
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
