//! The load of the whole machine for a while, or while a program runs: spinners as processes of their own.
//!
//! Idle priority counts inside a scheduling group only. With autogroups, which most distributions use, every session is a
//! group, and a spinner would take its fair half of a CPU that a program of another session fills. So the spinners of
//! `haul soak` are processes in a session of their own, whose group is given the least weight there is
//! (`/proc/PID/autogroup`, Linux 2.6.38). Nothing else is in that session, so nothing else is changed.
//!
//! The process that was asked reads the counters, at its ordinary weight: on a full machine a thread beside the spinners
//! would get to read them seconds late. It reads each spinner's CPU clock by its process number, and the rest from memory
//! that all share.
//!
//! A program that measures this way calls [`run_if_asked`] first thing in `main`: it is started again with [`ARGUMENT`], and
//! that process starts one for each CPU and then lowers their weight. On a full machine it would not get to start them
//! afterwards.

use crate::control_groups::LowWeights;
use crate::reading::Resolution;
use crate::report::{SoakReport, Warning};
use crate::spinner::{self, Counts, Publish};
use crate::{Baseline, Interval, ProcStat, Snapshot, SoakError};
use haul_sys::clock::ProcessClock;
use haul_sys::rusage::{self, Who};
use haul_sys::shared_counters::SharedCounters;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use std::thread;
use std::time::{Duration, Instant};

/// The argument that makes a program start spinners; with a CPU's place behind it, be one.
pub const ARGUMENT: &str = "soak-spinner";

/// How often a watch looks whether it is to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(20);
/// The machine is looked at in pieces of this length, to find its quietest moments.
const SLICE: Duration = Duration::from_millis(100);
/// Pieces looked at before and after a time that may be short.
const SLICES_AROUND: usize = 2;
/// A longer time has quiet moments of its own.
const SHORT: Duration = Duration::from_secs(1);
/// How long the spinners may take to start. On a full machine each waits for its turn.
const START_MAX: Duration = Duration::from_secs(10);
/// A measurement may be longer or shorter by this share of what was asked for.
const LATE_SHARE: f64 = 0.05;
/// The nice value of a session of the least weight ([`crate::weight::SPINNER_WEIGHT`]).
const NICE_MAX: &str = "19";

/// What a spinner shares with the process that reads: so many counters each, one spinner after the other.
mod slot {
    pub const CPU: usize = 0;
    pub const PROCESS: usize = 1;
    pub const STATE: usize = 2;
    pub const INTERRUPTED_NS: usize = 3;
    pub const WORK: usize = 4;
    /// Two cache lines, so that no spinner dirties another's.
    pub const COUNT: usize = 16;
}
/// States of a spinner.
const READY: u64 = 1;
/// Its session has the least weight.
const LOWERED: u64 = 2;
/// Further states are this and an errno.
const FAILED: u64 = 1 << 32;

/// Measures for `duration`, or until `is_stopped`. Needs [`run_if_asked`] in `main`.
pub fn watch(duration: Duration, is_stopped: &AtomicBool) -> Result<SoakReport, SoakError> {
    let spinners = Spinners::start()?;
    let slices_around = if duration < SHORT { SLICES_AROUND } else { 0 };
    let measured = spinners.measure(slices_around, || {
        let deadline = Instant::now() + duration;
        while !is_stopped.load(Relaxed) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(STOP_INTERVAL));
        }
    })?;
    let mut report = measured.report;
    let (seconds, asked) = (report.seconds, duration.as_secs_f64());
    let mut warn = |kind: &str, detail| report.warnings.push(Warning { kind: kind.into(), detail });
    if is_stopped.load(Relaxed) {
        warn("interrupted", format!("stopped after {seconds:.1} of {asked:.1} s"));
    } else if (seconds / asked - 1.0).abs() > LATE_SHARE {
        warn(
            "late",
            format!(
                "measured for {seconds:.2} s instead of {asked:.2}: the machine is so busy that the meter was woken late"
            ),
        );
    }
    Ok(report.with_warnings())
}

/// Measures while `command` runs; returns its exit status too, or why it could not be started.
/// Needs [`run_if_asked`] in `main`.
pub fn during(command: &mut Command) -> Result<io::Result<(SoakReport, ExitStatus)>, SoakError> {
    let charged = || rusage::usage(Who::Children).unwrap_or_default().cpu();
    let spinners = Spinners::start()?;
    let Measured { mut report, result } = spinners.measure(SLICES_AROUND, || {
        let charged_before = charged();
        let status = haul_sys::child::dies_with_parent(command).status();
        (status, charged().saturating_sub(charged_before))
    })?;
    let (status, rusage) = result;
    report.rusage_cpu_seconds = Some(rusage.as_secs_f64());
    Ok(status.map(|status| (report.with_warnings(), status)))
}

/// A report without its warnings, and what was done meanwhile.
struct Measured<T> {
    report: SoakReport,
    result: T,
}

/// A spinner on each CPU that this process may use. They end when this is dropped, and when the thread that started them
/// does.
struct Spinners {
    /// The process that has started them.
    launcher: Option<Child>,
    counters: SharedCounters,
    clocks: Vec<(usize, ProcessClock)>,
    processes: Vec<u32>,
}

impl Spinners {
    /// Starts the spinners and waits until all spin, in a session of the least weight.
    fn start() -> Result<Self, SoakError> {
        let failed = |step| move |source| SoakError::Process { step, source };
        let cpus = rustix::thread::sched_getaffinity(None)
            .map_err(|errno| failed("asking for the allowed CPUs")(errno.into()))?;
        let cpus: Vec<usize> =
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| cpus.is_set(cpu)).collect();
        let counters = SharedCounters::create(cpus.len() * slot::COUNT)
            .map_err(failed("making shared memory"))?;
        for (place, &cpu) in cpus.iter().enumerate() {
            counters.get(place * slot::COUNT + slot::CPU).store(cpu as u64, Relaxed);
        }
        let output =
            counters.as_fd().try_clone_to_owned().map_err(failed("making shared memory"))?;
        let mut command = Command::new("/proc/self/exe");
        // The spinners keep none of the caller's pipes open: on a full machine a killed spinner takes long to end, and a
        // program that reads the caller's output to its end would wait for it. They report errors in their state.
        command.arg(ARGUMENT).stdin(Stdio::null()).stdout(output).stderr(Stdio::null());
        haul_sys::child::in_new_session(haul_sys::child::dies_with_parent(&mut command));
        let launcher = Some(command.spawn().map_err(failed("starting the spinners"))?);
        let mut spinners = Self { launcher, counters, clocks: Vec::new(), processes: Vec::new() };
        let deadline = Instant::now() + START_MAX;
        for (place, &cpu) in cpus.iter().enumerate() {
            spinners.wait_until_lowered(place, cpu, deadline)?;
            let process =
                spinners.counters.get(place * slot::COUNT + slot::PROCESS).load(Relaxed) as u32;
            let clock =
                ProcessClock::of(process).map_err(|source| SoakError::Spinner { cpu, source })?;
            spinners.clocks.push((cpu, clock));
            spinners.processes.push(process);
        }
        Ok(spinners)
    }

    fn wait_until_lowered(
        &self,
        place: usize,
        cpu: usize,
        deadline: Instant,
    ) -> Result<(), SoakError> {
        loop {
            let source = match self.counters.get(place * slot::COUNT + slot::STATE).load(Acquire) {
                LOWERED => return Ok(()),
                state if state >= FAILED => io::Error::from_raw_os_error((state - FAILED) as i32),
                _ if Instant::now() > deadline => io::ErrorKind::TimedOut.into(),
                _ => {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
            };
            return Err(SoakError::Spinner { cpu, source });
        }
    }

    /// Measures while `work` runs, between slices that tell what the machine does when it is quietest.
    fn measure<T>(
        &self,
        slices_around: usize,
        work: impl FnOnce() -> T,
    ) -> Result<Measured<T>, SoakError> {
        let mut slices = self.slices(|taken| taken < slices_around)?;
        let low_weights = LowWeights::read();
        let is_over = AtomicBool::new(false);
        let first = self.snapshot()?;
        let (result, last, inside) = thread::scope(|scope| {
            let inside = scope.spawn(|| self.slices(|_| !is_over.load(Relaxed)));
            let result = work();
            is_over.store(true, Relaxed);
            let last = self.snapshot();
            (result, last, inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let last = last?;
        self.check_alive()?;
        let starved = low_weights.used_since();
        slices.extend(inside?);
        slices.extend(self.slices(|taken| taken < slices_around)?);
        let baseline = Baseline::assumed_from(&slices).unwrap_or_default();
        let load = last.since(&first).load(&baseline).with_a_fair_share_given_back();
        let mut report = SoakReport::new(&load);
        report.resolution_percent =
            Resolution::of(&slices, &baseline).map(|Resolution(percent)| percent);
        report.warnings.extend(starved);
        Ok(Measured { report, result })
    }

    /// A spinner that was killed (by the kernel for want of memory, say) would read as a full CPU.
    fn check_alive(&self) -> Result<(), SoakError> {
        for (process, (cpu, _)) in self.processes.iter().zip(&self.clocks) {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            // The state stands behind the name, which is in parentheses and may hold anything.
            let state =
                stat.rsplit_once(')').and_then(|(_, fields)| fields.trim_start().chars().next());
            if matches!(state, None | Some('Z' | 'X')) {
                let source = io::Error::other("it was killed while it measured");
                return Err(SoakError::Spinner { cpu: *cpu, source });
            }
        }
        Ok(())
    }

    /// Reads the counters every [`SLICE`] while `goes_on` is true of the number of slices taken.
    fn slices(&self, goes_on: impl Fn(usize) -> bool) -> Result<Vec<Interval>, SoakError> {
        let mut slices = Vec::new();
        let mut last = self.snapshot()?;
        while goes_on(slices.len()) {
            thread::sleep(SLICE);
            let next = self.snapshot()?;
            slices.push(next.since(&last));
            last = next;
        }
        Ok(slices)
    }

    fn snapshot(&self) -> Result<Snapshot, SoakError> {
        let stat = ProcStat::read()?;
        let counts = |place: usize, clock: ProcessClock| {
            let count = |slot| self.counters.get(place * slot::COUNT + slot).load(Relaxed);
            Counts {
                // The spinners live as long as this value, so their clocks can be read.
                own: clock.read().unwrap_or_default(),
                interrupted: Duration::from_nanos(count(slot::INTERRUPTED_NS)),
                work: count(slot::WORK),
            }
        };
        let clocks = self.clocks.iter().enumerate();
        let counts = clocks.map(|(place, &(cpu, clock))| (cpu, counts(place, clock))).collect();
        Ok(Snapshot { at: Instant::now(), counts, stat })
    }
}

impl Drop for Spinners {
    /// On a full machine a killed process of the least weight takes a while to end, and nothing depends on it.
    fn drop(&mut self) {
        if let Some(mut launcher) = self.launcher.take() {
            // Fails only for a process that has been waited for.
            let _ = launcher.kill();
            thread::spawn(move || launcher.wait());
        }
    }
}

/// Where a spinner publishes. It spins until it is killed.
struct Shared {
    counters: SharedCounters,
    place: usize,
}

impl Shared {
    fn store(&self, slot: usize, value: u64) {
        self.counters.get(self.place * slot::COUNT + slot).store(value, Relaxed);
    }
}

impl Publish for Shared {
    fn interrupted(&self, ns: u64) {
        self.store(slot::INTERRUPTED_NS, ns);
    }

    fn work(&self, lines: u64) {
        self.store(slot::WORK, lines);
    }

    fn is_stopped(&self) -> bool {
        false
    }

    fn is_paused(&self) -> bool {
        false
    }
}

/// Turns this process into a spinner, or into the one that starts them, if it was started as such; returns its exit code
/// then.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let place = arguments.next();
    let Ok(counters) = io::stdout().as_fd().try_clone_to_owned().and_then(SharedCounters::open)
    else {
        eprintln!("haul: {ARGUMENT} is for haul soak alone");
        return Some(ExitCode::FAILURE);
    };
    match place.map(|place| place.to_str().and_then(|place| place.parse::<usize>().ok())) {
        None => launch(&counters),
        Some(Some(place)) if (place + 1) * slot::COUNT <= counters.count() => {
            spin(&Shared { counters, place });
        }
        Some(_) => {}
    }
    Some(ExitCode::FAILURE)
}

/// Starts a spinner for each CPU, lowers the weight of all, and waits to be killed; they end with this process.
fn launch(counters: &SharedCounters) {
    let spinners = counters.count() / slot::COUNT;
    let get = |place: usize, slot: usize| counters.get(place * slot::COUNT + slot);
    let mut processes = Vec::new();
    for place in 0..spinners {
        let mut command = Command::new("/proc/self/exe");
        command.args([ARGUMENT, &place.to_string()]).stdin(Stdio::null());
        match haul_sys::child::dies_with_parent(&mut command).spawn() {
            Ok(process) => processes.push(process),
            Err(error) => get(place, slot::STATE).store(FAILED + errno(&error), Relaxed),
        }
    }
    while (0..spinners).any(|place| get(place, slot::STATE).load(Relaxed) == 0) {
        thread::sleep(Duration::from_millis(1));
    }
    // Refused where there are no autogroups, and then there is no group to leave.
    let _ = fs::write("/proc/self/autogroup", NICE_MAX);
    for place in 0..spinners {
        let _ = get(place, slot::STATE).compare_exchange(READY, LOWERED, AcqRel, Relaxed);
    }
    loop {
        thread::park();
    }
}

fn spin(shared: &Shared) {
    let cpu = shared.counters.get(shared.place * slot::COUNT + slot::CPU).load(Relaxed) as usize;
    match spinner::set_up(cpu) {
        Ok((clock, _)) => {
            shared.store(slot::PROCESS, std::process::id().into());
            shared.counters.get(shared.place * slot::COUNT + slot::STATE).store(READY, Release);
            spinner::spin(clock, shared);
        }
        Err(error) => shared.store(slot::STATE, FAILED + errno(&error)),
    }
}

fn errno(error: &io::Error) -> u64 {
    error.raw_os_error().unwrap_or(0) as u64
}
