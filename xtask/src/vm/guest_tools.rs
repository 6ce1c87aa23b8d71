//! What the programs of the guest share: connections to the host, and programs of the initramfs.

use super::{HOST, VmError, step};
use std::net::TcpStream;
use std::process::Command;

/// Connects to the host. The first byte that the guest sends selects when the host reads.
pub(super) fn connect(port: u16) -> Result<TcpStream, VmError> {
    TcpStream::connect((HOST, port)).map_err(step("connecting to the host"))
}

/// Runs a program of the initramfs and fails unless it succeeds.
pub(super) fn call(program: &str, arguments: &[&str]) -> Result<(), VmError> {
    let status = Command::new(format!("/bin/{program}"))
        .args(arguments)
        .status()
        .map_err(step(format!("running {program}")))?;
    if status.success() {
        Ok(())
    } else {
        Err(VmError::Guest(format!("{program} {} failed", arguments.join(" "))))
    }
}
