//! One event loop: a thread that accepts, reads and sends, and shares nothing with the others on its way.
//!
//! Events are edges: a socket is registered once and for all, and its connection remembers what it was told.
//! A turn of the loop first hears those who have something to say, then has their responses ready, and then sends these one right after the
//! other: packets that leave so interrupt whoever takes them less often. Short responses come first, and are even held back in their sockets
//! until all of them are there: so they leave even closer together.

use crate::event_loop::connection::{Connection, NEVER, Next};
use crate::event_loop::context::{Context, EVENTS_MAX};
use crate::event_loop::helper::{Asker, Inbox, Question};
use crate::event_loop::listen::Listener;
use crate::event_loop::wake::Wake;
use crate::log::FLUSHED_EVERY;
use crate::secrets::Secrets;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::warn;

/// Connections accepted before those there are have their turn.
const ACCEPTS_MAX: usize = 64;
/// What is short is said so often, and not each time that somebody meets it.
const SAID_EVERY_SECONDS: u32 = 60;
/// Tokens from here on are no connections'.
const WAKE: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1_000_000;

/// What all loops are told from outside.
#[derive(Debug, Default)]
pub struct Orders {
    /// Finish what is under way and end.
    pub drain: AtomicBool,
    /// The certificate and the passwords that are good from now on.
    pub secrets: Mutex<Secrets>,
}

/// An event loop.
#[derive(Debug)]
pub struct Worker {
    epoll: OwnedFd,
    listeners: Vec<Listener>,
    wake: Arc<Wake>,
    inbox: Arc<Inbox>,
    asker: Asker,
    orders: Arc<Orders>,
    context: Context,
    connections: Slab<Place>,
    connections_max: usize,
    /// Tells a connection from one that had its place before.
    generation: u32,
    /// Connections that wait for their turn.
    runnable: VecDeque<u64>,
    is_accepting: bool,
    drain_until: Option<Instant>,
    swept: u32,
    shortage: Seldom,
    lost_lines: Seldom,
    /// Turns that connections have had.
    turns: u64,
}

/// A connection's place in the table.
#[derive(Debug)]
struct Place {
    connection: Box<Connection>,
    generation: u32,
    /// When its time is over, by the loop's clock in seconds.
    deadline: u32,
    /// When it was last driven, counted in turns of all connections: who was driven least lately is idle the longest.
    driven: u64,
    is_runnable: bool,
}

/// Something that may happen often and is said seldom.
#[derive(Debug, Default)]
struct Seldom {
    said: Option<u32>,
}

impl Seldom {
    /// Whether it is time to say it again; it is taken to be said then.
    fn is_to_be_said(&mut self, now: u32) -> bool {
        let is_due = self.said.is_none_or(|said| now.saturating_sub(said) >= SAID_EVERY_SECONDS);
        if is_due {
            self.said = Some(now);
        }
        is_due
    }
}

impl Worker {
    /// A loop that waits at these sockets.
    pub fn new(
        listeners: Vec<Listener>,
        wake: Arc<Wake>,
        inbox: Arc<Inbox>,
        asker: Asker,
        orders: Arc<Orders>,
        context: Context,
        connections_max: usize,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let mut worker = Self {
            epoll,
            listeners,
            wake,
            inbox,
            asker,
            orders,
            context,
            connections: Slab::new(),
            connections_max,
            generation: 0,
            runnable: VecDeque::new(),
            is_accepting: false,
            drain_until: None,
            swept: 0,
            shortage: Seldom::default(),
            lost_lines: Seldom::default(),
            turns: 0,
        };
        worker.accept_again()?;
        Ok(worker)
    }

    /// Runs until it has been told to end and has nothing under way.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            let timeout = if self.runnable.is_empty() { FLUSHED_EVERY } else { Duration::ZERO };
            let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: 0 };
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            self.context.clock.tick();
            self.context.moment.end();
            for event in &events {
                self.hear(event);
            }
            let mut short = 0;
            for index in 0..events.len() {
                if self.make_ready(&events[index]) {
                    events.swap(short, index);
                    short += 1;
                }
            }
            let (short, others) = events.split_at(short);
            self.send_together(short);
            for event in others {
                self.respond_to(event);
            }
            for _ in 0..self.runnable.len() {
                if let Some(token) = self.runnable.pop_front() {
                    self.run_again(token);
                }
            }
            self.sweep();
            if self
                .drain_until
                .is_some_and(|until| self.connections.is_empty() || Instant::now() >= until)
            {
                let open = self.connections.len();
                if open > 0 {
                    warn!(open, "the time to end is over: connections that are cut off: {open}");
                }
                let indices: Vec<_> = self.connections.iter().map(|(index, _)| index).collect();
                for index in indices {
                    self.close(index);
                }
                // Its owner may still read how many lines nobody wrote in time.
                self.context.counters.log_dropped.add(self.context.log.flush());
                return Ok(());
            }
        }
    }

    /// Has a connection note what has become of its socket, and receive a request where it waits for one.
    fn hear(&mut self, event: &Event) {
        let Some((connection, context)) = self.connection(event.data.u64()) else { return };
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        let not_only_data = ends | EventFlags::PRI;
        let flags = event.flags;
        if flags.intersects(EventFlags::IN | not_only_data) {
            connection.became_readable(flags.intersects(not_only_data));
            connection.read_ahead(context);
        }
    }

    /// Has a connection understand what was heard, so that sending the response is all that is left; true where that is a short one.
    fn make_ready(&mut self, event: &Event) -> bool {
        let token = event.data.u64();
        let Some((connection, context)) = self.connection(token) else { return false };
        if let Some(next) = connection.make_ready(context) {
            self.obey(token, next);
            return false;
        }
        connection.is_ready_and_short()
    }

    /// Sends short responses. Nothing else may come in between: those that are held back would wait for it.
    fn send_together(&mut self, events: &[Event]) {
        self.context.holds = events.len() > 1;
        for event in events {
            self.drive(event.data.u64());
        }
        self.context.holds = false;
        for event in events {
            if let Some((connection, context)) = self.connection(event.data.u64()) {
                connection.release(context);
            }
        }
    }

    fn respond_to(&mut self, event: &Event) {
        match event.data.u64() {
            WAKE => self.woken(),
            token if token >= LISTENER => {
                self.accept((token - LISTENER) as usize);
            }
            token => {
                if self.connection(token).is_some_and(|(connection, _)| !connection.is_at_disk()) {
                    self.drive(token);
                }
            }
        }
    }

    fn woken(&mut self) {
        self.wake.clear();
        // A helper may just have put a file in its place, and behind what it replies to a client may have asked for one.
        self.context.moment.end();
        for (token, reply) in self.inbox.take() {
            if let Some((connection, _)) = self.connection(token) {
                connection.disk_replied(reply);
                self.drive(token);
            }
        }
        let secrets = self.orders.secrets.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.context.renew(secrets);
        if self.orders.drain.load(Relaxed) && self.drain_until.is_none() {
            self.begin_to_drain();
        }
    }

    fn begin_to_drain(&mut self) {
        self.drain_until = Some(Instant::now() + self.context.limits.drain_timeout);
        // Whoever has connected already is still answered.
        for index in 0..self.listeners.len() {
            while self.accept(index) {}
        }
        self.context.is_draining = true;
        self.stop_accepting();
        self.listeners.clear();
        let tokens: Vec<_> =
            self.connections.iter().map(|(index, place)| token(index, place.generation)).collect();
        for token in tokens {
            if let Some((connection, _)) =
                self.connection(token).filter(|(connection, _)| connection.is_idle())
            {
                // What it was asked and has not heard of yet is still answered.
                connection.became_readable(false);
                self.drive(token);
            }
        }
    }

    /// Accepts some of those who wait; false where nobody does any more.
    fn accept(&mut self, index: usize) -> bool {
        for _ in 0..ACCEPTS_MAX {
            let is_full = self.connections.len() >= self.connections_max;
            let crowded_out = if is_full { self.longest_idle() } else { None };
            if is_full && crowded_out.is_none() {
                self.stop_accepting();
                return false;
            }
            let Some(listener) = self.listeners.get(index) else { return false };
            match listener.accept() {
                Ok(Some(accepted)) => {
                    self.context.counters.accepted.add(1);
                    if let Some(index) = crowded_out {
                        self.crowd_out(index);
                    }
                    if let Some(rate) = self.context.limits.rate_bytes_per_second {
                        // A Unix socket has no rate; what is not limited is not lost.
                        let _ = haul_sys::sockopt::set_max_pacing_rate(&accepted.socket, rate);
                    }
                    if let Ok(connection) = Connection::new(accepted, &self.context) {
                        self.add(connection);
                    }
                }
                Ok(None) => return false,
                // No descriptors, no memory: let go of what is only kept, and go on when there may be some.
                Err(error) if is_shortage(&error) => {
                    self.context.cache.clear();
                    let now = self.context.clock.seconds();
                    if self.shortage.is_to_be_said(now) {
                        let open = self.connections.len();
                        warn!(open, %error, "no room for another connection beside {open}: {error}");
                    }
                    let Some(index) = self.longest_idle() else {
                        self.stop_accepting();
                        return false;
                    };
                    self.crowd_out(index);
                }
                // What befell that one connection on its way is none of the others' business.
                Err(_) => {}
            }
        }
        true
    }

    fn add(&mut self, connection: Connection) {
        // 31 bits, so that no connection's token is as large as a listener's.
        self.generation = (self.generation + 1) & (u32::MAX >> 1);
        let generation = self.generation;
        let entry = self.connections.vacant_entry();
        let token = token(entry.key(), generation);
        let flags =
            EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::PRI | EventFlags::ET;
        if epoll::add(&self.epoll, connection.stream(), EventData::new_u64(token), flags).is_err() {
            return;
        }
        let connection = Box::new(connection);
        entry.insert(Place {
            connection,
            generation,
            deadline: NEVER,
            driven: 0,
            is_runnable: false,
        });
        self.context.counters.open.add(1);
        self.drive(token);
    }

    fn longest_idle(&self) -> Option<usize> {
        let idle = self.connections.iter().filter(|(_, place)| place.connection.is_idle());
        idle.min_by_key(|(_, place)| place.driven).map(|(index, _)| index)
    }

    /// Ends an idle connection to make room for another.
    fn crowd_out(&mut self, index: usize) {
        self.context.counters.crowded_out.add(1);
        self.close(index);
    }

    fn accept_again(&mut self) -> io::Result<()> {
        for (index, listener) in self.listeners.iter().enumerate() {
            let exclusive =
                if listener.is_shared { EventFlags::EXCLUSIVE } else { EventFlags::empty() };
            let data = EventData::new_u64(LISTENER + index as u64);
            epoll::add(&self.epoll, listener, data, EventFlags::IN | exclusive)?;
        }
        self.is_accepting = true;
        Ok(())
    }

    fn stop_accepting(&mut self) {
        if std::mem::take(&mut self.is_accepting) {
            for listener in &self.listeners {
                // It is registered: nothing else can fail.
                let _ = epoll::delete(&self.epoll, listener.as_fd());
            }
        }
    }

    fn run_again(&mut self, token: u64) {
        if let Some(place) = self.place(token) {
            place.is_runnable = false;
            self.drive(token);
        }
    }

    fn drive(&mut self, token: u64) {
        let Some((connection, context)) = self.connection(token) else { return };
        let next = connection.drive(context);
        self.obey(token, next);
    }

    fn obey(&mut self, token: u64, next: Next) {
        self.turns += 1;
        let turns = self.turns;
        let Some(place) = self.place(token) else { return };
        place.driven = turns;
        match next {
            Next::Event(until) => place.deadline = until,
            Next::Turn => {
                place.deadline = NEVER;
                if !std::mem::replace(&mut place.is_runnable, true) {
                    self.runnable.push_back(token);
                }
            }
            Next::Disk(question) => {
                place.deadline = NEVER;
                self.context
                    .counters
                    .disk_waits
                    .add(u64::from(!matches!(question, Question::Try(_))));
                self.asker.ask(token, question);
            }
            Next::Close => self.close(index(token)),
        }
    }

    fn close(&mut self, index: usize) {
        if let Some(place) = self.connections.try_remove(index) {
            place.connection.close(&mut self.context);
            self.context.counters.open.subtract(1);
        }
        self.resume_accepting();
    }

    /// Accepts again after a shortage, which may be over.
    fn resume_accepting(&mut self) {
        if !self.is_accepting && self.drain_until.is_none() && self.accept_again().is_err() {
            // Half of it would be nobody's: the next second will tell.
            self.is_accepting = true;
            self.stop_accepting();
        }
    }

    /// Once a second: whose time is over, and what the log has.
    fn sweep(&mut self) {
        let now = self.context.clock.seconds();
        if now == self.swept {
            return;
        }
        self.swept = now;
        // Others may have been the ones who held what was short.
        self.resume_accepting();
        self.context.cache.age(now);
        let dropped = self.context.log.flush();
        self.context.counters.log_dropped.add(dropped);
        if dropped > 0 && self.lost_lines.is_to_be_said(now) {
            warn!(
                dropped,
                "lines of the access log that were dropped, because they are not written fast enough: {dropped}"
            );
        }
        let expired = self.connections.iter().filter(|(_, place)| place.deadline <= now);
        let expired: Vec<_> =
            expired.map(|(index, place)| token(index, place.generation)).collect();
        for token in expired {
            let Some((connection, context)) = self.connection(token) else { continue };
            context.counters.timed_out.add(u64::from(!connection.is_idle()));
            let next = connection.expire(context);
            self.obey(token, next);
        }
    }

    fn place(&mut self, token: u64) -> Option<&mut Place> {
        self.connections.get_mut(index(token)).filter(|place| place.generation == generation(token))
    }

    /// A connection, if it is still there, and what it is lent.
    fn connection(&mut self, token: u64) -> Option<(&mut Connection, &mut Context)> {
        let place = self.connections.get_mut(index(token))?;
        (place.generation == generation(token))
            .then_some((&mut *place.connection, &mut self.context))
    }
}

/// Whether the machine, or this process, lacks what another connection needs.
fn is_shortage(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
    )
}

fn token(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 32 | index as u64
}

fn index(token: u64) -> usize {
    (token & u64::from(u32::MAX)) as usize
}

fn generation(token: u64) -> u32 {
    (token >> 32) as u32
}
