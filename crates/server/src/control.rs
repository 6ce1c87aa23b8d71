//! Control over running event loops: waking and draining.

use crate::error::Error;
use crate::waker::Waker;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Control over running event loops, from any thread.
#[derive(Debug)]
pub struct Control {
    is_draining: AtomicBool,
    wakers: Box<[Arc<Waker>]>,
}

impl Control {
    /// The control of so many event loops.
    pub fn new(loops: usize) -> Result<Arc<Self>, Error> {
        let wakers: io::Result<_> = (0..loops).map(|_| Waker::new().map(Arc::new)).collect();
        let wakers = wakers.map_err(Error::at("making an event loop"))?;
        Ok(Arc::new(Self { is_draining: AtomicBool::new(false), wakers }))
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
        self.is_draining.store(true, Relaxed);
        self.wake();
    }

    /// Whether [`Control::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Relaxed)
    }
}
