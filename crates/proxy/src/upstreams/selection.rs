//! Selections: which upstreams or connections a command is for.

use crate::upstreams::upstream::Upstream;
use haul_server::IpRange;
use std::net::IpAddr;

/// An upstream as an operator names it: by the configured address, or by `GROUP/ADDRESS`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamSelection(pub String);

impl UpstreamSelection {
    /// Whether the operator means this upstream.
    pub fn admits(&self, upstream: &Upstream) -> bool {
        let (group, rest) = (upstream.group(), self.0.strip_suffix(upstream.name()));
        rest.is_some_and(|rest| rest.is_empty() || rest.strip_suffix('/') == Some(group))
    }
}

/// The connections that an operator closes.
#[derive(Debug, Clone)]
pub enum ConnectionSelection {
    /// The connection with this number.
    Id(u64),
    /// The connections of an upstream, even if the upstream left the configuration.
    Upstream(UpstreamSelection),
    /// The connections of clients in this network.
    Clients(IpRange),
}

impl ConnectionSelection {
    /// Whether the operator means this connection.
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
