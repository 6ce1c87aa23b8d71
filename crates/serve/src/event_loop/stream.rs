//! One connection's bytes: plain or encrypted, over TCP or a Unix socket.
//!
//! Nothing here waits. What the kernel does not take now is [`Sent::Blocked`], and the event loop hears when it will.

use crate::counters::Way;
use crate::event_loop::kernel_tls::{self, RECORD_BYTES_MAX, RECORDS_MAX, Supported};
use crate::event_loop::sent::Sent;
use crate::event_loop::tls::{Received, Session};
use haul::Sender;
use haul_sys::sockopt::max_segment;
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
pub struct Stream {
    sender: Sender<OwnedFd>,
    encryption: Encryption,
    /// Whether the kernel holds partial packets back.
    is_corked: bool,
    /// Whether the kernel may hold something back until [`Stream::release`].
    is_held: bool,
    /// What a packet on its way to the peer may hold; 0 where there are none. Asked for once: if it shrinks, more goes at once.
    segment_bytes: Option<u16>,
}

/// Who encrypts.
#[derive(Debug)]
enum Encryption {
    /// Nobody.
    None,
    /// This program; the first part of every encrypted connection.
    Program(Box<Session>),
    /// The kernel, since both sides have agreed on keys. So many records have gone, about.
    Kernel { records: u64 },
}

impl Stream {
    /// A stream over an accepted socket; encrypted where there is a certificate, by the kernel if it can.
    pub fn new(
        socket: OwnedFd,
        tls: Option<&Arc<ServerConfig>>,
        kernel: Supported,
        settings: &Arc<haul::SendSettings>,
    ) -> io::Result<Self> {
        let encryption = match tls {
            None => Encryption::None,
            Some(tls) => {
                let session = Session::new(Arc::clone(tls), kernel).map_err(io::Error::other)?;
                Encryption::Program(Box::new(session))
            }
        };
        let sender = Sender::with(socket, Arc::clone(settings))?;
        Ok(Self { sender, encryption, is_corked: false, is_held: false, segment_bytes: None })
    }

    /// Reads what has come into the free room of `buffer`; 0 is the end.
    ///
    /// [`io::ErrorKind::InvalidData`] where TLS was expected and something else has come: from then on nothing is encrypted, so that
    /// the client understands why it is refused, which it must be.
    pub fn receive(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        if let Encryption::Program(session) = &mut self.encryption {
            match session.receive(self.sender.as_fd(), buffer)? {
                Received::Bytes(count) => return Ok(count),
                Received::Agreed => self.hand_over()?,
                Received::NotTls => {
                    self.encryption = Encryption::None;
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
        }
        match &self.encryption {
            Encryption::Program(_) => self.receive(buffer),
            Encryption::Kernel { .. } => kernel_tls::receive(&self.sender, buffer),
            Encryption::None => {
                let received = rustix::io::retry_on_intr(|| {
                    rustix::net::recv(&self.sender, spare_capacity(buffer), RecvFlags::DONTWAIT)
                });
                Ok(received?.0)
            }
        }
    }

    /// Both sides have agreed on keys, and nothing has been said since: from now on the kernel encrypts, if it takes this socket.
    fn hand_over(&mut self) -> io::Result<()> {
        if kernel_tls::prepare(&self.sender).is_err() {
            return Ok(());
        }
        let kernel = Encryption::Kernel { records: 0 };
        match std::mem::replace(&mut self.encryption, kernel) {
            Encryption::Program(session) => {
                kernel_tls::take_over(&self.sender, session.into_inner())
            }
            _ => Ok(()),
        }
    }

    /// Whether more may have come, after so much was received into so much room.
    pub fn may_have_more(&self, received: usize, room: usize) -> bool {
        // What fills less than the room was all there was; but records are handed out piece by piece.
        received == room || self.is_tls()
    }

    /// Sends a beginning of these parts; with `more` to follow at once.
    pub fn send(&mut self, parts: &[IoSlice<'_>], more: bool) -> Sent {
        if let Encryption::Program(session) = &mut self.encryption {
            return session.send(self.sender.as_fd(), parts, more);
        }
        let sent =
            if more { self.sender.send_more(parts) } else { self.sender.send_vectored(parts) };
        self.note_records(Sent::from(sent.map(|count| count as u64)))
    }

    /// Sends a beginning of these parts, behind which nothing comes. What is shorter than a packet is only made ready (`MSG_MORE`), and
    /// leaves with [`Stream::release`], which must follow at once.
    pub fn hold(&mut self, parts: &[IoSlice<'_>]) -> Sent {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let holds = matches!(self.encryption, Encryption::None) && bytes < self.segment_bytes();
        self.is_held |= holds;
        self.send(parts, holds)
    }

    fn segment_bytes(&mut self) -> usize {
        let ask =
            || max_segment(&self.sender).ok().and_then(|bytes| bytes.try_into().ok()).unwrap_or(0);
        usize::from(*self.segment_bytes.get_or_insert_with(ask))
    }

    /// Whether there is something to [`Stream::release`].
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Has the kernel send what it holds back.
    pub fn release(&mut self) {
        if std::mem::take(&mut self.is_held) {
            // It was set all along: setting it again is how to say this (tcp(7)). A connection that is gone has nothing to send.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&self.sender, true);
        }
    }

    /// Sends a beginning of a range of a file, by the cheapest path that this socket allows; through `copy` where that
    /// cannot be avoided.
    pub fn send_file(&mut self, file: &File, range: Range<u64>, copy: &mut [u8]) -> Sent {
        if let Encryption::Program(session) = &mut self.encryption {
            return session.send_file(self.sender.as_fd(), file, range, copy);
        }
        let sent = self.sender.send_file(file, range);
        self.note_records(Sent::from(sent))
    }

    /// Counts what the kernel has made of this, and stops where its key has been used too often.
    fn note_records(&mut self, sent: Sent) -> Sent {
        if let (Encryption::Kernel { records }, Sent::Bytes(count)) = (&mut self.encryption, sent) {
            *records += 1 + count / RECORD_BYTES_MAX;
            if *records > RECORDS_MAX {
                return Sent::Broken;
            }
        }
        sent
    }

    /// Whether the connection should end after this response, because its key has been used much.
    pub fn is_worn(&self) -> bool {
        matches!(self.encryption, Encryption::Kernel { records } if records > RECORDS_MAX / 2)
    }

    /// Has the kernel hold partial packets back (`TCP_CORK`), or send them. Each call that fills the socket ends somewhere in a packet,
    /// which would go as it is, and cost as much as a whole one.
    pub fn cork(&mut self, on: bool) {
        let is_ours = matches!(self.encryption, Encryption::Program(_));
        if self.is_corked != on && !is_ours {
            // A Unix socket has no packets to fill.
            let _ = rustix::net::sockopt::set_tcp_cork(&self.sender, on);
            self.is_corked = on;
        }
    }

    /// Sends what was taken and has not reached the kernel. [`Sent::Bytes`] where nothing is left.
    pub fn flush(&mut self) -> Sent {
        match &mut self.encryption {
            Encryption::Program(session) => session.flush(self.sender.as_fd()),
            Encryption::None | Encryption::Kernel { .. } => Sent::Bytes(0),
        }
    }

    /// The way of bytes that would go this way if they were not encrypted.
    pub fn way(&self, plain: Way) -> Way {
        match self.encryption {
            Encryption::None => plain,
            Encryption::Program(_) => Way::Tls,
            Encryption::Kernel { .. } => match plain {
                Way::SendMethod(path) => Way::KernelTlsMethod(path),
                _ => Way::KernelTls,
            },
        }
    }

    /// The way that files last took.
    pub fn latest_way(&self) -> Way {
        self.way(self.sender.latest_path().map_or(Way::Memory, Way::SendMethod))
    }

    /// Whether both sides still agree on keys.
    pub fn is_beginning(&self) -> bool {
        matches!(&self.encryption, Encryption::Program(session) if session.is_beginning())
    }

    /// Whether it is encrypted.
    pub fn is_tls(&self) -> bool {
        !matches!(self.encryption, Encryption::None)
    }

    /// How often a path that files were to take was stepped down from.
    pub fn fallbacks(&self) -> u64 {
        if self.sender.latest_path().is_none() {
            return 0;
        }
        self.sender.report().fallbacks.len() as u64
    }

    /// Says that nothing more comes, where there are words for it, so that the client can tell this end from one that somebody else
    /// has made. [`Sent::Bytes`] once that and all before it is on its way.
    pub fn end(&mut self) -> Sent {
        match &mut self.encryption {
            Encryption::None => Sent::Bytes(0),
            Encryption::Program(session) => session.end(self.sender.as_fd()),
            Encryption::Kernel { .. } => kernel_tls::end(&self.sender),
        }
    }

    /// Sends the end of the stream; the peer may go on sending.
    pub fn shutdown(&self) {
        // A peer that has gone already has nothing to hear.
        let _ = rustix::net::shutdown(self, rustix::net::Shutdown::Write);
    }

    /// Has the connection end with a reset, which throws away what is queued: the peer shall not take what it has got
    /// for the whole.
    pub fn reset_on_close(&mut self) {
        // A response before that is whole.
        self.release();
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn what_is_held_leaves_when_it_is_released_and_what_fills_a_packet_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nodelay(true).unwrap();
        let settings = Arc::default();
        let mut stream =
            Stream::new(accepted.into(), None, Supported::default(), &settings).unwrap();
        let mut buffer = [0; 8];
        loop {
            let begun = Instant::now();
            assert_eq!(
                stream.hold(&[IoSlice::new(b"four"), IoSlice::new(b"more")]),
                Sent::Bytes(8)
            );
            client.set_nonblocking(true).unwrap();
            let early = client.read(&mut buffer).map_err(|error| error.kind());
            // The kernel itself sends it after 200 ms: who looks late has seen nothing.
            let is_late = begun.elapsed() > Duration::from_millis(100);
            stream.release();
            client.set_nonblocking(false).unwrap();
            client.read_exact(&mut buffer[..8 - early.unwrap_or(0)]).unwrap();
            if !is_late {
                assert_eq!(early, Err(ErrorKind::WouldBlock));
                assert_eq!(&buffer, b"fourmore");
                break;
            }
        }
        let large = vec![0; max_segment(&client).unwrap() as usize];
        assert_eq!(stream.hold(&[IoSlice::new(&large)]), Sent::Bytes(large.len() as u64));
        assert!(!stream.is_held());
    }
}
