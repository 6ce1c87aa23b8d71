//! A connection leaves for another process ([`crate::handover`]).

use super::connecting::Attempt;
use super::{Chosen, Connection, State};
use crate::handed::{
    AttemptMessage, ConnectionMessage, HandedConnection, HandedDirection, SearchMessage,
    SearchPhase,
};
use crate::host_instant::HostInstant;
use haul::Forwarder;
use haul_server::event_loop::Context;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

/// The most upstreams that are named as tried: the message has a limit.
const TRIED_MAX: usize = 64;

impl Connection {
    /// Gives the connection to another process, unless one of its sides has failed: its state is
    /// closed then.
    pub fn hand_over(&mut self, context: &Context<'_>) -> Option<HandedConnection> {
        let seconds_left = |deadline: u32| deadline.saturating_sub(context.now_seconds());
        let handed = match std::mem::replace(&mut self.state, State::Closed) {
            State::Forwarding(forwarder) => self.hand_over_established(*forwarder)?,
            State::Greeting { client, reader, deadline } => {
                self.greeting = reader.into_received();
                let seconds_left = seconds_left(deadline);
                self.hand_over_searching(client, SearchPhase::Greeting { seconds_left })
            }
            State::Queued { client, since, .. } => {
                self.hand_over_searching(client, SearchPhase::Queued { since })
            }
            State::Connecting { client, attempts, .. } => {
                let message = |attempt: &Attempt| AttemptMessage {
                    address: attempt.address,
                    seconds_left: seconds_left(attempt.deadline),
                };
                let phase = SearchPhase::Connecting {
                    attempts: attempts.iter().map(message).collect(),
                    addresses_tried: self.upstream.as_ref().map_or(0, Chosen::addresses_tried),
                };
                let upstreams = attempts.into_iter().map(|attempt| attempt.socket).collect();
                let slot = self.upstream.as_mut().and_then(Chosen::take_slot);
                let handed = self.hand_over_searching(client, phase);
                HandedConnection { upstreams, slot, ..handed }
            }
            // It does so only between two rounds of attempts.
            State::Accepted(client) => self.hand_over_searching(client, SearchPhase::Paused),
            state @ (State::Delivering(_) | State::Ended { .. } | State::Closed) => {
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
    ) -> Option<HandedConnection> {
        let bytes = self.whole_bytes(&forwarder.report());
        let parts = match forwarder.into_parts() {
            Ok(parts) => parts,
            Err(error) => {
                self.state = State::Forwarding(error.forwarder);
                return None;
            }
        };
        let slot = self.upstream.as_mut().and_then(Chosen::take_slot);
        let (to_upstream, to_client) = (
            HandedDirection { bytes: bytes.to_upstream, unsent_len: parts.a_to_b.len() },
            HandedDirection { bytes: bytes.to_client, unsent_len: parts.b_to_a.len() },
        );
        let message = self.message(to_upstream, to_client);
        Some(HandedConnection {
            message,
            client: parts.a,
            upstreams: vec![parts.b],
            to_upstream: parts.a_to_b,
            to_client: parts.b_to_a,
            fields: Vec::new(),
            slot,
            place: None,
            receipt: None,
        })
    }

    fn hand_over_searching(&mut self, client: OwnedFd, phase: SearchPhase) -> HandedConnection {
        let greeting = std::mem::take(&mut self.greeting);
        let named_by = self.header.take().map(|header| header.named_by).unwrap_or_default();
        let fields = named_by.fields.as_bytes().to_vec();
        let to_upstream =
            HandedDirection { unsent_len: greeting.len(), ..HandedDirection::default() };
        let mut message = self.message(to_upstream, HandedDirection::default());
        let upstreams = self.group.as_ref().map(|group| group.upstreams()).unwrap_or_default();
        let tried = self.search.tried.iter().filter_map(|&index| upstreams.get(index));
        message.search = Some(SearchMessage {
            destination: named_by.destination,
            fields_len: fields.len(),
            header: self.group.as_ref().and_then(|group| group.send_header()),
            tried: tried.take(TRIED_MAX).map(|upstream| upstream.name().into()).collect(),
            lacks_port: self.search.lacks_port,
            phase,
        });
        HandedConnection {
            message,
            client,
            upstreams: Vec::new(),
            to_upstream: greeting,
            to_client: Vec::new(),
            fields,
            slot: None,
            place: None,
            receipt: None,
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
            listener: record.listener.to_string(),
            server_name: record.server_name.clone(),
            unique_id: record.unique_id.clone(),
            group: self.group_name().unwrap_or_default().into(),
            upstream: self.upstream_name().unwrap_or_default().into(),
            upstream_address: record.upstream_address,
            source: record.source,
            accepted_us: micros(since_1970.unwrap_or_default()),
            accepted_at: HostInstant::ago(self.accepted_at.elapsed()),
            queue_us: record.queue_time.map(micros),
            connect_attempts: record.connect_attempts,
            connect_error: record.connect_error,
            connect_us: record.connect_time.map(micros),
            first_byte_us: record.first_byte_time.map(micros),
            loop_us: micros(record.loop_time.total),
            splice_us: micros(record.loop_time.splicing),
            copy_us: micros(record.loop_time.copying),
            header_bytes: self.header_bytes,
            to_upstream,
            to_client,
            search: None,
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
