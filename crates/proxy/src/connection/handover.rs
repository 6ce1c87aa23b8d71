//! A connection leaves for another process, or comes from one ([`crate::handover`]).

use super::{Chosen, Connection, Events, MovedBytes, Search, State, reset_on_close};
use crate::handed::{ConnectionMessage, HandedConnection, HandedDirection};
use crate::log::{LoopTime, Record};
use crate::loop_state::LoopState;
use haul::{ForwardReport, Forwarder};
use haul_server::event_loop::{Context, Side};
use std::time::{Duration, Instant, SystemTime};

impl Connection {
    /// Gives the connection to another process, if it has an upstream: its state is closed then.
    pub fn hand_over(&mut self, context: &Context<'_>) -> Option<HandedConnection> {
        let State::Forwarding(_) = &self.state else { return None };
        let State::Forwarding(forwarder) = std::mem::replace(&mut self.state, State::Closed) else {
            return None;
        };
        let report = self.whole_report(&forwarder.report());
        let parts = match forwarder.into_parts() {
            Ok(parts) => parts,
            // A pipe could not be read. It stays here.
            Err(error) => {
                self.state = State::Forwarding(error.forwarder);
                return None;
            }
        };
        // The other process has the same sockets, and this one does not follow their events.
        context.unregister(&parts.a);
        context.unregister(&parts.b);
        self.is_logged = true;
        if let Some(chosen) = &mut self.upstream {
            chosen.keep_slot();
        }
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let since_1970 = self.record.accepted.duration_since(SystemTime::UNIX_EPOCH);
        let record = &self.record;
        let message = ConnectionMessage {
            id: record.id,
            client: record.client,
            server_name: record.server_name.clone(),
            unique_id: record.unique_id.clone(),
            group: self.group.as_ref().map_or_else(String::new, |group| group.name().into()),
            upstream: self.upstream_name().unwrap_or_default().into(),
            accepted_us: micros(since_1970.unwrap_or_default()),
            age_us: micros(self.accepted_at.elapsed()),
            queue_us: record.queue_time.map(micros),
            connect_attempts: record.connect_attempts,
            connect_us: record.connect_time.map(micros),
            first_byte_us: record.first_byte_time.map(micros),
            loop_us: micros(record.loop_time.total),
            splice_us: micros(record.loop_time.splicing),
            copy_us: micros(record.loop_time.copying),
            header_bytes: self.header_bytes,
            to_upstream: HandedDirection::new(&report.a_to_b, &parts.a_to_b),
            to_client: HandedDirection::new(&report.b_to_a, &parts.b_to_a),
        };
        Some(HandedConnection {
            message,
            client: parts.a,
            upstream: parts.b,
            to_upstream: parts.a_to_b,
            to_client: parts.b_to_a,
        })
    }

    /// Goes on with a connection of another process. Its ends are read again from the sockets.
    pub fn adopt(handed: HandedConnection, shared: &mut LoopState, context: &Context<'_>) -> Self {
        let HandedConnection { message, client, upstream, to_upstream, to_client } = handed;
        shared.set_options(&client);
        shared.set_options(&upstream);
        let registered = context
            .register(&client, Side::Client)
            .and_then(|()| context.register(&upstream, Side::Upstream));
        if registered.is_err() {
            reset_on_close(&client);
            reset_on_close(&upstream);
        }
        // Both are connected stream sockets.
        let forwarder = registered.ok().and_then(|()| {
            let forwarder = Forwarder::with_pool(client, upstream, shared.pool()).ok()?;
            let forwarder = forwarder.with_first_bytes_to_b(&to_upstream).ok()?;
            forwarder.with_first_bytes_to_a(&to_client).ok()
        });
        let group = shared.group(&message.group);
        let slot = shared.slot_of_established(group.as_deref(), &message.upstream);
        let micros = Duration::from_micros;
        let mut connection = Self {
            state: forwarder
                .map_or(State::Closed, |forwarder| State::Forwarding(Box::new(forwarder))),
            // The first step finds out.
            client_events: Events::ALL,
            upstream_events: Events::ALL,
            listener: 0,
            are_tcp: [message.client.is_some(), false],
            group,
            greeting: Vec::new(),
            upstream: slot.map(Chosen::new),
            search: Search::default(),
            paced: shared.paced_connection(),
            header: None,
            header_bytes: message.header_bytes,
            report_before: ForwardReport::default(),
            accepted_at: Instant::now()
                .checked_sub(micros(message.age_us))
                .unwrap_or_else(Instant::now),
            lifetime_until: shared.lifetime_until(micros(message.age_us), context),
            record: Record {
                id: message.id,
                accepted: SystemTime::UNIX_EPOCH + micros(message.accepted_us),
                client: message.client,
                server_name: message.server_name,
                unique_id: message.unique_id,
                queue_time: message.queue_us.map(micros),
                connect_attempts: message.connect_attempts,
                connect_time: message.connect_us.map(micros),
                first_byte_time: message.first_byte_us.map(micros),
                loop_time: LoopTime {
                    total: micros(message.loop_us),
                    splicing: micros(message.splice_us),
                    copying: micros(message.copy_us),
                },
            },
            turn_started: None,
            turn_bytes: MovedBytes::default(),
            has_prepared: false,
            is_logged: false,
            requested_end: None,
        };
        connection.report_before.a_to_b = message.to_upstream.report();
        connection.report_before.b_to_a = message.to_client.report();
        connection
    }
}
