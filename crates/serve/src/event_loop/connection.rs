//! One connection: requests in, responses out, one after the other.
//!
//! It is driven by events and never waits: [`Connection::drive`] goes as far as it can and says what it needs next. A
//! response is made ready first ([`Connection::make_ready`]), so that those of many connections can be sent one right after the other.
//! An idle connection holds no buffer at all.

mod put;
mod reading;

use self::put::Putting;
use crate::counters::Way;
use crate::event_loop::context::Context;
use crate::event_loop::helper::{Attempt, Question, Reply};
use crate::event_loop::listen::Accepted;
use crate::event_loop::receiving::Receiving;
use crate::event_loop::sending::Sending;
use crate::event_loop::sent::Sent;
use crate::event_loop::stream::Stream;
use crate::event_loop::transmit::{Progress, transmit};
use crate::files::service::Found;
use crate::log::{Logged, first_line};
use crate::passwords::Passwords;
use crate::response::answer::Answer;
use crate::response::body::Piece;
use haul_fs::AtomicFile;
use haul_http::credentials::Credentials;
use haul_http::request::{Method, Request};
use haul_http::status::Status;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What one connection is sent of files before others have their turn, in bytes.
const TURN_BYTES: u64 = 2 << 20;
/// Requests that one connection is answered before others have their turn.
const TURN_REQUESTS: usize = 64;
/// What a client may still send after the last response before it is cut off; see [`State::Lingering`].
const LINGERING_BYTES_MAX: usize = 1 << 20;
/// How long it may take over that.
const LINGERING: Duration = Duration::from_secs(5);
/// The deadline of what the disk, and not the client, is to do.
pub const NEVER: u32 = u32::MAX;

/// A connection.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    /// Who is at the other end; `None` behind a Unix socket.
    peer: Option<SocketAddr>,
    state: State,
    /// Read, and not yet understood or answered.
    input: Vec<u8>,
    /// Where helpers were asked about the request at the beginning of `input`.
    asked: Option<Box<Asked>>,
    /// Whether the socket may have more to read.
    is_readable: bool,
    /// Whether a short read may not have been all: an end is to come, of which no other event will tell, or the client sends
    /// urgent bytes, before each of which reading stops.
    has_more_than_read: bool,
    /// Whether the client has said all that it will.
    is_at_end: bool,
    /// For what it waits, and since when.
    waits: Waits,
}

/// What the connection is doing.
#[derive(Debug)]
enum State {
    /// Waiting for a request, or for the rest of one.
    Reading,
    /// Sending a response, or about to.
    Sending(Box<Sending>),
    /// Waiting for the disk or another helper, to answer or to send on.
    AtDisk(Option<Box<Sending>>),
    /// Taking a body into a file.
    Receiving(Box<Receiving>, Box<Putting>),
    /// Waiting for the disk, to have a whole file in its place.
    Finishing(Box<Putting>),
    /// The disk has said what has become of that file.
    Finished(Box<Putting>, Status),
    /// Saying that it is done, where there are words for it.
    Ending { lingers: bool, until: u32 },
    /// Done, but the client may still be sending: closing a socket with unread bytes resets the connection, and the client
    /// might lose the response. So what comes is thrown away for a while, up to so many bytes.
    Lingering { left_bytes: usize, until: u32 },
    /// Done.
    Over,
}

/// A request that helpers were asked about, and what they have said.
#[derive(Debug)]
struct Asked {
    /// When it was first read.
    since: Instant,
    /// What the disk gave for its target.
    found: Option<Found>,
    /// The file that the disk gave for its body, or why there is none.
    begun: Option<Result<Box<AtomicFile>, Status>>,
    /// Whether its password is right, or why nobody knows.
    tried: Option<Tried>,
}

/// For what a connection waits, and since when, by the loop's clock in seconds.
#[derive(Debug, Clone, Copy)]
enum Waits {
    /// For the rest of a head, or for the first one.
    ForHead(u32),
    /// For anything at all.
    Idle(u32),
}

/// Whether these passwords let somebody in, or why nobody knows.
type Tried = Result<(Arc<Passwords>, bool), Status>;

/// What a connection needs next.
#[derive(Debug)]
pub enum Next {
    /// An event before this second of the loop's clock, or else [`Connection::expire`].
    Event(u32),
    /// Another turn, when others have had theirs.
    Turn,
    /// A reply to this question; no event before.
    Disk(Question),
    /// Nothing: it is to be closed.
    Close,
}

impl Connection {
    /// A connection that has just been accepted.
    pub fn new(accepted: Accepted, context: &Context) -> io::Result<Self> {
        let Accepted { socket, peer, is_tls } = accepted;
        let tls = context.secrets.tls.as_ref().filter(|_| is_tls);
        Ok(Self {
            stream: Stream::new(socket, tls, context.kernel_tls, &context.settings)?,
            peer,
            state: State::Reading,
            input: Vec::new(),
            asked: None,
            is_readable: true,
            has_more_than_read: false,
            is_at_end: false,
            waits: Waits::ForHead(context.clock.seconds()),
        })
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Takes note of an event: the socket has something to read; where there is an end to it, or something urgent, a short read is
    /// not the last.
    pub fn became_readable(&mut self, is_end_or_urgent: bool) {
        self.is_readable = true;
        self.has_more_than_read |= is_end_or_urgent;
    }

    /// Whether it waits for a request of which nothing has come.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Reading) && self.input.is_empty() && !self.stream.is_beginning()
    }

    /// Whether it waits for the disk or another helper.
    pub fn is_at_disk(&self) -> bool {
        matches!(self.state, State::AtDisk(_) | State::Finishing(_))
    }

    /// Takes what a helper found out. To be driven then.
    pub fn disk_replied(&mut self, reply: Reply) {
        self.state = match (std::mem::replace(&mut self.state, State::Reading), reply) {
            (State::AtDisk(Some(sending)), _) => State::Sending(sending),
            (State::AtDisk(None), reply) => {
                if let Some(asked) = &mut self.asked {
                    asked.note(reply);
                }
                State::Reading
            }
            (State::Finishing(putting), Reply::Finished(status)) => {
                State::Finished(putting, status)
            }
            (State::Finishing(putting), _) => State::Finished(putting, Status::INTERNAL_ERROR),
            (state, _) => state,
        };
    }

    /// Whether a response is ready that comes from memory.
    pub fn is_ready_and_short(&self) -> bool {
        match &self.state {
            State::Sending(sending) => {
                sending.body.is_last() && !matches!(sending.body.next(), Some(Piece::File(..)))
            }
            _ => false,
        }
    }

    /// Sends what was held back when it was driven.
    pub fn release(&mut self, context: &mut Context) {
        if self.stream.is_held() {
            // Of what those bytes cost, this is the part that was put off.
            let timer = context.timer();
            self.stream.release();
            context.counters.moved(Way::Memory, 0, timer.and_then(|timer| timer.elapsed()));
        }
    }

    /// Its time is over. Returns what it needs to say so.
    pub fn expire(&mut self, context: &mut Context) -> Next {
        match self.state {
            State::Receiving(..) => self.give_up_body(context),
            State::Reading if !self.input.is_empty() => {
                let unread = std::mem::take(&mut self.input);
                self.refuse_unread(&unread, Status::REQUEST_TIMEOUT, context);
                self.drive(context)
            }
            State::Sending(_) => {
                self.stream.reset_on_close();
                Next::Close
            }
            _ => Next::Close,
        }
    }

    /// Notes what the connection has come to, and in the log a response that it did not live to send, or a body that did not come whole. To
    /// be called last.
    pub fn close(mut self, context: &mut Context) {
        // Closing a socket that has something unread throws away what is held.
        self.stream.release();
        context.counters.fallbacks.add(self.stream.fallbacks());
        if let State::Sending(sending) | State::AtDisk(Some(sending)) = &mut self.state
            && let Some(mut logged) = sending.logged.take()
        {
            logged.cut_short(sending.body.len());
            context.log.write(&logged, &context.clock);
        }
        let unanswered = match &self.state {
            State::Receiving(_, putting) if !context.is_draining => {
                Some((putting, Status::BAD_REQUEST))
            }
            // What becomes of a file that is being finished only the helper knows, which is at it still.
            State::Receiving(_, putting) | State::Finishing(putting) => {
                Some((putting, Status::UNAVAILABLE))
            }
            State::Finished(putting, status) => Some((putting, *status)),
            _ => None,
        };
        if let Some((putting, status)) = unanswered {
            putting.forget(context);
            if context.log.is_on() {
                context.log.write(&putting.logged(self.peer, status, 0), &context.clock);
            }
        }
    }

    /// Goes as far as it can.
    pub fn drive(&mut self, context: &mut Context) -> Next {
        if self.stream.flush() == Sent::Broken {
            return Next::Close;
        }
        let mut budget_bytes = TURN_BYTES;
        let mut answered = 0;
        loop {
            let next = match &mut self.state {
                State::Reading if answered == TURN_REQUESTS => Some(Next::Turn),
                // Others are held back meanwhile, and this may be about a file.
                State::Reading
                    if context.holds
                        && answered > 0
                        && (self.is_readable || !self.input.is_empty()) =>
                {
                    Some(Next::Turn)
                }
                State::Reading => self.read(context),
                State::Sending(sending) => {
                    let left = sending.len();
                    let progress = transmit(&mut self.stream, sending, &mut budget_bytes, context);
                    if sending.len() < left {
                        sending.moved_at = context.clock.seconds();
                    }
                    match progress {
                        Progress::Done => {
                            answered += 1;
                            self.finish(context);
                            None
                        }
                        progress => Some(self.pause(progress, context)),
                    }
                }
                State::AtDisk(_) | State::Finishing(_) => Some(Next::Event(NEVER)),
                State::Receiving(..) => self.receive(context),
                State::Finished(..) => {
                    self.answer_put(context);
                    None
                }
                State::Ending { .. } => self.end(context),
                State::Lingering { .. } => Some(self.linger(context)),
                State::Over => Some(Next::Close),
            };
            if let Some(next) = next {
                return next;
            }
        }
    }

    /// The response under way is with the kernel.
    fn finish(&mut self, context: &mut Context) {
        if let State::Sending(mut sending) = std::mem::replace(&mut self.state, State::Reading) {
            if let Some(logged) = sending.logged.take() {
                context.log.write(&logged, &context.clock);
            }
            context.counters.took(sending.started.elapsed());
            self.waits = Waits::Idle(context.clock.seconds());
            if sending.closes {
                self.leave(!self.is_at_end, context);
            }
            context.reuse(sending);
        }
    }

    /// What to wait for while a response is under way.
    fn pause(&mut self, progress: Progress, context: &Context) -> Next {
        match progress {
            Progress::Done | Progress::Turn => Next::Turn,
            // Whatever else the client does: what counts is that it takes something.
            Progress::Blocked => Next::Event(match &self.state {
                State::Sending(sending) => end_of(sending.moved_at, context.limits.send_timeout),
                _ => context.clock.seconds(),
            }),
            Progress::Cold(form, range) => {
                if let State::Sending(sending) =
                    std::mem::replace(&mut self.state, State::AtDisk(None))
                {
                    self.state = State::AtDisk(Some(sending));
                }
                Next::Disk(Question::Warm(form, range))
            }
            Progress::Broken => Next::Close,
            Progress::Changed => {
                context.counters.cut_short.add(1);
                self.stream.reset_on_close();
                Next::Close
            }
        }
    }

    /// From here on nothing more is said; whether what the client still sends is waited for. To be driven then.
    fn leave(&mut self, lingers: bool, context: &Context) {
        self.input = Vec::new();
        let until = end_of(context.clock.seconds(), context.limits.send_timeout);
        self.state = State::Ending { lingers, until };
    }

    /// Says so, and waits for room for that; `None` where the state has changed.
    fn end(&mut self, context: &Context) -> Option<Next> {
        let State::Ending { lingers, until } = self.state else { return None };
        match self.stream.end() {
            Sent::Blocked => return Some(Next::Event(until)),
            Sent::Broken | Sent::Ended => return Some(Next::Close),
            Sent::Bytes(_) if lingers => {
                self.stream.shutdown();
                let until = end_of(context.clock.seconds(), LINGERING);
                self.state = State::Lingering { left_bytes: LINGERING_BYTES_MAX, until };
            }
            Sent::Bytes(_) => self.state = State::Over,
        }
        None
    }

    /// Makes ready what answers a request; `None` where the state has changed.
    fn answer(
        &mut self,
        mut request: Request<'_>,
        head: &[u8],
        context: &mut Context,
    ) -> Option<Next> {
        // A request that has been to a helper is read again, and has been waiting since.
        let started = self.asked.as_ref().map_or(context.clock.ticked(), |asked| asked.since);
        request.keeps_alive &= !context.is_draining && !self.stream.is_worn();
        let answer = if let Some(answer) = context.answering().without_file(&request) {
            answer
        } else if let Some(refused) = self.admit(&request, context) {
            match refused {
                Ok(status) => context.answering().refuse(&request, status),
                Err(question) => return Some(self.ask(question, started)),
            }
        } else if request.method == Method::Put {
            return self.begin_put(&request, head, started, context);
        } else if let Some(found) = self.find(request.target, context) {
            context.answering().with_found(&request, &found)
        } else {
            return Some(self.ask(Question::of(&request), started));
        };
        let logged = context
            .log
            .is_on()
            .then(|| Logged::new(self.peer, head, answer.status, answer.body.len(), started));
        self.respond(answer, logged, started, context);
        None
    }

    /// Has a helper answer something about the request that is being answered, which is read again then.
    fn ask(&mut self, question: Question, started: Instant) -> Next {
        if self.asked.is_none() {
            self.asked =
                Some(Box::new(Asked { since: started, found: None, begun: None, tried: None }));
        }
        self.state = State::AtDisk(None);
        Next::Disk(question)
    }

    /// `None` where whoever asks may; else why not, or whom to ask.
    fn admit(
        &mut self,
        request: &Request<'_>,
        context: &mut Context,
    ) -> Option<Result<Status, Question>> {
        let passwords = context.secrets.passwords.as_ref()?;
        let tried = self.asked.as_mut().and_then(|asked| asked.tried.take());
        let value = request.fields.authorization.unwrap_or(b"");
        let field = blake3::hash(value);
        if context.known.get(&field).is_some() {
            return None;
        }
        if passwords.knows(&field) {
            context.known.put(field, ());
            return None;
        }
        let Some(credentials) = Credentials::parse(value) else {
            return Some(Ok(Status::UNAUTHORIZED));
        };
        match tried {
            Some(Err(status)) => Some(Ok(status)),
            Some(Ok((by, accepted))) if Arc::ptr_eq(&by, passwords) => {
                if accepted {
                    context.known.put(field, ());
                    return None;
                }
                Some(Ok(Status::UNAUTHORIZED))
            }
            // Nobody has tried it, or with passwords that hold no longer.
            _ => {
                let address = self.peer.map(|peer| peer.ip());
                let passwords = Arc::clone(passwords);
                Some(Err(Question::Try(Attempt { passwords, credentials, field, address })))
            }
        }
    }

    /// What stands for a target; `None` where the disk has to be asked.
    fn find(&mut self, target: &str, context: &mut Context) -> Option<Found> {
        let found = self.asked.as_mut().and_then(|asked| asked.found.take());
        let Some(found) = found else { return context.find(target) };
        context.keep(target, &found);
        Some(found)
    }

    /// Refuses what could not be read as a request. To be driven then.
    fn refuse_unread(&mut self, unread: &[u8], status: Status, context: &mut Context) {
        let answer = context.answering().refuse_unread(status);
        let started = context.clock.ticked();
        let logged = context.log.is_on().then(|| {
            Logged::new(self.peer, first_line(unread), status, answer.body.len(), started)
        });
        self.respond(answer, logged, started, context);
    }

    /// Has a response ready, whose head is in the loop's memory, to be sent when this is driven.
    fn respond(
        &mut self,
        answer: Answer,
        logged: Option<Logged>,
        started: Instant,
        context: &mut Context,
    ) {
        context.counters.responded(answer.status);
        self.state =
            State::Sending(context.ready(answer.body, !answer.keeps_alive, logged, started));
    }
}

impl Asked {
    /// Takes note of what a helper has said.
    fn note(&mut self, reply: Reply) {
        match reply {
            Reply::Found(found) => self.found = Some(found),
            Reply::Begun(begun) => self.begun = Some(begun),
            Reply::Tried(passwords, accepted) => self.tried = Some(Ok((passwords, accepted))),
            Reply::Busy => self.tried = Some(Err(Status::UNAVAILABLE)),
            _ => {
                self.tried = Some(Err(Status::INTERNAL_ERROR));
                self.found = Some(Found::Nothing(Status::INTERNAL_ERROR));
                self.begun = Some(Err(Status::INTERNAL_ERROR));
            }
        }
    }
}

/// The second in which a time is over that began in `since`. That one had begun already: not before its time.
fn end_of(since: u32, time: Duration) -> u32 {
    u32::try_from(time.as_secs()).unwrap_or(NEVER).saturating_add(since).saturating_add(1)
}
