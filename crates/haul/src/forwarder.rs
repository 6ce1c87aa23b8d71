//! [`Forwarder`]: forwards the data of two sockets to each other until both streams have ended.

use crate::buffer::BufferPool;
use crate::call::Call;
use crate::error::{Error, failed};
use crate::fallback::Fallback;
use crate::method::Counts;
use crate::pipe::{Pipe, SOCKET_PIPE_BYTES};
use crate::socket;
use haul_sys::fork;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

mod direction;

use direction::Direction;

/// The poll interval of a socket whose error queue is not drained.
const ERROR_QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Joins two connected stream sockets.
///
/// Each direction begins by copying, and splices once the data arrives in large pieces: small
/// messages cost less to copy than to pass through a pipe. It returns to copying when they become
/// small again.
///
/// When one peer has ended its stream, all data in transit is delivered, then the stream to the
/// other peer is ended, too. The opposite direction continues (half-close).
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = std::net::TcpListener::bind("0.0.0.0:8080")?.accept()?.0;
/// let server = std::net::TcpStream::connect("192.0.2.1:80")?;
/// let mut forwarder = haul::Forwarder::new(&client, &server)?;
/// forwarder.forward()?;
/// println!("{:?}", forwarder.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Forwarder<A: AsFd, B: AsFd> {
    a: A,
    b: B,
    a_to_b: Direction,
    b_to_a: Direction,
    pool: ForwardPool,
}

/// Pipes and buffers for many forwarders, which hold them only while they need them.
///
/// Clones share one pool. A pipe returns to the pool only when it is empty, so that no connection
/// ever receives another's bytes; a pipe that is not empty is closed. A forked child does not use
/// the pipes of its parent.
#[derive(Debug, Clone)]
pub struct ForwardPool(Arc<ForwardPoolInner>);

#[derive(Debug)]
struct ForwardPoolInner {
    pipes: Mutex<Vec<Pipe>>,
    /// The process that created the pool ([`fork::generation`]).
    process: u64,
    settings: ForwardSettings,
    buffers: BufferPool,
}

/// Settings of forwarders, which share them through their pool ([`ForwardPool::with`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForwardSettings {
    /// The forward method.
    pub method: ForwardMethod,
    /// The most idle pipes that are kept. Each takes two descriptors.
    pub idle_pipes_max: usize,
    /// The capacity of a pipe, in bytes. An unprivileged user may have 64 MiB of pipes in all
    /// (`fs.pipe-user-pages-soft`).
    pub pipe_bytes: usize,
    /// The most bytes that are copied at a time.
    pub buffer_bytes: usize,
}

/// The method by which a forwarder moves data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardMethod {
    /// Copies small pieces and splices large ones.
    Adaptive,
    /// Copies everything.
    Copy,
    /// Splices everything, where that works.
    Splice,
}

impl Default for ForwardSettings {
    /// Adaptive; pipes of 256 KiB, of which an unprivileged user may have 256; copies of 16 KiB.
    fn default() -> Self {
        Self {
            method: ForwardMethod::Adaptive,
            idle_pipes_max: 2,
            pipe_bytes: SOCKET_PIPE_BYTES,
            buffer_bytes: direction::BUFFER_BYTES,
        }
    }
}

impl ForwardSettings {
    /// Sets the forward method.
    #[must_use]
    pub fn with_method(mut self, method: ForwardMethod) -> Self {
        self.method = method;
        self
    }

    /// Sets the most idle pipes that are kept.
    #[must_use]
    pub fn with_idle_pipes_max(mut self, idle_pipes_max: usize) -> Self {
        self.idle_pipes_max = idle_pipes_max;
        self
    }

    /// Sets the capacity of a pipe, in bytes.
    #[must_use]
    pub fn with_pipe_bytes(mut self, pipe_bytes: usize) -> Self {
        self.pipe_bytes = pipe_bytes;
        self
    }

    /// Sets the most bytes that are copied at a time.
    #[must_use]
    pub fn with_buffer_bytes(mut self, buffer_bytes: usize) -> Self {
        self.buffer_bytes = buffer_bytes;
        self
    }
}

/// The events that a forwarder waits for on one socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Readable, or the stream has ended.
    pub read: bool,
    /// Writable.
    pub write: bool,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing more can be moved until one of the sockets is ready.
    Wait {
        /// The events to wait for on the first socket.
        from: Readiness,
        /// The events to wait for on the second socket.
        to: Readiness,
    },
    /// As much was moved as one connection should in a turn: there may be more to do.
    Yield,
    /// Both streams have ended.
    Done,
}

/// The activity of a forwarder so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardReport {
    /// From the first socket to the second.
    pub a_to_b: DirectionReport,
    /// From the second socket to the first.
    pub b_to_a: DirectionReport,
}

/// The activity of one direction so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectionReport {
    /// Spliced, through a pipe.
    pub spliced: Counts,
    /// Copied, through a buffer.
    pub copied: Counts,
    /// How often the direction switched between the two.
    pub changes: u64,
    /// Every fallback, in order.
    pub fallbacks: Vec<Fallback>,
}

impl<A: AsFd, B: AsFd> Forwarder<A, B> {
    /// Creates a forwarder with a pool of its own.
    pub fn new(a: A, b: B) -> Result<Self, Error> {
        Self::with_pool(a, b, ForwardPool::new(2)?)
    }

    /// Creates a forwarder that shares its pool with others.
    pub fn with_pool(a: A, b: B, pool: ForwardPool) -> Result<Self, Error> {
        for socket in [a.as_fd(), b.as_fd()] {
            socket::must_be_stream(socket::kind(socket)?)?;
        }
        let method = pool.0.settings.method;
        Ok(Self { a, b, a_to_b: Direction::new(method), b_to_a: Direction::new(method), pool })
    }

    /// Forwards until both streams have ended. Both sockets are non-blocking meanwhile.
    ///
    /// An error ends the call, and data in transit is then lost with the connection, as in the
    /// network. The call has no timeout for two silent peers. Set keep-alive or `TCP_USER_TIMEOUT`
    /// on the sockets, or poll and call [`Forwarder::step`] with a timer of your own.
    pub fn forward(&mut self) -> Result<(), Error> {
        let a_flags = make_nonblocking(self.a.as_fd())?;
        let b_flags = make_nonblocking(self.b.as_fd());
        let result = b_flags.as_ref().map_or(Ok(()), |_| self.forward_nonblocking());
        // Restored in the opposite order, so that two descriptors of one socket end as they began.
        // A socket that is gone needs no flags, so errors are ignored.
        if let Ok(flags) = &b_flags {
            let _ = rustix::fs::fcntl_setfl(&self.b, *flags);
        }
        let _ = rustix::fs::fcntl_setfl(&self.a, a_flags);
        b_flags.and(result)
    }

    /// Moves the data that can be moved now. The sockets must be non-blocking, and the caller polls
    /// them.
    pub fn step(&mut self) -> Result<Step, Error> {
        for socket in [self.a.as_fd(), self.b.as_fd()] {
            let flags = rustix::fs::fcntl_getfl(socket)
                .map_err(|errno| failed(Call::Fcntl)(errno.into()))?;
            if !flags.contains(OFlags::NONBLOCK) {
                return Err(Error::Unsuited(
                    "a step needs non-blocking sockets: a blocking one would stop both directions",
                ));
            }
        }
        self.step_nonblocking()
    }

    /// The sockets, in the order in which they were given.
    pub fn sockets(&self) -> (&A, &B) {
        (&self.a, &self.b)
    }

    /// Reports the activity so far.
    pub fn report(&self) -> ForwardReport {
        ForwardReport {
            a_to_b: self.a_to_b.direction_report().clone(),
            b_to_a: self.b_to_a.direction_report().clone(),
        }
    }

    fn step_nonblocking(&mut self) -> Result<Step, Error> {
        let a_to_b = self.a_to_b.advance(self.a.as_fd(), self.b.as_fd(), &self.pool);
        // Also after an error: a server that refuses an upload has answered before it closed the
        // connection.
        let b_to_a = self.b_to_a.advance(self.b.as_fd(), self.a.as_fd(), &self.pool);
        let (a_to_b, b_to_a) = (a_to_b?, b_to_a?);
        Ok(match (a_to_b.is_done(), b_to_a.is_done()) {
            (true, true) => Step::Done,
            _ if a_to_b.has_more || b_to_a.has_more => Step::Yield,
            _ => Step::Wait {
                from: Readiness { read: a_to_b.read, write: b_to_a.write },
                to: Readiness { read: b_to_a.read, write: a_to_b.write },
            },
        })
    }

    fn forward_nonblocking(&mut self) -> Result<(), Error> {
        loop {
            match self.step_nonblocking()? {
                Step::Done => return Ok(()),
                Step::Yield => {}
                Step::Wait { from, to } => wait([(self.a.as_fd(), from), (self.b.as_fd(), to)])?,
            }
        }
    }
}

impl ForwardPool {
    /// Creates a pool that keeps up to `idle_pipes_max` pipes, with [`ForwardSettings::default`]
    /// otherwise.
    pub fn new(idle_pipes_max: usize) -> Result<Self, Error> {
        Self::with(ForwardSettings { idle_pipes_max, ..ForwardSettings::default() })
    }

    /// Creates a pool whose forwarders have the given settings.
    pub fn with(settings: ForwardSettings) -> Result<Self, Error> {
        /// A buffer is in use only during a step, so at most one per thread is in use.
        const BUFFERS_MAX: usize = 4096;
        if settings.pipe_bytes == 0 || settings.buffer_bytes == 0 {
            return Err(Error::Unsuited("pipe_bytes and buffer_bytes must be at least 1"));
        }
        let buffers = BufferPool::new(settings.buffer_bytes, BUFFERS_MAX)?;
        let (pipes, process) = (Mutex::default(), fork::generation());
        Ok(Self(Arc::new(ForwardPoolInner { pipes, process, settings, buffers })))
    }

    /// The number of idle pipes.
    pub fn idle_pipes(&self) -> usize {
        self.pipes().map_or(0, |pipes| pipes.len())
    }

    fn acquire_pipe(&self) -> Result<Pipe, Error> {
        let idle = self.pipes().and_then(|mut pipes| pipes.pop());
        let create = || {
            Pipe::new(self.0.settings.pipe_bytes).map_err(|errno| failed(Call::Pipe)(errno.into()))
        };
        idle.map_or_else(create, Ok)
    }

    fn release_pipe(&self, pipe: Pipe) {
        let Some(mut pipes) = self.pipes() else { return };
        if pipe.held_bytes() == 0 && pipes.len() < self.0.settings.idle_pipes_max {
            pipes.push(pipe);
        }
    }

    /// The idle pipes of this process; `None` if they are not available in a forked child.
    fn pipes(&self) -> Option<MutexGuard<'_, Vec<Pipe>>> {
        if self.0.process == fork::generation() {
            return Some(self.0.pipes.lock().unwrap_or_else(PoisonError::into_inner));
        }
        // Another thread may have held the lock when the process was forked: then it stays locked.
        let mut pipes = match self.0.pipes.try_lock() {
            Ok(pipes) => pipes,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        pipes.retain(|pipe| !pipe.is_inherited());
        Some(pipes)
    }
}

/// Makes a socket non-blocking; returns the flags that it had.
fn make_nonblocking(socket: BorrowedFd<'_>) -> Result<OFlags, Error> {
    let failed = |errno: rustix::io::Errno| failed(Call::Fcntl)(errno.into());
    let flags = rustix::fs::fcntl_getfl(socket).map_err(failed)?;
    rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK).map_err(failed)?;
    Ok(flags)
}

/// Waits until one of the sockets is ready. A socket with nothing to wait for is left out: its
/// hang-up would wake every poll at once.
fn wait(sockets: [(BorrowedFd<'_>, Readiness); 2]) -> Result<(), Error> {
    let mut descriptors: Vec<PollFd<'_>> = sockets
        .iter()
        .filter(|(_, readiness)| *readiness != Readiness::default())
        .map(|(socket, readiness)| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, readiness.read);
            events.set(PollFlags::OUT, readiness.write);
            PollFd::from_borrowed_fd(*socket, events)
        })
        .collect();
    match rustix::event::poll(&mut descriptors, None) {
        Ok(_) => {
            let events =
                descriptors.iter().fold(PollFlags::empty(), |all, one| all | one.revents());
            if events == PollFlags::ERR {
                // Entries for another reader are in an error queue, and would wake every poll at
                // once.
                std::thread::sleep(ERROR_QUEUE_POLL_INTERVAL);
            }
            Ok(())
        }
        Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(failed(Call::Poll)(errno.into())),
    }
}
