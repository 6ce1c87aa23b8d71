//! The process at the other end of a Unix socket (`SO_PEERCRED`).

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};

/// Returns the ID of the process that called `listen` or `connect` for the other end; `None` for a
/// process of a process namespace that this one does not see.
pub fn peer_process(socket: impl AsFd) -> io::Result<Option<u32>> {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut credentials: libc::ucred = unsafe { mem::zeroed() };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of the struct.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(credentials.pid).ok().filter(|&process| process != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(peer_process(&one).unwrap(), Some(std::process::id()));
    }
}
