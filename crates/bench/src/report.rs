//! Reports: the result of an experiment as a JSON contract, from which every other output is made.

use crate::host::HostFacts;
use crate::pair::PeerFacts;
use crate::regime::Reading;
use crate::rounds::{Noise, Run};
use crate::stats::Estimate;
use crate::verdict::Verdict;
use crate::warning::{Kind, Warning};
use haul_units::Rate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;

/// Name and version of the JSON contract. The version changes if a field changes or is removed, not
/// if one is added.
pub const SCHEMA: &str = "haul.bench/1";

/// The result of one experiment, with rows of type `R`.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Report<R> {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Name of the experiment: `send`, `receive` and so on.
    pub experiment: String,
    /// Start time, RFC 3339.
    pub started: String,
    /// Version of haul.
    pub haul: String,
    /// The commit that haul was built from; empty if unknown.
    #[serde(default)]
    pub commit: String,
    /// The command line of the run.
    #[serde(default)]
    pub command: Vec<String>,
    /// The machine.
    pub host: HostFacts,
    /// The link between the hosts; `null` if there were none.
    pub lab: Option<LabFacts>,
    /// The rows.
    pub rows: Vec<R>,
    /// The meter's effect on the throughput; `None` if it was not measured.
    #[serde(default)]
    pub observer: Option<Observer>,
    /// The noise of the machine during the run; `null` if it was not read.
    #[serde(default)]
    pub noise: Option<Noise>,
    /// The answer to each question that the experiment asks.
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// Details of the answers in plain language, one sentence each.
    pub answers: Vec<String>,
    /// Warnings about the figures.
    pub warnings: Vec<Warning>,
}

/// The link between the hosts, and its settings.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Observer {
    /// The send method that was measured.
    pub path: String,
    /// Number of pairs.
    pub pairs: usize,
    /// Throughput with the meter divided by throughput without: 1 is no effect.
    pub throughput_ratio: Estimate,
    /// Whether the effect is known: half the width of its interval is at most 3 %.
    #[serde(default)]
    pub is_known: bool,
}

/// The largest relative change of the throughput by the meter that needs no warning, and the
/// largest error of a known one.
const OBSERVER_EFFECT_MAX: f64 = 0.03;

impl Observer {
    /// The observer effect from the ratios of all pairs; `None` without pairs.
    pub(crate) fn of(path: &str, ratios: &[f64]) -> Option<Self> {
        let throughput_ratio = Estimate::of(ratios)?;
        let is_known =
            throughput_ratio.is_conclusive() && throughput_ratio.spread() <= OBSERVER_EFFECT_MAX;
        Some(Self { path: path.into(), pairs: ratios.len(), throughput_ratio, is_known })
    }

    /// Whether the whole interval of the effect lies beyond 3 %. A wider interval is noise.
    pub(crate) fn is_beyond_limit(&self) -> bool {
        let ratio = self.throughput_ratio;
        ratio.is_below(1.0 - OBSERVER_EFFECT_MAX) || ratio.is_above(1.0 + OBSERVER_EFFECT_MAX)
    }
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
            haul: haul_version::VERSION.into(),
            commit: haul_version::COMMIT.into(),
            command: haul_version::command_line(),
            host,
            lab,
            rows: Vec::new(),
            observer: None,
            noise: None,
            verdicts: Vec::new(),
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
        let noise = run.noise();
        let invalid = noise.invalid.as_ref().map(|reason| {
            Warning::new(Kind::Disturbed, format!("every cost is wrong, because {reason}"))
        });
        Self {
            rows,
            noise: Some(noise),
            warnings: invalid.into_iter().chain(run.warnings).collect(),
            ..Self::new(experiment, started, run.host, Some(facts))
        }
    }

    /// Adds verdicts. On loopback or on one CPU their statements begin with that.
    pub(crate) fn add_verdicts(&mut self, verdicts: impl IntoIterator<Item = Verdict>) {
        let place = self.lab.as_ref().and_then(LabFacts::place);
        for mut verdict in verdicts {
            if let Some(place) = place {
                verdict.statement = format!("{place}: {}", verdict.statement);
            }
            self.verdicts.push(verdict);
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
    /// The place of the measurement, if its figures do not apply to a network between two machines.
    fn place(&self) -> Option<&'static str> {
        if self.sender_cpu.is_some() && self.sender_cpu == self.receiver_cpu {
            Some("On one CPU")
        } else if self.kind == "loopback" {
            Some("On loopback (no network)")
        } else {
            None
        }
    }

    /// Both ends of a connection over loopback, on one CPU.
    pub(crate) fn of_loopback(cpu: usize, congestion: &str) -> Self {
        let mtu = fs::read_to_string("/sys/class/net/lo/mtu").ok();
        Self {
            kind: "loopback".into(),
            mtu: mtu.and_then(|mtu| mtu.trim().parse().ok()).unwrap_or(0),
            congestion: congestion.into(),
            rate_bits_per_second: None,
            reading: None,
            sender_cpu: Some(cpu),
            receiver_cpu: Some(cpu),
            peer: None,
            cache_line_round_trip_ns: None,
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Question;

    #[test]
    fn a_verdict_of_one_cpu_or_loopback_begins_with_that() {
        let statement = |kind: &str, receiver_cpu| {
            let lab = LabFacts {
                kind: kind.into(),
                mtu: 9000,
                congestion: "cubic".into(),
                rate_bits_per_second: None,
                reading: None,
                sender_cpu: Some(0),
                receiver_cpu: Some(receiver_cpu),
                peer: None,
                cache_line_round_trip_ns: None,
            };
            let mut report = Report::<()>::new("send", now(), HostFacts::here(), Some(lab));
            report.add_verdicts([Verdict::withheld(Question::SendFiles, "too few rounds", "")]);
            report.verdicts.remove(0).statement
        };
        assert_eq!(statement("veth", 1), "No verdict: too few rounds");
        assert_eq!(statement("veth", 0), "On one CPU: No verdict: too few rounds");
        assert!(statement("loopback", 1).starts_with("On loopback (no network): "));
    }
}
