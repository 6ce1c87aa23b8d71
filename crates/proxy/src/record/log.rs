//! The log: a line of JSON for each connection.

use crate::record::connection::{
    ConnectionBytes, LoopTime, Parties, Record, TcpStatistics, Traffic,
};
use haul_server::log_writer::LogBuffer;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use std::io;
use std::time::Duration;

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum End {
    /// Both streams have ended, and all bytes were delivered.
    Complete,
    /// The client's connection failed: it was reset, or did not answer.
    ClientFailed,
    /// The upstream's connection failed after it was established.
    UpstreamFailed,
    /// No connection to an upstream could be established.
    Unreachable,
    /// All usable upstreams were at their limits, and the queue was full.
    QueueFull,
    /// All usable upstreams were at their limits for the time of the queue's limit.
    QueueTimeout,
    /// No route fits the client's greeting.
    NoRoute,
    /// Bytes did not move for the time of the idle limit, or of the limit for half-closed
    /// connections.
    Idle,
    /// The lifetime of the connection was over.
    Lifetime,
    /// The proxy ended and cut the connection off.
    CutOff,
    /// The upstream is down or removed, and its connections are closed for this reason.
    UpstreamDown,
    /// An operator drained or disabled the upstream.
    Drained,
    /// An operator closed the connection.
    Killed,
    /// The proxy lacked a descriptor, a port or memory for the connection.
    Shortage,
}

impl End {
    /// All ends.
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
    /// The client and the upstream.
    #[serde(flatten)]
    pub parties: Parties<'a>,
    /// The unique id in the PROXY header (`PP2_TYPE_UNIQUE_ID`), from a proxy in front or from this
    /// proxy; absent if the header lacks the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique_id: Option<&'a str>,
    /// How the connection ended.
    pub end: End,
    /// The number of addresses that were tried.
    pub connect_attempts: u32,
    /// Why the latest upstream that failed could not be connected to; absent if no connection
    /// failed, or if the upstream lacked an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_error: Option<String>,
    /// The times of the connection.
    #[serde(flatten)]
    pub times: LogTimes,
    /// The time of the event loop.
    #[serde(flatten)]
    pub loop_time: LoopTime,
    /// The bytes, and the state of the sockets at the end.
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// The times of a connection.
#[derive(Debug, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct LogTimes {
    /// Time that the client waited for an upstream below its limit, in milliseconds; absent if the
    /// client did not wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    /// Time from the accepted client to the established upstream, in milliseconds; absent if no
    /// upstream was connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_ms: Option<f64>,
    /// Time from the accepted client to the upstream's first byte, in milliseconds; absent without
    /// a byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    /// Time from the accepted client to the end, in milliseconds.
    pub duration_ms: f64,
}

/// The facts of the end of a connection for its line.
#[derive(Debug)]
pub struct Ending<'a> {
    pub end: End,
    pub duration: Duration,
    /// The names in the configuration.
    pub group: Option<&'a str>,
    pub upstream: Option<&'a str>,
    pub bytes: &'a ConnectionBytes,
    /// The statistics of the client's connection, and of the upstream's.
    pub tcp: [Option<TcpStatistics>; 2],
}

impl Record {
    /// Writes the line of a connection.
    pub fn write(&self, log: &mut LogBuffer, ending: &Ending<'_>) {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let line = LogLine {
            id: self.id,
            time: Timestamp::try_from(self.accepted).unwrap_or_default().to_string(),
            parties: self.parties(ending.group, ending.upstream),
            unique_id: self.unique_id.as_deref(),
            end: ending.end,
            connect_attempts: self.connect.attempts,
            connect_error: self.connect.error.map(error_text),
            times: LogTimes {
                queue_ms: self.queue_time.map(ms),
                connect_ms: self.connect.time.map(ms),
                first_byte_ms: self.first_byte_time.map(ms),
                duration_ms: ms(ending.duration),
            },
            loop_time: self.loop_time,
            traffic: Traffic::new(ending.bytes.clone(), ending.tcp),
        };
        log.line(|bytes| {
            // Writing these types to memory does not fail.
            let _ = serde_json::to_writer(bytes, &line);
        });
    }
}

fn error_text(number: i32) -> String {
    io::Error::from_raw_os_error(number).to_string()
}
