//! Connections under load, and a window of time cut out of them.
//!
//! Each end is a process of its own on its host ([`crate::worker`]), which moves bytes over and over; while all
//! run at their steady pace the load is read at two moments. Were two ends threads of one process, every
//! unmapping of a window would interrupt the other's CPU to flush an address space that two machines do not
//! share.

use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::kernel_threads::{KernelThreads, charges_interrupts_apart};
use crate::worker::receiver::Receiving;
use crate::worker::sender::Sending;
use crate::worker::socket::SocketOptions;
use crate::worker::{Job, Outcome, Task, Window, now_ns, sleep_until};
use haul_soak::{Interval, Meter};
use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

mod error;
pub(crate) mod start;
mod workers;

pub use error::FlowError;
use workers::{Word, Workers, hold};

/// How long a connection runs before it is measured, at least: slow start is over after a few milliseconds here. Where
/// buffers must be full first, [`crate::regime::warm_up`] says how long that takes.
pub(crate) const WARM_UP: Duration = Duration::from_millis(25);
/// How often a long window is looked into. Each look wakes a thread on a CPU that is measured, so not in short ones.
const LOOK_INTERVAL_NS: u64 = 250_000_000;
/// A window may miss its length by this share, where a process was not woken in time. Costs are made of rates, each by
/// its own window, and all go on until the last has looked; but windows further off than this show another moment.
const WINDOW_TOLERANCE: f64 = 0.25;

/// One end of a flow, or its middle.
#[derive(Debug, Clone)]
pub(crate) struct Part<'a> {
    /// On which host.
    pub host: Endpoint<'a>,
    /// What it does there.
    pub task: Task,
}

/// What to run, from the end that is connected to, to the one that connects: each connects to the one before.
#[derive(Debug, Clone)]
pub(crate) struct Flow<'a> {
    /// Who takes part.
    pub parts: Vec<Part<'a>>,
    /// How the connections are set before they are made.
    pub socket: SocketOptions,
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
    /// What each CPU of the lab's hosts did in the window.
    pub accounts: Vec<CpuAccount>,
}

/// What a CPU did in a window, beside what the meter says.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuAccount {
    /// Which CPU.
    pub cpu: usize,
    /// How long was counted.
    pub seconds: f64,
    /// What the kernel counted.
    pub counters: Counters,
    /// The share of the time that the flow's processes and the kernel's threads used; `None` where that cannot be told.
    pub used_percent: Option<f64>,
}

impl Sample {
    /// What a CPU did; `None` where it is no host's.
    pub(crate) fn account_of(&self, cpu: usize) -> Option<&CpuAccount> {
        self.accounts.iter().find(|account| account.cpu == cpu)
    }
}

impl<'a> Flow<'a> {
    /// One stream from a host to another, at its steady pace before it is measured.
    pub(crate) fn stream(
        (from, sending): (Endpoint<'a>, Sending),
        (to, receiving): (Endpoint<'a>, Receiving),
        socket: SocketOptions,
        window: Duration,
    ) -> Self {
        let parts = vec![
            Part { host: to, task: Task::Receive(receiving) },
            Part { host: from, task: Task::Send(sending) },
        ];
        Self { parts, socket, warm_up: WARM_UP, window }
    }

    /// The CPUs of the lab's hosts that take part, each once.
    fn cpus(&self) -> Vec<usize> {
        let of_lab = |part: &Part<'_>| match part.host {
            Endpoint::Lab(host) => Some(host.cpu()),
            Endpoint::Here(_) | Endpoint::There(_) => None,
        };
        let mut cpus: Vec<usize> = self.parts.iter().filter_map(of_lab).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }

    /// What each CPU did between two readings, with what the parts on it used by their own account.
    fn accounts(
        &self,
        cpus: &[usize],
        after: &Accounts,
        before: &Accounts,
        outcomes: &[Outcome],
    ) -> Vec<CpuAccount> {
        let seconds = (after.at - before.at).as_secs_f64();
        let of = |(index, &cpu): (usize, &usize)| {
            let is_here =
                |part: &Part<'_>| matches!(part.host, Endpoint::Lab(host) if host.cpu() == cpu);
            let parts = self.parts.iter().zip(outcomes).filter(|(part, _)| is_here(part));
            let by_parts: f64 =
                parts.map(|(_, outcome)| outcome.cpu_seconds() / outcome.seconds).sum();
            let by_threads = after.kernel_threads.as_ref().zip(before.kernel_threads.as_ref());
            let by_threads =
                by_threads.map(|(after, before)| after[index].saturating_sub(before[index]));
            CpuAccount {
                cpu,
                seconds,
                counters: after.counters[index].since(&before.counters[index]),
                used_percent: by_threads
                    .map(|used| 100.0 * (by_parts + used.as_secs_f64() / seconds)),
            }
        };
        cpus.iter().enumerate().map(of).collect()
    }

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
            let mut workers = Workers::new(self.parts.len(), events);
            let cpus = self.cpus();
            let kernel_threads = KernelThreads::on(&cpus).filter(|_| !charges_interrupts_apart());
            let mut peer = None;
            for (index, part) in self.parts.iter().enumerate() {
                let host = part.host.address();
                let (socket, task) = (self.socket.clone(), part.task.clone());
                let job = Job { host, port: 0, only_from: None, peer, socket, task };
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
            let accounts_before = Accounts::read(&cpus, kernel_threads.as_ref());
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
            let accounts_after = Accounts::read(&cpus, kernel_threads.as_ref());
            let seconds = start.elapsed().as_secs_f64();
            workers.wait_until_all_have_looked()?;
            // The other machine's meter must have looked, too, before anybody ends.
            let is_there = |part: &Part<'_>| matches!(part.host, Endpoint::There(_));
            let has_there = self.parts.iter().any(is_there);
            let there = has_there.then(|| workers.wait_for_measurement()).transpose()?;
            workers.tell(Word::End)?;
            let outcomes = workers.wait_for_outcomes()?;
            let wall_there = there.as_ref().map(|interval| interval.wall.as_secs_f64());
            for seconds in
                outcomes.iter().map(|outcome| outcome.seconds).chain([seconds]).chain(wall_there)
            {
                if (seconds / self.window.as_secs_f64() - 1.0).abs() > WINDOW_TOLERANCE {
                    return Err(FlowError::Slipped { seconds });
                }
            }
            let interval = after.zip(before).map(|(after, before)| after.since(&before));
            let accounts = self.accounts(&cpus, &accounts_after, &accounts_before, &outcomes);
            Ok(Sample { interval, there, outcomes, accounts })
        })
    }
}

/// A reading of what some CPUs have done so far.
struct Accounts {
    at: Instant,
    counters: Vec<Counters>,
    /// `None` where they are not shown.
    kernel_threads: Option<Vec<Duration>>,
}

impl Accounts {
    fn read(cpus: &[usize], kernel_threads: Option<&KernelThreads>) -> Self {
        Self {
            at: Instant::now(),
            counters: Counters::read(cpus),
            kernel_threads: kernel_threads.map(|threads| threads.used(cpus.len())),
        }
    }
}
