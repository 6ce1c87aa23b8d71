//! The descriptors of this process.

use std::io;

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
}
