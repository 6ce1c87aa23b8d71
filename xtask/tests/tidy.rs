//! The rules of the house that a machine can keep. Each is stated in ARCHITECTURE.md with its reason.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Crates that may hold `unsafe`, and no other.
const GROUND: [&str; 2] = ["sys", "checksum"];
/// How high each crate stands: one may use those below it, never those above or beside.
const FLOORS: [(&str, u8); 14] = [
    ("sys", 0),
    ("checksum", 0),
    ("http", 1),
    ("fs", 1),
    ("haul", 2),
    ("lab", 3),
    ("soak", 3),
    ("server", 3),
    ("serve", 4),
    ("proxy", 4),
    ("transfer", 4),
    ("bench", 4),
    ("cli", 5),
    ("xtask", 5),
];
/// About 400 lines is where a file is asking to be two; at this it is made to.
const LINES_MAX: usize = 500;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir()
            && !matches!(name.as_str(), "target" | ".git" | "corpus" | "artifacts" | "haul-report")
        {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
}

fn sources() -> Vec<(String, String)> {
    let mut paths = Vec::new();
    files(&root(), "rs", &mut paths);
    assert!(paths.len() > 30, "the house was not found");
    let read = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        (name, fs::read_to_string(path).unwrap())
    };
    paths.into_iter().map(read).collect()
}

/// The crates by folder name, with their manifests.
fn manifests() -> BTreeMap<String, String> {
    let crates = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    crates
        .chain([root().join("xtask")])
        .map(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, fs::read_to_string(path.join("Cargo.toml")).unwrap())
        })
        .collect()
}

fn floor(name: &str) -> u8 {
    FLOORS
        .iter()
        .find(|(other, _)| *other == name)
        .unwrap_or_else(|| panic!("crate {name} has no floor"))
        .1
}

#[test]
fn unsafe_stands_only_on_the_ground_and_every_other_crate_forbids_it() {
    for (name, manifest) in manifests() {
        assert!(
            manifest.contains("[lints]\nworkspace = true"),
            "{name} does not take the workspace's lints"
        );
        if GROUND.contains(&name.as_str()) {
            continue;
        }
        let folder =
            if name == "xtask" { root().join(&name) } else { root().join("crates").join(&name) };
        let top = ["src/lib.rs", "src/main.rs"]
            .map(|file| folder.join(file))
            .into_iter()
            .find(|path| path.exists());
        let text = fs::read_to_string(top.unwrap()).unwrap();
        assert!(text.contains("#![forbid(unsafe_code)]"), "{name} does not forbid unsafe code");
    }
}

#[test]
fn arrows_point_down() {
    for (name, manifest) in manifests() {
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("[dev-dependencies]").next().unwrap_or_default();
        for line in dependencies.lines() {
            let Some(used) = line.split(['.', ' ', '=']).next() else { continue };
            let Some(used) = used.strip_prefix("haul-").or((used == "haul").then_some(used)) else {
                continue;
            };
            assert!(
                floor(used) < floor(&name),
                "{name} must not use {used}, which does not stand below it"
            );
        }
    }
}

#[test]
fn a_file_is_one_idea() {
    for (name, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{name} has {lines} lines: which two ideas are in it?");
        assert!(text.starts_with("//!"), "{name} does not say in its first line what it is");
    }
}

#[test]
fn nothing_is_left_over() {
    // Put together here, so that this file does not hold them.
    let leftovers = [
        ["to", "do!("],
        ["unimple", "mented!("],
        ["db", "g!("],
        ["FIX", "ME"],
        ["TO", "DO"],
        ["#[ig", "nore"],
    ]
    .map(|halves| halves.concat());
    for (name, text) in sources() {
        for leftover in &leftovers {
            assert!(!text.contains(leftover.as_str()), "{name} holds a {leftover}");
        }
    }
}

#[test]
fn the_licences_and_the_change_log_are_there() {
    for file in [
        "LICENSE-MIT",
        "LICENSE-APACHE",
        "CHANGELOG.md",
        "README.md",
        "ARCHITECTURE.md",
        "Cargo.lock",
    ] {
        assert!(root().join(file).exists(), "{file} is missing");
    }
}
