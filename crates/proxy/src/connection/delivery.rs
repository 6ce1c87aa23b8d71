//! The delivery of what a failed side has sent to the other side.

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, sockopt};
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
    /// Goes as far as it can without blocking.
    pub fn advance(&mut self) -> Delivered {
        while !self.unsent.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &self.unsent, flags) {
                Ok(count) => drop(self.unsent.drain(..count)),
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
}

/// Whether the connection of a socket has failed.
pub fn has_failed(socket: &OwnedFd) -> bool {
    !matches!(sockopt::socket_error(socket), Ok(Ok(())))
}
