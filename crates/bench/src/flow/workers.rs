//! The running workers of a flow, on this machine and the other: commands to them and events from
//! them.

use super::FlowError;
use super::start::WorkerProcess;
use crate::endpoint::Endpoint;
use crate::pair::{Pair, Reply, Request};
use haul_soak::Interval;
use haul_workers::lines::write_line;
use haul_workers::worker::{Job, Message, Outcome, Window, now_ns};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ChildStdin;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, Scope};
use std::time::Duration;

/// Timeout of a worker's start, of its connection, and of its end after the window.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);

/// The channel on which commands reach a worker.
pub(super) enum WorkerInput<'a> {
    /// Standard input of a worker on this machine.
    Local(ChildStdin),
    /// A worker on the other machine, which receives commands through the pair protocol.
    Remote(RemoteWorker<'a>),
}

/// A worker on the other machine. It is stopped when this is dropped.
pub(super) struct RemoteWorker<'a>(&'a Pair);

impl Drop for RemoteWorker<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Commands to all workers.
#[derive(Clone, Copy)]
pub(super) enum Command {
    /// Measure this window.
    Window(Window),
    /// Stop working: every worker has measured its window.
    End,
}

/// Events from the thread that supervises a worker.
pub(super) enum Event<'a> {
    /// The worker was started and accepts commands on this channel.
    Started(WorkerInput<'a>),
    /// A message from the worker.
    Message(Message),
    /// The other machine's meter has measured the window.
    Measured(Interval),
    /// The worker could not be started, or its messages could not be read.
    Failed(FlowError),
    /// The worker process ended before it reported an outcome.
    EndedEarly,
}

/// All workers of a flow. They end when this is dropped, because their standard inputs are closed.
pub(super) struct Workers<'a> {
    inputs: Vec<Option<WorkerInput<'a>>>,
    events: Receiver<(usize, Event<'a>)>,
    /// For supervisors that are still to be started; `None` after the last start.
    events_tx: Option<Sender<(usize, Event<'a>)>>,
    /// The other machine's counters over the window, once they have arrived.
    remote_interval: Option<Interval>,
}

impl<'a> Workers<'a> {
    pub(super) fn new(count: usize) -> Self {
        let (events_tx, events) = mpsc::channel();
        let inputs = (0..count).map(|_| None).collect();
        Self { inputs, events, events_tx: Some(events_tx), remote_interval: None }
    }

    /// Starts a thread that starts a worker and emits the worker's events.
    pub(super) fn start<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        endpoint: Endpoint<'a>,
        job: Job,
        program: Option<&'a Path>,
        index: usize,
    ) -> Result<(), FlowError>
    where
        'a: 'scope,
    {
        // The last supervisor holds the last sender, so that the channel ends with the workers.
        let is_last = index + 1 == self.inputs.len();
        let events_tx = if is_last { self.events_tx.take() } else { self.events_tx.clone() };
        let Some(events_tx) = events_tx else { return Err(unexpected_message()) };
        let supervise = move || supervise(endpoint, &job, program, index, &events_tx);
        let started = thread::Builder::new().spawn_scoped(scope, supervise);
        started.map(drop).map_err(FlowError::at("starting a thread"))
    }

    /// The next message of any worker.
    fn next_message(&mut self) -> Result<(usize, Message), FlowError> {
        loop {
            match self.events.recv_timeout(WORKER_TIMEOUT) {
                Ok((index, Event::Started(input))) => self.inputs[index] = Some(input),
                Ok((index, Event::Message(message))) => return Ok((index, message)),
                Ok((_, Event::Measured(interval))) => self.remote_interval = Some(interval),
                Ok((_, Event::Failed(error))) => return Err(error),
                Ok((_, Event::EndedEarly)) => {
                    let error = FlowError::Worker("it ended without a report".into());
                    return Err(self.root_cause(None).unwrap_or(error));
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(FlowError::Worker(format!(
                        "no worker reported anything for {WORKER_TIMEOUT:?}"
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(FlowError::Worker("it ended without a report".into()));
                }
            }
        }
    }

    /// The next message that is not a failure.
    fn next_success(&mut self) -> Result<(usize, Message), FlowError> {
        match self.next_message()? {
            (_, Message::Refused(reason)) => Err(FlowError::Refused(reason)),
            (index, Message::Failed(reason)) => {
                let error = FlowError::Worker(reason.clone());
                Err(self.root_cause(Some((index, reason))).unwrap_or(error))
            }
            message => Ok(message),
        }
    }

    /// The root cause of a failure, or `None` if no worker reports one. If one node fails, the
    /// others fail too. A refusal explains them all; otherwise the node that connects knows most,
    /// and it has the highest index.
    fn root_cause(&mut self, mut worst: Option<(usize, String)>) -> Option<FlowError> {
        // Closing the inputs ends the workers that still run, and without a sender the channel ends
        // with them.
        self.events_tx = None;
        self.inputs.iter_mut().for_each(|input| drop(input.take()));
        while let Ok((index, event)) = self.events.recv_timeout(WORKER_TIMEOUT) {
            match event {
                Event::Message(Message::Refused(reason)) => {
                    return Some(FlowError::Refused(reason));
                }
                Event::Message(Message::Failed(reason))
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
        match self.next_success()? {
            (index, Message::Listening { address }) if index == of => Ok(address),
            _ => Err(unexpected_message()),
        }
    }

    pub(super) fn wait_for_start(&mut self) -> Result<u64, FlowError> {
        match self.next_success()? {
            (_, Message::Started { at_ns }) => Ok(at_ns.min(now_ns())),
            _ => Err(unexpected_message()),
        }
    }

    pub(super) fn send_command(&mut self, command: Command) -> Result<(), FlowError> {
        // A worker that has closed its pipe has already reported why; that report is read first.
        self.write_command(command).map_err(|error| self.root_cause(None).unwrap_or(error))
    }

    fn write_command(&mut self, command: Command) -> Result<(), FlowError> {
        let write_error = || FlowError::at("sending a command to a worker process");
        for input in self.inputs.iter_mut().flatten() {
            match (input, command) {
                (WorkerInput::Local(pipe), Command::Window(window)) => {
                    write_line(pipe, &window).map_err(write_error())?;
                }
                (WorkerInput::Local(pipe), Command::End) => {
                    write_line(pipe, &"end").map_err(write_error())?;
                }
                (WorkerInput::Remote(RemoteWorker(pair)), Command::Window(window)) => {
                    pair.send(&Request::Window {
                        start_in_ns: window.start_ns.saturating_sub(now_ns()),
                        length_ns: window.end_ns - window.start_ns,
                    })?;
                }
                (WorkerInput::Remote(RemoteWorker(pair)), Command::End) => {
                    pair.send(&Request::End)?;
                }
            }
        }
        Ok(())
    }

    /// Waits until every worker has measured its window. No worker may end earlier, because the end
    /// of its stream would end the others' windows.
    pub(super) fn wait_for_windows(&mut self) -> Result<(), FlowError> {
        for _ in 0..self.inputs.len() {
            match self.next_success()? {
                (_, Message::WindowMeasured) => {}
                _ => return Err(unexpected_message()),
            }
        }
        Ok(())
    }

    pub(super) fn wait_for_outcomes(&mut self) -> Result<Vec<Outcome>, FlowError> {
        let mut outcomes: Vec<Option<Outcome>> = self.inputs.iter().map(|_| None).collect();
        while outcomes.iter().any(Option::is_none) {
            match self.next_success()? {
                (index, Message::Done(outcome)) => outcomes[index] = Some(*outcome),
                _ => return Err(unexpected_message()),
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }

    /// The other machine's counters over the window.
    pub(super) fn wait_for_remote_interval(&mut self) -> Result<Interval, FlowError> {
        loop {
            if let Some(interval) = self.remote_interval.take() {
                return Ok(interval);
            }
            match self.events.recv_timeout(WORKER_TIMEOUT) {
                Ok((_, Event::Measured(interval))) => self.remote_interval = Some(interval),
                Ok((_, Event::Failed(error))) => return Err(error),
                _ => return Err(unexpected_message()),
            }
        }
    }
}

fn unexpected_message() -> FlowError {
    FlowError::Worker("it sent an unexpected message".into())
}

/// Starts a worker on its host, sends it the job and emits its messages until it exits. The worker
/// dies with the thread that started it, so this thread remains.
fn supervise<'a>(
    endpoint: Endpoint<'a>,
    job: &Job,
    program: Option<&Path>,
    index: usize,
    events: &Sender<(usize, Event<'a>)>,
) {
    // The receiver is dropped only after the run has failed, which is reported elsewhere.
    let emit = |event| drop(events.send((index, event)));
    let result = match endpoint {
        Endpoint::Lab(host) => {
            let entered = host.enter().map_err(FlowError::from);
            entered.and_then(|()| supervise_local(job, program, &emit))
        }
        Endpoint::Local(_) => supervise_local(job, program, &emit),
        Endpoint::Remote(pair) => supervise_remote(pair, job, &emit),
    };
    if let Err(error) = result {
        emit(Event::Failed(error));
    }
}

fn supervise_local<'a>(
    job: &Job,
    program: Option<&Path>,
    emit: &dyn Fn(Event<'a>),
) -> Result<(), FlowError> {
    let mut worker = WorkerProcess::start(job, program)?;
    if let Some(input) = worker.input.take() {
        emit(Event::Started(WorkerInput::Local(input)));
    }
    let mut has_outcome = false;
    worker.read_messages(|message| {
        has_outcome |=
            matches!(message, Message::Done(_) | Message::Failed(_) | Message::Refused(_));
        emit(Event::Message(message));
    })?;
    if !has_outcome {
        emit(Event::EndedEarly);
    }
    Ok(())
}

fn supervise_remote<'a>(
    pair: &'a Pair,
    job: &Job,
    emit: &dyn Fn(Event<'a>),
) -> Result<(), FlowError> {
    let mut replies = pair.replies()?;
    let mut has_ended = false;
    pair.start(&job.task, &job.socket, job.peer)?;
    emit(Event::Started(WorkerInput::Remote(RemoteWorker(pair))));
    while !has_ended || replies.awaits_window_result() {
        match replies.next()? {
            // Ignored: a local worker sends the first bytes, and its start is by this machine's
            // clock.
            Reply::WorkerMessage(Message::Started { .. }) => {}
            Reply::WorkerMessage(message) => emit(Event::Message(message)),
            Reply::Refused(reason) => emit(Event::Message(Message::Refused(reason))),
            Reply::Measured(interval) => emit(Event::Measured(interval)),
            Reply::Ended => has_ended = true,
            other => return Err(pair.unexpected_reply(&other).into()),
        }
    }
    Ok(())
}
