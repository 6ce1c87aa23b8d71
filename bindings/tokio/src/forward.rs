//! [`forward`]: joins two sockets.

use crate::epoll_set;
use haul::{ForwardPool, ForwardReport, Forwarder, Readiness, Step};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;

/// Forwards bytes in both directions until both streams ended: spliced, or copied where copies are
/// cheaper. The limits of [`haul::ForwardSettings`] hold, which the pool has.
///
/// After an error, and if the future is dropped, both connections are reset, so that no peer takes
/// a truncated stream for a whole one.
pub async fn forward(
    a: impl Into<OwnedFd>,
    b: impl Into<OwnedFd>,
    pool: ForwardPool,
) -> io::Result<ForwardReport> {
    let (a, b) = (a.into(), b.into());
    for socket in [&a, &b] {
        let flags = rustix::fs::fcntl_getfl(socket)?;
        rustix::fs::fcntl_setfl(socket, flags | rustix::fs::OFlags::NONBLOCK)?;
    }
    let mut connection = ResetOnDrop(Some(Forwarder::with_pool(a, b, pool)?));
    let mut events = Events::new(connection.forwarder()?)?;
    let both = Readiness { read: true, write: true };
    let mut ready = [both, both];
    loop {
        // Sockets that are always ready must not keep the thread from other tasks.
        tokio::task::consume_budget().await;
        let forwarder = connection.forwarder()?;
        match forwarder.step_ready(ready[0], ready[1])? {
            Step::Done => {
                let report = forwarder.report();
                // Both streams ended, so the sockets are closed as usual.
                connection.0 = None;
                return Ok(report);
            }
            Step::Yield => {
                ready = [both, both];
                tokio::task::yield_now().await;
            }
            Step::Wait { a, b } => {
                let deadline = forwarder.deadline();
                ready = events.wait(forwarder, [a, b], deadline).await?;
            }
        }
    }
}

/// A forwarder whose connections are reset unless it finished.
struct ResetOnDrop(Option<Forwarder<OwnedFd, OwnedFd>>);

impl ResetOnDrop {
    fn forwarder(&mut self) -> io::Result<&mut Forwarder<OwnedFd, OwnedFd>> {
        self.0.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        if let Some(forwarder) = self.0.take() {
            forwarder.abort();
        }
    }
}

/// The pause before a socket is examined again that reports only an error, which no step took. An
/// error queue that another part of the program filled reports an error for ever.
const ERROR_PAUSE: Duration = Duration::from_millis(1);

/// The events of both sockets, by a private level-triggered epoll set. A step ends before the
/// kernel reported that nothing more can be received, so edges would be lost.
struct Events {
    set: AsyncFd<OwnedFd>,
    /// The events that the set has for each socket; `None` after the socket left the set.
    wanted: [Option<EventFlags>; 2],
}

impl Events {
    fn new(forwarder: &Forwarder<OwnedFd, OwnedFd>) -> io::Result<Self> {
        let set = epoll_set::create()?;
        let (a, b) = forwarder.sockets();
        for (number, socket) in [a, b].into_iter().enumerate() {
            let data = EventData::new_u64(number as u64);
            epoll::add(set.get_ref(), socket, data, EventFlags::empty())?;
        }
        Ok(Self { set, wanted: [Some(EventFlags::empty()); 2] })
    }

    /// Waits until one of the sockets has one of its events, or until the deadline.
    ///
    /// A socket without wants stays in the set, so that its failure is noticed. It leaves the set
    /// after its first hang-up, which would wake every wait.
    async fn wait(
        &mut self,
        forwarder: &Forwarder<OwnedFd, OwnedFd>,
        wants: [Readiness; 2],
        deadline: Option<Instant>,
    ) -> io::Result<[Readiness; 2]> {
        let (a, b) = forwarder.sockets();
        for (number, (socket, wants)) in [a, b].into_iter().zip(wants).enumerate() {
            let flags = EventFlags::from_bits_retain(u32::from(wants.poll_events()));
            let data = EventData::new_u64(number as u64);
            match self.wanted[number] {
                Some(wanted) if wanted == flags => {}
                Some(_) => epoll::modify(self.set.get_ref(), socket, data, flags)?,
                None if flags.is_empty() => continue,
                None => epoll::add(self.set.get_ref(), socket, data, flags)?,
            }
            self.wanted[number] = Some(flags);
        }
        loop {
            if let Some(ready) = self.read([a, b])? {
                return Ok(ready);
            }
            let readable = self.set.readable();
            let mut guard = match deadline {
                None => readable.await?,
                Some(deadline) => match tokio::time::timeout_at(deadline.into(), readable).await {
                    Ok(guard) => guard?,
                    // The next step returns the error of the limit.
                    Err(_) => return Ok([Readiness::default(); 2]),
                },
            };
            let event = self.set_events()?;
            if event.is_empty() {
                guard.clear_ready();
                continue;
            }
            drop(guard);
            let is_error = event.iter().all(|(flags, _)| *flags == EventFlags::ERR);
            let ready = self.take(&event, [a, b])?;
            if is_error {
                tokio::time::sleep(ERROR_PAUSE).await;
            }
            return Ok(ready);
        }
    }

    /// The readiness of both sockets; `None` without an event.
    fn read(&mut self, sockets: [&OwnedFd; 2]) -> io::Result<Option<[Readiness; 2]>> {
        let events = self.set_events()?;
        let is_error = events.iter().all(|(flags, _)| *flags == EventFlags::ERR);
        // An error alone is waited for, with a pause.
        if is_error { Ok(None) } else { self.take(&events, sockets).map(Some) }
    }

    /// The events of the set, with the numbers of their sockets.
    fn set_events(&self) -> io::Result<Vec<(EventFlags, usize)>> {
        let empty = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut buffer = [empty; 2];
        let now = rustix::event::Timespec::default();
        let count = match epoll::wait(self.set.as_fd(), &mut buffer, Some(&now)) {
            Err(Errno::INTR) => 0,
            result => result?,
        };
        let event = |event: &Event| {
            let (flags, data) = (event.flags, event.data);
            (flags, usize::from(data.u64() != 0))
        };
        Ok(buffer[..count].iter().map(event).collect())
    }

    /// The readiness by events. A socket without wants leaves the set after a hang-up.
    fn take(
        &mut self,
        events: &[(EventFlags, usize)],
        sockets: [&OwnedFd; 2],
    ) -> io::Result<[Readiness; 2]> {
        let mut ready = [Readiness::default(); 2];
        for &(flags, number) in events {
            let bits = u16::try_from(flags.bits() & 0xffff).unwrap_or_default();
            ready[number] = Readiness::from_poll_events(bits);
            let has_wants = self.wanted[number].is_some_and(|wanted| !wanted.is_empty());
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) && !has_wants {
                epoll::delete(self.set.get_ref(), sockets[number])?;
                self.wanted[number] = None;
            }
        }
        Ok(ready)
    }
}
