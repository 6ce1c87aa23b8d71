//! Flows: connections under load, measured during a window.
//!
//! Each node of a flow is a separate process on its host ([`crate::worker`]), which moves bytes
//! repeatedly. The load is read at both ends of a window in which all nodes run at a steady rate.
//! If two nodes were threads of one process, each `munmap` of a mapped receive window would
//! interrupt the other node's CPU to flush its TLB. Two machines share no address space.

use crate::counters::Counters;
use crate::endpoint::Endpoint;
use crate::kernel_threads::{KernelThreads, has_irq_time_accounting};
use haul_soak::{Interval, Meter};
use haul_workers::worker::receiver::ReceiveTask;
use haul_workers::worker::sender::SendTask;
use haul_workers::worker::socket::SocketOptions;
use haul_workers::worker::{Job, Outcome, Task, Window, now_ns, sleep_until};
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

mod error;
pub(crate) mod start;
mod workers;

pub use error::FlowError;
use workers::{Command, Workers};

/// Minimum time that a connection runs before it is measured. Slow start ends after a few
/// milliseconds in the lab. If buffers must fill first, [`crate::regime::warm_up`] returns the
/// time.
pub(crate) const WARM_UP: Duration = Duration::from_millis(25);
/// Interval at which the observer is called within a long window. Each call wakes a thread on a
/// measured CPU, so a short window has none.
const OBSERVE_INTERVAL_NS: u64 = 250_000_000;
/// Tolerated relative error of a window's length, for a process that was not woken in time. Costs
/// are computed from rates, each over its own window, and the work continues until every window is
/// over. Windows that differ more do not measure the same time.
const WINDOW_TOLERANCE: f64 = 0.25;

/// A node of a flow: its sender, its receiver or a forwarder between them.
#[derive(Debug, Clone)]
pub(crate) struct FlowNode<'a> {
    /// The host on which it runs.
    pub host: Endpoint<'a>,
    /// Its task.
    pub task: Task,
}

/// The workers of one measurement, as a chain of TCP connections, and its timing. The first node
/// listens; each later node connects to the one before it.
#[derive(Debug, Clone)]
pub(crate) struct Flow<'a> {
    /// The nodes, from the one that is connected to, to the one that connects.
    pub nodes: Vec<FlowNode<'a>>,
    /// Options that are set on the sockets before they connect or listen.
    pub socket: SocketOptions,
    /// Time to run before the window.
    pub warm_up: Duration,
    /// Length of the window.
    pub window: Duration,
    /// The build of haul whose workers run the flow; `None` for this program.
    pub program: Option<&'a Path>,
}

/// Phases of a window at which an observer is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowPhase {
    Start,
    Inside,
    End,
}

/// The result of one window.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Each CPU's counters over the window; `None` without a meter.
    pub interval: Option<Interval>,
    /// The same for the other machine, if there are two.
    pub remote_interval: Option<Interval>,
    /// The nodes' own counters over the window, in the order of the nodes.
    pub outcomes: Vec<Outcome>,
    /// Counters of each CPU of the lab's hosts over the window.
    pub accounts: Vec<CpuAccount>,
}

/// A CPU's kernel counters over a window, in addition to the meter's reading.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuAccount {
    /// CPU number.
    pub cpu: usize,
    /// Length of the counted time.
    pub seconds: f64,
    /// The kernel's counters.
    pub counters: Counters,
    /// CPU time of the flow's processes and the kernel's threads, in percent of the window; `None`
    /// if unknown.
    pub used_percent: Option<f64>,
}

impl Sample {
    /// The account of a CPU; `None` if it belongs to no host of the lab.
    pub(crate) fn account_of(&self, cpu: usize) -> Option<&CpuAccount> {
        self.accounts.iter().find(|account| account.cpu == cpu)
    }
}

impl<'a> Flow<'a> {
    /// A flow of one stream from one host to another.
    pub(crate) fn stream(
        (from, sending): (Endpoint<'a>, SendTask),
        (to, receiving): (Endpoint<'a>, ReceiveTask),
        socket: SocketOptions,
        window: Duration,
    ) -> Self {
        let nodes = vec![
            FlowNode { host: to, task: Task::Receive(receiving) },
            FlowNode { host: from, task: Task::Send(sending) },
        ];
        Self { nodes, socket, warm_up: WARM_UP, window, program: None }
    }

    /// The CPUs of the lab's hosts that take part, each once.
    fn cpus(&self) -> Vec<usize> {
        let lab_cpu = |node: &FlowNode<'_>| match node.host {
            Endpoint::Lab(host) => Some(host.cpu()),
            Endpoint::Local(_) | Endpoint::Remote(_) => None,
        };
        let mut cpus: Vec<usize> = self.nodes.iter().filter_map(lab_cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }

    /// Each CPU's account between two readings, with the CPU time that its nodes reported.
    fn accounts(
        &self,
        cpus: &[usize],
        after: &CpuReadings,
        before: &CpuReadings,
        outcomes: &[Outcome],
    ) -> Vec<CpuAccount> {
        let seconds = (after.at - before.at).as_secs_f64();
        let account = |(index, &cpu): (usize, &usize)| {
            let runs_on_cpu =
                |node: &FlowNode<'_>| matches!(node.host, Endpoint::Lab(host) if host.cpu() == cpu);
            let nodes = self.nodes.iter().zip(outcomes).filter(|(node, _)| runs_on_cpu(node));
            let parts_share: f64 =
                nodes.map(|(_, outcome)| outcome.cpu_seconds() / outcome.seconds).sum();
            let thread_times = after.kernel_threads.as_ref().zip(before.kernel_threads.as_ref());
            let thread_times =
                thread_times.map(|(after, before)| after[index].saturating_sub(before[index]));
            CpuAccount {
                cpu,
                seconds,
                counters: after.counters[index].since(&before.counters[index]),
                used_percent: thread_times
                    .map(|used| 100.0 * (parts_share + used.as_secs_f64() / seconds)),
            }
        };
        cpus.iter().enumerate().map(account).collect()
    }

    /// Runs the flow and measures one window, with `meter` if there is one.
    pub(crate) fn run(&self, meter: Option<&Meter>) -> Result<Sample, FlowError> {
        self.run_observed(meter, &mut |_| true)
    }

    /// Like [`Self::run`], but calls `observe` at both ends of the window and at intervals within
    /// it. The flow is stopped if it returns false before the end.
    pub(crate) fn run_observed(
        &self,
        meter: Option<&Meter>,
        observe: &mut dyn FnMut(WindowPhase) -> bool,
    ) -> Result<Sample, FlowError> {
        thread::scope(|scope| {
            let mut workers = Workers::new(self.nodes.len());
            let cpus = self.cpus();
            let kernel_threads = KernelThreads::on(&cpus).filter(|_| !has_irq_time_accounting());
            let mut peer = None;
            for (index, node) in self.nodes.iter().enumerate() {
                let host = node.host.address();
                let (socket, task) = (self.socket.clone(), node.task.clone());
                let job = Job { host, port: 0, only_from: None, peer, socket, task };
                workers.start(scope, node.host, job, self.program, index)?;
                if index + 1 < self.nodes.len() {
                    // The reported address is not used: a machine's own address may differ from the
                    // one at which it is reachable.
                    peer = Some(SocketAddr::new(host, workers.wait_for_address(index)?.port()));
                }
            }
            let at_ns = workers.wait_for_start()?;
            let window = Window::of(at_ns, self.warm_up, self.window);
            workers.send_command(Command::Window(window))?;
            sleep_until(window.start_ns);
            let readings_before = CpuReadings::read(&cpus, kernel_threads.as_ref());
            let before = meter.map(Meter::snapshot).transpose()?;
            let start = Instant::now();
            let mut continues = observe(WindowPhase::Start);
            while continues && now_ns() + OBSERVE_INTERVAL_NS < window.end_ns {
                sleep_until(now_ns() + OBSERVE_INTERVAL_NS);
                continues = observe(WindowPhase::Inside);
            }
            if !continues {
                return Err(FlowError::Stopped);
            }
            sleep_until(window.end_ns);
            observe(WindowPhase::End);
            let after = meter.map(Meter::snapshot).transpose()?;
            let readings_after = CpuReadings::read(&cpus, kernel_threads.as_ref());
            let seconds = start.elapsed().as_secs_f64();
            workers.wait_for_windows()?;
            // The other machine's meter must also have measured the window before any node ends.
            let is_remote = |node: &FlowNode<'_>| matches!(node.host, Endpoint::Remote(_));
            let has_remote = self.nodes.iter().any(is_remote);
            let remote_interval =
                has_remote.then(|| workers.wait_for_remote_interval()).transpose()?;
            workers.send_command(Command::End)?;
            let outcomes = workers.wait_for_outcomes()?;
            let remote_seconds =
                remote_interval.as_ref().map(|interval| interval.wall.as_secs_f64());
            let part_seconds = outcomes.iter().map(|outcome| outcome.seconds);
            for seconds in part_seconds.chain([seconds]).chain(remote_seconds) {
                if (seconds / self.window.as_secs_f64() - 1.0).abs() > WINDOW_TOLERANCE {
                    return Err(FlowError::Slipped { seconds });
                }
            }
            let interval = after.zip(before).map(|(after, before)| after.since(&before));
            let accounts = self.accounts(&cpus, &readings_after, &readings_before, &outcomes);
            Ok(Sample { interval, remote_interval, outcomes, accounts })
        })
    }
}

/// Counters of some CPUs at one time.
struct CpuReadings {
    at: Instant,
    counters: Vec<Counters>,
    /// `None` if `/proc` does not show the kernel's threads.
    kernel_threads: Option<Vec<Duration>>,
}

impl CpuReadings {
    fn read(cpus: &[usize], kernel_threads: Option<&KernelThreads>) -> Self {
        Self {
            at: Instant::now(),
            counters: Counters::read(cpus),
            kernel_threads: kernel_threads.map(|threads| threads.cpu_times(cpus.len())),
        }
    }
}
