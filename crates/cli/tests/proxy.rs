//! `haul proxy` as a program: its options, its configuration file, its signals and its messages.

mod common {
    pub mod command;
    pub mod schema;
}

use common::command::{haul, run};
use common::schema::assert_valid;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

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
    let process = rustix::process::Pid::from_child(&proxy.process);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    let mut rest = String::new();
    proxy.messages.read_to_string(&mut rest).unwrap();
    assert_eq!(proxy.process.wait().unwrap().code(), Some(0), "{rest}");
    assert!(rest.ends_with("ended\n"), "{rest}");
    let line = fs::read_to_string(log).unwrap();
    let line = serde_json::from_str(&line).unwrap();
    assert_valid("proxy-log", &line);
    assert_eq!((&line["end"], &line["upstream"]), (&"complete".into(), &upstream.into()));
    assert_eq!(line["to_client"]["copied_bytes"], 8);
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
        (&["proxy", "--config", "/nonexistent"], "/nonexistent: No such file"),
    ] {
        let (output, transcript) = run(&mut haul(arguments));
        assert_eq!(output.status.code(), Some(2), "{transcript}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(problem) && message.lines().count() == 1, "{transcript}");
    }
}
