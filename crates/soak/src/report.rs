//! `haul soak`: the load of the whole machine for a while, or while a program runs.

use crate::{Baseline, CpuLoad, Interval, Meter, Snapshot, SoakError};
use haul_sys::rusage::{self, Who};
use serde::Serialize;
use std::io;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The contract's name and version. A field that is added keeps the version; one that changes or goes does not.
pub const SCHEMA: &str = "haul.soak/1";

/// The machine is looked at in pieces of this length, to find its quietest moment.
const SLICE: Duration = Duration::from_millis(100);
/// Pieces looked at before and after a program runs.
const SLICES_AROUND: usize = 4;
/// Steal beyond this is worth a word.
const STEAL_PERCENT: f64 = 1.0;
/// `/proc/stat` may differ by this many points before it is worth a word.
const DISAGREEMENT_POINTS: f64 = 3.0;
/// `getrusage` may miss this share of the load before it is worth a word.
const UNCHARGED: f64 = 0.10;

/// The result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SoakReport {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Wall time.
    pub seconds: f64,
    /// The mean load of the measured CPUs.
    pub total_load_percent: f64,
    /// The CPU time that the load came to.
    pub cpu_seconds: f64,
    /// Each CPU's readings.
    pub cpus: Vec<CpuLoad>,
    /// What `getrusage` charged the program and its descendants; `null` without one.
    pub rusage_cpu_seconds: Option<f64>,
    /// What to know about the figures.
    pub warnings: Vec<Warning>,
}

/// What a reader of the figures should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// `steal`, `accounts-disagree`, `uncharged`.
    pub kind: &'static str,
    /// In words.
    pub detail: String,
}

/// Measures for `duration`, or until `is_stopped`.
pub fn watch(meter: &Meter, duration: Duration, is_stopped: &AtomicBool) -> Result<SoakReport, SoakError> {
    let deadline = Instant::now() + duration;
    let first = meter.snapshot()?;
    let (mut last, mut baseline) = (first.clone(), None);
    while !is_stopped.load(Relaxed) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        thread::sleep(left.min(SLICE));
        let next = meter.snapshot()?;
        let slice = Baseline::assumed_from(&[next.since(&last)]);
        baseline = Baseline::least(baseline, slice);
        last = next;
    }
    Ok(report(&last.since(&first), baseline, None))
}

/// Measures while `command` runs; returns its exit status too, or why it could not be started.
pub fn during(
    meter: &Meter,
    command: &mut Command,
) -> Result<io::Result<(SoakReport, ExitStatus)>, SoakError> {
    let mut around = slices(meter)?;
    let charged = || rusage::usage(Who::Children).unwrap_or_default().cpu();
    let charged_before = charged();
    let before: Snapshot = meter.snapshot()?;
    let status = match haul_sys::child::dies_with_parent(command).status() {
        Ok(status) => status,
        Err(error) => return Ok(Err(error)),
    };
    let whole = meter.snapshot()?.since(&before);
    let rusage = charged().saturating_sub(charged_before);
    around.extend(slices(meter)?);
    Ok(Ok((report(&whole, Baseline::assumed_from(&around), Some(rusage)), status)))
}

fn slices(meter: &Meter) -> Result<Vec<Interval>, SoakError> {
    (0..SLICES_AROUND).map(|_| meter.observe(SLICE)).collect()
}

fn report(whole: &Interval, baseline: Option<Baseline>, rusage: Option<Duration>) -> SoakReport {
    let baseline = baseline.unwrap_or_default();
    let load = whole.load(&baseline);
    let mut report = SoakReport {
        schema: SCHEMA,
        seconds: load.seconds,
        total_load_percent: load.total_percent(),
        cpu_seconds: load.cpu_seconds(),
        rusage_cpu_seconds: rusage.map(|time| time.as_secs_f64()),
        warnings: Vec::new(),
        cpus: load.cpus,
    };
    report.warn();
    report
}

impl SoakReport {
    fn warn(&mut self) {
        let mut warn = |kind, detail| self.warnings.push(Warning { kind, detail });
        for CpuLoad {
            cpu,
            load_percent,
            taken_percent,
            interrupted_percent,
            proc_stat_percent,
            steal_percent,
            ..
        } in self.cpus.iter().copied()
        {
            if steal_percent > STEAL_PERCENT {
                warn(
                    "steal",
                    format!("the hypervisor took {steal_percent:.1} % of CPU {cpu}; it is counted as load"),
                );
            }
            if (load_percent - proc_stat_percent).abs() > DISAGREEMENT_POINTS {
                let why = if interrupted_percent > taken_percent {
                    "most of it is interrupt work, which the kernel samples at its tick"
                } else {
                    "the kernel samples at its tick what runs at that moment"
                };
                warn(
                    "accounts-disagree",
                    format!(
                        "CPU {cpu}: the meter reads {load_percent:.1} %, /proc/stat {proc_stat_percent:.1} %: {why}"
                    ),
                );
            }
        }
        if let Some(charged) = self.rusage_cpu_seconds
            && charged < (1.0 - UNCHARGED) * self.cpu_seconds
        {
            let seconds = self.cpu_seconds;
            warn(
                "uncharged",
                format!(
                    "{:.0} % of the {seconds:.3} CPU-seconds were charged to no process of the program: interrupts, kernel threads, other programs",
                    100.0 * (1.0 - charged / seconds)
                ),
            );
        }
    }
}
