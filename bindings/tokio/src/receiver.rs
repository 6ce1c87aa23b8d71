//! [`RecvHalf`]: bytes into memory and into files.

use crate::connection::Connection;
use crate::reactor::Direction;
use haul::{Error, ReceiveReport};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, ReadBuf};

/// The half of a [`crate::Stream`] that receives.
#[derive(Debug)]
pub struct RecvHalf {
    receiver: haul::Receiver<Arc<OwnedFd>>,
    connection: Arc<Connection>,
}

impl RecvHalf {
    pub(crate) fn new(receiver: haul::Receiver<Arc<OwnedFd>>, connection: Arc<Connection>) -> Self {
        Self { receiver, connection }
    }

    /// Receives some bytes; 0 at the end of the stream, and for an empty buffer.
    pub async fn receive_into(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let received = self.repeat(|receiver| receiver.receive_into(buffer)).await?;
        self.check_end(received == 0)?;
        Ok(received)
    }

    /// Receives a part of a range of a file; 0 at the end of the stream, and for an empty range.
    /// The bytes are written to the file by this thread.
    pub async fn receive_into_file(
        &mut self,
        file: &(impl AsFd + Sync),
        range: Range<u64>,
    ) -> io::Result<u64> {
        let file = file.as_fd();
        let received =
            self.repeat(|receiver| receiver.receive_into_file(file, range.clone())).await?;
        self.check_end(received == 0 && !range.is_empty())?;
        Ok(received)
    }

    /// Discards up to `bytes` bytes without copying them; 0 at the end of the stream, and for 0.
    pub async fn discard(&mut self, bytes: u64) -> io::Result<u64> {
        let discarded = self.repeat(|receiver| receiver.discard(bytes)).await?;
        self.check_end(discarded == 0 && bytes > 0)?;
        Ok(discarded)
    }

    /// What the receiver did so far.
    pub fn report(&self) -> &ReceiveReport {
        self.receiver.report()
    }

    /// Returns the error of the socket in place of the end of the stream, if the sending half took
    /// the error.
    fn check_end(&self, is_end: bool) -> io::Result<()> {
        if is_end { self.connection.failure_of_receiver() } else { Ok(()) }
    }

    /// Calls until the socket is ready.
    async fn repeat<T>(
        &mut self,
        mut call: impl FnMut(&mut haul::Receiver<Arc<OwnedFd>>) -> Result<T, Error>,
    ) -> io::Result<T> {
        tokio::task::consume_budget().await;
        loop {
            let tick = self.connection.reactor.tick(Direction::Read);
            match call(&mut self.receiver) {
                Err(Error::WouldBlock) => self.connection.event(Direction::Read, tick).await?,
                result => return Ok(result?),
            }
        }
    }
}

impl AsFd for RecvHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.socket.as_fd()
    }
}

impl AsyncRead for RecvHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let coop = ready!(tokio::task::coop::poll_proceed(context));
        let this = self.get_mut();
        loop {
            let tick = this.connection.reactor.tick(Direction::Read);
            match this.receiver.receive_into(buffer.initialize_unfilled()) {
                Err(Error::WouldBlock) => {
                    ready!(this.connection.reactor.poll_event(context, Direction::Read, tick))?;
                }
                result => {
                    coop.made_progress();
                    let received = result?;
                    this.check_end(received == 0)?;
                    buffer.advance(received);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}
