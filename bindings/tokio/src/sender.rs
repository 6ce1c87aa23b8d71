//! [`SendHalf`]: bytes, files and loans.

use crate::connection::{Connection, Lender};
use crate::error::LendError;
use crate::loan::Loan;
use crate::reactor::Direction;
use haul::{Buffer, Error, LoanId, PREFETCH_AWAITED_BYTES, Response, SendReport, Source};
use rustix::io::Errno;
use rustix::net::Shutdown;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::AsyncWrite;
use tokio::task::JoinHandle;

/// What [`SendHalf::send_file`] does with a part of a file that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum FilePolicy {
    /// A blocking thread of tokio reads the part, so that the tasks of this thread do not wait for
    /// the disk. The first and the last page of each 2 MiB are examined, because the kernel reads
    /// ahead what is between them.
    #[default]
    Prefetch,
    /// The call waits for the disk. For files that are known to be in memory.
    Inline,
}

/// The half of a [`crate::Stream`] that sends.
#[derive(Debug)]
pub struct SendHalf {
    connection: Arc<Connection>,
    position: u64,
    /// The part of a file that a thread reads for [`SendHalf::poll_send_response`].
    reading: Option<Reading>,
}

/// A part of a file that a thread reads into memory.
#[derive(Debug)]
struct Reading {
    part: PartId,
    thread: JoinHandle<Result<(), Error>>,
}

/// A part of a file: device, inode and position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PartId(u64, u64, u64);

impl PartId {
    fn of(file: BorrowedFd<'_>, position: u64) -> io::Result<Self> {
        let status = rustix::fs::fstat(file)?;
        Ok(Self(status.st_dev, status.st_ino, position))
    }
}

impl SendHalf {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, position: 0, reading: None }
    }

    /// The bytes of the latest [`SendHalf::send_all`], [`SendHalf::send_file`] or
    /// [`SendHalf::send_response`] that the socket accepted, even if its future was dropped.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Sends all bytes.
    pub fn send_all<'a>(
        &'a mut self,
        bytes: &'a [u8],
    ) -> impl Future<Output = io::Result<()>> + Send + 'a {
        // At once, because the future may be dropped before its first poll.
        self.position = 0;
        async move {
            while self.position < bytes.len() as u64 {
                let rest = &bytes[self.position as usize..];
                let sent = self.repeat(|lender| lender.sender.send(rest)).await?;
                self.position += sent as u64;
            }
            Ok(())
        }
    }

    /// Sends a range of a file without copying it. Returns the number of bytes.
    pub fn send_file<'a>(
        &'a mut self,
        file: &'a (impl AsFd + Sync),
        range: Range<u64>,
        policy: FilePolicy,
    ) -> impl Future<Output = io::Result<u64>> + Send + 'a {
        self.send_response(b"", file, range, b"", policy)
    }

    /// Sends a head, a range of a file and a tail. Returns the number of bytes of all three.
    pub fn send_response<'a>(
        &'a mut self,
        head: &'a [u8],
        file: &'a (impl AsFd + Sync),
        range: Range<u64>,
        tail: &'a [u8],
        policy: FilePolicy,
    ) -> impl Future<Output = io::Result<u64>> + Send + 'a {
        self.position = 0;
        let file = file.as_fd();
        async move {
            if range.start > range.end {
                let problem = "the range ends before it begins";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
            }
            let head_bytes = head.len() as u64;
            let mut uncork = Uncork::new(&self.connection, !tail.is_empty());
            let total_bytes =
                Response::new(head, file, range.clone()).with_tail(tail).total_bytes();
            // The end of the part of the file that was examined.
            let mut window_end = range.start;
            while self.position < total_bytes {
                let in_file = range.end.min(range.start + self.position.saturating_sub(head_bytes));
                if in_file >= window_end {
                    window_end = range.end.min(in_file.saturating_add(PREFETCH_AWAITED_BYTES));
                    if policy == FilePolicy::Prefetch {
                        read_ahead(file, in_file..window_end, range.end).await?;
                    }
                }
                // The tail follows the whole range.
                let tail = if window_end == range.end { tail } else { b"" };
                self.send_window(head, file, range.start..window_end, tail).await?;
            }
            uncork.disarm();
            Ok(total_bytes)
        }
    }

    /// Sends a part of a head and of a range of a file, and returns the number of bytes; 0 only if
    /// both are empty. For streams and futures that are written by hand. Nothing was sent if the
    /// result is `Pending`.
    pub fn poll_send_response(
        &mut self,
        context: &mut Context<'_>,
        head: &[u8],
        file: impl AsFd,
        range: Range<u64>,
        policy: FilePolicy,
    ) -> Poll<io::Result<u64>> {
        let file = file.as_fd();
        let end = range.end.min(range.start.saturating_add(PREFETCH_AWAITED_BYTES));
        let part = range.start..end;
        if policy == FilePolicy::Prefetch {
            ready!(self.poll_read_ahead(context, file, part.clone(), range.end))?;
        }
        let response = Response::new(head, file, part);
        self.poll_repeat(context, |lender| {
            let mut position = 0;
            match lender.sender.send_response(&response, &mut position) {
                // The next call fails too.
                Err(error) if position > 0 => {
                    lender.keep_failure_of_send(&error);
                    Ok(position)
                }
                result => result.map(|()| position),
            }
        })
    }

    /// Waits until a thread read a part of a file that is not in memory, and what follows up to
    /// `end`.
    fn poll_read_ahead(
        &mut self,
        context: &mut Context<'_>,
        file: BorrowedFd<'_>,
        part: Range<u64>,
        end: u64,
    ) -> Poll<io::Result<()>> {
        let is_resident = || Source::from(file).is_resident(part.clone());
        let reading = match self.reading.take() {
            Some(reading) if reading.part == PartId::of(file, part.start)? => reading,
            // The caller gave up another part, or did not begin a part.
            _ if is_resident() => return Poll::Ready(Ok(())),
            _ => Reading {
                part: PartId::of(file, part.start)?,
                thread: start_reading(file, part.start..end)?,
            },
        };
        let reading = self.reading.insert(reading);
        // If the thread could not read the file, sending the file fails.
        let _ = ready!(Pin::new(&mut reading.thread).poll(context));
        self.reading = None;
        Poll::Ready(Ok(()))
    }

    /// Sends a part of a response, from the position on.
    async fn send_window(
        &mut self,
        head: &[u8],
        file: BorrowedFd<'_>,
        range: Range<u64>,
        tail: &[u8],
    ) -> io::Result<()> {
        let mut position = self.position;
        let response = Response::new(head, file, range).with_tail(tail);
        let result = self
            .repeat(|lender| {
                let before = position;
                match lender.sender.send_response(&response, &mut position) {
                    // A part was sent, and the socket is full.
                    Err(Error::WouldBlock) if position > before => Ok(()),
                    result => result,
                }
            })
            .await;
        self.position = position;
        result
    }

    /// Lends a buffer to the kernel, which sends from the buffer itself and not from a copy.
    ///
    /// The call waits until there is room among the loans, and until the socket accepted the whole
    /// buffer. If the future is dropped before the loan began, the buffer is dropped. If the loan
    /// began, the loan continues.
    ///
    /// An error before the loan began returns the buffer.
    pub async fn lend(&mut self, buffer: impl Into<Buffer>) -> Result<Loan, LendError> {
        tokio::task::consume_budget().await;
        let mut buffer = buffer.into();
        loop {
            let reactor = &self.connection.reactor;
            let ticks = [Direction::Write, Direction::Completion].map(|one| reactor.tick(one));
            let flushed = self.call(&mut |lender| lender.sender.flush());
            let error = match flushed {
                Err(error) => return Err(LendError::new(error, Some(buffer))),
                Ok(Err(error)) => error,
                Ok(Ok(())) => match self.lend_now(buffer) {
                    Ok(id) => {
                        let loan = Loan::new(id, Arc::clone(&self.connection));
                        return match self.flush().await {
                            Ok(()) => Ok(loan),
                            Err(error) => Err(LendError::new(error, None)),
                        };
                    }
                    Err(refused) => {
                        buffer = refused.buffer;
                        refused.error
                    }
                },
            };
            let waited = match error {
                Error::WouldBlock => self.connection.event(Direction::Write, ticks[0]).await,
                Error::LoanLimit => self.connection.event(Direction::Completion, ticks[1]).await,
                error => Err(error.into()),
            };
            if let Err(error) = waited {
                return Err(LendError::new(error, Some(buffer)));
            }
        }
    }

    fn lend_now(&self, buffer: Buffer) -> Result<LoanId, haul::LendError> {
        self.connection.with_lender(|lender| {
            lender.lend(buffer).inspect_err(|refused| lender.keep_failure_of_send(&refused.error))
        })
    }

    /// Sends the rest of a loan that the socket accepted in part.
    pub async fn flush(&mut self) -> io::Result<()> {
        self.repeat(|lender| lender.sender.flush()).await
    }

    /// Waits until the kernel released all lent buffers. An error of the socket is returned after
    /// that.
    pub async fn settle(&mut self) -> io::Result<()> {
        let flushed = self.flush().await;
        loop {
            let tick = self.connection.reactor.tick(Direction::Completion);
            if !self.connection.with_lender(|lender| lender.sender.wants().completion) {
                return flushed.and(self.connection.with_lender(Lender::check));
            }
            self.connection.event(Direction::Completion, tick).await?;
        }
    }

    /// Ends the stream to the peer, after everything was sent.
    pub async fn shutdown(&mut self) -> io::Result<()> {
        self.flush().await?;
        self.shut_down()
    }

    /// Ends a TCP connection at once with a reset. The kernel drops what was not sent yet, so all
    /// loans end. A socket of another kind is closed as usual.
    pub fn abort(self) -> io::Result<()> {
        // A sender of the same socket, because the loans need their sender until they ended.
        haul::Sender::new(Arc::clone(&self.connection.socket))?.abort();
        Ok(())
    }

    /// What the sender did so far.
    pub fn report(&self) -> SendReport {
        self.connection.with_lender(|lender| lender.sender.report())
    }

    fn shut_down(&self) -> io::Result<()> {
        self.connection.with_lender(|lender| {
            match rustix::net::shutdown(lender.sender.socket(), Shutdown::Write) {
                // The peer already ended the connection.
                Ok(()) | Err(Errno::NOTCONN) => Ok(()),
                Err(errno) => Err(errno.into()),
            }
        })
    }

    /// Calls until the socket is ready.
    async fn repeat<T>(
        &mut self,
        mut call: impl FnMut(&mut Lender) -> Result<T, Error> + Send,
    ) -> io::Result<T> {
        tokio::task::consume_budget().await;
        loop {
            let tick = self.connection.reactor.tick(Direction::Write);
            match self.call(&mut call)? {
                Err(Error::WouldBlock) => self.connection.event(Direction::Write, tick).await?,
                result => return Ok(result?),
            }
        }
    }

    fn poll_repeat<T>(
        &self,
        context: &mut Context<'_>,
        mut call: impl FnMut(&mut Lender) -> Result<T, Error>,
    ) -> Poll<io::Result<T>> {
        let coop = ready!(tokio::task::coop::poll_proceed(context));
        loop {
            let tick = self.connection.reactor.tick(Direction::Write);
            match self.call(&mut call)? {
                Err(Error::WouldBlock) => {
                    ready!(self.connection.reactor.poll_event(context, Direction::Write, tick))?;
                }
                result => {
                    coop.made_progress();
                    return Poll::Ready(result.map_err(io::Error::from));
                }
            }
        }
    }

    /// Calls the sender, unless the socket failed before.
    fn call<T>(
        &self,
        call: &mut impl FnMut(&mut Lender) -> Result<T, Error>,
    ) -> io::Result<Result<T, Error>> {
        self.connection.with_lender(|lender| {
            lender.check()?;
            let result = call(lender);
            if let Err(error) = &result {
                lender.keep_failure_of_send(error);
            }
            Ok(result)
        })
    }
}

/// Sends what a response without its end left in the socket, when dropped: a response with a tail
/// sets `TCP_CORK` until the tail was sent.
struct Uncork(Option<Arc<Connection>>);

impl Uncork {
    fn new(connection: &Arc<Connection>, is_armed: bool) -> Self {
        Self(is_armed.then(|| Arc::clone(connection)))
    }

    /// The response is complete, and `TCP_CORK` is not set.
    fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for Uncork {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            // Other sockets than TCP sockets do not have the option.
            let _ = rustix::net::sockopt::set_tcp_cork(&connection.socket, false);
        }
    }
}

impl AsFd for SendHalf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.socket.as_fd()
    }
}

/// Reads a part of a file that is not in memory by a blocking thread, and what follows it up to
/// `end`.
async fn read_ahead(file: BorrowedFd<'_>, part: Range<u64>, end: u64) -> io::Result<()> {
    if Source::from(file).is_resident(part.clone()) {
        return Ok(());
    }
    start_reading(file, part.start..end)?.await.map_err(io::Error::other)??;
    Ok(())
}

/// Reads the beginning of a range by a blocking thread, and what follows in the background.
fn start_reading(
    file: BorrowedFd<'_>,
    range: Range<u64>,
) -> io::Result<JoinHandle<Result<(), Error>>> {
    let file = file.try_clone_to_owned()?;
    Ok(tokio::task::spawn_blocking(move || Source::from(&file).prefetch(range)))
}

impl AsyncWrite for SendHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_repeat(context, |lender| lender.sender.send(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_repeat(context, |lender| lender.sender.send_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_repeat(context, |lender| lender.sender.flush())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_repeat(context, |lender| lender.sender.flush()))?;
        Poll::Ready(self.shut_down())
    }
}
