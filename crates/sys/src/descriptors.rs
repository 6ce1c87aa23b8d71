//! The descriptors of this process.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// Makes all descriptors but standard input, output and error close on `exec`: also those that this
/// process has inherited (`close_range`, `CLOSE_RANGE_CLOEXEC`, Linux 5.11).
pub fn close_all_on_exec() -> io::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the call closes nothing in this process, and takes no pointer.
    crate::syscall(|| unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC as libc::c_uint,
        ) as libc::ssize_t
    })
    .map(drop)
}

/// Duplicates a socket that the parent process left open, by the number of its descriptor. The
/// duplicate closes on `exec`.
///
/// `EBADF` if the descriptor is not open, `ENOTSOCK` if it is not a socket.
pub fn inherited_socket(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the borrow ends with this function, which only reads the kind of the file and
    // duplicates the descriptor. For a descriptor that is not open, both calls fail.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let found = rustix::fs::fstat(descriptor)?;
    if rustix::fs::FileType::from_raw_mode(found.st_mode) != rustix::fs::FileType::Socket {
        return Err(io::Error::from_raw_os_error(libc::ENOTSOCK));
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(descriptor, 3)?)
}

#[cfg(test)]
mod tests {
    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    #[test]
    fn an_inherited_descriptor_closes_on_exec() {
        let file = std::fs::File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        super::close_all_on_exec().unwrap();
        assert_eq!(fcntl_getfd(&file).unwrap(), FdFlags::CLOEXEC);
    }

    #[test]
    fn only_an_open_socket_is_duplicated() {
        use std::os::fd::AsRawFd;
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        super::inherited_socket(socket.as_raw_fd()).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for (number, errno) in
            [(-1, libc::EBADF), (1 << 20, libc::EBADF), (file.as_raw_fd(), libc::ENOTSOCK)]
        {
            let error = super::inherited_socket(number).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno), "{number}");
        }
    }
}
