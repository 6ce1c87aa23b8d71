//! `haul serve` as a command: its options, its file of options, its signals.

mod common {
    pub mod command;
}

use common::command::{haul, run};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A folder with a file in it.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "content").unwrap();
    folder
}

/// A running service; killed when dropped.
struct Serving {
    process: Child,
    /// What it said when it began.
    words: String,
    errors: BufReader<std::process::ChildStderr>,
}

impl Serving {
    fn start(command: &mut Command) -> Self {
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = BufReader::new(process.stderr.take().unwrap());
        let mut words = String::new();
        errors.read_line(&mut words).unwrap();
        Self { process, words, errors }
    }

    /// The address that it says it serves at.
    fn address(&self) -> &str {
        let start = self.words.find("http://").unwrap_or_else(|| panic!("{}", self.words)) + 7;
        let rest = &self.words[start..];
        &rest[..rest.find('/').unwrap()]
    }

    fn get(&self, target: &str) -> String {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        write!(stream, "GET {target} HTTP/1.0\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal)
            .unwrap();
    }

    /// Waits for its end; returns its exit code and what it said on the way.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.errors.read_to_string(&mut rest).unwrap();
        (self.process.wait().unwrap().code(), rest)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn serve(folder: &Path, options: &[&str]) -> Command {
    let mut command = haul(&["serve"]);
    command.arg(folder).args(options);
    command
}

#[test]
fn it_serves_says_where_and_ends_when_told() {
    let folder = folder();
    let serving =
        Serving::start(&mut serve(folder.path(), &["--listen", "127.0.0.1:0", "--workers", "2"]));
    assert!(serving.words.contains("with 2 loops"), "{}", serving.words);
    for _ in 0..8 {
        let response = serving.get("/a.txt");
        assert!(
            response.starts_with("HTTP/1.1 200 OK\r\n") && response.ends_with("\r\n\r\ncontent"),
            "{response}"
        );
    }
    let status = fs::read_to_string(format!("/proc/{}/status", serving.process.id())).unwrap();
    assert!(status.contains("NoNewPrivs:\t1"), "it gives up what it does not need: {status}");
    serving.signal(rustix::process::Signal::HUP);
    serving.signal(rustix::process::Signal::TERM);
    let (code, rest) = serving.end();
    assert_eq!(code, Some(0), "{rest}");
}

#[test]
fn why_it_does_not_start_is_said_in_json_for_programs() {
    let folder = folder();
    let nowhere = folder.path().join("nowhere");
    for (root, more) in [(&*nowhere, &[][..]), (folder.path(), &["--config", "/nowhere.toml"])] {
        let options = [&["--listen", "127.0.0.1:0", "--message-format", "json"][..], more].concat();
        let output = serve(root, &options).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let said: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(said["level"], "ERROR");
        assert!(said["message"].as_str().unwrap().contains("nowhere"), "{said}");
    }
}

#[test]
fn what_happens_is_said_in_json_for_programs() {
    let folder = folder();
    let options = ["--listen", "127.0.0.1:0", "--message-format", "json", "--drain-timeout", "1s"];
    let mut serving = Serving::start(&mut serve(folder.path(), &options));
    let mut first = serving.words.clone();
    // A request that never becomes whole is under way when the time to end is over.
    let mut slow = TcpStream::connect(serving.address().split('"').next().unwrap()).unwrap();
    slow.write_all(b"GET /a.txt HTTP/1.1\r\n").unwrap();
    assert!(serving.get("/a.txt").ends_with("content"));
    // nginx's signals, which whoever comes from there still sends.
    serving.signal(rustix::process::Signal::USR1);
    while !first.contains("reloaded") {
        assert!(serving.errors.read_line(&mut first).unwrap() > 0, "{first}");
    }
    serving.signal(rustix::process::Signal::QUIT);
    let (code, rest) = serving.end();
    assert_eq!(code, Some(0), "{rest}");
    first.push_str(&rest);
    let said: Vec<serde_json::Value> = first
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    assert_eq!(said[0]["folder"], folder.path().to_str().unwrap());
    assert!(said.iter().all(|one| one["timestamp"].is_string() && one["message"].is_string()));
    let find = |words: &str| {
        let mut found = said.iter().filter(|one| one["message"].as_str().unwrap().contains(words));
        found.next().unwrap_or_else(|| panic!("nothing of {words}: {first}"))
    };
    assert_eq!(find("reloaded")["level"], "INFO");
    let cut = find("cut off");
    assert_eq!((&cut["level"], &cut["open"]), (&"WARN".into(), &1.into()));
    assert_eq!(find("ended")["level"], "INFO");
}

#[test]
fn passwords_are_read_again_by_whoever_has_given_up_other_files() {
    let folder = folder();
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("passwords");
    // `htpasswd -nbB -C 4 ann sesame`, and nobody who is called bob.
    let ann = "ann:$2y$04$kKF1wBUUpJTD9eRrzuOMzOQgdt4LkwWmpel7dDkYztkeKHrCZpNqG\n";
    fs::write(&file, ann.replace("ann", "bob")).unwrap();
    let options = ["--listen", "127.0.0.1:0", "--auth-file", file.to_str().unwrap()];
    let mut serving = Serving::start(&mut serve(folder.path(), &options));
    let ask = |serving: &Serving| {
        let mut stream = TcpStream::connect(serving.address()).unwrap();
        stream
            .write_all(b"GET /a.txt HTTP/1.0\r\nAuthorization: Basic YW5uOnNlc2FtZQ==\r\n\r\n")
            .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response[9..12].to_owned()
    };
    assert_eq!(ask(&serving), "401");
    fs::write(&file, ann).unwrap();
    serving.signal(rustix::process::Signal::HUP);
    let mut said = String::new();
    while !said.contains("reloaded") {
        assert!(serving.errors.read_line(&mut said).unwrap() > 0, "{said}");
    }
    assert!(!said.contains("not reloaded"), "{said}");
    // Its loops are woken then.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while ask(&serving) != "200" {
        assert!(std::time::Instant::now() < until);
    }
}

#[test]
fn a_file_has_the_same_options_and_flags_come_first() {
    let folder = folder();
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("serve.toml");
    let text = format!(
        "dir = {:?}\nlisten = [\"127.0.0.1:0\"]\nworkers = 1\nlisting = true\nheader = [\"X-From: file\"]\nidle-timeout = \"5s\"\n",
        folder.path()
    );
    fs::write(&file, &text).unwrap();
    let file = file.to_str().unwrap();
    let serving = Serving::start(&mut haul(&["serve", "--config", file]));
    assert!(serving.get("/").contains("a.txt"));
    assert!(serving.get("/a.txt").contains("\r\nX-From: file\r\n"));
    drop(serving);
    let serving = Serving::start(&mut haul(&[
        "serve",
        "--config",
        file,
        "--listing=false",
        "--header",
        "X-From: flag",
    ]));
    assert!(serving.get("/").starts_with("HTTP/1.1 404"));
    assert!(serving.get("/a.txt").contains("\r\nX-From: flag\r\n"));
    drop(serving);

    let (output, words) = run(&mut haul(&["serve", "--config", file, "--check"]));
    assert!(
        output.status.success() && words.contains("can be served at http://127.0.0.1:"),
        "{words}"
    );
    for (wrong, names) in [
        ("lisen = [\"127.0.0.1:0\"]\n", "lisen"),
        ("workers = \"many\"\n", "line 7"),
        ("idle-timeout = \"soon\"\n", "line 7"),
        ("header = 1\n", "line 7"),
        ("this is no TOML", "line 7"),
    ] {
        let text = text.lines().filter(|line| !wrong.starts_with(line.split(' ').next().unwrap()));
        let mut text: Vec<_> = text.map(str::to_owned).collect();
        text.resize(6, String::new());
        fs::write(elsewhere.path().join("wrong.toml"), text.join("\n") + "\n" + wrong).unwrap();
        let path = elsewhere.path().join("wrong.toml");
        let (output, words) = run(haul(&["serve", "--check", "--config"]).arg(&path));
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), line.lines().count()), (Some(2), 1), "{words}");
        assert!(line.contains(names) && line.contains("wrong.toml"), "{names:?} in {line}");
    }
}

#[test]
fn a_port_that_is_taken_is_said_to_be() {
    let folder = folder();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (output, words) = run(&mut serve(folder.path(), &["--listen", &address]));
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(
        words.contains(&address) && words.contains("somebody listens there already"),
        "{words}"
    );
    // Another one of the same kind shares a port only by mistake.
    let first =
        Serving::start(&mut serve(folder.path(), &["--listen", "127.0.0.1:0", "--workers", "2"]));
    let (output, words) =
        run(&mut serve(folder.path(), &["--listen", first.address(), "--workers", "2"]));
    assert_eq!(output.status.code(), Some(2), "{words}");
    // A running service's file can be checked.
    let elsewhere = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", elsewhere.path().join("socket").display());
    let _second = Serving::start(&mut serve(folder.path(), &["--listen", &socket]));
    for taken in [first.address(), &socket] {
        let (output, words) = run(&mut serve(folder.path(), &["--listen", taken, "--check"]));
        assert!(output.status.success() && words.contains("somebody listens"), "{words}");
    }
    let (output, words) = run(&mut serve(folder.path(), &["--listen", &socket]));
    assert_eq!(output.status.code(), Some(2), "{words}");
}

#[test]
fn sockets_are_taken_from_the_service_manager() {
    let folder = folder();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let script = format!(
        "exec 3<&{}; LISTEN_FDS=1 LISTEN_PID=$$ exec {} serve {} --listen systemd",
        listener.as_raw_fd(),
        env!("CARGO_BIN_EXE_haul"),
        folder.path().display()
    );
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", &script]).process_group(0);
    let serving = Serving::start(&mut command);
    assert!(serving.words.contains(&address.to_string()), "{}", serving.words);
    assert!(serving.get("/a.txt").ends_with("content"));
    drop(serving);
    let (output, words) = run(&mut serve(folder.path(), &["--listen", "systemd", "--check"]));
    assert!(
        output.status.success() && words.contains("systemd"),
        "a unit's file can be checked: {words}"
    );
    let (output, words) = run(&mut serve(folder.path(), &["--listen", "systemd"]));
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("LISTEN_FDS"), "{words}");
}

#[test]
fn a_shortage_of_descriptors_passes() {
    use rustix::process::{Pid, Resource, Rlimit};
    let folder = folder();
    let serving =
        Serving::start(&mut serve(folder.path(), &["--listen", "127.0.0.1:0", "--workers", "1"]));
    let process = Some(Pid::from_child(&serving.process));
    let before = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::prlimit(
        process,
        Resource::Nofile,
        Rlimit { current: Some(3), maximum: before.maximum },
    )
    .unwrap();
    let mut waiting = TcpStream::connect(serving.address()).unwrap();
    write!(waiting, "GET /a.txt HTTP/1.0\r\n\r\n").unwrap();
    waiting.set_read_timeout(Some(std::time::Duration::from_millis(500))).unwrap();
    assert!(waiting.read(&mut [0]).is_err(), "there is no descriptor for it");
    rustix::process::prlimit(process, Resource::Nofile, before).unwrap();
    waiting.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let mut response = String::new();
    waiting.read_to_string(&mut response).unwrap();
    assert!(response.ends_with("content"), "{response}");
}

#[test]
fn requests_are_logged_to_standard_output() {
    let folder = folder();
    let options = ["--listen", "127.0.0.1:0", "--access-log", "-", "--log-format", "common"];
    let mut serving = Serving::start(&mut serve(folder.path(), &options));
    serving.get("/a.txt");
    let mut line = String::new();
    BufReader::new(serving.process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(
        line.starts_with("127.0.0.1 - - [") && line.ends_with("] \"GET /a.txt HTTP/1.0\" 200 7\n"),
        "{line}"
    );
}
