//! The experiment `profile`: the kernel functions in which sending and receiving spend their time.
//! So it shows the most that a change to any of them could save.
//!
//! A timer samples each CPU about 2000 times per second; the report calls a sample a tick. A sample
//! in one of the meter's own threads counts as an idle CPU, unless an interrupt was running on top
//! of it. Functions are grouped by `profile/groups.txt`.

use crate::congestion;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flow::{Flow, WindowPhase};
use crate::host::HostFacts;
use crate::regime::{self, Reading};
use crate::report::LabFacts;
use crate::rounds::{CALIBRATION, Costs, OTHERS_PERCENT_MAX, Pace, Progress, Run, Steps};
use crate::stats::Estimate;
use crate::topology::{HostCpuLoad, Loads};
use crate::verdict::{Question, Verdict};
use crate::view::Drawing;
use crate::warning::{Kind, Warning};
use haul_lab::{Lab, Settings};
use haul_workers::receive_method::ReceiveMethod;
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::{receiver::ReceiveTask, sender::SendTask};
use haul_workers::workload::{Opened, Workload};
use std::collections::HashSet;
use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

mod count;
mod flame;
mod groups;
mod owner;
mod record;
mod row;
mod symbols;

use count::SampleCounts;
use groups::Groups;
use owner::Owners;
use record::Recorder;
pub use row::{Kind as RowKind, ProfileRow};
use symbols::Symbols;

/// The result of `profile`.
pub type ProfileReport = crate::report::Report<ProfileRow>;

/// Bytes per call of the sender, and the receiver's buffer.
const CHUNK_BYTES: usize = 64 << 10;
/// Minimum samples on busy CPUs. With fewer, a share of one percent is only a few samples.
const TICKS_MIN: u64 = 500;
/// The number of groups that the verdict names for each host.
const GROUPS_NAMED: usize = 2;
/// Length of the window in which full speed is measured.
const PILOT_WINDOW: Duration = Duration::from_millis(100);
/// Maximum length of a profile.
const SECONDS_MAX: f64 = 600.0;

/// Parameters of a profile.
#[derive(Debug, Clone)]
pub struct ProfileParameters {
    /// The send method.
    pub send: TestedMethod,
    /// The receive method.
    pub receive: ReceiveMethod,
    /// The workload.
    pub workload: Workload,
    /// Length of the profile.
    pub window: Duration,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
}

/// A report and its flame graphs, one per host.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The report.
    pub report: ProfileReport,
    /// The flame graphs.
    pub drawings: Vec<Drawing>,
}

/// Profiles both hosts while one sends to the other.
pub fn run(
    parameters: &ProfileParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Profile, BenchError> {
    if !(0.1..=SECONDS_MAX).contains(&parameters.window.as_secs_f64()) {
        return Err(BenchError::BadInput(format!("a profile lasts 0.1 to {SECONDS_MAX} seconds")));
    }
    let started = crate::report::now();
    let lab = Lab::open(&Settings::default().with_mtu(parameters.mtu))?;
    let congestion = congestion::choose(&lab, parameters.congestion.as_deref())?;
    let mut cpus = vec![lab.sender.cpu(), lab.receiver.cpu()];
    cpus.dedup();
    let (recorder, symbols) = start_recorder(&cpus)?;
    let workload = parameters.workload.open()?;
    let run = Run::new(&lab, Pace { rounds: 1, window: parameters.window, limit: None })?;
    let meter_threads: HashSet<u32> = run.meter.threads().into_iter().collect();
    let flow = flow(parameters, &lab, &workload, &congestion)?;
    let mut steps = Steps::new(1, is_stopped, progress);
    steps.go_on("sending and receiving");
    // Sampling interrupts the CPUs as well. The baseline includes it, so it is subtracted from the
    // meter's reading.
    let before = run.meter.calibrate(CALIBRATION);
    let mut recorded = Vec::new();
    let sample = flow.run_observed(Some(&run.meter), &mut |phase| {
        match phase {
            WindowPhase::Start => drop(recorder.take()),
            WindowPhase::Inside => {}
            WindowPhase::End => recorded = recorder.take(),
        }
        !is_stopped.load(Relaxed)
    })?;
    let baseline = before.middle(&run.meter.calibrate(CALIBRATION));
    let load = sample.interval.as_ref().map(|interval| interval.load(&baseline));
    let received =
        sample.outcomes.first().map_or(0.0, haul_workers::worker::Outcome::bytes_per_second);
    let costs = load
        .and_then(|load| {
            Costs::of(
                &Loads::of_cpus(lab.cpus(), &load, 0.0, &|cpu| sample.account_of(cpu).copied())?,
                received,
            )
        })
        .ok_or_else(|| BenchError::Failed("nothing was received".into()))?;
    let groups = Groups::builtin();
    let hosts = [
        ("sending host", &costs.sender, costs.sender_us_per_mib, parameters.send.name()),
        ("receiving host", &costs.receiver, costs.receiver_us_per_mib, parameters.receive.name()),
    ];
    let mut report = empty_report(started, &lab, run, &congestion)?;
    let mut drawings = Vec::new();
    let mut shares = Vec::new();
    let mut busy_samples = u64::MAX;
    let owners = recorder.take_owners();
    for ((host, meter, us_per_mib, method), samples) in hosts.into_iter().zip(&recorded) {
        let counts = SampleCounts::of(samples, &symbols, &groups, &meter_threads, &owners);
        let subject = format!("{host}, {method}");
        warn_of_lost_samples(&mut report, &subject, samples.lost);
        warn_of_other_programs(&mut report, &subject, meter);
        add_host(&mut report, &subject, &counts, (meter.load_percent, us_per_mib));
        shares.push(format!("{subject}: {}", row::largest_groups(&counts, GROUPS_NAMED)));
        busy_samples = busy_samples.min(counts.busy());
        drawings.push(Drawing {
            title: format!("Where the time of the {subject} goes"),
            svg: flame::draw(&counts),
        });
    }
    report.add_verdicts([verdict(&shares.join("; "), busy_samples)]);
    Ok(Profile { report, drawings })
}

/// Adds the rows and the sentences of a host; `reading` is the meter's load and cost.
fn add_host(report: &mut ProfileReport, subject: &str, counts: &SampleCounts, reading: (f64, f64)) {
    report.rows.extend(row::rows(subject, counts, Some(reading)));
    report.answers.extend(row::describe_host(subject, counts, Some(reading)));
}

/// The verdict: the groups in which most of the time is spent.
fn verdict(shares: &str, busy_samples: u64) -> Verdict {
    if busy_samples < TICKS_MIN {
        let reason = format!("{busy_samples} samples of a host, and shares take {TICKS_MIN}");
        return Verdict::withheld(Question::CpuTime, &reason, "haul bench profile --for 30s");
    }
    Verdict {
        how: Some("haul bench profile -- COMMAND (your own program)".into()),
        ..Verdict::without_saving(Question::CpuTime, shares)
    }
}

/// The report before its rows.
fn empty_report(
    started: String,
    lab: &Lab,
    run: Run<'_>,
    congestion: &str,
) -> Result<ProfileReport, BenchError> {
    let distance_ns = lab.cache_line_round_trip()?.map(|time| time.as_nanos() as f64);
    let facts = LabFacts {
        cache_line_round_trip_ns: distance_ns.map(Estimate::exactly),
        ..LabFacts::of(&run, congestion, None)
    };
    let mut report =
        ProfileReport::new("profile", started, run.host, Some(facts)).with_reading(Reading::Held);
    report.warnings = run.warnings;
    Ok(report)
}

/// The flow that is profiled, held by the receive window if the receiver reads.
fn flow<'a>(
    parameters: &ProfileParameters,
    lab: &'a Lab,
    workload: &Opened,
    congestion: &str,
) -> Result<Flow<'a>, BenchError> {
    let sending = SendTask {
        path: parameters.send.name().into(),
        chunk_bytes: CHUNK_BYTES,
        cork: false,
        rate_bits_per_second: None,
        pieces: workload.handed_over(),
        plan: None,
    };
    let socket = Reading::Held.socket(congestion);
    let flow = |receiving: ReceiveTask, window| {
        let to = (Endpoint::Lab(&lab.receiver), receiving);
        Flow::stream((Endpoint::Lab(&lab.sender), sending.clone()), to, socket.clone(), window)
    };
    if parameters.receive != ReceiveMethod::Read {
        return Ok(flow(
            ReceiveTask { method: parameters.receive, ..ReceiveTask::plainly() },
            parameters.window,
        ));
    }
    let full_speed = regime::full_speed(&flow(ReceiveTask::plainly(), PILOT_WINDOW))?;
    Ok(Flow {
        warm_up: regime::warm_up(full_speed),
        ..flow(regime::held(&ReceiveTask::plainly(), full_speed), parameters.window)
    })
}

fn warn_of_other_programs(report: &mut ProfileReport, subject: &str, meter: &HostCpuLoad) {
    let others_percent = meter.account.map_or(0.0, |account| account.others_percent);
    if others_percent > OTHERS_PERCENT_MAX {
        let detail = format!(
            "{subject}: other programs used {others_percent:.0} % of this CPU; they are listed by \
             name and excluded from its figures, but they affected its caches and timing"
        );
        report.warnings.push(Warning::new(Kind::Disturbed, detail));
    }
}

/// Profiles the whole machine while a command runs. `wait` waits for the command.
pub fn during(
    command: &mut Command,
    wait: impl FnOnce(Child) -> io::Result<ExitStatus>,
) -> Result<io::Result<(Profile, ExitStatus)>, BenchError> {
    let started = crate::report::now();
    let cpus = haul_lab::allowed_cpus().map_err(|error| BenchError::Failed(error.to_string()))?;
    let (recorder, symbols) = start_recorder(&cpus)?;
    drop(recorder.take());
    let start = Instant::now();
    let run = haul_lab_sys::child::dies_with_parent(command).spawn().and_then(wait);
    let status = match run {
        Ok(status) => status,
        Err(error) => return Ok(Err(error)),
    };
    let recorded = recorder.take();
    let seconds = start.elapsed().as_secs_f64();
    let groups = Groups::builtin();
    let mut all = SampleCounts::default();
    let mut lost = 0;
    for samples in &recorded {
        // Without a flow, every program belongs to the profile.
        all.add(&SampleCounts::of(samples, &symbols, &groups, &HashSet::new(), &Owners::default()));
        lost += samples.lost;
    }
    let subject = format!("machine, {} CPUs for {seconds:.1} s", cpus.len());
    let mut report = ProfileReport::new("profile", started, HostFacts::here(), None);
    warn_of_lost_samples(&mut report, &subject, lost);
    if all.busy() < TICKS_MIN {
        let detail = format!("{} samples on busy CPUs: too few for reliable shares", all.busy());
        report.warnings.push(Warning::new(Kind::TooFewRounds, detail));
    }
    report.rows = row::rows(&subject, &all, None);
    report.answers = row::describe_host(&subject, &all, None);
    let drawing =
        Drawing { title: format!("Where the time of {subject} goes"), svg: flame::draw(&all) };
    Ok(Ok((Profile { report, drawings: vec![drawing] }, status)))
}

/// How to allow an ordinary user to sample the CPUs. The capabilities are effective in the first
/// user namespace only, so they do not serve a lab.
pub(crate) const SAMPLING_FIX: &str = "for a command, setcap cap_perfmon,cap_syslog+ep HAUL; for \
    the lab's hosts, run as root, or sysctl -w kernel.perf_event_paranoid=0 kernel.kptr_restrict=0";

/// Whether the kernel allows this user to sample CPUs.
pub(crate) fn check_permission() -> io::Result<()> {
    let cpus = haul_lab::allowed_cpus()?;
    cpus.first().map_or(Ok(()), |&cpu| Recorder::probe(cpu))
}

fn start_recorder(cpus: &[usize]) -> Result<(Recorder, Symbols), BenchError> {
    let recorder = Recorder::start(cpus).map_err(|error| {
        BenchError::BadInput(format!(
            "the kernel does not allow this user to sample CPUs ({error}): {SAMPLING_FIX}"
        ))
    })?;
    let symbols = Symbols::read()
        .map_err(|error| BenchError::BadInput(format!("/proc/kallsyms: {error}")))?;
    Ok((recorder, symbols))
}

fn warn_of_lost_samples(report: &mut ProfileReport, subject: &str, lost: u64) {
    if lost > 0 {
        let detail = format!(
            "{subject}: {lost} samples were lost, because the machine was too busy to read them"
        );
        report.warnings.push(Warning::new(Kind::AccountsDisagree, detail));
    }
}
