//! Leases of files (`F_SETLEASE`, Linux 2.4), as a proof that no program is writing to one.

use crate::syscall;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Whether no process has the file open for writing at this moment, or has mapped it for that.
///
/// `file` must be open for reading only. The kernel grants a read lease only while no process has
/// the file open for writing (fcntl(2), "Leases"). The lease is given back at once: a program that
/// opens the file in between waits for some microseconds.
///
/// Errors: `EACCES` if the file belongs to another user and the process lacks `CAP_LEASE`, `EINVAL`
/// if the file system does not have leases.
pub fn has_no_writer(file: impl AsFd) -> io::Result<bool> {
    // A program that opens the file while the lease lasts raises a signal here. SIGIO, the default,
    // would end this process; SIGURG is ignored unless a program wants it.
    set(&file, F_SETSIG, libc::SIGURG)?;
    match set(&file, libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(_) => set(&file, libc::F_SETLEASE, libc::F_UNLCK).map(|_| true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// A read lease of a file, until this is dropped.
///
/// While the lease lasts, an `open` for writing and a `truncate` of the file wait (at most
/// `/proc/sys/fs/lease-break-time` seconds), and an `open` with `O_NONBLOCK` fails. When a program
/// waits, the process that took the lease gets SIGURG, which is ignored unless the process handles
/// it.
#[derive(Debug)]
pub struct ReadLease {
    file: OwnedFd,
}

impl ReadLease {
    /// Takes a lease of a file that is open for reading only.
    ///
    /// Errors: `EAGAIN` if a program has the file open for writing, or waits for that; `EACCES` if
    /// the file belongs to another user and the process lacks `CAP_LEASE`; `EINVAL` if the file
    /// system does not support leases.
    pub fn take(file: OwnedFd) -> io::Result<Self> {
        set(&file, F_SETSIG, libc::SIGURG)?;
        set(&file, libc::F_SETLEASE, libc::F_RDLCK)?;
        Ok(Self { file })
    }

    /// Whether a program waits for the end of the lease, or the kernel ended it.
    pub fn is_breaking(&self) -> bool {
        !set(&self.file, libc::F_GETLEASE, 0).is_ok_and(|kind| kind == libc::F_RDLCK as usize)
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        // Other descriptors of the same open file would keep the lease.
        let _ = set(&self.file, libc::F_SETLEASE, libc::F_UNLCK);
    }
}

/// `F_SETSIG` of `<linux/fcntl.h>`.
const F_SETSIG: libc::c_int = 10;

fn set(file: impl AsFd, command: libc::c_int, value: libc::c_int) -> io::Result<usize> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the commands of this module take numbers only.
    syscall(|| unsafe { libc::fcntl(fd, command, value) } as isize)
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
