//! What a client says: requests, one after the other, and what it still sends when nobody listens any more.

use super::{Connection, Next, State, Waits, end_of};
use crate::event_loop::context::Context;
use crate::event_loop::helper::Question;
use crate::http::request::{self, Parsed};
use crate::http::status::Status;
use std::io;
use std::time::Duration;

/// Requests that one connection is answered before others have their turn.
const TURN_REQUESTS: usize = 64;

impl Connection {
    /// Reads requests and answers them as long as the socket takes the answers; `None` where the state has changed.
    pub(super) fn read(&mut self, context: &mut Context, budget_bytes: &mut u64) -> Option<Next> {
        let mut buffer = std::mem::take(&mut context.input);
        buffer.clear();
        buffer.extend_from_slice(&std::mem::take(&mut self.input));
        let mut consumed = 0;
        let next = self.read_into(&mut buffer, &mut consumed, context, budget_bytes);
        if !matches!(self.state, State::Ending { .. } | State::Lingering { .. } | State::Over) {
            self.input.extend_from_slice(&buffer[consumed..]);
        }
        context.input = buffer;
        next
    }

    /// The same, from the loop's buffer; `consumed` says how much of it has been answered.
    fn read_into(
        &mut self,
        buffer: &mut Vec<u8>,
        consumed: &mut usize,
        context: &mut Context,
        budget_bytes: &mut u64,
    ) -> Option<Next> {
        let mut answered = 0;
        loop {
            match request::parse(&buffer[*consumed..], context.limits.head_bytes_max) {
                Parsed::Partial => {}
                Parsed::Whole(..) if answered == TURN_REQUESTS => return Some(Next::Turn),
                Parsed::Whole(request, head_bytes) => {
                    answered += 1;
                    let head = &buffer[*consumed..*consumed + head_bytes];
                    let next = self.answer(request, head, context, budget_bytes);
                    // What waits for the disk is read again when that has replied.
                    if !matches!(
                        next,
                        Some(Next::Disk(Question::Find { .. } | Question::Begin(_) | Question::Try(_)))
                    ) {
                        *consumed += head_bytes;
                        // What helpers have said was about that one.
                        self.asked = None;
                    }
                    match (next, &self.state) {
                        (None, State::Reading) => continue,
                        (next, _) => return next,
                    }
                }
                Parsed::Refused(status) => {
                    let unread = *consumed;
                    *consumed = buffer.len();
                    return self.refuse_unread(&buffer[unread..], status, context);
                }
            }
            let has_begun = *consumed < buffer.len();
            let is_dismissed = context.is_draining && !has_begun && matches!(self.waits, Waits::Idle(_));
            if self.is_at_end || (is_dismissed && !self.is_readable) {
                self.leave(false, context);
                return None;
            }
            if !self.is_readable {
                return Some(self.wait(has_begun, context));
            }
            if *consumed > 0 {
                buffer.drain(..*consumed);
                *consumed = 0;
            }
            // A whole head always fits: one that does not has been refused.
            match self.hear(buffer, context) {
                Ok(()) => {}
                // It has had its turn, and there may be more.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Some(Next::Turn),
                // Whoever speaks plain HTTP where TLS is spoken. What it asks for is not even read.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return self.refuse_unread(&[], Status::TLS_REQUIRED, context);
                }
                Err(_) => return Some(Next::Close),
            }
        }
    }

    /// Receives what an idle connection's client has said, to be understood and answered when it is driven.
    pub fn read_ahead(&mut self, context: &mut Context) {
        // What is encrypted may be half of a handshake that is to be answered at once; the rest of a head can wait.
        if self.stream.is_tls() || !self.is_idle() {
            return;
        }
        let mut buffer = std::mem::take(&mut context.input);
        buffer.clear();
        match self.hear(&mut buffer, context) {
            Ok(()) => self.input.extend_from_slice(&buffer),
            Err(_) => self.state = State::Over,
        }
        context.input = buffer;
    }

    /// Receives into the free room of `buffer`, and takes note of what that says about the socket.
    fn hear(&mut self, buffer: &mut Vec<u8>, context: &mut Context) -> io::Result<()> {
        let room = buffer.capacity() - buffer.len();
        match self.stream.receive(buffer) {
            Ok(0) => self.is_at_end = true,
            // More will be an event; but not of what was there already.
            Ok(count) => {
                context.moment.end();
                self.is_readable = self.stream.may_have_more(count, room) || self.has_more_than_read;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_readable = false,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// How long the next bytes may take.
    fn wait(&mut self, has_begun: bool, context: &Context) -> Next {
        let now = context.clock.seconds();
        if let (true, Waits::Idle(_)) = (has_begun, self.waits) {
            self.waits = Waits::ForHead(now);
        }
        let limits = &context.limits;
        Next::Event(match self.waits {
            // Who has just connected is about to ask.
            Waits::ForHead(since) if context.is_draining && !has_begun => {
                end_of(since, Duration::from_secs(1))
            }
            Waits::ForHead(since) => end_of(since, limits.head_timeout),
            Waits::Idle(since) => end_of(since, limits.idle_timeout),
        })
    }

    /// Throws away what the client still sends.
    pub(super) fn linger(&mut self, context: &mut Context) -> Next {
        let State::Lingering { left_bytes, until } = &mut self.state else { return Next::Close };
        let mut buffer = std::mem::take(&mut context.input);
        let next = loop {
            buffer.clear();
            match self.stream.receive(&mut buffer) {
                Ok(0) => break Next::Close,
                Ok(count) if count > *left_bytes => break Next::Close,
                Ok(count) => *left_bytes -= count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    break if *until > context.clock.seconds() { Next::Event(*until) } else { Next::Close };
                }
                Err(_) => break Next::Close,
            }
        };
        context.input = buffer;
        next
    }
}
