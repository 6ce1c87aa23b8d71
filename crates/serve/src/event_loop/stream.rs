//! One connection's bytes: plain or encrypted, over TCP or a Unix socket.
//!
//! Nothing here waits. What the kernel does not take now is [`Sent::Blocked`], and the event loop hears when it will.

use crate::counters::Way;
use crate::event_loop::sent::Sent;
use crate::event_loop::tls::TlsStream;
use haul::Sender;
use rustix::buffer::spare_capacity;
use rustix::net::RecvFlags;
use rustls::ServerConfig;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// A connected socket and what lies between it and the bytes of HTTP.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most connections are plain, and each lies in a box already")]
pub enum Stream {
    /// Bytes as they are.
    Plain {
        /// What they go through.
        sender: Sender<OwnedFd>,
        /// Whether the kernel holds partial packets back.
        is_corked: bool,
    },
    /// Encrypted in the program.
    Tls(Box<TlsStream>),
}

impl Stream {
    /// A stream over an accepted socket; encrypted where there is a certificate.
    pub fn new(
        socket: OwnedFd,
        tls: Option<&Arc<ServerConfig>>,
        settings: &haul::Settings,
    ) -> io::Result<Self> {
        Ok(match tls {
            None => Self::Plain { sender: Sender::with(socket, settings.clone())?, is_corked: false },
            Some(tls) => {
                Self::Tls(Box::new(TlsStream::new(socket, Arc::clone(tls)).map_err(io::Error::other)?))
            }
        })
    }

    /// Reads what has come into the free room of `buffer`; 0 is the end.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Plain { sender, .. } => {
                let received = rustix::io::retry_on_intr(|| {
                    rustix::net::recv(&*sender, spare_capacity(buffer), RecvFlags::DONTWAIT)
                });
                Ok(received?.0)
            }
            Self::Tls(tls) => tls.receive(buffer),
        }
    }

    /// Whether more may have come, after so much was received into so much room.
    pub fn may_have_more(&self, received: usize, room: usize) -> bool {
        match self {
            // What fills less than the room was all there was.
            Self::Plain { .. } => received == room,
            // A record is handed out piece by piece.
            Self::Tls(_) => true,
        }
    }

    /// Sends a beginning of these parts; with `more` to follow at once.
    pub fn send(&mut self, parts: &[IoSlice<'_>], more: bool) -> Sent {
        match self {
            Self::Plain { sender, .. } if more => {
                Sent::from(sender.send_more(parts).map(|count| count as u64))
            }
            Self::Plain { sender, .. } => Sent::from(sender.send_vectored(parts).map(|count| count as u64)),
            Self::Tls(tls) => tls.send(parts, more),
        }
    }

    /// Sends a beginning of a range of a file, by the cheapest path that this socket allows; through `copy` where that
    /// cannot be avoided.
    pub fn send_file(&mut self, file: &File, range: Range<u64>, copy: &mut [u8]) -> Sent {
        match self {
            Self::Plain { sender, .. } => Sent::from(sender.send_file(file, range)),
            Self::Tls(tls) => tls.send_file(file, range, copy),
        }
    }

    /// Has the kernel hold partial packets back (`TCP_CORK`), or send them. Each call that fills the socket ends somewhere in a packet,
    /// which would go as it is, and cost as much as a whole one.
    pub fn cork(&mut self, on: bool) {
        if let Self::Plain { sender, is_corked } = self
            && *is_corked != on
        {
            // A Unix socket has no packets to fill.
            let _ = rustix::net::sockopt::set_tcp_cork(&*sender, on);
            *is_corked = on;
        }
    }

    /// Sends what was taken and has not reached the kernel. [`Sent::Bytes`] where nothing is left.
    pub fn flush(&mut self) -> Sent {
        match self {
            Self::Plain { .. } => Sent::Bytes(0),
            Self::Tls(tls) => tls.flush(),
        }
    }

    /// The way that files last took.
    pub fn latest_way(&self) -> Way {
        match self {
            Self::Plain { sender, .. } => sender.latest_path().map_or(Way::Memory, Way::Path),
            Self::Tls(_) => Way::Tls,
        }
    }

    /// Whether both sides still agree on keys.
    pub fn is_beginning(&self) -> bool {
        matches!(self, Self::Tls(tls) if tls.is_beginning())
    }

    /// Whether it is encrypted in the program.
    pub fn is_tls(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// How often a path that files were to take was stepped down from.
    pub fn demotions(&self) -> u64 {
        match self {
            Self::Plain { sender, .. } if sender.latest_path().is_some() => {
                sender.report().demotions.len() as u64
            }
            _ => 0,
        }
    }

    /// Says that nothing more comes, where there are words for it.
    pub fn end(&mut self) {
        if let Self::Tls(tls) = self {
            tls.end();
        }
    }

    /// Sends the end of the stream; the peer may go on sending.
    pub fn shutdown(&self) {
        // A peer that has gone already has nothing to hear.
        let _ = rustix::net::shutdown(self, rustix::net::Shutdown::Write);
    }

    /// Has the connection end with a reset, which throws away what is queued: the peer shall not take what it has got
    /// for the whole.
    pub fn reset_on_close(&self) {
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain { sender, .. } => sender.as_fd(),
            Self::Tls(tls) => tls.as_fd(),
        }
    }
}
