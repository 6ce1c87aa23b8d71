//! How a service finds a place for a connection, and which connection makes room for another.

pub mod eviction;
pub mod network;
pub(crate) mod pending_headers;
pub mod placement;
pub mod shortage;
pub(crate) mod waiting_room;

use placement::Placement;
use std::sync::Arc;

/// How the event loops of a service find places for connections.
#[derive(Debug, Clone)]
pub enum Admission {
    /// Each loop keeps the connections that it accepts. A connection is accepted first, because
    /// only then its network is known, and waits if all places are occupied.
    WaitingRoom {
        /// The number of connections at a time. Beyond it, one of them is closed ([`eviction`]).
        /// The last sixteenth is for networks that have fewer connections than that.
        connections_max: usize,
        /// The number of accepted connections that may wait until another connection is closed.
        /// Networks take turns. Beyond it, clients wait in the kernel's queue.
        waiting_max: usize,
    },
    /// The loops share the connections evenly. The loops also share their listening sockets
    /// ([`crate::listener::ListenSettings::is_shared`]). A connection has its place before it is
    /// accepted. Beyond the limit of the placement clients wait in the kernel's queue, and no
    /// connection is closed to make room.
    Placement(Arc<Placement>),
}

impl Default for Admission {
    /// 65,536 connections, and 64 that wait.
    fn default() -> Self {
        Self::WaitingRoom { connections_max: 65_536, waiting_max: 64 }
    }
}

impl Admission {
    /// The placement, if the loops share the connections.
    pub fn placement(&self) -> Option<&Arc<Placement>> {
        match self {
            Self::Placement(placement) => Some(placement),
            Self::WaitingRoom { .. } => None,
        }
    }
}
