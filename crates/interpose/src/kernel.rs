//! Questions to the kernel about a file descriptor.
//!
//! A process that installed a seccomp filter asks nothing, because the filter could kill the
//! process for a system call that the program itself never makes.

use crate::errno::PreservedErrno;
use crate::next;
use crate::tally;
use haul_tally::{CONGESTION_CONTROLS, DescriptorKind, slot};
use libc::{c_int, c_long, c_void, socklen_t};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether this process asks nothing.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// States of `<net/tcp_states.h>`.
mod state {
    pub const ESTABLISHED: u8 = 1;
    pub const SYN_SENT: u8 = 2;
    pub const SYN_RECEIVED: u8 = 3;
    pub const CLOSED: u8 = 7;
    pub const CLOSE_WAIT: u8 = 8;
    pub const LISTEN: u8 = 10;
}
/// Size of `struct tcp_info` up to `tcpi_bytes_retrans` (Linux 4.19).
const TCP_INFO_BYTES: usize = 216;

/// Makes no further system calls in this process.
pub fn be_quiet() {
    IS_QUIET.store(true, Relaxed);
    tally::set(slot::IS_QUIET, 1);
}

/// Whether this process asks nothing.
pub fn is_quiet() -> bool {
    IS_QUIET.load(Relaxed)
}

/// Whether memory can be read, so that a bad address of the program is left to the system call that
/// returns `EFAULT` for the address.
pub fn is_readable(address: usize, bytes: usize) -> bool {
    const PAGE_BYTES: usize = 4096;
    let Some(end) = address.checked_add(bytes) else { return false };
    // The kernel does not read a set at address 0, and programs do not have the upper half.
    if address == 0 || end > isize::MAX as usize {
        return false;
    }
    let _errno = PreservedErrno::read();
    // The first byte of each page. The address of an array is aligned to 8 bytes.
    let later_pages = ((address / PAGE_BYTES + 1) * PAGE_BYTES..end).step_by(PAGE_BYTES);
    std::iter::once(address).chain(later_pages).all(reads)
}

/// Whether the kernel reads 8 bytes at an address.
fn reads(address: usize) -> bool {
    /// Not an operation of `rt_sigprocmask`. The kernel reads the set of signals before it refuses
    /// the operation (seen in Linux 6.18), and changes nothing.
    const NO_OPERATION: c_long = -1;
    /// Bytes of a set of signals in the kernel.
    const SET_BYTES: c_long = 8;
    let set = address as c_long;
    // SAFETY: the kernel copies the set from the program's memory, or returns `EFAULT`.
    let result =
        unsafe { next::syscall(libc::SYS_rt_sigprocmask, NO_OPERATION, set, 0, SET_BYTES, 0, 0) };
    // SAFETY: the C library returns a valid address for each thread.
    result == 0 || unsafe { *libc::__errno_location() } != libc::EFAULT
}

/// Reads a socket option into `value`, and returns the length of the option.
fn socket_option<T>(fd: c_int, level: c_int, name: c_int, value: &mut T) -> Option<usize> {
    let mut bytes = size_of::<T>() as socklen_t;
    let address: *mut c_void = std::ptr::from_mut(value).cast();
    // SAFETY: the kernel writes at most `bytes` to the address. Every `T` of the callers is an
    // integer or an array of bytes, so all bit patterns are valid.
    let result = unsafe { libc::getsockopt(fd, level, name, address, &raw mut bytes) };
    (result == 0).then_some(bytes as usize)
}

fn integer_option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let mut value = 0;
    socket_option(fd, level, name, &mut value)?;
    Some(value)
}

/// The status of a file.
pub fn status(fd: c_int) -> Option<libc::stat> {
    if is_quiet() {
        return None;
    }
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills the structure if the call succeeds.
    unsafe { (libc::fstat(fd, status.as_mut_ptr()) == 0).then(|| status.assume_init()) }
}

/// What a descriptor refers to; `None` if the process is quiet or the descriptor is closed.
pub fn kind_of(fd: c_int) -> Option<DescriptorKind> {
    let status = status(fd)?;
    Some(match status.st_mode & libc::S_IFMT {
        libc::S_IFREG => DescriptorKind::File,
        libc::S_IFIFO => DescriptorKind::Pipe,
        libc::S_IFSOCK => match integer_option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) {
            Some(libc::AF_UNIX) => DescriptorKind::UnixSocket,
            Some(libc::AF_INET | libc::AF_INET6) => {
                let protocol = integer_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL);
                let is_tcp = protocol == Some(libc::IPPROTO_TCP);
                if is_tcp { DescriptorKind::Tcp } else { DescriptorKind::Other }
            }
            _ => DescriptorKind::Other,
        },
        _ => DescriptorKind::Other,
    })
}

/// The bytes that a program gave to a TCP socket, by the kernel's count.
///
/// The kernel's count of unsent bytes of a closed connection can include the end of the stream, and
/// bytes that never were (after `shutdown` of a listening socket). So the count is a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GivenBytes {
    /// The lowest possible count.
    pub bytes_min: u64,
    /// The highest possible count.
    pub bytes_max: u64,
}

/// The bytes that a program gave to a TCP socket. `None` for a listening socket, and for a kernel
/// before 4.19.
pub fn bytes_given(fd: c_int) -> Option<GivenBytes> {
    /// Offsets in `struct tcp_info` (`<linux/tcp.h>`).
    const STATE: usize = 0;
    const NOT_SENT: usize = 144;
    const BYTES_SENT: usize = 200;
    const BYTES_RETRANSMITTED: usize = 208;
    if is_quiet() {
        return None;
    }
    let mut info = [0u8; TCP_INFO_BYTES];
    let bytes = socket_option(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info)?;
    if bytes < TCP_INFO_BYTES || info[STATE] == state::LISTEN {
        return None;
    }
    let word = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().unwrap_or_default());
    let half = |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().unwrap_or_default());
    let sent = word(BYTES_SENT).saturating_sub(word(BYTES_RETRANSMITTED));
    let not_sent = u64::from(half(NOT_SENT));
    let not_sent_range = match info[STATE] {
        state::SYN_SENT | state::SYN_RECEIVED | state::ESTABLISHED | state::CLOSE_WAIT => {
            (not_sent, not_sent)
        }
        state::CLOSED => (0, not_sent),
        // The end of the stream is queued after the bytes, and has a sequence number.
        _ => (not_sent.saturating_sub(1), not_sent.saturating_sub(1)),
    };
    Some(GivenBytes { bytes_min: sent + not_sent_range.0, bytes_max: sent + not_sent_range.1 })
}

/// The number that the kernel gives a socket for its life (`SO_COOKIE`, Linux 4.12).
pub fn cookie(fd: c_int) -> Option<u64> {
    let mut cookie = 0u64;
    socket_option(fd, libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    Some(cookie)
}

/// The congestion control of a TCP socket, as a position in [`CONGESTION_CONTROLS`].
pub fn congestion_control(fd: c_int) -> Option<usize> {
    let mut name = [0u8; 16];
    socket_option(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &mut name)?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    let known = CONGESTION_CONTROLS.iter().position(|known| known.as_bytes() == &name[..end]);
    Some(known.unwrap_or(CONGESTION_CONTROLS.len() - 1))
}

/// Whether the program allowed `MSG_ZEROCOPY` on a socket. The kernel ignores the flag otherwise.
pub fn allows_zerocopy(fd: c_int) -> bool {
    !is_quiet() && integer_option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY) == Some(1)
}

/// The number of the network namespace of a socket (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn network(fd: c_int) -> Option<u64> {
    /// Of `<asm-generic/socket.h>`.
    const SO_NETNS_COOKIE: c_int = 71;
    let mut cookie = 0u64;
    socket_option(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut cookie)?;
    Some(cookie)
}

/// Whether a socket is a TCP socket.
pub fn is_tcp(fd: c_int) -> bool {
    integer_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

/// Whether calls on a descriptor return instead of waiting.
pub fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: the call takes numbers only.
    unsafe { next::fcntl(fd, libc::F_GETFL, 0) & libc::O_NONBLOCK != 0 }
}

/// The address of the peer of a connection: `struct sockaddr_in` or `struct sockaddr_in6`.
pub struct Peer([u8; 28]);

/// The peer of a connection; `None` if the socket is not connected.
pub fn peer(fd: c_int) -> Option<Peer> {
    address(fd, libc::getpeername).map(Peer)
}

/// The port of a socket.
pub fn local_port(fd: c_int) -> Option<u16> {
    address(fd, libc::getsockname).map(|address| port(&address))
}

/// The port of an address, which follows the family.
fn port(address: &[u8; 28]) -> u16 {
    u16::from_be_bytes([address[2], address[3]])
}

impl Peer {
    /// The port.
    pub fn port(&self) -> u16 {
        port(&self.0)
    }

    /// Whether the peer of a socket is in the same network namespace: the address of the peer is a
    /// loopback address, or also the address of the socket.
    pub fn is_local(&self, fd: c_int) -> bool {
        let peer = &self.0;
        let is_loopback = if peer[..2] == (libc::AF_INET as u16).to_ne_bytes() {
            peer[4] == 127
        } else {
            let ip = &peer[8..24];
            ip == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
                || (ip[..10] == [0; 10] && ip[10..12] == [0xFF; 2] && ip[12] == 127)
        };
        let is_same = |local: [u8; 28]| local[..2] == peer[..2] && local[4..] == peer[4..];
        is_loopback || address(fd, libc::getsockname).is_none_or(is_same)
    }
}

/// One of the addresses of a socket, as the kernel fills it in.
fn address(
    fd: c_int,
    read: unsafe extern "C" fn(c_int, *mut libc::sockaddr, *mut socklen_t) -> c_int,
) -> Option<[u8; 28]> {
    let mut address = [0u8; 28];
    let mut bytes = address.len() as socklen_t;
    // SAFETY: the kernel writes at most `bytes` to the address.
    let result = unsafe { read(fd, address.as_mut_ptr().cast(), &raw mut bytes) };
    (result == 0).then_some(address)
}

/// The inode of this process's PID namespace: the broker must be in the same, because it checks
/// whether processes still run.
pub fn pid_namespace() -> Option<u64> {
    if is_quiet() {
        return None;
    }
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the path is a C string, and the kernel fills the structure if the call succeeds.
    unsafe {
        let found = libc::stat(c"/proc/self/ns/pid".as_ptr(), status.as_mut_ptr()) == 0;
        found.then(|| status.assume_init().st_ino)
    }
}
