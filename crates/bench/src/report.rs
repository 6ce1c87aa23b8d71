//! The result of an experiment: the contract that programs read as JSON, and that every other output is made
//! from.

use crate::host::HostFacts;
use crate::pair::PeerFacts;
use crate::quantity::Rate;
use crate::regime::Reading;
use crate::rounds::Run;
use crate::stats::Figure;
use crate::warning::Warning;
use serde::{Deserialize, Serialize};

/// The contract's name and version. A field that is added keeps the version; one that changes or goes does
/// not.
pub const SCHEMA: &str = "haul.bench/1";

/// One experiment's result; `R` is its row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report<R> {
    /// [`SCHEMA`].
    pub schema: String,
    /// `send`, `receive` and so on.
    pub experiment: String,
    /// When it began, RFC 3339.
    pub started: String,
    /// The version of haul.
    pub haul: String,
    /// The machine.
    pub host: HostFacts,
    /// What joined the hosts; `null` where there were none.
    pub lab: Option<LabFacts>,
    /// The figures.
    pub rows: Vec<R>,
    /// What running the meter did to the throughput; `None` where it was not measured.
    #[serde(default)]
    pub observer: Option<Observer>,
    /// The answer in plain words, one sentence each.
    pub answers: Vec<String>,
    /// What to know about the figures.
    pub warnings: Vec<Warning>,
}

/// What joined the hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabFacts {
    /// `veth`, `loopback`, or `remote` for two machines.
    pub kind: String,
    /// In bytes.
    pub mtu: u32,
    /// The sockets' congestion control.
    pub congestion: String,
    /// The rate that was to be held, or `null` for full speed.
    pub rate_bits_per_second: Option<u64>,
    /// How the receiving program read, where that could be chosen.
    #[serde(default)]
    pub reading: Option<Reading>,
    /// The CPU that is the sending host; `null` where that is a whole machine.
    pub sender_cpu: Option<usize>,
    /// The CPU that is the receiving host; `null` where that is a whole machine.
    pub receiver_cpu: Option<usize>,
    /// The other machine, where there are two.
    #[serde(default)]
    pub peer: Option<PeerFacts>,
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

impl<R> Report<R> {
    /// A report of an experiment that began at `started`, with nothing measured yet.
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
    /// The report of a run in the lab that is over, without its answers.
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

    /// The same, of receiving programs that read so.
    pub(crate) fn with_reading(mut self, reading: Reading) -> Self {
        if let Some(lab) = &mut self.lab {
            lab.reading = Some(reading);
        }
        self
    }
}

impl LabFacts {
    /// What joined the hosts in a run that is over.
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
