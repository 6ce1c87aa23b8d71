//! `haul proxy` as a program: its options, its configuration file, its signals and its messages.

mod common {
    pub mod command;
    pub mod schema;
}

use common::command::{haul, run};
use common::schema::assert_valid;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running proxy, which is killed at the end.
struct ProxyProcess {
    process: Child,
    address: String,
    messages: BufReader<std::process::ChildStderr>,
}

impl ProxyProcess {
    fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut messages = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        messages.read_line(&mut line).unwrap();
        let address = line.split_once("clients at ").and_then(|(_, rest)| rest.split_once(' '));
        let address = address.unwrap_or_else(|| panic!("{line}")).0.to_owned();
        Self { process, address, messages }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Reads messages until one has this text.
    fn wait_for(&mut self, text: &str) {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert_ne!(self.messages.read_line(&mut line).unwrap(), 0, "it has ended");
        }
    }

    /// Ends it by SIGTERM.
    fn finish(&mut self) {
        self.signal(Signal::TERM);
        let mut rest = String::new();
        self.messages.read_to_string(&mut rest).unwrap();
        assert_eq!(self.process.wait().unwrap().code(), Some(0), "{rest}");
        assert!(rest.ends_with("ended\n"), "{rest}");
    }
}

impl Drop for ProxyProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn it_forwards_logs_and_ends_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let (log, config) = (folder.path().join("log"), folder.path().join("proxy.toml"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().to_string();
    let text = format!(
        "listen = [\"127.0.0.1:0\"]\nto = [\"{upstream}\"]\naccess-log = {log:?}\nworkers = 1\n"
    );
    fs::write(&config, text).unwrap();
    let mut proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    client.write_all(b"request").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut server = listener.accept().unwrap().0;
    let mut request = String::new();
    server.read_to_string(&mut request).unwrap();
    assert_eq!(request, "request");
    server.write_all(b"response").unwrap();
    drop(server);
    let mut response = String::new();
    client.read_to_string(&mut response).unwrap();
    assert_eq!(response, "response");
    proxy.finish();
    let line = fs::read_to_string(log).unwrap();
    let line = serde_json::from_str(&line).unwrap();
    assert_valid("proxy-log", &line);
    assert_eq!((&line["end"], &line["upstream"]), (&"complete".into(), &upstream.into()));
    assert_eq!(line["to_client"]["copied_bytes"], 8);
}

/// One of an upstream's two addresses does not answer. The other one is tried long before the
/// connect timeout.
#[test]
fn a_silent_address_delays_a_client_by_a_second_or_two() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can give a name two addresses for one process");
    }
    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts");
    fs::write(&hosts, "127.0.0.2 two.test\n127.0.0.3 two.test\n").unwrap();
    // The resolver may sort the addresses, so each is the silent one once.
    let mut attempts = Vec::new();
    for (silent, answering) in [("127.0.0.2", "127.0.0.3"), ("127.0.0.3", "127.0.0.2")] {
        let listener = TcpListener::bind((answering, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let _silent = silent_listener(SocketAddr::new(silent.parse().unwrap(), port));
        let log = folder.path().join(silent);
        let script = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script]).arg(&hosts).arg(env!("CARGO_BIN_EXE_haul"));
        command.args(["proxy", "--listen", "127.0.0.1:0", "--connect-timeout", "60s"]);
        command.args(["--to", &format!("two.test:{port}"), "--access-log"]).arg(&log);
        let mut proxy = ProxyProcess::start(&mut command);
        let client = TcpStream::connect(&proxy.address).unwrap();
        let server = listener.accept().unwrap().0;
        drop((client, server));
        proxy.finish();
        let line: Value = serde_json::from_str(&fs::read_to_string(&log).unwrap()).unwrap();
        assert_eq!(line["end"], "complete", "{line}");
        assert!(line["connect_ms"].as_f64().unwrap() < 20_000.0, "{line}");
        attempts.push(line["connect_attempts"].as_u64().unwrap());
    }
    attempts.sort_unstable();
    assert_eq!(attempts, [1, 2], "the silent address was first once");
}

/// A listener whose queue is full: the kernel drops what connects to it. With the connections that
/// fill it.
fn silent_listener(address: SocketAddr) -> (OwnedFd, Vec<OwnedFd>) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, listen, socket_with};
    let socket = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let connect = |_| {
        let socket = socket();
        let _ = connect(&socket, &address);
        socket
    };
    (listener, (0..8).map(connect).collect())
}

/// Counts the system calls of a process during a piece of work; `None` without strace, or where it
/// may not trace the process.
fn count_calls(process: &Child, meanwhile: impl FnOnce()) -> Option<usize> {
    let folder = tempfile::tempdir().unwrap();
    let counts = folder.path().join("counts");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-U", "calls,name", "-o"]).arg(&counts);
    strace.args(["-p", &process.id().to_string()]).stderr(Stdio::piped());
    let Ok(mut strace) = strace.spawn() else {
        eprintln!("SKIPPED: system calls are not counted: no strace (ci/install)");
        return None;
    };
    let mut messages = BufReader::new(strace.stderr.take().unwrap());
    let mut text = String::new();
    messages.read_line(&mut text).unwrap();
    if !text.contains("attached") {
        eprintln!("SKIPPED: system calls are not counted: {text}");
        return None;
    }
    meanwhile();
    kill_process(Pid::from_child(&strace), Signal::INT).unwrap();
    strace.wait().unwrap();
    // The largest number is the total. There is none if nothing was called.
    let text = fs::read_to_string(&counts).unwrap();
    let numbers = text.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok());
    Some(numbers.max().unwrap_or(0))
}

/// Waiting, receiving and sending: a small message needs no other call in a loop of one connection.
#[test]
fn a_small_message_takes_at_most_three_system_calls() {
    const MESSAGES: usize = 2000;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut proxy = start_proxy(&listener);
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    let mut server = listener.accept().unwrap().0;
    let mut exchange = |count: usize| {
        let mut message = [7; 100];
        for _ in 0..count {
            client.write_all(&message).unwrap();
            server.read_exact(&mut message).unwrap();
            server.write_all(&message).unwrap();
            client.read_exact(&mut message).unwrap();
        }
    };
    // The connection is established, and its first messages have passed.
    exchange(10);
    let Some(calls) = count_calls(&proxy.process, || exchange(MESSAGES)) else { return };
    // Both directions, and what the other threads do in the meantime.
    assert!(calls <= 3 * 2 * MESSAGES + MESSAGES / 20, "{calls}");
    assert!(calls >= 2 * 2 * MESSAGES, "they were counted: {calls}");
    drop((client, server));
    proxy.finish();
}

/// Starts a proxy with one loop to a listener.
fn start_proxy(listener: &TcpListener) -> ProxyProcess {
    let upstream = listener.local_addr().unwrap().to_string();
    let options = ["proxy", "--listen", "127.0.0.1:0", "--to", &upstream, "--workers", "1"];
    ProxyProcess::start(&mut haul(&options))
}

/// Writes until the socket and everything behind it are full.
fn fill(stream: &TcpStream) {
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let bytes = vec![1; 1 << 16];
    while (&mut &*stream).write(&bytes).is_ok() {}
}

/// Connections that wait for a peer do not keep the loop busy, whatever has happened to them.
#[test]
fn connections_that_wait_take_no_calls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = start_proxy(&listener);
    let connect = || {
        let client = TcpStream::connect(&proxy.address).unwrap();
        let mut server = listener.accept().unwrap().0;
        (&client).write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
        (client, server)
    };
    let [idle, half_closed, stalled, stalled_and_ended, stalled_and_reset] =
        [(); 5].map(|()| connect());
    half_closed.0.shutdown(std::net::Shutdown::Write).unwrap();
    half_closed.1.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!((&half_closed.1).read(&mut [0]).unwrap(), 0);
    for (client, _) in [&stalled, &stalled_and_ended, &stalled_and_reset] {
        fill(client);
    }
    stalled_and_ended.0.shutdown(std::net::Shutdown::Write).unwrap();
    // What it has sent is still delivered for a while.
    let (client, server) = stalled_and_reset;
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    std::thread::sleep(Duration::from_millis(500));
    let wait = || std::thread::sleep(Duration::from_secs(3));
    let Some(calls) = count_calls(&proxy.process, wait) else { return };
    // Each thread may look after something once a second.
    assert!(calls < 100, "{calls} calls in three seconds");
    drop((idle, half_closed, stalled, stalled_and_ended, server));
}

/// The bytes that the first connection to a listener sends, once its peer has ended the stream.
fn received(listener: &TcpListener) -> String {
    let mut text = String::new();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn sighup_puts_the_changed_file_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("proxy.toml");
    let (old, new) = (TcpListener::bind("127.0.0.1:0"), TcpListener::bind("127.0.0.2:0"));
    let (old, new) = (old.unwrap(), new.unwrap());
    let write = |text: String| {
        // As an editor or a deployment does it.
        let next = folder.path().join("next");
        fs::write(&next, format!("listen = [\"127.0.0.1:0\"]\n{text}")).unwrap();
        fs::rename(&next, &config).unwrap();
    };
    write(format!(
        "to = [\"{0}\", \"{1} backup\"]",
        old.local_addr().unwrap(),
        new.local_addr().unwrap()
    ));
    let mut proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    let send = |text: &str| TcpStream::connect(&proxy.address).unwrap().write_all(text.as_bytes());
    send("one").unwrap();
    assert_eq!(received(&old), "one");
    write(format!("to = [\"{}\"]", new.local_addr().unwrap()));
    proxy.signal(Signal::HUP);
    proxy.wait_for("the configuration was reloaded");
    let send = |text: &str| TcpStream::connect(&proxy.address).unwrap().write_all(text.as_bytes());
    send("two").unwrap();
    assert_eq!(received(&new), "two");
    write("to = [\"127.0.0.1:0\"]".into());
    proxy.signal(Signal::HUP);
    proxy.wait_for("the old one is in force");
    let send = |text: &str| TcpStream::connect(&proxy.address).unwrap().write_all(text.as_bytes());
    send("three").unwrap();
    assert_eq!(received(&new), "three");
    proxy.finish();
}

/// A TLS site: OpenSSL's server, which serves the files of a folder.
struct TlsSite {
    process: Child,
    address: String,
}

impl TlsSite {
    /// Starts a site of which `/name` is `name`.
    fn start(folder: &Path, name: &str) -> Self {
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("name"), name).unwrap();
        let status = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj"])
            .args([&format!("/CN={name}"), "-keyout", "key.pem", "-out", "certificate.pem"])
            .current_dir(&folder)
            .stderr(Stdio::null())
            .status();
        assert!(status.unwrap().success());
        // It cannot report the port that the kernel chooses.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let process = Command::new("openssl")
            .args(["s_server", "-accept", &address, "-WWW", "-quiet"])
            .args(["-cert", "certificate.pem", "-key", "key.pem"])
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < deadline, "openssl s_server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { process, address }
    }
}

impl Drop for TlsSite {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn curl_reaches_the_tls_site_that_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let sites = ["one.example", "two.example"].map(|name| TlsSite::start(folder.path(), name));
    let config = folder.path().join("proxy.toml");
    let text = format!(
        "listen = ['127.0.0.1:0']
         group.one.to = ['{}']
         group.two.to = ['{}']
         route = [
             {{ server-name = ['one.example'], group = 'one' }},
             {{ server-name = ['*.example'], alpn = ['http/1.1'], group = 'two' }},
         ]",
        sites[0].address, sites[1].address
    );
    fs::write(&config, text).unwrap();
    let mut proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    let port = proxy.address.rsplit_once(':').unwrap().1.to_owned();
    let fetch = |site: &str| {
        Command::new("curl")
            .args(["-sS", "--max-time", "20", "--cacert"])
            .arg(folder.path().join(site).join("certificate.pem"))
            .args(["--resolve", &format!("{site}:{port}:127.0.0.1")])
            .arg(format!("https://{site}:{port}/name"))
            .output()
            .unwrap()
    };
    for site in ["one.example", "two.example"] {
        let output = fetch(site);
        let body = String::from_utf8_lossy(&output.stdout);
        assert!(body.contains(site), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let refused = Command::new("curl")
        .args(["-sSk", "--max-time", "20", &format!("https://127.0.0.1:{port}/name")])
        .status();
    // 35: the connection is reset in the handshake.
    assert_eq!(refused.unwrap().code(), Some(35));
    proxy.finish();
}

#[test]
fn a_check_names_what_is_wrong_and_opens_nothing_for_long() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    for (listen, to, code, expected) in [
        ("127.0.0.1:0", "127.0.0.1:9", 0, "can be connected to 127.0.0.1:9"),
        ("127.0.0.1:0", "no-such-host.invalid:9", 0, "is resolved: no-such-host.invalid:9: "),
        (&taken, "127.0.0.1:9", 2, "another process listens there"),
    ] {
        let arguments = ["proxy", "--listen", listen, "--to", to, "--check"];
        let (output, transcript) = run(&mut haul(&arguments));
        assert_eq!(output.status.code(), Some(code), "{transcript}");
        assert!(transcript.contains(expected), "{transcript}");
    }
}

#[test]
fn bad_options_are_one_line_each() {
    for (arguments, problem) in [
        (&["proxy"][..], "listen is missing"),
        (&["proxy", "--listen", "0"], "to is missing"),
        (&["proxy", "--listen", "0", "--to", "host"], "is no upstream"),
        (&["proxy", "--listen", "0", "--to", "h:1", "--workers", "0"], "must be at least 1"),
        (&["proxy", "--listen", "0", "--to", "h:1 weight=0"], "weight 0 is not between"),
        (&["proxy", "--listen", "0", "--to", "h:1,h:1"], "has the upstream h:1 twice"),
        (&["proxy", "--config", "/nonexistent"], "/nonexistent: No such file"),
    ] {
        let (output, transcript) = run(&mut haul(arguments));
        assert_eq!(output.status.code(), Some(2), "{transcript}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(problem) && message.lines().count() == 1, "{transcript}");
    }
}
