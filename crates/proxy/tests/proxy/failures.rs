//! An upstream that is killed under load.

use crate::common::{LIMIT, Proxy, lab, listen, upstream};
use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// An upstream that can be killed: it greets each client with its number, and echoes.
struct Server {
    number: u8,
    listener: Mutex<Option<TcpListener>>,
    streams: Mutex<Vec<Arc<TcpStream>>>,
}

impl Server {
    fn start(number: u8, listener: TcpListener) -> Arc<Self> {
        listener.set_nonblocking(true).unwrap();
        let (listener, streams) = (Mutex::new(Some(listener)), Mutex::default());
        let server = Arc::new(Self { number, listener, streams });
        let accepting = Arc::clone(&server);
        thread::spawn(move || {
            loop {
                let accepted = match &*accepting.listener.lock().unwrap() {
                    Some(listener) => listener.accept(),
                    None => return,
                };
                match accepted {
                    Ok((stream, _)) => accepting.serve(stream),
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        server
    }

    fn serve(&self, stream: TcpStream) {
        stream.set_nonblocking(false).unwrap();
        let stream = Arc::new(stream);
        // A check leaves at once.
        let _ = (&*stream).write_all(&[self.number]);
        self.streams.lock().unwrap().push(Arc::clone(&stream));
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = (&*stream).read(&mut buffer) {
                let _ = (&*stream).write_all(&buffer[..count]);
            }
        });
    }

    /// Ends as a process that is killed under load: the listener is closed, connections are reset.
    fn kill(&self) {
        *self.listener.lock().unwrap() = None;
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
            // Ends the thread, which closes the socket.
            let _ = stream.shutdown(Shutdown::Read);
        }
    }
}

/// What clients have seen, by the number of their upstream.
#[derive(Default)]
struct Seen {
    is_over: AtomicBool,
    messages: AtomicUsize,
    failed: Mutex<Vec<u8>>,
}

impl Seen {
    /// A client that sends messages until the end or a failure.
    fn run(&self, mut client: TcpStream) {
        client.set_read_timeout(Some(LIMIT)).unwrap();
        let mut number = [0];
        client.read_exact(&mut number).unwrap();
        let mut received = [0; 1000];
        while !self.is_over.load(Relaxed) {
            let exchanged =
                client.write_all(&[7; 1000]).and_then(|()| client.read_exact(&mut received));
            if let Err(error) = exchanged {
                let kinds = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
                assert!(kinds.contains(&error.kind()), "{error}");
                self.failed.lock().unwrap().push(number[0]);
                return;
            }
            self.messages.fetch_add(1, Relaxed);
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The number of the upstream that a new client gets.
fn new_client(proxy: &Proxy, address: SocketAddr) -> u8 {
    let mut client = proxy.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let mut number = [0];
    client.read_exact(&mut number).unwrap();
    number[0]
}

#[test]
fn an_upstream_that_is_killed_fails_its_own_connections_and_gets_no_more() {
    const CLIENTS: usize = 40;
    let lab = lab();
    let listeners = [listen(&lab), listen(&lab)];
    let upstreams = listeners.each_ref().map(upstream);
    let killed = listeners[0].local_addr().unwrap().to_string();
    let servers: Vec<_> = listeners
        .into_iter()
        .zip(0..)
        .map(|(listener, number)| lab.receiver.run(|| Server::start(number, listener)).unwrap())
        .collect();
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.groups[0].check = Some(haul_proxy::CheckConfig::new(Duration::from_millis(100)));
        config.process.workers = Some(2);
    });
    let (seen, address) = (Seen::default(), proxy.address);
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            let client = proxy.connect();
            scope.spawn(|| seen.run(client));
        }
        let deadline = Instant::now() + LIMIT;
        while seen.messages.load(Relaxed) < 10 * CLIENTS {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(5));
        }
        servers[0].kill();
        // Until the check has found it down, a client is connected to the other one all the same.
        let mut numbers: HashSet<u8> = (0..20).map(|_| new_client(&proxy, address)).collect();
        thread::sleep(Duration::from_secs(1));
        numbers.extend((0..20).map(|_| new_client(&proxy, address)));
        assert_eq!(numbers, HashSet::from([1]));
        seen.is_over.store(true, Relaxed);
    });
    let failed = seen.failed.into_inner().unwrap();
    assert_eq!(failed, [0; CLIENTS / 2], "those of the killed one, and no other");
    servers[1].kill();
    let log = proxy.finish();
    let of_killed = log.iter().filter(|line| line["upstream"] == killed);
    let ends: Vec<_> = of_killed.map(|line| &line["end"]).collect();
    assert_eq!(ends, ["upstream-failed"; CLIENTS / 2]);
    // The last clients were not even tried to be connected to it.
    let before = CLIENTS as u64 + 20;
    let attempts = log.iter().filter(|line| line["id"].as_u64() > Some(before));
    let attempts: Vec<_> = attempts.map(|line| line["connect_attempts"].clone()).collect();
    assert_eq!(attempts, [1; 20], "{log:?}");
    assert!(log.iter().all(|line| line["end"] != "unreachable"));
}
