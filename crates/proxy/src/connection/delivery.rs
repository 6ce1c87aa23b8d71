//! Delivers the bytes of a failed side to the other side.

use crate::record::connection::TcpStatistics;
use crate::record::log::End;
use crate::socket::{pending_tail, reset_on_close};
use haul::ForwardReport;
use haul_server::event_loop::Tail;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::os::fd::OwnedFd;

/// The bytes that are received at a time.
const PIECE_BYTES: usize = 256 << 10;

/// The bytes that the failed side sent and the other side did not accept yet.
#[derive(Debug)]
pub struct Delivery {
    /// The socket of the side that has not failed.
    pub socket: OwnedFd,
    /// The socket of the failed side, until a receive returns nothing.
    source: Option<OwnedFd>,
    /// Whether a receive tells the end of the stream from the failure. It does if no other call
    /// returned the failure before.
    tells_end: bool,
    /// Received bytes, of which the first `sent_bytes` are sent.
    received: Vec<u8>,
    sent_bytes: usize,
    /// Whether the stream ended before the failure, so that nothing is missing.
    has_ended: bool,
    /// Whether the end of the stream is in the socket.
    is_end_sent: bool,
    /// The second of the clock in which the delivery is given up.
    pub until: u32,
    /// The bytes that were left at the last call of [`Delivery::has_progressed`].
    left_bytes: u64,
    pub record: FailedConnection,
}

/// The facts for the log of a connection of which a side failed.
#[derive(Debug, Clone)]
pub struct FailedConnection {
    pub end: End,
    /// Bytes that the socket accepted after the failure count as copied.
    pub report: ForwardReport,
    pub tcp: [Option<TcpStatistics>; 2],
}

/// The progress of a delivery.
pub enum Delivered {
    /// The whole stream arrived, with its end.
    Complete,
    /// Bytes are still to be sent, or the kernel still has bytes of an incomplete stream.
    Waiting,
    /// The whole stream is in the socket, with its end, and the peer has to acknowledge it.
    Sent,
    /// All bytes arrived, and the stream is not complete. Or the other socket failed.
    Incomplete,
}

impl Delivery {
    /// A delivery to `socket` of received bytes, and of the bytes that arrived at `source`.
    pub fn new(
        [source, socket]: [OwnedFd; 2],
        received: Vec<u8>,
        has_ended: bool,
        until: u32,
        record: FailedConnection,
    ) -> Self {
        let tells_end = pending_tail(&source) == Tail::Failed;
        // If the source did not fail after all, its stream still must not end in order.
        reset_on_close(&source);
        let (sent_bytes, left_bytes) = (0, u64::MAX);
        Self {
            socket,
            source: Some(source),
            tells_end,
            received,
            sent_bytes,
            has_ended,
            is_end_sent: false,
            until,
            left_bytes,
            record,
        }
    }

    /// Goes as far as it can without blocking.
    pub fn advance(&mut self) -> Delivered {
        let to_client = self.record.end == End::UpstreamFailed;
        while self.sent_bytes < self.received.len() || self.receive() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &self.received[self.sent_bytes..], flags) {
                Ok(count) => {
                    self.sent_bytes += count;
                    let report = &mut self.record.report;
                    let direction = if to_client { &mut report.b_to_a } else { &mut report.a_to_b };
                    direction.copied.bytes += count as u64;
                }
                Err(Errno::AGAIN) => return Delivered::Waiting,
                Err(Errno::INTR) => {}
                Err(_) => return Delivered::Incomplete,
            }
        }
        // Each shutdown is an event of the socket, which would call this function again at once.
        if self.has_ended && !std::mem::replace(&mut self.is_end_sent, true) {
            // Fails if the end was forwarded before.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
        // A reset discards what is still in the socket, and so does a close with bytes of the peer
        // that were not read.
        match haul_sys::sockopt::bytes_to_send(&self.socket) {
            _ if pending_tail(&self.socket) == Tail::Failed => Delivered::Incomplete,
            Ok(1..) if self.has_ended => Delivered::Sent,
            Ok(1..) => Delivered::Waiting,
            _ if self.has_ended => Delivered::Complete,
            _ => Delivered::Incomplete,
        }
    }

    /// Receives the next bytes of the failed side; false if nothing is left.
    fn receive(&mut self) -> bool {
        // The connection does not keep the memory of the last bytes.
        (self.received, self.sent_bytes) = (Vec::new(), 0);
        let arrived_bytes = usize::try_from(self.arrived_bytes()).unwrap_or(PIECE_BYTES);
        let Some(source) = &self.source else { return false };
        self.received.resize(arrived_bytes.clamp(1, PIECE_BYTES), 0);
        let received = retry_on_intr(|| {
            rustix::net::recv(source, &mut self.received[..], RecvFlags::DONTWAIT)
        });
        let received = received.map(|(count, _)| count);
        // TCP returns an end that has arrived (`SOCK_DONE`) before a failure.
        self.has_ended |= self.tells_end && received == Ok(0);
        let count = received.unwrap_or(0);
        self.received.truncate(count);
        self.source.take_if(|_| count == 0);
        count > 0
    }

    /// The number of bytes that the failed side's socket holds, up to an urgent byte.
    fn arrived_bytes(&self) -> u64 {
        let source = self.source.as_ref();
        source.and_then(|source| rustix::io::ioctl_fionread(source).ok()).unwrap_or(0)
    }

    /// Whether bytes arrived since the last call.
    pub fn has_progressed(&mut self) -> bool {
        let in_socket = haul_sys::sockopt::bytes_to_send(&self.socket).unwrap_or(0);
        let unsent = (self.received.len() - self.sent_bytes) as u64;
        let left_bytes = self.arrived_bytes() + unsent + in_socket;
        let before = std::mem::replace(&mut self.left_bytes, left_bytes);
        left_bytes < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// More than the buffers of two sockets hold.
    const LEN: usize = 64 << 20;

    fn record(end: End) -> FailedConnection {
        FailedConnection { end, report: ForwardReport::default(), tcp: [None; 2] }
    }

    /// A socket, and its peer.
    fn pair() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0.into(), peer)
    }

    #[test]
    fn bytes_that_arrive_are_progress_and_count() {
        let ((source, mut failed), (socket, mut peer)) = (pair(), pair());
        failed.write_all(&[7; 1000]).unwrap();
        while rustix::io::ioctl_fionread(&source).unwrap() < 1000 {}
        let record = record(End::UpstreamFailed);
        let mut delivery = Delivery::new([source, socket], vec![7; LEN], true, 0, record);
        while delivery.has_progressed() {
            assert!(matches!(delivery.advance(), Delivered::Waiting));
        }
        // Even a reader that leaves the socket unwritable for its events makes progress.
        let (mut received, mut buffer) = (0, vec![0; LEN]);
        while received < LEN + 1000 {
            received += peer.read(&mut buffer).unwrap();
            delivery.advance();
            assert!(delivery.has_progressed() || received == LEN + 1000);
        }
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the stream has ended");
        while !matches!(delivery.advance(), Delivered::Complete) {}
        let report = &delivery.record.report;
        let bytes = [report.a_to_b.copied.bytes, report.b_to_a.copied.bytes];
        assert_eq!(bytes, [0, LEN as u64 + 1000]);
    }
}
