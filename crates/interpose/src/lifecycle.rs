//! The beginning and the end of a process: the constructor, `fork`, seccomp filters and `exit`.

use crate::broker;
use crate::descriptors;
use crate::elide;
use crate::environment::{variable, with_nul};
use crate::errno::PreservedErrno;
use crate::kernel;
use crate::next;
use crate::tally;
use haul_tally::{FILTERS_VARIABLE, SWITCH_VARIABLE, TALLY_BYTES};
use libc::c_int;
use std::ffi::CStr;

/// Called by the dynamic linker when the library is loaded.
#[cfg(feature = "exports")]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = begin;

/// Called by `exit`, after the program's own functions.
#[cfg(feature = "exports")]
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = end_at_exit;

/// Maps the tally and takes a slot. Without a tally, nothing is counted.
pub extern "C" fn begin() {
    const SWITCH: [u8; SWITCH_VARIABLE.len() + 1] = with_nul(SWITCH_VARIABLE);
    const FILTERS: [u8; FILTERS_VARIABLE.len() + 1] = with_nul(FILTERS_VARIABLE);
    let _errno = PreservedErrno::read();
    next::look_up_all();
    let switch = CStr::from_bytes_with_nul(&SWITCH).ok().and_then(variable);
    if switch.is_some_and(|value| value == c"off") {
        return;
    }
    let inherited = CStr::from_bytes_with_nul(&FILTERS).ok().and_then(variable).map_or(0, number);
    if seccomp_filters().is_some_and(|filters| filters > inherited) {
        // A filter that the program's starter installed could kill the process for a system call.
        return;
    }
    let Some(fd) = broker::receive_tally() else { return };
    let is_whole = kernel::status(fd).is_some_and(|status| status.st_size as usize == TALLY_BYTES);
    // SAFETY: the descriptor is closed here, and the mapping stays.
    let is_begun = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = if is_whole {
            next::mmap(std::ptr::null_mut(), TALLY_BYTES, protection, libc::MAP_SHARED, fd, 0)
        } else {
            libc::MAP_FAILED
        };
        next::close(fd);
        mapped != libc::MAP_FAILED && tally::begin(mapped.cast())
    };
    if !is_begun {
        return;
    }
    elide::begin();
    // SAFETY: the functions may run in the parent and in the child of a fork.
    unsafe { libc::pthread_atfork(None, Some(after_fork_in_parent), Some(after_fork_in_child)) };
}

/// The number of seccomp filters of this process (Linux 5.9). `None` if `/proc` does not show it.
fn seccomp_filters() -> Option<u64> {
    const NAME: &[u8] = b"Seccomp_filters:\t";
    let mut text = [0u8; 4096];
    // SAFETY: the path is a C string, the buffer has this length, the descriptor is closed here.
    let bytes = unsafe {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let fd = next::open(c"/proc/self/status".as_ptr(), flags, 0);
        if fd < 0 {
            return None;
        }
        let bytes = next::read(fd, text.as_mut_ptr().cast(), text.len());
        next::close(fd);
        usize::try_from(bytes).ok()?
    };
    let text = text.get(..bytes)?;
    let at = text.windows(NAME.len()).position(|window| window == NAME)?;
    Some(leading_number(&text[at + NAME.len()..]))
}

fn number(text: &CStr) -> u64 {
    leading_number(text.to_bytes())
}

/// The number at the beginning of a text.
fn leading_number(text: &[u8]) -> u64 {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0')))
}

extern "C" fn after_fork_in_parent() {
    descriptors::share_all();
}

extern "C" fn after_fork_in_child() {
    let _errno = PreservedErrno::read();
    descriptors::begin_in_child();
    tally::take_slot(!kernel::is_quiet());
    elide::begin_in_child();
    if kernel::is_quiet() {
        kernel::be_quiet();
    }
}

/// Prepares for a seccomp filter: the interposer makes no further system calls.
pub fn before_filter() {
    if tally::is_active() {
        kernel::be_quiet();
    }
}

#[cfg_attr(not(feature = "exports"), allow(dead_code, reason = "the destructor calls it"))]
extern "C" fn end_at_exit() {
    end();
}

/// Compares the open connections before the process ends.
pub fn end() {
    // In the child of `vfork` the tables belong to the parent, which runs on.
    let is_own = tally::is_active() && tally::is_own_process();
    if is_own && !kernel::is_quiet() {
        let _errno = PreservedErrno::read();
        descriptors::end_range(0, c_int::MAX as usize);
    }
    if is_own {
        tally::end_slot();
    }
}
