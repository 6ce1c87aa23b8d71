//! The process that sends memory of its own: copied, grouped, cut by the device, or lent.

use super::{Job, Message, Outcome, Tally, failed, now_ns, say_started, sleep_until, stopped};
use haul::{Buffer, Limits, Pool, SendSettings, Sender};
use haul_sys::datagram::{self, Datagrams};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::Write;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Lent at a time: as much as a socket's buffer takes anyway.
const LENT_BYTES_MAX: usize = 8 << 20;
/// Buffers of the smallest pieces.
const BUFFERS_MAX: usize = 1024;
/// How long the kernel may keep the last loans.
const SETTLE_MAX: Duration = Duration::from_secs(1);

/// How to give memory to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Hand {
    /// One `send` a piece, copied.
    Send,
    /// Datagrams by `sendmmsg`, copied.
    Group,
    /// Datagrams cut by the device or the kernel (`UDP_SEGMENT`), copied.
    Segments,
    /// Lent, the next piece while the last ones are still out.
    Lend,
    /// Lent, and waited for before the next piece.
    LendAndWait,
    /// Lent, and cut by the device or the kernel.
    LendSegments,
}

/// What to give and how.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Giving {
    pub is_tcp: bool,
    pub by: Hand,
    /// What one call gives; several datagrams where it is cut or grouped.
    pub piece_bytes: usize,
    /// The size of a datagram where it is cut or grouped.
    pub datagram_bytes: u16,
    /// To whom, where nobody waits for it.
    pub to: Option<SocketAddr>,
    pub beat: Beat,
}

/// When to give.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Beat {
    /// At full speed.
    Free,
    /// So many pieces a second, each at its moment: the giver's CPU is busy all the while.
    Exact { pieces_per_second: u32 },
    /// So many pieces at a time, so often; the giver sleeps in between.
    Batches { pieces: u32, per_second: u32 },
}

impl Beat {
    /// Waits until the piece of this number is due.
    fn wait(self, start_ns: u64, piece: u64) {
        match self {
            Self::Free => {}
            Self::Exact { pieces_per_second } => {
                let due_ns = start_ns + piece * 1_000_000_000 / u64::from(pieces_per_second.max(1));
                while now_ns() < due_ns {
                    std::hint::spin_loop();
                }
            }
            Self::Batches { pieces, per_second } => {
                let (batch, place) =
                    (piece / u64::from(pieces.max(1)), piece % u64::from(pieces.max(1)));
                if place == 0 {
                    sleep_until(start_ns + batch * 1_000_000_000 / u64::from(per_second.max(1)));
                }
            }
        }
    }
}

/// Where it goes.
enum Way {
    Plain(Plain),
    Lent {
        sender: Box<Sender<Socket>>,
        /// All that are not lent, the longest at rest first: memory is walked round and round, as it is for copies.
        idle: VecDeque<Buffer>,
        buffers: usize,
    },
}

enum Socket {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

struct Plain {
    socket: Socket,
    /// As much as is lent at a time: the copy must not come from a smaller and so nearer cache.
    bytes: Vec<u8>,
    at: usize,
}

impl Plain {
    /// The next piece, round and round.
    fn next(&mut self, piece_bytes: usize) -> (&Socket, &[u8]) {
        self.at =
            if self.at + 2 * piece_bytes <= self.bytes.len() { self.at + piece_bytes } else { 0 };
        (&self.socket, &self.bytes[self.at..self.at + piece_bytes])
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

impl Giving {
    /// Gives until the window is over.
    pub(super) fn run(&self, job: &Job, tally: &Tally) -> Result<Outcome, Message> {
        let peer = self
            .to
            .or(job.peer)
            .ok_or_else(|| Message::Failed("there is nobody to send to".into()))?;
        let mut way = self.open(job, peer, tally)?;
        let start_ns = now_ns();
        let mut pieces = 0u64;
        while !tally.is_over() {
            self.beat.wait(start_ns, pieces);
            let (bytes, calls) = match self.give(&mut way) {
                Ok(given) => given,
                // Whoever took it may have left by now.
                Err(_) if tally.is_over() => break,
                Err(message) => return Err(message),
            };
            pieces += 1;
            tally.bytes.fetch_add(bytes, Relaxed);
            tally.calls.fetch_add(calls, Relaxed);
            if pieces == 1 {
                say_started()?;
            }
        }
        let outcome = tally.outcome()?;
        let Way::Lent { sender, .. } = &mut way else { return Ok(outcome) };
        sender.settle(SETTLE_MAX).map_err(|error| stopped(&error))?;
        let loans = sender.report().loans;
        Ok(Outcome {
            zero_copied_bytes: loans.zero_copied_bytes,
            copied_bytes: loans.copied_bytes,
            ..outcome
        })
    }

    fn open(&self, job: &Job, peer: SocketAddr, tally: &Tally) -> Result<Way, Message> {
        let at = |error| failed(&format!("connecting to {peer}"), error);
        let socket = if self.is_tcp {
            let stream = job.socket.connect(peer)?;
            tally.watch_socket(&stream);
            Socket::Tcp(stream)
        } else {
            let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).map_err(at)?;
            socket.connect(peer).map_err(at)?;
            Socket::Udp(socket)
        };
        if matches!(self.by, Hand::Send | Hand::Group | Hand::Segments) {
            let walked_bytes =
                LENT_BYTES_MAX.min(BUFFERS_MAX * self.piece_bytes).max(2 * self.piece_bytes);
            let bytes = vec![0x5a; walked_bytes];
            return Ok(Way::Plain(Plain { socket, bytes, at: 0 }));
        }
        let buffers = (LENT_BYTES_MAX / self.piece_bytes).clamp(2, BUFFERS_MAX);
        let pool = Pool::new(self.piece_bytes, buffers).map_err(|error| stopped(&error))?;
        let idle: Result<VecDeque<Buffer>, haul::Error> = (0..buffers)
            .map(|_| {
                let mut buffer = pool.take()?;
                buffer.fill(0x5a);
                buffer.set_len(self.piece_bytes);
                Ok(Buffer::from(buffer))
            })
            .collect();
        let idle = idle.map_err(|error| stopped(&error))?;
        let settings = SendSettings {
            zerocopy_bytes_min: 1,
            lends_on_when_copied: true,
            limits: Limits {
                loans_max: buffers,
                bytes_max: LENT_BYTES_MAX.max(2 * self.piece_bytes),
            },
            ..SendSettings::default()
        };
        let sender = Sender::with(socket, settings).map_err(|error| stopped(&error))?;
        Ok(Way::Lent { sender: Box::new(sender), idle, buffers })
    }

    /// Gives one piece; returns how many bytes were taken, in how many system calls.
    fn give(&self, way: &mut Way) -> Result<(u64, u64), Message> {
        match way {
            Way::Plain(plain) => {
                let (socket, bytes) = plain.next(self.piece_bytes);
                match (socket, self.by) {
                    (Socket::Tcp(stream), _) => {
                        let mut stream: &TcpStream = stream;
                        stream.write_all(bytes).map(|()| bytes.len())
                    }
                    (Socket::Udp(socket), Hand::Group) => {
                        let datagram_bytes = usize::from(self.datagram_bytes);
                        datagram::send_group(socket, bytes, datagram_bytes)
                            .map(|taken| bytes.len().min(taken * datagram_bytes))
                    }
                    (Socket::Udp(socket), by) => {
                        let segment_bytes = (by == Hand::Segments).then_some(self.datagram_bytes);
                        datagram::send(socket, bytes, Datagrams { segment_bytes, zerocopy: false })
                    }
                }
                .map(|taken| (taken as u64, 1))
                .map_err(|error| failed("sending", error))
            }
            Way::Lent { sender, idle, buffers } => {
                let calls_before = sender.report().loans.calls;
                let buffer = loop {
                    reclaim(sender, idle)?;
                    match idle.pop_front() {
                        Some(buffer) => break buffer,
                        None => wait_for_completions(sender)?,
                    }
                };
                let lent = match self.by {
                    Hand::LendSegments => sender.lend_segments(buffer, self.datagram_bytes),
                    _ => sender.lend(buffer),
                };
                lent.map_err(|refused| stopped(&refused.error))?;
                while self.by == Hand::LendAndWait && idle.len() < *buffers {
                    wait_for_completions(sender)?;
                    reclaim(sender, idle)?;
                }
                Ok((self.piece_bytes as u64, sender.report().loans.calls - calls_before))
            }
        }
    }
}

/// Takes back what the kernel is done with.
fn reclaim(sender: &mut Sender<Socket>, idle: &mut VecDeque<Buffer>) -> Result<(), Message> {
    idle.extend(sender.reclaim().map_err(|error| stopped(&error))?.map(|back| back.buffer));
    Ok(())
}

/// Waits until the kernel has something to say of loans.
fn wait_for_completions(sender: &Sender<Socket>) -> Result<(), Message> {
    let short = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    // Errors are told whatever is asked for, and notices count as such.
    let mut wanted = [PollFd::new(sender.socket(), PollFlags::empty())];
    match poll(&mut wanted, Some(&short)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(failed("poll", errno)),
    }
}
