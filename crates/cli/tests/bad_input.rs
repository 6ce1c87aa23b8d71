//! Bad input results in a one-line error that names it, and in exit code 2.

mod common {
    pub mod command;
    pub mod user;
}

use common::command::{haul, run};
use common::user::as_unprivileged_user;
use std::process::Command;

/// Asserts that the command fails with exit code 2 and one line on standard error that contains
/// `expected`.
fn assert_rejected(command: &mut Command, expected: &str) {
    let (output, transcript) = run(command);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert_eq!(line.lines().count(), 1, "{transcript}");
    assert!(line.starts_with("haul: ") && line.contains(expected), "{expected:?} in {transcript}");
    assert!(output.stdout.is_empty(), "{transcript}");
}

/// Invalid arguments, and a text that the error has to contain.
const INVALID: &[(&[&str], &str)] = &[
    (&["bench", "send", "--paths", "sendfil"], "\"sendfil\""),
    (&["bench", "send", "--paths", "sendfile,"], "unknown path"),
    (&["bench", "send", "--chunk", "0B"], "chunk 0"),
    (&["bench", "send", "--chunk", "many"], "\"many\""),
    (&["bench", "send", "--chunk", "2MiB"], "larger than the largest file"),
    (&["bench", "send", "--chunk", "1GiB", "--workload", "memory:2GiB"], "larger than 64MiB"),
    (&["bench", "send", "--workload", "63"], "\"63\""),
    (&["bench", "send", "--workload", "memory:0B"], "\"memory:0B\""),
    (&["bench", "send", "--workload", "file:/no/such/file"], "/no/such/file"),
    (&["bench", "send", "--workload", "file:/dev/null"], "not a regular file"),
    (&["bench", "send", "--workload", "file:/tmp"], "not a regular file"),
    (&["bench", "send", "--rate", "fast"], "\"fast\""),
    (&["bench", "send", "--rounds", "0"], "rounds must be"),
    (&["bench", "send", "--mtu", "100"], "MTU 100"),
    (&["bench", "send", "--congestion", "vegan"], "\"vegan\""),
    (&["bench", "send", "--cork", "maybe"], "maybe"),
    (&["bench", "sned"], "sned"),
    (&["bench", "receive", "--paths", "reed"], "\"reed\""),
    (&["bench", "receive", "--buffer", "1KiB"], "buffer 1KiB"),
    (&["bench", "receive", "--sent-by", "pigeon"], "\"pigeon\""),
    (&["bench", "receive", "--page-order", "huge"], "\"huge\""),
    (&["bench", "receive", "--mtu", "9000,100"], "MTU 100"),
    (&["bench", "receive", "--rounds", "0"], "rounds must be"),
    (&["bench", "forward", "--paths", "splise"], "\"splise\""),
    (&["bench", "forward", "--buffer", "1B"], "buffer 1B"),
    (&["bench", "forward", "--traffic", "messages:"], "\"messages:\""),
    (&["bench", "forward", "--traffic", "messages:0B"], "message 0B"),
    (&["bench", "send", "--paths", "planned"], "--plan FILE"),
    (&["bench", "send", "--plan", "/no/such/plan"], "/no/such/plan"),
    (&["plan", "--check", "--json", "/no/such/plan"], "/no/such/plan"),
    (&["plan", "--rate", "fast"], "\"fast\""),
    (&["bench", "--to", "no-such-host.invalid"], "no-such-host.invalid"),
    (&["bench", "send", "--to", "127.0.0.1:1"], "haul bench --listen"),
    (&["bench", "profile", "--to", "127.0.0.1:1"], "profile measures this machine alone"),
    (&["bench", "--listen", "here"], "\"here\""),
    (&["serve"], "haul serve DIR"),
    (&["serve", "/no/such/folder"], "/no/such/folder"),
    (&["serve", "/etc/passwd"], "/etc/passwd"),
    (&["serve", "/tmp", "--lisen", "1"], "--lisen"),
    (&["serve", "/tmp", "--listen", "nowhere"], "\"nowhere\""),
    (&["serve", "/tmp", "--listen", "192.0.2.7:0"], "no such address"),
    (&["serve", "/tmp", "--workers", "0"], "0 is no whole number of at least 1"),
    (&["serve", "/tmp", "--header", "nonsense"], "X-Frame-Options"),
    (&["serve", "/tmp", "--header", "Content-Length: 1"], "Content-Length"),
    (&["serve", "/tmp", "--cache-control", "[=x"], "pattern"),
    (&["serve", "/tmp", "--cache-control", "*.html="], "*.html=no-cache"),
    (&["bench", "--rounds", "0"], "rounds must be"),
    (&["serve", "/tmp", "--error-page", "404=/no-such-page"], "/no-such-page"),
    (&["serve", "/tmp", "--cors", "example.com"], "https://example.com"),
    (&["serve", "/tmp", "--cors", "https://example.com/"], "without a path"),
    (&["serve", "/tmp", "--listen", "unix:/etc/passwd"], "no socket"),
    (&["serve", "/tmp", "--fallback", "/no-such-page"], "/no-such-page"),
    (&["serve", "/tmp", "--tls-listen", "0"], "tls-certificate"),
    (&["serve", "/tmp", "--auth-file", "/no/such/passwords"], "/no/such/passwords"),
    (&["serve", "/tmp", "--auth-file", "/etc/passwd"], "htpasswd -B"),
    (&["serve", "/tmp", "--auth-realm", "x"], "auth-file"),
    (&["serve", "/tmp", "--path", "teleport"], "teleport"),
    (&["serve", "/tmp", "--path", "sendfile", "--plan", "x"], "not both"),
    (&["serve", "/tmp", "--plan", "/no/such/plan"], "/no/such/plan"),
    (&["serve", "/tmp", "--congestion", "vegan", "--listen", "127.0.0.1:0"], "vegan"),
    (&["serve", "/tmp", "--user", "nobody-here", "--listen", "127.0.0.1:0"], "nobody-here"),
    (&["serve", "/tmp", "--access-log", "/no/such/log", "--listen", "127.0.0.1:0"], "/no/such/log"),
    (&["serve", "/tmp", "--idle-timeout", "soon"], "soon"),
    (&["serve", "--config", "/no/such/file"], "/no/such/file"),
    (&["bench", "--listen", "192.0.2.7:4285"], "192.0.2.7:4285"),
    (&["bench", "--listen", "[::1]:4285", "--quick"], "--listen"),
    (&["bench", "loan", "--piece", "0B"], "piece 0B"),
    (&["bench", "copies", "--file", "0B"], "no call fits into a file"),
    (&["bench", "copies", "--file", "4KiB", "--chunk", "64KiB"], "no call fits into a file"),
    (&["bench", "copies", "--in-flight", "many"], "\"many\""),
    (&["bench", "settings", "--settings", "mtoo"], "\"mtoo\""),
    (&["bench", "settings", "--paths", "planned"], "haul bench send --plan"),
    (&["bench", "settings", "--congestion", "vegan"], "\"vegan\""),
    (&["bench", "checksum", "--size", "0B"], "sizes must be"),
    (&["bench", "profile", "--send", "sendfil"], "\"sendfil\""),
    (&["bench", "profile", "--for", "2h"], "0.1 to 600 seconds"),
    (&["bench", "send", "--jason", "x"], "--jason"),
    (&["bench", "send", "--json", "/no/such/folder/report.json"], "/no/such/folder"),
    (&["bench", "send", "--html", "/tmp"], "/tmp: is a directory"),
    (&["bench", "send", "--json", "-", "--html", "-"], "only one of"),
    (&["soak", "--for", "soon"], "\"soon\""),
    (&["soak", "--duration", "0s"], "\"0s\""),
    (&["soak", "--runs", "3"], "<COMMAND>"),
    (&["soak", "--runs", "3", "--versus", "true", "--", "true"], "use 9 or more"),
    (&["soak", "--per-mib-of", "../lo", "--", "true"], "\"../lo\""),
    (&["soak", "--baseline", "/no/such/file", "--", "true"], "/no/such/file"),
    (&["bench", "--within", "0%"], "\"0%\""),
    (&["bench", "--for", "1m", "--rounds", "9"], "--rounds"),
    (&["compare", "/no/such/run", "/no/such/run"], "/no/such/run"),
    (&["compare", "/proc/self/exe", "/tmp"], "name two runs or two builds"),
    (&["doctor", "--peer", "no-such-host.invalid"], "no-such-host.invalid"),
    (&["lab", "--mtu", "1", "--", "true"], "MTU 1"),
    (&["lab", "--loss", "200%", "--", "true"], "\"200%\""),
    (&["frobnicate"], "frobnicate"),
];

/// The exit codes of a shell, of env and of timeout.
#[test]
fn a_command_that_cannot_be_started_has_the_exit_code_of_a_shell() {
    for command in [&["lab"][..], &["soak"], &["bench", "profile"]] {
        for (program, code) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
            let (output, transcript) = run(haul(command).args(["--", program]));
            if command == ["bench", "profile"] && transcript.contains("sample") {
                eprintln!("SKIPPED: this user may not sample CPUs: {transcript}");
                continue;
            }
            assert_eq!(output.status.code(), Some(code), "{transcript}");
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(error.lines().count(), 1, "{transcript}");
            assert!(error.starts_with("haul: ") && error.contains(program), "{transcript}");
        }
    }
}

#[test]
fn invalid_arguments_are_one_line_errors() {
    for (arguments, expected) in INVALID {
        assert_rejected(&mut haul(arguments), expected);
    }
}

#[test]
fn an_empty_file_is_rejected() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let workload = format!("file:{}", file.path().display());
    assert_rejected(&mut haul(&["bench", "send", "--workload", &workload]), "the file is empty");
}

#[test]
fn a_peer_without_a_route_is_rejected() {
    let program = env!("CARGO_BIN_EXE_haul");
    // The lab does not have a default route, so no packet leaves it.
    let mut command = haul(&["lab", "--", program, "doctor", "--peer", "198.51.100.1"]);
    assert_rejected(&mut command, "198.51.100.1");
}

#[test]
fn a_report_directory_that_cannot_be_written_is_rejected() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = as_unprivileged_user(folder.path(), &["bench"]) else { return };
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    std::os::unix::fs::chown(folder.path(), Some(0), Some(0)).unwrap();
    assert_rejected(&mut command, "haul-report");
}

#[test]
fn help_and_version_exit_with_success() {
    for arguments in [
        &["--help"][..],
        &["--version"],
        &["bench", "--help"],
        &["bench", "receive", "--help"],
        &["bench", "forward", "--help"],
        &["bench", "profile", "--help"],
        &["soak", "-h"],
        &["doctor", "-h"],
        &["lab", "-h"],
    ] {
        let (output, transcript) = run(&mut haul(arguments));
        assert!(output.status.success() && !output.stdout.is_empty(), "{transcript}");
    }
}
