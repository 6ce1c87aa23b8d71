//! Statically linked builds (`+crt-static` with glibc), for the packages and for the guest.
//!
//! Both use the same flags and the same target folder, so the dependencies are compiled once.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Returns `cargo SUBCOMMAND --release` for a static build for `triple`.
///
/// A target is always named: without one, the flags would apply to procedural macros too, which
/// cannot be linked statically.
pub fn cargo(subcommand: &str, triple: &str) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(ROOT)
        .args([subcommand, "--release", "--locked", "--target", triple, "--target-dir"])
        .arg(target_folder())
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    cargo
}

/// Path of the release build of a binary for `triple`.
pub fn binary(name: &str, triple: &str) -> PathBuf {
    target_folder().join(triple).join("release").join(name)
}

fn target_folder() -> PathBuf {
    let shared = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    shared.unwrap_or_else(|| Path::new(ROOT).join("target")).join("static")
}

/// Returns the target triple of this host's compiler.
pub fn host_triple() -> Result<String, String> {
    let output = Command::new("rustc").arg("-vV").output();
    let output = output.map_err(|error| format!("rustc: {error}"))?;
    let version = String::from_utf8_lossy(&output.stdout);
    let triple = version.lines().find_map(|line| line.strip_prefix("host: "));
    triple.map(str::to_owned).ok_or_else(|| "rustc -vV names no host".into())
}
