//! When the established connections of an upstream are closed because the upstream is down,
//! drained, or removed from the configuration.

use crate::config::DownPolicy;
use crate::upstreams::upstream::Upstream;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time in which all connections of another process arrive.
const HANDOVER_TIME: Duration = Duration::from_secs(60);

/// Why the connections of an upstream are closed. Both reasons can hold at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClosingReason {
    /// The active check found the upstream down, or a reload removed the upstream.
    Down,
    /// An operator drained or disabled the upstream.
    Operator,
}

/// The upstreams whose established connections are to be closed, shared by all event loops.
#[derive(Debug, Default)]
pub struct Closings {
    closings: Mutex<Vec<Closing>>,
    count: AtomicUsize,
}

#[derive(Debug, Clone)]
struct Closing {
    upstream: Arc<Upstream>,
    reason: ClosingReason,
    at: Instant,
}

/// An upstream whose connections are to be closed now.
#[derive(Debug, Clone)]
pub struct DueClosing {
    pub upstream: Arc<Upstream>,
    pub reason: ClosingReason,
    /// Connections that were established later stay, because they found no other upstream.
    pub connected_before: Instant,
}

impl Closings {
    /// An upstream is down or removed.
    pub fn apply(&self, policy: DownPolicy, upstream: &Arc<Upstream>) {
        if let DownPolicy::CloseAfter(time) = policy {
            self.close_after(time, upstream, ClosingReason::Down);
        }
    }

    /// Closes the connections of an upstream after a time.
    pub fn close_after(&self, time: Duration, upstream: &Arc<Upstream>, reason: ClosingReason) {
        let closing = Closing { upstream: Arc::clone(upstream), reason, at: Instant::now() + time };
        self.change(|closings| {
            closings.retain(|other| !other.is(upstream, reason));
            closings.push(closing);
        });
    }

    /// Removes a reason.
    pub fn cancel(&self, upstream: &Arc<Upstream>, reason: ClosingReason) {
        self.change(|closings| closings.retain(|closing| !closing.is(upstream, reason)));
    }

    /// The reasons for which an upstream's connections are to be closed, and the time left.
    pub fn of(&self, upstream: &Arc<Upstream>) -> impl Iterator<Item = (ClosingReason, Duration)> {
        let closings = self.lock().clone();
        let (upstream, now) = (Arc::clone(upstream), Instant::now());
        let of_upstream =
            closings.into_iter().filter(move |closing| Arc::ptr_eq(&closing.upstream, &upstream));
        of_upstream.map(move |closing| (closing.reason, closing.at.saturating_duration_since(now)))
    }

    /// The upstreams whose connections are to be closed now, if they have any.
    pub fn due(&self, now: Instant) -> Vec<DueClosing> {
        if self.count.load(Relaxed) == 0 {
            return Vec::new();
        }
        // An upstream to which nothing else refers lost its last connection, unless another
        // process still hands connections over.
        self.change(|closings| {
            closings
                .retain(|one| one.at + HANDOVER_TIME > now || Arc::strong_count(&one.upstream) > 1);
        });
        let closings = self.lock();
        let is_due =
            |closing: &&Closing| closing.at <= now && closing.upstream.counters().open() > 0;
        let due = closings.iter().filter(is_due).map(|closing| DueClosing {
            upstream: Arc::clone(&closing.upstream),
            reason: closing.reason,
            connected_before: closing.at,
        });
        due.collect()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Closing>)) {
        let mut closings = self.lock();
        change(&mut closings);
        self.count.store(closings.len(), Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Closing>> {
        self.closings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Closing {
    fn is(&self, upstream: &Arc<Upstream>, reason: ClosingReason) -> bool {
        Arc::ptr_eq(&self.upstream, upstream) && self.reason == reason
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reason_does_not_lift_the_other() {
        let upstream = Arc::new(Upstream::new("web", "10.0.0.1:80".parse().unwrap()));
        assert!(upstream.counters().try_add_open(None));
        let (closings, now) = (Closings::default(), Instant::now());
        closings.close_after(Duration::from_secs(5), &upstream, ClosingReason::Operator);
        closings.apply(DownPolicy::CloseAfter(Duration::ZERO), &upstream);
        assert_eq!(closings.of(&upstream).count(), 2);
        let later = now + Duration::from_secs(1);
        assert_eq!(closings.due(later)[0].reason, ClosingReason::Down);
        closings.cancel(&upstream, ClosingReason::Down);
        assert!(closings.due(later).is_empty());
        assert_eq!(closings.due(now + Duration::from_secs(6)).len(), 1);
        closings.cancel(&upstream, ClosingReason::Operator);
        assert!(closings.due(now + Duration::from_secs(6)).is_empty());
    }
}
