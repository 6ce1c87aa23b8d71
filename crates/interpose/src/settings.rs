//! Settings that `haul run` asks for: the congestion control of TCP connections.

use crate::descriptors;
use crate::errno::PreservedErrno;
use crate::kernel;
use crate::tally;
use haul_tally::{DescriptorKind, header};
use libc::c_int;

/// Sets the congestion control of a TCP socket that is about to connect or to listen. A socket that
/// changes its congestion control later may stay paced.
///
/// If the kernel refuses, the socket keeps the program's congestion control, which the report
/// shows.
pub fn apply_congestion_control(fd: c_int) {
    let words = [header::CONGESTION, header::CONGESTION + 1].map(tally::header);
    if words[0] == 0 || kernel::is_quiet() {
        return;
    }
    let _errno = PreservedErrno::read();
    if descriptors::kind(fd, 0) != DescriptorKind::Tcp {
        return;
    }
    let mut name = [0u8; 16];
    for (half, word) in name.chunks_exact_mut(8).zip(words) {
        half.copy_from_slice(&word.to_le_bytes());
    }
    let bytes = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    // SAFETY: the kernel reads the name.
    unsafe {
        libc::setsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            name.as_ptr().cast(),
            bytes as libc::socklen_t,
        )
    };
}
