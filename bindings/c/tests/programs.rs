//! Programs in C, C++ and Go that use the installed header and library. The program in C compiles
//! without warnings, and runs alone, under valgrind and with sanitizers.

use haul_library::ErrorCode;
use haul_testing::programs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tempfile::TempDir;

/// The folder of libhaul, installed below a temporary folder that is `/usr/local`.
struct Installed {
    root: TempDir,
}

impl Installed {
    fn folder(&self, below: &str) -> PathBuf {
        self.root.path().join("usr/local").join(below)
    }

    /// A command that finds the library at run time and by pkg-config.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", self.folder("lib"))
            .env("PKG_CONFIG_PATH", self.folder("lib/pkgconfig"))
            .env("PKG_CONFIG_SYSROOT_DIR", self.root.path());
        command
    }

    /// The flags that pkg-config prints.
    fn flags(&self, arguments: &[&str]) -> Vec<String> {
        let output = run(self.command("pkg-config").args(arguments).arg("haul"));
        let flags = String::from_utf8(output.stdout).unwrap();
        flags.split_ascii_whitespace().map(str::to_owned).collect()
    }
}

/// Builds the archive, which `cargo test` does not build, and installs the library.
fn install() -> &'static Installed {
    static INSTALLED: OnceLock<Installed> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        // The test is in the folder `debug/deps` or `release/deps` of the target folder.
        let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
        let mut command = Command::new(env!("CARGO"));
        command.args(["build", "--locked", "--package", "haul-c", "--target-dir"]).arg(&target);
        run(command.env_remove("CARGO_BUILD_TARGET"));
        let root = tempfile::tempdir().unwrap();
        run(Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("install"))
            .arg("--archive")
            .arg(target.join("debug/libhaul.a"))
            .arg("--destdir")
            .arg(root.path())
            // The suppressions of valgrind need the names of functions.
            .env("STRIP", "true"));
        Installed { root }
    })
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
fn compile(folder: &Path, compiler: &str, flags: &[&str], libraries: &[String]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program.c");
    compile_source(folder, &source, compiler, flags, libraries)
}

/// Compiles a program without warnings; returns its path.
fn compile_source(
    folder: &Path,
    source: &Path,
    compiler: &str,
    flags: &[&str],
    libraries: &[String],
) -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let program = folder.join(format!("program-{}", COUNT.fetch_add(1, Relaxed)));
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g"]);
    command.args(install().flags(&["--cflags"]));
    if compiler.ends_with("++") {
        command.args(["-x", "c++"]);
    }
    command.arg(source).args(["-x", "none"]).args(libraries);
    command.arg("-lpthread").arg("-o").arg(&program);
    run(&mut command);
    program
}

#[test]
fn programs_in_c_and_cpp_send_lend_receive_and_forward() {
    if !is_here("cc") || !is_here("pkg-config") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let installed = install();
    let shared = installed.flags(&["--libs"]);
    // `-lhaul` alone would take the shared library.
    let mut archive: Vec<_> = installed.flags(&["--libs", "--static"]);
    archive.retain(|flag| flag != "-lhaul");
    archive.insert(0, installed.folder("lib/libhaul.a").display().to_string());
    let mut programs = vec![
        compile(folder.path(), "cc", &["-std=c99"], &shared),
        compile(folder.path(), "cc", &["-std=c99", "-O2"], &archive),
        compile(
            folder.path(),
            "cc",
            &["-std=c99", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
            &shared,
        ),
        compile(folder.path(), "cc", &["-std=c99", "-fsanitize=thread"], &shared),
    ];
    if is_here("c++") {
        programs.push(compile(folder.path(), "c++", &["-std=c++17"], &shared));
    }
    for program in &programs {
        run(&mut installed.command(program));
    }
    if is_here("valgrind") {
        run(installed
            .command("valgrind")
            .args(["--quiet", "--error-exitcode=9", "--leak-check=full"])
            .args(["--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"])
            .arg(concat!("--suppressions=", env!("CARGO_MANIFEST_DIR"), "/tests/valgrind.supp"))
            .arg(&programs[0]));
    }
}

/// The programs of docs/cookbook.
#[test]
fn the_cookbook_sends_receives_and_relays() {
    if !is_here("cc") || !is_here("pkg-config") {
        return;
    }
    let cookbook = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cookbook/c");
    let folder = tempfile::tempdir().unwrap();
    let libraries = install().flags(&["--libs"]);
    let program = |name: &str| {
        let source = cookbook.join(name);
        let flags = ["-std=c99", "-fsanitize=address,undefined"];
        install().command(compile_source(folder.path(), &source, "cc", &flags, &libraries))
    };
    programs::check_sending(&mut program("send_file.c"));
    programs::check_sending(&mut program("send_memory.c"));
    programs::check_receiving(&mut program("receive_file.c"));
    programs::check_relaying(&mut program("relay.c"));
}

#[test]
fn a_program_in_go_sends_lends_and_echoes() {
    if !is_here("cc") || !is_here("pkg-config") {
        return;
    }
    if Command::new("go").arg("version").output().is_err() {
        eprintln!("SKIPPED: go is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let mut build = install().command("go");
    build.args(["build", "-o"]).arg(&program).arg(".");
    run(build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/go")));
    run(&mut install().command(program));
}

/// The header has the number of each error of the library.
#[test]
fn the_header_has_the_numbers_of_errors() {
    let header = include_str!("../include/haul.h");
    let codes = [
        ErrorCode::Refused,
        ErrorCode::Unsupported,
        ErrorCode::InvalidInput,
        ErrorCode::NotASocket,
        ErrorCode::WrongSocket,
        ErrorCode::Ended,
        ErrorCode::WouldBlock,
        ErrorCode::TimedOut,
        ErrorCode::LoanLimit,
        ErrorCode::LoanEmpty,
        ErrorCode::LoanTooLarge,
        ErrorCode::StreamTorn,
        ErrorCode::Forked,
        ErrorCode::PoolEmpty,
        ErrorCode::Failed,
    ];
    for code in codes {
        let number = code.number();
        let name = format!("HAUL_{}", code.name().replace('-', "_").to_uppercase());
        assert!(header.contains(&format!("\t{name} = {number}")), "{name} = {number}");
    }
}

/// Every function of the header is exported with its version, and no other function.
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
        .arg(install().folder("lib/libhaul.so")));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut exported: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().next())
        .filter(|name| !name.starts_with("HAUL_"))
        .map(|name| name.strip_suffix("@@HAUL_0.1").unwrap_or(name))
        .collect();
    exported.sort_unstable();
    assert_eq!(declared, exported);
}
