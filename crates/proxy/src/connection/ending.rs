//! The end of a connection: closes both sides, and logs the connection.

use super::delivery::{Delivered, Delivery, FailedConnection};
use super::state::ConnectionForwarder;
use super::{Connection, State};
use crate::loop_state::LoopState;
use crate::record::connection::TcpStatistics;
use crate::record::log::{End, Ending};
use crate::socket::pending_tail;
use haul::ForwardReport;
use haul_server::event_loop::{Action, Context, Side, Tail};
use haul_server::offload::NoJob;

/// The time, in seconds, in which some bytes of the failed side must arrive at the other side.
const DELIVERY_SECONDS: u32 = 30;

impl Connection {
    /// The side whose connection failed, as far as events tell.
    pub(super) fn failed_side(&self) -> Option<Side> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        let (client, upstream) = forwarder.sockets();
        if self.client.has_failed(client) {
            Some(Side::Client)
        } else if self.upstream.has_failed(upstream) {
            Some(Side::Upstream)
        } else {
            None
        }
    }

    /// The side whose connection failed, of the sides that a step would send to. A send takes
    /// the failure from the socket, which then does not tell whether its stream ended before.
    pub(super) fn failed_before_send(&mut self) -> Option<Side> {
        let State::Forwarding(forwarder) = &self.state else { return None };
        if forwarder.has_prepared_failure() {
            return None;
        }
        let (client_socket, upstream_socket) = forwarder.sockets();
        let (client, upstream) = (&mut self.client, &mut self.upstream);
        // A step sends a side the bytes that are left for that side, and the bytes of the other
        // side.
        let is_client_sent_to = client.registration.sends_next || upstream.events.is_readable;
        let is_upstream_sent_to = upstream.registration.sends_next || client.events.is_readable;
        for (side, endpoint, socket, is_sent_to) in [
            (Side::Client, client, client_socket, is_client_sent_to),
            (Side::Upstream, upstream, upstream_socket, is_upstream_sent_to),
        ] {
            if !endpoint.may_have_failed() || !is_sent_to {
                continue;
            }
            match pending_tail(socket) {
                Tail::Failed => return Some(side),
                tail => endpoint.events.has_ended |= tail == Tail::End && endpoint.is_tcp,
            }
        }
        None
    }

    /// Closes the socket of a side that failed. The other side still receives what arrived from
    /// the failed side, because a server that refuses an upload answers before it closes the
    /// connection.
    pub(super) fn fail(&mut self, failed: Side, shared: &mut LoopState, context: &Context<'_>) {
        let State::Forwarding(forwarder) = &self.state else { return };
        let end = match failed {
            Side::Client => End::ClientFailed,
            Side::Upstream => End::UpstreamFailed,
        };
        let tcp = tcp_statistics(forwarder, shared);
        let record = FailedConnection { end, report: forwarder.report(), tcp };
        let Some(parts) = self.state.split() else {
            self.finish(end, shared);
            return;
        };
        let (sockets, received, has_ended, receiver) = match failed {
            Side::Client => {
                let has_ended = parts.a_has_ended || self.client.events.has_ended;
                ([parts.a, parts.b], parts.a_to_b, has_ended, &mut self.upstream)
            }
            Side::Upstream => {
                if let Some(chosen) = &mut self.search.chosen {
                    // Only the client's connection goes on.
                    chosen.free_slot();
                }
                let has_ended = parts.b_has_ended || self.upstream.events.has_ended;
                ([parts.b, parts.a], parts.b_to_a, has_ended, &mut self.client)
            }
        };
        receiver.registration.only_write(&sockets[1], context);
        let until = context.deadline(DELIVERY_SECONDS);
        let delivery = Delivery::new(sockets, received, has_ended, until, record);
        self.state = State::Delivering(Box::new(delivery));
    }

    /// Delivers the bytes that are left to the side that has not failed, and closes that side: by a
    /// reset, unless the stream is complete.
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
            // The socket does not report when its queue is empty, so it is asked once a second.
            Delivered::Waiting | Delivered::Sent if !is_over => {
                Action::WaitUntil(context.deadline(0))
            }
            Delivered::Waiting | Delivered::Incomplete => self.finish(end, shared),
            // The kernel continues to send what the peer did not acknowledge yet.
            Delivered::Sent | Delivered::Complete => self.finish_delivery(shared),
        }
    }

    /// Closes the socket of a side to which the stream is complete, and logs the connection.
    fn finish_delivery(&mut self, shared: &mut LoopState) -> Action<NoJob> {
        if let State::Delivering(delivery) = &self.state {
            let FailedConnection { end, report, tcp } = delivery.record.clone();
            self.state.end();
            self.log(end, &report, tcp, shared);
        }
        Action::Close
    }

    /// Ends the connection, and logs it. Sockets that were forwarded between close with the
    /// connection, other sockets at once.
    pub(super) fn finish(&mut self, end: End, shared: &mut LoopState) -> Action<NoJob> {
        let (end, report, tcp) = match &self.state {
            State::Forwarding(forwarder) => {
                (end, forwarder.report(), tcp_statistics(forwarder, shared))
            }
            // The failure is the cause, even if the delivery is given up.
            State::Delivering(delivery) => {
                let FailedConnection { end, report, tcp } = delivery.record.clone();
                (end, report, tcp)
            }
            _ => (end, ForwardReport::default(), [None; 2]),
        };
        if end != End::Complete {
            self.state.reset_on_close();
        }
        let queued_since = match &self.state {
            State::Queued { since, .. } => Some(*since),
            // The client waited in another process, and was not queued in this process.
            _ => self.search.queued_since.take(),
        };
        if let Some(since) = queued_since {
            self.add_queue_time(since.elapsed());
        }
        self.state.end();
        self.log(end, &report, tcp, shared);
        Action::Close
    }

    /// Logs the connection, once.
    fn log(
        &mut self,
        end: End,
        report: &ForwardReport,
        tcp: [Option<TcpStatistics>; 2],
        shared: &mut LoopState,
    ) {
        if self.account.is_logged {
            return;
        }
        self.account.is_logged = true;
        self.account.end_turn();
        let bytes = self.account.client_bytes(report);
        let ending = Ending {
            end,
            duration: self.account.accepted_at.elapsed(),
            group: self.group_name(),
            upstream: self.upstream_name(),
            bytes: &bytes,
            tcp,
        };
        shared.record_end(&self.account.record, &ending);
    }

    /// The last call for the connection.
    pub fn close(mut self, shared: &mut LoopState) {
        self.finish(End::CutOff, shared);
    }
}

/// The kernel's statistics of both TCP connections, if the proxy has a log.
fn tcp_statistics(
    forwarder: &ConnectionForwarder,
    shared: &LoopState,
) -> [Option<TcpStatistics>; 2] {
    if !shared.log.is_on() {
        return [None; 2];
    }
    let (client, upstream) = forwarder.sockets();
    [client, upstream].map(TcpStatistics::of)
}
