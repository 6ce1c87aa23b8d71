//! The load of the whole machine for a while, or while a program runs: the meter as a process of its own.
//!
//! Idle priority counts inside a scheduling group only. With autogroups, which most distributions use, every
//! session is a group, and a spinner would take its fair half of a CPU that a program of another session
//! fills. So the meter of `haul soak` is a process in a session of its own, whose group it gives the least
//! weight there is (`/proc/PID/autogroup`, Linux 2.6.38). Nothing else is in that session, so nothing else is
//! changed. Control groups with CPU weights of their own it cannot leave; there is a warning for those.
//!
//! A program that measures this way calls [`run_if_asked`] first thing in `main`: it is started again with
//! [`ARGUMENT`], says a line when it is ready, measures until its standard input ends, and says what it
//! measured as JSON.

use crate::report::{SoakReport, Warning};
use crate::{Baseline, Interval, Meter, SoakError};
use haul_sys::rusage::{self, Who};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The argument that makes a program a meter.
pub const ARGUMENT: &str = "soak-meter";

/// How often a watch looks whether it is to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(50);
/// The machine is looked at in pieces of this length, to find its quietest moment.
const SLICE: Duration = Duration::from_millis(100);
/// Pieces looked at before and after the time that is measured.
const SLICES_AROUND: usize = 4;
/// The least weight of a group.
const NICE_MAX: &str = "19";

/// Measures for `duration`, or until `is_stopped`. Needs [`run_if_asked`] in `main`.
pub fn watch(duration: Duration, is_stopped: &AtomicBool) -> Result<SoakReport, SoakError> {
    let meter = MeterProcess::start()?;
    let deadline = Instant::now() + duration;
    while !is_stopped.load(Relaxed) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        thread::sleep(left.min(STOP_INTERVAL));
    }
    let mut report = meter.finish()?;
    if is_stopped.load(Relaxed) {
        let detail = format!("stopped after {:.1} of {:.1} s", report.seconds, duration.as_secs_f64());
        report.warnings.push(Warning { kind: "interrupted".into(), detail });
    }
    Ok(report.with_warnings())
}

/// Measures while `command` runs; returns its exit status too, or why it could not be started.
/// Needs [`run_if_asked`] in `main`.
pub fn during(command: &mut Command) -> Result<io::Result<(SoakReport, ExitStatus)>, SoakError> {
    let charged = || rusage::usage(Who::Children).unwrap_or_default().cpu();
    let meter = MeterProcess::start()?;
    let charged_before = charged();
    let status = haul_sys::child::dies_with_parent(command).status();
    let rusage = charged().saturating_sub(charged_before);
    let mut report = meter.finish()?;
    report.rusage_cpu_seconds = Some(rusage.as_secs_f64());
    Ok(status.map(|status| (report.with_warnings(), status)))
}

/// A meter that is running.
#[derive(Debug)]
struct MeterProcess {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl MeterProcess {
    /// Starts a meter on the CPUs that this process may use, and waits until it measures.
    fn start() -> Result<Self, SoakError> {
        let failed = |step| move |source| SoakError::Process { step, source };
        let mut command = Command::new("/proc/self/exe");
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        haul_sys::child::in_new_session(haul_sys::child::dies_with_parent(&mut command));
        let mut child = command.spawn().map_err(failed("starting the meter"))?;
        let output = child
            .stdout
            .take()
            .ok_or(io::ErrorKind::BrokenPipe.into())
            .map_err(failed("hearing the meter"))?;
        let mut process = Self { child, output: BufReader::new(output) };
        let mut line = String::new();
        process.output.read_line(&mut line).map_err(failed("hearing the meter"))?;
        if line.trim() == "ready" { Ok(process) } else { Err(process.trouble(&line)) }
    }

    /// Ends the measurement and gives what was measured.
    fn finish(mut self) -> Result<SoakReport, SoakError> {
        drop(self.child.stdin.take());
        let mut text = String::new();
        self.output
            .read_to_string(&mut text)
            .map_err(|source| SoakError::Process { step: "hearing the meter", source })?;
        let report = serde_json::from_str(&text).map_err(|_| self.trouble(&text));
        let _ = self.child.wait();
        report
    }

    fn trouble(&mut self, said: &str) -> SoakError {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let said = if said.is_empty() { "it ended without a word" } else { said.trim() };
        SoakError::Process {
            step: "measuring in a process of its own",
            source: io::Error::other(said.to_owned()),
        }
    }
}

/// Turns this process into a meter if it was started as one; returns its exit code then.
pub fn run_if_asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != ARGUMENT {
        return None;
    }
    let said = match measure() {
        Ok(report) => serde_json::to_string(&report).unwrap_or_else(|error| error.to_string()),
        Err(error) => error.to_string(),
    };
    // The parent is gone if nobody hears this.
    let _ = writeln!(io::stdout(), "{said}");
    Some(ExitCode::SUCCESS)
}

fn measure() -> Result<SoakReport, SoakError> {
    // Refused where there are no autogroups, and then there is nothing to leave.
    let _ = fs::write("/proc/self/autogroup", NICE_MAX);
    let cpus = rustix::thread::sched_getaffinity(None)
        .map_err(|errno| SoakError::Process { step: "asking for the allowed CPUs", source: errno.into() })?;
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| cpus.is_set(cpu)).collect();
    let meter = Meter::start(&cpus)?;
    let mut baseline = Baseline::assumed_from(&slices(&meter)?);
    let first = meter.snapshot()?;
    let _ = writeln!(io::stdout(), "ready");
    let mut last = first.clone();
    while !is_input_over() {
        let next = meter.snapshot()?;
        baseline = Baseline::least(baseline, Baseline::assumed_from(&[next.since(&last)]));
        last = next;
    }
    let whole = meter.snapshot()?.since(&first);
    baseline = Baseline::least(baseline, Baseline::assumed_from(&slices(&meter)?));
    Ok(SoakReport::new(&whole.load(&baseline.unwrap_or_default())))
}

fn slices(meter: &Meter) -> Result<Vec<Interval>, SoakError> {
    (0..SLICES_AROUND).map(|_| meter.observe(SLICE)).collect()
}

/// Waits a slice; returns whether standard input ended meanwhile.
fn is_input_over() -> bool {
    let input = io::stdin();
    let mut wanted = [PollFd::new(&input, PollFlags::IN)];
    let slice = Timespec { tv_sec: 0, tv_nsec: i64::from(SLICE.subsec_nanos()) };
    matches!(poll(&mut wanted, Some(&slice)), Ok(count) if count > 0)
}
