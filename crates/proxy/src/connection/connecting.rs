//! Establishes a connection to an upstream: tries the addresses of one upstream after another, and
//! a second address of an upstream in parallel if the first does not answer.

use super::Connection;
use super::endpoint::Events;
use super::state::{Attempt, State};
use crate::host_instant::HostInstant;
use crate::loop_state::{LoopState, whole_seconds};
use crate::record::log::End;
use crate::socket::pending_tail;
use crate::upstreams::group::{Choice, Slot, UpstreamGroup};
use crate::upstreams::upstream::{AdminState, Upstream};
use haul_server::admission::shortage::{self, is_shortage};
use haul_server::connect::{self, PeerAddress};
use haul_server::event_loop::{Action, Context, Interest, NEVER, Side, Tail};
use haul_server::offload::NoJob;
use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The beginning of the message when this host lacks something for a connection.
pub(super) const NO_CONNECTION: &str = "no connection to an upstream";
/// The time before all upstreams are tried again, in seconds.
const ROUND_INTERVAL_SECONDS: u32 = 1;

/// How far the search for an upstream is.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// The upstream that the proxy connects to or is connected to.
    pub(super) chosen: Option<Chosen>,
    /// The upstreams of which all addresses were tried in this round.
    pub(super) tried: Vec<usize>,
    /// The second of the clock in which the next round begins.
    next_round_at_seconds: u32,
    /// Whether an attempt failed for lack of a local port.
    pub(super) lacks_port: bool,
    /// The attempts before this round.
    attempts_before_round: u32,
    /// Since when the client waits, in the queue of another process before this one.
    pub(super) queued_since: Option<HostInstant>,
}

/// The upstream that the proxy connects to or is connected to, and the addresses that are left to
/// try.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) upstream: Arc<Upstream>,
    index: usize,
    addresses: Arc<[PeerAddress]>,
    next_address: usize,
    slot: Option<Slot>,
}

impl Search {
    /// The search of a client that waited in the queue of another process.
    pub(super) fn queued(since: HostInstant) -> Self {
        Self { queued_since: Some(since), ..Self::default() }
    }

    /// The search after a round in which all upstreams failed.
    pub(super) fn paused(attempts: u32, context: &Context<'_>) -> Self {
        Self {
            next_round_at_seconds: context.deadline(ROUND_INTERVAL_SECONDS),
            attempts_before_round: attempts,
            ..Self::default()
        }
    }
}

/// The next step of the search.
enum Next {
    Address(PeerAddress),
    /// An upstream that is at its limit.
    Queue,
    None,
}

impl Chosen {
    pub(super) fn new(slot: Slot) -> Self {
        let (upstream, index) = (Arc::clone(slot.upstream()), slot.index());
        Self {
            addresses: upstream.candidates(),
            upstream,
            index,
            next_address: 0,
            slot: Some(slot),
        }
    }

    /// Whether another address of this upstream is tried before another upstream.
    fn has_next(&self) -> bool {
        self.next_address < self.addresses.len()
    }

    /// The next address to try.
    fn take_next(&mut self) -> Option<PeerAddress> {
        let address = self.addresses.get(self.next_address)?.clone();
        self.next_address += 1;
        Some(address)
    }

    /// The latest address was not tried after all.
    fn return_address(&mut self) {
        self.next_address = self.next_address.saturating_sub(1);
    }

    /// Gives the upstream up. The log still names it.
    pub(super) fn free_slot(&mut self) {
        self.slot = None;
        self.next_address = self.addresses.len();
    }

    /// Takes the slot: the connection leaves for another process.
    pub(super) fn take_slot(&mut self) -> Option<Slot> {
        self.slot.take()
    }
}

impl Connection {
    /// Starts a connection to the next address; `None` once the state changed.
    pub(super) fn connect(
        &mut self,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let Some(group) = self.route.group.clone() else {
            return Some(self.finish(End::NoRoute, shared));
        };
        if self.account.record.connect.attempts >= shared.limits().connect_attempts_max {
            return Some(self.finish(self.end_without_upstream(), shared));
        }
        let now = context.now_seconds();
        if now < self.search.next_round_at_seconds {
            let State::Searching(client) = &self.state else { return None };
            return Some(if self.is_client_gone(client, shared) {
                self.finish(End::ClientFailed, shared)
            } else {
                Action::WaitUntil(self.search.next_round_at_seconds)
            });
        }
        let address = match self.next_address(&group) {
            Next::Address(address) => address,
            Next::Queue => return self.enqueue(&group, shared, context),
            Next::None => {
                // If all upstreams lack an address, waiting does not help.
                if self.account.record.connect.attempts == self.search.attempts_before_round {
                    return Some(self.finish(self.end_without_upstream(), shared));
                }
                // All upstreams failed. A server that restarts is back in a moment.
                self.search = Search {
                    lacks_port: self.search.lacks_port,
                    ..Search::paused(self.account.record.connect.attempts, context)
                };
                return None;
            }
        };
        if let Some(since) = self.search.queued_since.take() {
            self.add_queue_time(since.elapsed());
        }
        self.upstream.events = Events::default();
        match self.start_attempt(&address, shared, context) {
            Ok(attempt) => {
                let next_at = self.next_attempt_at(shared, context);
                self.state.connect(attempt, next_at, shared.unconnected.add());
            }
            Err(error) if is_shortage(&error) => {
                self.account.record.connect.error = error_number(&error);
                shortage::report(NO_CONNECTION, &error);
                return Some(self.finish(End::Shortage, shared));
            }
            Err(error) if connect::lacks_port(&address, &error) => {
                // An address of the other family may have a port.
                self.account.record.connect.error = error_number(&error);
                shortage::report(NO_CONNECTION, &error);
                self.search.lacks_port = true;
            }
            Err(error) => self.record_failure(&error),
        }
        None
    }

    fn start_attempt(
        &mut self,
        address: &PeerAddress,
        shared: &LoopState,
        context: &Context<'_>,
    ) -> io::Result<Attempt> {
        self.account.record.connect.attempts += 1;
        self.account.record.upstream_address = tcp_address(address);
        let socket = shared.start_connection(address, self.account.record.client)?;
        context.register(&socket, Side::Upstream, Interest::BOTH)?;
        let deadline = context.deadline(whole_seconds(shared.limits().timeouts.connect));
        Ok(Attempt { socket, address: tcp_address(address), deadline })
    }

    /// The second of the clock in which the upstream's next address is tried in parallel, if the
    /// present address did not answer until then: in one or two seconds, or never. RFC 8305,
    /// section 5, allows a delay of up to 2 s.
    pub(super) fn next_attempt_at(&self, shared: &LoopState, context: &Context<'_>) -> u32 {
        let may_try = self.account.record.connect.attempts < shared.limits().connect_attempts_max
            && self.search.chosen.as_ref().is_some_and(Chosen::has_next);
        if may_try { context.deadline(1) } else { NEVER }
    }

    /// Gives up the attempts whose time is over, and tries the next address if it is time for it.
    pub(super) fn advance_attempts(&mut self, shared: &mut LoopState, context: &Context<'_>) {
        let now = context.now_seconds();
        let State::Connecting { attempts, next_at, .. } = &mut self.state else { return };
        attempts.retain(|attempt| attempt.deadline > now);
        let is_next_due = *next_at <= now;
        if is_next_due {
            *next_at = NEVER;
        }
        let next = if is_next_due { self.start_next_attempt(shared, context) } else { None };
        let State::Connecting { attempts, .. } = &mut self.state else { return };
        attempts.extend(next);
        if attempts.is_empty() {
            self.give_up_attempts(&io::ErrorKind::TimedOut.into());
        }
    }

    /// Starts an attempt at the next address of the upstream, in parallel to the other attempts.
    fn start_next_attempt(&mut self, shared: &LoopState, context: &Context<'_>) -> Option<Attempt> {
        let address = self.search.chosen.as_mut().and_then(Chosen::take_next)?;
        let error = match self.start_attempt(&address, shared, context) {
            Ok(attempt) => return Some(attempt),
            Err(error) => error,
        };
        self.account.record.connect.error = error_number(&error);
        if is_shortage(&error) || connect::lacks_port(&address, &error) {
            shortage::report(NO_CONNECTION, &error);
            // The address is tried once the other attempts failed. This attempt does not
            // count.
            self.search.chosen.as_mut().map(Chosen::return_address);
            self.account.record.connect.attempts =
                self.account.record.connect.attempts.saturating_sub(1);
        }
        None
    }

    /// Whether a client without an upstream is gone. A client that ended its stream may still wait
    /// for a response.
    pub(super) fn is_client_gone(&self, client: &OwnedFd, shared: &LoopState) -> bool {
        match self.client.events.tail {
            Tail::None => false,
            Tail::End if shared.limits().aborts_on_close => true,
            _ => pending_tail(client) == Tail::Failed,
        }
    }

    /// The end of a connection for which every attempt failed.
    fn end_without_upstream(&self) -> End {
        if self.search.lacks_port { End::Shortage } else { End::Unreachable }
    }

    /// The next address to try, of the present upstream or of another upstream.
    fn next_address(&mut self, group: &UpstreamGroup) -> Next {
        loop {
            if let Some(chosen) = &mut self.search.chosen {
                if let Some(address) = chosen.take_next() {
                    return Next::Address(address);
                }
                if !self.search.tried.contains(&chosen.index) {
                    self.search.tried.push(chosen.index);
                }
            }
            if !group.has_other(&self.search.tried) {
                return Next::None;
            }
            // The clients in the queue come first.
            if group.queue().len() > 0 {
                return Next::Queue;
            }
            let client = self.account.record.client.map(|client| client.ip());
            match group.choose(client, &self.search.tried) {
                Choice::Slot(slot) => self.search.chosen = Some(Chosen::new(slot)),
                Choice::Full => return Next::Queue,
                Choice::None => return Next::None,
            }
        }
    }

    /// Checks the attempts to connect; `None` once the state changed.
    pub(super) fn finish_connecting(
        &mut self,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let State::Connecting { client, attempts, .. } = &self.state else { return None };
        // A connected upstream still gets the bytes that the client sent.
        if self.is_client_gone(client, shared)
            && !attempts.iter().any(|attempt| connect::finish(&attempt.socket).is_ok())
        {
            return Some(self.finish(End::ClientFailed, shared));
        }
        let State::Connecting { attempts, next_at, .. } = &mut self.state else { return None };
        let deadlines = attempts.iter().map(|attempt| attempt.deadline);
        let next_at = (*next_at).min(deadlines.min().unwrap_or(NEVER));
        if !self.upstream.events.is_writable {
            return Some(Action::WaitUntil(next_at));
        }
        // A socket that is writable without a failure is connected.
        let is_only_one = self.account.record.connect.attempts == 1;
        let is_connected = is_only_one && self.upstream.events.tail == Tail::None;
        // The events of two sockets are in one place, so each socket is asked.
        let mut failure = None;
        for index in (0..attempts.len()).rev() {
            let result =
                if is_connected { Ok(()) } else { connect::finish(&attempts[index].socket) };
            match result {
                Ok(()) => {
                    let attempt = attempts.swap_remove(index);
                    if !is_connected {
                        // The events may belong to another attempt.
                        self.upstream.events = Events::ALL;
                    }
                    // The time is set before the check. So a connection that an operator does not
                    // find here counts as established before the command, and is closed by the
                    // command.
                    self.account.record.connect.time = Some(self.account.accepted_at.elapsed());
                    if self.is_upstream_withdrawn() {
                        self.leave_upstream();
                        return None;
                    }
                    return self.begin_forwarding(attempt, shared, context);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    attempts.swap_remove(index);
                    failure = Some(error);
                }
            }
        }
        self.upstream.events = Events::default();
        match failure {
            Some(error) if attempts.is_empty() => {
                self.give_up_attempts(&error);
                None
            }
            _ => Some(Action::WaitUntil(next_at)),
        }
    }

    /// Whether an operator drained or disabled the upstream after it was chosen.
    fn is_upstream_withdrawn(&self) -> bool {
        let upstream = self.search.chosen.as_ref().map(|chosen| &chosen.upstream);
        upstream.is_some_and(|upstream| upstream.administration() != AdminState::Enabled)
    }

    /// Closes the sockets to the upstream, so that another upstream is chosen. The upstream did not
    /// fail.
    fn leave_upstream(&mut self) {
        self.state.search();
        self.upstream.events = Events::default();
        self.account.record.connect.time = None;
        // The attempt does not count.
        self.account.record.connect.attempts =
            self.account.record.connect.attempts.saturating_sub(1);
        if let Some(chosen) = &mut self.search.chosen {
            chosen.free_slot();
        }
    }

    /// Closes the sockets of attempts that failed.
    fn give_up_attempts(&mut self, error: &io::Error) {
        self.state.search();
        self.record_failure(error);
    }

    /// Records a failure of the upstream, once all of its addresses refused the connection.
    fn record_failure(&mut self, error: &io::Error) {
        self.account.record.connect.error = error_number(error);
        let chosen = self.search.chosen.as_ref().filter(|chosen| !chosen.has_next());
        if let (Some(chosen), Some(group)) = (chosen, &self.route.group) {
            chosen.upstream.skip_candidates(&chosen.addresses);
            group.record_failure(&chosen.upstream, error);
        }
    }
}

fn tcp_address(address: &PeerAddress) -> Option<SocketAddr> {
    match address {
        PeerAddress::Tcp(address) => Some(*address),
        PeerAddress::Unix(_) => None,
    }
}

/// The number of an error, for the log.
fn error_number(error: &io::Error) -> Option<i32> {
    let of_kind = || match error.kind() {
        io::ErrorKind::TimedOut => Some(Errno::TIMEDOUT.raw_os_error()),
        io::ErrorKind::AddrNotAvailable => Some(Errno::ADDRNOTAVAIL.raw_os_error()),
        _ => None,
    };
    error.raw_os_error().or_else(of_kind)
}
