//! The state that the connections of an event loop share.

use crate::config::source::Sources;
use crate::config::upstream_address::UpstreamAddress;
use crate::config::{Config, DownPolicy, Limits};
use crate::handover_message::{ConnectionMessage, HandedOpen, HandedUpstream};
use crate::header::{HeaderField, HeaderVersion};
use crate::record::connection::Record;
use crate::record::counters::LoopCounters;
use crate::record::log::{End, Ending};
use crate::total_rate::{PacedConnection, TotalRate};
use crate::unconnected::UnconnectedCount;
use crate::upstreams::closing::Closings;
use crate::upstreams::group::{Slot, UpstreamGroup};
use crate::upstreams::reserved_slots::ReservedSlots;
use crate::upstreams::routing::{CurrentTable, RoutingTable};
use crate::upstreams::upstream::Upstream;
use haul::{ForwardPool, ForwardSettings};
use haul_server::admission::placement::{Place, Placement};
use haul_server::connect::{self, ConnectOptions, PeerAddress};
use haul_server::event_loop::{Context, NEVER};
use haul_server::log_writer::LogBuffer;
use haul_server::waker::Waker;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Pipes that are kept between two steps. A step uses at most two.
const IDLE_PIPES_MAX: usize = 4;
/// Pipes that hold bytes for peers that do not read: 2 MiB of the 64 MiB that an ordinary user may
/// have.
const HELD_PIPES_MAX: usize = 8;
/// The most connections of an upstream that another process hands over. The number is above the
/// number of descriptors of a process (`fs.nr_open`, by default).
const HANDED_CONNECTIONS_MAX: usize = 1 << 20;
/// The most pipes of an event loop, which takes one step at a time.
pub const PIPES_MAX: usize = IDLE_PIPES_MAX + HELD_PIPES_MAX + 2;

/// The seconds of a time limit, rounded up, so that it does not end early.
pub fn whole_seconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// The state that all event loops share.
#[derive(Debug, Clone)]
pub struct Shared {
    pub table: Arc<CurrentTable>,
    pub closings: Arc<Closings>,
    /// Slots of connections that another process did not hand over yet.
    pub reserved: Arc<ReservedSlots>,
    /// The places of all clients.
    pub placement: Arc<Placement>,
    /// The next connection's number.
    pub next_id: Arc<AtomicU64>,
    /// Whether the process before this one still runs.
    pub has_predecessor: Arc<AtomicBool>,
    /// A random number of this process.
    process_number: u64,
    /// The rate of all connections together.
    total_rate: Option<Arc<TotalRate>>,
}

impl Shared {
    /// Creates the shared state of the event loops that have these wakers.
    pub fn new(table: Arc<CurrentTable>, limits: &Limits, wakers: &[Arc<Waker>]) -> Self {
        let total_rate = limits.total_rate_bytes_per_second;
        Self {
            table,
            closings: Arc::default(),
            reserved: Arc::default(),
            placement: Placement::new(wakers, limits.connections_max),
            next_id: Arc::new(AtomicU64::new(1)),
            has_predecessor: Arc::default(),
            // The kernel seeds hash maps with a random number.
            process_number: RandomState::new().hash_one(()),
            total_rate: total_rate.map(|rate| TotalRate::new(rate, wakers.len())),
        }
    }

    /// Sets the state of upstreams as it was in another process. `policy`: for connections of an
    /// upstream that the configuration lacks.
    pub fn apply_all<'h>(
        &self,
        handed: impl Iterator<Item = &'h HandedUpstream>,
        policy: DownPolicy,
    ) {
        for upstream in handed {
            self.apply(upstream, policy);
        }
    }

    fn apply(&self, handed: &HandedUpstream, policy: DownPolicy) {
        let table = self.table.get();
        let group = table.groups().iter().find(|group| group.name() == handed.group);
        let upstreams = group.map(|group| group.upstreams()).unwrap_or_default();
        if let Some(upstream) = upstreams.iter().find(|one| one.name() == handed.upstream) {
            let is_checked = group.is_some_and(|group| group.check().is_some());
            handed.apply_to(upstream, is_checked, &self.closings);
        } else if handed.is_closed_by_operator() {
            let removed = self.removed_upstream(&handed.group, &handed.upstream, policy);
            if let Some(removed) = removed {
                handed.apply_to_removed(&removed, &self.closings);
            }
        }
    }

    /// Gives up the slots and places of connections that another process did not hand over.
    pub fn give_up_reserved(&self) {
        self.reserved.clear();
        self.placement.give_up_kept(usize::MAX);
    }

    /// Reserves the slots of connections that another process is about to hand over.
    pub fn reserve(&self, open: &HandedOpen) {
        let table = self.table.get();
        let group = table.groups().iter().find(|group| group.name() == open.group);
        let index = group.and_then(|group| group.index_of(&open.upstream));
        if let (Some(group), Some(index)) = (group, index) {
            let count = open.connections.min(HANDED_CONNECTIONS_MAX);
            let slots = (0..count).filter_map(|_| group.slot_beyond_limit(index));
            self.reserved.add(&open.group, &open.upstream, slots);
        }
    }

    /// The slot that is reserved for a connection; `None` if the connection waits, or if all
    /// reserved slots are used.
    pub fn take_reserved(&self, message: &ConnectionMessage) -> Option<Slot> {
        let has_slot = message.is_established();
        has_slot.then(|| self.reserved.take(&message.group, &message.upstream)).flatten()
    }

    /// The upstream of a connection from another process, if the group lacks the upstream. The
    /// upstream is treated as if a reload had removed it.
    fn removed_upstream(
        &self,
        group: &str,
        name: &str,
        policy: DownPolicy,
    ) -> Option<Arc<Upstream>> {
        self.table.find_or_retire(group, name, || {
            let upstream = Arc::new(Upstream::new(group, UpstreamAddress::from_str(name).ok()?));
            self.closings.apply(policy, &upstream);
            Some(upstream)
        })
    }
}

/// The settings of the connections of an event loop.
#[derive(Debug)]
struct Settings {
    limits: Limits,
    header_fields: Vec<HeaderField>,
    measures_time: bool,
    congestion: Option<String>,
    sources: Sources,
    down_policy: DownPolicy,
    /// The configured addresses of the listening sockets.
    listeners: Vec<Arc<str>>,
}

impl Settings {
    fn new(config: &Config) -> Self {
        let reporting = &config.reporting;
        Self {
            limits: config.limits,
            header_fields: config.send_fields.clone(),
            measures_time: reporting.access_log.is_some() || reporting.control.is_some(),
            congestion: config.sockets.congestion.clone(),
            sources: Sources::new(&config.sockets.source),
            down_policy: config.down_policy,
            listeners: config.listeners.iter().map(|one| one.address.to_string().into()).collect(),
        }
    }
}

/// The state that the connections of an event loop share.
#[derive(Debug)]
pub struct LoopState {
    current: Arc<CurrentTable>,
    /// The table that was current in this generation.
    routes: Arc<RoutingTable>,
    generation: u64,
    pool: ForwardPool,
    settings: Settings,
    pub counters: Arc<LoopCounters>,
    /// The connections of the loop whose clients have neither an upstream nor a place in a queue.
    pub unconnected: UnconnectedCount,
    pub log: LogBuffer,
    pub closings: Arc<Closings>,
    shared: Shared,
}

impl LoopState {
    /// Creates the state of an event loop.
    pub fn new(
        config: &Config,
        shared: Shared,
        counters: Arc<LoopCounters>,
        log: LogBuffer,
    ) -> Result<Self, haul::Error> {
        let (current, closings) = (Arc::clone(&shared.table), Arc::clone(&shared.closings));
        let limits = config.limits;
        let settings = ForwardSettings::default()
            .with_method(config.method)
            .with_idle_pipes_max(IDLE_PIPES_MAX)
            .with_held_pipes_max(HELD_PIPES_MAX)
            .with_idle_timeout(limits.timeouts.idle)
            .with_half_closed_timeout(limits.timeouts.half_closed);
        Ok(Self {
            generation: current.generation(),
            routes: current.get(),
            current,
            pool: ForwardPool::with_settings(settings)?,
            settings: Settings::new(config),
            counters,
            unconnected: UnconnectedCount::default(),
            log,
            closings,
            shared,
        })
    }

    /// The routing table in force.
    pub fn routes(&mut self) -> &RoutingTable {
        let generation = self.current.generation();
        if generation != self.generation {
            self.routes = self.current.get();
            self.generation = generation;
        }
        &self.routes
    }

    /// The configured address of a listening socket.
    pub fn listener_address(&self, listener: usize) -> Arc<str> {
        self.settings.listeners.get(listener).map_or_else(|| "".into(), Arc::clone)
    }

    /// The listening socket with a configured address.
    fn listener_at(&self, address: &str) -> Option<usize> {
        self.settings.listeners.iter().position(|one| **one == *address)
    }

    /// The name of the listener with this address, which another process reported. An address
    /// without a listener in this process is its own name.
    pub fn listener_name(&self, address: &str) -> Arc<str> {
        self.listener_at(address).map_or_else(|| address.into(), |at| self.listener_address(at))
    }

    /// The group with a name.
    pub fn group(&mut self, name: &str) -> Option<Arc<UpstreamGroup>> {
        self.routes().groups().iter().find(|group| group.name() == name).cloned()
    }

    /// The slot of another process's connection to the upstream with a name, even beyond the limit.
    /// An upstream that the configuration lacks is treated as if a reload had removed it.
    pub fn slot_of_handed(&mut self, group: &str, name: &str) -> Option<Slot> {
        let known = self.group(group);
        let slot = |group: &UpstreamGroup| group.slot_beyond_limit(group.index_of(name)?);
        known.as_deref().and_then(slot).or_else(|| {
            let removed = self.shared.removed_upstream(group, name, self.settings.down_policy)?;
            // A reload may bring the upstream back, and clients may wait for its slots.
            let queue = known.as_ref().map(|group| group.queue());
            Slot::take(&removed, usize::MAX, None, queue)
        })
    }

    /// The rate of all connections together, if it is limited.
    pub fn total_rate(&self) -> Option<&Arc<TotalRate>> {
        self.shared.total_rate.as_ref()
    }

    /// The share of a new connection of the rate of all connections.
    pub fn paced_connection(&self) -> Option<Box<PacedConnection>> {
        self.total_rate().map(|total| Box::new(PacedConnection::new(Arc::clone(total))))
    }

    /// Serves the queues. A slot that becomes free serves the queues at once. The other events that
    /// make an upstream usable do not.
    pub fn serve_queues(&mut self) {
        for group in self.routes().groups() {
            group.queue().serve();
        }
    }

    /// The second of the clock in which the lifetime of a connection of this age is over.
    pub fn lifetime_until(&self, age: Duration, context: &Context<'_>) -> u32 {
        let lifetime = self.settings.limits.timeouts.lifetime;
        let left = lifetime.map(|lifetime| lifetime.saturating_sub(age));
        left.map_or(NEVER, |left| context.deadline(whole_seconds(left)))
    }

    /// A place for a connection that event loop `index` hands over. The connection counts for the
    /// limit of clients until it is sent.
    pub fn occupy_place(&self, index: usize) -> Place {
        self.shared.placement.occupy(index)
    }

    /// The number of a new connection.
    pub fn next_id(&self) -> u64 {
        self.shared.next_id.fetch_add(1, Relaxed)
    }

    pub fn limits(&self) -> &Limits {
        &self.settings.limits
    }

    pub fn pool(&self) -> ForwardPool {
        self.pool.clone()
    }

    /// Whether the time that connections take is measured, because a log or an operator may report
    /// the time.
    pub fn measures_time(&self) -> bool {
        self.settings.measures_time
    }

    /// The fields that are added to the header.
    pub fn header_fields(&self) -> &[HeaderField] {
        &self.settings.header_fields
    }

    /// Whether the greeting of a client is received before its upstream is connected.
    pub fn needs_greeting(&mut self, listener: usize) -> bool {
        let is_field = self.settings.header_fields.iter().any(|field| field.needs_greeting());
        let routes = self.routes();
        (is_field && routes.sends_header(listener, HeaderVersion::V2))
            || routes.needs_greeting(listener)
    }

    /// The unique id of a connection, which differs from the ids of other processes.
    pub fn unique_id(&self, id: u64) -> String {
        format!("{:016x}-{id}", self.shared.process_number)
    }

    /// Starts a connection to an address of an upstream for a client.
    pub fn start_connection(
        &self,
        address: &PeerAddress,
        client: Option<SocketAddr>,
    ) -> io::Result<OwnedFd> {
        let congestion = self.settings.congestion.as_deref();
        let mut started = Err(io::ErrorKind::AddrNotAvailable.into());
        for source in self.settings.sources.for_upstream(address, client) {
            let options = ConnectOptions { congestion, source, is_ack_delayed: true };
            started = connect::start(address, options);
            // Another source has other ports.
            if started.as_ref().err().is_none_or(|error| !connect::lacks_port(address, error)) {
                break;
            }
        }
        let socket = started?;
        if let Some(rate) = self.settings.limits.rate_bytes_per_second {
            // A Unix socket does not have a rate.
            let _ = haul_sys::sockopt::set_max_pacing_rate(&socket, rate);
        }
        Ok(socket)
    }

    /// Counts and logs the end of a connection.
    pub fn record_end(&mut self, record: &Record, ending: &Ending<'_>) {
        self.counters.record(ending.end, ending.bytes);
        let is_timed_out = matches!(ending.end, End::Idle | End::Lifetime | End::QueueTimeout);
        self.counters.connections.timed_out.add(u64::from(is_timed_out));
        if self.log.is_on() {
            record.write(&mut self.log, ending);
        }
    }
}
