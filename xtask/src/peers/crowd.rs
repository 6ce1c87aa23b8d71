//! Slow HTTP clients, which occupy a server's connections.
//!
//! Half of them send the head of a request byte by byte. The other half receive a large body a few
//! bytes at a time.

use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Period in which each client sends or receives once.
const PERIOD: Duration = Duration::from_secs(5);
/// Time between two steps. In each step an equal share of the clients sends or receives.
const STEP: Duration = Duration::from_millis(50);
/// `SO_RCVBUF` of a slow client, in bytes: about the minimum that Linux allows.
const RECEIVE_BUFFER_BYTES: usize = 4096;

/// Timeout of each connection attempt.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Slow clients that run on a thread of their own until this is dropped.
#[derive(Debug)]
pub struct SlowClients {
    is_stopped: Arc<AtomicBool>,
    /// Number of clients that the server has rejected: it has closed the connection or has
    /// responded to an unfinished request.
    rejected: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// A connection that reads a response slowly, or sends a request slowly.
struct Client {
    socket: OwnedFd,
    is_reader: bool,
}

impl SlowClients {
    /// Connects `per_kind` clients of each kind from the calling thread's host.
    ///
    /// All clients request `file`; half of them never finish their request.
    pub fn connect(server: SocketAddr, file: &str, per_kind: usize) -> Result<Self, String> {
        let failed =
            |error: rustix::io::Errno| format!("connecting a slow client to {server}: {error}");
        let complete = format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\n\r\n");
        let unfinished = format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\nX: ");
        let mut clients = Vec::with_capacity(2 * per_kind);
        for index in 0..2 * per_kind {
            let is_reader = index % 2 == 0;
            let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            // Child processes must not inherit the sockets.
            let flags = SocketFlags::CLOEXEC;
            let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
            // The send timeout also limits connect(2), in case the server accepts no more clients.
            set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_MAX)).map_err(failed)?;
            set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER_BYTES).map_err(failed)?;
            rustix::net::connect(&socket, &server).map_err(failed)?;
            let request = if is_reader { &complete } else { &unfinished };
            send(&socket, request.as_bytes(), SendFlags::NOSIGNAL).map_err(failed)?;
            clients.push(Client { socket, is_reader });
        }
        let (is_stopped, rejected) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stop_flag, counter) = (Arc::clone(&is_stopped), Arc::clone(&rejected));
        let work = move || run(clients, &stop_flag, &counter);
        let thread = std::thread::Builder::new().name("crowd".into()).spawn(work);
        let thread = Some(thread.map_err(|error| error.to_string())?);
        Ok(Self { is_stopped, rejected, thread })
    }

    /// Returns the number of clients that the server has rejected so far.
    pub fn rejected(&self) -> usize {
        self.rejected.load(Relaxed)
    }
}

impl Drop for SlowClients {
    fn drop(&mut self) {
        self.is_stopped.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread has no result. If it panicked, the panic message is already printed.
            let _ = thread.join();
        }
    }
}

/// Lets each client send or receive once per [`PERIOD`] until stopped, and drops rejected clients.
fn run(mut clients: Vec<Client>, is_stopped: &AtomicBool, rejected: &AtomicUsize) {
    let steps = (PERIOD.as_millis() / STEP.as_millis()) as usize;
    let mut step = 0;
    while !is_stopped.load(Relaxed) {
        let next = Instant::now() + STEP;
        let before = clients.len();
        let mut index = 0;
        clients.retain(|client| {
            index += 1;
            index % steps != step || client.advance()
        });
        rejected.fetch_add(before - clients.len(), Relaxed);
        step = (step + 1) % steps;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

impl Client {
    /// Sends one byte or receives up to 512 bytes. Returns false once the server has closed the
    /// connection or has responded to the unfinished request.
    fn advance(&self) -> bool {
        let mut buffer = [0; 512];
        if !self.is_reader
            && send(&self.socket, b"a", SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err()
        {
            return false;
        }
        match recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((count, _)) => self.is_reader && count > 0,
            Err(errno) => errno == rustix::io::Errno::AGAIN,
        }
    }
}
