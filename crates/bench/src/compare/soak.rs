//! Reads a report of `haul soak --json` as a run with a row for each command.

use super::run_reports::{RunReports, is_cost};
use super::{MeasuredRow, Side};
use crate::host::HostFacts;
use crate::soak_series::{self, SoakRun, SoakSeries};
use crate::warning::{Kind, Warning};
use haul_soak::report::{self, SoakReport};
use serde_json::Value;

const EXPERIMENT: &str = "soak";
/// The kinds of warnings after which `haul soak` does not compare figures either.
const INVALIDATING: [&str; 6] = [
    "another-measurement",
    "outlived",
    "interrupted",
    "too-short",
    "starved-control-group",
    "late",
];

/// Whether a report with this schema is one of `haul soak`, of this version or another one.
pub(super) fn is_schema(schema: &str) -> bool {
    schema.starts_with("haul.soak")
}

/// Reads one report: of a single measurement, or of a series of runs.
pub(super) fn read(file: Value, schema: &str, name: &str) -> Result<RunReports, String> {
    match schema {
        report::SCHEMA => Ok(measurement(parse(file)?, name)),
        soak_series::SCHEMA => Ok(series(parse(file)?, name)),
        _ => Err(format!(
            "its schema is {schema:?}, and this version reads {:?} and {:?}",
            report::SCHEMA,
            soak_series::SCHEMA
        )),
    }
}

fn parse<T: serde::de::DeserializeOwned>(file: Value) -> Result<T, String> {
    serde_json::from_value(file).map_err(|error| error.to_string())
}

/// A measurement of the whole machine, while a command ran or for a time.
fn measurement(report: SoakReport, name: &str) -> RunReports {
    let (group, row, cost) = if report.command.is_empty() {
        let percent = report.total_load_percent;
        ("the whole machine, percent of its CPUs", "load".into(), percent)
    } else {
        let command = command_line(&report.command);
        ("the whole machine, CPU-seconds of a run", command, report.cpu_seconds)
    };
    let mut run = RunReports {
        side: Side {
            name: name.into(),
            started: report.started,
            haul: report.haul,
            commit: report.commit,
            command: Vec::new(),
            host: HostFacts::without_cpu(report.host, report.kernel),
            lab: None,
        },
        labs: Vec::new(),
        conditions: vec![("number of CPUs", report.cpus.len().to_string())],
        obstacles: Vec::new(),
        unmeasured: Vec::new(),
        warnings: warnings(&report.warnings, name),
        rows: Vec::new(),
    };
    let failed = report.exit_code.filter(|code| *code != 0);
    match (cost, failed) {
        (_, Some(code)) => refuse(&mut run, format!("{row} ended with exit code {code}")),
        (None, _) => refuse(&mut run, "the meter had no reading".into()),
        (Some(cost), None) => add(&mut run, group, &row, cost),
    }
    forbid_findings(&mut run, &report.warnings);
    run
}

/// The runs of one command, or of two commands in turn.
fn series(series: SoakSeries, name: &str) -> RunReports {
    let has_bytes = series.runs.iter().all(|run| run.bytes.is_some());
    let unit = soak_series::unit(has_bytes);
    let group = format!("the command and the interrupts of its runs, {unit}");
    let mut run = RunReports {
        side: Side {
            name: name.into(),
            started: series.started,
            haul: series.haul,
            commit: series.commit,
            command: Vec::new(),
            host: series.host,
            lab: None,
        },
        labs: Vec::new(),
        conditions: Vec::new(),
        obstacles: Vec::new(),
        unmeasured: Vec::new(),
        warnings: warnings(&series.warnings, name),
        rows: Vec::new(),
    };
    let versus =
        series.versus.map(|versus| (format!("{} (--versus)", versus.command), versus.runs));
    let commands = std::iter::once((command_line(&series.command), series.runs)).chain(versus);
    for (command, runs) in commands {
        let completed: Vec<&SoakRun> = runs.iter().filter(|run| run.exit_code == 0).collect();
        if completed.is_empty() {
            refuse(&mut run, format!("no run of {command} succeeded"));
        }
        for one in completed {
            add(&mut run, &group, &command, one.cost());
        }
    }
    forbid_findings(&mut run, &series.warnings);
    run
}

/// Adds the cost of a run, unless it cannot be a cost.
fn add(run: &mut RunReports, group: &str, row: &str, cost: f64) {
    if is_cost(cost) {
        run.add(MeasuredRow::of_program(EXPERIMENT, group, row, cost));
    } else {
        refuse(run, format!("{row} has a cost of {cost}, to which no other can be compared"));
    }
}

/// Withholds the findings if `haul soak` warned that the figures are wrong.
fn forbid_findings(run: &mut RunReports, warnings: &[report::Warning]) {
    let invalid = warnings.iter().find(|warning| INVALIDATING.contains(&warning.kind.as_str()));
    if let Some(warning) = invalid {
        run.forbid_findings(EXPERIMENT, &warning.detail);
    }
}

/// The arguments of a command as a line. Different commands are different lines.
fn command_line(arguments: &[String]) -> String {
    let is_plain = |argument: &&String| {
        !argument.is_empty() && !argument.contains(|letter: char| " \t\"\\'".contains(letter))
    };
    let word = |argument| match Some(argument).filter(is_plain) {
        Some(plain) => plain.clone(),
        None => format!("{argument:?}"),
    };
    arguments.iter().map(word).collect::<Vec<_>>().join(" ")
}

fn refuse(run: &mut RunReports, reason: String) {
    run.unmeasured.push((EXPERIMENT.into(), reason));
}

fn warnings(warnings: &[report::Warning], name: &str) -> Vec<Warning> {
    let text = |warning: &report::Warning| format!("{name}: {}", warning.detail);
    warnings.iter().map(|warning| Warning::new(Kind::Disturbed, text(warning))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn measurement_of(command: &[&str], exit_code: Option<u8>) -> Value {
        json!({
            "schema": report::SCHEMA, "host": "web1", "kernel": "6.12.48", "command": command,
            "exit_code": exit_code, "seconds": 10.0, "total_load_percent": 12.5,
            "cpu_seconds": 2.5, "cpus": [], "rusage_cpu_seconds": null, "warnings": [],
        })
    }

    fn rows(file: Value) -> Vec<(String, Vec<f64>)> {
        let run = read(file, report::SCHEMA, "a.json").unwrap();
        run.rows.into_iter().map(|row| (row.name, row.costs)).collect()
    }

    #[test]
    fn a_command_has_its_cpu_time_and_a_machine_its_load() {
        let command = rows(measurement_of(&["rsync", "-a"], Some(0)));
        assert_eq!(command, [("rsync -a".to_owned(), vec![2.5])]);
        assert_eq!(rows(measurement_of(&[], None)), [("load".to_owned(), vec![12.5])]);
    }

    #[test]
    fn a_command_that_failed_has_no_cost() {
        let file = measurement_of(&["false"], Some(1));
        let run = read(file, report::SCHEMA, "a.json").unwrap();
        assert!(run.rows.is_empty());
        assert!(run.unmeasured[0].1.contains("exit code 1"), "{:?}", run.unmeasured);
    }

    #[test]
    fn different_commands_have_different_names() {
        let lines = [&["sh", "-c", "a b"][..], &["sh", "-c", "a", "b"]].map(|command| {
            command_line(&command.iter().map(ToString::to_string).collect::<Vec<_>>())
        });
        assert_eq!(lines, ["sh -c \"a b\"", "sh -c a b"]);
    }

    #[test]
    fn figures_that_soak_calls_wrong_support_no_finding() {
        let mut file = measurement_of(&["true"], Some(0));
        file["warnings"] = json!([{"kind": "another-measurement", "detail": "both are wrong"}]);
        let run = read(file, report::SCHEMA, "a.json").unwrap();
        assert!(!run.rows[0].has_interval && run.obstacles[0].1 == "both are wrong");
    }

    #[test]
    fn a_cost_of_nothing_is_refused() {
        let mut file = measurement_of(&["true"], Some(0));
        file["cpu_seconds"] = 0.into();
        let run = read(file, report::SCHEMA, "a.json").unwrap();
        assert!(run.rows.is_empty() && run.unmeasured[0].1.contains("a cost of 0"));
    }

    #[test]
    fn a_report_of_another_version_is_refused() {
        let error = read(json!({}), "haul.soak/1", "a.json").unwrap_err();
        assert!(error.contains("haul.soak/1") && error.contains(report::SCHEMA), "{error}");
    }
}
