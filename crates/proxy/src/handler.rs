//! The proxy's part of an event loop.

use crate::config::Config;
use crate::connection::Connection;
use crate::handover_message::queue::HandoverSender;
use crate::handover_message::{HandedConnection, Receipt};
use crate::loop_state::LoopState;
use crate::mailbox::{Mailboxes, Request};
use crate::record::log::End;
use crate::record::status::ConnectionStatus;
use crate::total_rate::Demand;
use crate::upstreams::closing::{ClosingReason, DueClosing};
use crate::upstreams::selection::ConnectionSelection;
use haul_server::admission::eviction::Activity;
use haul_server::admission::network::NetworkLimit;
use haul_server::clock::Clock;
use haul_server::event_loop::{
    Action, Adopted, Context, Handler, Handover, Interest, LoopSettings, Prepared, Readiness, Side,
};
use haul_server::listener::Accepted;
use haul_server::offload::NoJob;
use haul_server::{ConnectionCounters, LogLimiter};
use haul_sys::heap;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;
use tracing::warn;

/// The handler of one event loop.
#[derive(Debug)]
pub struct ProxyHandler {
    state: LoopState,
    clock: Clock,
    dropped_lines: LogLimiter,
    mailboxes: Arc<Mailboxes>,
    index: usize,
    /// Where connections go in a handover.
    handover: Option<HandoverSender>,
    /// Whether a connection waits for room to be handed over.
    awaits_room: bool,
    /// Connections of another process.
    adopted: VecDeque<HandedConnection>,
    /// The receipt of the connections that were adopted in this turn.
    receipt: Option<Receipt>,
    /// The tasks of the next visit of all connections.
    visits: Vec<Visit>,
    /// Whether connections may be due to be closed.
    checks_closings: bool,
    /// Whether a second of the rate of all connections is over.
    begins_paced_second: bool,
}

/// A task of a visit of all connections.
#[derive(Debug)]
enum Visit {
    List(Vec<ConnectionStatus>, Sender<Vec<ConnectionStatus>>),
    Kill(ConnectionSelection, usize, Sender<usize>),
    /// Close the connections of these upstreams.
    Close(Vec<DueClosing>),
    /// Hand the connections over.
    HandOver,
    /// Divide the rate of all connections anew.
    Pace([Demand; 2]),
}

impl ProxyHandler {
    /// Creates the handler of event loop `index`.
    pub fn new(index: usize, state: LoopState, mailboxes: Arc<Mailboxes>) -> Self {
        Self {
            state,
            clock: Clock::new(),
            dropped_lines: LogLimiter::default(),
            mailboxes,
            index,
            handover: None,
            awaits_room: false,
            adopted: VecDeque::new(),
            receipt: None,
            visits: Vec::new(),
            checks_closings: false,
            begins_paced_second: false,
        }
    }

    /// Hands the connection over if another process takes over and the connection can go. Returns
    /// `action` otherwise.
    fn hand_over_or(
        &mut self,
        action: Action<NoJob>,
        connection: &mut Connection,
        context: &Context<'_>,
    ) -> Action<NoJob> {
        let Some(handover) = &self.handover else { return action };
        if !handover.has_room() {
            self.awaits_room = true;
            return action;
        }
        let Some(mut handed) = connection.hand_over(context) else { return action };
        handed.place = Some(self.state.occupy_place(self.index));
        handover.send(handed);
        Action::Close
    }

    /// Whether connections are about to go to another process: once there is room, or once they
    /// are connected.
    fn has_leaving_connections(&self) -> bool {
        let awaits_room = self.awaits_room && self.state.counters.connections.open.get() > 0;
        self.handover.is_some() && (awaits_room || self.state.unconnected.get() > 0)
    }
}

impl Handler for ProxyHandler {
    type Connection = Connection;
    type Job = NoJob;

    fn begin_turn(&mut self, clock: &Clock) {
        self.clock = *clock;
    }

    fn counters(&self) -> &ConnectionCounters {
        &self.state.counters.connections
    }

    fn accept(&mut self, accepted: Accepted, context: &Context<'_>) -> io::Result<Connection> {
        if !self.state.routes().access().admits(accepted.peer.map(|peer| peer.ip())) {
            self.state.counters.connections.refused.add(1);
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        context.register(&accepted.socket, Side::Client, Interest::READ)?;
        if let Some(counter) = self.state.counters.listeners.get(accepted.listener) {
            counter.add(1);
        }
        let (now, started) = (self.clock.now(), self.clock.turn_started());
        Ok(Connection::new(accepted, now, started, &mut self.state, context))
    }

    fn receive(&mut self, connection: &mut Connection, event: Readiness) {
        connection.on_event(event);
    }

    fn prepare(&mut self, connection: &mut Connection) -> Prepared<NoJob> {
        if connection.prepare(&self.state) { Prepared::Small } else { Prepared::Large }
    }

    fn drive(&mut self, connection: &mut Connection, context: &Context<'_>) -> Action<NoJob> {
        let action = connection.drive(&mut self.state, context);
        self.hand_over_or(action, connection, context)
    }

    /// Established connections are not closed to make room.
    fn can_evict(&self) -> bool {
        false
    }

    fn activity(&self, _: &Connection) -> Activity {
        Activity::Working
    }

    fn expire(&mut self, connection: &mut Connection, context: &Context<'_>) -> Action<NoJob> {
        let action = connection.expire(&mut self.state, context);
        self.hand_over_or(action, connection, context)
    }

    fn close(&mut self, connection: Connection) {
        connection.close(&mut self.state);
    }

    fn on_wake(&mut self) {
        for request in self.mailboxes.take(self.index) {
            self.visits.push(match request {
                Request::List(answer) => Visit::List(Vec::new(), answer),
                Request::Kill(selection, answer) => Visit::Kill(selection, 0, answer),
                Request::Close => {
                    self.checks_closings = true;
                    continue;
                }
                Request::HandOver(handover) => {
                    self.handover = handover;
                    self.awaits_room = false;
                    Visit::HandOver
                }
                Request::ContinueHandover => {
                    self.awaits_room = false;
                    Visit::HandOver
                }
                Request::Adopt(handed) => {
                    self.adopted.push_back(*handed);
                    continue;
                }
            });
        }
    }

    fn every_second(&mut self, now_seconds: u32) {
        self.checks_closings = true;
        self.begins_paced_second = self.state.total_rate().is_some();
        self.state.serve_queues();
        // Thousands of peers that did not read leave some dozens of MiB, which the heap would keep.
        // One event loop returns them for the process, before new connections need a little of
        // each page.
        if self.index == 0 {
            heap::trim();
        }
        let dropped = self.state.log.flush();
        if dropped > 0 && self.dropped_lines.allow(now_seconds) {
            warn!(dropped, "lines of the log that were dropped: it is not written fast enough");
        }
    }

    fn on_end(&mut self) {
        self.state.log.flush();
    }
}

impl Handover for ProxyHandler {
    fn begin_visits(&mut self) -> bool {
        if std::mem::take(&mut self.checks_closings) {
            let due = self.state.closings.due(Instant::now());
            if !due.is_empty() {
                self.visits.push(Visit::Close(due));
            }
        }
        if std::mem::take(&mut self.begins_paced_second) {
            self.visits.push(Visit::Pace(Default::default()));
        }
        !self.visits.is_empty()
    }

    fn visit(&mut self, connection: &mut Connection, _: &Context<'_>) -> bool {
        let mut is_driven = false;
        for visit in &mut self.visits {
            match visit {
                Visit::List(listed, _) => listed.push(connection.status()),
                Visit::Kill(selection, count, _) => {
                    if connection.is_selected(selection) {
                        *count += 1;
                        connection.request_end(End::Killed);
                        is_driven = true;
                    }
                }
                Visit::Close(due) => {
                    if let Some(closing) = due.iter().find(|one| connection.must_close_for(one)) {
                        connection.request_end(match closing.reason {
                            ClosingReason::Down => End::UpstreamDown,
                            ClosingReason::Operator => End::Drained,
                        });
                        is_driven = true;
                    }
                }
                Visit::HandOver => {
                    if let Some(handover) = &self.handover {
                        let has_room = handover.has_room();
                        is_driven |= has_room;
                        self.awaits_room |= !has_room;
                    }
                }
                Visit::Pace(demands) => connection.begin_paced_second(demands),
            }
        }
        is_driven
    }

    fn adopt(&mut self, context: &Context<'_>) -> Option<Adopted<Connection>> {
        let Some(mut handed) = self.adopted.pop_front() else {
            self.receipt = None;
            return None;
        };
        match (&mut self.receipt, handed.receipt.take()) {
            (Some(receipt), Some(other)) => receipt.add(other),
            (receipt, other) => *receipt = receipt.take().or(other),
        }
        let place = handed.place.take();
        let client = handed.message.record.client.map(|client| client.ip());
        let connection = Connection::adopt(handed, &mut self.state, context);
        Some(Adopted { connection, client, place })
    }

    fn end_visits(&mut self) {
        for visit in self.visits.drain(..) {
            // The thread that asked may have given up.
            let _ = match visit {
                Visit::List(listed, answer) => answer.send(listed).is_ok(),
                Visit::Kill(_, count, answer) => answer.send(count).is_ok(),
                Visit::Pace(demands) => {
                    if let Some(total) = self.state.total_rate() {
                        total.divide(self.index, demands);
                    }
                    true
                }
                Visit::Close(_) | Visit::HandOver => true,
            };
        }
    }

    fn drain_timed_out(&mut self) {
        // Connections that are about to go outlast the drain timeout. The other connections stay.
        if !self.has_leaving_connections() {
            self.handover = None;
        }
    }

    fn may_end(&mut self, is_forced: bool) -> bool {
        if self.has_leaving_connections() && !self.mailboxes.are_cut_off() {
            return false;
        }
        // The thread of the handover waits until each loop drops its sender.
        self.handover = None;
        self.adopted.is_empty() && self.mailboxes.close(self.index, is_forced)
    }
}

impl Drop for ProxyHandler {
    /// A loop that failed does not receive requests.
    fn drop(&mut self) {
        self.mailboxes.close(self.index, true);
    }
}

/// The settings of the event loops.
pub fn loop_settings(config: &Config) -> LoopSettings {
    let limits = &config.limits;
    LoopSettings::default()
        .with_network_limit(limits.connections_per_address_max.map(NetworkLimit::new))
        .with_drain_timeout(limits.timeouts.drain)
        .with_rate_bytes_per_second(limits.rate_bytes_per_second)
        .with_trusted_proxies(Arc::new(config.trusted_proxies.clone()))
}
