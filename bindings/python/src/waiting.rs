//! Waits for sockets as Python does: with the GIL released, until the timeout of the socket object,
//! and interrupted by signals.

use crate::descriptor::{FOREVER_SECONDS, make_nonblocking};
use crate::error::os_error;
use pyo3::exceptions::{PyBlockingIOError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The pause before a socket is examined again that reports only unread completions.
pub const UNREAD_PAUSE: Duration = Duration::from_millis(1);

/// How long a call may wait.
#[derive(Debug, Clone, Copy)]
pub enum Patience {
    /// The socket object is non-blocking.
    Never,
    /// Until the timeout of the socket object.
    Until(Instant),
    /// The socket object is blocking.
    Forever,
}

impl Patience {
    /// The patience of a socket object, which begins now. An object without a timeout, such as the
    /// number of a descriptor, is blocking.
    pub fn of(object: &Bound<'_, PyAny>, socket: &OwnedFd) -> PyResult<Self> {
        if !object.hasattr("gettimeout")? {
            return Ok(Self::Forever);
        }
        let seconds: Option<f64> = object.call_method0("gettimeout")?.extract()?;
        Ok(match seconds {
            // The program made the socket blocking again.
            None => {
                make_nonblocking(object, socket)?;
                Self::Forever
            }
            Some(0.0) => Self::Never,
            Some(seconds) if seconds < FOREVER_SECONDS => {
                let time = Duration::try_from_secs_f64(seconds)
                    .map_err(|error| PyValueError::new_err(error.to_string()))?;
                Self::Until(Instant::now() + time)
            }
            Some(_) => Self::Forever,
        })
    }

    /// The time that is left; `None` for ever. An error if the time is over.
    fn left(self) -> PyResult<Option<Duration>> {
        match self {
            Self::Never => Err(PyBlockingIOError::new_err((
                Errno::AGAIN.raw_os_error(),
                "the socket would block",
            ))),
            Self::Forever => Ok(None),
            Self::Until(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(PyTimeoutError::new_err("timed out"));
                }
                Ok(Some(left))
            }
        }
    }
}

/// Waits until a socket has one of the events, and returns the events. Raises the exception of a
/// signal handler, such as `KeyboardInterrupt`.
pub fn wait(
    py: Python<'_>,
    socket: BorrowedFd<'_>,
    events: u16,
    patience: Patience,
) -> PyResult<u16> {
    let events = wait_for_any(py, &[(socket, events)], patience, None)?;
    Ok(events.first().copied().unwrap_or_default())
}

/// Waits until a socket is readable. Completions of loans raise `POLLERR`, which `poll` reports at
/// once each time, so an edge-triggered epoll set waits after that.
pub fn wait_until_readable(
    py: Python<'_>,
    socket: BorrowedFd<'_>,
    patience: Patience,
) -> PyResult<()> {
    let readable = PollFlags::IN | PollFlags::HUP | PollFlags::RDHUP;
    let events = wait(py, socket, PollFlags::IN.bits(), patience)?;
    if events & readable.bits() != 0 {
        return Ok(());
    }
    let failed = |errno: Errno| os_error(errno.into());
    let set = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
    let wanted = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
    epoll::add(&set, socket, EventData::new_u64(0), wanted).map_err(failed)?;
    loop {
        wait(py, set.as_fd(), PollFlags::IN.bits(), patience)?;
        let mut event = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        let now = Timespec::default();
        let count = epoll::wait(&set, &mut event, Some(&now)).or_else(|errno| match errno {
            Errno::INTR => Ok(0),
            errno => Err(failed(errno)),
        })?;
        let flags = event[0].flags;
        let is_over = flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP);
        if count > 0 && is_over {
            return Ok(());
        }
    }
}

/// Waits for a moment if completions are unread, because only another sender of the socket can read
/// these completions, and every poll reports them at once.
pub fn pause_before_unread_completions(py: Python<'_>, socket: BorrowedFd<'_>) -> PyResult<()> {
    let mut descriptors = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
    let now = Timespec::default();
    match rustix::event::poll(&mut descriptors, Some(&now)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(os_error(errno.into())),
    }
    if descriptors[0].revents() == PollFlags::ERR {
        py.detach(|| std::thread::sleep(UNREAD_PAUSE));
    }
    Ok(())
}

/// Waits until a socket has one of its events, or until `until`. Returns the events of each socket.
pub fn wait_for_any(
    py: Python<'_>,
    sockets: &[(BorrowedFd<'_>, u16)],
    patience: Patience,
    until: Option<Instant>,
) -> PyResult<Vec<u16>> {
    loop {
        let now = Instant::now();
        let until_left = until.map(|until| until.saturating_duration_since(now));
        let left = [patience.left()?, until_left].into_iter().flatten().min();
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let polled = py.detach(|| {
            let mut descriptors: Vec<_> = sockets
                .iter()
                .map(|(socket, events)| {
                    PollFd::from_borrowed_fd(*socket, PollFlags::from_bits_retain(*events))
                })
                .collect();
            rustix::event::poll(&mut descriptors, timeout.as_ref())
                .map(|count| (count, descriptors.iter().map(|one| one.revents().bits()).collect()))
        });
        match polled {
            Ok((count, events)) => {
                py.check_signals()?;
                if count > 0 || until.is_some_and(|until| until <= Instant::now()) {
                    return Ok(events);
                }
            }
            Err(Errno::INTR) => py.check_signals()?,
            Err(errno) => return Err(os_error(errno.into())),
        }
    }
}
