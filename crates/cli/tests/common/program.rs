//! Programs from Debian.

use std::fs;
use std::path::PathBuf;
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
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The path of a program, if it is installed.
pub fn program(name: &str) -> Option<PathBuf> {
    let folders = ["/usr/bin", "/usr/sbin"].map(PathBuf::from);
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders = folders.into_iter().chain(versions.map(|one| one.path().join("bin")));
    let found = folders.find(|folder| folder.join(name).exists());
    if found.is_none() {
        eprintln!("SKIPPED: there is no {name} (ci/install, as root)");
    }
    found.map(|folder| folder.join(name))
}
