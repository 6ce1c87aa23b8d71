//! A connection leaves for another process ([`crate::handover`]).

use super::connecting::Chosen;
use super::{Connection, State};
use crate::handover_message::{
    ConnectionMessage, HandedConnection, HandedDirection, WaitingMessage,
};
use crate::host_instant::HostInstant;
use haul_server::event_loop::Context;

impl Connection {
    /// Gives the connection to another process, and is closed then. `None` if the connection stays
    /// here: until its greeting arrived and its upstream is connected, and once a side failed.
    pub fn hand_over(&mut self, context: &Context<'_>) -> Option<HandedConnection> {
        let handed = match &self.state {
            State::Forwarding(_) => self.hand_over_established()?,
            // A connection searches between two rounds of attempts.
            State::Queued { .. } | State::Searching(_) => self.hand_over_waiting()?,
            _ => return None,
        };
        // The other process has the same sockets, and this process does not follow their events.
        handed.sockets().for_each(|socket| context.unregister(socket));
        self.account.is_logged = true;
        Some(handed)
    }

    /// Takes a connection apart; `None` if a pipe could not be read, and the connection stays.
    fn hand_over_established(&mut self) -> Option<HandedConnection> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        let bytes = self.account.whole_bytes(&forwarder.report());
        let parts = self.state.split()?;
        let slot = self.search.chosen.as_mut().and_then(Chosen::take_slot);
        let (to_upstream, to_client) = (
            HandedDirection { bytes: bytes.to_upstream, unsent_len: parts.a_to_b.len() },
            HandedDirection { bytes: bytes.to_client, unsent_len: parts.b_to_a.len() },
        );
        Some(HandedConnection {
            message: self.message(to_upstream, to_client),
            client: parts.a,
            upstream: Some(parts.b),
            to_upstream: parts.a_to_b,
            to_client: parts.b_to_a,
            fields: Vec::new(),
            slot,
            place: None,
            receipt: None,
        })
    }

    fn hand_over_waiting(&mut self) -> Option<HandedConnection> {
        let (client, queued_since) = self.state.stop_waiting()?;
        let greeting = std::mem::take(&mut self.route.greeting);
        let named_by = self.route.header.take().map(|header| header.named_by).unwrap_or_default();
        let fields = named_by.fields.as_bytes().to_vec();
        let to_upstream =
            HandedDirection { unsent_len: greeting.len(), ..HandedDirection::default() };
        let mut message = self.message(to_upstream, HandedDirection::default());
        message.waiting = Some(WaitingMessage {
            destination: named_by.destination,
            fields_len: fields.len(),
            queued_since,
        });
        Some(HandedConnection {
            message,
            client,
            upstream: None,
            to_upstream: greeting,
            to_client: Vec::new(),
            fields,
            slot: None,
            place: None,
            receipt: None,
        })
    }

    fn message(
        &self,
        to_upstream: HandedDirection,
        to_client: HandedDirection,
    ) -> ConnectionMessage {
        ConnectionMessage {
            record: self.account.record.clone(),
            group: self.group_name().unwrap_or_default().into(),
            upstream: self.upstream_name().unwrap_or_default().into(),
            accepted_at: HostInstant::ago(self.account.accepted_at.elapsed()),
            header_bytes: self.account.header_bytes,
            to_upstream,
            to_client,
            waiting: None,
        }
    }
}
