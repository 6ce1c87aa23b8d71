//! The log: a line of JSON for each connection.

use haul::ForwardReport;
use haul_server::log_writer::LogBuffer;
use haul_sys::tcp_info::{TcpInfo, tcp_info};
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// How a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum End {
    /// Both streams have ended, and all bytes were delivered.
    Complete,
    /// The client's connection has failed: it was reset, or did not answer.
    ClientFailed,
    /// The upstream's connection has failed, after it was established.
    UpstreamFailed,
    /// No connection to an upstream could be established.
    Unreachable,
    /// All usable upstreams were at their limits, and the queue was full.
    QueueFull,
    /// All usable upstreams were at their limits for the time of the queue's limit.
    QueueTimeout,
    /// No route fits the client's greeting.
    NoRoute,
    /// No byte has moved for the time of the idle limit, or of the one for half-closed connections.
    Idle,
    /// The connection has had its whole lifetime.
    Lifetime,
    /// The proxy has ended and cut the connection off.
    CutOff,
    /// The upstream is down or removed, and its connections are closed for that.
    UpstreamDown,
    /// An operator has drained or disabled the upstream.
    Drained,
    /// An operator has closed it.
    Killed,
    /// The proxy had no descriptor, port or memory for the connection.
    Shortage,
}

impl End {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Complete,
        Self::ClientFailed,
        Self::UpstreamFailed,
        Self::Unreachable,
        Self::QueueFull,
        Self::QueueTimeout,
        Self::NoRoute,
        Self::Idle,
        Self::Lifetime,
        Self::CutOff,
        Self::UpstreamDown,
        Self::Drained,
        Self::Killed,
        Self::Shortage,
    ];

    /// The name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::ClientFailed => "client-failed",
            Self::UpstreamFailed => "upstream-failed",
            Self::Unreachable => "unreachable",
            Self::QueueFull => "queue-full",
            Self::QueueTimeout => "queue-timeout",
            Self::NoRoute => "no-route",
            Self::Idle => "idle",
            Self::Lifetime => "lifetime",
            Self::CutOff => "cut-off",
            Self::UpstreamDown => "upstream-down",
            Self::Drained => "drained",
            Self::Killed => "killed",
            Self::Shortage => "shortage",
        }
    }
}

/// One connection, as a line of the log.
#[derive(Debug, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct LogLine<'a> {
    /// The connection's number, which it keeps in an upgrade.
    pub id: u64,
    /// When the connection was accepted.
    pub time: String,
    /// The client's address; absent for a Unix socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<SocketAddr>,
    /// The configured address of the listener that has accepted the client.
    pub listener: &'a str,
    /// The server name in the client's TLS greeting (SNI); absent if there is none, or if no route
    /// depends on the greeting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<&'a str>,
    /// The number that the PROXY header gives the connection (`PP2_TYPE_UNIQUE_ID`): the one of a
    /// proxy in front, or this proxy's; absent if the header has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique_id: Option<&'a str>,
    /// The group of the upstream; absent if no route fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<&'a str>,
    /// The upstream, as configured; absent if none was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<&'a str>,
    /// The upstream's address and port that was connected to, or tried last: one of those of its
    /// name; absent for a Unix socket, or if none was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_address: Option<SocketAddr>,
    /// The proxy's address and port of the connection to the upstream, as the upstream sees it;
    /// absent for a Unix socket, or if no upstream was connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<SocketAddr>,
    /// How the connection has ended.
    pub end: End,
    /// Time that the client has waited for an upstream below its limit, in milliseconds; absent if
    /// it has not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    /// The number of addresses that were tried.
    pub connect_attempts: u32,
    /// Why an upstream could not be connected to, the latest if there were several; absent if there
    /// was none, or if it had no address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_error: Option<String>,
    /// Time from the accepted client to the established upstream, in milliseconds; absent if none
    /// was established.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_ms: Option<f64>,
    /// Time from the accepted client to the upstream's first byte, in milliseconds; absent if there
    /// was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    /// Time that the event loop has spent on the connection, in microseconds: the time of its
    /// calls, with the interrupts in between, and without the kernel's work outside of them, nor
    /// the close of its sockets. It is CPU time unless the loop was preempted.
    pub loop_us: u64,
    /// The part of it in which bytes were spliced, in microseconds. What has moved bytes in both
    /// ways is divided by their number.
    pub splice_us: u64,
    /// The part of it in which bytes were copied, in microseconds.
    pub copy_us: u64,
    /// Time from the accepted client to the end, in milliseconds.
    pub duration_ms: f64,
    /// Bytes from the client to the upstream.
    pub to_upstream: DirectionBytes,
    /// Bytes from the upstream to the client.
    pub to_client: DirectionBytes,
    /// The client's connection at its end; absent for a Unix socket, or if no upstream was
    /// connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_tcp: Option<TcpStatistics>,
    /// The upstream's connection at its end; absent likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream_tcp: Option<TcpStatistics>,
}

/// What the kernel has measured of a TCP connection.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct TcpStatistics {
    /// Smoothed round-trip time, in microseconds.
    pub rtt_us: u32,
    /// Segments that the proxy has sent again.
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
    /// Spliced, through a pipe.
    pub spliced_bytes: u64,
    /// Copied, through a buffer.
    pub copied_bytes: u64,
    /// Why bytes were copied that could have been spliced; absent if there was no reason.
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
    /// Whether there are no bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.spliced_bytes == 0 && self.copied_bytes == 0
    }

    /// Puts what another process has forwarded before this.
    fn add_earlier(&mut self, earlier: &Self) {
        // The numbers are another process's.
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
    /// Puts what another process has forwarded before this.
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

/// What a line needs of a connection.
#[derive(Debug)]
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
    pub connect_attempts: u32,
    /// An error number (`errno`).
    pub connect_error: Option<i32>,
    pub connect_time: Option<Duration>,
    pub first_byte_time: Option<Duration>,
    pub loop_time: LoopTime,
}

/// The time that the event loop has spent on a connection; zero if it is not measured.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoopTime {
    pub total: Duration,
    /// Of the turns that have spliced bytes.
    pub splicing: Duration,
    /// Of the turns that have copied bytes.
    pub copying: Duration,
}

impl LoopTime {
    /// Adds a turn, which has moved so many bytes in each way.
    pub fn add(&mut self, time: Duration, spliced_bytes: u64, copied_bytes: u64) {
        self.total += time;
        let moved_bytes = spliced_bytes + copied_bytes;
        if moved_bytes > 0 {
            let splicing = time.mul_f64(spliced_bytes as f64 / moved_bytes as f64);
            self.splicing += splicing;
            self.copying += time.saturating_sub(splicing);
        }
    }
}

/// What a line needs of the end of a connection.
#[derive(Debug)]
pub struct Ending<'a> {
    pub end: End,
    pub duration: Duration,
    /// The names in the configuration.
    pub group: Option<&'a str>,
    pub upstream: Option<&'a str>,
    pub bytes: &'a ConnectionBytes,
    /// Of the client's connection, and of the upstream's.
    pub tcp: [Option<TcpStatistics>; 2],
}

impl Record {
    /// Writes the line of a connection.
    pub fn write(&self, log: &mut LogBuffer, ending: &Ending<'_>) {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let line = LogLine {
            id: self.id,
            time: Timestamp::try_from(self.accepted).unwrap_or_default().to_string(),
            client: self.client,
            listener: &self.listener,
            server_name: self.server_name.as_deref(),
            unique_id: self.unique_id.as_deref(),
            group: ending.group,
            upstream: ending.upstream,
            upstream_address: self.upstream_address,
            source: self.source,
            end: ending.end,
            queue_ms: self.queue_time.map(ms),
            connect_attempts: self.connect_attempts,
            connect_error: self.connect_error.map(error_text),
            connect_ms: self.connect_time.map(ms),
            first_byte_ms: self.first_byte_time.map(ms),
            loop_us: self.loop_time.total.as_micros() as u64,
            splice_us: self.loop_time.splicing.as_micros() as u64,
            copy_us: self.loop_time.copying.as_micros() as u64,
            duration_ms: ms(ending.duration),
            to_upstream: ending.bytes.to_upstream.clone(),
            to_client: ending.bytes.to_client.clone(),
            client_tcp: ending.tcp[0],
            upstream_tcp: ending.tcp[1],
        };
        log.line(|bytes| {
            // Writing to memory does not fail, and neither do these types.
            let _ = serde_json::to_writer(bytes, &line);
        });
    }
}

fn error_text(number: i32) -> String {
    io::Error::from_raw_os_error(number).to_string()
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
