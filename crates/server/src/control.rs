//! Control over running event loops: waking and draining.

use crate::address::Address;
use crate::error::Error;
use crate::waker::Waker;
use std::io;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

/// The loops do not drain.
const OPEN: u8 = 0;
/// The loops drain, and [`Control::resume`] ends the drain.
const RESUMABLE: u8 = 1;
/// The loops drain for good, and the time counts from the beginning of [`RESUMABLE`].
const COMPLETED: u8 = 2;
/// The loops drain for good.
const DRAINING: u8 = 3;

/// Whether event loops drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DrainState {
    Open,
    /// The loops drain, and [`Control::resume`] may end the drain.
    Resumable,
    /// The loops drain for good, since the beginning of the resumable drain.
    Completed,
    /// The loops drain for good.
    Final,
}

/// Control over running event loops, from any thread.
#[derive(Debug)]
pub struct Control {
    /// [`OPEN`], [`RESUMABLE`], [`COMPLETED`] or [`DRAINING`].
    drain: AtomicU8,
    /// Whether the drain timeout is over.
    is_cut_off: AtomicBool,
    /// Whether another process also has the listening sockets.
    is_handed_over: AtomicBool,
    /// The number of the process that may take over; 0 if it is not known.
    successor: AtomicU32,
    /// Whether the process before this one may accept clients again.
    has_predecessor: AtomicBool,
    /// The addresses at which the process that may take over also listens.
    kept_addresses: Mutex<Vec<String>>,
    wakers: Box<[Arc<Waker>]>,
}

impl Control {
    /// The control of so many event loops.
    pub fn new(loops: usize) -> Result<Arc<Self>, Error> {
        let wakers: io::Result<_> = (0..loops).map(|_| Waker::new().map(Arc::new)).collect();
        let wakers = wakers.map_err(Error::at("making an event loop"))?;
        Ok(Arc::new(Self {
            drain: AtomicU8::new(OPEN),
            is_cut_off: AtomicBool::new(false),
            is_handed_over: AtomicBool::new(false),
            successor: AtomicU32::new(0),
            has_predecessor: AtomicBool::new(false),
            kept_addresses: Mutex::default(),
            wakers,
        }))
    }

    /// The wakers, one for each event loop.
    pub fn wakers(&self) -> &[Arc<Waker>] {
        &self.wakers
    }

    /// Wakes every event loop, to read changed settings ([`crate::event_loop::Handler::on_wake`]).
    pub fn wake(&self) {
        for waker in &self.wakers {
            waker.wake();
        }
    }

    /// Stops accepting; open messages are finished, then the loops end.
    pub fn drain(&self) {
        self.drain.store(DRAINING, SeqCst);
        self.wake();
    }

    /// Drains until [`Control::resume`] or [`Control::complete_drain`]. Listening sockets stay
    /// open, and loops do not end at the drain timeout. A call of [`Control::drain`] begins a final
    /// drain, with the whole drain timeout.
    pub fn drain_resumably(&self) {
        // A final drain stays final.
        let _ = self.drain.compare_exchange(OPEN, RESUMABLE, SeqCst, SeqCst);
        self.wake();
    }

    /// Makes a [`Control::drain_resumably`] final.
    pub fn complete_drain(&self) {
        // A final drain stays final.
        let _ = self.drain.compare_exchange(RESUMABLE, COMPLETED, SeqCst, SeqCst);
        self.wake();
    }

    /// Ends a [`Control::drain_resumably`]: the loops accept again. False if they drain for good.
    pub fn resume(&self) -> bool {
        let resumed = self.drain.compare_exchange(RESUMABLE, OPEN, SeqCst, SeqCst);
        self.wake();
        resumed.is_ok()
    }

    /// Whether the loops drain.
    pub(crate) fn drain_state(&self) -> DrainState {
        match self.drain.load(SeqCst) {
            OPEN => DrainState::Open,
            RESUMABLE => DrainState::Resumable,
            COMPLETED => DrainState::Completed,
            _ => DrainState::Final,
        }
    }

    /// Whether the loops drain, and may be resumed.
    pub fn may_resume(&self) -> bool {
        self.drain.load(SeqCst) == RESUMABLE
    }

    /// Drains, and cuts off the connections that are open.
    pub fn cut_off(&self) {
        self.is_cut_off.store(true, Relaxed);
        self.drain();
    }

    /// Whether [`Control::cut_off`] was called.
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off.load(Relaxed)
    }

    /// Sets whether another process also has the listening sockets.
    pub fn set_handed_over(&self, is_handed_over: bool) {
        self.is_handed_over.store(is_handed_over, SeqCst);
    }

    /// Sets the addresses at which the process that may take over listens, as they are displayed.
    /// The files of other Unix sockets are removed at the end.
    pub fn set_kept_addresses(&self, addresses: Vec<String>) {
        *self.kept_addresses.lock().unwrap_or_else(PoisonError::into_inner) = addresses;
    }

    /// Sets whether the process before this one may accept clients again, for which it would need
    /// the files of Unix sockets.
    pub fn set_has_predecessor(&self, has_predecessor: bool) {
        self.has_predecessor.store(has_predecessor, SeqCst);
    }

    /// Whether another process also listens at an address.
    pub(crate) fn keeps(&self, address: &Address) -> bool {
        let kept = self.kept_addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let is_successors = self.is_handed_over() && kept.contains(&address.to_string());
        is_successors || self.has_predecessor.load(SeqCst)
    }

    /// Sets the number of the process that may take over.
    pub fn set_successor(&self, pid: Option<NonZeroU32>) {
        self.successor.store(pid.map_or(0, NonZeroU32::get), SeqCst);
    }

    /// The number of the process that also has the listening sockets; `None` without such a
    /// process, or if it is in another PID namespace.
    pub fn successor(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.successor.load(SeqCst)).filter(|_| self.is_handed_over())
    }

    /// Whether another process also has the listening sockets.
    pub fn is_handed_over(&self) -> bool {
        self.is_handed_over.load(SeqCst)
    }

    /// Whether the loops drain.
    pub fn is_draining(&self) -> bool {
        self.drain.load(SeqCst) != OPEN
    }
}
