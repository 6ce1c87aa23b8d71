//! Every byte of both streams arrives, once and in order, by the expected method.

use crate::common::{LIMIT, Proxy, accept, lab, listen, pattern, start_proxy, upstream};
use haul_lab::{Lab, Settings};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use std::{fs, thread};

fn read_all(mut from: &TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    from.read_to_end(&mut received).unwrap();
    received
}

fn write_all_and_end(mut to: &TcpStream, bytes: &[u8]) {
    to.write_all(bytes).unwrap();
    to.shutdown(Shutdown::Write).unwrap();
}

#[test]
fn bulk_data_is_spliced_in_both_directions() {
    splice_bulk_data(lab(), 64 << 20);
}

/// Each packet is a segment of 1448 bytes, so that a pipe of 256 KiB is full at 91 KiB.
#[test]
fn bulk_data_of_single_segments_is_spliced() {
    let lab = Lab::open(&Settings::default().with_mtu(1500)).unwrap();
    lab.set_segmentation_both(false).unwrap();
    splice_bulk_data(lab, 16 << 20);
}

/// As on a network with a round trip of 20 ms.
#[test]
fn over_a_long_path_bulk_data_is_spliced_and_small_messages_are_copied() {
    for has_segmentation in [true, false] {
        let mtu = if has_segmentation { 9000 } else { 1500 };
        let far_lab = || {
            let lab = Lab::open(&Settings::default().with_mtu(mtu)).unwrap();
            lab.set_segmentation_both(has_segmentation).unwrap();
            delay(&lab, "10ms").then_some(lab)
        };
        let Some(lab) = far_lab() else { return };
        // The first bytes arrive in small pieces, which are copied.
        splice_bulk_data(lab, 64 << 20);
        let Some(lab) = far_lab() else { return };
        copy_small_messages(lab, 20);
    }
}

/// Delays all packets of both hosts; false where the kernel cannot (`sch_netem`).
fn delay(lab: &Lab, time: &str) -> bool {
    [&lab.sender, &lab.receiver].into_iter().all(|host| {
        let mut tc = Command::new("tc");
        tc.args(["qdisc", "replace", "dev", host.device(), "root", "netem", "delay", time]);
        // More than the default of 1000 packets are under way.
        tc.args(["limit", "100000"]);
        let output = host.run(|| tc.output()).unwrap().unwrap();
        if !output.status.success() {
            eprintln!("SKIPPED: no long path: {}", String::from_utf8_lossy(&output.stderr));
        }
        output.status.success()
    })
}

/// Sends so many bytes in both directions at a time, which are spliced but for one percent.
fn splice_bulk_data(lab: Lab, len: usize) {
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [upstream(&listener)], |_| {});
    let client = proxy.connect();
    let server = accept(&listener);
    thread::scope(|scope| {
        scope.spawn(|| write_all_and_end(&client, &pattern(1, len)));
        scope.spawn(|| write_all_and_end(&server, &pattern(2, len)));
        scope.spawn(|| assert!(read_all(&client) == pattern(2, len)));
        scope.spawn(|| assert!(read_all(&server) == pattern(1, len)));
    });
    let log = proxy.finish();
    assert_eq!(log.len(), 1);
    assert_eq!(log[0]["end"], "complete", "{log:?}");
    for direction in ["to_upstream", "to_client"] {
        let bytes = |method: &str| log[0][direction][method].as_u64().unwrap();
        let (spliced, copied) = (bytes("spliced_bytes"), bytes("copied_bytes"));
        assert_eq!(spliced + copied, len as u64);
        assert!(spliced * 100 >= len as u64 * 99, "{log:?}");
    }
    let line = &log[0];
    let number = |field: &str| line[field].as_f64().unwrap();
    assert!(number("splice_us") > 0.0 && number("splice_us") <= number("loop_us"), "{line}");
    assert!(number("connect_ms") <= number("first_byte_ms"), "{line}");
    assert!(number("first_byte_ms") <= number("duration_ms"), "{line}");
    for peer in ["client_tcp", "upstream_tcp"] {
        assert!(line[peer]["rtt_us"].as_u64().unwrap() > 0, "{line}");
        assert!(line[peer]["retransmitted_segments"].is_u64(), "{line}");
    }
}

#[test]
fn small_messages_are_copied_and_arrive_one_by_one() {
    copy_small_messages(lab(), 1000);
}

fn copy_small_messages(lab: Lab, count: u32) {
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [upstream(&listener)], |_| {});
    let mut client = proxy.connect();
    let mut server = accept(&listener);
    for number in 0..count {
        let mut received = [0; 100];
        client.write_all(&[number as u8; 100]).unwrap();
        server.read_exact(&mut received).unwrap();
        assert_eq!(received, [number as u8; 100]);
        server.write_all(&[!number as u8; 100]).unwrap();
        client.read_exact(&mut received).unwrap();
        assert_eq!(received, [!number as u8; 100]);
    }
    drop((client, server));
    let log = proxy.finish();
    assert_eq!(log[0]["to_upstream"]["copied_bytes"], 100 * count, "{log:?}");
    assert_eq!(log[0]["to_client"]["copied_bytes"], 100 * count, "{log:?}");
}

/// The response of a server that waits for the end of the request is not lost.
#[test]
fn a_half_closed_connection_delivers_the_response() {
    const STREAMS: [(usize, usize); 4] = [(1, 1), (0, 5), (100_000, 3_000_000), (3_000_000, 10)];
    let (proxy, listener) = start_proxy(|_| {});
    for (request, response) in STREAMS {
        let client = proxy.connect();
        // The client has ended its stream before the upstream is connected.
        let sending = thread::spawn({
            let client = client.try_clone().unwrap();
            move || write_all_and_end(&client, &pattern(1, request))
        });
        let server = accept(&listener);
        assert!(read_all(&server) == pattern(1, request));
        write_all_and_end(&server, &pattern(2, response));
        assert!(read_all(&client) == pattern(2, response));
        sending.join().unwrap();
    }
    let log = proxy.finish();
    assert_eq!(log.len(), STREAMS.len());
    for (line, (request, response)) in log.iter().zip(STREAMS) {
        assert_eq!(line["end"], "complete", "{line}");
        for (direction, len) in [("to_upstream", request), ("to_client", response)] {
            let bytes = |method: &str| line[direction][method].as_u64().unwrap();
            assert_eq!(bytes("spliced_bytes") + bytes("copied_bytes"), len as u64, "{line}");
            assert!(len < 1_000_000 || bytes("spliced_bytes") > len as u64 / 2, "{line}");
            assert!(len > 10 || bytes("spliced_bytes") == 0, "{line}");
        }
    }
}

/// Events are edge-triggered: none may be missed while one side stalls.
#[test]
fn a_reader_that_stalls_receives_every_byte() {
    const LEN: usize = 24 << 20;
    let (proxy, listener) = start_proxy(|_| {});
    let mut client = proxy.connect();
    let server = accept(&listener);
    let sending = thread::spawn(move || write_all_and_end(&server, &pattern(3, LEN)));
    let mut received = Vec::new();
    let mut buffer = vec![0; 100_000];
    for turn in 0.. {
        if turn % 40 == 0 {
            thread::sleep(Duration::from_millis(30));
        }
        match client.read(&mut buffer).unwrap() {
            0 => break,
            count => received.extend_from_slice(&buffer[..count]),
        }
    }
    sending.join().unwrap();
    assert!(received == pattern(3, LEN));
    client.shutdown(Shutdown::Write).unwrap();
    let log = proxy.finish();
    assert_eq!(log[0]["end"], "complete");
    assert!(log[0]["to_client"]["spliced_bytes"].as_u64().unwrap() > LEN as u64 / 2, "{log:?}");
}

/// An urgent byte ends a read early; what follows it is read without another event.
#[test]
fn bytes_after_an_urgent_one_arrive() {
    let (proxy, listener) = start_proxy(|_| {});
    for _ in 0..50 {
        let client = proxy.connect();
        let server = accept(&listener);
        (&client).write_all(b"before").unwrap();
        rustix::net::send(&client, b"!", rustix::net::SendFlags::OOB).unwrap();
        write_all_and_end(&client, b"after");
        let received = read_all(&server);
        let without_urgent: Vec<_> = received.into_iter().filter(|&byte| byte != b'!').collect();
        assert_eq!(without_urgent, b"beforeafter");
    }
}

/// Number of random connections, 300 by default. `HAUL_TEST_CONNECTIONS` sets another one for a
/// long run, of this test alone, which also loses packets.
fn connections() -> (u64, bool) {
    let asked = std::env::var("HAUL_TEST_CONNECTIONS").ok();
    let is_long = asked.is_some();
    (asked.map_or(300, |text| text.parse().unwrap()), is_long)
}

/// The number of descriptors of this process that are pipes or sockets.
fn pipes_and_sockets() -> usize {
    let targets = fs::read_dir("/proc/self/fd").unwrap();
    let targets = targets.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    let is_one = |target: &String| target.starts_with("pipe:") || target.starts_with("socket:");
    targets.map(|target| target.to_string_lossy().into_owned()).filter(is_one).count()
}

/// Many connections at once, each with a random length, random pauses, and an end of its own.
#[test]
fn random_streams_that_end_cleanly_are_complete() {
    let (connections, is_long) = connections();
    let lab = lab();
    if is_long {
        lab.set_loss("0.1%".parse().unwrap()).unwrap();
    }
    let before = pipes_and_sockets();
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| config.workers = Some(2));
    let is_over = AtomicBool::new(false);
    let log = thread::scope(|scope| {
        let echo = scope.spawn(|| echo(&listener, &is_over));
        let over = SetOnDrop(&is_over);
        for seeds in (0..connections).collect::<Vec<_>>().chunks(50) {
            let proxy = &proxy;
            thread::scope(|scope| {
                for &seed in seeds {
                    scope.spawn(move || send_and_receive_back(proxy, seed, is_long));
                }
            });
        }
        let log = proxy.finish();
        drop(over);
        echo.join().unwrap();
        log
    });
    assert_eq!(log.len() as u64, connections);
    let mut ends: BTreeMap<&str, usize> = BTreeMap::new();
    for line in &log {
        *ends.entry(line["end"].as_str().unwrap()).or_default() += 1;
    }
    println!("{connections} connections: {ends:?}");
    for method in ["spliced_bytes", "copied_bytes"] {
        let bytes = log.iter().map(|line| line["to_client"][method].as_u64().unwrap()).sum::<u64>();
        assert!(bytes > 0, "{method}: each is used");
    }
    drop(listener);
    // Other tests of this process have some meanwhile.
    assert!(!is_long || pipes_and_sockets() <= before, "{before}: descriptors are left");
}

/// Sets a flag also if the test fails.
struct SetOnDrop<'f>(&'f AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
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

/// Returns what a client sends, up to the early end that its seed stands for.
fn return_bytes(mut server: &TcpStream) -> io::Result<()> {
    let mut start = [0; 16];
    server.read_exact(&mut start)?;
    let [seed, len] = [0, 8].map(|at| u64::from_le_bytes(start[at..][..8].try_into().unwrap()));
    let mut client = server;
    match EarlyEnd::of(seed, len as usize) {
        None => drop(io::copy(&mut server, &mut client)?),
        Some(EarlyEnd { at, is_reset }) => {
            io::copy(&mut server.take(at as u64), &mut client)?;
            if is_reset {
                return rustix::net::sockopt::set_socket_linger(server, Some(Duration::ZERO))
                    .map_err(Into::into);
            }
        }
    }
    server.shutdown(Shutdown::Write)?;
    // What is left unread would reset the connection.
    io::copy(&mut server, &mut io::sink()).map(drop)
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
            rustix::net::sockopt::set_socket_linger(client, Some(Duration::ZERO)).unwrap();
            return client.shutdown(Shutdown::Both);
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
