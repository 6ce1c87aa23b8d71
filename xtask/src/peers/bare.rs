//! About the least that a program can do for a response with epoll: it receives, and sends what was made ready before. It
//! understands nothing, never looks at a file again, knows no limits, and closes a connection at the first thing that it did not
//! expect. What a server costs beyond it is that server's doing.

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

/// Files of up to this size go from memory, with their head; those of other servers that have such a limit are about as large.
const FROM_MEMORY_BYTES_MAX: u64 = 16 << 10;
/// Beyond this the kernel is to hold partial packets back.
const UNCORKED_BYTES_MAX: u64 = 256 << 10;
/// What is sent of a file in one call.
const CALL_BYTES: u64 = 2 << 20;
const PAGE_BYTES: u64 = 4096;
const EVENTS_MAX: usize = 128;
const REQUEST_BYTES_MAX: usize = 4 << 10;
const LISTENER: u64 = u64::MAX;

/// What is answered whenever a file is asked for.
struct Response {
    /// The head, and the body if it is small.
    ready: Vec<u8>,
    /// What follows, and how long it is.
    file: Option<(File, u64)>,
}

type Responses = HashMap<Vec<u8>, Rc<Response>>;

struct Connection {
    socket: OwnedFd,
    is_corked: bool,
    /// What it is being sent, and how far that has come.
    sending: Option<Sending>,
}

struct Sending {
    response: Rc<Response>,
    of_ready: usize,
    of_file: u64,
}

/// Serves the files that lie in `root` now, until it is killed.
pub fn serve(root: &Path, listen: SocketAddr) -> io::Result<()> {
    let responses = make_ready(root)?;
    let listener = TcpListener::bind(listen)?;
    rustix::net::listen(&listener, 4096)?;
    listener.set_nonblocking(true)?;
    // Accepted sockets have what the listening one has.
    sockopt::set_tcp_nodelay(&listener, true)?;
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    let mut connections: Vec<Option<Connection>> = Vec::new();
    let mut vacant = Vec::new();
    let mut events = Vec::with_capacity(EVENTS_MAX);
    let mut request = Vec::with_capacity(REQUEST_BYTES_MAX);
    loop {
        events.clear();
        rustix::io::retry_on_intr(|| epoll::wait(&epoll, spare_capacity(&mut events), None))?;
        for event in &events {
            let index = event.data.u64() as usize;
            let Some(place) = connections.get_mut(index) else { continue };
            let Some(connection) = place else { continue };
            let flags = event.flags;
            if flags.contains(EventFlags::IN) && !connection.hear(&mut request, &responses) {
                *place = None;
                vacant.push(index);
            }
        }
        for event in &events {
            if event.data.u64() == LISTENER {
                while let Ok(socket) =
                    accept_with(&listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
                {
                    let index = vacant.pop().unwrap_or(connections.len());
                    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
                    epoll::add(&epoll, &socket, EventData::new_u64(index as u64), flags)?;
                    let connection = Some(Connection { socket, is_corked: false, sending: None });
                    match connections.get_mut(index) {
                        Some(place) => *place = connection,
                        None => connections.push(connection),
                    }
                }
                continue;
            }
            let index = event.data.u64() as usize;
            let Some(place) = connections.get_mut(index) else { continue };
            if place.as_mut().is_some_and(|connection| connection.send().is_err()) {
                *place = None;
                vacant.push(index);
            }
        }
    }
}

/// A response for each file, by its name.
fn make_ready(root: &Path) -> io::Result<Responses> {
    let mut responses = HashMap::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        let bytes = entry.metadata()?.len();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\nContent-Type: application/octet-stream\r\n\
             Date: Sun, 06 Nov 1994 08:49:37 GMT\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
             ETag: \"0000000000-0000000000\"\r\nAccept-Ranges: bytes\r\n\r\n"
        );
        let mut ready = head.into_bytes();
        let mut file = None;
        if bytes <= FROM_MEMORY_BYTES_MAX {
            ready.extend(fs::read(entry.path())?);
        } else {
            file = Some((File::open(entry.path())?, bytes));
        }
        responses.insert(entry.file_name().into_encoded_bytes(), Rc::new(Response { ready, file }));
    }
    Ok(responses)
}

impl Connection {
    /// Takes a request; false where the connection is over.
    fn hear(&mut self, request: &mut Vec<u8>, responses: &Responses) -> bool {
        if self.sending.is_some() {
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
        self.sending = response.map(|response| Sending {
            response: Rc::clone(response),
            of_ready: 0,
            of_file: 0,
        });
        self.sending.is_some()
    }

    /// Sends until the socket takes no more or all has gone.
    fn send(&mut self) -> rustix::io::Result<()> {
        let Some(sending) = &mut self.sending else { return Ok(()) };
        let Response { ready, file } = &*sending.response;
        let more = if file.is_some() { SendFlags::MORE } else { SendFlags::empty() };
        while sending.of_ready < ready.len() {
            match send(&self.socket, &ready[sending.of_ready..], SendFlags::NOSIGNAL | more) {
                Ok(count) => sending.of_ready += count,
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
            while sending.of_file < *bytes {
                // A call ends where a page does, or every page from there on goes in two halves.
                let end = (sending.of_file + CALL_BYTES) & !(PAGE_BYTES - 1);
                let left = (end.min(*bytes) - sending.of_file) as usize;
                match rustix::fs::sendfile(&self.socket, file, Some(&mut sending.of_file), left) {
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
        self.sending = None;
        Ok(())
    }
}
