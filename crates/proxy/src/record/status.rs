//! An open connection, as the control socket lists it.

use crate::record::connection::{LoopTime, Parties, Traffic};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An open connection.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct ConnectionStatus {
    /// The connection's number, as in the log.
    pub id: u64,
    /// The client and the upstream.
    #[serde(flatten)]
    pub parties: Parties<'static>,
    /// What the connection does.
    pub phase: Phase,
    /// Time since the client was accepted, in milliseconds.
    pub age_ms: f64,
    /// The time of the event loop.
    #[serde(flatten)]
    pub loop_time: LoopTime,
    /// The bytes, and the state of the sockets.
    #[serde(flatten)]
    pub traffic: Traffic,
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
    /// One side failed, and the rest of its bytes is delivered to the other side.
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
