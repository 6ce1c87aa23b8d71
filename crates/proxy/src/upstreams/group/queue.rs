//! The queue of a group. Its clients wait because every usable upstream has as many connections as
//! its limit allows.

use super::{Choice, UpstreamGroup};
use crate::host_instant::HostInstant;
use crate::upstreams::upstream::Upstream;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A queue, first in, first out. All event loops, and the groups of all reloads, share it.
#[derive(Debug, Default)]
pub struct Queue {
    state: Mutex<State>,
    /// The length, for readers without the lock. A slot is freed before this is read, and this is
    /// raised before a client looks for a slot, so that one of the two notices the other.
    length: AtomicUsize,
    /// Whether the queue takes any number of clients, because another process is about to take
    /// them.
    is_unlimited: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The group that is in force.
    group: Weak<UpstreamGroup>,
    entries: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    waiter: Arc<Waiter>,
    client: Option<IpAddr>,
    /// The upstreams that were tried already.
    tried: Vec<usize>,
    since: HostInstant,
}

/// A client that is to wait.
#[derive(Debug)]
pub struct QueuedClient<'a> {
    pub address: Option<IpAddr>,
    /// The upstreams of the group that were tried already.
    pub tried: &'a [usize],
    /// Since when the client waits, which determines its place.
    pub since: HostInstant,
}

/// The state that the queue and a waiting client share.
#[derive(Debug)]
struct Waiter {
    /// An eventfd, which becomes readable once there is a result.
    event: OwnedFd,
    result: Mutex<Option<QueueResult>>,
}

/// The result of a client's wait in the queue.
#[derive(Debug)]
pub struct QueueResult {
    /// The group in force, which may differ from the group at the beginning.
    pub group: Arc<UpstreamGroup>,
    /// `None` if all upstreams were excluded in the meantime.
    pub slot: Option<Slot>,
}

/// One of the connections that an upstream may have, until it is dropped.
#[derive(Debug)]
pub struct Slot {
    upstream: Arc<Upstream>,
    /// The upstream's place in its group.
    index: usize,
    /// The queue to be served once the slot is free; `None` if the upstream is in no group.
    queue: Option<Arc<Queue>>,
}

/// A place in a queue, until it is dropped.
#[derive(Debug)]
pub struct QueuePlace {
    queue: Arc<Queue>,
    waiter: Arc<Waiter>,
}

/// Why a client was not queued.
#[derive(Debug)]
pub enum QueueError {
    /// The queue has its maximum length.
    Full,
    /// The process lacks a descriptor or memory.
    Failed(io::Error),
}

impl Queue {
    /// Puts a group in force. The group may have slots for clients that wait.
    pub fn set_group(self: &Arc<Self>, group: &Arc<UpstreamGroup>) {
        let mut state = self.lock();
        state.group = Arc::downgrade(group);
        for entry in &mut state.entries {
            // The indexes are places in the former group.
            entry.tried.clear();
        }
        self.serve_locked(&mut state);
    }

    /// Sets whether the queue takes any number of clients. In a handover the upstreams do not give
    /// slots, and the clients go to another process at once.
    pub fn set_unlimited(&self, is_unlimited: bool) {
        self.is_unlimited.store(is_unlimited, SeqCst);
    }

    /// The number of clients that wait.
    pub fn len(&self) -> usize {
        self.length.load(SeqCst)
    }

    /// Gives the free slots to the clients that waited longest.
    pub fn serve(self: &Arc<Self>) {
        if self.len() > 0 {
            self.serve_locked(&mut self.lock());
        }
    }

    /// Puts a client of a group behind the clients that waited longer. The client may get a slot at
    /// once. Returns an error if the client has to wait and `length_max` clients already wait.
    pub fn push(
        self: &Arc<Self>,
        group: &Arc<UpstreamGroup>,
        client: &QueuedClient<'_>,
        length_max: usize,
    ) -> Result<QueuePlace, QueueError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| QueueError::Failed(errno.into()))?;
        let waiter = Arc::new(Waiter { event, result: Mutex::default() });
        let mut state = self.lock();
        let is_current = std::ptr::eq(state.group.as_ptr(), Arc::as_ptr(group));
        // The indexes are places in the group.
        let tried = if is_current { client.tried.to_vec() } else { Vec::new() };
        let QueuedClient { address, since, .. } = *client;
        let at = state.entries.partition_point(|entry| entry.since <= since);
        state
            .entries
            .insert(at, Entry { waiter: Arc::clone(&waiter), client: address, tried, since });
        self.length.store(state.entries.len(), SeqCst);
        self.serve_locked(&mut state);
        let mut entries = state.entries.iter();
        let place = entries.rposition(|entry| Arc::ptr_eq(&entry.waiter, &waiter));
        let is_too_long = state.entries.len() > length_max && !self.is_unlimited.load(SeqCst);
        if let Some(place) = place.filter(|_| is_too_long) {
            state.entries.remove(place);
            self.length.store(state.entries.len(), SeqCst);
            return Err(QueueError::Full);
        }
        drop(state);
        Ok(QueuePlace { queue: Arc::clone(self), waiter })
    }

    fn serve_locked(self: &Arc<Self>, state: &mut State) {
        let Some(group) = state.group.upgrade() else { return };
        let (mut at, mut is_full) = (0, false);
        while let Some(entry) = state.entries.get(at) {
            // With balancing by source address, each client waits for the upstream of its address.
            // Otherwise all clients that tried nothing are in the same position.
            let is_like_others = entry.tried.is_empty() && !group.is_by_client();
            if is_full && is_like_others {
                at += 1;
                continue;
            }
            let slot = match group.choose(entry.client, &entry.tried) {
                Choice::Slot(slot) => Some(slot),
                Choice::None => None,
                Choice::Full => {
                    is_full |= is_like_others;
                    at += 1;
                    continue;
                }
            };
            let result = QueueResult { group: Arc::clone(&group), slot };
            if let Some(entry) = state.entries.remove(at) {
                entry.waiter.end(result);
            }
        }
        self.length.store(state.entries.len(), SeqCst);
    }

    fn remove(&self, waiter: &Arc<Waiter>) {
        let mut state = self.lock();
        state.entries.retain(|entry| !Arc::ptr_eq(&entry.waiter, waiter));
        self.length.store(state.entries.len(), SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    fn end(&self, result: QueueResult) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        // An eventfd can be written to many times.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl QueuePlace {
    /// The result, once there is one.
    pub fn take(&self) -> Option<QueueResult> {
        self.waiter.result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl AsFd for QueuePlace {
    /// A descriptor that becomes readable once there is a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waiter.event.as_fd()
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.queue.remove(&self.waiter);
        // The slot of a client that is gone goes to the next client.
        drop(self.take());
    }
}

impl Slot {
    /// Takes one of at most `connections_max` slots of an upstream, if one is free.
    pub fn take(
        upstream: &Arc<Upstream>,
        index: usize,
        connections_max: Option<NonZeroUsize>,
        queue: Option<&Arc<Queue>>,
    ) -> Option<Self> {
        let is_taken = upstream.counters().try_add_open(connections_max);
        is_taken.then(|| Self { upstream: Arc::clone(upstream), index, queue: queue.cloned() })
    }

    /// Gives the slot back without serving the queue, which is being served.
    pub fn give_back(mut self) {
        self.queue = None;
    }

    /// The upstream.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The upstream's place in its group.
    pub fn index(&self) -> usize {
        self.index
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.upstream.counters().remove_open();
        if let Some(queue) = &self.queue {
            queue.serve();
        }
    }
}
