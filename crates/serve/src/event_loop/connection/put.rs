//! `PUT`: a request's body becomes a file.
//!
//! First what is there now is looked at (preconditions), then a helper begins a file aside, then the body is taken into it, then a
//! helper puts it into its place; only then is the client told.

use super::{Connection, Next, State, end_of};
use crate::event_loop::context::Context;
use crate::event_loop::helper::Question;
use crate::event_loop::receiving::{Progress, Receiving};
use crate::log::Logged;
use haul_http::request::{BodyLength, Request};
use haul_http::status::Status;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Instant;

/// A request whose body becomes a file, and what its response will need.
#[derive(Debug)]
pub(super) struct Putting {
    minor_version: u8,
    keeps_alive: bool,
    only_new: bool,
    target: String,
    /// Of the request's head, for the log.
    head: Vec<u8>,
    started: Instant,
}

impl Putting {
    /// What was kept of its target may be another file by now.
    pub(super) fn forget(&self, context: &mut Context) {
        context.cache.remove(&self.target);
    }

    /// For the log.
    pub(super) fn logged(
        &self,
        peer: Option<SocketAddr>,
        status: Status,
        body_bytes: u64,
    ) -> Logged {
        Logged::new(peer, &self.head, status, body_bytes, self.started)
    }
}

impl Connection {
    /// Takes up a file that is to be put here, as far as that goes before its body.
    pub(super) fn begin_put(
        &mut self,
        request: &Request<'_>,
        head: &[u8],
        started: Instant,
        context: &mut Context,
    ) -> Option<Next> {
        let refused = match self.asked.as_mut().and_then(|asked| asked.begun.take()) {
            None => {
                let Some(found) = self.find(request.target, context) else {
                    return Some(self.ask(Question::of(request), started));
                };
                let Some(refused) = context.answering().refuse_put(request, &found) else {
                    return Some(self.ask(Question::Begin(request.target.to_owned()), started));
                };
                refused
            }
            Some(Err(status)) => context.answering().refuse(request, status),
            Some(Ok(upload)) => {
                let body = request.body.unwrap_or(BodyLength::Bytes(0));
                let bytes_max = context.service.put_bytes_max.unwrap_or(0);
                let Ok(receiving) = Receiving::new(*upload, &self.stream, body, bytes_max) else {
                    return Some(Next::Close);
                };
                if request.expects_continue {
                    // A socket without room for these few bytes has bigger troubles; the client goes on after a while anyway.
                    self.stream.send(&[IoSlice::new(b"HTTP/1.1 100 Continue\r\n\r\n")], false);
                }
                let putting = Putting {
                    minor_version: request.minor_version,
                    keeps_alive: request.keeps_alive,
                    only_new: request.fields.if_none_match.is_any(),
                    target: request.target.to_owned(),
                    head: head.to_vec(),
                    started,
                };
                self.state = State::Receiving(Box::new(receiving), Box::new(putting));
                return None;
            }
        };
        let logged = context
            .log
            .is_on()
            .then(|| Logged::new(self.peer, head, refused.status, refused.body.len(), started));
        self.respond(refused, logged, started, context);
        None
    }

    /// Takes more of a body.
    pub(super) fn receive(&mut self, context: &mut Context) -> Option<Next> {
        let State::Receiving(receiving, _) = &mut self.state else { return None };
        let progress = receiving.go_on(&mut self.stream, &mut self.input);
        let status = match progress {
            Progress::Blocked => {
                return Some(Next::Event(end_of(
                    context.clock.seconds(),
                    context.limits.send_timeout,
                )));
            }
            Progress::Turn => return Some(Next::Turn),
            Progress::Broken => return Some(Next::Close),
            Progress::Refused(status) => Some(status),
            Progress::Done => None,
        };
        // Whatever came after the body has left no event behind.
        self.is_readable = true;
        let State::Receiving(receiving, mut putting) =
            std::mem::replace(&mut self.state, State::Reading)
        else {
            return None;
        };
        if let Some(status) = status {
            putting.keeps_alive = false;
            self.state = State::Finished(putting, status);
            return None;
        }
        let question = Question::Finish {
            upload: Box::new(receiving.into_upload()),
            only_new: putting.only_new,
        };
        self.state = State::Finishing(putting);
        Some(Next::Disk(question))
    }

    /// The rest of a body has not come in its time.
    pub(super) fn give_up_body(&mut self, context: &mut Context) -> Next {
        if let State::Receiving(_, mut putting) = std::mem::replace(&mut self.state, State::Reading)
        {
            putting.keeps_alive = false;
            self.state = State::Finished(putting, Status::REQUEST_TIMEOUT);
        }
        self.drive(context)
    }

    /// Says what has become of a file that was put here.
    pub(super) fn answer_put(&mut self, context: &mut Context) {
        let State::Finished(putting, status) = std::mem::replace(&mut self.state, State::Reading)
        else {
            return;
        };
        putting.forget(context);
        let keeps_alive = putting.keeps_alive && !context.is_draining;
        let answer = context.answering().put(status, putting.minor_version, keeps_alive);
        let logged =
            context.log.is_on().then(|| putting.logged(self.peer, status, answer.body.len()));
        self.respond(answer, logged, putting.started, context);
    }
}
