//! Descriptors that the interposer keeps open in the program: numbers that programs do not use, and
//! closed at `exec`.

use crate::next;
use libc::c_int;

/// The lowest number. The limit of open files is at least 1024 on common systems.
const NUMBER_MIN: c_int = 512;

/// Duplicates a descriptor to a high number. `None` if the limit of open files does not allow it.
pub fn duplicate(fd: c_int) -> Option<c_int> {
    // SAFETY: the call takes numbers only.
    let high = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, NUMBER_MIN) };
    (high >= 0).then_some(high)
}

/// Moves a descriptor to a high number, and closes the original. `None` if the limit of open files
/// does not allow it.
pub fn raise(fd: c_int) -> Option<c_int> {
    if fd < 0 {
        return None;
    }
    let high = duplicate(fd);
    // SAFETY: the caller gives the descriptor away.
    unsafe { next::close(fd) };
    high
}

/// Whether a descriptor has a number that the interposer may use.
pub fn is_high(fd: c_int) -> bool {
    fd >= NUMBER_MIN
}
