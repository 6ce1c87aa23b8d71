//! Selections: which upstreams or connections a command is for.

use crate::upstream::Upstream;
use haul_server::network::IpRange;
use std::net::IpAddr;
use std::sync::Arc;

/// An upstream as an operator names it: its address as configured, or `GROUP/ADDRESS` for the one
/// of this group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamSelection(pub String);

impl UpstreamSelection {
    /// Whether an upstream of a group is meant.
    pub fn admits(&self, group: &str, upstream: &Upstream) -> bool {
        let name = upstream.name();
        let rest = self.0.strip_suffix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.strip_suffix('/') == Some(group))
    }
}

/// The connections that an operator closes.
#[derive(Debug, Clone)]
pub enum ConnectionSelection {
    /// The one with this number.
    Id(u64),
    /// Those of these upstreams.
    Upstreams(Vec<Arc<Upstream>>),
    /// Those of clients in this network.
    Clients(IpRange),
}

impl ConnectionSelection {
    /// Whether a connection is meant.
    pub fn admits(
        &self,
        id: u64,
        client: Option<IpAddr>,
        upstream: Option<&Arc<Upstream>>,
    ) -> bool {
        match self {
            Self::Id(wanted) => *wanted == id,
            Self::Upstreams(wanted) => {
                upstream.is_some_and(|one| wanted.iter().any(|other| Arc::ptr_eq(one, other)))
            }
            Self::Clients(range) => client.is_some_and(|client| range.contains(client)),
        }
    }
}
