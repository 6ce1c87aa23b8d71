//! The delivery of what a failed side has sent to the other side.

use crate::log::{End, TcpStatistics};
use haul::ForwardReport;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};
use std::os::fd::OwnedFd;

/// What the failed side has sent and the other side has not accepted.
#[derive(Debug)]
pub struct Delivery {
    pub socket: OwnedFd,
    pub unsent: Vec<u8>,
    /// Whether the stream had ended before the failure, so that nothing is missing.
    pub has_ended: bool,
    /// The second of the clock in which it is given up.
    pub until: u32,
    /// The bytes that had not arrived when this was asked last.
    left_bytes: u64,
    pub record: FailedConnection,
}

/// What the log says of a connection after one side has failed.
#[derive(Debug)]
pub struct FailedConnection {
    pub end: End,
    /// Delivered bytes count as copied.
    pub report: ForwardReport,
    pub tcp: [Option<TcpStatistics>; 2],
}

/// How far a delivery is.
pub enum Delivered {
    /// The whole stream is in the socket, with its end.
    Complete,
    /// Bytes are still to be sent, or to be acknowledged.
    Waiting,
    /// All bytes have arrived, and the stream is not complete; or the socket has failed, too.
    Incomplete,
}

impl Delivery {
    /// A delivery of bytes to the socket of the side that has not failed.
    pub fn new(
        socket: OwnedFd,
        unsent: Vec<u8>,
        has_ended: bool,
        record: FailedConnection,
    ) -> Self {
        Self { socket, unsent, has_ended, until: 0, left_bytes: u64::MAX, record }
    }

    /// Goes as far as it can without blocking.
    pub fn advance(&mut self) -> Delivered {
        let to_client = self.record.end == End::UpstreamFailed;
        let report = &mut self.record.report;
        let direction = if to_client { &mut report.b_to_a } else { &mut report.a_to_b };
        while !self.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &self.unsent, flags) {
                Ok(count) => {
                    direction.copied.bytes += count as u64;
                    self.unsent.drain(..count);
                }
                Err(Errno::AGAIN) => return Delivered::Waiting,
                Err(Errno::INTR) => {}
                Err(_) => return Delivered::Incomplete,
            }
        }
        if self.has_ended {
            // Its end may have been forwarded before.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
            return Delivered::Complete;
        }
        // A reset discards what is still in the socket.
        match haul_sys::sockopt::bytes_to_send(&self.socket) {
            Ok(1..) if !has_failed(&self.socket) => Delivered::Waiting,
            _ => Delivered::Incomplete,
        }
    }

    /// Whether bytes have arrived since this was asked last.
    pub fn has_progressed(&mut self) -> bool {
        let in_socket = haul_sys::sockopt::bytes_to_send(&self.socket).unwrap_or(0);
        let left_bytes = self.unsent.len() as u64 + in_socket;
        let before = std::mem::replace(&mut self.left_bytes, left_bytes);
        left_bytes < before
    }
}

/// Receives what has arrived at the socket of a side that has failed. It is lost with the socket.
pub fn receive_rest(socket: &OwnedFd, received: &mut Vec<u8>) {
    let arrived_bytes = rustix::io::ioctl_fionread(socket).unwrap_or(0);
    let mut filled = received.len();
    received.resize(filled + arrived_bytes as usize, 0);
    while filled < received.len() {
        match rustix::net::recv(socket, &mut received[filled..], RecvFlags::DONTWAIT) {
            Ok((count @ 1.., _)) => filled += count,
            // The kernel may report the failure once more.
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    received.truncate(filled);
}

/// Whether the connection of a socket has failed.
pub fn has_failed(socket: &OwnedFd) -> bool {
    !matches!(sockopt::socket_error(socket), Ok(Ok(())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    /// More than the buffers of two sockets hold.
    const LEN: usize = 64 << 20;

    fn record(end: End) -> FailedConnection {
        FailedConnection { end, report: ForwardReport::default(), tcp: [None; 2] }
    }

    #[test]
    fn bytes_that_arrive_are_progress_and_count() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket: OwnedFd = listener.accept().unwrap().0.into();
        let mut delivery = Delivery::new(socket, vec![7; LEN], true, record(End::UpstreamFailed));
        while delivery.has_progressed() {
            assert!(matches!(delivery.advance(), Delivered::Waiting));
        }
        // Even a reader that leaves the socket unwritable for its events makes progress.
        let mut received = 0;
        while received < LEN {
            let mut buffer = vec![0; LEN];
            received += peer.read(&mut buffer).unwrap();
            let is_complete = matches!(delivery.advance(), Delivered::Complete);
            assert!(delivery.has_progressed() || is_complete);
        }
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the stream has ended");
        let report = &delivery.record.report;
        let bytes = [report.a_to_b.copied.bytes, report.b_to_a.copied.bytes];
        assert_eq!(bytes, [0, LEN as u64]);
    }
}
