//! One connection: a client, the upstream it is connected to, and the bytes between them.

mod adoption;
mod connecting;
mod delivery;
mod ending;
mod events;
mod handover;
mod queueing;

use crate::closing::DueClosing;
use crate::greeting::{Greeting, GreetingReader};
use crate::header::{self, FieldSources, HeaderVersion};
use crate::host_instant::HostInstant;
use crate::keep_alive::DueKeepAlive;
use crate::log::{ConnectionBytes, End, LoopTime, Record, TcpStatistics};
use crate::loop_state::{LoopState, whole_seconds};
use crate::selection::ConnectionSelection;
use crate::send_buffer::SendBuffers;
use crate::status::{ConnectionStatus, Phase};
use crate::total_rate::{Demand, PacedConnection};
use crate::upstream_group::{QueuePlace, UpstreamGroup};
use connecting::{Attempt, Chosen, Search};
use delivery::Delivery;
use events::{Events, Found, Registration, Transfers};
use haul::{ForwardReport, ForwardSide, Forwarder, Step};
use haul_server::connect;
use haul_server::event_loop::{Action, Context, Interest, NEVER, Readiness, Side, Tail};
use haul_server::listener::{Accepted, NamedBy};
use haul_server::offload::NoJob;
use haul_server::proxy_protocol::FieldType;
use haul_sys::tcp_info::tcp_info;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A client and its upstream.
#[derive(Debug)]
pub struct Connection {
    state: State,
    client_events: Events,
    upstream_events: Events,
    /// The events of the client's socket and of the upstream's.
    registrations: [Registration; 2],
    transfers: Transfers,
    /// Whether the end of the handshake with the upstream waits for the first bytes.
    is_ack_delayed: bool,
    /// The listener's place in the configuration.
    listener: usize,
    /// Whether the client's socket and the upstream's are TCP sockets.
    are_tcp: [bool; 2],
    /// The group of its upstream, once it has a route.
    group: Option<Arc<UpstreamGroup>>,
    /// The greeting, which the upstream is sent.
    greeting: Vec<u8>,
    /// The upstream that is tried or connected, and where in its addresses.
    upstream: Option<Chosen>,
    search: Search,
    send_buffers: SendBuffers,
    /// Its share of the rate of all, if there is one.
    paced: Option<Box<PacedConnection>>,
    /// What the header is made of, until the upstream is sent it.
    header: Option<Box<HeaderParts>>,
    /// The length of the header that the upstream is sent first.
    header_bytes: u64,
    /// What was forwarded by another process, before a handover.
    earlier_bytes: ConnectionBytes,
    accepted_at: Instant,
    keep_alive: DueKeepAlive,
    /// The second of the clock in which its lifetime is over.
    lifetime_until: u32,
    record: Record,
    /// When the event loop has turned to it, if its time is measured.
    turn_started: Option<Instant>,
    /// What has been moved in this turn.
    turn_bytes: MovedBytes,
    /// Whether bytes were moved before the turn.
    has_prepared: bool,
    is_logged: bool,
    /// The end that an operator or the upstream's state asks for.
    requested_end: Option<End>,
}

/// What a header of the PROXY protocol is made of, beside the client's address.
#[derive(Debug, Default)]
struct HeaderParts {
    /// What a proxy in front has said.
    named_by: NamedBy,
    greeting: Greeting,
    /// The version, of a connection whose group this process lacks.
    version: Option<HeaderVersion>,
}

#[derive(Debug)]
enum State {
    /// The route depends on the client's greeting, which has not arrived completely.
    Greeting {
        client: OwnedFd,
        reader: Box<GreetingReader>,
        deadline: u32,
    },
    /// The next address is to be tried.
    Accepted(OwnedFd),
    /// All usable upstreams are at their limits.
    Queued {
        client: OwnedFd,
        place: QueuePlace,
        since: HostInstant,
        deadline: u32,
    },
    /// A connection to an upstream is being established, at one of its addresses or at two.
    Connecting {
        client: OwnedFd,
        attempts: Vec<Attempt>,
        /// When another address of the upstream is tried, too.
        next_at: u32,
    },
    Forwarding(Box<Forwarder<OwnedFd, OwnedFd>>),
    /// One side has failed: what it has sent is delivered to the other side.
    Delivering(Box<Delivery>),
    /// The streams are over. The sockets close when the event loop closes the connection.
    Ended {
        _sockets: Box<Forwarder<OwnedFd, OwnedFd>>,
    },
    /// The sockets are closed.
    Closed,
}

/// Bytes that were moved in each way, in both directions.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct MovedBytes {
    spliced: u64,
    copied: u64,
}

impl MovedBytes {
    fn of(report: &ForwardReport) -> Self {
        Self {
            spliced: report.a_to_b.spliced.bytes + report.b_to_a.spliced.bytes,
            copied: report.a_to_b.copied.bytes + report.b_to_a.copied.bytes,
        }
    }

    /// Adds what was moved between two reports.
    fn add(&mut self, before: Self, after: Self) {
        self.spliced += after.spliced - before.spliced;
        self.copied += after.copied - before.copied;
    }
}

impl Connection {
    /// The state of an accepted connection.
    pub fn new(
        accepted: Accepted,
        record_time: SystemTime,
        now: Instant,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Self {
        let client = accepted.socket;
        let listener = accepted.listener;
        // Only a header of version 2 has what a greeting or a proxy in front has named, but for the
        // address.
        let sends_fields = shared.routes().sends_header(listener, HeaderVersion::V2);
        let has_parts = accepted.named.is_some() || sends_fields;
        let named_by = accepted.named.map(|named| *named).unwrap_or_default();
        let header =
            has_parts.then(|| Box::new(HeaderParts { named_by, ..HeaderParts::default() }));
        let (state, group) = if shared.needs_greeting(listener) {
            let deadline = context.deadline(whole_seconds(shared.limits().greeting_timeout));
            (State::Greeting { client, reader: Box::default(), deadline }, None)
        } else {
            let group = shared.routes().group(listener, &Greeting::Other);
            (State::Accepted(client), group.cloned())
        };
        Self {
            state,
            client_events: Events::CONNECTED,
            upstream_events: Events::default(),
            // As long as every send fits into the socket, as most responses do.
            registrations: Registration::both(Interest::READ),
            transfers: Transfers::default(),
            is_ack_delayed: false,
            listener,
            are_tcp: [accepted.peer.is_some(), false],
            group,
            greeting: Vec::new(),
            upstream: None,
            search: Search::default(),
            send_buffers: shared.send_buffers(),
            paced: shared.paced_connection(),
            header,
            header_bytes: 0,
            earlier_bytes: ConnectionBytes::default(),
            accepted_at: now,
            keep_alive: DueKeepAlive::OF_UPSTREAM,
            lifetime_until: shared.lifetime_until(Duration::ZERO, context),
            record: Record {
                id: shared.next_id(),
                accepted: record_time,
                client: accepted.peer,
                listener: shared.listener_address(listener),
                server_name: None,
                upstream_address: None,
                source: None,
                unique_id: None,
                queue_time: None,
                connect_attempts: 0,
                connect_error: None,
                connect_time: None,
                first_byte_time: None,
                loop_time: LoopTime::default(),
            },
            turn_started: None,
            turn_bytes: MovedBytes::default(),
            has_prepared: false,
            is_logged: false,
            requested_end: None,
        }
    }

    /// Whether the connection is among those that an operator means.
    pub fn is_selected(&self, selection: &ConnectionSelection) -> bool {
        let client = self.record.client.map(|client| client.ip());
        let upstream = self.upstream.as_ref().map(|chosen| chosen.upstream.as_ref());
        selection.admits(self.record.id, client, upstream)
    }

    /// Whether the connection is to be closed for its upstream's sake.
    pub fn is_due(&self, closing: &DueClosing) -> bool {
        let is_established = matches!(self.state, State::Forwarding(_));
        let connected_at = self.accepted_at + self.record.connect_time.unwrap_or_default();
        let upstream = self.upstream.as_ref().map(|chosen| &chosen.upstream);
        is_established
            && connected_at < closing.connected_before
            && upstream.is_some_and(|upstream| Arc::ptr_eq(upstream, &closing.upstream))
    }

    /// Begins another second of the rate of all.
    pub fn begin_paced_second(&mut self, demands: &mut [Demand; 2]) {
        if let (State::Forwarding(forwarder), Some(paced)) = (&self.state, &mut self.paced) {
            let (client, upstream) = forwarder.sockets();
            let sent_bytes = sent_bytes(&forwarder.report());
            let departed = |socket: &OwnedFd, sent_bytes| {
                // A Unix socket does not count them.
                tcp_info(socket).map_or(sent_bytes, |info| info.sent_bytes)
            };
            let departed_bytes =
                [departed(upstream, sent_bytes[0]), departed(client, sent_bytes[1])];
            paced.begin_second(sent_bytes, departed_bytes, demands);
        }
    }

    /// Asks for the end of the connection, by a reset: [`Connection::drive`] carries it out.
    pub fn request_end(&mut self, end: End) {
        self.requested_end = Some(end);
    }

    /// The state of the connection, for a list.
    pub fn status(&self) -> ConnectionStatus {
        let (bytes, tcp, source) = match &self.state {
            State::Forwarding(forwarder) => {
                let (client, upstream) = forwarder.sockets();
                let tcp = [TcpStatistics::of(client), TcpStatistics::of(upstream)];
                (self.client_bytes(&forwarder.report()), tcp, local_address(upstream))
            }
            State::Delivering(delivery) => {
                (self.client_bytes(&delivery.record.report), delivery.record.tcp, None)
            }
            _ => <(ConnectionBytes, _, _)>::default(),
        };
        ConnectionStatus {
            id: self.record.id,
            client: self.record.client,
            listener: self.record.listener.to_string(),
            server_name: self.record.server_name.clone(),
            group: self.group_name().map(Into::into),
            upstream: self.upstream_name().map(Into::into),
            upstream_address: self.record.upstream_address,
            source: self.record.source.or(source),
            phase: match &self.state {
                State::Greeting { .. } => Phase::Greeting,
                State::Queued { .. } => Phase::Queued,
                State::Accepted(_) | State::Connecting { .. } => Phase::Connecting,
                State::Forwarding(_) => Phase::Forwarding,
                State::Delivering(_) | State::Ended { .. } | State::Closed => Phase::Delivering,
            },
            loop_us: self.record.loop_time.total.as_micros() as u64,
            splice_us: self.record.loop_time.splicing.as_micros() as u64,
            copy_us: self.record.loop_time.copying.as_micros() as u64,
            age_ms: self.accepted_at.elapsed().as_micros() as f64 / 1e3,
            to_upstream: bytes.to_upstream,
            to_client: bytes.to_client,
            client_tcp: tcp[0],
            upstream_tcp: tcp[1],
        }
    }

    /// The upstream that was tried last.
    fn upstream_name(&self) -> Option<&str> {
        let upstream = self.upstream.as_ref().filter(|_| self.record.connect_attempts > 0);
        upstream.map(|chosen| chosen.upstream.name())
    }

    /// The name of the group, once it has a route. The configuration may lack that group: another
    /// process has or had it.
    fn group_name(&self) -> Option<&str> {
        match &self.group {
            Some(group) => Some(group.name()),
            None => Some(self.upstream.as_ref()?.upstream.group()),
        }
    }

    /// The bytes from the beginning, also of earlier processes.
    fn whole_bytes(&self, report: &ForwardReport) -> ConnectionBytes {
        let mut bytes = ConnectionBytes::from(report);
        bytes.add_earlier(&self.earlier_bytes);
        bytes
    }

    /// The bytes from the beginning, without the header, which is not the client's.
    fn client_bytes(&self, report: &ForwardReport) -> ConnectionBytes {
        let mut bytes = self.whole_bytes(report);
        let copied_bytes = &mut bytes.to_upstream.copied_bytes;
        *copied_bytes = copied_bytes.saturating_sub(self.header_bytes);
        bytes
    }

    /// Records what an event says.
    pub fn on_event(&mut self, event: Readiness) {
        let [client, upstream] = &mut self.registrations;
        let (events, registration) = match event.side {
            Side::Client => (&mut self.client_events, client),
            Side::Upstream => (&mut self.upstream_events, upstream),
        };
        let had_ended = events.has_ended;
        events.record(event);
        if matches!(&self.state, State::Forwarding(one) if one.has_prepared_failure()) {
            // The end may be that of a reset.
            events.has_ended = had_ended;
        }
        registration.count(event);
    }

    /// Receives small messages, which [`Connection::drive`] sends; true if there is one.
    pub fn prepare(&mut self, shared: &LoopState) -> bool {
        if self.may_have_failed().contains(&true) {
            // [`Connection::failed_before_send`] finds that out.
            return false;
        }
        let State::Forwarding(forwarder) = &mut self.state else { return false };
        self.turn_started = shared.measures_time().then(Instant::now);
        let (client, upstream) = (self.client_events, self.upstream_events);
        forwarder.set_peer_has_ended(client.tail == Tail::End, upstream.tail == Tail::End);
        let before = MovedBytes::of(&forwarder.report());
        let is_small = forwarder.prepare(client.readiness(), upstream.readiness());
        let after = MovedBytes::of(&forwarder.report());
        self.turn_bytes.add(before, after);
        self.has_prepared |= after != before;
        self.end_turn();
        is_small
    }

    /// Goes as far as it can without blocking.
    pub fn drive(&mut self, shared: &mut LoopState, context: &Context<'_>) -> Action<NoJob> {
        self.turn_started = shared.measures_time().then(Instant::now);
        let action = self.advance(shared, context);
        self.end_turn();
        action
    }

    /// Adds the time since the turn has started to that of the connection.
    fn end_turn(&mut self) {
        if let Some(started) = self.turn_started.take() {
            let MovedBytes { spliced, copied } = std::mem::take(&mut self.turn_bytes);
            self.record.loop_time.add(started.elapsed(), spliced, copied);
        }
    }

    fn advance(&mut self, shared: &mut LoopState, context: &Context<'_>) -> Action<NoJob> {
        if let Some(end) = self.requested_end.take() {
            return self.finish(end, shared);
        }
        loop {
            let next = match &self.state {
                State::Greeting { .. } => self.receive_greeting(shared),
                State::Accepted(_) => self.connect(shared, context),
                State::Queued { .. } => self.wait_in_queue(shared, context),
                State::Connecting { .. } => self.finish_connecting(shared, context),
                State::Forwarding(_) => self.forward(shared, context),
                State::Delivering(_) => Some(self.deliver(shared, context)),
                State::Ended { .. } | State::Closed => Some(Action::Close),
            };
            if let Some(next) = next {
                return next;
            }
        }
    }

    /// The deadline has passed.
    pub fn expire(&mut self, shared: &mut LoopState, context: &Context<'_>) -> Action<NoJob> {
        match &self.state {
            State::Connecting { .. } => self.expire_attempts(shared, context),
            _ if context.now_seconds() >= self.lifetime_until => {
                return self.finish(End::Lifetime, shared);
            }
            // A server that speaks first is waited for.
            State::Greeting { .. } => self.route(&Greeting::Other, shared),
            _ => {}
        }
        self.drive(shared, context)
    }

    /// Receives the client's greeting; `None` once the state has changed.
    fn receive_greeting(&mut self, shared: &mut LoopState) -> Option<Action<NoJob>> {
        let State::Greeting { client, reader, deadline } = &mut self.state else { return None };
        let deadline = *deadline;
        if !self.client_events.is_readable {
            return Some(Action::WaitUntil(deadline));
        }
        match reader.receive(&*client) {
            Ok(Some(greeting)) => {
                self.route(&greeting, shared);
                None
            }
            Ok(None) => {
                self.client_events.is_readable = false;
                Some(Action::WaitUntil(deadline))
            }
            Err(_) => Some(self.finish(End::ClientFailed, shared)),
        }
    }

    /// Chooses the group by the client's greeting.
    fn route(&mut self, greeting: &Greeting, shared: &mut LoopState) {
        let State::Greeting { client, reader, .. } =
            std::mem::replace(&mut self.state, State::Closed)
        else {
            return;
        };
        self.greeting = reader.into_received();
        self.group = shared.routes().group(self.listener, greeting).cloned();
        if let Greeting::Tls { server_name, .. } = greeting {
            self.record.server_name.clone_from(server_name);
        }
        if let Some(header) = &mut self.header {
            header.greeting = greeting.clone();
        }
        self.state = State::Accepted(client);
    }

    /// Forwards between the client and the first attempt that has succeeded. Others end.
    fn begin_forwarding(
        &mut self,
        attempt: Attempt,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let State::Connecting { client, .. } = std::mem::replace(&mut self.state, State::Closed)
        else {
            return Some(Action::Close);
        };
        let Attempt { socket: upstream, address, .. } = attempt;
        let is_tcp = address.is_some();
        self.are_tcp[1] = is_tcp;
        self.record.upstream_address = address;
        if is_tcp && shared.log.is_on() {
            // At the end of a connection that has failed, the socket has lost its port.
            self.record.source = local_address(&upstream);
        }
        if let Some(chosen) = &self.upstream {
            chosen.upstream.record_success();
        }
        let mut first_bytes = self.make_header(&client, shared);
        self.header_bytes = first_bytes.len() as u64;
        // Its memory is not kept with the connection.
        first_bytes.extend(std::mem::take(&mut self.greeting));
        if is_tcp || self.keep_alive.includes_client() {
            self.keep_alive.begin(shared.limits(), self.record.id, context);
        }
        self.is_ack_delayed = is_tcp;
        self.registrations[1].sends_next = !first_bytes.is_empty();
        let forwarder = Forwarder::with_connected(client, upstream, self.are_tcp, shared.pool())
            .with_first_bytes_to_b(&first_bytes);
        match forwarder {
            Ok(forwarder) => {
                self.state = State::Forwarding(Box::new(forwarder));
                None
            }
            // It has moved no bytes.
            Err(_) => Some(self.finish(End::UpstreamFailed, shared)),
        }
    }

    /// The address that the client connected to. A socket whose connection failed lost its port,
    /// and then the port is the listener's.
    fn client_destination(&self, client: &OwnedFd) -> Option<SocketAddr> {
        let mut address = local_address(client)?;
        if address.port() == 0
            && let Ok(listener) = self.record.listener.parse::<SocketAddr>()
        {
            address.set_port(listener.port());
        }
        Some(address)
    }

    /// The header that names the client to the upstream; empty if none is sent.
    fn make_header(&mut self, client: &OwnedFd, shared: &LoopState) -> Vec<u8> {
        let parts = self.header.take().map(|parts| *parts).unwrap_or_default();
        let HeaderParts { named_by, greeting, version } = parts;
        let version = self.group.as_ref().map_or(version, |group| group.send_header());
        let Some(version) = version else { return Vec::new() };
        let unique_id = shared.unique_id(self.record.id);
        let sources =
            FieldSources { received: &named_by.fields, greeting: &greeting, unique_id: &unique_id };
        let fields = sources.fields(shared.header_fields());
        // Version 1 has no fields.
        let sent_id = fields.get(FieldType::UNIQUE_ID).filter(|_| version == HeaderVersion::V2);
        self.record.unique_id = sent_id.map(|id| String::from_utf8_lossy(id).into_owned());
        let destination = named_by.destination.or_else(|| self.client_destination(client));
        header::header(version, self.record.client, destination, &fields)
    }

    /// Forwards what can be forwarded now; `None` once the state has changed.
    fn forward(&mut self, shared: &mut LoopState, context: &Context<'_>) -> Option<Action<NoJob>> {
        let now = context.now_seconds();
        if now >= self.lifetime_until {
            return Some(self.finish(End::Lifetime, shared));
        }
        if let Some(failed) = self.failed_before_send() {
            self.fail(failed, shared, context);
            return None;
        }
        let State::Forwarding(forwarder) = &mut self.state else { return None };
        self.keep_alive.set(forwarder.sockets(), shared.limits(), context);
        if let Some(paced) = &mut self.paced {
            let (client, upstream) = forwarder.sockets();
            paced.pace([upstream, client], shared.limits().rate_bytes_per_second);
        }
        let before = MovedBytes::of(&forwarder.report());
        let (client, upstream) = (&mut self.client_events, &mut self.upstream_events);
        forwarder.set_peer_has_ended(client.tail == Tail::End, upstream.tail == Tail::End);
        let step = forwarder.step_ready(client.readiness(), upstream.readiness());
        let after = MovedBytes::of(&forwarder.report());
        let has_moved = after != before || std::mem::take(&mut self.has_prepared);
        self.turn_bytes.add(before, after);
        if std::mem::take(&mut self.is_ack_delayed) && sent_bytes(&forwarder.report())[0] == 0 {
            // A server that speaks first waits for the end of the handshake.
            connect::acknowledge(forwarder.sockets().1);
        }
        if let Some(paced) = &mut self.paced {
            paced.record(sent_bytes(&forwarder.report()));
        }
        if has_moved && !self.send_buffers.are_done() {
            let (client, upstream) = forwarder.sockets();
            let sent_bytes = sent_bytes(&forwarder.report());
            self.send_buffers.limit([upstream, client], sent_bytes, &mut shared.interfaces);
        }
        // Of an adopted connection the first bytes may have been another process's.
        let is_first =
            self.record.first_byte_time.is_none() && self.earlier_bytes.to_client.is_empty();
        if has_moved && is_first && sent_bytes(&forwarder.report())[1] > 0 {
            self.record.first_byte_time = Some(self.accepted_at.elapsed());
        }
        Some(match step {
            Ok(Step::Wait { a, b }) => return self.wait([a, b], has_moved, shared, context),
            Ok(Step::Yield) => Action::Yield,
            Ok(Step::Done) => self.finish(End::Complete, shared),
            Err(haul::Error::TimedOut(_)) => self.finish(End::Idle, shared),
            Err(_) => {
                match forwarder.failed_side() {
                    Some(ForwardSide::A) => self.fail(Side::Client, shared, context),
                    Some(ForwardSide::B) => self.fail(Side::Upstream, shared, context),
                    // Memory or descriptors are lacking.
                    None => return Some(self.finish(End::Shortage, shared)),
                }
                return None;
            }
        })
    }

    /// Waits for what a step waits for on both sockets; `None` once the state has changed.
    fn wait(
        &mut self,
        [a, b]: [haul::Readiness; 2],
        has_moved: bool,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        let (client, upstream) = forwarder.sockets();
        self.transfers.record(sent_bytes(&forwarder.report()));
        let are_large = self.transfers.are_large();
        let found = Found::new([a, b], self.are_tcp[0] && are_large[0], has_moved);
        self.registrations[0].update(found, client, context);
        let found = Found::new([b, a], self.are_tcp[1] && are_large[1], has_moved);
        self.registrations[1].update(found, upstream, context);
        let repeats =
            [self.client_events.update(a, has_moved), self.upstream_events.update(b, has_moved)];
        if repeats.contains(&true) {
            return Some(Action::Yield);
        }
        let deadline = forwarder.deadline();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let idle_until = left.map_or(NEVER, |left| context.deadline(left.as_secs() as u32));
        if let Some(failed) = self.failed_side() {
            // The other side does not take all that this one has sent.
            self.fail(failed, shared, context);
            return None;
        }
        let resume_at = self.registrations.map(|one| one.resume_at());
        let until = [idle_until, self.lifetime_until, self.keep_alive.at()];
        let until = until.into_iter().chain(resume_at).min().unwrap_or(NEVER);
        Some(Action::WaitUntil(until))
    }
}

/// The bytes that were sent to the upstream, and to the client.
fn sent_bytes(report: &ForwardReport) -> [u64; 2] {
    [&report.a_to_b, &report.b_to_a].map(|one| one.spliced.bytes + one.copied.bytes)
}

/// The address of this end of a connection; `None` for a Unix socket.
fn local_address(socket: &OwnedFd) -> Option<SocketAddr> {
    rustix::net::getsockname(socket).ok().and_then(|address| SocketAddr::try_from(address).ok())
}
