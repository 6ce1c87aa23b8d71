//! Slots of connections that another process is about to hand over: until then they count for the
//! limits of their upstreams, so that no other client takes their place.

use crate::upstream_group::Slot;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The reserved slots, by the names of the group and of the upstream.
#[derive(Debug, Default)]
pub struct ReservedSlots(Mutex<HashMap<(String, String), Vec<Slot>>>);

impl ReservedSlots {
    /// Reserves slots of an upstream.
    pub fn add(&self, group: &str, upstream: &str, slots: impl Iterator<Item = Slot>) {
        let names = (group.to_owned(), upstream.to_owned());
        self.lock().entry(names).or_default().extend(slots);
    }

    /// Takes a slot for a connection that was handed over, if the upstream has one left.
    pub fn take(&self, group: &str, upstream: &str) -> Option<Slot> {
        self.lock().get_mut(&(group.to_owned(), upstream.to_owned()))?.pop()
    }

    /// Gives up slots of connections that have ended in the other process.
    pub fn release(&self, group: &str, upstream: &str, count: usize) {
        let mut reserved = self.lock();
        let slots = reserved.get_mut(&(group.to_owned(), upstream.to_owned()));
        let released = slots.map(|slots| slots.split_off(slots.len().saturating_sub(count)));
        // Without the lock: this serves the queues.
        drop(reserved);
        drop(released);
    }

    /// Gives up what is left: those connections have ended in the other process.
    pub fn clear(&self) {
        let left = std::mem::take(&mut *self.lock());
        // Without the lock: this serves the queues.
        drop(left);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(String, String), Vec<Slot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
