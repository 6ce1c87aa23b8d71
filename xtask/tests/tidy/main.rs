//! The rules of ARCHITECTURE.md and docs/STYLE.md that a program can check.

mod arrows;
mod prose;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The crates that may contain `unsafe`.
const UNSAFE_CRATES: [&str; 5] = ["sys", "lab-sys", "checksum", "interpose", "pmix"];
/// The layer of each crate. A crate may use the crates of lower layers only.
const LAYERS: [(&str, u8); 26] = [
    ("sys", 0),
    ("checksum", 0),
    ("units", 0),
    ("version", 0),
    ("pmix", 0),
    ("tally", 0),
    ("testing", 0),
    ("http", 1),
    ("fs", 1),
    ("interpose", 1),
    ("lab-sys", 1),
    ("fleet", 1),
    ("haul", 2),
    ("examples", 3),
    ("lab", 3),
    ("soak", 3),
    ("workers", 3),
    ("server", 3),
    ("serve", 4),
    ("proxy", 4),
    ("transfer", 4),
    ("run", 4),
    ("bench", 4),
    ("pairs", 5),
    ("cli", 6),
    ("xtask", 6),
];
/// Lines of a function.
const FUNCTION_LINES_MAX: usize = 70;
/// Lines of a file, without its tests, that are worth a second look. A file is one idea, not a
/// number of lines: this is a warning.
const FILE_LINES_NOTED: usize = 800;
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
    assert!(paths.len() > 30, "the source files were not found");
    let read = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        (name, fs::read_to_string(path).unwrap())
    };
    paths.into_iter().map(read).collect()
}

/// The documents, with their names.
fn documents() -> Vec<(String, String)> {
    let mut paths = Vec::new();
    files(&root(), "md", &mut paths);
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

fn layer(name: &str) -> u8 {
    LAYERS
        .iter()
        .find(|(other, _)| *other == name)
        .unwrap_or_else(|| panic!("crate {name} has no layer"))
        .1
}

#[test]
fn only_the_unsafe_crates_do_not_forbid_unsafe_code() {
    for (name, manifest) in manifests() {
        assert!(
            manifest.contains("[lints]\nworkspace = true"),
            "{name} does not take the workspace's lints"
        );
        if UNSAFE_CRATES.contains(&name.as_str()) {
            continue;
        }
        let folder =
            if name == "xtask" { root().join(&name) } else { root().join("crates").join(&name) };
        let mut tops = Vec::new();
        if name == "examples" {
            files(&root().join("crates/haul/examples"), "rs", &mut tops);
        } else {
            let top = ["src/lib.rs", "src/main.rs"].map(|file| folder.join(file));
            tops.extend(top.into_iter().find(|path| path.exists()));
        }
        assert!(!tops.is_empty(), "{name} has neither a library nor a program");
        for top in tops {
            let text = fs::read_to_string(&top).unwrap();
            let forbids = text.contains("#![forbid(unsafe_code)]");
            assert!(forbids, "{} does not forbid unsafe code", top.display());
        }
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
                layer(used) < layer(&name),
                "{name} must not use {used}, which is not on a lower layer"
            );
        }
    }
}

/// The functions of a source file as rustfmt lays them out: name and number of lines.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        let words: Vec<&str> = code.split_whitespace().collect();
        let Some(at) = words.iter().position(|&word| word == "fn") else { continue };
        let is_item = words[..at].iter().all(|word| {
            word.starts_with("pub")
                || ["const", "unsafe", "async", "extern", "\"C\""].contains(word)
        });
        if !is_item || code.starts_with("//") {
            continue;
        }
        let end = format!("{}}}", " ".repeat(indent));
        let semicolon = format!("{};", " ".repeat(indent));
        let declaration = format!("{})", " ".repeat(indent));
        let last = lines[start..].iter().position(|line| {
            *line == end
                || line.ends_with('}') && line.starts_with(&end)
                || line.starts_with(&semicolon)
                // A declaration without a body.
                || line.starts_with(&declaration) && line.ends_with(';')
        });
        let is_one_line = code.ends_with('}') || code.ends_with(';');
        let length = if is_one_line { 1 } else { last.map_or(1, |last| last + 1) };
        found.push((words.get(at + 1).unwrap_or(&"").to_string(), length));
    }
    found
}

#[test]
fn functions_have_at_most_70_lines() {
    for (name, text) in sources() {
        for (function, lines) in functions(&text) {
            assert!(
                lines <= FUNCTION_LINES_MAX,
                "{name}: {function} has {lines} lines: which steps of it have a name?"
            );
        }
    }
}

#[test]
fn the_length_of_a_function_is_that_of_its_text() {
    let text = "fn one() -> u8 { 1 }\n\nimpl A {\n    pub fn three(\n    ) {\n    }\n}\n";
    assert_eq!(functions(text), [("one()".to_owned(), 1), ("three(".to_owned(), 3)]);
}

#[test]
fn a_file_begins_with_its_purpose() {
    for (name, text) in sources() {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default().lines().count();
        if code > FILE_LINES_NOTED {
            eprintln!("{name} has {code} lines without its tests: is it one idea?");
        }
        assert!(text.starts_with("//!"), "{name} does not begin with a comment about its purpose");
    }
}

#[test]
fn no_module_imports_from_its_crate_root() {
    for (name, text) in sources() {
        let is_root = name.ends_with("src/lib.rs") || name.ends_with("src/main.rs");
        if is_root || !name.contains("/src/") {
            continue;
        }
        let code: String = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .collect::<Vec<_>>()
            .join("\n");
        for (at, _) in code.match_indices("crate::") {
            if code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_') {
                continue;
            }
            let path = &code[at + "crate::".len()..];
            let is_item = path.starts_with(|first: char| first.is_uppercase());
            assert!(!is_item, "{name} imports {} from the root", path.lines().next().unwrap());
        }
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
