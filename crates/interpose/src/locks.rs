//! Whether the program locks files with `fcntl` or `lockf`.
//!
//! Closing any descriptor of a file ends the process's locks of the file (fcntl(2)), also a
//! descriptor of the interposer. So the interposer neither opens nor closes descriptors of files in
//! a process that uses locks. Locks by system calls that the interposer does not see are not known.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ARE_USED: AtomicBool = AtomicBool::new(false);

/// Called before the program locks a file.
pub fn before_lock() {
    ARE_USED.store(true, Relaxed);
}

/// Whether the program locked a file.
pub fn are_used() -> bool {
    ARE_USED.load(Relaxed)
}
