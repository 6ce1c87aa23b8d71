//! The pieces of memory that a program passes to a call.
//!
//! After a call that succeeded, the array of the pieces is valid. Before a call, the kernel says
//! whether the array can be read, so that a bad address does not end the program.

use crate::elide;
use crate::kernel;
use crate::mappings;
use libc::{c_void, iovec, msghdr, size_t};

/// The memory of a call with one buffer.
pub fn one(buffer: *const c_void, bytes: size_t) -> [iovec; 1] {
    [iovec { iov_base: buffer.cast_mut(), iov_len: bytes }]
}

/// The pieces of a call, which succeeded, so its array is valid.
///
/// # Safety
///
/// The kernel read `count` pieces at `pieces`.
pub unsafe fn slice<'a>(pieces: *const iovec, count: usize) -> &'a [iovec] {
    if pieces.is_null() {
        return &[];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(pieces, count) }
}

/// The pieces of a call that is not made yet. `None` if the call cannot be elided, or if the kernel
/// refuses the pieces: the original call then returns its error.
///
/// # Safety
///
/// The program passes `count` pieces at `pieces` to the kernel.
pub unsafe fn elidable_slice<'a>(pieces: *const iovec, count: usize) -> Option<&'a [iovec]> {
    /// `UIO_MAXIOV` of `<linux/uio.h>`.
    const PIECES_MAX: usize = 1024;
    let is_readable = elide::is_on()
        && mappings::were_recorded()
        && count <= PIECES_MAX
        && pieces.is_aligned()
        && kernel::is_readable(pieces as usize, count * size_of::<iovec>());
    // SAFETY: the caller's contract.
    is_readable.then(|| unsafe { slice(pieces, count) })
}

/// The pieces of a message that is not sent yet, as for [`elidable_slice`]. The second value says
/// whether the message has neither an address nor control data.
///
/// # Safety
///
/// The program passes the message to the kernel.
pub unsafe fn elidable_message<'a>(message: *const msghdr) -> Option<(&'a [iovec], bool)> {
    let is_readable = elide::is_on()
        && mappings::were_recorded()
        && message.is_aligned()
        && kernel::is_readable(message as usize, size_of::<msghdr>());
    if !is_readable {
        return None;
    }
    // SAFETY: the memory was readable a moment ago.
    let message = unsafe { &*message };
    let is_plain = message.msg_name.is_null() && message.msg_controllen == 0;
    // SAFETY: the caller's contract.
    Some((unsafe { elidable_slice(message.msg_iov, message.msg_iovlen) }?, is_plain))
}
