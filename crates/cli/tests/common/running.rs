//! Programs that end with the test.

use std::process::{Child, Command, Stdio};

/// A program that is killed at the end.
pub struct Running(pub Child);

impl Running {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if the program ended before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
