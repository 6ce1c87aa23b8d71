//! Receives requests and prepares their responses.

use super::{Connection, ConnectionAction, Login, PendingRequest, State, Timeout, deadline};
use crate::files::service::LookupResult;
use crate::handler::FileHandler;
use crate::jobs::{FileJob, PasswordCheck};
use crate::log::{LogEntry, first_line};
use crate::response::builder::Response;
use haul_http::credentials::Credentials;
use haul_http::request::{self, Method, Parsed, Request};
use haul_http::status::Status;
use haul_server::admission::network::Network;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Connection {
    /// Receives what an idle connection's client has sent, to be parsed later.
    pub fn receive_early(&mut self, handler: &mut FileHandler) {
        // TLS bytes may be half of a handshake, which is answered at once; the rest of a head can
        // wait.
        if !self.stream.is_tls() && self.is_idle() && self.receive(handler).is_err() {
            self.state.end();
        }
    }

    /// Prepares the response to what was received ahead; returns what it needs before.
    pub fn prepare(&mut self, handler: &mut FileHandler) -> Option<ConnectionAction> {
        if !matches!(self.state, State::Reading) {
            return None;
        }
        let next = self.parse(handler);
        self.send_head_of_file(handler);
        next
    }

    /// Parses a request and prepares its response, receiving first if there is none. `None` if the
    /// state has changed or something was received.
    pub(super) fn read(&mut self, handler: &mut FileHandler) -> Option<ConnectionAction> {
        let next = self.parse(handler);
        if next.is_some() || !matches!(self.state, State::Reading) {
            return next;
        }
        self.receive_more(handler)
    }

    /// Prepares the response to the request at the beginning of the input, if its head is complete.
    fn parse(&mut self, handler: &mut FileHandler) -> Option<ConnectionAction> {
        if self.input.is_empty() {
            return None;
        }
        let mut input = std::mem::take(&mut self.input);
        let mut consumed = 0;
        let mut next = None;
        match request::parse(&input, handler.fixed.limits.head_bytes_max) {
            Parsed::Partial => {}
            Parsed::Whole(request, head_bytes) => {
                next = self.answer(request, handler);
                // A request that waits for an offload thread is parsed again after the reply.
                if !matches!(next, Some(ConnectionAction::Offload(_))) {
                    consumed = head_bytes;
                    self.pending = None;
                }
            }
            Parsed::Refused(status) => {
                self.refuse_malformed(&input, status, handler);
                consumed = input.len();
            }
        }
        if consumed < input.len() {
            input.drain(..consumed);
            self.input = input;
        }
        next
    }

    /// Receives more of a request. `None` if something was received or the state has changed.
    fn receive_more(&mut self, handler: &mut FileHandler) -> Option<ConnectionAction> {
        let has_begun = !self.input.is_empty();
        let is_dismissed = !has_begun && !self.is_readable && self.is_dismissed(handler);
        if self.is_at_end || is_dismissed {
            self.begin_close(false, handler);
            return None;
        }
        if !self.is_readable {
            return Some(self.wait_for_input(has_begun, handler));
        }
        match self.receive(handler) {
            Ok(()) => None,
            // There may be more after the other connections had their turn.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                Some(ConnectionAction::Yield)
            }
            // Plain HTTP on a TLS port: the request is not even parsed.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                self.refuse_malformed(&[], Status::TLS_REQUIRED, handler);
                None
            }
            Err(_) => Some(ConnectionAction::Close),
        }
    }

    /// Receives into the input, and records what the result says about the socket.
    fn receive(&mut self, handler: &mut FileHandler) -> io::Result<()> {
        let buffer = &mut handler.scratch.input;
        buffer.clear();
        // A complete head always fits: a longer one has been refused.
        buffer.extend_from_slice(&self.input);
        let room = buffer.capacity() - buffer.len();
        match self.stream.receive(buffer) {
            Ok(0) => self.is_at_end = true,
            // More data is a new event, except for data that was there already.
            Ok(count) => {
                handler.epoch.advance();
                self.is_readable =
                    self.stream.may_have_more(count, room) || self.has_more_than_read;
                self.input.extend_from_slice(&buffer[self.input.len()..]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_readable = false,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Waits for input, up to the head's or the idle timeout.
    fn wait_for_input(&mut self, has_begun: bool, handler: &FileHandler) -> ConnectionAction {
        // Thousands of connections may wait at once.
        self.input.shrink_to_fit();
        let now = handler.clock.seconds();
        if let (true, Timeout::Idle(_)) = (has_begun, self.timeout) {
            self.timeout = Timeout::Head(now);
        }
        let limits = &handler.fixed.limits;
        ConnectionAction::WaitUntil(match self.timeout {
            // A client that has just connected is about to send a request.
            Timeout::Head(since) if handler.is_draining() && !has_begun => {
                deadline(since, Duration::from_secs(1))
            }
            Timeout::Head(since) => deadline(since, limits.head_timeout),
            Timeout::Idle(since) => match handler.drain_began_at_seconds {
                Some(began) => deadline(since.max(began), Duration::from_secs(1)),
                None => deadline(since, limits.idle_timeout),
            },
        })
    }

    /// Whether an idle connection closes because the service drains.
    ///
    /// One whose latest response ended less than two seconds before does not yet: its next request
    /// may be on the way, and is answered with `Connection: close`. For that the drain must last
    /// longer than the deadline, which is up to three seconds late.
    fn is_dismissed(&self, handler: &FileHandler) -> bool {
        const GRACE: Duration = Duration::from_secs(3);
        match (handler.drain_began_at_seconds, self.timeout) {
            (Some(began), Timeout::Idle(since)) => {
                began.saturating_sub(since) > 1 || handler.fixed.limits.drain_timeout < GRACE
            }
            _ => false,
        }
    }

    /// Prepares the response to a request; `None` if the state has changed.
    fn answer(
        &mut self,
        mut request: Request<'_>,
        handler: &mut FileHandler,
    ) -> Option<ConnectionAction> {
        // A request that was offloaded is parsed again, and was received earlier.
        let received =
            self.pending.as_ref().map_or(handler.clock.turn_started(), |pending| pending.received);
        request.keeps_alive &= !handler.is_draining() && !self.stream.is_key_worn();
        let response = if let Some(response) = handler.response().without_file(&request) {
            response
        } else if let Some(refused) = self.authorize(&request, handler) {
            match refused {
                Ok(status) => handler.response().refuse(&request, status),
                Err(job) => return Some(self.offload(job, received, handler)),
            }
        } else if request.method == Method::Put {
            return self.begin_upload(&request, received, handler);
        } else {
            let job = match self.find(request.target, handler) {
                Some(LookupResult::Directory(directory)) => {
                    FileJob::list(&request, directory, self.network(), handler)
                }
                Some(found) => {
                    let response = handler.response().with_found(&request, &found);
                    self.respond_to(&request, response, received, handler);
                    return None;
                }
                None => FileJob::find(&request, handler),
            };
            return Some(self.offload(job, received, handler));
        };
        self.respond_to(&request, response, received, handler);
        None
    }

    /// Has an offload thread work on the request, which is parsed again after the reply.
    pub(super) fn offload(
        &mut self,
        job: FileJob,
        received: Instant,
        handler: &mut FileHandler,
    ) -> ConnectionAction {
        if self.pending.is_none() {
            let pending = PendingRequest { received, found: None, upload: None, login: None };
            self.pending = Some(Box::new(pending));
        }
        self.state.await_job();
        handler.accounting.counters.disk_waits.add(u64::from(job.is_for_disk()));
        ConnectionAction::Offload(job)
    }

    /// Authorizes a request (RFC 7617). `None`: it is allowed. Otherwise the status that refuses
    /// it, or the job that verifies its password.
    fn authorize(
        &mut self,
        request: &Request<'_>,
        handler: &mut FileHandler,
    ) -> Option<Result<Status, FileJob>> {
        let passwords = &Arc::clone(handler.secrets().passwords.as_ref()?);
        let login: Option<Login> = self.pending.as_mut().and_then(|pending| pending.login.take());
        let value = request.fields.authorization.unwrap_or(b"");
        let field = blake3::hash(value);
        if handler.known_logins.get(&field).is_some() {
            return None;
        }
        if passwords.knows(&field) {
            handler.known_logins.put(field, ());
            return None;
        }
        let Some(credentials) = Credentials::parse(value) else {
            return Some(Ok(Status::UNAUTHORIZED));
        };
        match login {
            Some(Err(status)) => Some(Ok(status)),
            Some(Ok((by, accepted))) if Arc::ptr_eq(&by, passwords) => {
                if accepted {
                    handler.known_logins.put(field, ());
                    return None;
                }
                Some(Ok(Status::UNAUTHORIZED))
            }
            // Not verified yet, or by a password file that has been replaced.
            _ => {
                let network = self.network();
                let passwords = Arc::clone(passwords);
                let check = PasswordCheck { passwords, credentials, field, network };
                Some(Err(FileJob::VerifyPassword(check)))
            }
        }
    }

    fn network(&self) -> Option<Network> {
        self.peer.map(|peer| peer.ip().into())
    }

    /// Finds what a target stands for; `None` if the lookup would block.
    pub(super) fn find(&mut self, target: &str, handler: &mut FileHandler) -> Option<LookupResult> {
        let found = self.pending.as_mut().and_then(|pending| pending.found.take());
        let Some(found) = found else { return handler.find(target) };
        handler.cache_found(target, &found);
        Some(found)
    }

    /// Refuses bytes that are not a request.
    pub(super) fn refuse_malformed(
        &mut self,
        bytes: &[u8],
        status: Status,
        handler: &mut FileHandler,
    ) {
        let response = handler.response().refuse_malformed(status);
        let received = handler.clock.turn_started();
        let entry = handler.accounting.log.is_on().then(|| {
            let line = first_line(bytes);
            LogEntry::malformed(self.peer, line, status, response.body.len(), received)
        });
        self.respond(response, entry, received, handler);
    }

    /// Makes the response to `request` ready to be sent.
    pub(super) fn respond_to(
        &mut self,
        request: &Request<'_>,
        response: Response,
        received: Instant,
        handler: &mut FileHandler,
    ) {
        let entry = handler.accounting.log.is_on().then(|| {
            let bytes = response.body.len();
            LogEntry::new(self.peer, request, response.status, bytes, received)
        });
        self.respond(response, entry, received, handler);
    }

    /// Makes a response ready to be sent; its head is in the handler's scratch memory.
    pub(super) fn respond(
        &mut self,
        response: Response,
        entry: Option<LogEntry>,
        received: Instant,
        handler: &mut FileHandler,
    ) {
        handler.accounting.counters.responded(response.status);
        self.state.respond(handler.writer(response, entry, received));
    }
}
