//! Placement: spreads connections evenly over event loops.
//!
//! The kernel gives a connection to the loop that accepts it first, so a few long connections may
//! all be on one loop. With a placement, all loops accept from the same sockets, and the loop that
//! accepts a connection passes it to the loop with the fewest connections. Passing costs a wake-up,
//! which only pays for long connections.

use crate::listener::Accepted;
use crate::log_limiter::LogLimiter;
use crate::waker::Waker;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::warn;

/// The connections of all event loops of a service.
#[derive(Debug)]
pub struct Placement {
    state: Mutex<State>,
    /// Notified when an event loop stops accepting, or ends.
    has_stopped: Condvar,
    wakers: Box<[Arc<Waker>]>,
    connections_max: usize,
    started: Instant,
}

#[derive(Debug)]
struct State {
    loops: Vec<LoopState>,
    /// Places of connections that another process did not hand over yet.
    kept: usize,
    /// Whether accepting is paused.
    is_paused: bool,
    /// For the message that all places are taken.
    shortage: LogLimiter,
}

#[derive(Debug, Default)]
struct LoopState {
    /// The number of places taken on the loop: by its connections, by the connections in `passed`,
    /// and by the connections that the loop is about to accept.
    open: usize,
    /// The connections that other loops passed to the loop.
    passed: Vec<Placed>,
    /// Whether the loop ended, so that connections are not passed to it.
    has_ended: bool,
    /// Whether the loop stopped accepting because all places are taken.
    waits_for_place: bool,
    /// Whether the loop stopped accepting because of a pause.
    has_paused: bool,
}

/// The place of a connection on an event loop. Dropping it makes room for another.
#[derive(Debug)]
pub struct Place {
    placement: Arc<Placement>,
    index: usize,
}

/// An accepted connection with its place; without one if connections are not spread.
#[derive(Debug)]
pub(crate) struct Placed {
    pub accepted: Accepted,
    pub place: Option<Place>,
}

impl Place {
    /// Puts an accepted connection on the loop with the fewest connections. Returns the connection
    /// if this is the loop that accepted it.
    pub(crate) fn put(mut self, accepted: Accepted) -> Option<Placed> {
        let placement = Arc::clone(&self.placement);
        let from = self.index;
        let mut state = placement.lock();
        let loops = &mut state.loops;
        // The accepting loop counts this connection, and keeps it unless another loop has fewer.
        let others = (0..loops.len()).filter(|&other| other != from && !loops[other].has_ended);
        let fewest = others.min_by_key(|&other| loops[other].open);
        let Some(to) = fewest.filter(|&other| loops[other].open + 1 < loops[from].open) else {
            return Some(Placed { accepted, place: Some(self) });
        };
        loops[from].open -= 1;
        loops[to].open += 1;
        self.index = to;
        loops[to].passed.push(Placed { accepted, place: Some(self) });
        drop(state);
        placement.wakers[to].wake();
        None
    }

    /// Moves the place to another loop.
    pub(crate) fn move_to(&mut self, index: usize) {
        let mut state = self.placement.lock();
        state.loops[self.index].open -= 1;
        state.loops[index].open += 1;
        self.index = index;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.placement.lock();
        state.loops[self.index].open -= 1;
        if state.is_paused {
            return;
        }
        // One place, one loop.
        let waiting = state.loops.iter().position(|one| one.waits_for_place);
        if let Some(index) = waiting {
            state.loops[index].waits_for_place = false;
            drop(state);
            self.placement.wakers[index].wake();
        }
    }
}

impl Placement {
    /// Creates the placement of the event loops that have these wakers, for so many connections at
    /// a time over all of them.
    pub fn new(wakers: &[Arc<Waker>], connections_max: usize) -> Arc<Self> {
        let loops = wakers.iter().map(|_| LoopState::default()).collect();
        let shortage = LogLimiter::default();
        let state = Mutex::new(State { loops, kept: 0, is_paused: false, shortage });
        let (has_stopped, started) = (Condvar::new(), Instant::now());
        Arc::new(Self { state, has_stopped, wakers: wakers.into(), connections_max, started })
    }

    /// Reserves a place for a connection that loop `index` is about to accept. If all places are
    /// taken, the loop is woken when a place is free.
    pub(crate) fn reserve(self: &Arc<Self>, index: usize) -> Option<Place> {
        let mut state = self.lock();
        if state.is_paused {
            return None;
        }
        if state.open() + state.kept >= self.connections_max {
            state.loops[index].waits_for_place = true;
            let is_told = state.shortage.allow(self.started.elapsed().as_secs() as u32);
            drop(state);
            if is_told {
                let most = self.connections_max;
                warn!(
                    "{most} connections are open, as many as there may be (max-connections): \
                     others wait until one ends"
                );
            }
            return None;
        }
        state.loops[index].open += 1;
        Some(Place { placement: Arc::clone(self), index })
    }

    /// Takes a place on loop `index`, even beyond the limit.
    pub fn occupy(self: &Arc<Self>, index: usize) -> Place {
        self.lock().loops[index].open += 1;
        Place { placement: Arc::clone(self), index }
    }

    /// Takes a place that was kept, or else a place beyond the limit. The place is moved to the
    /// connection's loop later.
    pub fn occupy_kept(self: &Arc<Self>) -> Place {
        let mut state = self.lock();
        state.kept = state.kept.saturating_sub(1);
        state.loops[0].open += 1;
        Place { placement: Arc::clone(self), index: 0 }
    }

    /// The number of connections.
    pub fn open(&self) -> usize {
        self.lock().open()
    }

    /// Keeps places for connections that another process is about to hand over.
    pub fn keep(&self, places: usize) {
        let mut state = self.lock();
        state.kept = state.kept.saturating_add(places);
    }

    /// Gives up so many of the places that are kept, or all.
    pub fn give_up_kept(&self, places: usize) {
        let mut state = self.lock();
        state.kept = state.kept.saturating_sub(places);
        self.wake_waiting(state);
    }

    /// Stops accepting until [`Placement::resume`]. Clients that connect wait in the kernel.
    ///
    /// Blocks until every event loop has removed its listening sockets from its epoll set. With
    /// `EPOLLEXCLUSIVE` the kernel wakes one of the loops of all processes that share a socket, and
    /// the wake-up of a loop that does not accept would be lost. False if that takes longer than
    /// `time_max`.
    pub fn pause(&self, time_max: Duration) -> bool {
        let mut state = self.lock();
        state.is_paused = true;
        state.loops.iter_mut().for_each(|one| one.has_paused = false);
        self.wakers.iter().for_each(|waker| waker.wake());
        let is_awaited =
            |state: &mut State| state.loops.iter().any(|one| !one.has_paused && !one.has_ended);
        let waited = self.has_stopped.wait_timeout_while(state, time_max, is_awaited);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_awaited(&mut state)
    }

    /// Whether accepting is paused.
    pub(crate) fn is_paused(&self) -> bool {
        self.lock().is_paused
    }

    /// Records that a loop stopped accepting because of a pause.
    pub(crate) fn confirm_pause(&self, index: usize) {
        self.lock().loops[index].has_paused = true;
        self.has_stopped.notify_all();
    }

    /// Accepts connections again.
    pub fn resume(&self) {
        self.lock().is_paused = false;
        self.wakers.iter().for_each(|waker| waker.wake());
    }

    /// Wakes every loop that did not find a place.
    fn wake_waiting(&self, mut state: MutexGuard<'_, State>) {
        let waiting = state.loops.iter_mut().map(|one| mem::take(&mut one.waits_for_place));
        let waiting: Vec<_> = waiting.collect();
        drop(state);
        for (waker, _) in self.wakers.iter().zip(waiting).filter(|(_, waits)| *waits) {
            waker.wake();
        }
    }

    /// Takes the connections that were passed to a loop.
    pub(crate) fn take(&self, index: usize) -> Vec<Placed> {
        mem::take(&mut self.lock().loops[index].passed)
    }

    /// Ends a loop, unless connections were passed to it since [`Placement::take`].
    pub(crate) fn end(&self, index: usize) -> bool {
        let state = &mut self.lock().loops[index];
        state.has_ended = state.passed.is_empty();
        state.waits_for_place = false;
        self.has_stopped.notify_all();
        state.has_ended
    }

    /// Undoes [`Placement::end`].
    pub(crate) fn resume_loop(&self, index: usize) {
        self.lock().loops[index].has_ended = false;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn open(&self) -> usize {
        self.loops.iter().map(|one| one.open).sum()
    }
}

/// A loop's part in a placement. The drop ends the part, even if the loop panicked: connections are
/// not passed to the loop any more, and the connections that were passed to it are closed.
#[derive(Debug)]
pub(crate) struct Membership {
    pub placement: Arc<Placement>,
    pub index: usize,
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut state = self.placement.lock();
        let own = &mut state.loops[self.index];
        own.has_ended = true;
        own.waits_for_place = false;
        let passed = mem::take(&mut own.passed);
        self.placement.has_stopped.notify_all();
        // Each of them takes the lock.
        drop(state);
        drop(passed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    fn accepted() -> Accepted {
        let socket = OwnedFd::from(UnixStream::pair().unwrap().0);
        Accepted::new(socket, None)
    }

    fn placement(loops: usize) -> Arc<Placement> {
        let wakers: Vec<_> = (0..loops).map(|_| Arc::new(Waker::new().unwrap())).collect();
        Placement::new(&wakers, 16)
    }

    fn put(placement: &Arc<Placement>, index: usize) -> Option<Placed> {
        placement.reserve(index).unwrap().put(accepted())
    }

    #[test]
    fn connections_are_spread_evenly_whichever_loop_accepts_them() {
        let placement = placement(4);
        let mut kept: Vec<Placed> = Vec::new();
        for number in 0..16 {
            kept.extend(put(&placement, number / 5));
        }
        assert!(placement.reserve(0).is_none(), "there are 16");
        for index in 0..4 {
            kept.extend(placement.take(index));
        }
        let on =
            |index| kept.iter().filter(|one| one.place.as_ref().unwrap().index == index).count();
        assert_eq!([0, 1, 2, 3].map(on), [4; 4]);
        kept.clear();
        assert_eq!(placement.open(), 0);
    }

    #[test]
    fn a_loop_that_has_found_no_place_is_woken_when_another_loop_has_one() {
        let placement = placement(2);
        let places: Vec<_> = (0..16).map(|_| placement.reserve(1).unwrap()).collect();
        assert!(placement.reserve(0).is_none());
        assert!(!placement.wakers[0].is_set());
        drop(places);
        assert!(placement.wakers[0].is_set() && !placement.wakers[1].is_set());
    }

    #[test]
    fn no_other_connection_has_a_place_that_is_kept() {
        let placement = placement(2);
        let _places: Vec<_> = (0..12).map(|_| placement.reserve(1).unwrap()).collect();
        placement.keep(3);
        let last = placement.reserve(0).unwrap();
        assert!(placement.reserve(1).is_none(), "13 and 3");
        let mut handed = placement.occupy_kept();
        handed.move_to(1);
        assert!(placement.reserve(1).is_none() && !placement.wakers[1].is_set(), "14 and 2");
        placement.give_up_kept(1);
        assert!(placement.wakers[1].is_set());
        drop(placement.reserve(1).unwrap());
        drop(last);
        placement.give_up_kept(usize::MAX);
        let others: Vec<_> = (0..9).map_while(|_| placement.reserve(0)).collect();
        assert_eq!(others.len(), 3);
    }

    #[test]
    fn a_pause_begins_once_every_loop_has_stopped_accepting() {
        let placement = placement(3);
        assert!(placement.end(2));
        placement.confirm_pause(0);
        assert!(!placement.pause(Duration::ZERO), "both are asked anew");
        assert!(placement.reserve(0).is_none());
        let paused = thread::scope(|scope| {
            let paused = scope.spawn(|| placement.pause(Duration::from_secs(60)));
            while !paused.is_finished() {
                (0..2).for_each(|index| placement.confirm_pause(index));
                thread::yield_now();
            }
            paused.join().unwrap()
        });
        assert!(paused && placement.is_paused());
        placement.resume();
        assert!(placement.reserve(0).is_some());
    }

    #[test]
    fn a_loop_that_has_ended_is_passed_nothing() {
        let placement = placement(2);
        let first = put(&placement, 0);
        assert!(put(&placement, 0).is_none(), "it is passed to the other");
        assert!(!placement.end(1), "a connection waits there");
        drop(placement.take(1));
        assert!(placement.end(1));
        let second = put(&placement, 0);
        assert!(first.is_some() && second.is_some());
    }

    /// As in a panic.
    #[test]
    fn what_was_passed_to_a_loop_that_ends_early_is_closed() {
        let placement = placement(2);
        let membership = Membership { placement: Arc::clone(&placement), index: 1 };
        let (_kept, passed) = (put(&placement, 0), put(&placement, 0));
        assert!(passed.is_none());
        drop(membership);
        assert_eq!(placement.lock().loops[1].open, 0);
        assert!(put(&placement, 0).is_some());
    }
}
