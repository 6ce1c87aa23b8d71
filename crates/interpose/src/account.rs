//! Counts the bytes of a call that succeeded.

use crate::descriptors;
use crate::errno::PreservedErrno;
use crate::kernel;
use crate::mappings;
use crate::recent_reads::{self, Position};
use crate::tally;
use haul_tally::{DescriptorKind, SendMethod, SizeClass, slot};
use libc::{c_int, iovec, off64_t};

/// Sources that one piece of memory is split into. What is left of the piece counts as other
/// memory.
const SPLITS_MAX: usize = 32;

/// Counts bytes that a call with these pieces of memory sent or wrote. Returns the number of bytes
/// that were copied from mapped files.
///
/// # Safety
///
/// Each piece is memory that the program passed to the call.
pub unsafe fn sent(fd: c_int, pieces: &[iovec], bytes: usize, flags: c_int) -> u64 {
    if !tally::is_active() {
        return 0;
    }
    let _errno = PreservedErrno::read();
    let class = SizeClass::of(bytes as u64);
    let kind = descriptors::kind(fd, bytes as u64);
    if kind != DescriptorKind::Tcp {
        tally::add_call(slot::written(kind, class), bytes as u64);
        return 0;
    }
    descriptors::add_seen(fd, bytes as u64);
    if flags & libc::MSG_ZEROCOPY != 0 && kernel::allows_zerocopy(fd) {
        tally::add_call(slot::sent(SendMethod::Zerocopy, class), bytes as u64);
        return 0;
    }
    let mut sums = [0u64; SendMethod::ALL.len()];
    let mut left = bytes;
    for piece in pieces {
        let taken = piece.iov_len.min(left);
        left -= taken;
        add_sources(piece.iov_base as usize, taken, &mut sums);
        if left == 0 {
            break;
        }
    }
    // What no piece accounts for: the program changed its array during the call.
    sums[SendMethod::Memory as usize] += left as u64;
    // The call belongs to the method of most of its bytes.
    let most = sums.iter().copied().max().unwrap_or(0);
    let mut is_counted = false;
    for (method, &sum) in SendMethod::ALL.iter().zip(&sums) {
        let counter = slot::sent(*method, class);
        if sum > 0 {
            tally::add(counter + 1, sum);
        }
        if sum == most && !is_counted {
            is_counted = true;
            tally::add(counter, 1);
        }
    }
    sums[SendMethod::MappedFile as usize]
}

/// Attributes a piece of memory to the sources of its bytes.
fn add_sources(address: usize, bytes: usize, sums: &mut [u64; SendMethod::ALL.len()]) {
    if bytes < recent_reads::BYTES_MIN {
        sums[SendMethod::Memory as usize] += bytes as u64;
        return;
    }
    let (mut at, end) = (address, address.saturating_add(bytes));
    for _ in 0..SPLITS_MAX {
        if at >= end {
            break;
        }
        let (method, available) = if let Some((kind, available)) = recent_reads::source_of(at) {
            let is_socket = kind == DescriptorKind::Tcp;
            (if is_socket { SendMethod::SocketRead } else { SendMethod::FileRead }, available)
        } else if let Some(found) = mappings::find(at) {
            (SendMethod::MappedFile, found.available)
        } else {
            break;
        };
        let taken = available.min(end - at);
        sums[method as usize] += taken as u64;
        at += taken;
    }
    sums[SendMethod::Memory as usize] += end.saturating_sub(at) as u64;
    recent_reads::check_sample(address, end);
}

/// Counts bytes that went to a descriptor inside the kernel.
pub fn sent_inside_kernel(fd: c_int, bytes: usize, method: SendMethod) {
    if !tally::is_active() {
        return;
    }
    let _errno = PreservedErrno::read();
    let class = SizeClass::of(bytes as u64);
    match descriptors::kind(fd, bytes as u64) {
        DescriptorKind::Tcp => {
            descriptors::add_seen(fd, bytes as u64);
            tally::add_call(slot::sent(method, class), bytes as u64);
        }
        kind => tally::add_call(slot::written(kind, class), bytes as u64),
    }
}

/// Counts bytes that a call read into these pieces of memory. `offset` is the position in the file,
/// if the call named it.
///
/// # Safety
///
/// Each piece is memory that the program passed to the call.
pub unsafe fn received(fd: c_int, pieces: &[iovec], bytes: usize, offset: Option<off64_t>) {
    if !tally::is_active() {
        return;
    }
    let _errno = PreservedErrno::read();
    let kind = descriptors::kind(fd, 0);
    tally::add_call(slot::received(kind, SizeClass::of(bytes as u64)), bytes as u64);
    if bytes < recent_reads::BYTES_MIN {
        return;
    }
    let mut left = bytes;
    for piece in pieces {
        let taken = piece.iov_len.min(left);
        let position = match offset {
            Some(offset) => Position::At(offset.saturating_add_unsigned((bytes - left) as u64)),
            None => Position::BeforeCurrent(left),
        };
        recent_reads::record(fd, kind, piece.iov_base as usize, taken, position);
        left -= taken;
        if left == 0 {
            break;
        }
    }
}

/// Counts bytes that the kernel read from a descriptor by itself, as `splice` does.
pub fn received_inside_kernel(fd: c_int, bytes: usize) {
    if !tally::is_active() {
        return;
    }
    let _errno = PreservedErrno::read();
    let kind = descriptors::kind(fd, 0);
    tally::add_call(slot::received(kind, SizeClass::of(bytes as u64)), bytes as u64);
}

/// Counts the completions of `MSG_ZEROCOPY` in the control data of a message from the error queue.
///
/// # Safety
///
/// `message` was filled by `recvmsg`.
pub unsafe fn completions(message: &libc::msghdr) {
    /// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` of `<linux/errqueue.h>`.
    const ORIGIN_ZEROCOPY: u8 = 5;
    const CODE_COPIED: u8 = 1;
    if !tally::is_active() {
        return;
    }
    // SAFETY: the kernel filled the control data, and the macros keep inside of it.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: not null, so it is a whole header.
        let (level, kind, bytes) =
            unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        let is_error = (level, kind) == (libc::SOL_IP, libc::IP_RECVERR)
            || (level, kind) == (libc::SOL_IPV6, libc::IPV6_RECVERR);
        // SAFETY: the macro only adds up lengths.
        let error_bytes = unsafe { libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) };
        if is_error && bytes >= error_bytes as usize {
            // SAFETY: the data has the length of the structure, which has only integers.
            let error = unsafe {
                libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned()
            };
            if error.ee_errno == 0 && error.ee_origin == ORIGIN_ZEROCOPY {
                let sends = u64::from(error.ee_data.wrapping_sub(error.ee_info)) + 1;
                tally::add(slot::ZEROCOPY_COMPLETIONS, sends);
                if error.ee_code == CODE_COPIED {
                    tally::add(slot::ZEROCOPY_COPIED, sends);
                }
            }
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}
