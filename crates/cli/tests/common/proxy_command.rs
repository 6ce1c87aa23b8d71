//! The command `haul proxy`, and its log.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The command `haul proxy`.
pub fn haul_proxy(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.arg("proxy").args(arguments);
    command
}

/// The lines of an access log.
pub fn read_log(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
