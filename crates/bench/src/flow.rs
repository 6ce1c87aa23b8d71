//! Connections under load, and a window of time cut out of them.
//!
//! Each end is a process of its own on its host ([`crate::worker`]), which moves bytes over and over; while all
//! run at their steady pace the load is read at two moments. Were two ends threads of one process, every
//! unmapping of a window would interrupt the other's CPU to flush an address space that two machines do not
//! share.

use crate::interrupts::Counters;
use crate::pair::{Pair, PairError, Reply, Request};
use crate::site::Place;
use crate::worker::{ARGUMENT, Job, Message, Outcome, Task, Window, now_ns, sleep_until};
use haul_lab::LabError;
use haul_soak::{Interval, Meter, SoakError};
use std::io::{self, BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// How long a worker may take to start, to connect, and to end after the window.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a long window is looked into. Each look wakes a thread on a CPU that is measured, so not in short ones.
const LOOK_INTERVAL_NS: u64 = 250_000_000;
/// A window may miss its length by this share, where a process was not woken in time. Costs are made of rates, each by
/// its own window, and all go on until the last has looked; but windows further off than this show another moment.
const WINDOW_TOLERANCE: f64 = 0.25;

/// One end of a flow, or its middle.
#[derive(Debug, Clone)]
pub(crate) struct Part<'a> {
    /// On which host.
    pub host: Place<'a>,
    /// What it does there.
    pub task: Task,
}

/// What to run, from the end that is connected to, to the one that connects: each connects to the one before.
#[derive(Debug, Clone)]
pub(crate) struct Flow<'a> {
    /// Who takes part.
    pub parts: Vec<Part<'a>>,
    /// How long to run before measuring.
    pub warm_up: Duration,
    /// How long to measure.
    pub window: Duration,
}

/// Of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    Start,
    Inside,
    End,
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Each CPU's counters over the window; `None` without a meter.
    pub interval: Option<Interval>,
    /// The same of the other machine, where there are two.
    pub there: Option<Interval>,
    /// What the parts say they did in the window, in their order.
    pub outcomes: Vec<Outcome>,
    /// What the kernel counted meanwhile, where somebody looked.
    pub counters: Counters,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum FlowError {
    /// What was to be measured does not work here, in words. Other rows may.
    #[error("{0}")]
    Refused(String),
    /// A process failed, in words.
    #[error("a process of the run failed: {0}")]
    Worker(String),
    /// A process was not woken in time.
    #[error("the window slipped: it took {seconds:.3} s (the machine is too busy to measure)")]
    Slipped {
        /// How long it took.
        seconds: f64,
    },
    /// Somebody asked for an end.
    #[error("stopped before it was complete")]
    Stopped,
    /// The lab failed.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The meter failed.
    #[error(transparent)]
    Soak(#[from] SoakError),
    /// The other machine is gone.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// A process could not be started or spoken to.
    #[error("{step}: {source}")]
    Process {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl FlowError {
    pub(crate) fn at(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Process { step, source }
    }
}

/// A child that is ended and waited for on drop; one that has ended already is left in peace.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Both fail only for a child that has been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is written to a worker.
enum Input<'a> {
    /// One of this machine reads it from a pipe.
    Here(ChildStdin),
    /// One of the other machine hears of it.
    There(There<'a>),
}

/// A worker of the other machine, which ends when this is dropped.
struct There<'a>(&'a Pair);

impl Drop for There<'_> {
    fn drop(&mut self) {
        // Where it is lost it ends by itself.
        let _ = self.0.say(&Request::Stop);
    }
}

/// What all workers are told.
#[derive(Clone, Copy)]
enum Word {
    /// When to look.
    Window(Window),
    /// All have looked.
    End,
}

/// What the thread that holds a worker passes on.
enum Event<'a> {
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
struct Workers<'a> {
    inputs: Vec<Option<Input<'a>>>,
    events: Receiver<(usize, Event<'a>)>,
    /// What the other machine's meter saw.
    there: Option<Interval>,
}

impl Flow<'_> {
    /// Runs it and measures one window, with `meter` if there is one.
    pub(crate) fn run(&self, meter: Option<&Meter>) -> Result<Sample, FlowError> {
        self.run_seen(meter, &mut |_| true)
    }

    /// The same; `look` is called at both edges of the window and now and then inside, and says whether to go on.
    pub(crate) fn run_seen(
        &self,
        meter: Option<&Meter>,
        look: &mut dyn FnMut(Moment) -> bool,
    ) -> Result<Sample, FlowError> {
        thread::scope(|scope| {
            let (events_out, events) = mpsc::channel();
            let inputs = self.parts.iter().map(|_| None).collect();
            let mut workers = Workers { inputs, events, there: None };
            let mut peer = None;
            for (index, part) in self.parts.iter().enumerate() {
                let host = part.host.address();
                let job = Job { host, port: 0, only_from: None, peer, task: part.task.clone() };
                let events_out = events_out.clone();
                thread::Builder::new()
                    .spawn_scoped(scope, move || hold(part.host, &job, index, &events_out))
                    .map_err(FlowError::at("starting a thread"))?;
                if index + 1 < self.parts.len() {
                    // A machine may know itself by another address than the one it is reached at.
                    peer = Some(SocketAddr::new(host, workers.wait_for_address(index)?.port()));
                }
            }
            drop(events_out);
            let at_ns = workers.wait_for_start()?;
            let window = Window::of(at_ns, self.warm_up, self.window);
            workers.tell(Word::Window(window))?;
            sleep_until(window.start_ns);
            let before = meter.map(Meter::snapshot).transpose()?;
            let start = Instant::now();
            let mut goes_on = look(Moment::Start);
            while goes_on && now_ns() + LOOK_INTERVAL_NS < window.end_ns {
                sleep_until(now_ns() + LOOK_INTERVAL_NS);
                goes_on = look(Moment::Inside);
            }
            if !goes_on {
                return Err(FlowError::Stopped);
            }
            sleep_until(window.end_ns);
            look(Moment::End);
            let after = meter.map(Meter::snapshot).transpose()?;
            let seconds = start.elapsed().as_secs_f64();
            workers.wait_until_all_have_looked()?;
            let outcomes = workers.wait_for_outcomes()?;
            let there = if self.parts.iter().any(|part| matches!(part.host, Place::There(_))) {
                Some(workers.wait_for_measurement()?)
            } else {
                None
            };
            for seconds in outcomes.iter().map(|outcome| outcome.seconds).chain([seconds]) {
                if (seconds / self.window.as_secs_f64() - 1.0).abs() > WINDOW_TOLERANCE {
                    return Err(FlowError::Slipped { seconds });
                }
            }
            let interval = after.zip(before).map(|(after, before)| after.since(&before));
            Ok(Sample { interval, there, outcomes, counters: Counters::default() })
        })
    }
}

impl Workers<'_> {
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
            (index, Message::Failed(reason)) => Err(self.cause(index, reason)),
            good => Ok(good),
        }
    }

    /// When one part fails the others do too; the one that connects knows best why, and a refusal explains all.
    fn cause(&mut self, index: usize, reason: String) -> FlowError {
        let mut worst = (index, reason);
        // Those that are still at work have nobody to talk to any more, and end.
        self.inputs.iter_mut().for_each(|input| drop(input.take()));
        while let Ok((index, message)) = self.next() {
            match message {
                Message::Refused(reason) => return FlowError::Refused(reason),
                Message::Failed(reason) if index > worst.0 => worst = (index, reason),
                _ => {}
            }
        }
        FlowError::Worker(worst.1)
    }

    fn wait_for_address(&mut self, of: usize) -> Result<SocketAddr, FlowError> {
        match self.next_good()? {
            (index, Message::Listening { address }) if index == of => Ok(address),
            _ => Err(out_of_turn()),
        }
    }

    fn wait_for_start(&mut self) -> Result<u64, FlowError> {
        match self.next_good()? {
            (_, Message::Started { at_ns }) => Ok(at_ns),
            _ => Err(out_of_turn()),
        }
    }

    fn tell(&mut self, word: Word) -> Result<(), FlowError> {
        let mut line = match word {
            Word::Window(window) => serde_json::to_vec(&window),
            Word::End => serde_json::to_vec("end"),
        }
        .map_err(|error| FlowError::Worker(error.to_string()))?;
        line.push(b'\n');
        for input in self.inputs.iter_mut().flatten() {
            match (input, word) {
                (Input::Here(pipe), _) => {
                    pipe.write_all(&line).map_err(FlowError::at("telling a process when to look"))?;
                }
                (Input::There(There(pair)), Word::Window(window)) => pair.say(&Request::Window {
                    start_in_ns: window.start_ns.saturating_sub(now_ns()),
                    length_ns: window.end_ns - window.start_ns,
                })?,
                (Input::There(There(pair)), Word::End) => pair.say(&Request::End)?,
            }
        }
        Ok(())
    }

    /// Nobody may end before that: a stream that ends would end the others' windows.
    fn wait_until_all_have_looked(&mut self) -> Result<(), FlowError> {
        for _ in 0..self.inputs.len() {
            match self.next_good()? {
                (_, Message::Looked) => {}
                _ => return Err(out_of_turn()),
            }
        }
        self.tell(Word::End)
    }

    fn wait_for_outcomes(&mut self) -> Result<Vec<Outcome>, FlowError> {
        let mut outcomes: Vec<Option<Outcome>> = self.inputs.iter().map(|_| None).collect();
        while outcomes.iter().any(Option::is_none) {
            match self.next_good()? {
                (index, Message::Done(outcome)) => outcomes[index] = Some(*outcome),
                _ => return Err(out_of_turn()),
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }
}

impl Workers<'_> {
    fn wait_for_measurement(&mut self) -> Result<Interval, FlowError> {
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
fn hold<'a>(place: Place<'a>, job: &Job, index: usize, events: &Sender<(usize, Event<'a>)>) {
    // Nobody listens any more only when the run has failed, and that is reported.
    let tell = |event| drop(events.send((index, event)));
    let result = match place {
        Place::Lab(host) => host.enter().map_err(FlowError::from).and_then(|()| hold_here(job, &tell)),
        Place::Here(_) => hold_here(job, &tell),
        Place::There(pair) => hold_there(pair, job, &tell),
    };
    if let Err(error) = result {
        tell(Event::Failed(error));
    }
}

fn hold_here<'a>(job: &Job, tell: &dyn Fn(Event<'a>)) -> Result<(), FlowError> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
    // A group of its own, so that a terminal's Ctrl-C ends the run in order and not the process in the
    // middle of it.
    let mut child = haul_sys::child::dies_with_parent(command.process_group(0))
        .spawn()
        .map(Ended)
        .map_err(FlowError::at("starting a process"))?;
    if let Some(mut input) = child.0.stdin.take() {
        let mut line = serde_json::to_vec(job).map_err(|error| FlowError::Worker(error.to_string()))?;
        line.push(b'\n');
        input.write_all(&line).map_err(FlowError::at("handing its job to a process"))?;
        tell(Event::Runs(Input::Here(input)));
    }
    if let Some(output) = child.0.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(FlowError::at("hearing a process"))?;
            let message = serde_json::from_str(&line)
                .unwrap_or_else(|error| Message::Failed(format!("it said {line:?}: {error}")));
            tell(Event::Said(message));
        }
    }
    child.0.wait().map(drop).map_err(FlowError::at("waiting for a process"))
}

fn hold_there<'a>(pair: &'a Pair, job: &Job, tell: &dyn Fn(Event<'a>)) -> Result<(), FlowError> {
    let mut listening = pair.listen()?;
    let mut has_ended = false;
    pair.start(&job.task, job.peer)?;
    tell(Event::Runs(Input::There(There(pair))));
    while !has_ended || listening.is_to_come() {
        match listening.next()? {
            Reply::Said(message) => tell(Event::Said(message)),
            Reply::Refused(reason) => tell(Event::Said(Message::Refused(reason))),
            Reply::Measured(interval) => tell(Event::Measured(interval)),
            Reply::Ended => has_ended = true,
            other => return Err(pair.out_of_turn(&other).into()),
        }
    }
    Ok(())
}
