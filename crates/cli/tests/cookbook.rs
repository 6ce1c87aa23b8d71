//! The programs of docs/cookbook in Go, Java, JavaScript and for nginx: the bytes arrive, and a
//! program for `sendfile` or `splice` makes these calls. The programs in other languages are
//! tested with their bindings.

use haul_testing::{LIMIT, pattern, programs, wait_until};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn cookbook() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cookbook")
}

/// Whether all programs are installed. Prints why a test is skipped.
fn are_here(programs: &[&str]) -> bool {
    programs.iter().all(|program| {
        let is_here = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        let is_here = is_here.is_ok_and(|output| output.status.success());
        if !is_here {
            eprintln!("SKIPPED: {program} is not installed");
        }
        is_here
    })
}

/// Counts the bytes that a program moves by one system call.
struct Trace {
    call: &'static str,
    folder: tempfile::TempDir,
}

impl Trace {
    fn of(call: &'static str) -> Self {
        Self { call, folder: tempfile::tempdir().unwrap() }
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-e", &format!("trace={}", self.call), "-o"]);
        command.arg(self.folder.path().join("trace")).arg(program);
        command
    }

    /// The sum of the results. A call of which another thread interrupted the line has two lines,
    /// and the second line has the result.
    fn bytes(&self) -> u64 {
        let text = std::fs::read_to_string(self.folder.path().join("trace")).unwrap();
        let results = text.lines().filter(|line| line.contains(self.call));
        let results =
            results.filter_map(|line| line.rsplit_once(" = ")?.1.trim().parse::<u64>().ok());
        results.sum()
    }
}

#[test]
fn programs_in_go_use_sendfile_and_splice() {
    if !are_here(&["go", "strace"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(folder.path())
        .arg("./...")
        .current_dir(cookbook().join("go"))
        .status();
    assert!(built.unwrap().success());
    let program = |name: &str| folder.path().join(name);
    let sent = Trace::of("sendfile");
    programs::check_sending(&mut sent.command(program("send_file")));
    assert!(sent.bytes() >= 20_000_000, "{} bytes by sendfile", sent.bytes());
    programs::check_receiving(&mut Command::new(program("receive_file")));
    let spliced = Trace::of("splice");
    programs::check_relaying(&mut spliced.command(program("relay")));
    // Each byte goes into a pipe and out of the pipe, in both directions.
    assert!(spliced.bytes() >= 80_000_000, "{} bytes by splice", spliced.bytes());
}

#[test]
fn a_program_in_java_uses_sendfile() {
    if !are_here(&["java", "strace"]) {
        return;
    }
    let sent = Trace::of("sendfile");
    programs::check_sending(sent.command("java").arg(cookbook().join("java/SendFile.java")));
    assert!(sent.bytes() >= 20_000_000, "{} bytes by sendfile", sent.bytes());
    let mut receiving = Command::new("java");
    programs::check_receiving(receiving.arg(cookbook().join("java/ReceiveFile.java")));
}

#[test]
fn programs_in_javascript_send_and_relay() {
    if !are_here(&["node"]) {
        return;
    }
    let program = |name: &str| {
        let mut command = Command::new("node");
        command.arg(cookbook().join("node").join(name));
        command
    };
    programs::check_sending(&mut program("send_file.mjs"));
    programs::check_relaying(&mut program("relay.mjs"));
}

#[test]
fn nginx_serves_by_sendfile() {
    if !are_here(&["nginx", "strace", "curl"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The worker of nginx is another user.
    let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), everyone).unwrap();
    let (content, path) = (pattern(1, 20_000_000), folder.path().join("file"));
    std::fs::write(&path, &content).unwrap();
    let socket = folder.path().join("socket");
    let text = std::fs::read_to_string(cookbook().join("nginx/nginx.conf")).unwrap();
    let config = folder.path().join("nginx.conf");
    // No other program listens there.
    let listen = format!("listen unix:{};", socket.display());
    assert!(text.contains("listen 127.0.0.1:8000;"));
    std::fs::write(&config, text.replace("listen 127.0.0.1:8000;", &listen)).unwrap();
    let sent = Trace::of("sendfile");
    let mut nginx = sent.command("nginx");
    nginx.arg("-p").arg(folder.path()).arg("-c").arg(config);
    let mut nginx = nginx.stderr(Stdio::null()).spawn().unwrap();
    wait_until("nginx listens", || {
        assert!(nginx.try_wait().unwrap().is_none(), "nginx ended");
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
    let limit = LIMIT.as_secs().to_string();
    let output = Command::new("curl")
        .args(["--silent", "--fail", "--max-time", &limit, "--unix-socket"])
        .arg(&socket)
        .arg("http://localhost/file")
        .output()
        .unwrap();
    let pid = std::fs::read_to_string(folder.path().join("nginx.pid")).unwrap();
    let stopped = Command::new("kill").args(["-QUIT", pid.trim()]).status().unwrap();
    assert!(stopped.success() && nginx.wait().unwrap().success());
    assert!(output.status.success() && output.stdout == content, "{}", output.status);
    assert!(sent.bytes() >= 20_000_000, "{} bytes by sendfile", sent.bytes());
}

#[test]
fn the_page_names_every_program() {
    let page = std::fs::read_to_string(cookbook().join("../cookbook.md")).unwrap();
    let mut folders = vec![cookbook()];
    let mut count = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let below = path.strip_prefix(cookbook()).unwrap().to_str().unwrap();
            let is_shared = ["c/cookbook.h", "go/go.mod"].contains(&below);
            assert!(is_shared || page.contains(below), "docs/cookbook.md does not name {below}");
            count += usize::from(!is_shared);
        }
    }
    assert!(count > 10, "{count} programs");
}
