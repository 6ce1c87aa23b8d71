//! Placement: spreads connections evenly over event loops.
//!
//! The kernel gives a connection to whichever loop accepts it first, so that few long connections
//! may all be on one loop. With a placement, all loops accept from the same sockets, and the loop
//! that accepts a connection passes it to the one with the fewest. Passing costs a wake-up, which
//! only pays for connections that last.

use crate::listener::Accepted;
use crate::waker::Waker;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The connections of all event loops of a service.
#[derive(Debug)]
pub struct Placement {
    loops: Mutex<Vec<LoopState>>,
    wakers: Box<[Arc<Waker>]>,
    connections_max: usize,
}

#[derive(Debug, Default)]
struct LoopState {
    /// Connections that it has, and those that are passed to it.
    open: usize,
    /// Connections that other loops have passed to it.
    passed: Vec<Placed>,
    /// Whether it takes no more connections.
    has_ended: bool,
    /// Whether it has stopped accepting because all places are taken.
    waits_for_place: bool,
}

/// The place of a connection on an event loop. Dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct Place {
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
    /// Puts an accepted connection on the loop with the fewest. Returns it if that is the loop
    /// which has accepted it.
    pub(crate) fn put(mut self, accepted: Accepted) -> Option<Placed> {
        let placement = Arc::clone(&self.placement);
        let from = self.index;
        let mut loops = placement.lock();
        // The loop itself counts this connection, and is taken if no other has fewer.
        let others = (0..loops.len()).filter(|&other| other != from && !loops[other].has_ended);
        let fewest = others.min_by_key(|&other| loops[other].open);
        let Some(to) = fewest.filter(|&other| loops[other].open + 1 < loops[from].open) else {
            return Some(Placed { accepted, place: Some(self) });
        };
        loops[from].open -= 1;
        loops[to].open += 1;
        self.index = to;
        loops[to].passed.push(Placed { accepted, place: Some(self) });
        drop(loops);
        placement.wakers[to].wake();
        None
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut loops = self.placement.lock();
        loops[self.index].open -= 1;
        // One place, one loop.
        let waiting = loops.iter().position(|state| state.waits_for_place);
        if let Some(index) = waiting {
            loops[index].waits_for_place = false;
            drop(loops);
            self.placement.wakers[index].wake();
        }
    }
}

impl Placement {
    /// Creates the placement of the event loops that have these wakers, for so many connections at
    /// a time over all of them.
    pub fn new(wakers: &[Arc<Waker>], connections_max: usize) -> Arc<Self> {
        let loops = wakers.iter().map(|_| LoopState::default()).collect();
        Arc::new(Self { loops: Mutex::new(loops), wakers: wakers.into(), connections_max })
    }

    /// Reserves a place for a connection that loop `index` is about to accept. If all are taken,
    /// the loop is woken when there is one.
    pub(crate) fn reserve(self: &Arc<Self>, index: usize) -> Option<Place> {
        let mut loops = self.lock();
        if loops.iter().map(|state| state.open).sum::<usize>() >= self.connections_max {
            loops[index].waits_for_place = true;
            return None;
        }
        loops[index].open += 1;
        Some(Place { placement: Arc::clone(self), index })
    }

    /// Takes a place on loop `index`, also beyond the limit.
    pub(crate) fn occupy(self: &Arc<Self>, index: usize) -> Place {
        self.lock()[index].open += 1;
        Place { placement: Arc::clone(self), index }
    }

    /// Takes the connections that were passed to a loop.
    pub(crate) fn take(&self, index: usize) -> Vec<Placed> {
        mem::take(&mut self.lock()[index].passed)
    }

    /// Ends a loop, unless connections were passed to it since [`Placement::take`].
    pub(crate) fn end(&self, index: usize) -> bool {
        let state = &mut self.lock()[index];
        state.has_ended = state.passed.is_empty();
        state.waits_for_place = false;
        state.has_ended
    }

    fn lock(&self) -> MutexGuard<'_, Vec<LoopState>> {
        self.loops.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A loop's part in a placement. Dropping it ends the loop, in whatever way it has ended: it is
/// passed nothing more, and what was passed to it is closed.
#[derive(Debug)]
pub(crate) struct Membership {
    pub placement: Arc<Placement>,
    pub index: usize,
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut loops = self.placement.lock();
        let state = &mut loops[self.index];
        state.has_ended = true;
        state.waits_for_place = false;
        let passed = mem::take(&mut state.passed);
        // Each of them takes the lock.
        drop(loops);
        drop(passed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

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
        assert!(placement.lock().iter().all(|state| state.open == 0));
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
        assert_eq!(placement.lock()[1].open, 0);
        assert!(put(&placement, 0).is_some());
    }
}
