//! The bytes between a client and its upstream. Each step prepares both sockets, forwards, accounts
//! for what moved, and acts on what the step returned.

use super::account::MovedBytes;
use super::state::Attempt;
use super::{Connection, State, local_address, sent_bytes};
use crate::loop_state::LoopState;
use crate::record::log::End;
use haul::{ForwardSide, Forwarder, Step};
use haul_server::connect;
use haul_server::event_loop::{Action, Context, NEVER, Side, Tail};
use haul_server::offload::NoJob;
use std::time::Instant;

impl Connection {
    /// Forwards between the client and the first attempt that succeeded. Other attempts end.
    pub(super) fn begin_forwarding(
        &mut self,
        attempt: Attempt,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let Attempt { socket, address, .. } = attempt;
        let is_tcp = address.is_some();
        self.upstream.is_tcp = is_tcp;
        self.account.record.upstream_address = address;
        if is_tcp && shared.log.is_on() {
            // At the end of a connection that failed, the socket lost its port.
            self.account.record.source = local_address(&socket);
        }
        if let Some(chosen) = &self.search.chosen {
            chosen.upstream.record_success();
        }
        let first_bytes = self.first_bytes(shared);
        if is_tcp || self.keep_alive.includes_client() {
            self.keep_alive.schedule(shared.limits(), self.account.record.id, context);
        }
        self.is_ack_delayed = is_tcp;
        self.upstream.registration.sends_next = !first_bytes.is_empty();
        let are_tcp = [self.client.is_tcp, is_tcp];
        let forwarded = self.state.forward(|client| {
            Forwarder::with_connected(client, socket, are_tcp, shared.pool())
                .with_first_bytes_to_b(&first_bytes)
        });
        // A connection that fails here has moved no bytes.
        forwarded.err().map(|_| self.finish(End::UpstreamFailed, shared))
    }

    /// The header and the greeting. The connection does not keep their memory.
    fn first_bytes(&mut self, shared: &LoopState) -> Vec<u8> {
        let State::Connecting { client, .. } = &self.state else { return Vec::new() };
        let mut first_bytes = self.route.make_header(client, &mut self.account, shared);
        self.account.header_bytes = first_bytes.len() as u64;
        first_bytes.extend(std::mem::take(&mut self.route.greeting));
        first_bytes
    }

    /// Receives small messages, which [`Connection::drive`] sends; true if there is one.
    pub fn prepare(&mut self, shared: &LoopState) -> bool {
        if self.client.may_have_failed() || self.upstream.may_have_failed() {
            // [`Connection::failed_before_send`] finds the failure.
            return false;
        }
        let State::Forwarding(forwarder) = &mut self.state else { return false };
        self.account.begin_turn(shared.measures_time());
        let (client, upstream) = (self.client.events, self.upstream.events);
        forwarder.set_peer_has_ended(client.tail == Tail::End, upstream.tail == Tail::End);
        let before = MovedBytes::of(forwarder);
        let is_small = forwarder.prepare(client.readiness(), upstream.readiness());
        self.account.record_prepared(before, forwarder);
        self.account.end_turn();
        is_small
    }

    /// Forwards what can be forwarded now; `None` once the state changed.
    pub(super) fn forward(
        &mut self,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        if context.now_seconds() >= self.lifetime_until {
            return Some(self.finish(End::Lifetime, shared));
        }
        if let Some(failed) = self.failed_before_send() {
            self.fail(failed, shared, context);
            return None;
        }
        self.prepare_sockets(shared, context);
        let (step, has_moved) = self.step()?;
        self.acknowledge_handshake();
        match step {
            Ok(Step::Wait { a, b }) => self.wait([a, b], has_moved, shared, context),
            Ok(Step::Yield) => Some(Action::Yield),
            Ok(Step::Done) => Some(self.finish(End::Complete, shared)),
            Err(haul::Error::TimedOut(_)) => Some(self.finish(End::Idle, shared)),
            Err(_) => self.fail_step(shared, context),
        }
    }

    /// Sets the keep-alive and the rate of both sockets, if they are due.
    fn prepare_sockets(&mut self, shared: &LoopState, context: &Context<'_>) {
        let State::Forwarding(forwarder) = &self.state else { return };
        self.keep_alive.set(forwarder.sockets(), shared.limits(), context);
        if let Some(paced) = &mut self.paced {
            let (client, upstream) = forwarder.sockets();
            paced.pace([upstream, client], shared.limits().rate_bytes_per_second);
        }
    }

    /// Takes a step, and accounts for its bytes. Also returns whether bytes moved.
    fn step(&mut self) -> Option<(Result<Step, haul::Error>, bool)> {
        let State::Forwarding(forwarder) = &mut self.state else { return None };
        let before = MovedBytes::of(forwarder);
        let (client, upstream) = (self.client.events, self.upstream.events);
        forwarder.set_peer_has_ended(client.tail == Tail::End, upstream.tail == Tail::End);
        let step = forwarder.step_ready(client.readiness(), upstream.readiness());
        let has_moved = self.account.record_step(before, forwarder);
        if let Some(paced) = &mut self.paced {
            paced.record(sent_bytes(&forwarder.report()));
        }
        Some((step, has_moved))
    }

    /// Ends the handshake with the upstream after the first step, unless the step sent bytes, which
    /// end the handshake. A server that speaks first waits for this end.
    fn acknowledge_handshake(&mut self) {
        let State::Forwarding(forwarder) = &self.state else { return };
        if std::mem::take(&mut self.is_ack_delayed) && sent_bytes(&forwarder.report())[0] == 0 {
            connect::acknowledge(forwarder.sockets().1);
        }
    }

    /// Acts on the failure of a step; `None` once the state changed.
    fn fail_step(
        &mut self,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        let failed = match forwarder.failed_side() {
            Some(ForwardSide::A) => Side::Client,
            Some(ForwardSide::B) => Side::Upstream,
            // The proxy lacks memory or descriptors.
            None => return Some(self.finish(End::Shortage, shared)),
        };
        self.fail(failed, shared, context);
        None
    }

    /// Waits for what a step waits for on both sockets; `None` once the state changed.
    fn wait(
        &mut self,
        [client, upstream]: [haul::Readiness; 2],
        has_moved: bool,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        let sockets = forwarder.sockets();
        let [to_upstream, to_client] = sent_bytes(&forwarder.report());
        let has_upstream_sent = self.upstream.forwarded_since(to_client) > 0;
        let has_client_sent = self.client.forwarded_since(to_upstream) > 0;
        self.client.record_forwarded(to_upstream, has_upstream_sent);
        self.upstream.record_forwarded(to_client, has_client_sent);
        let repeats = [
            self.client.update([client, upstream], has_moved, sockets.0, context),
            self.upstream.update([upstream, client], has_moved, sockets.1, context),
        ];
        if repeats.contains(&true) {
            return Some(Action::Yield);
        }
        let deadline = forwarder.deadline();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let idle_until = left.map_or(NEVER, |left| context.deadline(left.as_secs() as u32));
        if let Some(failed) = self.failed_side() {
            // The other side does not take all bytes that arrived from the failed side.
            self.fail(failed, shared, context);
            return None;
        }
        let resume_at = [&self.client, &self.upstream].map(|one| one.registration.resume_at());
        let until = [idle_until, self.lifetime_until, self.keep_alive.at()];
        let until = until.into_iter().chain(resume_at).min().unwrap_or(NEVER);
        Some(Action::WaitUntil(until))
    }
}
