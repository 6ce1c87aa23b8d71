//! What the tests of the command share.
#![allow(dead_code, reason = "not every test needs all of it")]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// The command under test.
pub fn haul(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.args(arguments);
    command
}

/// Its output, with its words beside an assertion that fails.
pub fn run(command: &mut Command) -> (Output, String) {
    let output = command.output().unwrap();
    let words = format!(
        "{command:?}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    (output, words)
}

/// The JSON on its standard output.
pub fn json(command: &mut Command) -> Value {
    let (output, words) = run(command);
    assert!(output.status.success(), "{words}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"))
}

/// An ordinary user's command: the program copied to where that user may reach it, in a folder of his own.
///
/// `None`, and a loud word, where the test does not run as root and so cannot become somebody else.
pub fn as_ordinary_user(folder: &Path, arguments: &[&str]) -> Option<Command> {
    use std::os::unix::fs::{PermissionsExt, chown};
    const NOBODY: u32 = 65_534;
    if chown(folder, Some(NOBODY), Some(NOBODY)).is_err() {
        eprintln!("SKIPPED: only root can test what an ordinary user sees");
        return None;
    }
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.join("haul");
    std::fs::copy(env!("CARGO_BIN_EXE_haul"), &program).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program).args(arguments);
    command.current_dir(folder).env("TMPDIR", folder).env("HOME", folder);
    Some(command)
}
