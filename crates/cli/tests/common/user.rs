//! The command as somebody else.

use std::path::Path;
use std::process::Command;

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
    command
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(program)
        .args(arguments);
    command.current_dir(folder).env("TMPDIR", folder).env("HOME", folder);
    Some(command)
}
