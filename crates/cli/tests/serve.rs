//! `haul serve` as a program: its options, its configuration file, its signals and its messages.

mod common {
    pub mod command;
    pub mod other_user;
    pub mod schema;
    pub mod serve_process;
}

use common::command::{haul, run};
use common::other_user::can_switch_user;
use common::schema::assert_valid;
use common::serve_process::{ServerProcess, folder_with_file, serve};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn it_prints_its_address_serves_and_ends_on_sigterm() {
    let folder = folder_with_file();
    let server = ServerProcess::start(&mut serve(
        folder.path(),
        &["--listen", "127.0.0.1:0", "--workers", "2"],
    ));
    assert!(server.first_message.contains("with 2 loops"), "{}", server.first_message);
    for _ in 0..8 {
        let response = server.get("/a.txt");
        assert!(
            response.starts_with("HTTP/1.1 200 OK\r\n") && response.ends_with("\r\n\r\ncontent"),
            "{response}"
        );
    }
    let status = fs::read_to_string(format!("/proc/{}/status", server.process.id())).unwrap();
    assert!(status.contains("NoNewPrivs:\t1"), "the process keeps privileges: {status}");
    server.signal(rustix::process::Signal::HUP);
    server.signal(rustix::process::Signal::TERM);
    let (code, rest) = server.wait();
    assert_eq!(code, Some(0), "{rest}");
}

/// Usually the files belong to another user than the one that serves them.
#[test]
fn another_user_keeps_one_capability_and_sends_new_files_without_a_copy() {
    use std::os::unix::fs::PermissionsExt;
    if !can_switch_user() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let options =
        ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--user", "nobody"];
    let server = ServerProcess::start(&mut serve(folder.path(), &options));
    let status = fs::read_to_string(format!("/proc/{}/status", server.process.id())).unwrap();
    // CAP_LEASE of <linux/capability.h> is 28.
    for set in ["CapInh:\t0000000000000000", "CapPrm:\t0000000010000000"] {
        assert!(status.contains(set), "{status}");
    }
    fs::write(folder.path().join("new"), vec![b'x'; 1 << 20]).unwrap();
    fs::rename(folder.path().join("new"), folder.path().join("a")).unwrap();
    // The clock of the file system must have moved on since the write.
    std::thread::sleep(Duration::from_millis(40));
    assert!(server.get("/a").ends_with("xxx"));
    let (_, metrics) = server.first_message.split_once("metrics at http://").unwrap();
    let mut stream = TcpStream::connect(&metrics[..metrics.find('/').unwrap()]).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let sent = r#"haul_sent_bytes_total{path="sendfile"} "#;
    let bytes = text.lines().find_map(|line| line.strip_prefix(sent)).unwrap();
    assert!(bytes.parse::<u64>().unwrap() > 1 << 19, "{text}");
}

#[test]
fn startup_errors_are_json_messages() {
    let folder = folder_with_file();
    let nowhere = folder.path().join("nowhere");
    for (root, more) in [(&*nowhere, &[][..]), (folder.path(), &["--config", "/nowhere.toml"])] {
        let options = [&["--listen", "127.0.0.1:0", "--message-format", "json"][..], more].concat();
        let output = serve(root, &options).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let message: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(message["level"], "ERROR");
        assert!(message["message"].as_str().unwrap().contains("nowhere"), "{message}");
    }
}

#[test]
fn messages_of_a_running_server_are_json_lines() {
    let folder = folder_with_file();
    let options = ["--listen", "127.0.0.1:0", "--message-format", "json", "--drain-timeout", "1s"];
    let mut server = ServerProcess::start(&mut serve(folder.path(), &options));
    let mut text = server.first_message.clone();
    // An incomplete request is still open when the drain timeout expires.
    let mut slow = TcpStream::connect(server.address().split('"').next().unwrap()).unwrap();
    slow.write_all(b"GET /a.txt HTTP/1.1\r\n").unwrap();
    assert!(server.get("/a.txt").ends_with("content"));
    // SIGUSR1 and SIGQUIT are nginx's signals, for users who migrate from it.
    server.signal(rustix::process::Signal::USR1);
    while !text.contains("reloaded") {
        assert!(server.stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    server.signal(rustix::process::Signal::QUIT);
    let (code, rest) = server.wait();
    assert_eq!(code, Some(0), "{rest}");
    text.push_str(&rest);
    let messages: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    assert_eq!(messages[0]["folder"], folder.path().to_str().unwrap());
    assert!(
        messages
            .iter()
            .all(|message| message["timestamp"].is_string() && message["message"].is_string())
    );
    let find = |part: &str| {
        let mut matching =
            messages.iter().filter(|message| message["message"].as_str().unwrap().contains(part));
        matching.next().unwrap_or_else(|| panic!("no message contains {part:?}: {text}"))
    };
    assert_eq!(find("reloaded")["level"], "INFO");
    let closed = find("cut off");
    assert_eq!((&closed["level"], &closed["open"]), (&"WARN".into(), &1.into()));
    assert_eq!(find("ended")["level"], "INFO");
}

#[test]
fn passwords_are_reloaded_after_access_to_other_files_is_given_up() {
    let folder = folder_with_file();
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("passwords");
    // The output of `htpasswd -nbB -C 4 ann sesame`. At first the file has the user bob instead.
    let ann = "ann:$2y$04$kKF1wBUUpJTD9eRrzuOMzOQgdt4LkwWmpel7dDkYztkeKHrCZpNqG\n";
    fs::write(&file, ann.replace("ann", "bob")).unwrap();
    let options = ["--listen", "127.0.0.1:0", "--auth-file", file.to_str().unwrap()];
    let mut server = ServerProcess::start(&mut serve(folder.path(), &options));
    let request_status = |server: &ServerProcess| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream
            .write_all(b"GET /a.txt HTTP/1.0\r\nAuthorization: Basic YW5uOnNlc2FtZQ==\r\n\r\n")
            .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response[9..12].to_owned()
    };
    assert_eq!(request_status(&server), "401");
    fs::write(&file, ann).unwrap();
    server.signal(rustix::process::Signal::HUP);
    let mut text = String::new();
    while !text.contains("reloaded") {
        assert!(server.stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    assert!(!text.contains("not reloaded"), "{text}");
    // The event loops receive the new passwords after this message.
    let deadline = Instant::now() + Duration::from_secs(120);
    while request_status(&server) != "200" {
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn the_configuration_file_has_the_same_options_and_flags_take_precedence() {
    let folder = folder_with_file();
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("serve.toml");
    let text = format!(
        "dir = {:?}\nlisten = [\"127.0.0.1:0\"]\nworkers = 1\nlisting = true\n\
         header = [\"X-From: file\"]\nidle-timeout = \"5s\"\n",
        folder.path()
    );
    fs::write(&file, &text).unwrap();
    let file = file.to_str().unwrap();
    let server = ServerProcess::start(&mut haul(&["serve", "--config", file]));
    assert!(server.get("/").contains("a.txt"));
    assert!(server.get("/a.txt").contains("\r\nX-From: file\r\n"));
    drop(server);
    let server = ServerProcess::start(&mut haul(&[
        "serve",
        "--config",
        file,
        "--listing=false",
        "--header",
        "X-From: flag",
    ]));
    assert!(server.get("/").starts_with("HTTP/1.1 404"));
    assert!(server.get("/a.txt").contains("\r\nX-From: flag\r\n"));
    drop(server);

    let (output, transcript) = run(&mut haul(&["serve", "--config", file, "--check"]));
    assert!(
        output.status.success() && transcript.contains("can be served at http://127.0.0.1:"),
        "{transcript}"
    );
    for (invalid, expected) in [
        ("lisen = [\"127.0.0.1:0\"]\n", "lisen"),
        ("workers = \"many\"\n", "line 7"),
        ("idle-timeout = \"soon\"\n", "line 7"),
        (
            "idle-timeout = 75\n",
            "line 7, idle-timeout: it must be text in quotes, and is the number 75",
        ),
        ("metrics-listen = \"9090\"\n", "write 127.0.0.1:9090"),
        ("header = 1\n", "line 7"),
        ("this is no TOML", "line 7"),
    ] {
        let text =
            text.lines().filter(|line| !invalid.starts_with(line.split(' ').next().unwrap()));
        let mut text: Vec<_> = text.map(str::to_owned).collect();
        text.resize(6, String::new());
        fs::write(elsewhere.path().join("invalid.toml"), text.join("\n") + "\n" + invalid).unwrap();
        let path = elsewhere.path().join("invalid.toml");
        let (output, transcript) = run(haul(&["serve", "--check", "--config"]).arg(&path));
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), line.lines().count()), (Some(2), 1), "{transcript}");
        assert!(line.contains(expected) && line.contains("invalid.toml"), "{expected:?} in {line}");
    }
}

#[test]
fn the_json_of_listings_and_of_the_access_log_is_valid() {
    let folder = folder_with_file();
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("access.log");
    let mut command = serve(folder.path(), &["--listing", "--log-format", "json"]);
    let server = ServerProcess::start(command.arg("--access-log").arg(&log));
    let response = server.get("/?format=json");
    let (_, listing) = response.split_once("\r\n\r\n").unwrap();
    assert_valid("serve-listing", &serde_json::from_str(listing).unwrap());
    server.get("/a b");
    // The lines are complete when the server has ended.
    server.signal(rustix::process::Signal::TERM);
    server.wait();
    let text = fs::read_to_string(&log).unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    for line in text.lines() {
        assert_valid("serve-log", &serde_json::from_str(line).unwrap());
    }
}

#[test]
fn an_address_in_use_is_reported() {
    let folder = folder_with_file();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (output, transcript) = run(&mut serve(folder.path(), &["--listen", &address]));
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert!(
        transcript.contains(&address)
            && transcript.contains("another process listens there already"),
        "{transcript}"
    );
    // A second server must not share the port with `SO_REUSEPORT`.
    let first = ServerProcess::start(&mut serve(
        folder.path(),
        &["--listen", "127.0.0.1:0", "--workers", "2"],
    ));
    let (output, transcript) =
        run(&mut serve(folder.path(), &["--listen", first.address(), "--workers", "2"]));
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    // The configuration of a running server can be checked.
    let elsewhere = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", elsewhere.path().join("socket").display());
    let _second = ServerProcess::start(&mut serve(folder.path(), &["--listen", &socket]));
    for taken in [first.address(), &socket] {
        let (output, transcript) = run(&mut serve(folder.path(), &["--listen", taken, "--check"]));
        assert!(
            output.status.success() && transcript.contains("another process listens"),
            "{transcript}"
        );
    }
    let (output, transcript) = run(&mut serve(folder.path(), &["--listen", &socket]));
    assert_eq!(output.status.code(), Some(1), "{transcript}");
}

#[test]
fn two_listeners_at_one_address_are_refused_also_by_the_check() {
    let folder = folder_with_file();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for option in ["--listen", "--metrics-listen"] {
        let options = ["--listen", &address, option, &address, "--check"];
        let (output, transcript) = run(&mut serve(folder.path(), &options));
        assert_eq!(output.status.code(), Some(2), "{transcript}");
        assert!(transcript.contains("another listener of this service"), "{transcript}");
    }
}

/// A process that ends late must not remove the socket of the process after it.
#[test]
fn a_socket_that_another_process_replaced_is_left() {
    let (folder, sockets) = (folder_with_file(), tempfile::tempdir().unwrap());
    let path = sockets.path().join("socket");
    let unix = format!("unix:{}", path.display());
    let options = ["--listen", "127.0.0.1:0", "--listen", &unix];
    let mut old = ServerProcess::start(&mut serve(folder.path(), &options));
    // An incomplete request keeps the old process for a while.
    let mut slow = TcpStream::connect(old.address()).unwrap();
    slow.write_all(b"GET /a.txt HTTP/1.1\r\n").unwrap();
    assert!(old.get("/a.txt").ends_with("content"), "the slow client was accepted before");
    old.signal(rustix::process::Signal::TERM);
    let mut text = String::new();
    while !text.contains("ending, waiting for") {
        assert!(old.stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while UnixStream::connect(&path).is_ok() {
        assert!(Instant::now() < deadline, "the old process still accepts");
    }
    let _new = ServerProcess::start(&mut serve(folder.path(), &options));
    drop(slow);
    let (code, rest) = old.wait();
    assert_eq!(code, Some(0), "{rest}");
    UnixStream::connect(&path).expect("the socket of the new process");
}

/// The address is in the notation of systemd and `ss`.
#[test]
fn an_abstract_socket_is_served_and_makes_no_file() {
    let folder = folder_with_file();
    let name = format!("haul-serve-test-{}", std::process::id());
    let mut command = serve(folder.path(), &["--listen", &format!("unix:@{name}")]);
    let server = ServerProcess::start(command.current_dir(folder.path()));
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    stream.write_all(b"GET /a.txt HTTP/1.0\r\n\r\n").unwrap();
    let mut received = String::new();
    stream.read_to_string(&mut received).unwrap();
    assert!(received.starts_with("HTTP/1.1 200") && received.ends_with("content"), "{received}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a file was created");
    drop(server);
    assert!(UnixStream::connect_addr(&address).is_err());
}

#[test]
fn a_second_signal_cuts_off_what_is_open() {
    let folder = folder_with_file();
    let mut server = ServerProcess::start(&mut serve(folder.path(), &["--listen", "127.0.0.1:0"]));
    let mut slow = TcpStream::connect(server.address()).unwrap();
    slow.write_all(b"GET /a.txt HTTP/1.1\r\n").unwrap();
    assert!(server.get("/a.txt").ends_with("content"), "the slow one was accepted before");
    let mut text = String::new();
    server.signal(rustix::process::Signal::TERM);
    while !text.contains("ending, waiting for") {
        assert!(server.stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    server.signal(rustix::process::Signal::TERM);
    let (code, rest) = server.wait();
    assert_eq!(code, Some(0), "{rest}");
    // The server may not know yet that the other connection ended, and then cuts off two.
    assert!(rest.contains("another signal") && rest.contains("cut off: "), "{rest}");
    let mut answer = Vec::new();
    let _reset_or_end = slow.read_to_end(&mut answer);
    assert!(answer.is_empty(), "{answer:?}");
}

#[test]
fn a_log_that_root_has_created_can_be_opened_again_by_the_user() {
    use std::os::unix::fs::PermissionsExt;
    if !can_switch_user() {
        return;
    }
    let (folder, logs) = (folder_with_file(), tempfile::tempdir().unwrap());
    for directory in [&folder, &logs] {
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    }
    let log = logs.path().join("log");
    let mut command = serve(folder.path(), &["--listen", "127.0.0.1:0", "--user", "nobody"]);
    let mut server = ServerProcess::start(command.arg("--access-log").arg(&log));
    server.signal(rustix::process::Signal::HUP);
    let mut text = String::new();
    while !text.contains("reloaded") {
        assert!(server.stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    assert!(text.contains("reloaded: the access log /"), "{text}");
}

#[test]
fn fewer_connections_than_asked_for_are_reported() {
    let folder = folder_with_file();
    let mut command = Command::new("sh");
    let script =
        "ulimit -n 300; exec \"$0\" serve \"$1\" --listen 127.0.0.1:0 --max-connections $2";
    command.args(["-c", script, env!("CARGO_BIN_EXE_haul")]).arg(folder.path()).arg("1000");
    let mut server = ServerProcess::start(&mut command);
    let mut text = String::new();
    while !text.contains("connections at a time") {
        assert!(server.stderr.read_line(&mut text).unwrap() > 0, "{text}");
    }
    assert!(text.contains("instead of 1000"), "{text}");
}

#[test]
fn sockets_that_systemd_passes_are_used() {
    let folder = folder_with_file();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let script = format!(
        "exec 3<&{}; LISTEN_FDS=1 LISTEN_PID=$$ exec {} serve {} --listen systemd",
        listener.as_raw_fd(),
        env!("CARGO_BIN_EXE_haul"),
        folder.path().display()
    );
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    // dash takes descriptors of one digit only.
    let mut command = Command::new("bash");
    command.args(["-c", &script]).process_group(0);
    let server = ServerProcess::start(&mut command);
    let message = &server.first_message;
    assert!(message.contains(&address.to_string()), "{message}");
    assert!(server.get("/a.txt").ends_with("content"));
    drop(server);
    let (output, transcript) = run(&mut serve(folder.path(), &["--listen", "systemd", "--check"]));
    assert!(
        output.status.success() && transcript.contains("systemd"),
        "the configuration of a systemd unit can be checked: {transcript}"
    );
    let (output, transcript) = run(&mut serve(folder.path(), &["--listen", "systemd"]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("LISTEN_FDS"), "{transcript}");
}

/// A full disk is reported, but not once for each upload: a client could fill the journal.
#[test]
fn refused_uploads_do_not_flood_the_messages() {
    const UPLOADS: usize = 60;
    let folder = folder_with_file();
    // The file system would be full after a block or two of each file.
    let mut command = Command::new("sh");
    let script =
        "ulimit -f 1; trap '' XFSZ; exec \"$0\" serve \"$1\" --listen 127.0.0.1:0 --allow-put";
    command.args(["-c", script, env!("CARGO_BIN_EXE_haul")]).arg(folder.path());
    let server = ServerProcess::start(&mut command);
    let body = "x".repeat(8192);
    for number in 0..UPLOADS {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let head = "HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 8192";
        write!(stream, "PUT /{number} {head}\r\n\r\n{body}").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 507"), "{response}");
    }
    server.signal(rustix::process::Signal::TERM);
    let (code, messages) = server.wait();
    assert_eq!(code, Some(0), "{messages}");
    let count = messages.matches("cannot be put here").count();
    assert!((1..UPLOADS / 2).contains(&count), "{messages}");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn serving_resumes_after_a_shortage_of_descriptors() {
    use rustix::process::{Pid, Resource, Rlimit};
    let folder = folder_with_file();
    let server = ServerProcess::start(&mut serve(
        folder.path(),
        &["--listen", "127.0.0.1:0", "--workers", "1"],
    ));
    let process = Some(Pid::from_child(&server.process));
    let before = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::prlimit(
        process,
        Resource::Nofile,
        Rlimit { current: Some(3), maximum: before.maximum },
    )
    .unwrap();
    let mut waiting = TcpStream::connect(server.address()).unwrap();
    write!(waiting, "GET /a.txt HTTP/1.0\r\n\r\n").unwrap();
    waiting.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!(waiting.read(&mut [0]).is_err(), "the connection needs a descriptor");
    rustix::process::prlimit(process, Resource::Nofile, before).unwrap();
    waiting.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut response = String::new();
    waiting.read_to_string(&mut response).unwrap();
    assert!(response.ends_with("content"), "{response}");
}

/// Its socket, the file, and the directory in which the file will get its name.
#[test]
fn a_stalled_upload_holds_three_descriptors() {
    const UPLOADS: usize = 100;
    let folder = folder_with_file();
    let options = ["--listen", "127.0.0.1:0", "--allow-put", "--workers", "1"];
    let server = ServerProcess::start(&mut serve(folder.path(), &options));
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", server.process.id())).unwrap().count();
    let before = descriptors();
    let uploads: Vec<_> = (0..UPLOADS)
        .map(|number| {
            let mut upload = TcpStream::connect(server.address()).unwrap();
            let head = "HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n";
            write!(upload, "PUT /{number} {head}").unwrap();
            upload.write_all(&[7; 10_000]).unwrap();
            upload
        })
        .collect();
    let received = || {
        let files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata());
        files.filter(|file| file.as_ref().is_ok_and(|file| file.len() == 10_000)).count()
    };
    let deadline = Instant::now() + Duration::from_secs(120);
    while received() < UPLOADS {
        assert!(Instant::now() < deadline, "{} uploads have begun", received());
        std::thread::sleep(Duration::from_millis(10));
    }
    let held = descriptors() - before;
    // The process keeps at most 16 idle pipes.
    assert!(held <= 3 * UPLOADS + 2 * 16, "{held} descriptors");
    drop(uploads);
}

#[test]
fn requests_are_logged_to_standard_output() {
    let folder = folder_with_file();
    let options = ["--listen", "127.0.0.1:0", "--access-log", "-", "--log-format", "common"];
    let mut server = ServerProcess::start(&mut serve(folder.path(), &options));
    server.get("/a.txt");
    let mut line = String::new();
    BufReader::new(server.process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(
        line.starts_with("127.0.0.1 - - [") && line.ends_with("] \"GET /a.txt HTTP/1.0\" 200 7\n"),
        "{line}"
    );
}

#[test]
fn an_upload_that_a_killed_server_has_left_is_removed_at_the_next_start() {
    let folder = folder_with_file();
    let left = folder.path().join(".a.haul-0123456789abcdef");
    fs::write(&left, "half").unwrap();
    let minutes_ago = std::time::SystemTime::now() - Duration::from_secs(300);
    fs::File::options().write(true).open(&left).unwrap().set_modified(minutes_ago).unwrap();
    let start = |options: &[&str]| ServerProcess::start(&mut serve(folder.path(), options));
    drop(start(&["--listen", "127.0.0.1:0"]));
    assert!(left.exists(), "a server without uploads changes nothing");
    let _server = start(&["--listen", "127.0.0.1:0", "--allow-put"]);
    let deadline = Instant::now() + Duration::from_secs(120);
    while left.exists() {
        assert!(Instant::now() < deadline, "it is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn options_name_the_connections_of_an_address_and_the_proxies() {
    let folder = folder_with_file();
    let options = "--listen 127.0.0.1:0 --workers 1 --max-connections-per-address 1 \
                   --trusted-proxies 127.0.0.1";
    let options: Vec<_> = options.split_whitespace().collect();
    let server = ServerProcess::start(&mut serve(folder.path(), &options));
    let request = |client: &str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let head = "GET /a.txt HTTP/1.1\r\nHost: h\r\n\r\n";
        write!(stream, "PROXY TCP4 {client} 127.0.0.1 50000 80\r\n{head}").unwrap();
        let mut start = [0; 12];
        let _ = stream.read(&mut start);
        (stream, String::from_utf8_lossy(&start).into_owned())
    };
    let (_open, first) = request("192.0.2.1");
    let answered = "HTTP/1.1 200";
    assert_eq!(first, answered);
    assert_ne!(request("192.0.2.1").1, answered, "its second connection");
    assert_eq!(request("192.0.2.2").1, answered);
}
