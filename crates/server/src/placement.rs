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

impl Drop for Place {
    fn drop(&mut self) {
        self.placement.lock()[self.index].open -= 1;
    }
}

impl Placement {
    /// Creates the placement of the event loops that have these wakers, for so many connections at
    /// a time over all of them.
    pub fn new(wakers: &[Arc<Waker>], connections_max: usize) -> Arc<Self> {
        let loops = wakers.iter().map(|_| LoopState::default()).collect();
        Arc::new(Self { loops: Mutex::new(loops), wakers: wakers.into(), connections_max })
    }

    /// Whether there are as many connections as there may be.
    pub(crate) fn is_full(&self) -> bool {
        self.lock().iter().map(|state| state.open).sum::<usize>() >= self.connections_max
    }

    /// Places a connection that loop `index` has accepted. Returns it if it stays there.
    pub(crate) fn place(self: &Arc<Self>, index: usize, accepted: Accepted) -> Option<Placed> {
        let mut loops = self.lock();
        // The loop itself, if no other has fewer.
        let others = (0..loops.len()).filter(|&other| other != index && !loops[other].has_ended);
        let target = [index].into_iter().chain(others).min_by_key(|&at| loops[at].open)?;
        loops[target].open += 1;
        let place = Some(Place { placement: Arc::clone(self), index: target });
        let placed = Placed { accepted, place };
        if target == index {
            return Some(placed);
        }
        loops[target].passed.push(placed);
        drop(loops);
        self.wakers[target].wake();
        None
    }

    /// Takes the connections that were passed to a loop.
    pub(crate) fn take(&self, index: usize) -> Vec<Placed> {
        mem::take(&mut self.lock()[index].passed)
    }

    /// Ends a loop, unless connections were passed to it since [`Placement::take`].
    pub(crate) fn end(&self, index: usize) -> bool {
        let state = &mut self.lock()[index];
        state.has_ended = state.passed.is_empty();
        state.has_ended
    }

    fn lock(&self) -> MutexGuard<'_, Vec<LoopState>> {
        self.loops.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn connections_are_spread_evenly_whichever_loop_accepts_them() {
        let placement = placement(4);
        let mut kept: Vec<Placed> = Vec::new();
        for number in 0..16 {
            assert!(!placement.is_full());
            kept.extend(placement.place(number / 5, accepted()));
        }
        assert!(placement.is_full());
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
    fn a_loop_that_has_ended_is_passed_nothing() {
        let placement = placement(2);
        let first = placement.place(0, accepted());
        assert!(placement.place(0, accepted()).is_none(), "it is passed to the other");
        assert!(!placement.end(1), "a connection waits there");
        drop(placement.take(1));
        assert!(placement.end(1));
        assert!(placement.place(0, accepted()).is_some());
        drop(first);
    }
}
