//! Selections: which upstreams or connections a command is for.

use crate::upstream::Upstream;
use haul_server::network::IpRange;
use std::net::IpAddr;

/// An upstream as an operator names it: its address as configured, or `GROUP/ADDRESS` for the one
/// of this group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamSelection(pub String);

impl UpstreamSelection {
    /// Whether an upstream is meant.
    pub fn admits(&self, upstream: &Upstream) -> bool {
        let (group, rest) = (upstream.group(), self.0.strip_suffix(upstream.name()));
        rest.is_some_and(|rest| rest.is_empty() || rest.strip_suffix('/') == Some(group))
    }
}

/// The connections that an operator closes.
#[derive(Debug, Clone)]
pub enum ConnectionSelection {
    /// The one with this number.
    Id(u64),
    /// Those of an upstream, also if it is not in the configuration any more.
    Upstream(UpstreamSelection),
    /// Those of clients in this network.
    Clients(IpRange),
}

impl ConnectionSelection {
    /// Whether a connection is meant.
    pub fn admits(&self, id: u64, client: Option<IpAddr>, upstream: Option<&Upstream>) -> bool {
        match self {
            Self::Id(wanted) => *wanted == id,
            Self::Upstream(selection) => {
                upstream.is_some_and(|upstream| selection.admits(upstream))
            }
            Self::Clients(range) => client.is_some_and(|client| range.contains(client)),
        }
    }
}
