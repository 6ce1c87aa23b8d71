//! The end of a connection: what becomes of the other side, and what is logged.

use super::delivery::{Delivered, Delivery, FailedConnection};
use super::{Connection, Events, State};
use crate::log::{End, Ending, TcpStatistics};
use crate::loop_state::LoopState;
use crate::socket::{is_gone, pending_tail, reset_on_close};
use haul::{ForwardReport, Forwarder};
use haul_server::event_loop::{Action, Context, Side, Tail};
use haul_server::offload::NoJob;
use haul_sys::tcp_info::tcp_info;
use std::os::fd::OwnedFd;

/// The time, in seconds, in which some of what a failed side has sent must arrive at the other one.
const DELIVERY_SECONDS: u32 = 30;

impl Connection {
    /// The side whose connection has failed, as far as events tell.
    pub(super) fn failed_side(&self) -> Option<Side> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        let (client, upstream) = forwarder.sockets();
        let has_failed =
            |events: Events, socket, is_tcp| events.tail == Tail::Failed && is_gone(socket, is_tcp);
        if has_failed(self.client_events, client, self.are_tcp[0]) {
            Some(Side::Client)
        } else if has_failed(self.upstream_events, upstream, self.are_tcp[1]) {
            Some(Side::Upstream)
        } else {
            None
        }
    }

    /// The side whose connection has failed, of those that a step would send to. A send takes the
    /// failure from the socket, which then no longer tells whether its stream had ended before.
    pub(super) fn failed_before_send(&mut self) -> Option<Side> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        if forwarder.has_prepared_failure() {
            return None;
        }
        let (client, upstream) = forwarder.sockets();
        let may_have_failed = self.may_have_failed();
        let events = [&mut self.client_events, &mut self.upstream_events];
        // A side is sent what is left for it, and what the other one has.
        let is_left = self.registrations.map(|one| one.sends_next);
        let is_sent_to = [0, 1].map(|side| is_left[side] || events[1 - side].is_readable);
        for (index, (socket, events)) in [client, upstream].into_iter().zip(events).enumerate() {
            if !may_have_failed[index] || !is_sent_to[index] {
                continue;
            }
            match pending_tail(socket) {
                Tail::Failed => return Some([Side::Client, Side::Upstream][index]),
                tail => events.has_ended |= tail == Tail::End && self.are_tcp[index],
            }
        }
        None
    }

    /// Whether the client's connection, and the upstream's, may have failed: an event has reported
    /// that, or none would.
    pub(super) fn may_have_failed(&self) -> [bool; 2] {
        let events = [self.client_events, self.upstream_events];
        [0, 1].map(|index| {
            events[index].tail == Tail::Failed || self.registrations[index].is_paused()
        })
    }

    /// Closes the socket of a side that has failed. The other side still gets what it has sent: a
    /// server that refuses an upload has answered before it closed the connection.
    pub(super) fn fail(&mut self, failed: Side, shared: &mut LoopState, context: &Context<'_>) {
        let State::Forwarding(forwarder) = std::mem::replace(&mut self.state, State::Closed) else {
            return;
        };
        let (report, tcp) = (forwarder.report(), self.tcp_statistics(&forwarder, shared));
        let is_client = failed == Side::Client;
        let end = if is_client { End::ClientFailed } else { End::UpstreamFailed };
        let record = FailedConnection { end, report, tcp };
        let parts = match forwarder.into_parts() {
            Ok(parts) => parts,
            Err(error) => {
                self.state = State::Forwarding(error.forwarder);
                self.finish(end, shared);
                return;
            }
        };
        let (sockets, received, has_ended) = if is_client {
            let has_ended = parts.a_has_ended || self.client_events.has_ended;
            ([parts.a, parts.b], parts.a_to_b, has_ended)
        } else {
            let has_ended = parts.b_has_ended || self.upstream_events.has_ended;
            ([parts.b, parts.a], parts.b_to_a, has_ended)
        };
        if let Some(chosen) = self.upstream.as_mut().filter(|_| !is_client) {
            // Only the client's connection goes on.
            chosen.free_slot();
        }
        self.registrations[usize::from(is_client)].only_write(&sockets[1], context);
        let until = context.deadline(DELIVERY_SECONDS);
        let delivery = Delivery::new(sockets, received, has_ended, until, record);
        self.state = State::Delivering(Box::new(delivery));
    }

    /// Delivers the rest to the side that has not failed, and closes it: by a reset, unless the
    /// stream to it is complete.
    pub(super) fn deliver(
        &mut self,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Action<NoJob> {
        let State::Delivering(delivery) = &mut self.state else { return Action::Close };
        let delivered = delivery.advance();
        if delivery.has_progressed() {
            delivery.until = context.deadline(DELIVERY_SECONDS);
        }
        let is_over = context.now_seconds() >= delivery.until;
        let end = delivery.record.end;
        match delivered {
            // The socket does not report when its queue is empty: it is asked once a second.
            Delivered::Waiting | Delivered::Sent if !is_over => {
                Action::WaitUntil(context.deadline(0))
            }
            Delivered::Waiting | Delivered::Incomplete => self.finish(end, shared),
            // The kernel goes on with what the peer has not acknowledged.
            Delivered::Sent | Delivered::Complete => self.finish_delivery(shared),
        }
    }

    /// Closes the socket of a side to which the stream is complete, and logs the connection.
    fn finish_delivery(&mut self, shared: &mut LoopState) -> Action<NoJob> {
        if let State::Delivering(delivery) = std::mem::replace(&mut self.state, State::Closed) {
            let FailedConnection { end, report, tcp } = &delivery.record;
            self.log(*end, report, *tcp, shared);
        }
        Action::Close
    }

    /// Ends the connection, and logs it. Sockets that were forwarded between close with the
    /// connection, others at once.
    pub(super) fn finish(&mut self, end: End, shared: &mut LoopState) -> Action<NoJob> {
        let state = std::mem::replace(&mut self.state, State::Closed);
        let (report, tcp) = match &state {
            State::Forwarding(forwarder) => {
                (forwarder.report(), self.tcp_statistics(forwarder, shared))
            }
            State::Delivering(delivery) => (delivery.record.report.clone(), delivery.record.tcp),
            _ => <(ForwardReport, _)>::default(),
        };
        if end != End::Complete {
            // A stream that was cut off must not look like one that has ended.
            match &state {
                State::Greeting { client, .. }
                | State::Accepted(client)
                | State::Queued { client, .. } => reset_on_close(client),
                State::Connecting { client, attempts, .. } => {
                    reset_on_close(client);
                    for attempt in attempts {
                        reset_on_close(&attempt.socket);
                    }
                }
                State::Forwarding(forwarder) => {
                    let (client, upstream) = forwarder.sockets();
                    reset_on_close(client);
                    reset_on_close(upstream);
                }
                State::Delivering(delivery) => reset_on_close(&delivery.socket),
                State::Ended { .. } | State::Closed => {}
            }
        }
        let queued_since = match &state {
            State::Queued { since, .. } => Some(*since),
            // It has waited in another process, and was not queued in this one.
            _ => self.search.queued_since.take(),
        };
        if let Some(since) = queued_since {
            self.add_queue_time(since.elapsed());
        }
        let end = match &state {
            // The failure is the cause, also if the rest is not waited for.
            State::Delivering(delivery) => delivery.record.end,
            _ => end,
        };
        match state {
            State::Forwarding(forwarder) => self.state = State::Ended { _sockets: forwarder },
            others => drop(others),
        }
        self.log(end, &report, tcp, shared);
        Action::Close
    }

    /// What the kernel has measured of both connections, for the log. Some of them also tell
    /// whether the upstream is near.
    fn tcp_statistics(
        &self,
        forwarder: &Forwarder<OwnedFd, OwnedFd>,
        shared: &LoopState,
    ) -> [Option<TcpStatistics>; 2] {
        let nearness = self.upstream.as_ref().map(|chosen| chosen.upstream.nearness());
        let nearness = nearness.filter(|one| one.takes_sample());
        let is_logged = shared.log.is_on();
        if !is_logged && nearness.is_none() {
            return [None; 2];
        }
        let (client, upstream) = forwarder.sockets();
        let upstream_info = tcp_info(upstream).ok();
        if let (Some(nearness), Some(info)) = (nearness, &upstream_info) {
            nearness.record(info);
        }
        if !is_logged {
            return [None; 2];
        }
        [TcpStatistics::of(client), upstream_info.as_ref().map(TcpStatistics::from)]
    }

    /// Logs the connection, once.
    fn log(
        &mut self,
        end: End,
        report: &ForwardReport,
        tcp: [Option<TcpStatistics>; 2],
        shared: &mut LoopState,
    ) {
        if self.is_logged {
            return;
        }
        self.is_logged = true;
        self.end_turn();
        let bytes = self.client_bytes(report);
        let ending = Ending {
            end,
            duration: self.accepted_at.elapsed(),
            group: self.group_name(),
            upstream: self.upstream_name(),
            bytes: &bytes,
            tcp,
        };
        shared.record_end(&self.record, &ending);
    }

    /// The last call for the connection.
    pub fn close(mut self, shared: &mut LoopState) {
        self.finish(End::CutOff, shared);
    }
}
