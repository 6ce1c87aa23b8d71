//! A lock for tests that measure.

use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

/// Tests that assert no figure may measure at the same time, and share the lock.
pub static CPUS: RwLock<()> = RwLock::new(());

/// Waits until no other test of this file measures. Two measurements at a time disturb each other's
/// windows.
pub fn lock_cpus() -> RwLockWriteGuard<'static, ()> {
    CPUS.write().unwrap_or_else(PoisonError::into_inner)
}
