//! What the command writes for programs.

use super::command::run;
use serde_json::Value;
use std::process::Command;

/// The JSON on its standard output.
pub fn json(command: &mut Command) -> Value {
    let (output, words) = run(command);
    assert!(output.status.success(), "{words}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"))
}
