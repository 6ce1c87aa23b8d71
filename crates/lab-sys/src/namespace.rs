//! Moves threads and processes into new namespaces (`unshare`).

use rustix::thread::UnshareFlags;
use std::io;

/// Moves the calling *thread* into a new, empty network namespace (`CLONE_NEWNET`, Linux 3.0).
///
/// `EPERM` without `CAP_SYS_ADMIN` in the thread's user namespace.
pub fn unshare_network() -> io::Result<()> {
    // SAFETY: unshare is unsafe because CLONE_FILES breaks I/O safety; CLONE_NEWNET touches no
    // descriptor.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(io::Error::from)
}

/// Moves the calling *thread* into a new mount namespace (`CLONE_NEWNS`).
///
/// `EPERM` without `CAP_SYS_ADMIN` in the thread's user namespace.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: as above; CLONE_NEWNS implies CLONE_FS, which unshares the working directory, not
    // descriptors.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.map_err(io::Error::from)
}

/// Moves the whole process into a new user namespace (`CLONE_NEWUSER`, Linux 3.8), in which it has
/// every capability.
///
/// `EINVAL` if the process has more than one thread. `EPERM` if the host forbids user namespaces
/// (`kernel.unprivileged_userns_clone`, `kernel.apparmor_restrict_unprivileged_userns`, a seccomp
/// filter). `ENOSPC` if `user.max_user_namespaces` is reached.
pub fn unshare_user() -> io::Result<()> {
    // SAFETY: as above; CLONE_NEWUSER touches no descriptor.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }.map_err(io::Error::from)
}

/// Makes the children that the process starts from now on members of a new process namespace
/// (`CLONE_NEWPID`, Linux 3.8). The first of them has the process id 1 there, and all others end
/// with it.
///
/// `EPERM` without `CAP_SYS_ADMIN` in the thread's user namespace.
pub fn unshare_processes_of_children() -> io::Result<()> {
    // SAFETY: as above; CLONE_NEWPID touches no descriptor.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) }.map_err(io::Error::from)
}
