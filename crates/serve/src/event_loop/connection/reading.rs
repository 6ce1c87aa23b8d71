//! What a client says: requests, one after the other, and what it still sends when nobody listens any more.

use super::{Connection, Next, State, Waits, end_of};
use crate::event_loop::context::Context;
use crate::event_loop::transmit::send_head;
use haul_http::request::{self, Parsed};
use haul_http::status::Status;
use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

/// Where reading has led to: what the connection needs next, or `None` where its state has changed.
type Led = ControlFlow<Option<Next>>;

impl Connection {
    /// Has the response to what was received ahead ready, to be sent when this is driven; returns what it needs before that.
    pub fn make_ready(&mut self, context: &mut Context) -> Option<Next> {
        if !matches!(self.state, State::Reading) {
            return None;
        }
        let next = self.understand(context).break_value().flatten();
        if let State::Sending(sending) = &mut self.state {
            send_head(&mut self.stream, sending, context);
        }
        next
    }

    /// Reads a request and has its response ready; `None` where the state has changed.
    pub(super) fn read(&mut self, context: &mut Context) -> Option<Next> {
        loop {
            if let ControlFlow::Break(next) = self.understand(context) {
                return next;
            }
            if let ControlFlow::Break(next) = self.read_on(context) {
                return next;
            }
        }
    }

    /// Answers the request at the beginning of what has come, where all of its head is there.
    fn understand(&mut self, context: &mut Context) -> Led {
        if self.input.is_empty() {
            return Led::Continue(());
        }
        let mut input = std::mem::take(&mut self.input);
        let mut consumed = 0;
        let led = match request::parse(&input, context.limits.head_bytes_max) {
            Parsed::Partial => Led::Continue(()),
            Parsed::Whole(request, head_bytes) => {
                let next = self.answer(request, &input[..head_bytes], context);
                // What waits for a helper is read again when that has replied.
                if !matches!(next, Some(Next::Disk(_))) {
                    consumed = head_bytes;
                    // What helpers have said was about that one.
                    self.asked = None;
                }
                Led::Break(next)
            }
            Parsed::Refused(status) => {
                self.refuse_unread(&input, status, context);
                consumed = input.len();
                Led::Break(None)
            }
        };
        if consumed < input.len() {
            input.drain(..consumed);
            self.input = input;
        }
        led
    }

    /// Receives more of a request, where there may be more.
    fn read_on(&mut self, context: &mut Context) -> Led {
        let has_begun = !self.input.is_empty();
        let is_dismissed =
            context.is_draining && !has_begun && matches!(self.waits, Waits::Idle(_));
        if self.is_at_end || (is_dismissed && !self.is_readable) {
            self.leave(false, context);
            return Led::Break(None);
        }
        if !self.is_readable {
            return Led::Break(Some(self.wait(has_begun, context)));
        }
        match self.hear(context) {
            Ok(()) => Led::Continue(()),
            // It has had its turn, and there may be more.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                Led::Break(Some(Next::Turn))
            }
            // Whoever speaks plain HTTP where TLS is spoken. What it asks for is not even read.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                self.refuse_unread(&[], Status::TLS_REQUIRED, context);
                Led::Break(None)
            }
            Err(_) => Led::Break(Some(Next::Close)),
        }
    }

    /// Receives what an idle connection's client has said, to be understood later.
    pub fn read_ahead(&mut self, context: &mut Context) {
        // What is encrypted may be half of a handshake that is to be answered at once; the rest of a head can wait.
        if !self.stream.is_tls() && self.is_idle() && self.hear(context).is_err() {
            self.state = State::Over;
        }
    }

    /// Receives what has come, and takes note of what that says about the socket.
    fn hear(&mut self, context: &mut Context) -> io::Result<()> {
        let buffer = &mut context.input;
        buffer.clear();
        // A whole head always fits: one that does not has been refused.
        buffer.extend_from_slice(&self.input);
        let room = buffer.capacity() - buffer.len();
        match self.stream.receive(buffer) {
            Ok(0) => self.is_at_end = true,
            // More will be an event; but not of what was there already.
            Ok(count) => {
                context.moment.end();
                self.is_readable =
                    self.stream.may_have_more(count, room) || self.has_more_than_read;
                self.input.extend_from_slice(&buffer[self.input.len()..]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.is_readable = false,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// How long the next bytes may take.
    fn wait(&mut self, has_begun: bool, context: &Context) -> Next {
        // Thousands may wait at once.
        self.input.shrink_to_fit();
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
                    break if *until > context.clock.seconds() {
                        Next::Event(*until)
                    } else {
                        Next::Close
                    };
                }
                Err(_) => break Next::Close,
            }
        };
        context.input = buffer;
        next
    }
}
