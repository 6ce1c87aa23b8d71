//! Slots of connections that another process is about to hand over. The slots count for the limits
//! of their upstreams until then, so that other clients do not take them.

use crate::upstreams::group::Slot;
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

    /// Gives up slots of connections that ended in the other process.
    pub fn release(&self, group: &str, upstream: &str, count: usize) {
        let mut reserved = self.lock();
        let slots = reserved.get_mut(&(group.to_owned(), upstream.to_owned()));
        let released = slots.map(|slots| slots.split_off(slots.len().saturating_sub(count)));
        // The drop serves the queues, so the lock is released first.
        drop(reserved);
        drop(released);
    }

    /// Gives up all slots that are left, because their connections ended in the other process.
    pub fn clear(&self) {
        let left = std::mem::take(&mut *self.lock());
        // The drop serves the queues, so the lock is released first.
        drop(left);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(String, String), Vec<Slot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
