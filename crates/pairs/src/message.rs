//! What rank 0 and the other ranks tell each other.

use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The most bytes of a message.
pub const MESSAGE_BYTES_MAX: u32 = 64 << 10;

/// The secret by which both hosts of a pair recognize each other.
pub type Secret = [u8; 32];

/// What rank 0 tells a host to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Wait for a connection of another host, and receive from it. The answer is
    /// [`Reply::Listening`].
    Listen(Secret),
    /// Send to the host that listens there, for so many milliseconds. The answer is
    /// [`Reply::Sent`].
    Send {
        /// The addresses of the host, of which the first that answers is taken.
        addresses: Vec<IpAddr>,
        /// The port.
        port: u16,
        /// The secret of the pair.
        secret: Secret,
        /// The time.
        milliseconds: u32,
    },
    /// Report what was received. The answer is [`Reply::Received`].
    Collect,
}

/// What a host answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The first message of each host.
    Host(HostFacts),
    /// The host listens at this port.
    Listening(u16),
    /// The host sent.
    Sent(Sent),
    /// The host received.
    Received(Received),
    /// The order failed, for this reason.
    Failed(String),
}

/// What a host knows of itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The congestion control of new connections.
    pub congestion: String,
    /// The share of the CPU time that other programs used before the measurement.
    pub busy_before: f64,
}

/// What a host sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// The bytes that the other host received.
    pub bytes: u64,
    /// The time from the first byte to the confirmation of the last byte, in seconds.
    pub seconds: f64,
    /// The median time of a byte to the other host and back, in seconds.
    pub round_trip_s: f64,
    /// The MTU of the path, as the sending host sees it.
    pub mtu: u32,
    /// The CPU time of the whole host in this time, in seconds.
    pub cpu_s: f64,
    /// The segments that were sent again.
    pub retransmitted_segments: u32,
}

/// What a host received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Received {
    /// The CPU time of the whole host in this time, in seconds.
    pub cpu_s: f64,
}
