//! Sends bytes of a mapped file by `sendfile` instead of copying them.
//!
//! A program that maps a file and writes from the mapping pays for a copy of every byte. The pages
//! of the mapping are the pages of the file, so `sendfile` sends the same bytes without the copy.
//! Three things must be true, and each is asked of the kernel at the call, because the tables of
//! the interposer are hints:
//!
//! 1. The memory is a mapping of the file at that offset, and cannot be written through the
//!    mapping ([`confirmation`]).
//! 2. The file does not change until the peer acknowledged its bytes: the broker of `haul run`
//!    keeps a read lease, for which every writer of the file waits ([`files`], [`sockets`]).
//! 3. It costs less ([`trial`]).
//!
//! If one of them is not true, the original call is made, and the reason is counted.
//!
//! Limits: `sendfile` is not a cancellation point. Only pieces of at least [`BYTES_MIN`] are worth
//! the questions, which take about a microsecond.

mod blocked_signal;
mod confirmation;
mod files;
mod own_memory;
mod sockets;
mod trial;

use crate::account;
use crate::broker;
use crate::descriptors;
use crate::errno::PreservedErrno;
use crate::high_descriptor;
use crate::kernel;
use crate::locks;
use crate::mappings;
use crate::next;
use crate::tally;
use blocked_signal::BlockedSignal;
use files::File;
use haul_tally::{DescriptorKind, NotElided, SendMethod, header, slot};
use libc::{c_int, iovec, msghdr, off64_t, ssize_t};

/// Fewer bytes of a mapping are copied.
pub const BYTES_MIN: usize = 64 << 10;
/// Pages that a blocking call sends before it checks again that the file's lease stands.
const BLOCKING_BYTES_MAX: usize = 1 << 20;
/// Pieces of memory that one call sends after the file's.
const PIECES_MAX: usize = 64;
/// The flags that an elided call may have. A call with `MSG_DONTWAIT` is elided only if the socket
/// is non-blocking.
const FLAGS: c_int = libc::MSG_NOSIGNAL | libc::MSG_MORE | libc::MSG_DONTWAIT;

/// Prepares the process, when the library is loaded.
pub fn begin() {
    if mark_memory() {
        sockets::begin();
    }
}

/// Returns false in another PID namespace, in which the broker cannot check processes.
fn mark_memory() -> bool {
    let is_visible = kernel::pid_namespace() == Some(tally::header(header::PID_NAMESPACE));
    if is_visible {
        own_memory::mark();
    }
    is_visible
}

/// Prepares the child after `fork`.
pub fn begin_in_child() {
    mark_memory();
    confirmation::forget();
    files::forget_all();
    broker::forget_connection();
}

/// Prepares for a call that connects a socket, or that ends its connection.
pub fn before_connect(fd: c_int) {
    if is_on() {
        let _errno = PreservedErrno::read();
        sockets::before_connect(fd);
    }
}

/// Forgets a descriptor of the interposer that the program is about to close.
pub fn before_close(fd: c_int) {
    if high_descriptor::is_high(fd) {
        before_close_range(fd as usize, fd as usize);
    }
}

/// Like [`before_close`], for all descriptors from `first` to `last`.
pub fn before_close_range(first: usize, last: usize) {
    confirmation::before_close_range(first, last);
    files::before_close_range(first, last);
    broker::before_close_range(first, last);
    mappings::before_close_range(first, last);
}

/// Whether a descriptor may be the interposer's.
pub fn may_own(fd: c_int) -> bool {
    high_descriptor::is_high(fd)
}

/// Whether copies are elided in this process.
pub fn is_on() -> bool {
    tally::header(header::IS_ELIDING) == 1 && !kernel::is_quiet() && !locks::are_used()
}

/// A call of the program.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The socket, or whatever the program writes to.
    pub fd: c_int,
    /// The memory.
    pub pieces: &'a [iovec],
    /// The flags of `send`; 0 for `write`.
    pub flags: c_int,
    /// Whether the call has neither an address nor control data.
    pub is_plain: bool,
}

impl Call<'_> {
    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.iov_len))
    }
}

/// Errors of `sendfile` after which the original call is made. Errors of the socket are not among
/// them, because the kernel reports them once.
const COPYING_MAY_SUCCEED: [c_int; 10] = [
    // The process may not read the file any more.
    libc::EACCES,
    // The socket is full. If it still is, the original call tells the program so.
    libc::EAGAIN,
    // The program closed a descriptor of the interposer.
    libc::EBADF,
    libc::EINVAL,
    libc::EIO,
    libc::ENOMEM,
    libc::ENOSYS,
    libc::EOVERFLOW,
    libc::EPERM,
    libc::ESPIPE,
];

/// A piece of memory that is a mapping of a file, by the tables of the interposer.
#[derive(Clone, Copy)]
struct Candidate {
    /// Position of the piece among the pieces of the call.
    piece: usize,
    address: usize,
    /// Bytes of the piece inside of the mapping.
    bytes: usize,
    /// The descriptor from which the program made the mapping.
    mapped_from: c_int,
}

/// What `sendfile` sends instead of a piece of memory.
struct Elidable {
    /// Position of the piece among the pieces of the call.
    piece: usize,
    /// Bytes of the piece that the file has.
    bytes: usize,
    /// Where they are in the file.
    offset: off64_t,
    file: File,
    socket: sockets::Socket,
    /// Bytes that one system call sends.
    call_bytes_max: usize,
}

/// Makes a call of the program, without the copy if possible. `original` makes the call itself.
/// Counts the bytes.
///
/// # Safety
///
/// The pieces are memory that the program passes to the call.
pub unsafe fn send(call: Call, original: impl FnOnce() -> ssize_t) -> ssize_t {
    let errno = current_errno();
    // SAFETY: the caller's contract.
    let (sent, reason) = unsafe { send_or_copy(call, original) };
    if sent >= 0 {
        // A call that succeeds leaves errno alone.
        set_errno(errno);
    }
    if let (Some(reason), true) = (reason, sent > 0) {
        // SAFETY: the caller's contract.
        let mapped = unsafe { account::sent(call.fd, call.pieces, sent as usize, call.flags) };
        if mapped > 0 {
            tally::add_call(slot::not_elided(reason), mapped);
        }
    }
    sent
}

/// Returns the result, and the reason if the original call was made.
///
/// # Safety
///
/// As for [`send`].
unsafe fn send_or_copy(
    call: Call,
    original: impl FnOnce() -> ssize_t,
) -> (ssize_t, Option<NotElided>) {
    let Some(candidate) = candidate(call) else { return (original(), Some(NotElided::Small)) };
    let trial = trial::of(candidate.bytes);
    let choice = trial.choose();
    let clock = choice.is_measured.then(trial::Clock::start);
    if !choice.is_elided {
        let sent = original();
        if let Some(clock) = clock {
            trial.record(clock, false, sent);
        }
        let reason = if choice.is_comparison { NotElided::Compared } else { NotElided::Dearer };
        return (sent, Some(trial.refusal().unwrap_or(reason)));
    }
    match elidable(call, candidate) {
        Ok(elidable) => {
            // SAFETY: the caller's contract.
            let sent = unsafe { elided(call, &elidable) };
            elidable.file.release();
            if let Some(clock) = clock {
                trial.record(clock, true, sent);
            }
            (sent, None)
        }
        Err(reason) => {
            trial.refuse(reason);
            (original(), Some(reason))
        }
    }
}

/// Finds a piece that may be a mapping of a file.
fn candidate(call: Call) -> Option<Candidate> {
    /// `MAX_RW_COUNT` of the kernel, which sends no more in one call.
    const BYTES_MAX: usize = 0x7FFF_F000;
    // The kernel refuses a call with an address in the upper half, and sends nothing.
    let is_possible = |piece: &iovec| {
        (piece.iov_base as usize)
            .checked_add(piece.iov_len)
            .is_some_and(|end| isize::try_from(end).is_ok())
    };
    if !(BYTES_MIN..=BYTES_MAX).contains(&call.bytes()) || !call.pieces.iter().all(is_possible) {
        return None;
    }
    call.pieces.iter().enumerate().find_map(|(piece, &iovec { iov_base, iov_len })| {
        let hint = mappings::find(iov_base as usize)?;
        let bytes = hint.available.min(iov_len);
        let address = iov_base as usize;
        (bytes >= BYTES_MIN).then_some(Candidate { piece, address, bytes, mapped_from: hint.fd })
    })
}

/// Asks the kernel whether a candidate can be sent by `sendfile`.
fn elidable(call: Call, candidate: Candidate) -> Result<Elidable, NotElided> {
    let Candidate { piece, address, bytes, mapped_from } = candidate;
    if !own_memory::is_own() {
        return Err(NotElided::Busy);
    }
    let is_short = call.pieces.len() - piece <= PIECES_MAX;
    if !call.is_plain || !is_short || call.flags & !FLAGS != 0 {
        return Err(NotElided::Call);
    }
    if descriptors::kind(call.fd, 0) != DescriptorKind::Tcp {
        return Err(NotElided::Call);
    }
    let socket = sockets::socket(call.fd)?;
    // A piece of at most 1 MiB is one sendfile on a blocking and on a non-blocking socket, so the
    // mode of the socket is not read.
    let must_not_wait = call.flags & libc::MSG_DONTWAIT != 0;
    let mut call_bytes_max = BLOCKING_BYTES_MAX;
    if must_not_wait || bytes > BLOCKING_BYTES_MAX {
        if kernel::is_nonblocking(call.fd) {
            call_bytes_max = usize::MAX;
        } else if must_not_wait {
            return Err(NotElided::Call);
        }
    }
    let mapping = if tally::header(header::IS_UNCONFIRMED) == 1 {
        confirmation::unconfirmed(address, bytes, mapped_from)?
    } else {
        confirmation::confirm(address, bytes)?
    };
    let bytes = bytes.min(mapping.bytes);
    if bytes < BYTES_MIN {
        return Err(NotElided::Small);
    }
    let file = files::file(mapping.device, mapping.inode, mapped_from)?;
    Ok(Elidable { piece, bytes, offset: mapping.offset, file, socket, call_bytes_max })
}

/// Sends the pieces before the file's, the file's pages, and the pieces after them.
///
/// # Safety
///
/// As for [`send`].
unsafe fn elided(call: Call, elidable: &Elidable) -> ssize_t {
    let (before, rest) = call.pieces.split_at(elidable.piece);
    let mut total = 0;
    if !before.is_empty() {
        let bytes: usize = before.iter().map(|piece| piece.iov_len).sum();
        // SAFETY: the caller's contract.
        let sent = unsafe { send_pieces(call.fd, before, call.flags | libc::MSG_MORE) };
        if sent < 0 {
            return sent;
        }
        // SAFETY: the caller's contract.
        let mapped = unsafe { account::sent(call.fd, before, sent as usize, 0) };
        if mapped > 0 {
            tally::add_call(slot::not_elided(NotElided::Small), mapped);
        }
        total = sent as usize;
        if total < bytes {
            return sent;
        }
    }
    // As the original call, which raises SIGPIPE only if it sent nothing.
    let is_silent = call.flags & libc::MSG_NOSIGNAL != 0 || total > 0;
    let pages = send_file(call.fd, elidable, is_silent);
    if pages.sent > 0 {
        account::sent_inside_kernel(call.fd, pages.sent, SendMethod::Elided);
        total += pages.sent;
    }
    if pages.is_final {
        return if total > 0 { total as ssize_t } else { -1 };
    }
    // What sendfile did not take is copied: the file's last page beyond its end, and whatever
    // follows. If the socket is full, this call finds so, and an edge-triggered program is
    // notified.
    let flags = if total > 0 { call.flags | libc::MSG_NOSIGNAL } else { call.flags };
    // SAFETY: the caller's contract; the first piece has at least as many bytes as were sent.
    let sent = unsafe { send_rest(call.fd, rest, pages.sent, flags) };
    if sent > 0 {
        total as ssize_t + sent
    } else if total > 0 {
        total as ssize_t
    } else {
        sent
    }
}

impl Elidable {
    /// Whether a blocking call ended before all pages were sent, although the file has them.
    fn ends_early(&self, fd: c_int, sent: usize) -> bool {
        let file_end = kernel::status(self.file.fd()).map_or(0, |status| status.st_size);
        let has_more = self.offset.saturating_add_unsigned(sent as u64) < file_end;
        has_more && !kernel::is_nonblocking(fd)
    }
}

/// The result of sending pages.
struct ElidedSend {
    sent: usize,
    /// Whether the call is over: an error that the program must see, or an interrupted call.
    is_final: bool,
}

fn send_file(fd: c_int, elidable: &Elidable, is_silent: bool) -> ElidedSend {
    let mut sent = 0;
    let mut offset = elidable.offset;
    while sent < elidable.bytes {
        let Some(_sending) = elidable.socket.begin(&elidable.file) else { break };
        let bytes = (elidable.bytes - sent).min(elidable.call_bytes_max);
        let signal = BlockedSignal::block();
        // SAFETY: the offset lives through the call.
        let result = unsafe { next::sendfile64(fd, elidable.file.fd(), &raw mut offset, bytes) };
        let errno = current_errno();
        if let Some(signal) = signal {
            let must_raise = result < 0 && sent == 0 && !is_silent;
            signal.restore(must_raise || result == bytes as ssize_t);
        }
        match usize::try_from(result) {
            Ok(taken) => {
                sent += taken;
                if taken < bytes {
                    // A signal, or a time limit of a blocking socket: the original call would end.
                    let is_final = elidable.ends_early(fd, sent);
                    return ElidedSend { sent, is_final };
                }
            }
            Err(_) if errno == libc::EAGAIN && !kernel::is_nonblocking(fd) => {
                set_errno(errno);
                return ElidedSend { sent, is_final: true };
            }
            Err(_) if COPYING_MAY_SUCCEED.contains(&errno) => break,
            Err(_) => {
                set_errno(errno);
                return ElidedSend { sent, is_final: true };
            }
        }
    }
    ElidedSend { sent, is_final: false }
}

/// Sends pieces of memory.
///
/// # Safety
///
/// As for [`send`].
unsafe fn send_pieces(fd: c_int, pieces: &[iovec], flags: c_int) -> ssize_t {
    // SAFETY: the structure consists of integers and pointers, for which zeros are valid.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len();
    // SAFETY: the caller's contract. The kernel does not write to the pieces.
    unsafe { next::sendmsg(fd, &raw const message, flags) }
}

/// Sends pieces of memory without the first bytes of the first piece, and counts the bytes.
///
/// # Safety
///
/// As for [`send`]. The first piece has more than `skipped` bytes, or as many.
unsafe fn send_rest(fd: c_int, pieces: &[iovec], skipped: usize, flags: c_int) -> ssize_t {
    let mut rest = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
    let mut count = 0;
    for (index, piece) in pieces.iter().take(PIECES_MAX).enumerate() {
        let skipped = if index == 0 { skipped } else { 0 };
        if piece.iov_len > skipped {
            rest[count] = iovec {
                iov_base: piece.iov_base.wrapping_byte_add(skipped),
                iov_len: piece.iov_len - skipped,
            };
            count += 1;
        }
    }
    if count == 0 {
        return 0;
    }
    let rest = &rest[..count];
    // SAFETY: the pieces are parts of the caller's.
    unsafe {
        let sent = send_pieces(fd, rest, flags);
        if sent > 0 {
            let errno = current_errno();
            let mapped = account::sent(fd, rest, sent as usize, 0);
            if mapped > 0 {
                tally::add_call(slot::not_elided(NotElided::Remainder), mapped);
            }
            set_errno(errno);
        }
        sent
    }
}

fn current_errno() -> c_int {
    // SAFETY: the C library returns a valid address for each thread.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}
