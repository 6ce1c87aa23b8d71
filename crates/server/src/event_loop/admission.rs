//! Accepts connections, and finds a place for each ([`Admission`]).

use super::{EventLoop, Handover, SENDS_TIME_MAX, UNNAMED, context, generation, index, token};
use crate::admission::Admission;
use crate::admission::eviction::{Candidate, Claim, is_dominant, reserved_places};
use crate::admission::network::{Network, NetworkPermit};
use crate::admission::pending_headers::Naming;
use crate::admission::placement::{Place, Placed};
use crate::admission::shortage::{self, is_shortage};
use crate::admission::waiting_room::Waiting;
use rustix::event::Timespec;
use std::io;
use std::mem;
use std::time::{Duration, Instant};

/// Connections accepted before existing connections get their turn. An accept takes tens of
/// microseconds, and more with TLS or an eviction, and existing connections wait for it. With 1,200
/// new connections a second that come 60 at a time, 16 had a quarter of the latency of 64.
pub(super) const ACCEPTS_MAX: usize = 16;
/// Waiting connections that get a place at a time, or fewer if that takes [`SENDS_TIME_MAX`]. Each
/// may cost an eviction and the work for a request that already arrived, such as the beginning of a
/// large response or the file of an upload.
const ADMITTED_MAX: u32 = 4;
/// The pause after each waiting connection that gets a place, in which existing connections and
/// other threads have the CPU. With 6,000 stalled uploads, the 99th percentile of usual responses
/// was 8 times the percentile without uploads in one run without the pause, and 1.1 to 1.6 times
/// with the pause.
const ADMISSION_PAUSE: Duration = Duration::from_micros(250);
/// The most connections of a placement that wait for the name of their client.
const UNNAMED_MAX: usize = 64;
/// The pause when all places are taken. Another connection may have stalled after the pause.
const PLACE_PAUSE: Duration = Duration::from_millis(100);

/// A network has as many connections as it may have.
#[derive(Debug)]
pub(super) struct TooMany;

/// A place for another connection.
#[derive(Debug, Clone, Copy)]
enum Room {
    /// There are fewer connections than there may be.
    Free,
    /// The place of an open connection, which is closed to free it.
    Of(usize),
}

/// The way to accept a connection.
#[derive(Debug)]
enum Entrance {
    /// The connection has this place.
    Place(Place),
    /// The connection finds a place after it is accepted, or waits for a place.
    WaitingRoom,
}

impl<H: Handover> EventLoop<H> {
    /// Accepts some connections; false if no client waits or no connection can be accepted.
    ///
    /// Stops after `until`, because an accepted connection may be sent a large response at once.
    pub(super) fn accept(&mut self, index: usize, until: Option<Instant>) -> bool {
        // The descriptors and places of closed connections are free for others.
        self.close_ended();
        for count in 0..ACCEPTS_MAX {
            if count > 0 && until.is_some_and(|until| Instant::now() >= until) {
                return true;
            }
            let Some(entrance) = self.entrance() else {
                self.stop_accepting();
                return false;
            };
            let Some(listener) = self.listeners.get(index) else { return false };
            match listener.accept() {
                Ok(Some(accepted)) => {
                    self.handler.counters().accepted.add(1);
                    match entrance {
                        Entrance::WaitingRoom => self.begin(Placed { accepted, place: None }),
                        Entrance::Place(place) => {
                            if let Some(placed) = place.put(accepted) {
                                self.begin(placed);
                            }
                        }
                    }
                }
                Ok(None) => return false,
                Err(error) if is_shortage(&error) => {
                    if !self.make_room(&error) {
                        return false;
                    }
                }
                // An error of this connection only.
                Err(_) => {}
            }
        }
        true
    }

    /// The way to accept another connection; `None` if even the waiting room is full.
    fn entrance(&self) -> Option<Entrance> {
        match &self.settings.admission {
            Admission::Placement(placement) => placement.reserve(self.index).map(Entrance::Place),
            Admission::WaitingRoom { .. } => {
                self.can_accept_without_place().then_some(Entrance::WaitingRoom)
            }
        }
    }

    /// Whether another connection can be accepted without a place, because it can wait, if need be
    /// in place of another waiting connection. A placement decides by itself, unless it is paused.
    pub(super) fn can_accept_without_place(&self) -> bool {
        match &self.settings.admission {
            Admission::Placement(placement) => !placement.is_paused(),
            Admission::WaitingRoom { .. } => {
                !self.is_waiting_room_full() || self.waiting.can_shed()
            }
        }
    }

    /// Whether as many connections wait for a place, or for the name of their client, as may wait.
    fn is_waiting_room_full(&self) -> bool {
        let waiting_max = match self.settings.admission {
            Admission::WaitingRoom { waiting_max, .. } => waiting_max,
            Admission::Placement(_) => UNNAMED_MAX,
        };
        self.waiting.len() + self.unnamed.len() >= waiting_max
    }

    /// Begins with an accepted connection. A trusted proxy has to name its client first.
    pub(super) fn begin(&mut self, placed: Placed) {
        let proxies = &self.settings.trusted_proxies;
        if !proxies.contains(placed.accepted.peer.map(|peer| peer.ip())) {
            return self.admit_and_add(placed);
        }
        self.make_room_to_wait();
        let token_of = |index| UNNAMED + index as u64;
        let naming = self.unnamed.add(placed, &self.epoll, token_of, self.clock.seconds());
        self.continue_naming(naming);
    }

    /// Adds a connection of a proxy once its client is named.
    pub(super) fn continue_naming(&mut self, naming: Naming) {
        match naming {
            Naming::Waiting => return,
            Naming::Named(placed) => self.admit_and_add(placed),
            Naming::Refused => self.handler.counters().refused.add(1),
        }
        self.resume_accepting();
    }

    /// Adds a connection, or lets it wait, unless its network has too many.
    fn admit_and_add(&mut self, placed: Placed) {
        let network = placed.accepted.peer.map(|peer| Network::from(peer.ip()));
        let Ok(permit) = self.admit(network) else {
            self.handler.counters().refused.add(1);
            return;
        };
        if placed.place.is_some() {
            return self.add(placed, network, permit);
        }
        match self.room(network, false) {
            Some(room) => self.add_at(room, Waiting { placed, permit }, network),
            None => self.let_wait(Waiting { placed, permit }, network),
        }
    }

    /// Counts a connection of a network; an error if it has too many.
    pub(super) fn admit(&self, network: Option<Network>) -> Result<Option<NetworkPermit>, TooMany> {
        match (&self.settings.network_limit, network) {
            (Some(limit), Some(network)) => limit.admit(network).map(Some).ok_or(TooMany),
            _ => Ok(None),
        }
    }

    /// A place for a connection of a network; `None` if it has to wait.
    fn room(&mut self, network: Option<Network>, has_waited: bool) -> Option<Room> {
        let Admission::WaitingRoom { connections_max: places, .. } = self.settings.admission else {
            return None;
        };
        let (open, of_network) = (self.connections.len(), self.networks.get(network));
        let reserved = reserved_places(places);
        let kept_free = if of_network < reserved { 0 } else { reserved };
        if open + kept_free < places {
            return Some(Room::Free);
        }
        let is_of_dominant_network = is_dominant(of_network, open);
        self.victim(Claim { is_of_dominant_network, has_waited }).map(Room::Of)
    }

    fn let_wait(&mut self, waiting: Waiting, network: Option<Network>) {
        self.make_room_to_wait();
        self.waiting.push(network, waiting);
        self.count_waiting();
    }

    /// Closes a connection that waits, if too many do.
    fn make_room_to_wait(&mut self) {
        if self.is_waiting_room_full() && self.waiting.shed() {
            self.handler.counters().refused.add(1);
            self.count_waiting();
        }
    }

    /// Gives free places to some connections that wait.
    pub(super) fn admit_waiting(&mut self) {
        let now = self.clock.turn_started();
        if self.waiting.is_empty() {
            return;
        }
        if now < self.admits_at {
            // A place may have become free since then.
            self.has_place = true;
            return;
        }
        let mut admitted = 0;
        let until = Instant::now() + SENDS_TIME_MAX;
        let mut has_time = true;
        while has_time && admitted < ADMITTED_MAX && self.admit_next(true) {
            admitted += 1;
            has_time = Instant::now() < until;
        }
        // Newcomers have the stronger claim, so that waiting connections could wait for ever.
        if admitted == 0 && now.saturating_duration_since(self.progressed_at) >= PLACE_PAUSE {
            admitted += u32::from(self.admit_next(false));
            self.progressed_at = now;
        }
        self.admits_at = now + ADMISSION_PAUSE * admitted.max(1);
        self.has_place = admitted == ADMITTED_MAX || !has_time;
        self.count_waiting();
        if admitted > 0 {
            self.progressed_at = now;
            self.resume_accepting();
        }
    }

    /// Gives a place to the next connection that waits; false without a place or a waiting
    /// connection.
    fn admit_next(&mut self, has_waited: bool) -> bool {
        let mut waiting = mem::take(&mut self.waiting);
        let next = waiting.next(|network| self.room(network, has_waited));
        self.waiting = waiting;
        let Some((network, waiting, room)) = next else { return false };
        if !waiting.has_ended() {
            self.add_at(room, waiting, network);
        }
        true
    }

    /// The longest wait for events while connections wait for a place.
    pub(super) fn wait_for_place(&self) -> Timespec {
        let pause = if self.has_place {
            self.admits_at.saturating_duration_since(Instant::now())
        } else {
            PLACE_PAUSE
        };
        Timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() }
    }

    fn count_waiting(&self) {
        self.handler.counters().waiting.set(self.waiting.len() as u64);
    }

    fn add_at(&mut self, room: Room, waiting: Waiting, network: Option<Network>) {
        if let Room::Of(victim) = room {
            self.evict(victim);
        }
        self.add(waiting.placed, network, waiting.permit);
    }

    fn add(&mut self, placed: Placed, network: Option<Network>, permit: Option<NetworkPermit>) {
        let Placed { accepted, place } = placed;
        if let Some(rate) = self.settings.rate_bytes_per_second {
            // A Unix socket does not have a rate.
            let _ = haul_sys::sockopt::set_max_pacing_rate(&accepted.socket, rate);
        }
        let (key, generation) = self.next_key();
        let token = token(key, generation);
        let context = context(&self.epoll, &self.clock, self.is_draining, token);
        let Ok(connection) = self.handler.accept(accepted, &context) else { return };
        self.insert(generation, connection, network, permit, place);
    }

    /// Frees descriptors and memory after a shortage; false if nothing could be freed.
    fn make_room(&mut self, error: &io::Error) -> bool {
        self.handler.free_caches();
        let open = self.connections.len();
        shortage::report(format_args!("no room for another connection beside {open}"), error);
        if self.waiting.shed() {
            self.handler.counters().refused.add(1);
            self.count_waiting();
            return true;
        }
        let Some(index) = self.victim(Claim { is_of_dominant_network: false, has_waited: false })
        else {
            self.stop_accepting();
            return false;
        };
        self.evict(index);
        true
    }

    /// The connection to close to make room for another, if there is one.
    fn victim(&mut self, claim: Claim) -> Option<usize> {
        if !self.handler.can_evict() {
            return None;
        }
        let now = self.clock.seconds();
        let handler = &self.handler;
        let victims = self.victims.of(claim);
        let candidate = |index: usize, entry: &super::Entry<H::Connection>| Candidate {
            token: token(index, entry.generation),
            network: entry.network,
            activity: handler.activity(&entry.connection),
            latest_turn: entry.latest_turn,
            latest_turn_at_seconds: entry.latest_turn_at_seconds,
        };
        while let Some(victim) = victims.next(now) {
            let index = index(victim.token);
            if let Some(entry) = self.connections.get(index)
                && entry.generation == generation(victim.token)
                && victim.is_due(&candidate(index, entry), now)
            {
                return Some(index);
            }
        }
        if !victims.may_choose(self.clock.turn_started()) {
            return None;
        }
        let candidates: Vec<_> =
            self.connections.iter().map(|(index, entry)| candidate(index, entry)).collect();
        victims.choose(claim, &candidates, &self.networks, now, self.clock.turn_started());
        victims.next(now).map(|victim| index(victim.token))
    }

    /// Closes a connection to make room for another.
    fn evict(&mut self, index: usize) {
        if let Some(entry) = self.remove(index) {
            self.handler.counters().evicted.add(1);
            self.handler.evict(*entry.connection);
        }
    }
}
