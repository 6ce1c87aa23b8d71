//! What is known of a connection: the source of its line in the log, of its line in the operator's
//! list, and of the message to the next process.

use haul::ForwardReport;
use haul_sys::tcp_info::{TcpInfo, tcp_info};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What is known of a connection, apart from its bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    pub id: u64,
    pub accepted: SystemTime,
    pub client: Option<SocketAddr>,
    /// The configured address of the listener.
    pub listener: Arc<str>,
    pub server_name: Option<String>,
    /// The upstream's address that was connected to, or tried last.
    pub upstream_address: Option<SocketAddr>,
    /// The local address of the connection to the upstream.
    pub source: Option<SocketAddr>,
    pub unique_id: Option<String>,
    /// `None` if the client was not queued.
    pub queue_time: Option<Duration>,
    pub connect: ConnectRecord,
    pub first_byte_time: Option<Duration>,
    pub loop_time: LoopTime,
}

/// The attempts to connect to an upstream.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ConnectRecord {
    pub attempts: u32,
    /// The error number (`errno`) of the latest attempt that failed.
    pub error: Option<i32>,
    /// The time until an upstream was connected.
    pub time: Option<Duration>,
}

impl Record {
    /// The record of a client that was accepted.
    pub fn new(
        id: u64,
        accepted: SystemTime,
        client: Option<SocketAddr>,
        listener: Arc<str>,
    ) -> Self {
        Self {
            id,
            accepted,
            client,
            listener,
            server_name: None,
            upstream_address: None,
            source: None,
            unique_id: None,
            queue_time: None,
            connect: ConnectRecord::default(),
            first_byte_time: None,
            loop_time: LoopTime::default(),
        }
    }

    /// The client and the upstream, which has these names in the configuration.
    pub fn parties<'a>(&'a self, group: Option<&'a str>, upstream: Option<&'a str>) -> Parties<'a> {
        Parties {
            client: self.client,
            listener: Cow::Borrowed(&*self.listener),
            server_name: self.server_name.as_deref().map(Cow::Borrowed),
            group: group.map(Cow::Borrowed),
            upstream: upstream.map(Cow::Borrowed),
            upstream_address: self.upstream_address,
            source: self.source,
        }
    }
}

/// The client and the upstream of a connection.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct Parties<'a> {
    /// The client's address; absent for a Unix socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<SocketAddr>,
    /// The configured address of the listener that accepted the client.
    #[serde(default)]
    pub listener: Cow<'a, str>,
    /// The server name in the client's TLS greeting (SNI); absent if the greeting lacks a name, or
    /// if the routes do not depend on the greeting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<Cow<'a, str>>,
    /// The group of the upstream; absent if no route fits, and before the route is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<Cow<'a, str>>,
    /// The upstream, as configured; absent if no upstream was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Cow<'a, str>>,
    /// The upstream's address and port that was connected to, or tried last; absent for a Unix
    /// socket, or if no address was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_address: Option<SocketAddr>,
    /// The proxy's address and port of the connection to the upstream, as the upstream sees it;
    /// absent for a Unix socket, or if no upstream was connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<SocketAddr>,
}

impl Parties<'_> {
    /// A copy that borrows nothing.
    pub(crate) fn into_owned(self) -> Parties<'static> {
        let owned = |text: Cow<'_, str>| Cow::Owned(text.into_owned());
        Parties {
            client: self.client,
            listener: owned(self.listener),
            server_name: self.server_name.map(owned),
            group: self.group.map(owned),
            upstream: self.upstream.map(owned),
            upstream_address: self.upstream_address,
            source: self.source,
        }
    }
}

/// What was forwarded, and the sockets that it was forwarded between.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes from the client to the upstream.
    pub to_upstream: DirectionBytes,
    /// Bytes from the upstream to the client.
    pub to_client: DirectionBytes,
    /// The client's connection; absent for a Unix socket, or if no upstream was connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_tcp: Option<TcpStatistics>,
    /// The upstream's connection; absent as `client_tcp` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_tcp: Option<TcpStatistics>,
}

impl Traffic {
    /// `tcp` has the statistics of the client's connection, and of the upstream's.
    pub(crate) fn new(bytes: ConnectionBytes, tcp: [Option<TcpStatistics>; 2]) -> Self {
        let ConnectionBytes { to_upstream, to_client } = bytes;
        let [client_tcp, upstream_tcp] = tcp;
        Self { to_upstream, to_client, client_tcp, upstream_tcp }
    }
}

/// The kernel's statistics of a TCP connection.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct TcpStatistics {
    /// Smoothed round-trip time, in microseconds.
    pub rtt_us: u32,
    /// Segments that the proxy sent again.
    pub retransmitted_segments: u32,
}

impl TcpStatistics {
    /// The statistics of a socket; `None` for a Unix socket.
    pub fn of(socket: impl AsFd) -> Option<Self> {
        tcp_info(socket).ok().as_ref().map(Self::from)
    }
}

impl From<&TcpInfo> for TcpStatistics {
    fn from(info: &TcpInfo) -> Self {
        Self { rtt_us: info.rtt_us, retransmitted_segments: info.retransmitted_segments }
    }
}

/// The bytes of one direction, by how they were forwarded.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct DirectionBytes {
    /// The bytes that were spliced, through a pipe.
    pub spliced_bytes: u64,
    /// The bytes that were copied, through a buffer.
    pub copied_bytes: u64,
    /// Why bytes were copied that could have been spliced; absent without a reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<String>,
}

impl From<&haul::DirectionReport> for DirectionBytes {
    fn from(report: &haul::DirectionReport) -> Self {
        Self {
            spliced_bytes: report.spliced.bytes,
            copied_bytes: report.copied.bytes,
            fallbacks: report.fallbacks.iter().map(ToString::to_string).collect(),
        }
    }
}

impl DirectionBytes {
    /// Whether nothing was forwarded.
    pub(crate) fn is_empty(&self) -> bool {
        self.spliced_bytes == 0 && self.copied_bytes == 0
    }

    /// Adds the bytes that another process forwarded before.
    fn add_earlier(&mut self, earlier: &Self) {
        // The numbers come from another process.
        self.spliced_bytes = self.spliced_bytes.saturating_add(earlier.spliced_bytes);
        self.copied_bytes = self.copied_bytes.saturating_add(earlier.copied_bytes);
        let later = std::mem::replace(&mut self.fallbacks, earlier.fallbacks.clone());
        let new = later.into_iter().filter(|reason| !earlier.fallbacks.contains(reason));
        self.fallbacks.extend(new);
    }
}

/// The bytes of a connection.
#[derive(Debug, Clone, Default)]
pub struct ConnectionBytes {
    pub to_upstream: DirectionBytes,
    pub to_client: DirectionBytes,
}

impl ConnectionBytes {
    /// Adds the bytes that another process forwarded before.
    pub fn add_earlier(&mut self, earlier: &Self) {
        self.to_upstream.add_earlier(&earlier.to_upstream);
        self.to_client.add_earlier(&earlier.to_client);
    }
}

impl From<&ForwardReport> for ConnectionBytes {
    fn from(report: &ForwardReport) -> Self {
        Self { to_upstream: (&report.a_to_b).into(), to_client: (&report.b_to_a).into() }
    }
}

/// The time that the event loop spent on a connection; zero if the time is not measured.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct LoopTime {
    /// Time that the event loop spent on the connection, in microseconds: its system calls and the
    /// interrupts during them. The kernel's other work and the close of the sockets are not
    /// included. The time is CPU time unless the loop was preempted.
    #[serde(rename = "loop_us", with = "micros")]
    #[schemars(with = "u64")]
    pub total: Duration,
    /// The part of `loop_us` in which bytes were spliced, in microseconds. A turn that spliced and
    /// copied is divided by the number of bytes.
    #[serde(rename = "splice_us", with = "micros")]
    #[schemars(with = "u64")]
    pub splicing: Duration,
    /// The part of `loop_us` in which bytes were copied, in microseconds.
    #[serde(rename = "copy_us", with = "micros")]
    #[schemars(with = "u64")]
    pub copying: Duration,
}

/// A time as a whole number of microseconds.
mod micros {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_micros)
    }
}

impl LoopTime {
    /// Adds a turn, which moved so many bytes in each way.
    pub(crate) fn add(&mut self, time: Duration, spliced_bytes: u64, copied_bytes: u64) {
        self.total += time;
        let moved_bytes = spliced_bytes + copied_bytes;
        if moved_bytes > 0 {
            let splicing = time.mul_f64(spliced_bytes as f64 / moved_bytes as f64);
            self.splicing += splicing;
            self.copying += time.saturating_sub(splicing);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_an_earlier_process_count() {
        let direction = |spliced_bytes, fallbacks: &[&str]| DirectionBytes {
            spliced_bytes,
            copied_bytes: 1,
            fallbacks: fallbacks.iter().copied().map(Into::into).collect(),
        };
        let mut bytes = direction(2, &["b", "a"]);
        bytes.add_earlier(&direction(u64::MAX, &["a", "c"]));
        assert_eq!((bytes.spliced_bytes, bytes.copied_bytes), (u64::MAX, 2));
        assert_eq!(bytes.fallbacks, ["a", "c", "b"]);
    }

    #[test]
    fn a_turn_that_moves_bytes_in_both_ways_is_divided_by_their_number() {
        let mut time = LoopTime::default();
        let turn = Duration::from_micros(100);
        time.add(turn, 0, 0);
        time.add(turn, 5, 0);
        time.add(turn, 0, 5);
        time.add(turn, 1, 3);
        assert_eq!(time.total, 4 * turn);
        assert_eq!([time.splicing, time.copying], [125, 175].map(Duration::from_micros));
    }
}
