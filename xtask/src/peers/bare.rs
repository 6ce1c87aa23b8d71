//! A minimal HTTP server with epoll: a lower bound of the cost of a file server.
//!
//! It receives requests and sends responses that were prepared at the start. It does not parse
//! header fields, does not check whether a file has changed, does not have limits or timeouts, and
//! closes a connection on any unexpected input. The cost that another server adds to this lower
//! bound is due to that server.

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send, sockopt};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

/// Files of up to this size are sent from memory, together with their head. Other servers that have
/// such a limit have about the same.
const BUFFERED_FILE_BYTES_MAX: u64 = 16 << 10;
/// Responses with files above this size are corked (`TCP_CORK`).
const UNCORKED_BYTES_MAX: u64 = 256 << 10;
/// Maximum bytes of a file that one `sendfile` call sends.
const CALL_BYTES_MAX: u64 = 2 << 20;
const PAGE_BYTES: u64 = 4096;
const EVENTS_MAX: usize = 128;
const REQUEST_BYTES_MAX: usize = 4 << 10;
const LISTENER: u64 = u64::MAX;

/// Prepared response to the request for a file.
struct Response {
    /// The head, and the body if it is small.
    buffered: Vec<u8>,
    /// A large body: the file and its length in bytes.
    file: Option<(File, u64)>,
}

type Responses = HashMap<Vec<u8>, Rc<Response>>;

struct Connection {
    socket: OwnedFd,
    is_corked: bool,
    /// Response in progress.
    progress: Option<SendProgress>,
}

/// A response, and how many bytes of its two parts were sent.
struct SendProgress {
    response: Rc<Response>,
    buffered_sent: usize,
    file_sent: u64,
}

/// Serves the files that are in `root` at the start, until the process is killed.
pub fn serve(root: &Path, listen: SocketAddr) -> io::Result<()> {
    let responses = prepare_responses(root)?;
    let listener = TcpListener::bind(listen)?;
    rustix::net::listen(&listener, 4096)?;
    listener.set_nonblocking(true)?;
    // Accepted sockets inherit the option from the listening socket.
    sockopt::set_tcp_nodelay(&listener, true)?;
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    let mut connections: Vec<Option<Connection>> = Vec::new();
    let mut free_slots = Vec::new();
    let mut events = Vec::with_capacity(EVENTS_MAX);
    let mut request = Vec::with_capacity(REQUEST_BYTES_MAX);
    loop {
        events.clear();
        rustix::io::retry_on_intr(|| epoll::wait(&epoll, spare_capacity(&mut events), None))?;
        for event in &events {
            let index = event.data.u64() as usize;
            let Some(slot) = connections.get_mut(index) else { continue };
            let Some(connection) = slot else { continue };
            let flags = event.flags;
            if flags.contains(EventFlags::IN) && !connection.receive(&mut request, &responses) {
                *slot = None;
                free_slots.push(index);
            }
        }
        for event in &events {
            if event.data.u64() == LISTENER {
                while let Ok(socket) =
                    accept_with(&listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
                {
                    let index = free_slots.pop().unwrap_or(connections.len());
                    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
                    epoll::add(&epoll, &socket, EventData::new_u64(index as u64), flags)?;
                    let connection = Some(Connection { socket, is_corked: false, progress: None });
                    match connections.get_mut(index) {
                        Some(slot) => *slot = connection,
                        None => connections.push(connection),
                    }
                }
                continue;
            }
            let index = event.data.u64() as usize;
            let Some(slot) = connections.get_mut(index) else { continue };
            if slot.as_mut().is_some_and(|connection| connection.send().is_err()) {
                *slot = None;
                free_slots.push(index);
            }
        }
    }
}

/// Prepares the responses for the files in `root`, keyed by file name.
fn prepare_responses(root: &Path) -> io::Result<Responses> {
    let mut responses = HashMap::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        let bytes = entry.metadata()?.len();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\n\
             Content-Type: application/octet-stream\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
             Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
             ETag: \"0000000000-0000000000\"\r\nAccept-Ranges: bytes\r\n\r\n"
        );
        let mut buffered = head.into_bytes();
        let mut file = None;
        if bytes <= BUFFERED_FILE_BYTES_MAX {
            buffered.extend(fs::read(entry.path())?);
        } else {
            file = Some((File::open(entry.path())?, bytes));
        }
        let response = Rc::new(Response { buffered, file });
        responses.insert(entry.file_name().into_encoded_bytes(), response);
    }
    Ok(responses)
}

impl Connection {
    /// Receives a request. Returns false if the connection must be closed.
    fn receive(&mut self, request: &mut Vec<u8>, responses: &Responses) -> bool {
        if self.progress.is_some() {
            return false;
        }
        request.clear();
        match recv(&self.socket, spare_capacity(request), RecvFlags::empty()) {
            Ok(_) => {}
            Err(Errno::AGAIN) => return true,
            Err(_) => return false,
        }
        let name =
            request.strip_prefix(b"GET /").and_then(|rest| rest.split(|&byte| byte == b' ').next());
        let response =
            name.filter(|_| request.ends_with(b"\r\n\r\n")).and_then(|name| responses.get(name));
        self.progress = response.map(|response| SendProgress {
            response: Rc::clone(response),
            buffered_sent: 0,
            file_sent: 0,
        });
        self.progress.is_some()
    }

    /// Sends until the response is complete or the socket's send buffer is full.
    fn send(&mut self) -> rustix::io::Result<()> {
        let Some(progress) = &mut self.progress else { return Ok(()) };
        let Response { buffered, file } = &*progress.response;
        let more = if file.is_some() { SendFlags::MORE } else { SendFlags::empty() };
        while progress.buffered_sent < buffered.len() {
            let rest = &buffered[progress.buffered_sent..];
            match send(&self.socket, rest, SendFlags::NOSIGNAL | more) {
                Ok(count) => progress.buffered_sent += count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
        if let Some((file, bytes)) = file {
            let is_large = *bytes > UNCORKED_BYTES_MAX;
            if is_large && !self.is_corked {
                sockopt::set_tcp_cork(&self.socket, true)?;
                self.is_corked = true;
            }
            while progress.file_sent < *bytes {
                // Each call ends at a page boundary, so that no later page is sent in two parts.
                let end = (progress.file_sent + CALL_BYTES_MAX) & !(PAGE_BYTES - 1);
                let left = (end.min(*bytes) - progress.file_sent) as usize;
                let offset = Some(&mut progress.file_sent);
                match rustix::fs::sendfile(&self.socket, file, offset, left) {
                    Ok(0) => return Err(Errno::IO),
                    Ok(_) => {}
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(errno) => return Err(errno),
                }
            }
            if is_large {
                sockopt::set_tcp_cork(&self.socket, false)?;
                self.is_corked = false;
            }
        }
        self.progress = None;
        Ok(())
    }
}
