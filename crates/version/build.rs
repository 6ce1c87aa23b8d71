//! Reads the commit of the source tree, if it is a git checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    // A package is built from a source archive, which has no git folder: its builder sets the
    // variables.
    println!("cargo::rerun-if-env-changed=HAUL_COMMIT");
    println!("cargo::rerun-if-env-changed=HAUL_COMMIT_DATE");
    let given = |name: &str| std::env::var(name).ok();
    let commit = given("HAUL_COMMIT").or_else(|| git(&["rev-parse", "--short=7", "HEAD"]));
    let date = given("HAUL_COMMIT_DATE").or_else(|| git(&["show", "-s", "--format=%cs", "HEAD"]));
    let (commit, date) = (commit.unwrap_or_default(), date.unwrap_or_default());
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let full = if commit.is_empty() { version } else { format!("{version} ({commit}, {date})") };
    println!("cargo::rustc-env=HAUL_COMMIT={commit}");
    println!("cargo::rustc-env=HAUL_FULL_VERSION={full}");
    // The log of HEAD changes with every commit, and with every change of branch.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}
