//! Many connections at once, each with a random length, random pauses, and a random end.

use crate::common::{LIMIT, Proxy, lab, listen, pattern, upstream};
use crate::upgrade::SetOnDrop;
use rustix::net::sockopt::set_socket_linger;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use std::{fs, thread};

/// The number of random connections. The test runs in a separate process, so that descriptors and
/// memory of other tests do not count.
const CONNECTIONS: &str = "HAUL_TEST_CONNECTIONS";

/// The number of descriptors of this process that are pipes or sockets.
fn pipes_and_sockets() -> usize {
    let targets = fs::read_dir("/proc/self/fd").unwrap();
    let targets = targets.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let is_one = |target: &String| target.starts_with("pipe:") || target.starts_with("socket:");
    targets.map(|target| target.to_string_lossy().into_owned()).filter(is_one).count()
}

/// The resident memory of this process in bytes.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: usize = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

/// The time that the event loops of this process have used, by their threads.
fn used_by_loops() -> BTreeMap<String, Duration> {
    let threads = fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path());
    let read = |thread: &Path, file| fs::read_to_string(thread.join(file)).unwrap_or_default();
    let loops = threads.filter(|thread| read(thread, "comm").starts_with("haul-proxy-"));
    loops
        .map(|thread| {
            let used = read(&thread, "schedstat");
            let used_ns = used.split(' ').next().unwrap().parse().unwrap();
            (thread.display().to_string(), Duration::from_nanos(used_ns))
        })
        .collect()
}

/// No loop is awake without a connection: one that is uses a processor wholly.
fn check_that_loops_sleep() {
    const PAUSE: Duration = Duration::from_secs(1);
    let before = used_by_loops();
    thread::sleep(PAUSE);
    let after = used_by_loops();
    assert_eq!(after.len(), 2, "the loops are found: {after:?}");
    for (thread, used) in &after {
        let used = used.saturating_sub(before[thread]);
        assert!(used < PAUSE / 20, "{thread} is awake: {used:?} of {PAUSE:?}");
    }
}

/// `HAUL_TEST_CONNECTIONS` sets another number than 300, for a long run.
#[test]
fn random_streams_that_end_cleanly_are_complete() {
    let Ok(connections) = std::env::var(CONNECTIONS) else {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = "random_streams::random_streams_that_end_cleanly_are_complete";
        command.args(["--exact", test, "--nocapture"]).env(CONNECTIONS, "300");
        assert!(command.status().unwrap().success());
        return;
    };
    let connections = connections.parse().unwrap();
    let lab = lab();
    let loses_packets = match lab.set_loss("0.1%".parse().unwrap()) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("SKIPPED: no packet is lost: {error}");
            false
        }
    };
    let before = pipes_and_sockets();
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| config.process.workers = Some(2));
    let is_over = AtomicBool::new(false);
    let log = thread::scope(|scope| {
        let echo = scope.spawn(|| echo(&listener, &is_over));
        let over = SetOnDrop(&is_over);
        let memory = run_clients(&proxy, connections, loses_packets);
        check_that_loops_sleep();
        check_memory(&memory);
        let log = proxy.finish();
        drop(over);
        echo.join().unwrap();
        log
    });
    assert_eq!(log.len() as u64, connections);
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    for line in &log {
        *ends.entry(line["end"].as_str().unwrap()).or_default() += 1;
    }
    println!("{connections} connections: {ends:?}");
    let sent_again = |peer: &str| {
        let of_line = |line: &Value| line[peer]["retransmitted_segments"].as_u64().unwrap_or(0);
        log.iter().map(of_line).sum::<u64>()
    };
    let sent_again = sent_again("client_tcp") + sent_again("upstream_tcp");
    println!("{sent_again} segments were sent again");
    // Of 300 connections it is about thirty.
    assert!(sent_again > 0 || !loses_packets);
    assert!(ends["complete"] > connections / 2);
    for direction in ["to_upstream", "to_client"] {
        for method in ["spliced_bytes", "copied_bytes"] {
            let bytes = log.iter().map(|line| line[direction][method].as_u64().unwrap());
            assert!(bytes.sum::<u64>() > 0, "{direction}, {method}: each is used");
        }
    }
    drop(listener);
    assert!(pipes_and_sockets() <= before, "{before}: descriptors are left");
}

/// Runs the clients, 50 at a time; returns the resident memory after each 50.
fn run_clients(proxy: &Proxy, connections: u64, loses_packets: bool) -> Vec<usize> {
    let seeds: Vec<_> = (0..connections).collect();
    let run = |seeds: &[u64]| {
        thread::scope(|scope| {
            for &seed in seeds {
                scope.spawn(move || send_and_receive_back(proxy, seed, loses_packets));
            }
        });
        resident_bytes()
    };
    seeds.chunks(50).map(run).collect()
}

/// The second half of the connections needs no more memory than the first.
fn check_memory(memory: &[usize]) {
    let (first, second) = memory.split_at(memory.len().div_ceil(2));
    let [first, second] = [first, second].map(|half| half.iter().max().map_or(0, |max| max >> 20));
    println!("at most {first} MiB in the first half, {second} MiB in the second");
    assert!(second <= first + 32, "memory grows: {first} MiB, then {second} MiB");
}

/// How a server ends its stream before the client does.
#[derive(Debug, Clone, Copy)]
struct EarlyEnd {
    /// The bytes that it has returned by then.
    at: usize,
    is_reset: bool,
}

impl EarlyEnd {
    /// The end of the server of a client that sends so many bytes: of one in four, and by a reset
    /// in half of those.
    fn of(seed: u64, len: usize) -> Option<Self> {
        let mut random = fastrand::Rng::with_seed(seed ^ 0x5EED);
        let at = random.usize(..len);
        (random.u8(..) < 64).then(|| Self { at, is_reset: random.bool() })
    }
}

/// Returns what each connection receives, and ends it when the client does or earlier, until
/// `is_over`.
///
/// There may be fewer connections than clients: one that resets while the proxy connects has none.
fn echo(listener: &TcpListener, is_over: &AtomicBool) {
    listener.set_nonblocking(true).unwrap();
    thread::scope(|scope| {
        loop {
            match listener.accept() {
                Ok((server, _)) => {
                    server.set_nonblocking(false).unwrap();
                    server.set_read_timeout(Some(LIMIT)).unwrap();
                    // A client may reset its connection.
                    scope.spawn(move || drop(return_bytes(&server)));
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    if is_over.load(Relaxed) {
                        return;
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    });
}

/// Returns what a client sends, up to the early end that its seed stands for, and checks all of it.
/// A stream that has ended is whole: what was cut off does not look like that.
fn return_bytes(mut server: &TcpStream) -> io::Result<()> {
    let mut start = [0; 16];
    server.read_exact(&mut start)?;
    let [seed, len] = [0, 8].map(|at| u64::from_le_bytes(start[at..][..8].try_into().unwrap()));
    let expected = pattern(seed, len as usize);
    let early_end = EarlyEnd::of(seed, expected.len());
    let mut to_return = early_end.map_or(expected.len(), |end| end.at);
    let (mut received, mut piece) = (0, vec![0; 1 << 14]);
    loop {
        if to_return == 0
            && let Some(end) = early_end
        {
            if end.is_reset {
                set_socket_linger(server, Some(Duration::ZERO))?;
                return Ok(());
            }
            // It may have ended already.
            let _ = server.shutdown(Shutdown::Write);
        }
        let count = server.read(&mut piece)?;
        assert!(expected[received..].starts_with(&piece[..count]), "seed {seed}: other bytes");
        received += count;
        if count == 0 {
            assert_eq!(received, expected.len(), "seed {seed}: it was cut off, and has ended");
            return server.shutdown(Shutdown::Write);
        }
        let returned = count.min(to_return);
        // What is left unread would reset the connection.
        let written = server.write_all(&piece[..returned]);
        to_return -= returned;
        written?;
    }
}

/// Reads to the end of a stream. One client in four pauses now and then.
fn read_slowly(
    mut from: &TcpStream,
    received: &mut Vec<u8>,
    pauses: &mut fastrand::Rng,
) -> io::Result<()> {
    let is_slow = pauses.u8(..) < 64;
    let mut piece = vec![0; 1 << 16];
    loop {
        if is_slow && pauses.u8(..) < 32 {
            thread::sleep(Duration::from_millis(pauses.u64(0..20)));
        }
        match from.read(&mut piece)? {
            0 => return Ok(()),
            count => received.extend_from_slice(&piece[..count]),
        }
    }
}

/// Sends the seed and the length of a stream, and the stream with random pauses. The client ends
/// it, or resets the connection after one of the pieces.
fn send_in_pieces(mut client: &TcpStream, seed: u64, sent: &[u8], resets: bool) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(seed ^ 1 << 32);
    client.write_all(&[seed, sent.len() as u64].map(u64::to_le_bytes).concat())?;
    for piece in sent.chunks(sent.len().div_ceil(4)) {
        if random.bool() {
            thread::sleep(Duration::from_millis(random.u64(0..5)));
        }
        client.write_all(piece)?;
        if resets && random.bool() {
            // At once: a shutdown would end the stream in order before.
            return Ok(rustix::net::connect_unspec(client)?);
        }
    }
    client.shutdown(Shutdown::Write)
}

/// A client that sends random bytes and expects them back, up to the server's early end, unless it
/// resets its connection.
fn send_and_receive_back(proxy: &Proxy, seed: u64, loses_packets: bool) {
    let mut random = fastrand::Rng::with_seed(seed);
    let client = proxy.connect();
    let sent = pattern(seed, 1 << random.usize(0..21));
    let resets = random.u8(..) < 50;
    let mut pauses = fastrand::Rng::with_seed(!seed);
    thread::scope(|scope| {
        let sending = scope.spawn(|| send_in_pieces(&client, seed, &sent, resets));
        let mut received = Vec::new();
        let ended = read_slowly(&client, &mut received, &mut pauses);
        let all_sent = sending.join().unwrap();
        assert!(sent.starts_with(&received), "seed {seed}");
        match EarlyEnd::of(seed, sent.len()) {
            _ if resets => {}
            None => assert!(ended.is_ok() && received == *sent, "seed {seed}: {ended:?}"),
            // What was cut off does not look like a stream that has ended. The kernel reports the
            // reset once, to a write or to a read. One that is lost may never be sent again.
            Some(end) if end.is_reset => {
                let mut errors = [ended.err(), all_sent.err()].into_iter().flatten();
                let is_reset = |error: io::Error| error.kind() == ErrorKind::ConnectionReset;
                assert!(errors.any(|error| is_reset(error) || loses_packets), "{seed}: {end:?}");
            }
            Some(end) => {
                assert!(ended.is_ok(), "seed {seed}: {end:?}, {ended:?}");
                assert_eq!(received.len(), end.at, "seed {seed}");
            }
        }
    });
}
