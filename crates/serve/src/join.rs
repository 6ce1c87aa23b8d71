//! Waiting for threads that may be stuck at a disk or a pipe.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread may take to end.
const JOIN_MAX: Duration = Duration::from_secs(2);

/// Waits for a thread's end, but not for ever.
pub fn join_soon(thread: JoinHandle<()>) {
    let deadline = Instant::now() + JOIN_MAX;
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    if thread.is_finished() {
        // It has told its panic already.
        let _ = thread.join();
    }
}
