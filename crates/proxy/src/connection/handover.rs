//! A connection leaves for another process, or comes from one ([`crate::handover`]).

use super::{Chosen, Connection, Events, HeaderParts, MovedBytes, Search, State, reset_on_close};
use crate::greeting::{self, Greeting};
use crate::handed::{ConnectionMessage, HandedConnection, HandedDirection, WaitingMessage};
use crate::host_instant::HostInstant;
use crate::log::{LoopTime, Record};
use crate::loop_state::LoopState;
use haul::{ForwardReport, Forwarder};
use haul_server::event_loop::{Context, Side};
use haul_server::listener::NamedBy;
use haul_server::proxy_protocol::Fields;
use rustix::net::sockopt::set_socket_linger;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime};

impl Connection {
    /// Gives the connection to another process, if it has an upstream or waits in the queue: its
    /// state is closed then.
    pub fn hand_over(
        &mut self,
        shared: &LoopState,
        context: &Context<'_>,
    ) -> Option<HandedConnection> {
        let handed = match std::mem::replace(&mut self.state, State::Closed) {
            State::Forwarding(forwarder) => self.hand_over_established(*forwarder, shared)?,
            State::Queued { client, since, .. } => self.hand_over_waiting(client, since),
            state => {
                self.state = state;
                return None;
            }
        };
        // The other process has the same sockets, and this one does not follow their events.
        handed.sockets().for_each(|socket| context.unregister(socket));
        self.is_logged = true;
        Some(handed)
    }

    /// Takes a connection apart; `None` if a pipe could not be read, and the connection stays.
    fn hand_over_established(
        &mut self,
        forwarder: Forwarder<OwnedFd, OwnedFd>,
        shared: &LoopState,
    ) -> Option<HandedConnection> {
        let report = self.whole_report(&forwarder.report());
        let parts = match forwarder.into_parts() {
            Ok(parts) => parts,
            Err(error) => {
                self.state = State::Forwarding(error.forwarder);
                return None;
            }
        };
        let slot = self.upstream.as_mut().and_then(Chosen::take_slot);
        let (to_upstream, to_client) = (
            HandedDirection::new(&report.a_to_b, &parts.a_to_b),
            HandedDirection::new(&report.b_to_a, &parts.b_to_a),
        );
        let mut message = self.message(to_upstream, to_client);
        if self.group.is_none() {
            // The configuration lacks it, and another may have it.
            let removed = self.upstream.as_ref();
            let group = removed.and_then(|one| shared.group_of_removed(&one.upstream));
            message.group = group.unwrap_or_default();
        }
        Some(HandedConnection {
            message,
            client: parts.a,
            upstream: Some(parts.b),
            to_upstream: parts.a_to_b,
            to_client: parts.b_to_a,
            fields: Vec::new(),
            slot,
            place: None,
        })
    }

    fn hand_over_waiting(&mut self, client: OwnedFd, since: HostInstant) -> HandedConnection {
        let greeting = std::mem::take(&mut self.greeting);
        let named_by = self.header.take().map(|header| header.named_by).unwrap_or_default();
        let fields = named_by.fields.as_bytes().to_vec();
        let none = ForwardReport::default();
        let to_upstream = HandedDirection::new(&none.a_to_b, &greeting);
        let mut message = self.message(to_upstream, HandedDirection::new(&none.b_to_a, &[]));
        message.waiting = Some(WaitingMessage {
            since,
            destination: named_by.destination,
            fields_len: fields.len(),
        });
        HandedConnection {
            message,
            client,
            upstream: None,
            to_upstream: greeting,
            to_client: Vec::new(),
            fields,
            slot: None,
            place: None,
        }
    }

    fn message(
        &self,
        to_upstream: HandedDirection,
        to_client: HandedDirection,
    ) -> ConnectionMessage {
        let record = &self.record;
        let since_1970 = record.accepted.duration_since(SystemTime::UNIX_EPOCH);
        ConnectionMessage {
            id: record.id,
            client: record.client,
            server_name: record.server_name.clone(),
            unique_id: record.unique_id.clone(),
            group: self.group.as_ref().map_or_else(String::new, |group| group.name().into()),
            upstream: self.upstream_name().unwrap_or_default().into(),
            accepted_us: micros(since_1970.unwrap_or_default()),
            accepted_at: HostInstant::ago(self.accepted_at.elapsed()),
            queue_us: record.queue_time.map(micros),
            connect_attempts: record.connect_attempts,
            connect_us: record.connect_time.map(micros),
            first_byte_us: record.first_byte_time.map(micros),
            loop_us: micros(record.loop_time.total),
            splice_us: micros(record.loop_time.splicing),
            copy_us: micros(record.loop_time.copying),
            header_bytes: self.header_bytes,
            to_upstream,
            to_client,
            waiting: None,
        }
    }

    /// Goes on with a connection of another process. Its ends are read again from the sockets.
    pub fn adopt(handed: HandedConnection, shared: &mut LoopState, context: &Context<'_>) -> Self {
        let sockets: Vec<_> = handed.sockets().collect();
        let registered =
            sockets.iter().zip([Side::Client, Side::Upstream]).try_for_each(|(socket, side)| {
                shared.set_options(socket);
                context.register(socket, side)
            });
        if registered.is_err() {
            sockets.into_iter().for_each(reset_on_close);
        }
        let mut connection = Self::with_message(&handed.message, shared, context);
        connection.report_before.a_to_b = handed.message.to_upstream.report();
        connection.report_before.b_to_a = handed.message.to_client.report();
        if registered.is_ok() {
            connection.take_parts(handed, shared);
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
            listener: 0,
            are_tcp: [message.client.is_some(), false],
            group: shared.group(&message.group),
            greeting: Vec::new(),
            upstream: None,
            search: Search::default(),
            send_buffers: shared.send_buffers(),
            paced: shared.paced_connection(),
            header: None,
            header_bytes: message.header_bytes,
            report_before: ForwardReport::default(),
            accepted_at: Instant::now().checked_sub(age).unwrap_or_else(Instant::now),
            lifetime_until: shared.lifetime_until(age, context),
            record: Record {
                id: message.id,
                accepted: SystemTime::UNIX_EPOCH + duration(message.accepted_us),
                client: message.client,
                server_name: message.server_name.clone(),
                unique_id: message.unique_id.clone(),
                queue_time: message.queue_us.map(duration),
                connect_attempts: message.connect_attempts,
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
    fn take_parts(&mut self, handed: HandedConnection, shared: &mut LoopState) {
        let HandedConnection {
            message,
            client,
            upstream,
            to_upstream,
            to_client,
            fields,
            slot,
            place: _,
        } = handed;
        if let Some(upstream) = upstream {
            let slot =
                slot.or_else(|| shared.slot_of_established(&message.group, &message.upstream));
            self.upstream = slot.map(Chosen::new);
            // A stream that is cut off by a failure must not look like one that has ended.
            [&client, &upstream].into_iter().for_each(reset_on_close);
            // Both are connected stream sockets.
            let forwarder = Forwarder::with_pool(client, upstream, shared.pool())
                .and_then(|forwarder| forwarder.with_first_bytes_to_b(&to_upstream))
                .and_then(|forwarder| forwarder.with_first_bytes_to_a(&to_client));
            if let Ok(forwarder) = forwarder {
                let (client, upstream) = forwarder.sockets();
                for socket in [client, upstream] {
                    let _ = set_socket_linger(socket, None);
                }
                self.state = State::Forwarding(Box::new(forwarder));
            }
        } else if let Some(waiting) = message.waiting {
            let _ = set_socket_linger(&client, None);
            self.search.queued_since = Some(waiting.since);
            self.header = shared.header_version().map(|_| {
                let fields = Fields::parse(&fields).unwrap_or_default();
                Box::new(HeaderParts {
                    named_by: NamedBy { destination: waiting.destination, fields },
                    greeting: greeting::parse(&to_upstream).unwrap_or(Greeting::Other),
                })
            });
            self.greeting = to_upstream;
            self.upstream_events = Events::default();
            self.state = State::Accepted(client);
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
