//! One connection: a client, the upstream it is connected to, and the bytes between them.

mod account;
mod adoption;
mod connecting;
mod delivery;
mod ending;
mod endpoint;
mod forwarding;
mod handover;
mod queueing;
mod registration;
mod route;
mod state;
mod status;

use crate::greeting::Greeting;
use crate::header::HeaderVersion;
use crate::keep_alive::KeepAliveSchedule;
use crate::loop_state::{LoopState, whole_seconds};
use crate::record::connection::Record;
use crate::record::log::End;
use crate::total_rate::{Demand, PacedConnection};
use crate::upstreams::closing::DueClosing;
use crate::upstreams::selection::ConnectionSelection;
use account::{Account, sent_bytes};
use connecting::Search;
use endpoint::{Endpoint, Events};
use haul_server::event_loop::{Action, Context, Interest, Readiness, Side};
use haul_server::listener::Accepted;
use haul_server::offload::NoJob;
use haul_sys::tcp_info::tcp_info;
use route::{HeaderParts, Route};
use state::{ConnectionForwarder, State};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// A client and its upstream.
#[derive(Debug)]
pub struct Connection {
    state: State,
    client: Endpoint,
    upstream: Endpoint,
    route: Route,
    search: Search,
    account: Account,
    /// The share of the rate of all connections, if that rate is limited.
    paced: Option<Box<PacedConnection>>,
    keep_alive: KeepAliveSchedule,
    /// Whether the end of the handshake with the upstream waits for the first bytes.
    is_ack_delayed: bool,
    /// The second of the clock in which the lifetime of the connection is over.
    lifetime_until: u32,
    /// The end that an operator or the upstream's state asks for.
    requested_end: Option<End>,
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
        // Only a header of version 2 has fields from a greeting or from a proxy in front. The
        // address is in both versions.
        let sends_fields = shared.routes().sends_header(listener, HeaderVersion::V2);
        let has_parts = accepted.named.is_some() || sends_fields;
        let named_by = accepted.named.map(|named| *named).unwrap_or_default();
        let header =
            has_parts.then(|| Box::new(HeaderParts { named_by, greeting: Greeting::Other }));
        let (state, group) = if shared.needs_greeting(listener) {
            let deadline = context.deadline(whole_seconds(shared.limits().timeouts.greeting));
            let count = shared.unconnected.add();
            (State::Greeting { client, reader: Box::default(), deadline, _count: count }, None)
        } else {
            let group = shared.routes().group(listener, &Greeting::Other);
            (State::Searching(client), group.cloned())
        };
        let address = shared.listener_address(listener);
        let record = Record::new(shared.next_id(), record_time, accepted.peer, address);
        // The client's socket is registered for writing once a send does not fit into the socket.
        // Most responses fit.
        let is_tcp = accepted.peer.is_some();
        let events = Events::CONNECTED;
        Self {
            state,
            client: Endpoint::new(Side::Client, is_tcp, events, Interest::READ),
            upstream: Endpoint::new(Side::Upstream, false, Events::default(), Interest::BOTH),
            route: Route { listener, group, greeting: Vec::new(), header },
            search: Search::default(),
            account: Account::new(record, now),
            paced: shared.paced_connection(),
            keep_alive: KeepAliveSchedule::UPSTREAM_ONLY,
            is_ack_delayed: false,
            lifetime_until: shared.lifetime_until(Duration::ZERO, context),
            requested_end: None,
        }
    }

    /// Whether an operator selected the connection.
    pub fn is_selected(&self, selection: &ConnectionSelection) -> bool {
        let client = self.account.record.client.map(|client| client.ip());
        let upstream = self.search.chosen.as_ref().map(|chosen| chosen.upstream.as_ref());
        selection.admits(self.account.record.id, client, upstream)
    }

    /// Whether the connection is to be closed because of its upstream.
    pub fn must_close_for(&self, closing: &DueClosing) -> bool {
        let is_established = matches!(self.state, State::Forwarding(_));
        let connect_time = self.account.record.connect.time.unwrap_or_default();
        let connected_at = self.account.accepted_at.checked_add(connect_time);
        let upstream = self.search.chosen.as_ref().map(|chosen| &chosen.upstream);
        is_established
            && connected_at.is_some_and(|connected_at| connected_at < closing.connected_before)
            && upstream.is_some_and(|upstream| Arc::ptr_eq(upstream, &closing.upstream))
    }

    /// Begins another second of the rate of all connections.
    pub fn begin_paced_second(&mut self, demands: &mut [Demand; 2]) {
        if let (State::Forwarding(forwarder), Some(paced)) = (&self.state, &mut self.paced) {
            let (client, upstream) = forwarder.sockets();
            let sent_bytes = sent_bytes(&forwarder.report());
            let departed = |socket: &OwnedFd, sent_bytes| {
                // A Unix socket does not count the bytes that left it.
                tcp_info(socket).map_or(sent_bytes, |info| info.sent_bytes)
            };
            let departed_bytes =
                [departed(upstream, sent_bytes[0]), departed(client, sent_bytes[1])];
            paced.begin_second(sent_bytes, departed_bytes, demands);
        }
    }

    /// Asks for the end of the connection by a reset, which [`Connection::drive`] carries out.
    pub fn request_end(&mut self, end: End) {
        self.requested_end = Some(end);
    }

    /// Records an event.
    pub fn on_event(&mut self, event: Readiness) {
        let endpoint = match event.side {
            Side::Client => &mut self.client,
            Side::Upstream => &mut self.upstream,
        };
        let had_ended = endpoint.events.has_ended;
        endpoint.events.record(event);
        if matches!(&self.state, State::Forwarding(one) if one.has_prepared_failure()) {
            // The end may be the end of a reset.
            endpoint.events.has_ended = had_ended;
        }
        endpoint.registration.count(event);
    }

    /// Goes as far as it can without blocking.
    pub fn drive(&mut self, shared: &mut LoopState, context: &Context<'_>) -> Action<NoJob> {
        self.account.begin_turn(shared.measures_time());
        let action = self.advance(shared, context);
        self.account.end_turn();
        action
    }

    fn advance(&mut self, shared: &mut LoopState, context: &Context<'_>) -> Action<NoJob> {
        if let Some(end) = self.requested_end.take() {
            return self.finish(end, shared);
        }
        loop {
            let next = match &self.state {
                State::Greeting { .. } => self.receive_greeting(shared),
                State::Searching(_) => self.connect(shared, context),
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
            State::Connecting { .. } => self.advance_attempts(shared, context),
            _ if context.now_seconds() >= self.lifetime_until => {
                return self.finish(End::Lifetime, shared);
            }
            // The client waits for a server that speaks first.
            State::Greeting { .. } => self.choose_route(&Greeting::Other, shared),
            _ => {}
        }
        self.drive(shared, context)
    }

    /// The name of the upstream that was tried last.
    fn upstream_name(&self) -> Option<&str> {
        let chosen = self.search.chosen.as_ref();
        let tried = chosen.filter(|_| self.account.record.connect.attempts > 0);
        tried.map(|chosen| chosen.upstream.name())
    }

    /// The name of the group, once the route is known. The configuration lacks a group that only
    /// another process has.
    fn group_name(&self) -> Option<&str> {
        match &self.route.group {
            Some(group) => Some(group.name()),
            None => Some(self.search.chosen.as_ref()?.upstream.group()),
        }
    }
}

/// The address of this end of a connection; `None` for a Unix socket.
fn local_address(socket: &OwnedFd) -> Option<SocketAddr> {
    rustix::net::getsockname(socket).ok().and_then(|address| SocketAddr::try_from(address).ok())
}
