//! Reports: the result of an experiment as a JSON contract, from which every other output is made.

use crate::host::HostFacts;
use crate::pair::PeerFacts;
use crate::regime::Reading;
use crate::rounds::Run;
use crate::stats::Estimate;
use crate::warning::Warning;
use haul_units::Rate;
use serde::{Deserialize, Serialize};

/// Name and version of the JSON contract. The version changes if a field changes or is removed, not
/// if one is added.
pub const SCHEMA: &str = "haul.bench/1";

/// The result of one experiment; `R` is the type of its rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report<R> {
    /// [`SCHEMA`].
    pub schema: String,
    /// Name of the experiment: `send`, `receive` and so on.
    pub experiment: String,
    /// Start time, RFC 3339.
    pub started: String,
    /// Version of haul.
    pub haul: String,
    /// The machine.
    pub host: HostFacts,
    /// The link between the hosts; `null` if there were none.
    pub lab: Option<LabFacts>,
    /// The rows.
    pub rows: Vec<R>,
    /// The meter's effect on the throughput; `None` if it was not measured.
    #[serde(default)]
    pub observer: Option<Observer>,
    /// The answer in plain language, one sentence each.
    pub answers: Vec<String>,
    /// Warnings about the figures.
    pub warnings: Vec<Warning>,
}

/// The link between the hosts, and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabFacts {
    /// `veth`, `loopback`, or `remote` for two machines.
    pub kind: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control.
    pub congestion: String,
    /// The requested pacing rate; `null` for full speed.
    pub rate_bits_per_second: Option<u64>,
    /// The receiving program's pace of reading, if it could be chosen.
    #[serde(default)]
    pub reading: Option<Reading>,
    /// CPU of the sending host; `null` if that is a whole machine.
    pub sender_cpu: Option<usize>,
    /// CPU of the receiving host; `null` if that is a whole machine.
    pub receiver_cpu: Option<usize>,
    /// The other machine, if there are two.
    #[serde(default)]
    pub peer: Option<PeerFacts>,
    /// Distance between the two CPUs: the round trip of a cache line in nanoseconds, read around
    /// every round. The cost of copying depends on it, so compare only reports of similar distance.
    /// `null` if unknown.
    #[serde(default)]
    pub cache_line_round_trip_ns: Option<Estimate>,
}

/// The observer effect: throughput with the meter divided by throughput without, from interleaved
/// pairs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observer {
    /// The send method that was measured.
    pub path: String,
    /// Number of pairs.
    pub pairs: usize,
    /// Throughput with the meter divided by throughput without: 1 is no effect.
    pub throughput_ratio: Estimate,
}

impl<R> Report<R> {
    /// A report of an experiment that began at `started`, without rows.
    pub(crate) fn new(
        experiment: &str,
        started: String,
        host: HostFacts,
        lab: Option<LabFacts>,
    ) -> Self {
        Self {
            schema: SCHEMA.into(),
            experiment: experiment.into(),
            started,
            haul: env!("CARGO_PKG_VERSION").into(),
            host,
            lab,
            rows: Vec::new(),
            observer: None,
            answers: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

impl<R> Report<R> {
    /// The report of a completed run, without answers.
    pub(crate) fn of_run(
        experiment: &str,
        started: String,
        run: Run<'_>,
        congestion: &str,
        rate: Option<Rate>,
        rows: Vec<R>,
    ) -> Self {
        let facts = LabFacts::of(&run, congestion, rate);
        Self {
            rows,
            warnings: run.warnings,
            ..Self::new(experiment, started, run.host, Some(facts))
        }
    }

    /// Sets the receiving program's pace of reading.
    pub(crate) fn with_reading(mut self, reading: Reading) -> Self {
        if let Some(lab) = &mut self.lab {
            lab.reading = Some(reading);
        }
        self
    }
}

impl LabFacts {
    /// The link between the hosts of a completed run.
    pub(crate) fn of(run: &Run<'_>, congestion: &str, rate: Option<Rate>) -> Self {
        Self {
            kind: run.site.kind().into(),
            mtu: run.site.mtu(),
            congestion: congestion.into(),
            rate_bits_per_second: rate.map(|rate| rate.0),
            reading: None,
            sender_cpu: run.site.cpus().map(|cpus| cpus.sender),
            receiver_cpu: run.site.cpus().map(|cpus| cpus.receiver),
            peer: run.site.pair().map(|pair| pair.facts().clone()),
            cache_line_round_trip_ns: run.cache_line_round_trip_ns(),
        }
    }
}

/// The current time in UTC, rounded to the second, in RFC 3339 format.
pub(crate) fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}
