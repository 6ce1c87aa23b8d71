//! The experiment `profile`: where in the kernel the time of sending and receiving goes, function by function, and so
//! the most that any change to a part of it could save.
//!
//! A timer looks at each CPU some thousand times a second. What it finds in the meter's own thread is an idle CPU,
//! unless an interrupt was at work on top of it. The groups are in `profile/groups.txt`.

use crate::endpoint::Endpoint;
use crate::flow::{Flow, Moment};
use crate::regime::{self, Reading};
use crate::report::LabFacts;
use crate::rounds::{CALIBRATION, Costs, OTHERS_PERCENT_MAX, Pace, Progress, Run, Steps};
use crate::stats::Figure;
use crate::topology::Loads;
use crate::view::Picture;
use crate::warning::{Kind, Warning};
use crate::worker::{receiver::Receiving, sender::Sending};
use crate::workload::Workload;
use crate::{
    BenchError, HostFacts, congestion, receive::method::ReceiveMethod, tested_method::TestedMethod,
};
use haul_lab::{Lab, Settings};
use std::collections::HashSet;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

mod count;
mod flame;
mod groups;
mod owner;
mod record;
mod row;
mod symbols;

use count::Counted;
use groups::Groups;
use owner::Owners;
use record::Recorder;
pub use row::{Kind as RowKind, ProfileRow};
use symbols::Symbols;

/// The result of `profile`.
pub type ProfileReport = crate::report::Report<ProfileRow>;

/// What the sender sends in a call, and the receiver's buffer.
const CHUNK_BYTES: usize = 64 << 10;
/// Looks at busy CPUs below which a share of a percent is one look or two.
const TICKS_ENOUGH: u64 = 500;
/// How long full speed is measured.
const PILOT_WINDOW: Duration = Duration::from_millis(100);
/// The longest that is watched.
const SECONDS_MAX: f64 = 600.0;

/// What to watch.
#[derive(Debug, Clone)]
pub struct ProfilePlan {
    /// How it is sent.
    pub send: TestedMethod,
    /// How it is received.
    pub receive: ReceiveMethod,
    /// What is sent.
    pub workload: Workload,
    /// For how long.
    pub window: Duration,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
}

/// A report and its flame graphs, one a host.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The figures.
    pub report: ProfileReport,
    /// Where the time went, drawn.
    pub pictures: Vec<Picture>,
}

/// Watches both hosts while one sends to the other.
pub fn run(
    plan: &ProfilePlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Profile, BenchError> {
    if !(0.1..=SECONDS_MAX).contains(&plan.window.as_secs_f64()) {
        return Err(BenchError::BadInput(format!("a profile takes 0.1 to {SECONDS_MAX} seconds")));
    }
    let started = crate::now();
    let lab = Lab::open(&Settings { mtu: plan.mtu, cpus: None })?;
    let congestion = congestion::choose(&lab, plan.congestion.as_deref())?;
    let mut cpus = vec![lab.sender.cpu(), lab.receiver.cpu()];
    cpus.dedup();
    let (recorder, symbols) = watch(&cpus)?;
    let workload = plan.workload.open()?;
    let run = Run::new(&lab, Pace { rounds: 1, window: plan.window })?;
    let own: HashSet<u32> = run.meter.threads().into_iter().collect();
    let sending = Sending {
        path: plan.send.name().into(),
        chunk_bytes: CHUNK_BYTES,
        cork: false,
        rate_bits_per_second: None,
        pieces: workload.handed_over(),
        plan: None,
    };
    let socket = Reading::Held.socket(&congestion);
    let flow = |receiving: Receiving, window| {
        let to = (Endpoint::Lab(&lab.receiver), receiving);
        Flow::stream((Endpoint::Lab(&lab.sender), sending.clone()), to, socket.clone(), window)
    };
    let flow = if plan.receive == ReceiveMethod::Read {
        let full_speed = regime::full_speed(&flow(Receiving::plainly(), PILOT_WINDOW))?;
        Flow {
            warm_up: regime::warm_up(full_speed),
            ..flow(regime::held(&Receiving::plainly(), full_speed), plan.window)
        }
    } else {
        flow(Receiving { way: plan.receive, ..Receiving::plainly() }, plan.window)
    };
    let mut steps = Steps::new(1, is_stopped, progress);
    steps.go_on("sending and receiving");
    // The looks themselves interrupt too; a baseline that has them takes them off the meter's reading.
    let before = run.meter.calibrate(CALIBRATION);
    let mut seen = Vec::new();
    let sample = flow.run_seen(Some(&run.meter), &mut |moment| {
        match moment {
            Moment::Start => drop(recorder.take()),
            Moment::Inside => {}
            Moment::End => seen = recorder.take(),
        }
        !is_stopped.load(Relaxed)
    })?;
    let baseline = before.middle(&run.meter.calibrate(CALIBRATION));
    let load = sample.interval.as_ref().map(|interval| interval.load(&baseline));
    let received = sample.outcomes.first().map_or(0.0, crate::worker::Outcome::bytes_per_second);
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
        ("sending host", &costs.sender, costs.sender_us_per_mib, plan.send.name()),
        ("receiving host", &costs.receiver, costs.receiver_us_per_mib, plan.receive.name()),
    ];
    let apart = lab.cache_line_round_trip()?.map(|time| time.as_nanos() as f64);
    let facts = LabFacts {
        cache_line_round_trip_ns: apart.map(Figure::exactly),
        ..LabFacts::of(&run, &congestion, None)
    };
    let mut report =
        ProfileReport::new("profile", started, run.host, Some(facts)).with_reading(Reading::Held);
    report.warnings = run.warnings;
    let mut pictures = Vec::new();
    let owners = recorder.take_owners();
    for ((host, meter, us_per_mib, way), seen) in hosts.into_iter().zip(&seen) {
        let counted = Counted::of(seen, &symbols, &groups, &own, &owners);
        let what = format!("{host}, {way}");
        warn_of_losses(&mut report, &what, seen.lost);
        let others_percent = meter.account.map_or(0.0, |account| account.others_percent);
        if others_percent > OTHERS_PERCENT_MAX {
            let words = format!(
                "{what}: other programs used {others_percent:.0} % of this CPU; they are listed by name and no part of its \
                 figures, but the caches and the timing were not the path's alone"
            );
            report.warnings.push(Warning::new(Kind::Disturbed, words));
        }
        report.rows.extend(row::rows(&what, &counted, Some((meter.load_percent, us_per_mib))));
        report.answers.extend(row::answer(&what, &counted, Some((meter.load_percent, us_per_mib))));
        pictures.push(Picture {
            title: format!("Where the time of the {what} goes"),
            svg: flame::draw(&counted),
        });
    }
    Ok(Profile { report, pictures })
}

/// Watches the whole machine while a command runs.
pub fn during(command: &mut Command) -> Result<std::io::Result<(Profile, ExitStatus)>, BenchError> {
    let started = crate::now();
    let cpus = haul_lab::allowed_cpus().map_err(|error| BenchError::Failed(error.to_string()))?;
    let (recorder, symbols) = watch(&cpus)?;
    drop(recorder.take());
    let start = Instant::now();
    let status = match haul_sys::child::dies_with_parent(command).status() {
        Ok(status) => status,
        Err(error) => return Ok(Err(error)),
    };
    let seen = recorder.take();
    let seconds = start.elapsed().as_secs_f64();
    let groups = Groups::builtin();
    let mut all = Counted::default();
    let mut lost = 0;
    for seen in &seen {
        // Whatever runs on the machine is what was asked for.
        all.add(&Counted::of(seen, &symbols, &groups, &HashSet::new(), &Owners::default()));
        lost += seen.lost;
    }
    let what = format!("machine, {} CPUs for {seconds:.1} s", cpus.len());
    let mut report = ProfileReport::new("profile", started, HostFacts::here(), None);
    warn_of_losses(&mut report, &what, lost);
    if all.busy() < TICKS_ENOUGH {
        let words = format!("{} looks at busy CPUs: too few for shares that mean much", all.busy());
        report.warnings.push(Warning::new(Kind::TooFewRounds, words));
    }
    report.rows = row::rows(&what, &all, None);
    report.answers = row::answer(&what, &all, None);
    let picture =
        Picture { title: format!("Where the time of {what} goes"), svg: flame::draw(&all) };
    Ok(Ok((Profile { report, pictures: vec![picture] }, status)))
}

fn watch(cpus: &[usize]) -> Result<(Recorder, Symbols), BenchError> {
    let recorder = Recorder::start(cpus).map_err(|error| {
        BenchError::BadInput(format!(
            "the kernel does not let this user watch CPUs ({error}): run as root, or sysctl -w kernel.perf_event_paranoid=0 kernel.kptr_restrict=0"
        ))
    })?;
    let symbols = Symbols::read()
        .map_err(|error| BenchError::BadInput(format!("/proc/kallsyms: {error}")))?;
    Ok((recorder, symbols))
}

fn warn_of_losses(report: &mut ProfileReport, what: &str, lost: u64) {
    if lost > 0 {
        let words = format!(
            "{what}: {lost} looks were lost, because the machine was too busy to keep them"
        );
        report.warnings.push(Warning::new(Kind::AccountsDisagree, words));
    }
}
