//! The state of a running proxy: its connections and upstreams, as the control socket lists them.

use crate::closing::Closings;
use crate::log::{DirectionBytes, TcpStatistics};
use crate::process::ProcessStatus;
use crate::routing::RoutingTable;
use crate::upstream::{Administration, Upstream};
use crate::upstream_group::Share;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The answer of the control socket to a command.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ControlResponse {
    /// The open connections, oldest first.
    Connections(Vec<ConnectionStatus>),
    /// The upstreams, by group.
    Upstreams(Vec<UpstreamStatus>),
    /// The upstreams that a command has changed, as they are now.
    Changed(Vec<UpstreamStatus>),
    /// The number of connections that a command has closed.
    Killed(usize),
    /// The process as a whole.
    Status(Box<ProcessStatus>),
    /// The configuration was reloaded; what the operator should know of it.
    Reloaded(Vec<String>),
    /// The configuration file can be reloaded; what the operator should know of it.
    Checked(Vec<String>),
    /// The command was not carried out, for this reason.
    Error(String),
}

/// An open connection.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ConnectionStatus {
    /// Its number, as in the log. It keeps it in an upgrade.
    pub id: u64,
    /// The client's address; absent for a Unix socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<SocketAddr>,
    /// The configured address of the listener that has accepted the client.
    #[serde(default)]
    pub listener: String,
    /// The server name in the client's TLS greeting (SNI); absent as in the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// The group of the upstream; absent as long as there is no route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The upstream, as configured; absent as long as none is tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// The upstream's address and port that is connected to, or was tried last; absent as in the
    /// log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_address: Option<SocketAddr>,
    /// The proxy's address and port of the connection to the upstream; absent as in the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SocketAddr>,
    /// What it does.
    pub phase: Phase,
    /// Time since the client was accepted, in milliseconds.
    pub age_ms: f64,
    /// Time that the event loop has spent on the connection, in microseconds ([`crate::LogLine`]).
    #[serde(default)]
    pub loop_us: u64,
    /// The part of it in which bytes were spliced, in microseconds.
    #[serde(default)]
    pub splice_us: u64,
    /// The part of it in which bytes were copied, in microseconds.
    #[serde(default)]
    pub copy_us: u64,
    /// Bytes from the client to the upstream.
    pub to_upstream: DirectionBytes,
    /// Bytes from the upstream to the client.
    pub to_client: DirectionBytes,
    /// The client's connection; absent for a Unix socket, and before there is an upstream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_tcp: Option<TcpStatistics>,
    /// The upstream's connection; absent likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_tcp: Option<TcpStatistics>,
}

/// What a connection does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Phase {
    /// The client's greeting is awaited, on which the route depends.
    Greeting,
    /// The client waits in its group's queue: all usable upstreams are at their limits.
    Queued,
    /// A connection to an upstream is being established.
    Connecting,
    /// Bytes are forwarded.
    Forwarding,
    /// One side has failed, and the rest of its bytes is delivered to the other.
    Delivering,
}

impl Phase {
    /// The name in lists.
    pub fn name(self) -> &'static str {
        match self {
            Self::Greeting => "greeting",
            Self::Queued => "queued",
            Self::Connecting => "connecting",
            Self::Forwarding => "forwarding",
            Self::Delivering => "delivering",
        }
    }
}

/// An upstream of a group.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct UpstreamStatus {
    /// The name of the group.
    pub group: String,
    /// The address, as configured.
    pub upstream: String,
    /// Whether it gets new connections, as the operator has set it.
    pub administration: Administration,
    /// Whether the active check has found it up, or there is none.
    pub is_up: bool,
    /// The number of its addresses: 0 as long as its name could not be resolved; absent of one that
    /// was removed, and of proxies of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<usize>,
    /// Whether it is ejected, because it could not be connected to (passive check).
    pub is_ejected: bool,
    /// Whether it is a backup.
    pub is_backup: bool,
    /// Its share of the connections, in relation to the others'.
    pub weight: u32,
    /// The configured weight; absent unless the operator has set another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured_weight: Option<u32>,
    /// The time after which its established connections are closed, in milliseconds: 0 once that is
    /// over, also if connections that were accepted later are open; absent if they are not closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing_in_ms: Option<u64>,
    /// The number of connections that it has at a time; absent without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections_max: Option<usize>,
    /// Open connections, and those that are being opened.
    pub open_connections: usize,
    /// Connections that were established.
    pub connected: u64,
    /// Connections that could not be established.
    pub failed: u64,
    /// The active check; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckStatus>,
}

/// What the active check of an upstream has found, beside whether it is up.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct CheckStatus {
    /// Checks that have failed.
    pub failed: u64,
    /// Why the latest one has failed; absent if it has succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The upstreams that `is_wanted` admits. Those that have left the configuration, and still have
/// connections, come last.
pub fn upstreams(
    table: &RoutingTable,
    closings: &Closings,
    is_wanted: impl Fn(&Upstream) -> bool,
) -> Vec<UpstreamStatus> {
    let mut listed = Vec::new();
    for group in table.groups() {
        for (index, upstream) in group.upstreams().iter().enumerate() {
            if !is_wanted(upstream) {
                continue;
            }
            let counters = upstream.counters();
            let Share { weight, is_backup, connections_max } = group.share(index);
            listed.push(UpstreamStatus {
                group: group.name().into(),
                upstream: upstream.name().into(),
                administration: upstream.administration(),
                is_up: !upstream.is_down(),
                addresses: Some(upstream.addresses().len()),
                is_ejected: group.is_ejected(upstream),
                is_backup,
                weight,
                configured_weight: group.replaced_weight(index),
                closing_in_ms: closing_in_ms(upstream, closings),
                connections_max: connections_max.map(NonZeroUsize::get),
                open_connections: counters.open(),
                connected: counters.connected.load(Relaxed),
                failed: counters.failed.load(Relaxed),
                check: group.check().map(|_| CheckStatus {
                    failed: counters.failed_checks.load(Relaxed),
                    error: upstream.check_error(),
                }),
            });
        }
    }
    let mut removed = table.removed_upstreams();
    removed.retain(|upstream| is_wanted(upstream));
    listed.extend(removed.iter().map(|upstream| removed_status(upstream, closings)));
    listed
}

fn closing_in_ms(upstream: &Arc<Upstream>, closings: &Closings) -> Option<u64> {
    closings.of(upstream).map(|(_, left)| left.as_millis() as u64).min()
}

/// The state of an upstream that has left the configuration.
fn removed_status(upstream: &Arc<Upstream>, closings: &Closings) -> UpstreamStatus {
    let counters = upstream.counters();
    UpstreamStatus {
        group: upstream.group().into(),
        upstream: upstream.name().into(),
        administration: Administration::Removed,
        is_up: !upstream.is_down(),
        addresses: None,
        is_ejected: false,
        is_backup: false,
        weight: 0,
        configured_weight: None,
        closing_in_ms: closing_in_ms(upstream, closings),
        connections_max: None,
        open_connections: counters.open(),
        connected: counters.connected.load(Relaxed),
        failed: counters.failed.load(Relaxed),
        check: None,
    }
}
