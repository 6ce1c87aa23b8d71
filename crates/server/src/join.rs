//! Joins threads that may be stuck in a system call (a hanging disk, a full pipe).

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest wait for a thread.
const JOIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Joins a thread, or leaves it running after two seconds.
pub fn join_with_timeout(thread: JoinHandle<()>) {
    let deadline = Instant::now() + JOIN_TIMEOUT;
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    if thread.is_finished() {
        // The panic hook already reported a panic.
        let _ = thread.join();
    }
}
