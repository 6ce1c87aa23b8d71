//! A program in C and C++ that uses the header and the library. The program is compiled without
//! warnings, and runs alone, under valgrind and with sanitizers.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Builds `libhaul.so` and `libhaul.a`, which `cargo test` does not build; returns their folder.
fn build() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        // The test is in the folder `debug/deps` or `release/deps` of the target folder.
        let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
        let mut command = Command::new(env!("CARGO"));
        command.args(["build", "--locked", "--package", "haul-c", "--target-dir"]).arg(&target);
        run(command.env_remove("CARGO_BUILD_TARGET"));
        let libraries = target.join("debug");
        // The dynamic linker looks for this name.
        let name = libraries.join("libhaul.so.0");
        match std::os::unix::fs::symlink("libhaul.so", &name) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            result => result.unwrap(),
        }
        libraries
    };
    FOLDER.get_or_init(build).clone()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

fn is_here(program: &str) -> bool {
    let is_here = Command::new(program).arg("--version").output().is_ok();
    if !is_here {
        eprintln!("SKIPPED: {program} is not installed");
    }
    is_here
}

/// Compiles the program of the tests; returns its path.
fn compile(folder: &Path, compiler: &str, flags: &[&str], library: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = folder.join(format!("program-{compiler}-{}", flags.len()));
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g"]);
    command.arg("-I").arg(root.join("include"));
    if compiler.ends_with("++") {
        command.args(["-x", "c++"]);
    }
    command.arg(root.join("tests/program.c")).args(["-x", "none"]).arg(library);
    command.args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program);
    run(&mut command);
    program
}

#[test]
fn programs_in_c_and_cpp_send_lend_receive_and_forward() {
    if !is_here("cc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let libraries = build();
    let (shared, archive) = (libraries.join("libhaul.so"), libraries.join("libhaul.a"));
    let mut programs = vec![
        compile(folder.path(), "cc", &["-std=c99"], &shared),
        compile(folder.path(), "cc", &["-std=c99", "-O2"], &archive),
    ];
    if is_here("c++") {
        programs.push(compile(folder.path(), "c++", &["-std=c++17"], &shared));
    }
    for program in &programs {
        run(Command::new(program).env("LD_LIBRARY_PATH", &libraries));
    }
    if is_here("valgrind") {
        run(Command::new("valgrind")
            .args(["--quiet", "--error-exitcode=9", "--leak-check=full"])
            .args(["--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"])
            .arg(concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/tests/valgrind.supp"))
            .arg(&programs[0])
            .env("LD_LIBRARY_PATH", &libraries));
    }
    let sanitized = compile(
        folder.path(),
        "cc",
        &["-std=c99", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        &shared,
    );
    run(Command::new(sanitized).env("LD_LIBRARY_PATH", &libraries));
}

/// Every function of the header is exported, and no other function of haul.
#[test]
fn the_library_exports_what_the_header_declares() {
    if !is_here("nm") {
        return;
    }
    let header = include_str!("../include/haul.h");
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let mut declared: Vec<&str> = header
        .match_indices("haul_")
        .filter(|(at, _)| !header[..*at].ends_with(is_name))
        // A macro calls a function.
        .filter(|(at, _)| !header[..*at].ends_with("#define "))
        .filter_map(|(at, _)| {
            let name = &header[at..at + header[at..].find(|one| !is_name(one)).unwrap()];
            let declaration = header[at + name.len()..].starts_with('(');
            // In a comment, a function is mentioned with empty parentheses.
            (declaration && !header[at + name.len()..].starts_with("()")).then_some(name)
        })
        .collect();
    declared.sort_unstable();
    declared.dedup();
    assert!(declared.len() > 20, "{declared:?}");
    let output = run(Command::new("nm")
        .args(["-D", "--defined-only", "--format=posix"])
        .arg(build().join("libhaul.so")));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut exported: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().next())
        .filter(|name| name.starts_with("haul"))
        .collect();
    exported.sort_unstable();
    assert_eq!(declared, exported);
}
