//! Requests to the broker of `haul run`, which answers at a Unix socket.

use crate::environment::{variable, with_nul};
use crate::high_descriptor::{self, KeptDescriptor};
use crate::next;
use haul_tally::message::{
    ANSWER_MS_MAX, LeaseAnswer, REQUEST_BYTES, REQUEST_LEASE, REQUEST_TALLY, TOKEN_BYTES,
};
use haul_tally::{NotElided, SOCKET_VARIABLE, TOKEN_VARIABLE};
use libc::{c_int, c_void, iovec, msghdr, socklen_t};
use std::ffi::CStr;
use std::sync::atomic::{
    AtomicBool, AtomicU8,
    Ordering::{Relaxed, SeqCst},
};

/// Length of the longest path of a Unix socket, with its NUL byte (`struct sockaddr_un`).
const PATH_BYTES: usize = 108;

/// The path of the broker's socket. The program may change its environment.
static PATH: [AtomicU8; PATH_BYTES] = [const { AtomicU8::new(0) }; PATH_BYTES];
/// The token of the run, with which each request begins.
static TOKEN: [AtomicU8; TOKEN_BYTES] = [const { AtomicU8::new(0) }; TOKEN_BYTES];
/// The connection on which this process asks for leases.
static CONNECTION: KeptDescriptor = KeptDescriptor::none();
/// Whether a thread is about to use the connection, or uses the connection.
static IS_ASKING: AtomicBool = AtomicBool::new(false);
/// Whether no connection is possible: the socket is gone, or out of reach after a `chroot`.
static IS_UNREACHABLE: AtomicBool = AtomicBool::new(false);

/// An answer: bytes, and a descriptor.
struct Answer {
    bytes: [u8; LeaseAnswer::BYTES],
    length: usize,
    fd: Option<c_int>,
}

/// Control data with one descriptor, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 32]);

/// Reads the path of the socket from the environment, and asks for the tally. `None` without
/// `haul run`.
pub fn receive_tally() -> Option<c_int> {
    const NAME: [u8; SOCKET_VARIABLE.len() + 1] = with_nul(SOCKET_VARIABLE);
    const TOKEN_NAME: [u8; TOKEN_VARIABLE.len() + 1] = with_nul(TOKEN_VARIABLE);
    let path = variable(CStr::from_bytes_with_nul(&NAME).ok()?)?.to_bytes();
    let token = variable(CStr::from_bytes_with_nul(&TOKEN_NAME).ok()?)?.to_bytes();
    if path.len() >= PATH_BYTES || token.len() != TOKEN_BYTES {
        return None;
    }
    for (byte, place) in path.iter().zip(&PATH).chain(token.iter().zip(&TOKEN)) {
        place.store(*byte, Relaxed);
    }
    let connection = connect()?;
    let answer = ask(connection, REQUEST_TALLY, None);
    // SAFETY: the descriptor is this function's.
    unsafe { next::close(connection) };
    answer?.fd
}

/// Asks for a lease of an open file. Returns the number of the file's entry in the tally, and the
/// state of the entry while the lease stands.
///
/// One thread at a time calls this.
pub fn lease(file: c_int) -> Result<(u16, u64), NotElided> {
    IS_ASKING.store(true, SeqCst);
    let answer = ask_for_lease(file);
    IS_ASKING.store(false, SeqCst);
    answer
}

fn ask_for_lease(file: c_int) -> Result<(u16, u64), NotElided> {
    let connection = connection().ok_or(NotElided::NoBroker)?;
    let answer = ask(connection, REQUEST_LEASE, Some(file));
    let answer = answer.and_then(|answer| {
        LeaseAnswer::from_bytes(answer.bytes.get(..answer.length).unwrap_or_default())
    });
    let Some(LeaseAnswer(answer)) = answer else {
        // A late answer would be read as the answer to the next request.
        forget_connection();
        return Err(NotElided::NoBroker);
    };
    answer.map_err(|reason| {
        NotElided::ALL.get(usize::from(reason)).copied().unwrap_or(NotElided::NoBroker)
    })
}

/// Closes the connection, and makes another one at the next request. In the child after `fork`: the
/// parent uses the connection.
pub fn forget_connection() {
    CONNECTION.close();
    IS_ASKING.store(false, SeqCst);
}

/// Forgets the connection if its descriptor is in a range that the program is about to close, after
/// a request of another thread is over.
pub fn before_close_range(first: usize, last: usize) {
    let is_closed = |&fd: &c_int| usize::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd));
    if CONNECTION.get().as_ref().is_some_and(is_closed) {
        high_descriptor::wait_while(|| IS_ASKING.load(SeqCst));
        CONNECTION.before_close_range(first, last);
    }
}

fn connection() -> Option<c_int> {
    if CONNECTION.is_own() {
        return CONNECTION.get();
    }
    CONNECTION.close();
    if IS_UNREACHABLE.load(Relaxed) {
        return None;
    }
    let connected = connect().and_then(|connected| CONNECTION.keep(connected));
    if connected.is_none() {
        IS_UNREACHABLE.store(true, Relaxed);
    }
    connected
}

fn connect() -> Option<c_int> {
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    for (place, byte) in address.sun_path.iter_mut().zip(&PATH) {
        *place = byte.load(Relaxed).cast_signed();
    }
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers only.
    let fd = unsafe { next::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return None;
    }
    let limit = libc::timeval {
        tv_sec: (ANSWER_MS_MAX / 1000) as libc::time_t,
        tv_usec: (ANSWER_MS_MAX % 1000 * 1000) as libc::suseconds_t,
    };
    let bytes = size_of::<libc::timeval>() as socklen_t;
    // SAFETY: the structures live through the calls, with these lengths.
    let is_connected = unsafe {
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            let value: *const c_void = (&raw const limit).cast();
            libc::setsockopt(fd, libc::SOL_SOCKET, option, value, bytes);
        }
        let bytes = size_of::<libc::sockaddr_un>() as socklen_t;
        libc::connect(fd, (&raw const address).cast(), bytes) == 0
    };
    if !is_connected {
        // SAFETY: the descriptor is this function's.
        unsafe { next::close(fd) };
        return None;
    }
    Some(fd)
}

/// Sends a request, with a descriptor or without, and waits for the answer.
fn ask(connection: c_int, kind: u8, passed: Option<c_int>) -> Option<Answer> {
    let mut request = [kind; REQUEST_BYTES];
    for (byte, place) in request.iter_mut().zip(&TOKEN) {
        *byte = place.load(Relaxed);
    }
    let mut piece = iovec { iov_base: request.as_mut_ptr().cast(), iov_len: REQUEST_BYTES };
    let mut control = Control([0; 32]);
    // SAFETY: the structure consists of integers and pointers, for which zeros are valid.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    if let Some(fd) = passed {
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: the macros only add up lengths, and the space is larger than one descriptor
        // needs.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<c_int>() as u32) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<c_int>() as u32) as usize;
            libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(fd);
        }
    }
    // SAFETY: the message and what it points to live through the call.
    let sent = unsafe { next::sendmsg(connection, &raw const message, libc::MSG_NOSIGNAL) };
    if sent != REQUEST_BYTES as isize {
        return None;
    }
    receive(connection)
}

fn receive(connection: c_int) -> Option<Answer> {
    let mut bytes = [0u8; LeaseAnswer::BYTES];
    let mut piece = iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; 32]);
    // SAFETY: the structure consists of integers and pointers, for which zeros are valid.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    // SAFETY: the message and what it points to live through the call.
    let length = unsafe { next::recvmsg(connection, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).ok().filter(|&length| length > 0)?;
    // SAFETY: the kernel filled the control data.
    let fd = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let is_descriptor = !header.is_null()
            && ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        is_descriptor.then(|| libc::CMSG_DATA(header).cast::<c_int>().read_unaligned())
    };
    Some(Answer { bytes, length, fd })
}
