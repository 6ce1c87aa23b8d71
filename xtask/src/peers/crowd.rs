//! Clients that occupy a server's connections: slow ones, and four attacks.

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
const STEP: Duration = Duration::from_millis(5);
/// `SO_RCVBUF` of a client, in bytes: about the minimum that Linux allows.
const RECEIVE_BUFFER_BYTES: usize = 4096;
/// Timeout of each connection attempt.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// What the clients of a crowd do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Half of the clients send the head of a request byte by byte, the others receive a large body
    /// a few hundred bytes at a time.
    Slow,
    /// The clients send the head of a request byte by byte. A rejected one connects again, as in
    /// all attacks.
    HalfHeads,
    /// The clients request a large body and receive one byte per period.
    UnreadResponses,
    /// The clients announce a large upload and send one byte of it per period.
    StalledUploads,
    /// The clients connect to the TLS port and send nothing.
    SilentTls,
}

/// What one client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Receives up to so many bytes at a time.
    Receive(usize),
    /// Sends one byte at a time.
    Send,
    Silence,
}

/// Clients that run on separate threads until this is dropped.
#[derive(Debug)]
pub struct Crowd {
    is_stopped: Arc<AtomicBool>,
    /// How often the server has rejected a client: it has closed the connection or has responded to
    /// an unfinished request.
    rejected: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// The server that a crowd attacks, and how.
#[derive(Debug, Clone)]
pub struct Target {
    pub server: SocketAddr,
    /// The address that [`Behaviour::SilentTls`] connects to.
    pub tls_server: SocketAddr,
    /// A large file.
    pub file: String,
    pub behaviour: Behaviour,
}

/// A connection of the crowd.
struct Client {
    socket: OwnedFd,
    role: Role,
    /// What the client still has to send first.
    greeting: Vec<u8>,
}

impl Crowd {
    /// Connects so many clients from the calling thread's host.
    pub fn connect(target: Target, connections: usize) -> Result<Self, String> {
        let mut clients = Vec::with_capacity(connections);
        for index in 0..connections {
            let client = Client::connect(&target, index, SocketFlags::CLOEXEC);
            clients.push(client.map_err(|error| {
                format!("connecting client {index} to {}: {error}", target.server)
            })?);
        }
        let (is_stopped, rejected) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stop_flag, counter) = (Arc::clone(&is_stopped), Arc::clone(&rejected));
        let work = move || run(&target, clients, &stop_flag, &counter);
        let thread = std::thread::Builder::new().name("crowd".into()).spawn(work);
        let thread = Some(thread.map_err(|error| error.to_string())?);
        Ok(Self { is_stopped, rejected, thread })
    }

    /// Returns how often the server has rejected a client so far.
    pub fn rejected(&self) -> usize {
        self.rejected.load(Relaxed)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.is_stopped.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread does not have a result. If it panicked, the panic message is already
            // printed.
            let _ = thread.join();
        }
    }
}

/// Lets each client send or receive once per [`PERIOD`] until stopped. A rejected client is
/// dropped or connects again.
fn run(target: &Target, clients: Vec<Client>, is_stopped: &AtomicBool, rejected: &AtomicUsize) {
    let mut clients: Vec<Option<Client>> = clients.into_iter().map(Some).collect();
    let steps = (PERIOD.as_millis() / STEP.as_millis()) as usize;
    let mut step = 0;
    while !is_stopped.load(Relaxed) {
        let next = Instant::now() + STEP;
        for index in (step..clients.len()).step_by(steps) {
            let place = &mut clients[index];
            if place.as_mut().is_some_and(|client| !client.advance()) {
                *place = None;
                rejected.fetch_add(1, Relaxed);
            }
            if place.is_none() && target.behaviour != Behaviour::Slow {
                // Without a port or descriptor, the client tries again in the next period.
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                *place = Client::connect(target, index, flags).ok();
            }
        }
        step = (step + 1) % steps;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

impl Client {
    /// Connects, or begins to connect if the flags have `NONBLOCK`.
    fn connect(target: &Target, index: usize, flags: SocketFlags) -> rustix::io::Result<Self> {
        let server = match target.behaviour {
            Behaviour::SilentTls => target.tls_server,
            _ => target.server,
        };
        let (file, host) = (&target.file, target.server);
        let get = format!("GET /{file} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let half = format!("GET /{file} HTTP/1.1\r\nHost: {host}\r\nX: ");
        let put = format!(
            "PUT /upload-{index} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000\r\n\r\n"
        );
        let (role, greeting) = match target.behaviour {
            Behaviour::Slow if index.is_multiple_of(2) => (Role::Receive(512), get),
            Behaviour::Slow | Behaviour::HalfHeads => (Role::Send, half),
            Behaviour::UnreadResponses => (Role::Receive(1), get),
            Behaviour::StalledUploads => (Role::Send, put),
            Behaviour::SilentTls => (Role::Silence, String::new()),
        };
        let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        // The send timeout also limits connect(2), in case the server accepts no more clients.
        set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_MAX))?;
        set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER_BYTES)?;
        match rustix::net::connect(&socket, &server) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error),
        }
        let mut client = Self { socket, role, greeting: greeting.into_bytes() };
        client.greet();
        Ok(client)
    }

    /// Sends the greeting if the connection is established. Returns false if it has failed.
    fn greet(&mut self) -> bool {
        if self.greeting.is_empty() {
            return true;
        }
        match send(&self.socket, &self.greeting, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => {
                self.greeting.drain(..sent);
                true
            }
            Err(errno) => errno == rustix::io::Errno::AGAIN,
        }
    }

    /// Sends or receives once. Returns false once the server has closed the connection or has
    /// responded to an unfinished request.
    fn advance(&mut self) -> bool {
        if !self.greet() {
            return false;
        }
        if self.role == Role::Send
            && self.greeting.is_empty()
            && !matches!(
                send(&self.socket, b"a", SendFlags::NOSIGNAL | SendFlags::DONTWAIT),
                Ok(_) | Err(rustix::io::Errno::AGAIN)
            )
        {
            return false;
        }
        let mut buffer = [0; 512];
        let wanted = if let Role::Receive(bytes) = self.role { bytes } else { buffer.len() };
        match recv(&self.socket, &mut buffer[..wanted], RecvFlags::DONTWAIT) {
            Ok((count, _)) => matches!(self.role, Role::Receive(_)) && count > 0,
            Err(errno) => errno == rustix::io::Errno::AGAIN,
        }
    }
}
