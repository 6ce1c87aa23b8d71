//! The workers of a flow while they are on their way: what they are told, what they say, on this machine and the other.

use super::FlowError;
use super::start::Started;
use crate::endpoint::Endpoint;
use crate::lines::write_line;
use crate::pair::{Pair, Reply, Request};
use crate::worker::{Job, Message, Outcome, Window, now_ns};
use haul_soak::Interval;
use std::net::SocketAddr;
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// How long a worker may take to start, to connect, and to end after the window.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is written to a worker.
pub(super) enum Input<'a> {
    /// One of this machine reads it from a pipe.
    Here(ChildStdin),
    /// One of the other machine hears of it.
    There(There<'a>),
}

/// A worker of the other machine, which ends when this is dropped.
pub(super) struct There<'a>(&'a Pair);

impl Drop for There<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// What all workers are told.
#[derive(Clone, Copy)]
pub(super) enum Word {
    /// When to look.
    Window(Window),
    /// All have looked.
    End,
}

/// What the thread that holds a worker passes on.
pub(super) enum Event<'a> {
    /// It runs; what is written here it reads.
    Runs(Input<'a>),
    /// It said something.
    Said(Message),
    /// Its machine's meter has seen the window.
    Measured(Interval),
    /// It could not be started or heard.
    Failed(FlowError),
}

/// Workers that are on their way. They end when this is dropped: their standard inputs close.
pub(super) struct Workers<'a> {
    inputs: Vec<Option<Input<'a>>>,
    events: Receiver<(usize, Event<'a>)>,
    /// What the other machine's meter saw.
    there: Option<Interval>,
}

impl<'a> Workers<'a> {
    pub(super) fn new(count: usize, events: Receiver<(usize, Event<'a>)>) -> Self {
        Self { inputs: (0..count).map(|_| None).collect(), events, there: None }
    }

    /// The next word of anybody.
    fn next(&mut self) -> Result<(usize, Message), FlowError> {
        loop {
            match self.events.recv_timeout(PATIENCE) {
                Ok((index, Event::Runs(input))) => self.inputs[index] = Some(input),
                Ok((index, Event::Said(message))) => return Ok((index, message)),
                Ok((_, Event::Measured(interval))) => self.there = Some(interval),
                Ok((_, Event::Failed(error))) => return Err(error),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(FlowError::Worker(format!("nobody said a word in {PATIENCE:?}")));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(FlowError::Worker("it ended without a word".into()));
                }
            }
        }
    }

    /// The next word that is not of trouble.
    fn next_good(&mut self) -> Result<(usize, Message), FlowError> {
        match self.next()? {
            (_, Message::Refused(reason)) => Err(FlowError::Refused(reason)),
            (index, Message::Failed(reason)) => {
                let trouble = FlowError::Worker(reason.clone());
                Err(self.cause(Some((index, reason))).unwrap_or(trouble))
            }
            good => Ok(good),
        }
    }

    /// When one part fails the others do too; the one that connects knows best why, and a refusal explains all. `None` where
    /// nobody says why.
    fn cause(&mut self, mut worst: Option<(usize, String)>) -> Option<FlowError> {
        // Those that are still at work have nobody to talk to any more, and end.
        self.inputs.iter_mut().for_each(|input| drop(input.take()));
        while let Ok((index, message)) = self.next() {
            match message {
                Message::Refused(reason) => return Some(FlowError::Refused(reason)),
                Message::Failed(reason)
                    if worst.as_ref().is_none_or(|(other, _)| index > *other) =>
                {
                    worst = Some((index, reason));
                }
                _ => {}
            }
        }
        worst.map(|(_, reason)| FlowError::Worker(reason))
    }

    pub(super) fn wait_for_address(&mut self, of: usize) -> Result<SocketAddr, FlowError> {
        match self.next_good()? {
            (index, Message::Listening { address }) if index == of => Ok(address),
            _ => Err(out_of_turn()),
        }
    }

    pub(super) fn wait_for_start(&mut self) -> Result<u64, FlowError> {
        match self.next_good()? {
            (_, Message::Started { at_ns }) => Ok(at_ns.min(now_ns())),
            _ => Err(out_of_turn()),
        }
    }

    pub(super) fn tell(&mut self, word: Word) -> Result<(), FlowError> {
        // Whoever does not listen any more has said why, and that is still to be heard.
        self.tell_all(word).map_err(|error| self.cause(None).unwrap_or(error))
    }

    fn tell_all(&mut self, word: Word) -> Result<(), FlowError> {
        let failed = || FlowError::at("telling a process when to look");
        for input in self.inputs.iter_mut().flatten() {
            match (input, word) {
                (Input::Here(pipe), Word::Window(window)) => {
                    write_line(pipe, &window).map_err(failed())?
                }
                (Input::Here(pipe), Word::End) => write_line(pipe, &"end").map_err(failed())?,
                (Input::There(There(pair)), Word::Window(window)) => {
                    pair.say(&Request::Window {
                        start_in_ns: window.start_ns.saturating_sub(now_ns()),
                        length_ns: window.end_ns - window.start_ns,
                    })?
                }
                (Input::There(There(pair)), Word::End) => pair.say(&Request::End)?,
            }
        }
        Ok(())
    }

    /// Nobody may be told to end before that: a stream that ends would end the others' windows.
    pub(super) fn wait_until_all_have_looked(&mut self) -> Result<(), FlowError> {
        for _ in 0..self.inputs.len() {
            match self.next_good()? {
                (_, Message::Looked) => {}
                _ => return Err(out_of_turn()),
            }
        }
        Ok(())
    }

    pub(super) fn wait_for_outcomes(&mut self) -> Result<Vec<Outcome>, FlowError> {
        let mut outcomes: Vec<Option<Outcome>> = self.inputs.iter().map(|_| None).collect();
        while outcomes.iter().any(Option::is_none) {
            match self.next_good()? {
                (index, Message::Done(outcome)) => outcomes[index] = Some(*outcome),
                _ => return Err(out_of_turn()),
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }

    /// What the other machine's meter saw.
    pub(super) fn wait_for_measurement(&mut self) -> Result<Interval, FlowError> {
        loop {
            if let Some(interval) = self.there.take() {
                return Ok(interval);
            }
            match self.events.recv_timeout(PATIENCE) {
                Ok((_, Event::Measured(interval))) => self.there = Some(interval),
                Ok((_, Event::Failed(error))) => return Err(error),
                _ => return Err(out_of_turn()),
            }
        }
    }
}

fn out_of_turn() -> FlowError {
    FlowError::Worker("it spoke out of turn".into())
}

/// Starts a worker on its host, gives it its job and passes on what it says until it ends. It is tied to the
/// thread that starts it, so that thread stays.
pub(super) fn hold<'a>(
    place: Endpoint<'a>,
    job: &Job,
    index: usize,
    events: &Sender<(usize, Event<'a>)>,
) {
    // Nobody listens any more only when the run has failed, and that is reported.
    let tell = |event| drop(events.send((index, event)));
    let result = match place {
        Endpoint::Lab(host) => {
            host.enter().map_err(FlowError::from).and_then(|()| hold_here(job, &tell))
        }
        Endpoint::Here(_) => hold_here(job, &tell),
        Endpoint::There(pair) => hold_there(pair, job, &tell),
    };
    if let Err(error) = result {
        tell(Event::Failed(error));
    }
}

fn hold_here<'a>(job: &Job, tell: &dyn Fn(Event<'a>)) -> Result<(), FlowError> {
    let mut worker = Started::start(job)?;
    if let Some(input) = worker.input.take() {
        tell(Event::Runs(Input::Here(input)));
    }
    worker.hear(|message| tell(Event::Said(message)))
}

fn hold_there<'a>(pair: &'a Pair, job: &Job, tell: &dyn Fn(Event<'a>)) -> Result<(), FlowError> {
    let mut listening = pair.listen()?;
    let mut has_ended = false;
    pair.start(&job.task, &job.socket, job.peer)?;
    tell(Event::Runs(Input::There(There(pair))));
    while !has_ended || listening.is_to_come() {
        match listening.next()? {
            // Whatever moves first moves here, and by this machine's clock.
            Reply::Said(Message::Started { .. }) => {}
            Reply::Said(message) => tell(Event::Said(message)),
            Reply::Refused(reason) => tell(Event::Said(Message::Refused(reason))),
            Reply::Measured(interval) => tell(Event::Measured(interval)),
            Reply::Ended => has_ended = true,
            other => return Err(pair.out_of_turn(&other).into()),
        }
    }
    Ok(())
}
