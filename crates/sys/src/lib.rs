//! Safe wrappers of the kernel facilities that haul needs and [`rustix`] lacks, one per file.
//!
//! This is one of the crates that may contain `unsafe`; every `unsafe` block states why it is
//! sound. The crate makes no decisions. The crates above choose the send method and the fallback,
//! and explain errors to the user.
//!
//! Errors are [`std::io::Error`] with the kernel's errno unchanged, so callers can distinguish an
//! unsupported method (`EINVAL`, `EOPNOTSUPP`, `EPERM`, `ENOSYS`) from a failure.

#[cfg(not(target_os = "linux"))]
compile_error!("haul uses system calls that only Linux has");

#[cfg(feature = "bpf")]
pub mod bpf;
pub mod descriptors;
#[cfg(feature = "dns")]
pub mod dns;
pub mod error_queue;
pub mod fork;
pub mod heap;
pub mod interface;
pub mod ktls;
pub mod leaked;
pub mod lease;
pub mod pages;
pub mod receive_window;
pub mod region;
pub mod retry;
pub mod sendmsg;
pub mod signal;
pub mod sockopt;
pub mod tcp_info;
#[cfg(feature = "uring")]
pub mod uring;
#[cfg(feature = "uring")]
pub mod uring_receive;
pub mod write_back;

/// Makes a system call, retries it after `EINTR`, and turns a result of -1 into the error in
/// `errno`. For system calls that neither rustix nor this crate wraps.
pub fn syscall(mut call: impl FnMut() -> libc::ssize_t) -> std::io::Result<usize> {
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
