//! Established connections of upstreams that are down, or gone from the configuration: when they
//! are closed.

use crate::config::DownPolicy;
use crate::upstream::Upstream;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The upstreams whose established connections are to be closed, shared by all event loops.
#[derive(Debug, Default)]
pub struct Closings {
    closings: Mutex<Vec<Closing>>,
    count: AtomicUsize,
}

#[derive(Debug)]
struct Closing {
    upstream: Arc<Upstream>,
    at: Instant,
}

impl Closings {
    /// An upstream is down or removed.
    pub fn apply(&self, policy: DownPolicy, upstream: &Arc<Upstream>) {
        if let DownPolicy::CloseAfter(time) = policy {
            self.close_after(time, upstream);
        }
    }

    /// Closes the connections of an upstream after a time.
    pub fn close_after(&self, time: Duration, upstream: &Arc<Upstream>) {
        let mut closings = self.lock();
        closings.retain(|closing| !Arc::ptr_eq(&closing.upstream, upstream));
        closings.push(Closing { upstream: Arc::clone(upstream), at: Instant::now() + time });
        self.count.store(closings.len(), Relaxed);
    }

    /// The upstream is back: its connections continue.
    pub fn cancel(&self, upstream: &Arc<Upstream>) {
        let mut closings = self.lock();
        closings.retain(|closing| !Arc::ptr_eq(&closing.upstream, upstream));
        self.count.store(closings.len(), Relaxed);
    }

    /// The upstreams whose connections are to be closed now, if they have any.
    pub fn due(&self, now: Instant) -> Vec<Arc<Upstream>> {
        if self.count.load(Relaxed) == 0 {
            return Vec::new();
        }
        let closings = self.lock();
        let due = closings.iter().filter(|closing| closing.at <= now);
        let has_connections =
            |upstream: &&Arc<Upstream>| upstream.counters().open.load(Relaxed) > 0;
        due.map(|closing| &closing.upstream).filter(has_connections).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Closing>> {
        self.closings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
