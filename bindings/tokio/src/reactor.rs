//! The events of a socket, by a private edge-triggered epoll set that tokio watches.

use crate::epoll_set;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use tokio::io::unix::AsyncFd;

/// What a task waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Bytes to receive, or the end of the stream.
    Read,
    /// Room to send.
    Write,
    /// Buffers that came back, or the error of the socket.
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
    epoll: AsyncFd<OwnedFd>,
    shared: Arc<Shared>,
    /// Wakes every task that waits, because tokio keeps one waker for all of them.
    waker: Waker,
}

#[derive(Debug, Default)]
struct Shared(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    ticks: [u64; DIRECTIONS],
    waiting: [Vec<Waker>; DIRECTIONS],
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an event of each of these directions, and wakes the tasks that wait for one.
    fn notify(&self, directions: &[Direction]) {
        let mut wakers = Vec::new();
        {
            let mut state = self.lock();
            for &direction in directions {
                state.ticks[direction as usize] += 1;
                wakers.append(&mut state.waiting[direction as usize]);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        waiting.into_iter().flatten().for_each(Waker::wake);
    }
}

impl Reactor {
    /// Watches a socket. Must be called in a tokio runtime.
    pub fn new(socket: &OwnedFd) -> io::Result<Self> {
        let set = epoll_set::create()?;
        let events = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(set.get_ref(), socket, EventData::new_u64(0), events)?;
        let shared = Arc::<Shared>::default();
        let waker = Waker::from(Arc::clone(&shared));
        Ok(Self { epoll: set, shared, waker })
    }

    /// The number of events of a direction so far.
    pub fn tick(&self, direction: Direction) -> Tick {
        Tick(self.shared.lock().ticks[direction as usize])
    }

    /// Counts an event that the socket does not report: a call took completions from the socket.
    pub fn notify(&self, direction: Direction) {
        self.shared.notify(&[direction]);
    }

    /// Waits for an event after `seen`. `on_error` is called when completions or the error of the
    /// socket arrived.
    pub fn poll_event(
        &self,
        context: &mut Context<'_>,
        direction: Direction,
        seen: Tick,
        on_error: impl Fn(),
    ) -> Poll<io::Result<()>> {
        {
            // Registered before the events are read, so that a task that reads them wakes this one.
            let waiting = &mut self.shared.lock().waiting[direction as usize];
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
        }
        loop {
            if self.tick(direction) != seen {
                return Poll::Ready(Ok(()));
            }
            let mut own_context = Context::from_waker(&self.waker);
            match self.epoll.poll_read_ready(&mut own_context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(mut ready)) => {
                    while let Some(flags) = self.read_event()? {
                        if flags.contains(EventFlags::ERR) {
                            on_error();
                        }
                        self.shared.notify(&directions_of(flags));
                    }
                    ready.clear_ready();
                }
            }
        }
    }

    /// The events that arrived since the latest call; `None` without an event.
    fn read_event(&self) -> io::Result<Option<EventFlags>> {
        loop {
            let mut buffer = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
            let now = rustix::event::Timespec::default();
            match epoll::wait(self.epoll.as_fd(), &mut buffer, Some(&now)) {
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
                Ok(0) => return Ok(None),
                Ok(_) => return Ok(Some(buffer[0].flags)),
            }
        }
    }
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
