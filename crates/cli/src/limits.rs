//! Resource limits of the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open file descriptors (`RLIMIT_NOFILE`) to the hard limit: each
/// connection and each open file takes one.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, the process stays within the present limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
