//! Leases of files (`F_SETLEASE`, Linux 2.4), as a proof that no program is writing to one.

use crate::syscall;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Whether no process has the file open for writing at this moment, or has mapped it for that.
///
/// `file` must be open for reading only. The kernel grants a read lease only while no process has
/// the file open for writing (fcntl(2), "Leases"). The lease is given back at once: a program that
/// opens the file in between waits for some microseconds.
///
/// Errors: `EACCES` if the file belongs to another user and the process lacks `CAP_LEASE`, `EINVAL`
/// if the file system has no leases.
pub fn has_no_writer(file: impl AsFd) -> io::Result<bool> {
    /// `F_SETSIG` of `<linux/fcntl.h>`.
    const F_SETSIG: libc::c_int = 10;
    let fd = file.as_fd().as_raw_fd();
    let set = |command, value: libc::c_int| {
        // SAFETY: these commands take numbers only.
        syscall(|| unsafe { libc::fcntl(fd, command, value) } as isize)
    };
    // A program that opens the file while the lease lasts raises a signal here. SIGIO, the default,
    // would end this process; SIGURG is ignored unless a program wants it.
    set(F_SETSIG, libc::SIGURG)?;
    match set(libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(_) => set(libc::F_SETLEASE, libc::F_UNLCK).map(|_| true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn a_writer_is_noticed_until_it_closes_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut writer = File::create(&path).unwrap();
        let reader = File::open(&path).unwrap();
        let probe = || match has_no_writer(&reader) {
            Ok(proof) => Some(proof),
            Err(error) => {
                eprintln!("SKIPPED: this file system has no leases: {error}");
                None
            }
        };
        let Some(proof) = probe() else { return };
        assert!(!proof, "the file is open for writing");
        writer.write_all(b"x").unwrap();
        drop(writer);
        assert_eq!(probe(), Some(true));
        // No lease is left: a writer does not wait.
        File::options().write(true).open(&path).unwrap().write_all(b"y").unwrap();
        assert_eq!(probe(), Some(true));
    }
}
