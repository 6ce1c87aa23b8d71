//! A static value that is made late, may be replaced, and is never freed.
//!
//! Without a lock, which a fork of the process could leave locked in the child.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A place for the latest of several values, all of which are leaked.
#[derive(Debug)]
pub struct Leaked<T: 'static>(AtomicPtr<T>);

impl<T: Send + Sync> Leaked<T> {
    /// An empty place.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The latest value.
    pub fn get(&self) -> Option<&'static T> {
        let value = self.0.load(Ordering::Acquire);
        // SAFETY: a pointer that is not null comes from `Box::leak`, so the value is never freed,
        // and only shared references to it exist. `Send` and `Sync` allow them on every thread.
        unsafe { value.as_ref() }
    }

    /// Replaces the value `earlier`; `None` if another thread has replaced it before, and `new` is
    /// dropped.
    pub fn replace(&self, earlier: Option<&'static T>, new: Box<T>) -> Option<&'static T> {
        let earlier = earlier.map_or(ptr::null_mut(), |earlier| ptr::from_ref(earlier).cast_mut());
        let new = Box::into_raw(new);
        let replaced = self.0.compare_exchange(earlier, new, Ordering::AcqRel, Ordering::Acquire);
        if replaced.is_err() {
            // SAFETY: the pointer comes from `Box::into_raw`, and no other copy was kept.
            drop(unsafe { Box::from_raw(new) });
            return None;
        }
        // SAFETY: the pointer comes from a box that nothing frees any more.
        unsafe { new.as_ref() }
    }
}

impl<T: Send + Sync> Default for Leaked<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_two_threads_replaces_a_value() {
        static PLACE: Leaked<u32> = Leaked::new();
        assert_eq!(PLACE.get(), None);
        assert_eq!(PLACE.replace(None, Box::new(1)), Some(&1));
        let first = PLACE.get();
        assert_eq!(PLACE.replace(None, Box::new(2)), None);
        assert_eq!(PLACE.replace(first, Box::new(3)), Some(&3));
        assert_eq!((first, PLACE.get()), (Some(&1), Some(&3)));
    }
}
