//! `haul push` and `haul pull` through OpenSSH.

mod common {
    pub mod command;
    pub mod program;
    pub mod running;
    pub mod ssh_server;
}

use common::command::{haul, run};
use common::ssh_server::SshServer;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for a file to arrive.
const LIMIT: Duration = Duration::from_secs(60);

/// An ssh server, and the command that logs in there.
struct Server {
    ssh: SshServer,
    shell: String,
}

impl Server {
    /// Starts an ssh server; `None` if OpenSSH is missing.
    fn start() -> Option<Self> {
        let ssh = SshServer::start()?;
        let shell = ssh.client(ssh.port).join(" ");
        Some(Self { ssh, shell })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.ssh.folder.path().join(name)
    }

    /// Runs `haul push` or `haul pull`.
    fn transfer(&self, arguments: &[&str]) -> (Output, String) {
        let mut command = haul(&arguments[..1]);
        command.args(["-e", &self.shell]);
        if !arguments.contains(&"--remote-haul") {
            command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul")]);
        }
        run(command.args(&arguments[1..]))
    }

    /// A path on the server, as an argument.
    fn remote(&self, name: &str) -> String {
        format!("127.0.0.1:{}", self.path(name).display())
    }
}

fn write_tree(folder: &Path) {
    fs::create_dir_all(folder.join("sub/empty")).unwrap();
    fs::write(folder.join("small"), "small").unwrap();
    let large: Vec<u8> =
        (0..5_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(folder.join("sub/large"), large).unwrap();
    fs::hard_link(folder.join("small"), folder.join("sub/linked")).unwrap();
    std::os::unix::fs::symlink("../small", folder.join("sub/link")).unwrap();
    fs::set_permissions(folder.join("small"), fs::Permissions::from_mode(0o640)).unwrap();
}

/// The differences of two trees, by diff(1).
fn difference(one: &Path, other: &Path) -> String {
    let output = Command::new("diff").args(["-r", "--no-dereference"]).arg(one).arg(other).output();
    let output = output.expect("diff is missing");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn a_tree_is_pushed_and_pulled_through_ssh() {
    let Some(server) = Server::start() else { return };
    let source = server.path("source");
    write_tree(&source);
    let text = source.to_str().unwrap();
    let (output, transcript) = server.transfer(&["push", text, &server.remote("there")]);
    assert_eq!(output.status.code(), Some(0), "{transcript}");
    assert!(transcript.contains("2 files (5.0 MiB) sent"), "{transcript}");
    assert_eq!(difference(&source, &server.path("there/source")), "");
    let there = server.path("there/source");
    let mode = fs::metadata(there.join("small")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);

    let back = server.path("back");
    let remote = server.remote("there/source/");
    let (output, transcript) = server.transfer(&["pull", "-a", &remote, back.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{transcript}");
    assert_eq!(difference(&source, &back), "");
    // Nothing is sent again, by the same letters as rsync's.
    let (output, transcript) = server.transfer(&["pull", "-rlpt", &remote, back.to_str().unwrap()]);
    assert!(output.status.success() && transcript.contains("0 files (0 B) sent"), "{transcript}");
}

#[test]
fn failures_are_one_line_and_have_rsyncs_exit_codes() {
    let Some(server) = Server::start() else { return };
    let source = server.path("source");
    write_tree(&source);
    let text = source.to_str().unwrap();
    let missing = server.remote("no/such/place");
    let error = |arguments: &[&str], code: i32, expected: &str| {
        let (output, transcript) = server.transfer(arguments);
        assert_eq!(output.status.code(), Some(code), "{transcript}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected), "{expected:?} in {transcript}");
        // The shell of the other host also has its messages.
        let own = error.lines().filter(|line| line.starts_with("haul: ")).count();
        assert_eq!(own, 1, "{transcript}");
    };
    error(&["push", text, &missing], 11, "that would hold it is missing: No such file");
    error(&["push", "/no/such/file", &server.remote("a")], 23, "/no/such/file: No such file");
    error(&["pull", &server.remote("none"), text], 23, "none: No such file");
    error(&["push", text, "there"], 2, "write HOST:there");
    error(&["pull", "there", text], 2, "write HOST:PATH");
    error(&["push", "--", text, "-host:there"], 2, "-host");
    error(&["push", "--remote-haul", "/no/haul", text, &server.remote("a")], 12, "--remote-haul");
    error(&["push", "--remote-haul", "echo hello;", text, &server.remote("a")], 12, "hello");
    let mut command = haul(&["push", "-e", "/no/ssh", text, "host:"]);
    let (output, transcript) = run(&mut command);
    assert_eq!(output.status.code(), Some(12), "{transcript}");
    assert!(transcript.contains("/no/ssh: No such file"), "{transcript}");
}

/// A small file system of this process alone, which is full soon.
#[test]
fn a_full_disk_ends_the_transfer_and_leaves_no_partial_file() {
    let Some(server) = Server::start() else { return };
    let script = "mount -t tmpfs -o size=3m tmpfs \"$0\" || exit 77; \"$@\"; code=$?; \
                  ls -A \"$0\" | grep -c haul- ; exit $code";
    let (source, small) = (server.path("source"), server.path("small"));
    fs::create_dir(&small).unwrap();
    write_tree(&source);
    // The other end runs in the same mount namespace without ssh.
    let local = server.path("local");
    fs::write(&local, "shift; exec \"$@\"\n").unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--map-root-user", "--", "sh", "-c", script]).arg(&small);
    command.arg(env!("CARGO_BIN_EXE_haul")).args(["push", "-rt", "-e"]);
    command.arg(format!("sh {}", local.display()));
    command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul")]);
    command.arg(&source).arg(format!("x:{}", small.display()));
    let (output, transcript) = run(&mut command);
    if output.status.code() == Some(77) || transcript.contains("unshare failed") {
        return eprintln!("SKIPPED: no file system can be mounted here: {transcript}");
    }
    assert_eq!(output.status.code(), Some(11), "{transcript}");
    assert!(transcript.contains("sub/large: No space left on device"), "{transcript}");
    assert_eq!(output.stdout, b"0\n", "a partial file is left: {transcript}");
}

/// The other end is killed at some time. What has a name afterwards is whole, and another transfer
/// sends the rest.
#[test]
fn a_killed_transfer_leaves_whole_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("source")).unwrap();
    for number in 0..400_usize {
        fs::write(path("source").join(number.to_string()), vec![number as u8; 50_000]).unwrap();
    }
    // The other end is killed after some time.
    fs::write(path("killing"), "shift; \"$@\" <&0 & sleep \"$DELAY\"; kill -9 $!\n").unwrap();
    fs::write(path("local"), "shift; exec \"$@\"\n").unwrap();
    let push = |shell: &str, delay: &str| {
        let mut command = haul(&["push", "-e"]);
        command.arg(format!("sh {}", path(shell).display())).env("DELAY", delay);
        command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul")]);
        command.arg(path("source").join("")).arg(format!("x:{}", path("copy").display()));
        run(&mut command)
    };
    for delay in ["0.01", "0.02", "0.03", "0.05", "0.1"] {
        let (output, transcript) = push("killing", delay);
        assert!(matches!(output.status.code(), Some(0 | 12)), "{transcript}");
        for entry in fs::read_dir(path("copy")).into_iter().flatten() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if let Ok(number) = name.parse::<usize>() {
                let content = fs::read(entry.path()).unwrap();
                assert!(content == vec![number as u8; 50_000], "{name} is not whole");
            } else {
                assert!(name.contains(".haul-"), "{name}");
                fs::remove_file(entry.path()).unwrap();
            }
        }
    }
    let (output, transcript) = push("local", "0");
    assert!(output.status.success(), "{transcript}");
    assert_eq!(difference(&path("source"), &path("copy")), "");
}

/// Ctrl-C of a pull removes the partial file, which is too small for a journal.
#[test]
fn a_signal_leaves_no_partial_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("copy")).unwrap();
    fs::write(path("file"), vec![7; 4 << 20]).unwrap();
    // The stream stops in the middle of the file.
    let script = "shift; \"$@\" | (stdbuf -o0 head -c 3000000; sleep 3)\n";
    fs::write(path("slow"), script).unwrap();
    let mut command = haul(&["pull", "-e"]);
    command.arg(format!("sh {}", path("slow").display()));
    command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul")]);
    command.arg(format!("x:{}", path("file").display())).arg(path("copy"));
    // The other end outlives the test for a while and would keep a pipe open.
    let errors = fs::File::create(path("errors")).unwrap();
    let mut process = command.stdout(Stdio::null()).stderr(errors).spawn().unwrap();
    let names = || fs::read_dir(path("copy")).unwrap().count();
    let deadline = Instant::now() + LIMIT;
    while names() == 0 {
        assert!(Instant::now() < deadline, "no file arrives");
        thread::sleep(Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_child(&process);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = process.wait().unwrap();
    let error = fs::read_to_string(path("errors")).unwrap();
    assert_eq!(status.code(), Some(20), "{error}");
    assert!(error.contains("stopped by a signal"), "{error}");
    assert_eq!(names(), 0, "a partial file is left");
}
