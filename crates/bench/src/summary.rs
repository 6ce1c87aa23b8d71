//! The summary of a run of several experiments: one verdict for each question.

use crate::host::HostFacts;
use crate::report::{LabFacts, Report, now};
use crate::rounds::Noise;
use crate::verdict::Verdict;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name and version of the JSON contract of a summary.
pub const SCHEMA: &str = "haul.summary/1";

/// The verdicts of a run, and where they were measured.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Summary {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Start time, RFC 3339.
    pub started: String,
    /// Version of haul.
    pub haul: String,
    /// The commit that haul was built from; empty if unknown.
    pub commit: String,
    /// The command line of the run.
    pub command: Vec<String>,
    /// The machine.
    pub host: HostFacts,
    /// The link between the hosts in the first experiment; `null` if there was none.
    pub lab: Option<LabFacts>,
    /// This host's default congestion control; `null` if unknown.
    #[serde(default)]
    pub default_congestion: Option<String>,
    /// The noise of the machine. Each field is the highest value of this field in all experiments.
    #[serde(default)]
    pub noise: Noise,
    /// The number of warnings in all reports.
    #[serde(default)]
    pub warning_count: usize,
    /// Length of the run in seconds.
    pub seconds: f64,
    /// The verdicts, in the order of their questions.
    pub verdicts: Vec<Verdict>,
    /// The experiments that were not run or not completed.
    pub left_out: Vec<LeftOut>,
}

/// An experiment without a result.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct LeftOut {
    /// Name of the experiment.
    pub experiment: String,
    /// Why the experiment lacks a result, and what to do about it.
    pub reason: String,
}

/// What the summary needs of a report.
#[derive(Debug, Clone, PartialEq)]
pub struct Findings {
    /// The machine.
    pub host: HostFacts,
    /// The link between the hosts.
    pub lab: Option<LabFacts>,
    /// The verdicts.
    pub verdicts: Vec<Verdict>,
    /// The noise of the machine.
    pub noise: Option<Noise>,
    /// The number of warnings.
    pub warning_count: usize,
}

impl<R> From<&Report<R>> for Findings {
    fn from(report: &Report<R>) -> Self {
        Self {
            host: report.host.clone(),
            lab: report.lab.clone(),
            verdicts: report.verdicts.clone(),
            noise: report.noise.clone(),
            warning_count: report.warnings.len(),
        }
    }
}

impl Summary {
    /// A summary of a run that begins now.
    pub fn start() -> Self {
        Self {
            schema: SCHEMA.into(),
            started: now(),
            haul: haul_version::VERSION.into(),
            commit: haul_version::COMMIT.into(),
            command: haul_version::command_line(),
            host: HostFacts::here(),
            lab: None,
            default_congestion: haul::pacing::default_congestion(),
            noise: Noise::default(),
            warning_count: 0,
            seconds: 0.0,
            verdicts: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Adds the verdicts of an experiment.
    pub fn add(&mut self, findings: &Findings) {
        self.lab = self.lab.take().or_else(|| findings.lab.clone());
        self.host.steal_percent = self.host.steal_percent.max(findings.host.steal_percent);
        self.noise = self.noise.clone().max(findings.noise.clone().unwrap_or_default());
        self.warning_count += findings.warning_count;
        for verdict in &findings.verdicts {
            // Loans and sends of memory answer the same question; the first decided one counts.
            match self.verdicts.iter_mut().find(|other| other.question == verdict.question) {
                Some(other) if other.choice.is_none() => *other = verdict.clone(),
                Some(_) => {}
                None => self.verdicts.push(verdict.clone()),
            }
        }
        self.verdicts.sort_by_key(|verdict| verdict.question);
    }

    /// The title of a page: what it shows, the host and the date.
    pub fn title(&self, what: &str) -> String {
        let date = self.started.split('T').next().unwrap_or_default();
        format!("{what}, {}, {date}", self.host.name)
    }

    /// The host, and where it was measured, in one line.
    pub fn place(&self) -> String {
        let HostFacts { name, kernel, cpu, cpus, .. } = &self.host;
        let cpus = if *cpus == 1 { "1 CPU".into() } else { format!("{cpus} CPUs") };
        let link = self.lab.as_ref().map_or(String::new(), |lab| self.link(lab));
        format!("{name}, Linux {kernel}, {cpu}, {cpus}{link}, {}", self.started)
    }
}

impl Summary {
    /// The link in words, and the default congestion control if it is another one.
    fn link(&self, lab: &LabFacts) -> String {
        let LabFacts { mtu, congestion, .. } = lab;
        let kind = match lab.kind.as_str() {
            "veth" => "two network namespaces (veth)",
            "remote" => "to another machine",
            _ => "loopback",
        };
        let default = self.default_congestion.as_ref().filter(|default| *default != congestion);
        let default = default.map_or(String::new(), |default| format!(" (default: {default})"));
        format!(", {kind}, MTU {mtu}, {congestion}{default}")
    }

    /// The noise of the run in one line.
    pub fn noise_line(&self) -> String {
        let Noise { steal_percent, disturbed_percent, .. } = self.noise;
        format!(
            "Noise: steal {steal_percent:.0} %, other programs in {disturbed_percent:.0} % of \
             windows; {} warnings in the report",
            self.warning_count
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Question;

    #[test]
    fn the_first_decided_verdict_on_a_question_counts() {
        let mut summary = Summary::start();
        let findings = |verdicts: Vec<Verdict>| Findings {
            host: HostFacts::here(),
            lab: None,
            verdicts,
            noise: None,
            warning_count: 0,
        };
        let decided = |choice: &str| Verdict {
            choice: Some(choice.into()),
            ..Verdict::without_saving(Question::SendMemory, choice)
        };
        summary.add(&findings(vec![Verdict::withheld(Question::SendMemory, "noise", "")]));
        summary.add(&findings(vec![
            decided("send"),
            Verdict::without_saving(Question::SendFiles, ""),
        ]));
        summary.add(&findings(vec![decided("lend")]));
        let questions: Vec<Question> =
            summary.verdicts.iter().map(|verdict| verdict.question).collect();
        assert_eq!(questions, [Question::SendFiles, Question::SendMemory]);
        assert_eq!(summary.verdicts[1].choice.as_deref(), Some("send"));
    }
}
