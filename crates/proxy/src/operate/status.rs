//! The state of a running proxy: its connections and upstreams, as the control socket lists them.

use crate::operate::process::ProcessStatus;
use crate::record::status::ConnectionStatus;
use crate::upstreams::closing::Closings;
use crate::upstreams::group::Share;
use crate::upstreams::routing::RoutingTable;
use crate::upstreams::upstream::{AdminState, Upstream};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
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
    /// The upstreams that a command changed, as they are now.
    Changed(Vec<UpstreamStatus>),
    /// The number of connections that a command closed.
    Killed(usize),
    /// The process as a whole.
    Status(Box<ProcessStatus>),
    /// The configuration was reloaded, with remarks for the operator.
    Reloaded(Vec<String>),
    /// The configuration file can be reloaded, with remarks for the operator.
    Checked(Vec<String>),
    /// The command failed for this reason.
    Error(String),
}

/// An upstream of a group.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct UpstreamStatus {
    /// The name of the group.
    pub group: String,
    /// The address, as configured.
    pub upstream: String,
    /// Whether the upstream gets new connections, as the operator set it.
    pub administration: AdminState,
    /// Whether the upstream is up by the active check; true without a check.
    pub is_up: bool,
    /// Number of resolved addresses; 0 before the first resolution. Absent for a removed upstream
    /// and in reports of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<usize>,
    /// Whether the upstream is ejected, because connections to it failed (passive check).
    pub is_ejected: bool,
    /// The upstream's share of the group's connections.
    #[serde(flatten)]
    pub share: ShareStatus,
    /// The time after which the upstream's established connections are closed, in milliseconds; 0
    /// once this time is over, even if connections that were accepted later are open. Absent if the
    /// connections are not closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing_in_ms: Option<u64>,
    /// The number of connections.
    #[serde(flatten)]
    pub counts: ConnectionCounts,
    /// The active check; absent without a check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckStatus>,
}

/// The share of an upstream of the connections of its group.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ShareStatus {
    /// Whether the upstream is a backup.
    pub is_backup: bool,
    /// The upstream's share of the connections, in relation to the shares of the other upstreams.
    pub weight: u32,
    /// The configured weight; absent unless the operator set another weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured_weight: Option<u32>,
    /// The most connections of the upstream at a time; absent without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections_max: Option<usize>,
}

/// The number of connections of an upstream.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ConnectionCounts {
    /// The connections that are open or being opened.
    pub open_connections: usize,
    /// Connections that were established.
    pub connected: u64,
    /// Connections that could not be established.
    pub failed: u64,
}

impl ConnectionCounts {
    fn of(upstream: &Upstream) -> Self {
        let counters = upstream.counters();
        Self {
            open_connections: counters.open(),
            connected: counters.connected.load(Relaxed),
            failed: counters.failed.load(Relaxed),
        }
    }
}

/// The results of the active check of an upstream.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct CheckStatus {
    /// Checks that failed.
    pub failed: u64,
    /// Why the latest check failed; absent if it succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The upstreams that `is_wanted` admits. Upstreams that left the configuration and still have
/// connections come last.
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
            let Share { weight, is_backup, connections_max } = group.share(index);
            listed.push(UpstreamStatus {
                group: group.name().into(),
                upstream: upstream.name().into(),
                administration: upstream.administration(),
                is_up: !upstream.is_down(),
                addresses: Some(upstream.addresses().len()),
                is_ejected: group.is_ejected(upstream),
                share: ShareStatus {
                    is_backup,
                    weight,
                    configured_weight: group.configured_weight(index),
                    connections_max: connections_max.map(NonZeroUsize::get),
                },
                closing_in_ms: closing_in_ms(upstream, closings),
                counts: ConnectionCounts::of(upstream),
                check: group.check().map(|_| CheckStatus {
                    failed: upstream.counters().failed_checks.load(Relaxed),
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

/// The state of an upstream that left the configuration.
fn removed_status(upstream: &Arc<Upstream>, closings: &Closings) -> UpstreamStatus {
    UpstreamStatus {
        group: upstream.group().into(),
        upstream: upstream.name().into(),
        administration: AdminState::Removed,
        is_up: !upstream.is_down(),
        addresses: None,
        is_ejected: false,
        share: ShareStatus::default(),
        closing_in_ms: closing_in_ms(upstream, closings),
        counts: ConnectionCounts::of(upstream),
        check: None,
    }
}
