//! Measures the load of the whole machine, with spinners that are separate processes.
//!
//! Idle priority is effective only inside a scheduling group. With autogroups, which most
//! distributions use, every session is a group. A spinner in the caller's session would take its
//! fair half of a CPU that a program of another session fills.
//!
//! So the spinners of `haul soak` are processes in a session of their own. Its group is given the
//! least weight there is (`/proc/PID/autogroup`, Linux 2.6.38). The session contains nothing else,
//! so nothing else is affected.
//!
//! The calling process reads the counters, at its ordinary weight: on a full machine a thread of
//! the spinners' session would read them seconds late. It reads each spinner's CPU clock by its
//! process ID, and the other counters from shared memory.
//!
//! A program that uses this module calls [`run_if_asked`] at the beginning of `main`. To measure,
//! the program starts itself again with [`ARGUMENT`], as a launcher. The launcher starts one
//! spinner for each CPU and then lowers their weight. In the reverse order, on a full machine, it
//! would get no CPU time to start them.

use crate::control_groups::LowWeightGroups;
use crate::error::SoakError;
use crate::exclusive;
use crate::orphans::KnownChildren;
use crate::proc_stat::ProcStat;
use crate::quota::CpuQuotas;
use crate::reading::Baseline;
use crate::reading::Resolution;
use crate::report::{SoakReport, Warning};
use crate::snapshot::{Interval, Snapshot};
use crate::sources::SourceCounts;
use crate::spinner::{self, Counts, ProgressSink};
use haul_lab_sys::clock::ProcessClock;
use haul_lab_sys::lifeline;
use haul_lab_sys::process_stat::ProcessStat;
use haul_lab_sys::rusage::{self, Who};
use haul_lab_sys::shared_counters::SharedCounters;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Command-line argument that turns a program into the launcher of the spinners. With the index of
/// a CPU after it, the program becomes a spinner.
pub const ARGUMENT: &str = "soak-spinner";

/// Interval at which [`watch`] checks whether it must stop.
const STOP_INTERVAL: Duration = Duration::from_millis(20);
/// Length of the slices in which the machine is observed, to find its quietest times.
const SLICE: Duration = Duration::from_millis(100);
/// Number of slices observed before and after a measurement that may be short.
const SLICES_AROUND: usize = 2;
/// Measurements shorter than this get slices around them. Longer measurements contain quiet times.
const SHORT_MAX: Duration = Duration::from_secs(1);
/// Time limit for starting the spinners. On a full machine each must wait for CPU time.
const START_MAX: Duration = Duration::from_secs(10);
/// A measurement is reported as late if its duration differs by more than this share from the
/// requested one.
const LATE_SHARE: f64 = 0.05;
/// The largest share of idle time of a CPU whose spinner runs, in percent. A spinner leaves none.
const IDLE_PERCENT_MAX: f64 = 3.0;
/// Nice value that gives a session the least weight ([`crate::weight::SPINNER_WEIGHT`]).
const NICE_MAX: &str = "19";

/// The sessions of the launchers that this process started. A session has the ID of its launcher.
static METER_SESSIONS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Layout of the shared counters: `COUNT` slots for each spinner, one spinner after the other.
mod slot {
    pub const CPU: usize = 0;
    pub const PROCESS: usize = 1;
    pub const STATE: usize = 2;
    pub const INTERRUPTED_NS: usize = 3;
    pub const WORK: usize = 4;
    /// Slots of 64 bits for one spinner. They fill two cache lines, which prevents false sharing.
    pub const COUNT: usize = 16;
}
/// Spinner state: it spins.
const READY: u64 = 1;
/// Spinner state: it spins, and its session has the least weight.
const LOWERED: u64 = 2;
/// Spinner state: the launcher ended because the process that measures was stopped.
const MEASURER_STOPPED: u64 = 3;
/// Spinner state: setup failed. The errno is added to this value.
const FAILED: u64 = 1 << 32;

/// Measures for `duration`, or until `is_stopped` is set. Needs [`run_if_asked`] in `main`.
pub fn watch(duration: Duration, is_stopped: &AtomicBool) -> Result<SoakReport, SoakError> {
    let spinners = Spinners::start()?;
    let slices_around = if duration < SHORT_MAX { SLICES_AROUND } else { 0 };
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
    let (seconds, requested) = (report.seconds, duration.as_secs_f64());
    let mut warn = |kind: &str, detail| report.warnings.push(Warning { kind: kind.into(), detail });
    if is_stopped.load(Relaxed) {
        warn("interrupted", format!("stopped after {seconds:.1} of {requested:.1} s"));
    } else if (seconds / requested - 1.0).abs() > LATE_SHARE {
        warn(
            "late",
            format!(
                "measured for {seconds:.2} s instead of {requested:.2}: the machine is so busy \
                 that the meter was woken late"
            ),
        );
    }
    Ok(report.with_warnings())
}

/// Measures while `command` runs; returns its exit status too, or the error of starting it. `wait`
/// waits for the running command.
///
/// Processes that the command started and did not wait for are adopted by this process. Needs
/// [`run_if_asked`] in `main`.
pub fn during(
    command: &mut Command,
    wait: impl FnOnce(Child) -> io::Result<ExitStatus>,
) -> Result<io::Result<(SoakReport, ExitStatus)>, SoakError> {
    let children_cpu_time = || rusage::usage(Who::Children).unwrap_or_default().cpu();
    let spinners = Spinners::start()?;
    let meter_sessions = METER_SESSIONS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let known = KnownChildren::before_command(meter_sessions);
    let cpu_time_before = children_cpu_time();
    let Measurement { mut report, result: status } = spinners.measure(SLICES_AROUND, || {
        command.env(exclusive::MEASURED_BY, std::process::id().to_string());
        haul_lab_sys::child::dies_with_parent(command).spawn().and_then(wait)
    })?;
    // After the window, because the search for orphans uses CPU time.
    let running = known.as_ref().and_then(KnownChildren::reap_others);
    let rusage = children_cpu_time().saturating_sub(cpu_time_before);
    report.rusage_cpu_seconds = Some(rusage.as_secs_f64());
    if let Some(running) = running {
        let detail = format!(
            "processes that the command started still run, and their CPU time is not included: \
             {running}"
        );
        report.warnings.push(Warning { kind: "outlived".into(), detail });
    }
    Ok(status.map(|status| (report.with_warnings(), status)))
}

/// A report without its warnings, and the result of the measured work.
struct Measurement<T> {
    report: SoakReport,
    result: T,
}

/// A spinner process on each CPU that this process may use.
///
/// The spinners end when this is dropped, and when this process ends or is stopped.
struct Spinners {
    /// The process that started the spinners.
    launcher: Option<Child>,
    counters: SharedCounters,
    clocks: Vec<(usize, ProcessClock)>,
    processes: Vec<u32>,
}

impl Spinners {
    /// Starts the spinners and waits until all spin in a session of the least weight.
    fn start() -> Result<Self, SoakError> {
        exclusive::begin()?;
        let failed = |step| move |error| SoakError::Process { step, error };
        let cpus = rustix::thread::sched_getaffinity(None)
            .map_err(|errno| failed("reading the allowed CPUs")(errno.into()))?;
        let cpus: Vec<usize> =
            (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| cpus.is_set(cpu)).collect();
        let counters = SharedCounters::create(cpus.len() * slot::COUNT)
            .map_err(failed("creating shared memory"))?;
        for (index, &cpu) in cpus.iter().enumerate() {
            counters.get(index * slot::COUNT + slot::CPU).store(cpu as u64, Relaxed);
        }
        let output =
            counters.as_fd().try_clone_to_owned().map_err(failed("creating shared memory"))?;
        let mut command = Command::new("/proc/self/exe");
        // The spinners keep none of the caller's pipes open. On a full machine a killed spinner
        // takes long to end, and a program that reads the caller's output to its end would wait for
        // it. The spinners report errors in their state. The pipe that is their standard input ends
        // them with this process.
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(output).stderr(Stdio::null());
        haul_lab_sys::child::start_in_new_session(haul_lab_sys::child::dies_with_parent(
            &mut command,
        ));
        let launcher = command.spawn().map_err(failed("starting the spinners"))?;
        METER_SESSIONS.lock().unwrap_or_else(PoisonError::into_inner).push(launcher.id());
        let launcher = Some(launcher);
        let mut spinners = Self { launcher, counters, clocks: Vec::new(), processes: Vec::new() };
        let deadline = Instant::now() + START_MAX;
        for (index, &cpu) in cpus.iter().enumerate() {
            spinners.wait_until_lowered(index, cpu, deadline)?;
            let process =
                spinners.counters.get(index * slot::COUNT + slot::PROCESS).load(Relaxed) as u32;
            let clock = ProcessClock::for_process(process)
                .map_err(|error| SoakError::Spinner { cpu, error })?;
            spinners.clocks.push((cpu, clock));
            spinners.processes.push(process);
        }
        Ok(spinners)
    }

    fn wait_until_lowered(
        &self,
        index: usize,
        cpu: usize,
        deadline: Instant,
    ) -> Result<(), SoakError> {
        loop {
            let error = match self.counters.get(index * slot::COUNT + slot::STATE).load(Acquire) {
                LOWERED => return Ok(()),
                MEASURER_STOPPED => return Err(SoakError::Stopped),
                state if state >= FAILED => io::Error::from_raw_os_error((state - FAILED) as i32),
                _ if Instant::now() > deadline => io::ErrorKind::TimedOut.into(),
                _ => {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
            };
            return Err(SoakError::Spinner { cpu, error });
        }
    }

    /// Measures while `work` runs; slices before, during and after it show the machine at its
    /// quietest.
    fn measure<T>(
        &self,
        slices_around: usize,
        work: impl FnOnce() -> T,
    ) -> Result<Measurement<T>, SoakError> {
        let mut slices = self.slices(|taken| taken < slices_around)?;
        let low_weights = LowWeightGroups::read();
        let quotas = CpuQuotas::read();
        let is_done = AtomicBool::new(false);
        let sources_before = SourceCounts::read();
        let first = self.snapshot()?;
        let (result, last, slices_during) = thread::scope(|scope| {
            let slices_during = scope.spawn(|| self.slices(|_| !is_done.load(Relaxed)));
            let result = work();
            is_done.store(true, Relaxed);
            let last = self.snapshot();
            let slices_during =
                slices_during.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (result, last, slices_during)
        });
        let last = last?;
        let sources = SourceCounts::read();
        self.check_alive()?;
        let starved = low_weights.starvation_warnings();
        let throttled = quotas.throttled_since();
        slices.extend(slices_during?);
        slices.extend(self.slices(|taken| taken < slices_around)?);
        let baseline = Baseline::from_least_disturbed(&slices).unwrap_or_default();
        let whole = last.since(&first);
        let mut report = SoakReport::new(&whole.load(&baseline).corrected_for_spinner_share());
        report.resolution_percent =
            Resolution::of(&slices, &baseline).map(|Resolution(percent)| percent);
        report.warnings.extend(starved);
        let cpus: Vec<usize> = self.clocks.iter().map(|&(cpu, _)| cpu).collect();
        report.sources = sources.since(&sources_before, &cpus, report.seconds);
        report.kernel_threads = sources.busiest_threads(&sources_before, report.seconds);
        if exclusive::is_disturbed() {
            let detail = "another haul measured at the same time, so the readings are wrong".into();
            report.warnings.push(Warning { kind: "another-measurement".into(), detail });
        }
        let idle_percent = whole.idle_percent_max();
        if let Some(detail) = throttled {
            report.withdraw_readings("throttled", detail);
        } else if idle_percent > IDLE_PERCENT_MAX {
            let detail = format!(
                "a CPU was idle for {idle_percent:.0} % of the time although the meter was ready \
                 to run: the meter was stopped, or its control group was frozen"
            );
            report.withdraw_readings("meter-stopped", detail);
        }
        Ok(Measurement { report, result })
    }

    /// Checks that every spinner still runs; the CPU of an ended one would read as full. The OOM
    /// killer may end a spinner, and the launcher ends if this process is stopped.
    fn check_alive(&self) -> Result<(), SoakError> {
        if self.counters.get(slot::STATE).load(Acquire) == MEASURER_STOPPED {
            return Err(SoakError::Stopped);
        }
        for (process, (cpu, _)) in self.processes.iter().zip(&self.clocks) {
            if ProcessStat::read(*process).is_none_or(|stat| stat.has_ended()) {
                let error = io::Error::other("the spinner was killed during the measurement");
                return Err(SoakError::Spinner { cpu: *cpu, error });
            }
        }
        Ok(())
    }

    /// Takes a slice every [`SLICE`] while `should_continue` returns true for the number of slices
    /// taken.
    fn slices(&self, should_continue: impl Fn(usize) -> bool) -> Result<Vec<Interval>, SoakError> {
        let mut slices = Vec::new();
        let mut last = self.snapshot()?;
        while should_continue(slices.len()) {
            thread::sleep(SLICE);
            let next = self.snapshot()?;
            slices.push(next.since(&last));
            last = next;
        }
        Ok(slices)
    }

    fn snapshot(&self) -> Result<Snapshot, SoakError> {
        let stat = ProcStat::read()?;
        let counts = |index: usize, clock: ProcessClock| {
            let count = |slot| self.counters.get(index * slot::COUNT + slot).load(Relaxed);
            Counts {
                // The spinners live as long as this value, so their clocks can be read.
                own: clock.read().unwrap_or_default(),
                interrupted: Duration::from_nanos(count(slot::INTERRUPTED_NS)),
                work: count(slot::WORK),
            }
        };
        let clocks = self.clocks.iter().enumerate();
        let counts = clocks.map(|(index, &(cpu, clock))| (cpu, counts(index, clock))).collect();
        Ok(Snapshot { at: Instant::now(), counts, stat })
    }
}

impl Drop for Spinners {
    /// Does not wait: on a full machine a killed process of the least weight takes long to end, and
    /// nothing depends on it.
    fn drop(&mut self) {
        if let Some(mut launcher) = self.launcher.take() {
            // Fails only for a process that has been waited for.
            let _ = launcher.kill();
            thread::spawn(move || launcher.wait());
        }
    }
}

/// A spinner's counters in shared memory. The spinner is never stopped or paused; it spins until it
/// is killed.
struct SharedState {
    counters: SharedCounters,
    index: usize,
}

impl SharedState {
    fn store(&self, slot: usize, value: u64) {
        self.counters.get(self.index * slot::COUNT + slot).store(value, Relaxed);
    }
}

impl ProgressSink for SharedState {
    fn publish_interrupt_time(&self, ns: u64) {
        self.store(slot::INTERRUPTED_NS, ns);
    }

    fn publish_work(&self, lines: u64) {
        self.store(slot::WORK, lines);
    }

    fn is_stopped(&self) -> bool {
        false
    }

    fn is_paused(&self) -> bool {
        false
    }
}

/// Turns this process into a spinner or a launcher if it was started as one; returns its exit code
/// in that case.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let index = arguments.next();
    let Ok(counters) = io::stdout().as_fd().try_clone_to_owned().and_then(SharedCounters::open)
    else {
        eprintln!("haul: the argument {ARGUMENT} is internal to haul soak");
        return Some(ExitCode::FAILURE);
    };
    match index.map(|index| index.to_str().and_then(|index| index.parse::<usize>().ok())) {
        None => launch(counters),
        Some(Some(index)) if (index + 1) * slot::COUNT <= counters.count() => {
            spin(&SharedState { counters, index });
        }
        Some(_) => {}
    }
    Some(ExitCode::FAILURE)
}

/// Starts a spinner for each CPU, lowers the weight of all, and waits for the end of the process
/// that measures. The spinners end with this process.
///
/// This process also ends if the measuring process is stopped (Ctrl-Z): the spinners would keep the
/// CPUs busy until it continues.
fn launch(counters: SharedCounters) {
    let counters = Arc::new(counters);
    let report_stop = {
        let counters = Arc::clone(&counters);
        move || counters.get(slot::STATE).store(MEASURER_STOPPED, Release)
    };
    let watched =
        lifeline::exit_with_parent().and_then(|()| lifeline::exit_with_stopped_parent(report_stop));
    let spinners = counters.count() / slot::COUNT;
    let get = |index: usize, slot: usize| counters.get(index * slot::COUNT + slot);
    if let Err(error) = watched {
        return get(0, slot::STATE).store(FAILED + errno(&error), Relaxed);
    }
    let mut processes = Vec::new();
    for index in 0..spinners {
        let mut command = Command::new("/proc/self/exe");
        command.args([ARGUMENT, &index.to_string()]).stdin(Stdio::piped());
        match haul_lab_sys::child::dies_with_parent(&mut command).spawn() {
            Ok(process) => processes.push(process),
            Err(error) => get(index, slot::STATE).store(FAILED + errno(&error), Relaxed),
        }
    }
    while (0..spinners).any(|index| get(index, slot::STATE).load(Relaxed) == 0) {
        thread::sleep(Duration::from_millis(1));
    }
    // Fails on a kernel without autogroups; then the spinners are in no group that limits idle
    // priority.
    let _ = fs::write("/proc/self/autogroup", NICE_MAX);
    for index in 0..spinners {
        let _ = get(index, slot::STATE).compare_exchange(READY, LOWERED, AcqRel, Relaxed);
    }
    loop {
        thread::park();
    }
}

fn spin(shared: &SharedState) {
    let cpu = shared.counters.get(shared.index * slot::COUNT + slot::CPU).load(Relaxed) as usize;
    match lifeline::exit_with_parent().and_then(|()| spinner::set_up(cpu)) {
        Ok((clock, _)) => {
            shared.store(slot::PROCESS, std::process::id().into());
            shared.counters.get(shared.index * slot::COUNT + slot::STATE).store(READY, Release);
            spinner::spin(clock, shared);
        }
        Err(error) => shared.store(slot::STATE, FAILED + errno(&error)),
    }
}

fn errno(error: &io::Error) -> u64 {
    error.raw_os_error().unwrap_or(0) as u64
}
