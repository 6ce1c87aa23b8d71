//! A connection comes from another process ([`crate::handover`]).

use super::connecting::Attempt;
use super::events::{Events, Registration, Transfers};
use super::{Chosen, Connection, HeaderParts, MovedBytes, Search, State, local_address};
use crate::greeting::{self, Greeting, GreetingReader};
use crate::handed::{
    AttemptMessage, ConnectionMessage, HandedConnection, SearchMessage, SearchPhase,
};
use crate::keep_alive::DueKeepAlive;
use crate::log::{ConnectionBytes, LoopTime, Record};
use crate::loop_state::LoopState;
use crate::socket::{close_as_usual, pending_tail};
use haul::Forwarder;
use haul_server::event_loop::{Context, Interest, Side, Tail};
use haul_server::listener::NamedBy;
use haul_server::proxy_protocol::Fields;
use haul_sys::sockopt::set_max_pacing_rate;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime};

impl Connection {
    /// Goes on with a connection of another process, whose sockets are reset on close until then.
    /// The ends of its streams are read again from the sockets.
    pub fn adopt(handed: HandedConnection, shared: &mut LoopState, context: &Context<'_>) -> Self {
        let mut connection = Self::with_message(&handed.message, shared, context);
        let interest = if handed.message.search.is_none() {
            connection.keep_alive.begin(shared.limits(), handed.message.id, context);
            Interest::READ
        } else {
            Interest::BOTH
        };
        // A share of the rate of all follows with the first turn.
        let rate = shared.limits().rate_bytes_per_second.unwrap_or(u64::MAX);
        for socket in handed.sockets() {
            // A Unix socket has no rate.
            let _ = set_max_pacing_rate(socket, rate);
        }
        connection.registrations =
            [Side::Client, Side::Upstream].map(|side| Registration::new(side, interest));
        let sides = [Side::Client, Side::Upstream, Side::Upstream];
        let registered = handed
            .sockets()
            .zip(sides)
            .try_for_each(|(socket, side)| context.register(socket, side, interest));
        // Otherwise it is dropped.
        if registered.is_ok() {
            connection.take_parts(handed, shared, context);
        }
        connection
    }

    /// The state of a connection of another process, without its sockets and bytes.
    fn with_message(
        message: &ConnectionMessage,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Self {
        let duration = Duration::from_micros;
        let age = message.accepted_at.elapsed();
        Self {
            state: State::Closed,
            // The first step finds out.
            client_events: Events::ALL,
            upstream_events: Events::ALL,
            registrations: Registration::both(Interest::BOTH),
            transfers: Transfers::default(),
            is_ack_delayed: false,
            // Known to one whose greeting has not arrived: no other needs it.
            listener: 0,
            are_tcp: [message.client.is_some(), message.upstream_address.is_some()],
            group: shared.group(&message.group),
            greeting: Vec::new(),
            upstream: None,
            search: Search::default(),
            send_buffers: shared.send_buffers(),
            paced: shared.paced_connection(),
            header: None,
            header_bytes: message.header_bytes,
            earlier_bytes: ConnectionBytes {
                to_upstream: message.to_upstream.bytes.clone(),
                to_client: message.to_client.bytes.clone(),
            },
            accepted_at: Instant::now().checked_sub(age).unwrap_or_else(Instant::now),
            keep_alive: DueKeepAlive::OF_BOTH,
            lifetime_until: shared.lifetime_until(age, context),
            record: Record {
                id: message.id,
                accepted: SystemTime::UNIX_EPOCH + duration(message.accepted_us),
                client: message.client,
                listener: shared.listener_name(&message.listener),
                server_name: message.server_name.clone(),
                upstream_address: message.upstream_address,
                source: message.source,
                unique_id: message.unique_id.clone(),
                queue_time: message.queue_us.map(duration),
                connect_attempts: message.connect_attempts,
                connect_error: message.connect_error,
                connect_time: message.connect_us.map(duration),
                first_byte_time: message.first_byte_us.map(duration),
                loop_time: LoopTime {
                    total: duration(message.loop_us),
                    splicing: duration(message.splice_us),
                    copying: duration(message.copy_us),
                },
            },
            turn_started: None,
            turn_bytes: MovedBytes::default(),
            has_prepared: false,
            is_logged: false,
            requested_end: None,
        }
    }

    /// Takes the sockets and bytes of a connection of another process.
    fn take_parts(
        &mut self,
        mut handed: HandedConnection,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) {
        if handed.message.has_slot() {
            let ConnectionMessage { group, upstream, .. } = &handed.message;
            let slot = handed.slot.take().or_else(|| shared.slot_of_handed(group, upstream));
            self.upstream = slot.map(Chosen::new);
        }
        match handed.message.search.take() {
            None => self.take_established(handed, shared),
            Some(search) => self.take_searching(handed, search, shared, context),
        }
    }

    fn take_established(&mut self, handed: HandedConnection, shared: &LoopState) {
        let HandedConnection { client, upstreams, to_upstream, to_client, .. } = handed;
        let Some(upstream) = upstreams.into_iter().next() else { return };
        // The registration reports at once what is to be received, but what is left is sent before.
        // A send that finds a failure takes it from the socket.
        let events = |socket| {
            let tail = pending_tail(socket);
            Events { tail, has_ended: tail == Tail::End, ..Events::CONNECTED }
        };
        (self.client_events, self.upstream_events) = (events(&client), events(&upstream));
        for (registration, left) in self.registrations.iter_mut().zip([&to_client, &to_upstream]) {
            registration.sends_next = !left.is_empty();
        }
        let forwarder = Forwarder::with_connected(client, upstream, self.are_tcp, shared.pool())
            .with_first_bytes_to_b(&to_upstream)
            .and_then(|forwarder| forwarder.with_first_bytes_to_a(&to_client));
        if let Ok(forwarder) = forwarder {
            let (client, upstream) = forwarder.sockets();
            [client, upstream].into_iter().for_each(close_as_usual);
            if shared.log.is_on() && self.record.source.is_none() {
                // The other process may have had no log.
                self.record.source = local_address(upstream);
            }
            self.state = State::Forwarding(Box::new(forwarder));
        }
    }

    fn take_searching(
        &mut self,
        handed: HandedConnection,
        search: SearchMessage,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) {
        handed.sockets().for_each(close_as_usual);
        let HandedConnection { client, upstreams, to_upstream, fields, .. } = handed;
        // It is small, and which group it is for may not be known.
        self.header = Some({
            let fields = Fields::parse(&fields).unwrap_or_default();
            Box::new(HeaderParts {
                named_by: NamedBy { destination: search.destination, fields },
                greeting: greeting::parse(&to_upstream).unwrap_or(Greeting::Other),
                version: search.header,
            })
        });
        self.greeting = to_upstream;
        if upstreams.is_empty() {
            self.upstream_events = Events::default();
        }
        self.state = State::Accepted(client);
        match search.phase {
            SearchPhase::Greeting { seconds_left } => {
                // Without the listener there is no route.
                if let Some(listener) = shared.listener_at(&self.record.listener) {
                    self.listener = listener;
                    self.take_greeting(context.deadline(seconds_left), shared);
                }
            }
            SearchPhase::Queued { since } => self.search = Search::queued(since),
            SearchPhase::Paused => {
                self.search = Search::paused(self.record.connect_attempts, context);
            }
            SearchPhase::Connecting { attempts, addresses_tried } => {
                if let Some(chosen) = &mut self.upstream {
                    chosen.set_addresses_tried(addresses_tried);
                }
                let attempt = |(socket, message): (OwnedFd, AttemptMessage)| Attempt {
                    socket,
                    address: message.address,
                    deadline: context.deadline(message.seconds_left),
                };
                let attempts = upstreams.into_iter().zip(attempts).map(attempt).collect();
                let next_at = self.next_attempt_at(shared, context);
                let state = std::mem::replace(&mut self.state, State::Closed);
                if let State::Accepted(client) = state {
                    self.state = State::Connecting { client, attempts, next_at };
                }
            }
        }
        self.search.lacks_port |= search.lacks_port;
        self.take_tried(&search.tried);
    }

    /// Leaves out what another process has tried.
    fn take_tried(&mut self, tried: &[String]) {
        if let Some(group) = &self.group {
            self.search.tried.extend(tried.iter().filter_map(|name| group.index_of(name)));
        }
    }

    /// Goes on with a greeting that another process has begun to receive.
    fn take_greeting(&mut self, deadline: u32, shared: &mut LoopState) {
        let mut reader = Box::<GreetingReader>::default();
        let greeting = reader.push(&std::mem::take(&mut self.greeting));
        if let State::Accepted(client) = std::mem::replace(&mut self.state, State::Closed) {
            self.state = State::Greeting { client, reader, deadline };
        }
        // The configuration may be another.
        let is_needed = shared.needs_greeting(self.listener);
        if let Some(greeting) = greeting.or((!is_needed).then_some(Greeting::Other)) {
            self.route(&greeting, shared);
        }
    }
}
