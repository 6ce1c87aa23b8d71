//! The costs of the rounds in the formats of other tools: the text format of Go's benchmarks, which
//! `benchstat` compares, and Bencher Metric Format (BMF), which Bencher tracks over time.
//!
//! In both a benchmark is named by the experiment, the conditions of the row and the row.

use crate::report::Report;
use crate::stats::Estimate;
use crate::view::TableRow;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// The format of Go's benchmarks (golang.org/design/14313-benchmark-format): lines that describe
/// the machine, and a line for each round of each row.
pub fn benchfmt<R: TableRow>(report: &Report<R>) -> String {
    let mut text = format!(
        "goos: linux\nhaul: {}\nkernel: {}\ncpu: {}\n",
        report.haul,
        report.host.kernel,
        one_line(&report.host.cpu)
    );
    let mut experiment = report.experiment.clone();
    // The name has to begin with a capital letter after "Benchmark".
    if let Some(first) = experiment.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    for row in report.rows.iter().filter(|row| row.refusal_reason().is_none()) {
        let (group, path) = (word(&row.group()), word(&row.name()));
        // `benchstat -col /path` compares the rows.
        let name = format!("Benchmark{experiment}/{group}/path={path}");
        let unit = row.cost_unit();
        for round in row.round_costs() {
            let _ = write!(text, "{name} 1 {:.3} {unit}", round.cost);
            if let Some(cost) = round.other_host_cost {
                let _ = write!(text, " {cost:.3} {}", row.other_cost_unit());
            }
            text.push('\n');
        }
    }
    text
}

/// Bencher Metric Format: for each benchmark the cost with the ends of its interval.
pub fn bmf<R: TableRow>(report: &Report<R>) -> Map<String, Value> {
    let mut benchmarks = Map::new();
    for row in report.rows.iter().filter(|row| row.refusal_reason().is_none()) {
        let costs: Vec<f64> = row.round_costs().iter().map(|round| round.cost).collect();
        let Some(cost) = Estimate::of(&costs) else { continue };
        let mut metric = json!({ "value": cost.median });
        if cost.has_interval() {
            metric["lower_value"] = json!(cost.low);
            metric["upper_value"] = json!(cost.high);
        }
        let name = format!("{}/{}/{}", report.experiment, row.group(), row.name());
        benchmarks.insert(name, json!({ row.cost_unit(): metric }));
    }
    benchmarks
}

/// A text as a single word. A slash would begin another part of the name.
fn word(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join("_").replace('/', "-")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::CopiesRow;
    use crate::host::HostFacts;
    use crate::rounds::RoundCost;

    fn report(costs: &[f64]) -> Report<CopiesRow> {
        let round_costs = costs.iter().enumerate().map(|(round, &cost)| RoundCost {
            round,
            cost,
            other_host_cost: Some(7.5),
            is_at_other_distance: false,
        });
        let row = CopiesRow {
            path: "read+write".into(),
            file_bytes: 1 << 20,
            chunk_bytes: 1 << 16,
            round_costs: round_costs.collect(),
            ..CopiesRow::default()
        };
        let refused = CopiesRow { refused: Some("no".into()), ..CopiesRow::default() };
        let mut report = Report::new("copies", String::new(), HostFacts::here(), None);
        report.rows = vec![row, refused];
        report
    }

    #[test]
    fn every_round_is_a_line_of_go() {
        let text = benchfmt(&report(&[100.0, 120.5]));
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("Benchmark")).collect();
        assert_eq!(
            lines,
            [
                "BenchmarkCopies/file_of_1MiB_in_calls_of_64KiB/path=read+write 1 100.000 \
                 cpu-us/MiB 7.500 \
                 other-host-cpu-us/MiB",
                "BenchmarkCopies/file_of_1MiB_in_calls_of_64KiB/path=read+write 1 120.500 \
                 cpu-us/MiB 7.500 \
                 other-host-cpu-us/MiB",
            ]
        );
    }

    #[test]
    fn bmf_has_the_median_and_an_interval_if_there_is_one() {
        let all = bmf(&report(&[100.0; 9]));
        let metric = &all["copies/file of 1MiB in calls of 64KiB/read+write"]["cpu-us/MiB"];
        assert_eq!(*metric, json!({ "value": 100.0, "lower_value": 100.0, "upper_value": 100.0 }));
        assert_eq!(all.len(), 1, "a refused row is left out");
        let one = bmf(&report(&[100.0]));
        let metric = &one["copies/file of 1MiB in calls of 64KiB/read+write"]["cpu-us/MiB"];
        assert_eq!(*metric, json!({ "value": 100.0 }));
    }
}
