//! The library's examples, over loopback: each program runs, and the bytes arrive.
//!
//! This package depends on nothing that the library does not depend on, so that these tests also
//! run with the library's minimum version of Rust.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

/// More than the buffers of two sockets hold.
const LEN: usize = 20_000_000;

fn pattern() -> Vec<u8> {
    (0..LEN as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// A file with the pattern in a folder that cargo provides for tests.
fn file(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, pattern()).unwrap();
    path
}

/// Accepts one connection and reads it to its end, on a thread.
fn receive_all() -> (String, thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let receiving = thread::spawn(move || {
        let mut received = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
        received
    });
    (address, receiving)
}

/// Runs a program to its end; returns what it has printed.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A program that listens, and is killed at the end.
struct Server {
    child: Child,
    stdout: BufReader<ChildStdout>,
    port: u16,
}

impl Server {
    /// Starts the program, whose first line names the address that it listens on.
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut server = Self { child, stdout, port: 0 };
        let mut line = String::new();
        server.stdout.read_line(&mut line).unwrap();
        let port = line.split_whitespace().find_map(|word| word.rsplit_once(':')?.1.parse().ok());
        server.port = port.unwrap();
        server
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).unwrap()
    }

    /// Waits for the end of the program; returns what it has printed.
    fn finish(mut self) -> String {
        let mut printed = String::new();
        self.stdout.read_to_string(&mut printed).unwrap();
        assert!(self.child.wait().unwrap().success());
        printed
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn send_file_sends_a_file_and_names_the_method() {
    let (address, receiving) = receive_all();
    let mut command = Command::new(env!("CARGO_BIN_EXE_send_file"));
    let printed = output(command.arg(file("sent")).arg(address));
    assert!(receiving.join().unwrap() == pattern());
    assert!(printed.contains(&format!(": {LEN} bytes in ")), "{printed}");
}

#[test]
fn relay_relays_both_directions() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let mut relay = Command::new(env!("CARGO_BIN_EXE_relay"));
    let mut relay = Server::start(relay.args(["0", &to]));
    let client = relay.connect();
    let (server, _) = listener.accept().unwrap();
    thread::scope(|scope| {
        for (from, to) in [(&client, &server), (&server, &client)] {
            scope.spawn(move || {
                (&*from).write_all(&pattern()).unwrap();
                from.shutdown(std::net::Shutdown::Write).unwrap();
            });
            scope.spawn(move || {
                let mut received = Vec::new();
                (&*to).read_to_end(&mut received).unwrap();
                assert!(received == pattern());
            });
        }
    });
    let mut summary = String::new();
    relay.stdout.read_line(&mut summary).unwrap();
    assert!(summary.contains("bytes spliced"), "{summary}");
}

#[test]
fn lend_sends_what_it_reads() {
    let (address, receiving) = receive_all();
    let input = File::open(file("lent")).unwrap();
    let printed = output(Command::new(env!("CARGO_BIN_EXE_lend")).arg(address).stdin(input));
    assert!(receiving.join().unwrap() == pattern());
    assert!(printed.contains("sends in flight: 0"), "{printed}");
}

#[test]
fn serve_sends_256_mib_to_a_slow_client() {
    let server = Server::start(Command::new(env!("CARGO_BIN_EXE_serve")).arg("0"));
    let mut client = server.connect();
    thread::sleep(Duration::from_millis(100));
    let received = std::io::copy(&mut client, &mut std::io::sink()).unwrap();
    assert_eq!(received, 256 << 20);
    let report = server.finish();
    assert!(report.contains("bytes: 268435456"), "{report}");
}

#[test]
fn receive_sums_messages() {
    let server = Server::start(Command::new(env!("CARGO_BIN_EXE_receive")).arg("0"));
    let mut client = server.connect();
    let message = pattern();
    for _ in 0..2 {
        client.write_all(&(message.len() as u64).to_le_bytes()).unwrap();
        client.write_all(&message).unwrap();
    }
    drop(client);
    let sum: u64 = message.iter().map(|&byte| u64::from(byte)).sum();
    let line = format!("a message of {LEN} bytes, their sum {sum}\n");
    let printed = server.finish();
    assert!(printed.starts_with(&line.repeat(2)), "{printed}");
}

#[test]
fn datagrams_arrive_in_segments() {
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    to.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let address = to.local_addr().unwrap().to_string();
    output(Command::new(env!("CARGO_BIN_EXE_datagrams")).arg(address));
    for number in 0..40u8 {
        let mut datagram = [0; 2000];
        assert_eq!(to.recv(&mut datagram).unwrap(), 1452);
        assert!(datagram[..1452] == [number; 1452]);
    }
}
