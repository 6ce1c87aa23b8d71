//! The worker that sends its own memory: copied, grouped, segmented by the device, or lent.

use super::{
    Job, Message, Outcome, WorkCounters, failed, failure_message, now_ns, report_started,
    sleep_until,
};
use haul::{Buffer, BufferPool, LoanLimits, SendSettings, Sender};
use haul_sys::sendmsg::{self, SendOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{IoSlice, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Maximum bytes on loan at a time: about as much as a socket's send buffer accepts.
const LENT_BYTES_MAX: usize = 8 << 20;
/// Maximum number of buffers, which the smallest pieces reach.
const BUFFERS_MAX: usize = 1024;
/// Maximum wait for the last loans to be returned.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);

/// The system call that sends memory, and whether the memory is lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SendCall {
    /// One `send` per piece, copied.
    Send,
    /// Several datagrams per `sendmmsg`, copied.
    Group,
    /// Datagrams segmented by the device or the kernel (`UDP_SEGMENT`), copied.
    Segments,
    /// Lent; the next piece is sent while earlier loans are in flight.
    Lend,
    /// Lent; waits for the completion before the next piece.
    LendAndWait,
    /// Lent, and segmented by the device or the kernel.
    LendSegments,
}

/// Parameters of a task that sends memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemorySendTask {
    /// Whether the connection is TCP rather than datagrams.
    pub is_tcp: bool,
    /// The send call.
    pub by: SendCall,
    /// Bytes per call; several datagrams if the piece is segmented or grouped.
    pub piece_bytes: usize,
    /// Size of a datagram if the piece is segmented or grouped.
    pub datagram_bytes: u16,
    /// Destination if no worker receives; `None` for the peer of the job.
    pub to: Option<SocketAddr>,
    /// When pieces are sent.
    pub beat: Schedule,
}

/// Schedule of the pieces.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Schedule {
    /// As fast as the socket accepts them.
    Free,
    /// A fixed rate, each piece at its due time. The sender spins in between, so its CPU is always
    /// busy.
    Exact {
        /// Pieces to send in a second; a piece is `piece_bytes` of memory passed in one call.
        pieces_per_second: u32,
    },
    /// So many pieces at a time, at a fixed rate of batches. The sender sleeps in between.
    Batches {
        /// Pieces of one batch.
        pieces: u32,
        /// The rate, in batches per second.
        per_second: u32,
    },
}

impl Schedule {
    /// Waits until the piece with this index is due.
    fn wait_until_due(self, start_ns: u64, piece: u64) {
        match self {
            Self::Free => {}
            Self::Exact { pieces_per_second } => {
                let due_ns = start_ns + piece * 1_000_000_000 / u64::from(pieces_per_second.max(1));
                while now_ns() < due_ns {
                    std::hint::spin_loop();
                }
            }
            Self::Batches { pieces, per_second } => {
                let (batch, index) =
                    (piece / u64::from(pieces.max(1)), piece % u64::from(pieces.max(1)));
                if index == 0 {
                    sleep_until(start_ns + batch * 1_000_000_000 / u64::from(per_second.max(1)));
                }
            }
        }
    }
}

/// The socket and the memory that is sent through it.
enum PieceSender {
    Copying(CopyingSender),
    Lending {
        sender: Box<Sender<Socket>>,
        /// Buffers that are not on loan, least recently used first. In this order memory is used
        /// cyclically, as it is for copies.
        idle: VecDeque<Buffer>,
        buffers: usize,
    },
}

enum Socket {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

struct CopyingSender {
    socket: Socket,
    /// As many bytes as may be on loan at a time. A smaller block would stay in a nearer cache and
    /// make copies cheaper.
    bytes: Vec<u8>,
    offset: usize,
}

impl CopyingSender {
    /// The next piece of the memory, which is used in a cycle.
    fn next_piece(&mut self, piece_bytes: usize) -> (&Socket, &[u8]) {
        let next = self.offset + piece_bytes;
        self.offset = if next + piece_bytes <= self.bytes.len() { next } else { 0 };
        (&self.socket, &self.bytes[self.offset..self.offset + piece_bytes])
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Udp(socket) => socket.as_fd(),
        }
    }
}

impl MemorySendTask {
    /// Sends until the window is over.
    pub fn run(&self, job: &Job, counters: &WorkCounters) -> Result<Outcome, Message> {
        let peer = self
            .to
            .or(job.peer)
            .ok_or_else(|| Message::Failed("the job names no peer to send to".into()))?;
        let mut piece_sender = self.open(job, peer, counters)?;
        let start_ns = now_ns();
        let mut pieces = 0u64;
        while !counters.is_over() {
            self.beat.wait_until_due(start_ns, pieces);
            let (bytes, calls) = match self.send_piece(&mut piece_sender) {
                Ok(sent) => sent,
                // The receiver may have closed its socket by now.
                Err(_) if counters.is_over() => break,
                Err(message) => return Err(message),
            };
            pieces += 1;
            counters.bytes.fetch_add(bytes, Relaxed);
            counters.calls.fetch_add(calls, Relaxed);
            if pieces == 1 {
                report_started()?;
            }
        }
        let outcome = counters.outcome()?;
        let PieceSender::Lending { sender, .. } = &mut piece_sender else { return Ok(outcome) };
        sender.wait_for_completions(COMPLETION_TIMEOUT).map_err(|error| failure_message(&error))?;
        let loans = sender.report().loans;
        Ok(Outcome {
            zero_copied_bytes: loans.zero_copied_bytes,
            copied_bytes: loans.copied_bytes,
            ..outcome
        })
    }

    fn open(
        &self,
        job: &Job,
        peer: SocketAddr,
        counters: &WorkCounters,
    ) -> Result<PieceSender, Message> {
        let connect_error = |error| failed(&format!("connecting to {peer}"), error);
        let socket = if self.is_tcp {
            let stream = job.socket.connect(peer)?;
            counters.watch_socket(&stream);
            Socket::Tcp(stream)
        } else {
            let unspecified = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(unspecified).map_err(connect_error)?;
            socket.connect(peer).map_err(connect_error)?;
            Socket::Udp(socket)
        };
        if matches!(self.by, SendCall::Send | SendCall::Group | SendCall::Segments) {
            let buffer_bytes =
                LENT_BYTES_MAX.min(BUFFERS_MAX * self.piece_bytes).max(2 * self.piece_bytes);
            let bytes = vec![0x5a; buffer_bytes];
            return Ok(PieceSender::Copying(CopyingSender { socket, bytes, offset: 0 }));
        }
        let buffers = (LENT_BYTES_MAX / self.piece_bytes).clamp(2, BUFFERS_MAX);
        let pool =
            BufferPool::new(self.piece_bytes, buffers).map_err(|error| failure_message(&error))?;
        let idle: Result<VecDeque<Buffer>, haul::Error> = (0..buffers)
            .map(|_| {
                let mut buffer = pool.take()?;
                buffer.resize(self.piece_bytes)?;
                buffer.fill(0x5a);
                Ok(Buffer::from(buffer))
            })
            .collect();
        let idle = idle.map_err(|error| failure_message(&error))?;
        let settings = SendSettings::default()
            .with_zerocopy_bytes_min(1)
            .with_lend_when_copied(true)
            .with_limits(
                LoanLimits::default()
                    .with_loans_max(buffers)
                    .with_bytes_max(LENT_BYTES_MAX.max(2 * self.piece_bytes)),
            );
        let sender =
            Sender::with_settings(socket, settings).map_err(|error| failure_message(&error))?;
        Ok(PieceSender::Lending { sender: Box::new(sender), idle, buffers })
    }

    /// Sends one piece; returns the bytes that the socket accepted and the system calls made.
    fn send_piece(&self, piece_sender: &mut PieceSender) -> Result<(u64, u64), Message> {
        match piece_sender {
            PieceSender::Copying(copying) => {
                let (socket, bytes) = copying.next_piece(self.piece_bytes);
                match (socket, self.by) {
                    (Socket::Tcp(stream), _) => {
                        let mut stream: &TcpStream = stream;
                        stream.write_all(bytes).map(|()| bytes.len())
                    }
                    (Socket::Udp(socket), SendCall::Group) => {
                        let datagram_bytes = usize::from(self.datagram_bytes);
                        sendmsg::send_group(socket, bytes, datagram_bytes, false)
                            .map(|taken| bytes.len().min(taken * datagram_bytes))
                    }
                    (Socket::Udp(socket), by) => {
                        let segment_bytes =
                            (by == SendCall::Segments).then_some(self.datagram_bytes);
                        sendmsg::send(
                            socket,
                            &[IoSlice::new(bytes)],
                            SendOptions { segment_bytes, ..Default::default() },
                        )
                    }
                }
                .map(|taken| (taken as u64, 1))
                .map_err(|error| failed("sending", error))
            }
            PieceSender::Lending { sender, idle, buffers } => {
                let calls_before = sender.report().loans.calls;
                let buffer = loop {
                    reclaim(sender, idle)?;
                    match idle.pop_front() {
                        Some(buffer) => break buffer,
                        None => wait_for_completions(sender)?,
                    }
                };
                let lent = match self.by {
                    SendCall::LendSegments => sender.lend_segments(buffer, self.datagram_bytes),
                    _ => sender.lend(buffer),
                };
                lent.map_err(|refused| failure_message(&refused.error))?;
                while self.by == SendCall::LendAndWait && idle.len() < *buffers {
                    wait_for_completions(sender)?;
                    reclaim(sender, idle)?;
                }
                Ok((self.piece_bytes as u64, sender.report().loans.calls - calls_before))
            }
        }
    }
}

/// Takes back the buffers of completed loans.
fn reclaim(sender: &mut Sender<Socket>, idle: &mut VecDeque<Buffer>) -> Result<(), Message> {
    let reclaimed = sender.reclaim().map_err(|error| failure_message(&error))?;
    idle.extend(reclaimed.map(|loan| loan.buffer));
    Ok(())
}

/// Waits until a completion arrives, at most 100 ms.
fn wait_for_completions(sender: &Sender<Socket>) -> Result<(), Message> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    // `poll` reports errors whatever events are requested, and a completion counts as an error.
    let mut poll_fds = [PollFd::new(sender.socket(), PollFlags::empty())];
    match poll(&mut poll_fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(failed("poll", errno)),
    }
}
