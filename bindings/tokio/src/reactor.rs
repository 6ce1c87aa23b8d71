//! The events of a socket, by a private edge-triggered epoll set that tokio watches.

use crate::epoll_set;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::io::unix::AsyncFd;

/// What a task waits for. At most one task at a time waits for a direction, because the methods of
/// a half take the half by `&mut`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Bytes to receive, or the end of the stream.
    Read,
    /// Room to send.
    Write,
    /// Any buffer that came back, or the error of the socket.
    Completion,
}

const DIRECTIONS: usize = 3;

/// The number of events of a direction so far. A task reads the number before a call, and waits for
/// another number after a call that would block, so that no event in between is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick(u64);

/// The events of a socket.
#[derive(Debug)]
pub struct Reactor {
    set: AsyncFd<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ticks: [u64; DIRECTIONS],
    waiting: [Option<Waker>; DIRECTIONS],
    /// tokio does not watch the set any more, because the runtime ended.
    is_closed: bool,
}

impl Reactor {
    /// Watches a socket. Must be called in a tokio runtime.
    pub fn new(socket: &OwnedFd) -> io::Result<Self> {
        let set = epoll_set::create()?;
        let events = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(set.get_ref(), socket, EventData::new_u64(0), events)?;
        Ok(Self { set, state: Mutex::default() })
    }

    /// The number of events of a direction so far.
    pub fn tick(&self, direction: Direction) -> Tick {
        Tick(self.state().ticks[direction as usize])
    }

    /// Counts an event that the socket does not report: a call took completions from the socket.
    pub fn notify(&self, direction: Direction) {
        self.notify_all(&[direction]);
    }

    /// An error once the runtime ended, because no event arrives after that.
    pub fn check_open(&self) -> io::Result<()> {
        if self.state().is_closed { Err(runtime_ended()) } else { Ok(()) }
    }

    /// Waits for an event after `seen`.
    pub fn poll_event(
        &self,
        context: &mut Context<'_>,
        direction: Direction,
        seen: Tick,
    ) -> Poll<io::Result<()>> {
        // A waker may run code when it is cloned or dropped, so the lock is not held then.
        let waker = context.waker().clone();
        let mut state = self.state();
        if state.is_closed {
            return Poll::Ready(Err(runtime_ended()));
        }
        if state.ticks[direction as usize] != seen.0 {
            return Poll::Ready(Ok(()));
        }
        let former = state.waiting[direction as usize].replace(waker);
        drop(state);
        drop(former);
        Poll::Pending
    }

    /// Reads the events that arrived, and wakes the tasks that wait for the events. The next event
    /// wakes `waker`. Returns whether completions or the error of the socket arrived, or whether
    /// the runtime ended.
    pub fn read_events(&self, waker: &Waker) -> bool {
        let mut has_error = false;
        let mut context = Context::from_waker(waker);
        loop {
            // Outside of the budget of a task. Without a budget left, tokio would wake this waker
            // at once, without end.
            let ready = poll_fn(|context| self.set.poll_read_ready(context));
            let ready = pin!(tokio::task::coop::unconstrained(ready));
            let Poll::Ready(ready) = ready.poll(&mut context) else { return has_error };
            let Ok(mut ready) = ready else { return self.close() };
            loop {
                match self.read_event() {
                    Ok(Some(flags)) => {
                        has_error |= flags.contains(EventFlags::ERR);
                        self.notify_all(&directions_of(flags));
                    }
                    Ok(None) => break,
                    Err(_) => return self.close(),
                }
            }
            ready.clear_ready();
        }
    }

    /// Ends every wait. Returns true, because the tasks of the loans must be woken.
    fn close(&self) -> bool {
        self.state().is_closed = true;
        self.notify_all(&[Direction::Read, Direction::Write, Direction::Completion]);
        true
    }

    /// Counts an event of each of these directions, and wakes the tasks that wait for the event.
    fn notify_all(&self, directions: &[Direction]) {
        let mut wakers = [const { None }; DIRECTIONS];
        {
            let mut state = self.state();
            for &direction in directions {
                state.ticks[direction as usize] += 1;
                wakers[direction as usize] = state.waiting[direction as usize].take();
            }
        }
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events that arrived since the latest call; `None` without an event.
    fn read_event(&self) -> io::Result<Option<EventFlags>> {
        loop {
            let mut buffer = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
            let now = rustix::event::Timespec::default();
            match epoll::wait(self.set.as_fd(), &mut buffer, Some(&now)) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(0) => return Ok(None),
                Ok(_) => return Ok(Some(buffer[0].flags)),
            }
        }
    }
}

fn runtime_ended() -> io::Error {
    io::Error::other("the tokio runtime of this stream ended")
}

/// The directions that events belong to. The end of a connection ends all waits.
fn directions_of(flags: EventFlags) -> Vec<Direction> {
    let is_over = flags.contains(EventFlags::HUP);
    [
        (Direction::Read, EventFlags::IN | EventFlags::RDHUP),
        (Direction::Write, EventFlags::OUT),
        (Direction::Completion, EventFlags::ERR),
    ]
    .into_iter()
    .filter(|(_, wanted)| is_over || flags.intersects(*wanted))
    .map(|(direction, _)| direction)
    .collect()
}
