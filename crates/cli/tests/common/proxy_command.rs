//! The command `haul proxy`, the port of its address, and its log.

use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

/// The command `haul proxy`.
pub fn haul_proxy(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.arg("proxy").args(arguments);
    command
}

/// The port of an address in text.
pub fn port(address: &str) -> u16 {
    address.parse::<SocketAddr>().unwrap().port()
}

/// The lines of an access log.
pub fn read_log(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
