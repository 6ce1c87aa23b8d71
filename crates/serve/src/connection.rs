//! One connection: requests in, responses out, one after the other.
//!
//! A connection never blocks: [`Connection::drive`] goes as far as it can and returns its next
//! need. A response is prepared before it is sent ([`Connection::prepare`]), so that the responses
//! of many connections leave back to back. An idle connection does not hold a buffer.
//!
//! The states and all transitions are in [`state`]; requests are handled in `request`, responses in
//! `respond`, `PUT` in `upload`.

mod pending_upload;
mod request;
mod respond;
mod state;
mod upload;

use self::state::State;
use crate::files::service::LookupResult;
use crate::handler::FileHandler;
use crate::jobs::{FileJob, FileReply};
use crate::passwords::Passwords;
use crate::response::body::Piece;
use crate::upload_file::UploadFile;
use haul_http::status::Status;
use haul_server::admission::eviction::Activity;
use haul_server::event_loop::{Action, NEVER};
use haul_server::listener::Accepted;
use haul_server::stream::Stream;
use haul_server::{Sent, Transport};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// File bytes that one connection sends before others have their turn.
const TURN_BYTES: u64 = 2 << 20;
/// Requests of one connection that are answered before others have their turn.
const TURN_REQUESTS: usize = 64;
/// Bytes that a client may send after the last response; see [`State::Lingering`].
const LINGER_BYTES_MAX: usize = 1 << 20;
/// The time in which it may send them.
const LINGER_TIMEOUT: Duration = Duration::from_secs(5);

/// The event loop's next step for a connection: wait, yield, run a job or close.
pub type ConnectionAction = Action<FileJob>;

/// A connection of an HTTP client.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    /// `None` for a Unix socket.
    peer: Option<SocketAddr>,
    state: State,
    /// Received bytes that are not answered yet.
    input: Vec<u8>,
    /// The replies of offload threads about the request at the beginning of `input`.
    pending: Option<Box<PendingRequest>>,
    /// Whether the socket may have more to read.
    is_readable: bool,
    /// Whether a short read may not be the last: the end is still to come and makes no event of its
    /// own, or the client sends urgent data, before which each read stops.
    has_more_than_read: bool,
    /// Whether the client has closed its direction.
    is_at_end: bool,
    timeout: Timeout,
}

/// A request that offload threads work on, and their replies so far.
#[derive(Debug)]
struct PendingRequest {
    received: Instant,
    found: Option<LookupResult>,
    /// The temporary file for the body, or the reason why there is none.
    upload: Option<Result<Box<UploadFile>, Status>>,
    login: Option<Login>,
}

/// The result of verifying a password, with the password file it was verified by; or why there is
/// none.
type Login = Result<(Arc<Passwords>, bool), Status>;

/// The timeout of a connection that waits for a request, with its start by the clock in seconds.
#[derive(Debug, Clone, Copy)]
enum Timeout {
    /// `head_timeout`: for the rest of a head, or for the first one.
    Head(u32),
    /// `idle_timeout`: between two requests.
    Idle(u32),
}

impl Connection {
    /// A connection that was just accepted.
    pub fn new(accepted: Accepted, handler: &mut FileHandler) -> io::Result<Self> {
        let Accepted { socket, peer, is_tls, .. } = accepted;
        let tls = handler.secrets().tls.clone().filter(|_| is_tls);
        let fixed = &handler.fixed;
        Ok(Self {
            stream: Stream::accept(socket, tls.as_ref(), fixed.ktls, &fixed.send_settings)?,
            peer,
            state: State::Reading,
            input: Vec::new(),
            pending: None,
            is_readable: true,
            has_more_than_read: false,
            is_at_end: false,
            timeout: Timeout::Head(handler.clock.seconds()),
        })
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Records that the socket is readable. `is_end_or_urgent`: a short read is not the last.
    pub fn set_readable(&mut self, is_end_or_urgent: bool) {
        self.is_readable = true;
        self.has_more_than_read |= is_end_or_urgent;
    }

    /// Whether it waits for a request of which nothing has arrived.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Reading)
            && self.input.is_empty()
            && !self.stream.is_handshaking()
    }

    /// Its activity, by which the event loop decides what to close to make room.
    pub fn activity(&self) -> Activity {
        match &self.state {
            State::Reading if self.is_idle() => Activity::Idle,
            State::Reading => {
                let (Timeout::Head(since) | Timeout::Idle(since)) = self.timeout;
                Activity::Beginning(since)
            }
            State::Responding(writer) => Activity::Transferring(writer.progress.at_seconds()),
            State::Uploading(_, upload) => Activity::Transferring(upload.progress.at_seconds()),
            // The client has its response, or never took it.
            State::Closing { .. } | State::Lingering { .. } => Activity::Transferring(0),
            State::AwaitingJob
            | State::AwaitingPages(_)
            | State::Committing(_)
            | State::Committed(..)
            | State::Closed => Activity::Working,
        }
    }

    /// Makes the kernel discard what the client has not received of a response: it would stay in
    /// memory, and the client could take a part for the whole.
    pub fn discard_unsent(&mut self) {
        if matches!(self.state, State::Responding(_)) {
            self.stream.reset_on_close();
        }
    }

    /// Whether it waits for an offload thread.
    pub fn is_offloaded(&self) -> bool {
        matches!(self.state, State::AwaitingJob | State::AwaitingPages(_) | State::Committing(_))
    }

    /// Takes an offload thread's reply. [`Connection::drive`] follows.
    pub fn complete(&mut self, reply: FileReply) {
        match &self.state {
            State::Committing(_) => self.state.finish_commit(match reply {
                FileReply::Committed(status) => status,
                _ => Status::INTERNAL_ERROR,
            }),
            State::AwaitingJob => {
                if let Some(pending) = &mut self.pending {
                    pending.record(reply);
                }
                self.state.finish_job();
            }
            _ => self.state.finish_job(),
        }
    }

    /// Whether a response from memory is ready.
    pub fn has_small_response(&self) -> bool {
        match &self.state {
            State::Responding(writer) => {
                writer.body.is_last() && !matches!(writer.body.next(), Some(Piece::File(..)))
            }
            _ => false,
        }
    }

    /// Sends the segment that [`Connection::drive`] held back.
    pub fn flush(&mut self, handler: &mut FileHandler) {
        if self.stream.is_held() {
            // This is the part of the bytes' cost that holding them put off.
            let timer = handler.accounting.start_sampled_timer();
            self.stream.flush_held();
            let cost = timer.and_then(|timer| timer.elapsed());
            handler.accounting.counters.sent(Transport::Memory, 0, cost);
        }
    }

    /// The deadline has passed.
    pub fn expire(&mut self, handler: &mut FileHandler) -> ConnectionAction {
        match self.state {
            State::Uploading(..) => {
                self.state.reject_upload(Status::REQUEST_TIMEOUT);
                self.drive(handler)
            }
            State::Reading if !self.input.is_empty() => {
                let unread = std::mem::take(&mut self.input);
                self.refuse_malformed(&unread, Status::REQUEST_TIMEOUT, handler);
                self.drive(handler)
            }
            // A TLS connection ends with a close_notify alert.
            State::Reading => {
                self.begin_close(false, handler);
                self.drive(handler)
            }
            _ => {
                self.discard_unsent();
                ConnectionAction::Close
            }
        }
    }

    /// Accounts for the connection, and logs a response that was not sent completely or a body that
    /// did not arrive. To be called last.
    pub fn close(mut self, handler: &mut FileHandler) {
        // Closing a socket with unread bytes discards what is held.
        self.stream.flush_held();
        handler.accounting.counters.fallbacks.add(self.stream.fallbacks());
        if let State::Responding(writer) | State::AwaitingPages(writer) = &mut self.state
            && let Some(mut entry) = writer.log_entry.take()
        {
            entry.cut_short(writer.body.len());
            handler.accounting.log.write(&entry, &handler.clock);
        }
        let unanswered = match &self.state {
            State::Uploading(_, upload) if !handler.is_draining() => {
                Some((upload, Status::BAD_REQUEST))
            }
            // The offload thread is still at work, so the result of a commit is not known.
            State::Uploading(_, upload) | State::Committing(upload) => {
                Some((upload, Status::UNAVAILABLE))
            }
            State::Committed(upload, status) => Some((upload, *status)),
            _ => None,
        };
        if let Some((upload, status)) = unanswered {
            handler.cache.remove(&upload.target);
            if let Some(entry) = upload.log_entry(status, 0) {
                handler.accounting.log.write(&entry, &handler.clock);
            }
        }
    }

    /// Goes as far as it can without blocking.
    pub fn drive(&mut self, handler: &mut FileHandler) -> ConnectionAction {
        if self.stream.flush() == Sent::Broken {
            return ConnectionAction::Close;
        }
        let mut budget_bytes = TURN_BYTES;
        let mut answered = 0;
        loop {
            let next = match &self.state {
                State::Reading if answered == TURN_REQUESTS => Some(ConnectionAction::Yield),
                // Other responses are held at this time, and the next request may be for a file.
                State::Reading
                    if handler.holds
                        && answered > 0
                        && (self.is_readable || !self.input.is_empty()) =>
                {
                    Some(ConnectionAction::Yield)
                }
                State::Reading => self.read(handler),
                State::Responding(_) => {
                    let next = self.send_response(&mut budget_bytes, handler);
                    answered += usize::from(next.is_none());
                    next
                }
                State::AwaitingJob | State::AwaitingPages(_) | State::Committing(_) => {
                    Some(ConnectionAction::WaitUntil(NEVER))
                }
                State::Uploading(..) => self.receive_body(handler),
                State::Committed(..) => {
                    self.answer_upload(handler);
                    None
                }
                State::Closing { .. } => self.send_close(handler),
                State::Lingering { .. } => Some(self.discard_input(handler)),
                State::Closed => Some(ConnectionAction::Close),
            };
            if let Some(next) = next {
                return next;
            }
        }
    }

    /// Begins to close. `lingers`: the client may still be sending.
    fn begin_close(&mut self, lingers: bool, handler: &FileHandler) {
        self.input = Vec::new();
        let until = deadline(handler.clock.seconds(), handler.fixed.limits.send_timeout);
        self.state.close(lingers, until);
    }

    /// Sends `close_notify`; `None` once it is in the socket.
    fn send_close(&mut self, handler: &FileHandler) -> Option<ConnectionAction> {
        let State::Closing { lingers, until } = self.state else { return None };
        match self.stream.send_close_notify() {
            Sent::Blocked => return Some(ConnectionAction::WaitUntil(until)),
            Sent::Broken | Sent::Ended => return Some(ConnectionAction::Close),
            Sent::Bytes(_) if lingers => {
                self.stream.shutdown();
                let until = deadline(handler.clock.seconds(), LINGER_TIMEOUT);
                self.state.linger(LINGER_BYTES_MAX, until);
            }
            Sent::Bytes(_) => self.state.end(),
        }
        None
    }

    /// Discards what the client still sends.
    fn discard_input(&mut self, handler: &mut FileHandler) -> ConnectionAction {
        let State::Lingering { remaining_bytes, until } = &mut self.state else {
            return ConnectionAction::Close;
        };
        let buffer = &mut handler.scratch.input;
        loop {
            buffer.clear();
            match self.stream.receive(buffer) {
                Ok(0) => return ConnectionAction::Close,
                Ok(count) if count > *remaining_bytes => return ConnectionAction::Close,
                Ok(count) => *remaining_bytes -= count,
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && *until > handler.clock.seconds() =>
                {
                    return ConnectionAction::WaitUntil(*until);
                }
                Err(_) => return ConnectionAction::Close,
            }
        }
    }
}

impl PendingRequest {
    fn record(&mut self, reply: FileReply) {
        match reply {
            FileReply::Found(found) => self.found = Some(found),
            FileReply::UploadBegun(upload) => self.upload = Some(upload),
            FileReply::PasswordVerified(passwords, accepted) => {
                self.login = Some(Ok((passwords, accepted)));
            }
            FileReply::Refused => {
                self.login = Some(Err(Status::UNAVAILABLE));
                self.found = Some(LookupResult::Nothing(Status::UNAVAILABLE));
            }
            _ => {
                self.login = Some(Err(Status::INTERNAL_ERROR));
                self.upload = Some(Err(Status::INTERNAL_ERROR));
                self.found = Some(LookupResult::Nothing(Status::INTERNAL_ERROR));
            }
        }
    }
}

/// The second of the clock after which `timeout` from the second `since` is certainly over.
fn deadline(since: u32, timeout: Duration) -> u32 {
    // The second `since` had begun already, hence one more.
    u32::try_from(timeout.as_secs()).unwrap_or(NEVER).saturating_add(since).saturating_add(1)
}
