//! Two thousand peers that do not read, and one peer that reads: the pipes of an ordinary user are
//! limited (`fs.pipe-user-pages-soft`), and beyond the limit have one or two pages.
//!
//! This is a separate test binary because it counts the pipes of its process.

use haul::{ForwardPool, Forwarder, Step};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::thread;

const STALLED: usize = 2000;
/// Four sockets for each connection, and some more.
const DESCRIPTORS: u64 = 4 * STALLED as u64 + 300;
/// Of all pipes together: 32 hold bytes, 4 are idle, and the test harness has some of its own.
const PIPE_BYTES_MAX: usize = 10 << 20;
const PIPE_BYTES_MIN: usize = 64 << 10;
const STREAM_BYTES: usize = 64 << 20;
/// The size of each socket buffer of a stalled connection: thousands must not fill the host's
/// memory for TCP.
const BUFFER_BYTES: usize = 64 << 10;
/// The most bytes that are sent or compared at a time.
const PIECE_BYTES: usize = 16 << 10;
/// A prime number: no piece begins where another one does.
const PERIOD: usize = 65_521;

/// A client that has sent more than is forwarded to a server that does not read.
struct Stalled {
    client: TcpStream,
    forwarder: Forwarder<TcpStream, TcpStream>,
    server: TcpStream,
    sent: usize,
}

fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (from, listener.accept().unwrap().0)
}

/// The bytes of all streams, which repeat after [`PERIOD`]. Each connection begins elsewhere.
struct Pattern(Vec<u8>);

impl Pattern {
    fn new() -> Self {
        let byte =
            |at: usize| ((at % PERIOD) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0];
        Self((0..PERIOD + PIECE_BYTES).map(byte).collect())
    }

    /// A piece of a connection's stream.
    fn piece(&self, connection: usize, at: usize, len: usize) -> &[u8] {
        let start = (connection + at) % PERIOD;
        &self.0[start..start + len.min(PIECE_BYTES)]
    }
}

impl Stalled {
    fn new(listener: &TcpListener, pool: &ForwardPool) -> Self {
        let ((client, from), (to, server)) = (pair(listener), pair(listener));
        for socket in [&client, &from, &to, &server] {
            socket.set_nonblocking(true).unwrap();
            haul_sys::sockopt::set_buffers(socket, BUFFER_BYTES).unwrap();
        }
        let forwarder = Forwarder::with_pool(from, to, pool.clone()).unwrap();
        Self { client, forwarder, server, sent: 0 }
    }

    /// Sends until nothing moves any more.
    fn fill(&mut self, connection: usize, pattern: &Pattern) {
        loop {
            match self.client.write(pattern.piece(connection, self.sent, PIECE_BYTES)) {
                Ok(count) => self.sent += count,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    break;
                }
            }
        }
        while self.forwarder.step().unwrap() == Step::Yield {}
    }

    /// Reads everything that was sent.
    fn drain(&mut self, connection: usize, pattern: &Pattern) {
        self.client.shutdown(Shutdown::Write).unwrap();
        self.server.shutdown(Shutdown::Write).unwrap();
        let (mut received, mut buffer) = (0, vec![0; PIECE_BYTES]);
        loop {
            let is_done = self.forwarder.step().unwrap() == Step::Done;
            match self.server.read(&mut buffer) {
                Ok(0) if is_done => break,
                Ok(count) => {
                    let expected = pattern.piece(connection, received, count);
                    assert!(&buffer[..count] == expected, "{connection}");
                    received += count;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert_eq!(received, self.sent, "{connection}");
    }
}

/// The capacity of each pipe of this process.
fn pipes() -> Vec<usize> {
    let mut pipes = HashMap::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let is_pipe =
            fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().starts_with("pipe:"));
        // Another reader of the pipe: the standard streams may be pipes of others.
        if is_pipe && let Ok(file) = File::open(&path) {
            let bytes = rustix::pipe::fcntl_getpipe_size(&file).unwrap();
            pipes.insert(file.metadata().unwrap().ino(), bytes);
        }
    }
    pipes.into_values().collect()
}

/// Forwards a long stream, and returns the part of it that was spliced.
fn forward_stream(listener: &TcpListener, pool: &ForwardPool, pattern: &Pattern) -> f64 {
    let ((client, from), (to, server)) = (pair(listener), pair(listener));
    let mut forwarder = Forwarder::one_way_with_pool(from, to, pool.clone()).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            for at in (0..STREAM_BYTES).step_by(PIECE_BYTES) {
                (&client).write_all(pattern.piece(0, at, PIECE_BYTES)).unwrap();
            }
        });
        let reading = scope.spawn(move || {
            let mut piece = vec![0; PIECE_BYTES];
            for at in (0..STREAM_BYTES).step_by(PIECE_BYTES) {
                (&server).read_exact(&mut piece).unwrap();
                assert!(piece == pattern.piece(0, at, PIECE_BYTES));
            }
        });
        forwarder.forward().unwrap();
        reading.join().unwrap();
    });
    let report = forwarder.report().a_to_b;
    assert!(report.fallbacks.is_empty(), "{report:?}");
    report.spliced.bytes as f64 / STREAM_BYTES as f64
}

#[test]
fn stalled_readers_keep_few_pipes_and_lose_nothing() {
    let limit = getrlimit(Resource::Nofile);
    let maximum = limit.maximum.unwrap_or(u64::MAX);
    if maximum < DESCRIPTORS {
        return eprintln!(
            "SKIPPED: {STALLED} connections need {DESCRIPTORS} descriptors (ulimit -Hn): there \
             are {maximum}"
        );
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), ..limit }).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let others = pipes().len();
    let (pool, pattern) = (ForwardPool::new(4).unwrap(), Pattern::new());
    let mut stalled: Vec<_> = (0..STALLED).map(|_| Stalled::new(&listener, &pool)).collect();
    // Acknowledgements and the kernel's larger windows let some more bytes in.
    for _ in 0..5 {
        for (connection, one) in stalled.iter_mut().enumerate() {
            one.fill(connection, &pattern);
        }
    }
    let spliced = stalled.iter().filter(|one| one.forwarder.report().a_to_b.spliced.bytes > 0);
    assert!(spliced.count() >= STALLED * 9 / 10, "these are streams that are spliced");
    let with_stalled = pipes();
    let bytes: usize = with_stalled.iter().sum();
    assert!(bytes <= PIPE_BYTES_MAX, "{bytes} bytes in {} pipes", with_stalled.len());
    assert!(with_stalled.iter().all(|&bytes| bytes >= PIPE_BYTES_MIN), "{with_stalled:?}");
    assert!(forward_stream(&listener, &pool, &pattern) >= 0.99);
    for (connection, one) in stalled.iter_mut().enumerate() {
        one.drain(connection, &pattern);
    }
    drop((stalled, pool));
    assert!(pipes().len() <= others, "pipes are left");
}
