//! The report of a measurement of all pairs.

use schemars::JsonSchema;
use serde::Serialize;

/// What `haul fleet bench` measured.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PairsReport {
    /// The version of haul.
    pub version: String,
    /// When the measurement ended, in UTC (RFC 3339).
    pub measured_at: String,
    /// The hosts, in the order of the ranks.
    pub hosts: Vec<HostRow>,
    /// Every pair in both directions.
    pub pairs: Vec<PairRow>,
    /// What differs.
    pub findings: Findings,
    /// The time of each measurement, in seconds.
    pub seconds_each: f64,
}

/// What differs between the hosts, each as a sentence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Findings {
    /// The sentences.
    pub sentences: Vec<String>,
    /// The places of the hosts that the sentences name.
    pub hosts: Vec<usize>,
}

/// A host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct HostRow {
    /// The name.
    pub name: String,
    /// The MTU of the paths from the host, in bytes; null if no path was measured.
    pub mtu: Option<u32>,
    /// The congestion control of new connections.
    pub congestion: Option<String>,
    /// The share of the CPU time that other programs used before the measurement.
    pub busy_before: f64,
    /// Whether another host of the report is on the same machine, so that the CPU time of both is
    /// unknown.
    pub shares_machine: bool,
}

/// A pair of hosts in one direction.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct PairRow {
    /// The place of the sending host in `hosts`.
    pub from: usize,
    /// The place of the receiving host in `hosts`.
    pub to: usize,
    /// Bytes per second; null if the pair could not be measured.
    pub bytes_per_s: Option<f64>,
    /// The median time of a byte there and back, in microseconds.
    pub round_trip_us: Option<f64>,
    /// The CPU time of the sending host in microseconds per MiB; null if other programs ran, or if
    /// hosts share a machine.
    pub cpu_us_per_mib_from: Option<f64>,
    /// The CPU time of the receiving host in microseconds per MiB; null as above.
    pub cpu_us_per_mib_to: Option<f64>,
    /// The segments that were sent again.
    pub retransmitted_segments: u32,
    /// Whether the pair was measured again without other pairs.
    pub was_measured_alone: bool,
    /// Why the pair could not be measured.
    pub problem: Option<String>,
}
