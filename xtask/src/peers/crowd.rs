//! Clients that hold a server up: half of them send the head of a request byte by byte, half of them take a large body a few bytes
//! at a time.

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

/// Each of them does something once in this time.
const ROUND: Duration = Duration::from_secs(5);
/// How often some of them have their turn.
const STEP: Duration = Duration::from_millis(50);
/// What a slow reader's kernel takes before the program does (the smallest that Linux allows is about this).
const RECEIVE_BUFFER_BYTES: usize = 4096;

/// How long a server may take to accept one of them.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// The clients, until this is dropped.
#[derive(Debug)]
pub struct Crowd {
    is_over: Arc<AtomicBool>,
    /// Those whom the server has turned away.
    turned_away: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// One of them, with what it does.
struct Client {
    socket: OwnedFd,
    reads: bool,
}

impl Crowd {
    /// Connects so many of each kind, from the calling thread's host; the readers want `file`.
    pub fn gather(server: SocketAddr, file: &str, of_each: usize) -> Result<Self, String> {
        let failed =
            |error: rustix::io::Errno| format!("connecting a slow client to {server}: {error}");
        let whole = format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\n\r\n");
        let begun = format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\nX: ");
        let mut clients = Vec::with_capacity(2 * of_each);
        for at in 0..2 * of_each {
            let reads = at % 2 == 0;
            let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            // Programs that are started meanwhile do not get them.
            let flags = SocketFlags::CLOEXEC;
            let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
            // A server that accepts nobody any more holds nobody up here.
            set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_MAX)).map_err(failed)?;
            set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER_BYTES).map_err(failed)?;
            rustix::net::connect(&socket, &server).map_err(failed)?;
            let words = if reads { &whole } else { &begun };
            send(&socket, words.as_bytes(), SendFlags::NOSIGNAL).map_err(failed)?;
            clients.push(Client { socket, reads });
        }
        let (is_over, turned_away) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (over, away) = (Arc::clone(&is_over), Arc::clone(&turned_away));
        let work = move || go_on(clients, &over, &away);
        let thread = std::thread::Builder::new().name("crowd".into()).spawn(work);
        let thread = Some(thread.map_err(|error| error.to_string())?);
        Ok(Self { is_over, turned_away, thread })
    }

    /// How many the server has turned away so far.
    pub fn turned_away(&self) -> usize {
        self.turned_away.load(Relaxed)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}

/// Gives each its turn, over and over.
fn go_on(mut clients: Vec<Client>, is_over: &AtomicBool, turned_away: &AtomicUsize) {
    let steps = (ROUND.as_millis() / STEP.as_millis()) as usize;
    let mut step = 0;
    while !is_over.load(Relaxed) {
        let next = Instant::now() + STEP;
        let before = clients.len();
        let mut at = 0;
        clients.retain(|client| {
            at += 1;
            at % steps != step || client.is_still_served()
        });
        turned_away.fetch_add(before - clients.len(), Relaxed);
        step = (step + 1) % steps;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

impl Client {
    /// Says or takes a little; whether the server goes along.
    fn is_still_served(&self) -> bool {
        let mut some = [0; 512];
        if !self.reads
            && send(&self.socket, b"a", SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err()
        {
            return false;
        }
        match recv(&self.socket, &mut some, RecvFlags::DONTWAIT) {
            Ok((count, _)) => self.reads && count > 0,
            Err(errno) => errno == rustix::io::Errno::AGAIN,
        }
    }
}
