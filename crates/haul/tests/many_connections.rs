//! Ten thousand connections with loans in flight at the same time.
//!
//! This is a separate test binary because it needs nearly all descriptors that a process may have.
//! The peers run in a second process.

use haul::{BufferPool, LoanLimits, SendSettings, Sender};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 10_000;
/// One descriptor for each connection, and 100 for other files of the test process.
const DESCRIPTORS: u64 = CONNECTIONS as u64 + 100;
const BUFFER_BYTES: usize = 8 << 10;
/// Maximum number of loans in flight on one connection.
const LOANS_MAX: usize = 2;
/// Environment variable with the listener's address, set for the process of the peers.
const LISTENER_VARIABLE: &str = "HAUL_TEST_LISTENER";
const TEST: &str = "ten_thousand_connections_lend_up_to_their_limits";

/// Returns the byte that fills one loan of a connection.
fn byte_of(connection: u32, part: usize) -> u8 {
    (connection as usize * LOANS_MAX + part) as u8
}

/// Runs the peers: connects, waits for a byte on standard input, then reads and checks everything.
fn run_peers(listener: SocketAddr) {
    let mut peers: Vec<TcpStream> =
        (0..CONNECTIONS).map(|_| TcpStream::connect(listener).unwrap()).collect();
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let mut received = vec![0; LOANS_MAX * BUFFER_BYTES];
    for peer in &mut peers {
        let mut number = [0; 4];
        peer.read_exact(&mut number).unwrap();
        peer.read_exact(&mut received).unwrap();
        for (part, bytes) in received.chunks(BUFFER_BYTES).enumerate() {
            assert!(bytes.iter().all(|&byte| byte == byte_of(u32::from_le_bytes(number), part)));
        }
    }
}

#[test]
fn ten_thousand_connections_lend_up_to_their_limits() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), ..limit })
    {
        return eprintln!(
            "SKIPPED: {CONNECTIONS} connections need {DESCRIPTORS} descriptors (ulimit -Hn): \
             {error}"
        );
    }
    if let Ok(listener) = std::env::var(LISTENER_VARIABLE) {
        return run_peers(listener.parse().unwrap());
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // A longer backlog than std's 128: if it is full, a connecting socket retries after a second.
    rustix::net::listen(&listener, 4096).unwrap();
    let mut peers = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST])
        .env(LISTENER_VARIABLE, listener.local_addr().unwrap().to_string())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let pool = BufferPool::new(BUFFER_BYTES, LOANS_MAX * CONNECTIONS + 1).unwrap();
    let limits =
        LoanLimits::default().with_loans_max(LOANS_MAX).with_bytes_max(LOANS_MAX * BUFFER_BYTES);
    // Accept all connections before any of them lends. Otherwise the backlog would overflow.
    let sockets: Vec<TcpStream> = (0..CONNECTIONS).map(|_| listener.accept().unwrap().0).collect();
    let mut senders = Vec::new();
    for (number, socket) in (0u32..).zip(sockets) {
        socket.set_nonblocking(true).unwrap();
        let mut sender =
            Sender::with_settings(socket, SendSettings::default().with_limits(limits)).unwrap();
        sender.send_all(&number.to_le_bytes()).unwrap();
        for part in 0..LOANS_MAX {
            let mut buffer = pool.take().unwrap();
            buffer.resize(BUFFER_BYTES).unwrap();
            buffer.fill(byte_of(number, part));
            sender.lend(buffer).unwrap();
        }
        assert_eq!(sender.report().outstanding_loans, LOANS_MAX);
        senders.push(sender);
    }
    assert_eq!(pool.in_use(), LOANS_MAX * CONNECTIONS);
    // Half of the senders are dropped with loans in flight; the others wait for their completions.
    let dropped = senders.split_off(CONNECTIONS / 2);
    drop(dropped);
    peers.stdin.as_mut().unwrap().write_all(b"!").unwrap();
    for sender in &mut senders {
        assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
        assert_eq!(sender.reclaim().unwrap().count(), LOANS_MAX);
    }
    assert!(peers.wait().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(120);
    while pool.in_use() > 0 {
        assert!(Instant::now() < deadline, "{} buffers were not returned", pool.in_use());
        std::thread::sleep(Duration::from_millis(5));
    }
}
