//! Builds the interposer, a shared library that `haul run` carries and loads into programs.
//!
//! Cargo cannot make a shared library the dependency of a program. So this script runs cargo in a
//! separate target folder, and `library.rs` includes the result. The interposer has few
//! dependencies, so this takes seconds.
//!
//! The library always uses the shared C library, also in a statically linked `haul`, because the
//! programs that load it do.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let interpose = manifest.join("../interpose");
    for path in ["../interpose", "../tally", "../../Cargo.lock", "build.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let out = PathBuf::from(variable("OUT_DIR"));
    let folder = out.join("interpose");
    let target = shared_target(&variable("TARGET"));
    let library = folder.join(&target).join("release/libhaul_interpose.so");
    build(&interpose, &folder, &target);
    std::fs::copy(&library, out.join("libhaul_interpose.so"))
        .unwrap_or_else(|error| panic!("copying {}: {error}", library.display()));
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}

/// The target with glibc: programs of Debian and most distributions use it.
fn shared_target(target: &str) -> String {
    target.replace("-musl", "-gnu")
}

fn build(interpose: &Path, folder: &Path, target: &str) {
    let mut cargo = Command::new(variable("CARGO"));
    cargo
        .args(["rustc", "--quiet", "--lib", "--release", "--crate-type", "cdylib", "--locked"])
        .args(["--features", "exports", "--target", target, "--target-dir"])
        .arg(folder)
        .arg("--manifest-path")
        .arg(interpose.join("Cargo.toml"));
    // Small, and without unwinding: the library's functions return to C.
    for setting in ["panic='abort'", "lto=true", "codegen-units=1", "strip=true", "opt-level=3"] {
        cargo.args(["--config", &format!("profile.release.{setting}")]);
    }
    // What cargo sets for this script and for the crates of the outer build. Flags for a static
    // program, or a wrapper that only checks, would make no shared library.
    let of_outer_build = [
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTFLAGS",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
        "CARGO_MAKEFLAGS",
        "MAKEFLAGS",
    ];
    for name in of_outer_build {
        cargo.env_remove(name);
    }
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_FEATURE_") || name.starts_with("CARGO_CFG_")
        }) {
            cargo.env_remove(name);
        }
    }
    let status = cargo.status().unwrap_or_else(|error| panic!("starting cargo: {error}"));
    assert!(status.success(), "building the interposer failed ({status}); its target is {target}");
}
