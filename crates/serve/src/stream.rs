//! One connection's bytes: plain, over TCP or a Unix socket.
//!
//! Nothing here waits. What the kernel does not take now is [`Sent::Blocked`], and the event loop hears when it will.

use crate::listen::Accepted;
use haul::Sender;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A connected socket and what lies between it and the bytes of HTTP.
#[derive(Debug)]
pub struct Stream {
    sender: Sender<OwnedFd>,
}

/// What came of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// So many bytes went.
    Bytes(u64),
    /// None now.
    Blocked,
    /// The file ends before the range does.
    Ended,
    /// The connection is no more.
    Broken,
}

impl Stream {
    /// A stream over an accepted socket.
    pub fn new(accepted: Accepted, settings: &haul::Settings) -> Result<Self, haul::Error> {
        Ok(Self { sender: Sender::with(accepted.socket, settings.clone())? })
    }

    /// Reads what has come into the free room of `buffer`; 0 is the end.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        loop {
            match rustix::net::recv(&self.sender, spare_capacity(buffer), RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                // An empty message is none on a stream: both counts are the same.
                received => return Ok(received.map(|(count, _)| count)?),
            }
        }
    }

    /// Sends a beginning of these parts; with `more` to follow at once.
    pub fn send(&mut self, parts: &[IoSlice<'_>], more: bool) -> Sent {
        let sent = if more { self.sender.send_more(parts) } else { self.sender.send_vectored(parts) };
        Sent::of(sent.map(|count| count as u64))
    }

    /// Sends a beginning of a range of a file, by the cheapest path that this socket allows.
    pub fn send_file(&mut self, file: &File, range: Range<u64>) -> Sent {
        Sent::of(self.sender.send_file(file, range))
    }

    /// Says that nothing more comes; the peer may go on sending.
    pub fn shutdown(&self) {
        // A peer that has gone already has nothing to hear.
        let _ = rustix::net::shutdown(&self.sender, rustix::net::Shutdown::Write);
    }

    /// Has the connection end with a reset, which throws away what is queued: the peer shall not take what it has got
    /// for the whole.
    pub fn reset_on_close(&self) {
        let _ = rustix::net::sockopt::set_socket_linger(&self.sender, Some(std::time::Duration::ZERO));
    }

    /// What the library has done on this socket.
    pub fn report(&self) -> haul::Report {
        self.sender.report()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }
}

impl Sent {
    fn of(sent: Result<u64, haul::Error>) -> Self {
        match sent {
            Ok(count) => Self::Bytes(count),
            Err(haul::Error::WouldBlock) => Self::Blocked,
            Err(haul::Error::Ended { .. }) => Self::Ended,
            Err(_) => Self::Broken,
        }
    }
}
