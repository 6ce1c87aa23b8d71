//! [`Stream`]: a socket outside of tokio's reactor.

use crate::connection::Connection;
use crate::reactor::Reactor;
use crate::receiver::RecvHalf;
use crate::sender::SendHalf;
use haul::{ReceiveSettings, SendSettings};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connected stream socket (TCP or Unix) for files, loans and forwarding.
#[derive(Debug)]
pub struct Stream {
    pub(crate) sender: SendHalf,
    pub(crate) receiver: RecvHalf,
}

impl Stream {
    /// Takes a socket out of tokio's reactor.
    pub fn from_tokio(socket: tokio::net::TcpStream) -> io::Result<Self> {
        Self::from_std(socket.into_std()?)
    }

    /// Takes a Unix socket out of tokio's reactor.
    pub fn from_tokio_unix(socket: tokio::net::UnixStream) -> io::Result<Self> {
        Self::from_std(socket.into_std()?)
    }

    /// Takes a socket of the standard library, or any descriptor of a connected stream socket. The
    /// socket is non-blocking from now on.
    pub fn from_std(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        Self::with_settings(socket, SendSettings::default(), ReceiveSettings::default())
    }

    /// Like [`Stream::from_std`], with settings. Shared settings cost nothing for each connection.
    pub fn with_settings(
        socket: impl Into<OwnedFd>,
        send: impl Into<Arc<SendSettings>>,
        receive: ReceiveSettings,
    ) -> io::Result<Self> {
        let socket = Arc::new(socket.into());
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        rustix::fs::fcntl_setfl(&socket, flags | rustix::fs::OFlags::NONBLOCK)?;
        let reactor = Reactor::new(&socket)?;
        let sender = haul::Sender::with_settings(Arc::clone(&socket), send)?;
        let receiver = haul::Receiver::with_settings(Arc::clone(&socket), receive)?;
        let connection = Connection::new(socket, sender, reactor);
        Ok(Self {
            sender: SendHalf::new(Arc::clone(&connection)),
            receiver: RecvHalf::new(receiver, connection),
        })
    }

    /// The two halves, which two tasks can use at the same time.
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.sender, self.receiver)
    }

    /// The half that sends.
    pub fn sender(&mut self) -> &mut SendHalf {
        &mut self.sender
    }

    /// The half that receives.
    pub fn receiver(&mut self) -> &mut RecvHalf {
        &mut self.receiver
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.receiver).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.sender).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.sender).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.sender.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.sender).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.sender).poll_shutdown(context)
    }
}
