//! The event loop: one thread that accepts, receives and sends, and shares nothing with other loops
//! while it does.
//!
//! Events are edge-triggered: each is reported once, and the handler remembers the readiness of its
//! sockets. The handler may leave out some events for a while ([`Context::set_interest`]), or all
//! events ([`Context::unregister`]).
//! Each turn has five phases over the events that epoll returned, so that packets leave close
//! together and share interrupts at the receiver:
//!
//! 1. *receive*: every ready connection receives ([`Handler::receive`]).
//! 2. *prepare*: every connection makes its response ([`Handler::prepare`]).
//! 3. *send*: small responses first, held in their sockets, then large responses
//!    ([`Handler::drive`]) until the time of the turn is over. The responses that are left have
//!    their turn after new requests were received.
//! 4. *flush*: the held segments leave together ([`Handler::flush`]).
//! 5. *close*: connections that ended close their sockets ([`Handler::close`]). A close takes
//!    several microseconds, so a packet between two closes would leave alone.
//!
//! The loop owns registration, deadlines, turns, eviction and draining; the [`Handler`] owns the
//! bytes. A connection may have two sockets (a proxy's client and upstream); see [`Context`].

mod admission;
mod handler;
mod handover;
mod settings;

pub use handler::{Action, Context, Handler, Interest, NEVER, Prepared, Readiness, Side, Tail};
pub use handover::{Adopted, Handover};
pub use settings::LoopSettings;

use crate::admission::eviction::{Activity, VictimsByClaim};
use crate::admission::network::{Network, NetworkCounts, NetworkPermit};
use crate::admission::pending_headers::UnnamedConnections;
use crate::admission::placement::{Membership, Place};
use crate::admission::waiting_room::WaitingRoom;
use crate::clock::Clock;
use crate::control::{Control, DrainState};
use crate::error::Error;
use crate::listener::Listener;
use crate::offload::{Inbox, Offload, OffloadQueue};
use crate::waker::Waker;
use admission::ACCEPTS_MAX;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// Events of one turn. More events send more responses together, let the first response wait longer
/// and need more memory. 512 gained nothing over 128.
pub const EVENTS_MAX: usize = 128;
/// Time that a turn spends on large responses before it looks for new requests, and time for
/// responses that waited. A MiB of a large response takes about this time, so a small response
/// waits for at most two MiB, however many large responses begin at once.
const SENDS_TIME_MAX: Duration = Duration::from_micros(100);
/// Rounds of [`EventLoop::accept`] for the connections that waited when a drain began. The rounds
/// suffice for the longest queue of the kernel.
const DRAIN_ROUNDS_MAX: usize = 65_536 / ACCEPTS_MAX;
/// Tokens from here on do not belong to connections.
const WAKER: u64 = u64::MAX;
const LISTENERS: u64 = u64::MAX - 1_000_000;
/// Tokens of connections whose client is not named yet. The tokens of other connections are below.
const UNNAMED: u64 = 1 << 63;

/// An event loop.
#[derive(Debug)]
pub struct EventLoop<H: Handover> {
    _membership: Option<Membership>,
    /// The number of the loop in the service.
    index: usize,
    epoll: OwnedFd,
    listeners: Vec<Listener>,
    waker: Arc<Waker>,
    offload: OffloadQueue<H::Job>,
    control: Arc<Control>,
    settings: LoopSettings,
    handler: H,
    connections: Slab<Entry<H::Connection>>,
    /// The number of connections of each network.
    networks: NetworkCounts,
    /// Connections of proxies that did not name their client yet.
    unnamed: UnnamedConnections,
    /// Accepted connections that wait for a place.
    waiting: WaitingRoom,
    /// The time from which on more waiting connections may get a place.
    admits_at: Instant,
    /// Whether a place was still free when the last waiting connection got a place.
    has_place: bool,
    /// The time at which a waiting connection got a place, or was tried for the last time.
    progressed_at: Instant,
    /// Tells a connection from an earlier one with the same index.
    generation: u32,
    /// Connections that wait for their turn.
    runnable: VecDeque<u64>,
    /// Connections that ended in this turn, and are not closed yet.
    ended: Vec<Entry<H::Connection>>,
    is_accepting: bool,
    drain: Option<Drain>,
    /// Whether idle connections have to close. Connections that waited to be accepted when the
    /// drain began are accepted before.
    is_draining: bool,
    clock: Clock,
    swept_at_seconds: u32,
    /// Turns of all connections so far.
    turns: u64,
    victims: VictimsByClaim,
}

/// The drain of an event loop.
#[derive(Debug, Clone, Copy)]
struct Drain {
    /// The end of the drain timeout.
    until: Instant,
    /// Whether the drain may end while the loop continues ([`Control::resume`]).
    is_resumable: bool,
}

/// A connection in the table.
#[derive(Debug)]
struct Entry<C> {
    connection: Box<C>,
    generation: u32,
    /// `None` for a Unix socket.
    network: Option<Network>,
    /// Held until the connection ends.
    permit: Option<NetworkPermit>,
    /// Held until its socket is closed.
    _place: Option<Place>,
    /// In seconds of the loop's clock.
    deadline: u32,
    /// [`EventLoop::turns`] at the connection's latest turn.
    latest_turn: u64,
    /// The second of the loop's clock at the connection's latest turn.
    latest_turn_at_seconds: u32,
    is_runnable: bool,
}

impl<H: Handover> EventLoop<H> {
    /// The event loop number `index` of a service, which accepts from `listeners`.
    pub fn new(
        index: usize,
        listeners: Vec<Listener>,
        offload: &Offload<H::Job>,
        control: &Arc<Control>,
        settings: LoopSettings,
        handler: H,
    ) -> Result<Self, Error> {
        let waker = Arc::clone(&control.wakers()[index]);
        let offload = offload.queue(&Inbox::new(Arc::clone(&waker)));
        Self::open(index, listeners, waker, offload, Arc::clone(control), settings, handler)
            .map_err(Error::at("making an event loop"))
    }

    fn open(
        index: usize,
        listeners: Vec<Listener>,
        waker: Arc<Waker>,
        offload: OffloadQueue<H::Job>,
        control: Arc<Control>,
        settings: LoopSettings,
        handler: H,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        let membership = settings.admission.placement().map(|placement| {
            let placement = Arc::clone(placement);
            Membership { placement, index }
        });
        let mut event_loop = Self {
            _membership: membership,
            index,
            epoll,
            listeners,
            waker,
            offload,
            control,
            settings,
            handler,
            connections: Slab::new(),
            networks: NetworkCounts::default(),
            unnamed: UnnamedConnections::default(),
            waiting: WaitingRoom::default(),
            admits_at: Instant::now(),
            has_place: false,
            progressed_at: Instant::now(),
            generation: 0,
            runnable: VecDeque::new(),
            ended: Vec::new(),
            is_accepting: false,
            drain: None,
            is_draining: false,
            clock: Clock::new(),
            swept_at_seconds: 0,
            turns: 0,
            victims: VictimsByClaim::default(),
        };
        event_loop.start_accepting()?;
        Ok(event_loop)
    }

    /// Runs until the service is drained.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        // The wake-up of a client that connected after the listeners were registered may have gone
        // to a process that stopped accepting.
        self.stop_accepting();
        self.resume_accepting();
        loop {
            let timeout = if !self.runnable.is_empty() {
                Timespec::default()
            } else if self.waiting.is_empty() {
                // Deadlines and [`Handler::every_second`] are due at the next second.
                self.until_next_second()
            } else {
                self.wait_for_place()
            };
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            self.clock.tick();
            self.handler.begin_turn(&self.clock);
            for event in &events {
                self.receive(event);
            }
            let mut small = 0;
            for index in 0..events.len() {
                if self.prepare(&events[index]) {
                    events.swap(small, index);
                    small += 1;
                }
            }
            let (small, others) = events.split_at(small);
            self.send_together(small);
            self.dispatch_for_a_while(others);
            self.run_for_a_while();
            self.sweep();
            self.admit_waiting();
            self.close_ended();
            if self.has_drained() {
                self.end();
                return Ok(());
            }
        }
    }

    fn until_next_second(&self) -> Timespec {
        let left = self.clock.until_next_second();
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
    }

    /// Whether the loop drains, and does not have connections or no time left.
    fn has_drained(&mut self) -> bool {
        let Some(drain) = self.drain else { return false };
        let is_empty =
            self.connections.is_empty() && self.unnamed.is_empty() && self.waiting.is_empty();
        // The state of the control does not count, because the state can change after this loop
        // is woken.
        let is_over = Instant::now() >= drain.until;
        if is_over && drain.is_resumable {
            self.handler.drain_timed_out();
        }
        let is_forced = self.control.is_cut_off() || (is_over && !drain.is_resumable);
        let placement = self.settings.admission.placement();
        // The handler gives up its state for connections. After that, other loops must not pass
        // connections to this loop.
        (is_empty || is_forced)
            && placement.is_none_or(|placement| placement.end(self.index))
            && self.handler.may_end(is_forced)
    }

    fn receive(&mut self, event: &Event) {
        let token = event.data.u64();
        let Some((connection, handler)) = self.connection(token) else { return };
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        let end_or_urgent = ends | EventFlags::PRI;
        let flags = event.flags;
        let readiness = Readiness {
            side: if token & 1 == 0 { Side::Client } else { Side::Upstream },
            is_readable: flags.intersects(EventFlags::IN | end_or_urgent),
            is_writable: flags.intersects(EventFlags::OUT | ends),
            tail: if flags.contains(EventFlags::ERR) {
                Tail::Failed
            } else if flags.contains(EventFlags::PRI) {
                Tail::Other
            } else if flags.contains(EventFlags::RDHUP) {
                Tail::End
            } else if flags.contains(EventFlags::HUP) {
                Tail::Other
            } else {
                Tail::None
            },
        };
        handler.receive(connection, readiness);
    }

    /// Whether a small response is ready.
    fn prepare(&mut self, event: &Event) -> bool {
        let token = event.data.u64();
        let Some((connection, handler)) = self.connection(token) else { return false };
        match handler.prepare(connection) {
            Prepared::Act(action) => {
                self.apply(token, action);
                false
            }
            Prepared::Small => true,
            Prepared::Large => false,
        }
    }

    /// Sends small responses. Other work must not come in between, because the held responses would
    /// wait for it.
    fn send_together(&mut self, events: &[Event]) {
        self.handler.set_holding(events.len() > 1);
        for event in events {
            self.drive(event.data.u64());
        }
        self.handler.set_holding(false);
        for event in events {
            if let Some((connection, handler)) = self.connection(event.data.u64()) {
                handler.flush(connection);
            }
        }
        // The last segments of connections that ended are also held.
        self.close_ended();
    }

    /// Dispatches events for up to [`SENDS_TIME_MAX`]. The connections of the other events become
    /// runnable.
    fn dispatch_for_a_while(&mut self, events: &[Event]) {
        // New connections and replies come first, because sends that follow each other closely
        // would keep them waiting for ever.
        let is_connection = |event: &&Event| event.data.u64() < UNNAMED;
        for event in events.iter().filter(|event| !is_connection(event)) {
            self.dispatch(event);
        }
        let until = Instant::now() + SENDS_TIME_MAX;
        // Connections that already wait come first.
        let mut is_over = !self.runnable.is_empty();
        for event in events.iter().filter(is_connection) {
            if !is_over {
                self.dispatch(event);
                is_over = Instant::now() >= until;
            } else if self.is_due(event.data.u64()) {
                self.make_runnable(event.data.u64());
            }
        }
    }

    /// Gives runnable connections their turns, as long as [`SENDS_TIME_MAX`] lasts.
    fn run_for_a_while(&mut self) {
        let until = Instant::now() + SENDS_TIME_MAX;
        for _ in 0..self.runnable.len() {
            if let Some(token) = self.runnable.pop_front() {
                self.run_again(token);
            }
            if Instant::now() >= until {
                break;
            }
        }
    }

    /// Whether a connection may be driven: it is known, and does not wait for an offload thread.
    fn is_due(&mut self, token: u64) -> bool {
        self.connection(token)
            .is_some_and(|(connection, handler)| !handler.is_offloaded(connection))
    }

    fn make_runnable(&mut self, token: u64) {
        let Some(entry) = self.entry(token) else { return };
        // The connection's turn sets another deadline.
        entry.deadline = NEVER;
        if !std::mem::replace(&mut entry.is_runnable, true) {
            self.runnable.push_back(token);
        }
    }

    fn dispatch(&mut self, event: &Event) {
        match event.data.u64() {
            WAKER => self.wake(),
            token if token >= LISTENERS => {
                let until = Instant::now() + SENDS_TIME_MAX;
                self.accept((token - LISTENERS) as usize, Some(until));
            }
            token if token >= UNNAMED => {
                let index = (token - UNNAMED) as usize;
                let naming = self.unnamed.receive(index, &self.epoll, self.clock.seconds());
                self.continue_naming(naming);
            }
            token => {
                if self.is_due(token) {
                    self.drive(token);
                }
            }
        }
    }

    fn wake(&mut self) {
        self.waker.clear();
        // The handler receives all messages from before the drain before the loop drains.
        let drain_state = self.control.drain_state();
        self.handler.on_wake();
        for (token, reply) in self.offload.replies() {
            if let Some((connection, handler)) = self.connection(token) {
                handler.on_job_done(connection, reply);
                self.drive(token);
            }
        }
        if self.settings.admission.placement().is_some() {
            self.take_passed();
            self.adopt();
            // Another loop may have made room.
            self.resume_accepting();
        }
        self.pause();
        self.visit_all();
        self.follow(drain_state);
    }

    /// Begins or ends a drain.
    fn follow(&mut self, state: DrainState) {
        match (self.drain, state) {
            (None, DrainState::Open) => {}
            (None, _) => self.begin_drain(state == DrainState::Resumable),
            (Some(Drain { is_resumable: true, until }), state) => match state {
                DrainState::Open => self.end_drain(),
                DrainState::Resumable => {}
                DrainState::Completed => self.drain_for_good(until),
                // The drain has the whole time from now on.
                DrainState::Final => self.drain_for_good(self.drain_end()),
            },
            (Some(_), _) => {}
        }
    }

    /// Lets the handler visit every connection, if it asks for that.
    fn visit_all(&mut self) {
        if !self.handler.begin_visits() {
            return;
        }
        let tokens: Vec<_> =
            self.connections.iter().map(|(index, entry)| token(index, entry.generation)).collect();
        for token in tokens {
            let context = context(&self.epoll, &self.clock, self.is_draining, token);
            let Some(entry) = self.connections.get_mut(index(token)) else { continue };
            if self.handler.visit(&mut entry.connection, &context) {
                self.drive(token);
            }
        }
        // The sockets of killed connections are closed before the answer.
        self.close_ended();
        self.handler.end_visits();
    }

    /// Takes connections that another process handed over, even beyond the limits, because they
    /// already have places.
    fn adopt(&mut self) {
        loop {
            let (key, generation) = self.next_key();
            let token = token(key, generation);
            let context = context(&self.epoll, &self.clock, self.is_draining, token);
            let Some(adopted) = self.handler.adopt(&context) else { return };
            let Adopted { connection, client, mut place } = adopted;
            let network = client.map(Network::from);
            let permit = self.admit(network).unwrap_or_default();
            if let Some(place) = &mut place {
                place.move_to(self.index);
            }
            self.insert(generation, connection, network, permit, place);
        }
    }

    /// Stops accepting if the placement is paused.
    fn pause(&mut self) {
        let placement = self.settings.admission.placement().cloned();
        if let Some(placement) = placement.filter(|placement| placement.is_paused()) {
            self.stop_accepting();
            placement.confirm_pause(self.index);
        }
    }

    /// Takes the connections that other loops accepted for this loop.
    fn take_passed(&mut self) {
        let placement = self.settings.admission.placement();
        let passed = placement.map(|placement| placement.take(self.index));
        for placed in passed.into_iter().flatten() {
            self.begin(placed);
        }
    }

    fn begin_drain(&mut self, is_resumable: bool) {
        self.drain = Some(Drain { until: self.drain_end(), is_resumable });
        // Clients that are already connected get their answer. If another process took over, this
        // process accepts nothing, and the clients belong to the other process.
        for index in 0..self.listeners.len() {
            // Clients may come as fast as they are accepted.
            for _ in 0..DRAIN_ROUNDS_MAX {
                if !self.accept(index, None) {
                    break;
                }
            }
        }
        self.is_draining = true;
        self.handler.begin_drain();
        self.stop_accepting();
        if !is_resumable {
            self.listeners.clear();
        }
        let tokens: Vec<_> =
            self.connections.iter().map(|(index, entry)| token(index, entry.generation)).collect();
        for token in tokens {
            let Some((connection, handler)) = self.connection(token) else { continue };
            if handler.activity(connection) == Activity::Idle {
                // A request may have arrived without an event so far.
                let readiness = Readiness {
                    side: Side::Client,
                    is_readable: true,
                    is_writable: false,
                    tail: Tail::None,
                };
                handler.receive(connection, readiness);
                self.drive(token);
            }
        }
    }

    /// The end of a drain that begins now.
    fn drain_end(&self) -> Instant {
        Instant::now() + self.settings.drain_timeout
    }

    /// Makes a drain final.
    fn drain_for_good(&mut self, until: Instant) {
        self.drain = Some(Drain { until, is_resumable: false });
        self.listeners.clear();
    }

    /// Accepts again.
    fn end_drain(&mut self) {
        (self.drain, self.is_draining) = (None, false);
        if let Some(placement) = self.settings.admission.placement() {
            placement.resume_loop(self.index);
        }
        self.resume_accepting();
    }

    /// The index and the generation of the next connection.
    fn next_key(&mut self) -> (usize, u32) {
        // 30 bits, so that every connection's token is below the tokens of listeners.
        self.generation = (self.generation + 1) & (u32::MAX >> 2);
        (self.connections.vacant_key(), self.generation)
    }

    /// Adds a connection under the next key, and drives it.
    fn insert(
        &mut self,
        generation: u32,
        connection: H::Connection,
        network: Option<Network>,
        permit: Option<NetworkPermit>,
        place: Option<Place>,
    ) {
        let index = self.connections.insert(Entry {
            connection: Box::new(connection),
            generation,
            network,
            permit,
            _place: place,
            deadline: NEVER,
            latest_turn: 0,
            latest_turn_at_seconds: self.clock.seconds(),
            is_runnable: false,
        });
        self.networks.add(network);
        self.handler.counters().open.add(1);
        self.drive(token(index, generation));
    }

    fn start_accepting(&mut self) -> io::Result<()> {
        for (index, listener) in self.listeners.iter().enumerate() {
            let exclusive =
                if listener.is_shared { EventFlags::EXCLUSIVE } else { EventFlags::empty() };
            let data = EventData::new_u64(LISTENERS + index as u64);
            epoll::add(&self.epoll, listener, data, EventFlags::IN | exclusive)?;
        }
        self.is_accepting = true;
        Ok(())
    }

    fn stop_accepting(&mut self) {
        if std::mem::take(&mut self.is_accepting) {
            for listener in &self.listeners {
                // The call cannot fail, because the socket is registered.
                let _ = epoll::delete(&self.epoll, listener.as_fd());
            }
        }
    }

    /// Accepts again after a shortage, which may be over.
    fn resume_accepting(&mut self) {
        let is_due = !self.is_accepting && self.drain.is_none() && self.can_accept_without_place();
        if is_due && self.start_accepting().is_err() {
            // Some listeners may be registered. All listeners are removed, and the next second
            // tries again.
            self.is_accepting = true;
            self.stop_accepting();
        }
    }

    fn run_again(&mut self, token: u64) {
        if let Some(entry) = self.entry(token) {
            entry.is_runnable = false;
            self.drive(token);
        }
    }

    fn drive(&mut self, token: u64) {
        let Some(entry) = self.connections.get_mut(index(token)) else { return };
        if entry.generation != generation(token) {
            return;
        }
        let context = context(&self.epoll, &self.clock, self.is_draining, token & !1);
        let action = self.handler.drive(&mut entry.connection, &context);
        self.apply(token, action);
    }

    fn apply(&mut self, token: u64, action: Action<H::Job>) {
        self.turns += 1;
        let (turns, now_seconds) = (self.turns, self.clock.seconds());
        let Some(entry) = self.entry(token) else { return };
        entry.latest_turn = turns;
        entry.latest_turn_at_seconds = now_seconds;
        match action {
            Action::WaitUntil(deadline) => entry.deadline = deadline,
            Action::Yield => self.make_runnable(token),
            Action::Offload(job) => {
                entry.deadline = NEVER;
                self.offload.push(token, job);
            }
            Action::Close => self.end_connection(index(token)),
        }
    }

    /// Ends a connection, which is closed later in the turn. Its place is free after that.
    fn end_connection(&mut self, index: usize) {
        let entry = self.remove(index);
        self.ended.extend(entry);
        // From the next turn on.
        self.resume_accepting();
    }

    fn close_ended(&mut self) {
        for entry in self.ended.drain(..) {
            self.handler.close(*entry.connection);
        }
        self.ended.shrink_to(EVENTS_MAX);
    }

    /// Takes a connection out of the table.
    fn remove(&mut self, index: usize) -> Option<Entry<H::Connection>> {
        let mut entry = self.connections.try_remove(index)?;
        // Its client may connect again at once.
        entry.permit = None;
        self.networks.remove(entry.network);
        self.handler.counters().open.subtract(1);
        Some(entry)
    }

    /// Once a second: expires connections and does the handler's housekeeping.
    fn sweep(&mut self) {
        let now = self.clock.seconds();
        if now == self.swept_at_seconds {
            return;
        }
        self.swept_at_seconds = now;
        self.handler.counters().timed_out.add(self.unnamed.expire(now) as u64);
        // Another process may have freed the missing resource.
        self.resume_accepting();
        self.handler.every_second(now);
        self.visit_all();
        let expired = self.connections.iter().filter(|(_, entry)| entry.deadline <= now);
        let expired: Vec<_> =
            expired.map(|(index, entry)| token(index, entry.generation)).collect();
        for token in expired {
            let Some(entry) = self.connections.get_mut(index(token)) else { continue };
            let context = context(&self.epoll, &self.clock, self.is_draining, token);
            let action = self.handler.expire(&mut entry.connection, &context);
            self.apply(token, action);
        }
    }

    fn end(&mut self) {
        let open = self.connections.len();
        if open > 0 {
            let reason = if self.control.is_cut_off() { "" } else { "the time to end is over: " };
            warn!(open, "{reason}connections of a loop that are cut off: {open}");
        }
        let indices: Vec<_> = self.connections.iter().map(|(index, _)| index).collect();
        for index in indices {
            self.end_connection(index);
        }
        self.close_ended();
        self.handler.on_end();
    }

    fn entry(&mut self, token: u64) -> Option<&mut Entry<H::Connection>> {
        let entry = self.connections.get_mut(index(token))?;
        (entry.generation == generation(token)).then_some(entry)
    }

    /// A connection, if it is still open, and its handler.
    fn connection(&mut self, token: u64) -> Option<(&mut H::Connection, &mut H)> {
        let entry = self.connections.get_mut(index(token))?;
        (entry.generation == generation(token))
            .then_some((&mut *entry.connection, &mut self.handler))
    }
}

/// A function of the fields, because the connections and the handler are borrowed at the same time.
fn context<'l>(epoll: &'l OwnedFd, clock: &Clock, is_draining: bool, token: u64) -> Context<'l> {
    Context::new(epoll.as_fd(), token, clock.seconds(), is_draining)
}

/// Generation, index and side: 30, 32 and 1 bits.
fn token(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 33 | (index as u64) << 1
}

fn index(token: u64) -> usize {
    (token >> 1 & u64::from(u32::MAX)) as usize
}

fn generation(token: u64) -> u32 {
    (token >> 33) as u32
}
