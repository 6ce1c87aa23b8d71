//! Programs from Debian.

use std::fs;
use std::path::PathBuf;

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
