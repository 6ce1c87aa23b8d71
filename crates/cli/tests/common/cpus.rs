//! A lock with which one test at a time measures on the CPUs.

use std::sync::{Mutex, MutexGuard, PoisonError};

static CPUS: Mutex<()> = Mutex::new(());

/// Waits until no other test of this file measures. Two at a time disturb each other's windows.
pub fn lock_cpus() -> MutexGuard<'static, ()> {
    CPUS.lock().unwrap_or_else(PoisonError::into_inner)
}
