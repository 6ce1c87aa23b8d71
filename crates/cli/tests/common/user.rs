//! Runs the program under test as an unprivileged user.

use std::path::Path;
use std::process::Command;

/// Returns a command that runs as an unprivileged user. The program is copied to `folder`, which
/// becomes that user's, because the user may not be able to reach the original.
///
/// If the test does not run as root and so cannot switch users, prints a message that begins with
/// `SKIPPED` and returns `None`.
pub fn as_unprivileged_user(folder: &Path, arguments: &[&str]) -> Option<Command> {
    use std::os::unix::fs::{PermissionsExt, chown};
    const NOBODY: u32 = 65_534;
    if chown(folder, Some(NOBODY), Some(NOBODY)).is_err() {
        eprintln!("SKIPPED: only root can run commands as another user");
        return None;
    }
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.join("haul");
    // If this process wrote the copy, a child that another test forks at this moment would keep the
    // file open for writing, and exec(2) would fail with ETXTBSY. So a process that forks nothing
    // copies the program.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_haul")).arg(&program).status();
    assert!(copied.unwrap().success(), "cp did not copy the program");
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(program)
        .args(arguments);
    command.current_dir(folder).env("TMPDIR", folder).env("HOME", folder);
    Some(command)
}
