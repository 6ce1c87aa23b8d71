//! Two sockets joined: what comes from the one goes to the other, both ways, until both have ended.

use crate::buffer::Pool;
use crate::error::{Error, failed};
use crate::fallback::Fallback;
use crate::method::Counts;
use crate::pipe::{Pipe, SOCKET_PIPE_BYTES};
use crate::socket;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

mod direction;

use direction::Direction;

/// How often a socket is looked at whose error queue nobody empties.
const ERROR_QUEUE_INTERVAL: Duration = Duration::from_millis(1);

/// Joins two connected stream sockets.
///
/// Each direction begins by copying and splices once what comes is large: small messages cost less to copy
/// than to pass through a pipe. It goes back when they become small again. When one side has ended its stream,
/// everything that was on its way is delivered, then the other side's is ended too; the opposite direction goes
/// on (half-close).
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
    from: A,
    to: B,
    there: Direction,
    back: Direction,
    pool: ForwardPool,
}

/// Pipes and buffers for many forwarders, which hold them only while they need them.
///
/// Its clones are the same pool. A pipe comes back only when it is empty, so that no connection ever sees
/// another's bytes; one that is not is closed.
#[derive(Debug, Clone)]
pub struct ForwardPool(Arc<Stock>);

#[derive(Debug)]
struct Stock {
    pipes: Mutex<Vec<Pipe>>,
    settings: ForwardSettings,
    buffers: Pool,
}

/// How forwarders are to work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardSettings {
    /// By which way.
    pub way: ForwardMethod,
    /// How many pipes are kept at hand. Each takes two descriptors.
    pub idle_pipes_max: usize,
    /// What a pipe is to hold. An ordinary user may have 64 MiB of pipes in all (`fs.pipe-user-pages-soft`).
    pub pipe_bytes: usize,
    /// What is copied at a time.
    pub buffer_bytes: usize,
}

/// By which way a forwarder moves what comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardMethod {
    /// Copies what is small and splices what is large.
    Adaptive,
    /// Copies everything.
    Copy,
    /// Splices everything, where that works.
    Splice,
}

impl Default for ForwardSettings {
    /// Adaptive; pipes of 256 KiB, of which an ordinary user may have 256; copies of 16 KiB.
    fn default() -> Self {
        Self {
            way: ForwardMethod::Adaptive,
            idle_pipes_max: 2,
            pipe_bytes: SOCKET_PIPE_BYTES,
            buffer_bytes: direction::BUFFER_BYTES,
        }
    }
}

/// What a socket must be ready for before a forwarder can go on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Something can be read, or its stream has ended.
    pub read: bool,
    /// Something can be written.
    pub write: bool,
}

/// How far a step came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Nothing more can be moved until one of the sockets is ready.
    Wait {
        /// What the first socket must be ready for.
        from: Readiness,
        /// What the second must be.
        to: Readiness,
    },
    /// As much was moved as one connection should in a turn: there may be more to do.
    Again,
    /// Both sides have ended.
    Done,
}

/// What a forwarder has moved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardReport {
    /// From the first socket to the second.
    pub there: DirectionReport,
    /// From the second to the first.
    pub back: DirectionReport,
}

/// What one direction has moved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectionReport {
    /// Through a pipe.
    pub spliced: Counts,
    /// Through a buffer.
    pub copied: Counts,
    /// How often it changed from the one to the other.
    pub changes: u64,
    /// Every step down, in order.
    pub fallbacks: Vec<Fallback>,
}

impl<A: AsFd, B: AsFd> Forwarder<A, B> {
    /// A forwarder with a pool of its own.
    pub fn new(from: A, to: B) -> Result<Self, Error> {
        Self::with_pool(from, to, ForwardPool::new(2)?)
    }

    /// A forwarder that shares its pool with others.
    pub fn with_pool(from: A, to: B, pool: ForwardPool) -> Result<Self, Error> {
        for socket in [from.as_fd(), to.as_fd()] {
            socket::must_be_stream(socket::kind(socket)?)?;
        }
        let way = pool.0.settings.way;
        Ok(Self { from, to, there: Direction::new(way), back: Direction::new(way), pool })
    }

    /// Forwards until both sides have ended. Both sockets are non-blocking meanwhile.
    ///
    /// An error ends it: what was on its way then is lost with the connection, as in the network. Two sides that are
    /// silent are waited for as long as they are: give the sockets keep-alive or `TCP_USER_TIMEOUT`, or poll and
    /// [`Forwarder::step`] by a clock of your own.
    pub fn forward(&mut self) -> Result<(), Error> {
        let from_mode = make_nonblocking(self.from.as_fd())?;
        let to_mode = make_nonblocking(self.to.as_fd());
        let forwarded = to_mode.as_ref().map_or(Ok(()), |_| self.forward_nonblocking());
        // In the opposite order, so that two descriptors of one socket end as they began. A socket that is gone needs
        // no mode.
        if let Ok(mode) = &to_mode {
            let _ = rustix::fs::fcntl_setfl(&self.to, *mode);
        }
        let _ = rustix::fs::fcntl_setfl(&self.from, from_mode);
        to_mode.and(forwarded)
    }

    /// Moves what can be moved now; for sockets that are non-blocking and polled by the caller.
    pub fn step(&mut self) -> Result<Step, Error> {
        for socket in [self.from.as_fd(), self.to.as_fd()] {
            let flags =
                rustix::fs::fcntl_getfl(socket).map_err(|errno| failed("fcntl")(errno.into()))?;
            if !flags.contains(OFlags::NONBLOCK) {
                return Err(Error::Unsuited(
                    "a step needs non-blocking sockets: one would wait for the other",
                ));
            }
        }
        self.step_nonblocking()
    }

    /// The sockets, in the order they were given in.
    pub fn sockets(&self) -> (&A, &B) {
        (&self.from, &self.to)
    }

    /// What has been moved so far.
    pub fn report(&self) -> ForwardReport {
        ForwardReport { there: self.there.report().clone(), back: self.back.report().clone() }
    }

    fn step_nonblocking(&mut self) -> Result<Step, Error> {
        let there = self.there.advance(self.from.as_fd(), self.to.as_fd(), &self.pool);
        // Also after an error: a server that refuses an upload has answered before it hung up.
        let back = self.back.advance(self.to.as_fd(), self.from.as_fd(), &self.pool);
        let (there, back) = (there?, back?);
        Ok(match (there.is_done(), back.is_done()) {
            (true, true) => Step::Done,
            _ if there.has_more || back.has_more => Step::Again,
            _ => Step::Wait {
                from: Readiness { read: there.read, write: back.write },
                to: Readiness { read: back.read, write: there.write },
            },
        })
    }

    fn forward_nonblocking(&mut self) -> Result<(), Error> {
        loop {
            match self.step_nonblocking()? {
                Step::Done => return Ok(()),
                Step::Again => {}
                Step::Wait { from, to } => {
                    wait([(self.from.as_fd(), from), (self.to.as_fd(), to)])?
                }
            }
        }
    }
}

impl ForwardPool {
    /// A pool that keeps up to `idle_pipes_max` pipes at hand, with [`ForwardSettings::default`] otherwise.
    pub fn new(idle_pipes_max: usize) -> Result<Self, Error> {
        Self::with(ForwardSettings { idle_pipes_max, ..ForwardSettings::default() })
    }

    /// A pool whose forwarders work as told.
    pub fn with(settings: ForwardSettings) -> Result<Self, Error> {
        /// A buffer is in use only during a step, so there are as many as threads.
        const BUFFERS_MAX: usize = 4096;
        if settings.pipe_bytes == 0 || settings.buffer_bytes == 0 {
            return Err(Error::Unsuited("a pipe and a buffer hold at least a byte"));
        }
        let buffers = Pool::new(settings.buffer_bytes, BUFFERS_MAX)?;
        Ok(Self(Arc::new(Stock { pipes: Mutex::default(), settings, buffers })))
    }

    /// How many pipes lie idle.
    pub fn idle_pipes(&self) -> usize {
        self.pipes().len()
    }

    fn take_pipe(&self) -> Result<Pipe, Error> {
        let idle = self.pipes().pop();
        let fresh =
            || Pipe::new(self.0.settings.pipe_bytes).map_err(|errno| failed("pipe2")(errno.into()));
        idle.map_or_else(fresh, Ok)
    }

    fn put_pipe(&self, pipe: Pipe) {
        let mut pipes = self.pipes();
        if pipe.held_bytes() == 0 && pipes.len() < self.0.settings.idle_pipes_max {
            pipes.push(pipe);
        }
    }

    fn pipes(&self) -> std::sync::MutexGuard<'_, Vec<Pipe>> {
        self.0.pipes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a socket non-blocking; returns the mode it had.
fn make_nonblocking(socket: BorrowedFd<'_>) -> Result<OFlags, Error> {
    let failed = |errno: rustix::io::Errno| failed("fcntl")(errno.into());
    let mode = rustix::fs::fcntl_getfl(socket).map_err(failed)?;
    rustix::fs::fcntl_setfl(socket, mode | OFlags::NONBLOCK).map_err(failed)?;
    Ok(mode)
}

/// Waits until one of the sockets is ready for what it is waited for. One that is waited for nothing is left
/// out: its hang-up would wake for ever.
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
                // Notices for somebody else wait in an error queue, and would wake us for ever.
                std::thread::sleep(ERROR_QUEUE_INTERVAL);
            }
            Ok(())
        }
        Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(failed("poll")(errno.into())),
    }
}
