//! The CPUs, which one test at a time may measure on.

use std::sync::{Mutex, MutexGuard, PoisonError};

static CPUS: Mutex<()> = Mutex::new(());

/// Waits until no other test of this file measures: two at a time would find only disturbed windows.
pub fn lock_cpus() -> MutexGuard<'static, ()> {
    CPUS.lock().unwrap_or_else(PoisonError::into_inner)
}
