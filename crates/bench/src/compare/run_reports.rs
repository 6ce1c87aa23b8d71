//! The reports of one run, merged from the files of a folder or from the reports of a file.

use super::{MeasuredRow, Side};
use crate::report::LabFacts;
use crate::warning::Warning;

/// The most groups of rows that a message names.
const GROUPS_NAMED_MAX: usize = 3;

/// The reports of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunReports {
    pub(super) side: Side,
    /// The link of each experiment.
    pub(super) labs: Vec<(String, LabFacts)>,
    /// What else affects the costs, by name, such as the congestion control of iperf3.
    pub(super) conditions: Vec<(&'static str, String)>,
    /// Why an experiment supports no finding.
    pub(super) obstacles: Vec<(String, String)>,
    /// The experiments without a measured row, each with the reason.
    pub(super) unmeasured: Vec<(String, String)>,
    /// What a reader must know about the costs.
    pub(super) warnings: Vec<Warning>,
    pub(super) rows: Vec<MeasuredRow>,
}

/// Whether a figure of a report can be a cost: above zero, and below any real one.
pub(super) fn is_cost(cost: f64) -> bool {
    cost > 0.0 && cost < 1e12
}

/// The reports of one run; `None` if there are none.
pub(super) fn merge(reports: Vec<RunReports>, name: &str) -> Option<RunReports> {
    let mut run = reports.into_iter().reduce(RunReports::with)?;
    run.side.name = name.into();
    Some(run)
}

impl RunReports {
    fn with(mut self, report: Self) -> Self {
        if self.rows.is_empty() {
            // The side is the host of the first report with a measured row.
            return if report.rows.is_empty() {
                self.with_reasons(report)
            } else {
                report.with_reasons(self)
            };
        }
        let difference = self.difference(&report);
        for mut row in report.rows.iter().cloned() {
            if let Some(difference) = &difference
                && row.is_program
            {
                row.has_interval = false;
                self.forbid_findings(&row.experiment, difference);
            }
            self.add(row);
        }
        self.side.lab = self.side.lab.take().or_else(|| report.side.lab.clone());
        self.labs.extend(report.labs.iter().cloned());
        for (what, condition) in &report.conditions {
            if !self.conditions.iter().any(|(known, _)| known == what) {
                self.conditions.push((what, condition.clone()));
            }
        }
        self.with_reasons(report)
    }

    /// Adds the obstacles, reasons and warnings of another report, each once.
    fn with_reasons(mut self, report: Self) -> Self {
        if !report.side.started.is_empty() {
            // Times in RFC 3339 and UTC sort as text.
            self.side.started = self.side.started.min(report.side.started);
        }
        add_new(&mut self.obstacles, report.obstacles);
        add_new(&mut self.unmeasured, report.unmeasured);
        add_new(&mut self.warnings, report.warnings);
        self
    }

    /// Withholds the finding of every row of an experiment, for this reason.
    pub(super) fn forbid_findings(&mut self, experiment: &str, reason: &str) {
        for row in self.rows.iter_mut().filter(|row| row.experiment == experiment) {
            row.has_interval = false;
        }
        add_new(&mut self.obstacles, vec![(experiment.to_owned(), reason.to_owned())]);
    }

    /// Adds a row. A run of a program that has a row already is a round of that row.
    pub(super) fn add(&mut self, row: MeasuredRow) {
        match self.rows.iter_mut().find(|known| known.is_same_program(&row)) {
            Some(known) => {
                known.costs.extend(row.costs);
                known.has_interval &= row.has_interval;
            }
            None => self.rows.push(row),
        }
    }

    /// The conditions that are known of both runs.
    pub(super) fn common_conditions<'a>(
        &'a self,
        other: &'a Self,
    ) -> impl Iterator<Item = (&'static str, &'a String, &'a String)> {
        self.conditions.iter().filter_map(|(what, one)| {
            let (_, two) = other.conditions.iter().find(|(name, _)| name == what)?;
            Some((*what, one, two))
        })
    }

    /// The experiments and groups of the rows, for a message.
    pub fn groups(&self) -> String {
        let mut groups: Vec<String> = Vec::new();
        for row in &self.rows {
            add_new(&mut groups, vec![format!("{}: {}", row.experiment, row.group)]);
        }
        let rest = groups.len().saturating_sub(GROUPS_NAMED_MAX);
        groups.truncate(GROUPS_NAMED_MAX);
        let named = groups.join("; ");
        if rest > 0 { format!("{named}; and {rest} more") } else { named }
    }

    /// A difference between two runs of a program that makes their costs unequal.
    fn difference(&self, other: &Self) -> Option<String> {
        let (one, two) = (&self.side.host, &other.side.host);
        let hosts = [("host", &one.name, &two.name), ("kernel", &one.kernel, &two.kernel)];
        let mut all = hosts.into_iter().chain(self.common_conditions(other));
        let (what, one, two) = all.find(|(_, one, two)| one != two)?;
        Some(format!("runs with a different {what} ({one} and {two})"))
    }
}

fn add_new<T: PartialEq>(known: &mut Vec<T>, others: Vec<T>) {
    for other in others {
        if !known.contains(&other) {
            known.push(other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostFacts;

    fn report(host: &str, costs: &[f64]) -> RunReports {
        let side = Side {
            name: String::new(),
            started: "2026-12-01T00:00:00Z".into(),
            haul: String::new(),
            commit: String::new(),
            command: Vec::new(),
            host: HostFacts::without_cpu(host.into(), "6.12".into()),
            lab: None,
        };
        let rows = costs.iter().map(|cost| MeasuredRow::of_program("soak", "group", "row", *cost));
        RunReports {
            side,
            labs: Vec::new(),
            conditions: Vec::new(),
            obstacles: Vec::new(),
            unmeasured: Vec::new(),
            warnings: Vec::new(),
            rows: rows.collect(),
        }
    }

    #[test]
    fn runs_of_different_hosts_have_no_finding() {
        let run = merge(vec![report("a", &[1.0]), report("b", &[2.0])], "run").unwrap();
        assert_eq!(run.rows[0].costs, [1.0, 2.0]);
        assert!(!run.rows[0].has_interval);
        assert!(run.obstacles[0].1.contains("host (a and b)"), "{:?}", run.obstacles);
    }

    #[test]
    fn a_report_without_a_row_does_not_name_the_host() {
        let run = merge(vec![report("a", &[]), report("b", &[2.0])], "run").unwrap();
        assert_eq!(run.side.host.name, "b");
        assert!(run.rows[0].has_interval && run.obstacles.is_empty());
    }
}
