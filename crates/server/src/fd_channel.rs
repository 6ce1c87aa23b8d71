//! Messages with file descriptors between two processes of one host (`SCM_RIGHTS`, unix(7)).

use haul_sys::sockopt::peer_process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
};
use std::io;
use std::mem::MaybeUninit;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The longest message, in bytes. The kernel's default send buffer has room for three.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The longest text in place of a channel, in bytes.
const REFUSAL_BYTES_MAX: usize = 1024;
/// The most descriptors of a message.
pub const DESCRIPTORS_MAX: usize = 3;

/// One end of a connection that keeps messages apart (`SOCK_SEQPACKET`).
#[derive(Debug)]
pub struct FdChannel {
    socket: OwnedFd,
    /// Space for the next message.
    space: Mutex<Vec<u8>>,
}

impl AsFd for FdChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A received message.
#[derive(Debug)]
pub struct FdMessage {
    /// The bytes of the message.
    pub bytes: Vec<u8>,
    /// The descriptors that came with the message.
    pub descriptors: Vec<OwnedFd>,
}

impl FdChannel {
    /// Creates a connection and its two ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC;
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self::new(one), Self::new(other)))
    }

    /// Wraps a connected socket of the type `SOCK_SEQPACKET`.
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self::new(socket)
    }

    fn new(socket: OwnedFd) -> Self {
        Self { socket, space: Mutex::default() }
    }

    /// Sends an end to the process at the other side of a stream.
    pub fn send_through(self, stream: &UnixStream) -> io::Result<()> {
        send(stream.as_fd(), b"\n", &[self.socket.as_fd()], SendFlags::empty())
    }

    /// Receives an end that was sent through a stream. If text came instead, the text is the error.
    pub fn receive_through(stream: &UnixStream) -> io::Result<Self> {
        let mut space = [0; REFUSAL_BYTES_MAX];
        let message = receive(stream.as_fd(), &mut space, RecvFlags::empty())?;
        let FdMessage { bytes, descriptors } = message.ok_or(io::ErrorKind::UnexpectedEof)?;
        match descriptors.into_iter().next() {
            Some(socket) => Ok(Self::new(socket)),
            None => Err(io::Error::other(String::from_utf8_lossy(&bytes).trim().to_owned())),
        }
    }

    /// The process that created the channel; `None` if it is not visible in this PID namespace.
    pub fn creator(&self) -> io::Result<Option<NonZeroU32>> {
        peer_process(&self.socket)
    }

    /// Sets the time after which a call fails with [`io::ErrorKind::WouldBlock`]; `None` for none.
    pub fn set_timeouts(
        &self,
        send: Option<Duration>,
        receive: Option<Duration>,
    ) -> io::Result<()> {
        set_socket_timeout(&self.socket, Timeout::Send, send)?;
        set_socket_timeout(&self.socket, Timeout::Recv, receive)?;
        Ok(())
    }

    /// Lets the peer's sends fail, which shows the peer that this process still runs. Messages that
    /// arrived are dropped, with their descriptors.
    pub fn refuse(&self) -> io::Result<()> {
        rustix::net::shutdown(&self.socket, Shutdown::Read)?;
        loop {
            match self.receive() {
                Ok(None) => return Ok(()),
                Err(error) if error.raw_os_error().is_some() => return Err(error),
                // The descriptors of a cut message are also closed.
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }

    /// Lets the peer receive the end, so that it does not wait for another message.
    pub fn end_messages(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.socket, Shutdown::Write)?)
    }

    /// Waits until the peer's end is closed, at most for a time; false if it is still open.
    pub fn wait_for_end(&self, time_max: Option<Duration>) -> io::Result<bool> {
        let time_max = time_max.map(Timespec::try_from).transpose();
        let time_max = time_max.map_err(|_| io::ErrorKind::InvalidInput)?;
        loop {
            // `poll` reports the end without a flag.
            let mut waited = [PollFd::new(&self.socket, PollFlags::empty())];
            match poll(&mut waited, time_max.as_ref()) {
                Ok(_) => return Ok(waited[0].revents().contains(PollFlags::HUP)),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends a message of 1 to [`MESSAGE_BYTES_MAX`] bytes with at most [`DESCRIPTORS_MAX`]
    /// descriptors.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(self.socket.as_fd(), bytes, descriptors, SendFlags::empty())
    }

    /// Sends a message without descriptors, or fails with [`io::ErrorKind::WouldBlock`] at once.
    pub fn try_send(&self, bytes: &[u8]) -> io::Result<()> {
        send(self.socket.as_fd(), bytes, &[], SendFlags::DONTWAIT)
    }

    /// Receives the next message; `None` at the end.
    pub fn receive(&self) -> io::Result<Option<FdMessage>> {
        self.receive_with(RecvFlags::empty())
    }

    /// Receives the next message if it arrived, and fails with [`io::ErrorKind::WouldBlock`]
    /// otherwise; `None` at the end.
    pub fn try_receive(&self) -> io::Result<Option<FdMessage>> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with(&self, flags: RecvFlags) -> io::Result<Option<FdMessage>> {
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        space.resize(MESSAGE_BYTES_MAX, 0);
        receive(self.socket.as_fd(), &mut space, flags)
    }

    /// Waits until a message arrived, the channel ended, or another descriptor is readable, at most
    /// for a time.
    pub fn wait_for_message_or(&self, other: &impl AsFd, time_max: Duration) -> io::Result<()> {
        let time_max = Timespec::try_from(time_max).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut waited =
            [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(other, PollFlags::IN)];
        match poll(&mut waited, Some(&time_max)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let is_valid =
        (1..=MESSAGE_BYTES_MAX).contains(&bytes.len()) && descriptors.len() <= DESCRIPTORS_MAX;
    if !is_valid {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    loop {
        let parts = [IoSlice::new(bytes)];
        match rustix::net::sendmsg(socket, &parts, &mut control, flags | SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives a message that is no longer than this space.
fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> io::Result<Option<FdMessage>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(bytes)];
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Ok(received) => break received,
            // The peer closed its end before it received everything, which the kernel reports once.
            // The messages that the peer sent before are still there.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(errno) => return Err(errno.into()),
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        // The process lacks descriptors, or the peer has another version.
        return Err(io::Error::other("a message with descriptors was cut"));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(Some(FdMessage { bytes: bytes[..received.bytes].to_vec(), descriptors }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn messages_keep_their_borders_and_descriptors() {
        let (stream, peer) = UnixStream::pair().unwrap();
        let (here, there) = FdChannel::pair().unwrap();
        there.send_through(&stream).unwrap();
        let there = FdChannel::receive_through(&peer).unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        here.send(b"one", &[writer.as_fd()]).unwrap();
        here.send(&vec![7; MESSAGE_BYTES_MAX], &[]).unwrap();
        assert!(
            here.send(&[], &[]).is_err()
                && here.send(&vec![0; MESSAGE_BYTES_MAX + 1], &[]).is_err()
        );
        drop((here, writer));
        let mut first = there.receive().unwrap().unwrap();
        assert_eq!(first.bytes, b"one");
        File::from(first.descriptors.remove(0)).write_all(b"x").unwrap();
        assert_eq!(reader.read(&mut [0; 2]).unwrap(), 1);
        let second = there.receive().unwrap().unwrap();
        assert!(second.bytes == vec![7; MESSAGE_BYTES_MAX] && second.descriptors.is_empty());
        assert!(there.receive().unwrap().is_none());
    }

    /// The kernel reports a reset to `there` instead of the first message.
    #[test]
    fn messages_of_a_peer_that_has_not_received_all_arrive() {
        let (here, there) = FdChannel::pair().unwrap();
        assert_eq!(there.try_receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        there.try_send(b"not received").unwrap();
        here.send(b"last", &[]).unwrap();
        drop(here);
        assert_eq!(there.receive().unwrap().unwrap().bytes, b"last");
        assert!(there.receive().unwrap().is_none());
    }

    #[test]
    fn a_peer_that_refuses_is_still_there() {
        let (here, there) = FdChannel::pair().unwrap();
        there.refuse().unwrap();
        assert_eq!(here.send(b"one", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert!(!here.wait_for_end(Some(Duration::ZERO)).unwrap());
        drop(there);
        assert!(here.wait_for_end(None).unwrap());
    }

    #[test]
    fn a_stream_without_a_channel_is_an_error() {
        let (stream, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(b"{}").unwrap();
        drop(peer);
        assert!(FdChannel::receive_through(&stream).is_err());
    }
}
