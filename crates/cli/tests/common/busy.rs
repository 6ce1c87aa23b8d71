//! Reports of a machine that may be too busy to measure.

use super::command::run;
use super::report::parse_report;
use serde_json::Value;
use std::process::Command;

/// Runs the command and parses the report on its standard output, which must be valid. The second
/// value is false if the machine was too busy to measure any row (exit code 3).
pub fn json_if_measured(command: &mut Command) -> (Value, bool) {
    let (output, transcript) = run(command);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{transcript}");
    let report =
        parse_report(&output.stdout).unwrap_or_else(|error| panic!("{error}: {transcript}"));
    (report, output.status.success())
}

/// Whether a row has figures. On a busy machine every window of a row may slip.
pub fn is_measured(row: &Value) -> bool {
    row["rounds"].as_u64().unwrap() > 0
}
