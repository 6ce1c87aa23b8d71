//! Adopts a connection of another process ([`crate::handover`]).

use super::account::Account;
use super::connecting::{Chosen, Search};
use super::endpoint::{Endpoint, Events};
use super::route::{HeaderParts, Route};
use super::{Connection, State, local_address};
use crate::greeting::{self, Greeting};
use crate::handover_message::{ConnectionMessage, HandedConnection, WaitingMessage};
use crate::keep_alive::KeepAliveSchedule;
use crate::loop_state::LoopState;
use crate::record::connection::{ConnectionBytes, Record};
use crate::record::log::End;
use crate::socket::{close_as_usual, pending_tail};
use crate::upstreams::upstream::AdminState;
use haul::Forwarder;
use haul_server::event_loop::{Context, Interest, Side, Tail};
use haul_server::listener::NamedBy;
use haul_server::proxy_protocol::Fields;
use haul_sys::sockopt::set_max_pacing_rate;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

impl Connection {
    /// Continues a connection of another process. Until then its sockets are reset when they close.
    /// The ends of the streams are read again from the sockets.
    pub fn adopt(handed: HandedConnection, shared: &mut LoopState, context: &Context<'_>) -> Self {
        let is_established = handed.message.is_established();
        let interest = if is_established { Interest::READ } else { Interest::BOTH };
        let mut connection = Self::with_message(&handed.message, interest, shared, context);
        if is_established {
            connection.keep_alive.schedule(shared.limits(), handed.message.record.id, context);
        }
        // The first turn gives the connection a share of the rate of all connections.
        let rate = shared.limits().rate_bytes_per_second.unwrap_or(u64::MAX);
        for socket in handed.sockets() {
            // A Unix socket does not have a rate.
            let _ = set_max_pacing_rate(socket, rate);
        }
        let sides = [Side::Client, Side::Upstream];
        let registered = handed
            .sockets()
            .zip(sides)
            .try_for_each(|(socket, side)| context.register(socket, side, interest));
        // A connection that could not be registered is dropped.
        if registered.is_ok() {
            connection.take_parts(handed, shared, context);
        }
        connection
    }

    /// A connection of another process, without its sockets and bytes.
    fn with_message(
        message: &ConnectionMessage,
        interest: Interest,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Self {
        let age = message.accepted_at.elapsed();
        let accepted_at = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
        let earlier_bytes = ConnectionBytes {
            to_upstream: message.to_upstream.bytes.clone(),
            to_client: message.to_client.bytes.clone(),
        };
        // The first step finds out what the sockets hold.
        let endpoint = |side, address: Option<_>| {
            Endpoint::new(side, address.is_some(), Events::ALL, interest)
        };
        Self {
            state: State::Closed,
            client: endpoint(Side::Client, message.record.client),
            upstream: endpoint(Side::Upstream, message.record.upstream_address),
            route: Route {
                // Only a connection without a route needs the listener.
                listener: 0,
                group: shared.group(&message.group),
                greeting: Vec::new(),
                header: None,
            },
            search: Search::default(),
            account: Account::new(record(message, shared), accepted_at)
                .with_earlier(earlier_bytes, message.header_bytes),
            paced: shared.paced_connection(),
            keep_alive: KeepAliveSchedule::BOTH_SOCKETS,
            is_ack_delayed: false,
            lifetime_until: shared.lifetime_until(age, context),
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
        if handed.message.is_established() {
            let ConnectionMessage { group, upstream, .. } = &handed.message;
            let slot = handed.slot.take().or_else(|| shared.slot_of_handed(group, upstream));
            self.search.chosen = slot.map(Chosen::new);
        }
        match handed.message.waiting.take() {
            None => {
                self.take_established(handed, shared);
                self.close_if_withdrawn(shared);
            }
            Some(waiting) => self.take_waiting(handed, &waiting, context),
        }
    }

    fn take_established(&mut self, handed: HandedConnection, shared: &LoopState) {
        let HandedConnection { client, upstream, to_upstream, to_client, .. } = handed;
        let Some(upstream) = upstream else { return };
        // The registration reports at once what is to be received, but the bytes that are left are
        // sent first. A send that finds a failure takes the failure from the socket.
        let events = |socket: &OwnedFd| {
            let tail = pending_tail(socket);
            Events { tail, has_ended: tail == Tail::End, ..Events::CONNECTED }
        };
        self.client.events = events(&client);
        self.upstream.events = events(&upstream);
        self.client.registration.sends_next = !to_client.is_empty();
        self.upstream.registration.sends_next = !to_upstream.is_empty();
        let are_tcp = [self.client.is_tcp, self.upstream.is_tcp];
        let forwarder = Forwarder::with_connected(client, upstream, are_tcp, shared.pool())
            .with_first_bytes_to_b(&to_upstream)
            .and_then(|forwarder| forwarder.with_first_bytes_to_a(&to_client));
        if let Ok(forwarder) = forwarder {
            let (client, upstream) = forwarder.sockets();
            [client, upstream].into_iter().for_each(close_as_usual);
            if shared.log.is_on() && self.account.record.source.is_none() {
                // The other process may lack a log.
                self.account.record.source = local_address(upstream);
            }
            self.state = State::Forwarding(Box::new(forwarder));
        }
    }

    /// Asks for the end of the connection if the operator withdrew the upstream and its connections
    /// are to be closed by now. The other process did not know that when it connected.
    fn close_if_withdrawn(&mut self, shared: &LoopState) {
        let Some(chosen) = &self.search.chosen else { return };
        if chosen.upstream.administration() == AdminState::Enabled {
            return;
        }
        let due = shared.closings.due(Instant::now());
        if due.iter().any(|closing| Arc::ptr_eq(&closing.upstream, &chosen.upstream)) {
            self.request_end(End::Drained);
        }
    }

    fn take_waiting(
        &mut self,
        handed: HandedConnection,
        waiting: &WaitingMessage,
        context: &Context<'_>,
    ) {
        handed.sockets().for_each(close_as_usual);
        let HandedConnection { client, to_upstream, fields, .. } = handed;
        // The group may send a header in this process.
        let fields = Fields::parse(&fields).unwrap_or_default();
        self.route.header = Some(Box::new(HeaderParts {
            named_by: NamedBy { destination: waiting.destination, fields },
            greeting: greeting::parse(&to_upstream).unwrap_or(Greeting::Other),
        }));
        self.route.greeting = to_upstream;
        self.upstream.events = Events::default();
        self.search = match waiting.queued_since {
            Some(since) => Search::queued(since),
            None => Search::paused(self.account.record.connect.attempts, context),
        };
        self.state = State::Searching(client);
    }
}

/// The record of a connection of another process.
fn record(message: &ConnectionMessage, shared: &LoopState) -> Record {
    let record = message.record.clone();
    Record { listener: shared.listener_name(&record.listener), ..record }
}
