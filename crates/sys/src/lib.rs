//! The kernel facilities that haul needs and [`rustix`] lacks, one per file, each behind a safe type.
//!
//! This crate is the ground of the house: it is one of the two places where `unsafe` may stand, and every
//! such block says why it is sound. It decides nothing: which path to take, when to step down and what an
//! error means to the user are questions for the crates above.
//!
//! Errors are [`std::io::Error`] carrying the kernel's errno, untouched, so that callers can tell a refusal
//! (`EINVAL`, `EOPNOTSUPP`, `EPERM`, `ENOSYS`) from a failure.

pub mod child;
pub mod clock;
pub mod datagram;
pub mod error_queue;
pub mod ethtool;
pub mod interface;
pub mod ktls;
pub mod namespace;
pub mod pages;
pub mod perf;
pub mod receive_window;
pub mod region;
pub mod rusage;
pub mod sched;
pub mod shared_counters;
pub mod sockmap;
pub mod sockopt;
pub mod tcp_info;
pub mod uring;
pub mod uring_receive;

/// Makes a system call until no signal interrupts it, and turns its `-1` into the error that `errno` holds.
fn checked(mut call: impl FnMut() -> libc::ssize_t) -> std::io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}
