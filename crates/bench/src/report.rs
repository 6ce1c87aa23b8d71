//! The result of an experiment: the contract that programs read as JSON, and that every other output is made
//! from.

use crate::host::HostFacts;
use crate::stats::Figure;
use crate::warning::Warning;
use serde::{Deserialize, Serialize};

/// The contract's name and version. A field that is added keeps the version; one that changes or goes does
/// not.
pub const SCHEMA: &str = "haul.bench/1";

/// One experiment's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// `send`.
    pub experiment: String,
    /// When it began, RFC 3339.
    pub started: String,
    /// The version of haul.
    pub haul: String,
    /// The machine.
    pub host: HostFacts,
    /// What joined the hosts.
    pub lab: LabFacts,
    /// The figures.
    pub rows: Vec<Row>,
    /// What running the meter did to the throughput; `None` where it was not measured.
    pub observer: Option<Observer>,
    /// The answer in plain words, one sentence each.
    pub answers: Vec<String>,
    /// What to know about the figures.
    pub warnings: Vec<Warning>,
}

/// What joined the hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabFacts {
    /// `veth` or `loopback`.
    pub kind: String,
    /// In bytes.
    pub mtu: u32,
    /// The sockets' congestion control.
    pub congestion: String,
    /// The rate that was to be held, or `null` for full speed.
    pub rate_bits_per_second: Option<u64>,
    /// The CPU that is the sending host.
    pub sender_cpu: usize,
    /// The CPU that is the receiving host.
    pub receiver_cpu: usize,
    /// How far apart they are: the round trip of a cache line between them in nanoseconds, read around every
    /// round. Costs of copying depend on it; compare reports only where it is alike. `null` where unknown.
    #[serde(default)]
    pub cache_line_round_trip_ns: Option<Figure>,
}

/// The observer effect: throughput with the meter over throughput without, from interleaved pairs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observer {
    /// The path that was run.
    pub path: String,
    /// How many pairs.
    pub pairs: usize,
    /// With over without: 1 is no effect.
    pub throughput_ratio: Figure,
}

/// One path under one condition.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The path's name.
    pub path: String,
    /// At most how much a call.
    pub chunk_bytes: u64,
    /// The workload's name.
    pub workload: String,
    /// Whether `TCP_CORK` was set.
    pub cork: bool,
    /// `on` or `off`.
    pub offloads: String,
    /// Rounds measured. 0 for a row that was refused.
    pub rounds: usize,
    /// Why nothing was measured.
    pub refused: Option<String>,
    /// The share of the bytes that was copied on the sending host.
    pub copied_percent: Option<f64>,
    /// How that is known: `program` (it copies through a buffer or a mapping), `notice` (the kernel said so
    /// for each send), `proof` (before the rounds, a memory file was sent the same way and overwritten
    /// afterwards: what arrived changed was never copied).
    pub copied_known_by: Option<String>,
    /// Payload that reached the receiving program.
    pub throughput_bits_per_second: Option<Figure>,
    /// Load of the sending host's CPU.
    pub sender_load_percent: Option<Figure>,
    /// Load of the receiving host's CPU; `null` where both hosts share one.
    pub receiver_load_percent: Option<Figure>,
    /// CPU time of the sending host per MiB of payload, interrupts included.
    pub sender_us_per_mib: Option<Figure>,
    /// CPU time of the receiving host per MiB of payload; `null` where both hosts share one.
    pub receiver_us_per_mib: Option<Figure>,
    /// How much slower the meter's spinner went in what was left of the sending host's CPU, because others
    /// used the caches and the memory; `null` where too little was left to tell.
    pub sender_interference_percent: Option<Figure>,
    /// The same of the receiving host's.
    pub receiver_interference_percent: Option<Figure>,
    /// What `getrusage` charged the sending thread per MiB: what the usual tools report.
    pub rusage_us_per_mib: Option<Figure>,
    /// System calls of the sending thread per MiB.
    pub syscalls_per_mib: Option<f64>,
    /// `sender_us_per_mib` over that of `read+write` (of `read+send` where there is nothing to read) in the
    /// same round: the median of the rounds' ratios.
    pub sender_us_ratio: Option<Figure>,
}

impl Row {
    /// What a row is compared under: rows with the same conditions differ in their path only.
    pub fn condition(&self) -> (&str, u64, bool, &str) {
        (&self.workload, self.chunk_bytes, self.cork, &self.offloads)
    }
}
