//! The experiment `send`: what each way of putting files or memory into a socket costs the two hosts.

use crate::flow::{Flow, FlowError, Sample};
use crate::matrix::{self, Cell, Condition, Selection};
use crate::quantity::Rate;
use crate::report::{Observer, Report};
use crate::stats::Figure;
use crate::warning::{Kind, Warning};
use crate::workload::{Opened, Workload};
use crate::{BenchError, HostFacts};
use haul::{Copying, Path};
use haul_lab::{Lab, Offloads, Settings};
use haul_soak::{Baseline, CpuLoad, Meter};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

mod congestion;
mod copies;
mod rows;
mod warnings;

/// What to run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The rows.
    pub selections: Vec<Selection>,
    /// How often each row is measured.
    pub rounds: usize,
    /// The rate to hold, or full speed.
    pub rate: Option<Rate>,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
    /// How long each row is measured in each round.
    pub window: Duration,
    /// How many pairs of runs, with the meter and without, for the observer effect.
    pub observer_pairs: usize,
}

impl Plan {
    /// The default: seven rounds, MTU 9000, cubic or reno. BBR, the default on some hosts, paces every send
    /// with timers, which costs the sender about a quarter more here and would be read as the path's cost.
    pub fn new(selections: Vec<Selection>) -> Self {
        Self {
            selections,
            rounds: 7,
            rate: None,
            mtu: Settings::default().mtu,
            congestion: None,
            window: Duration::from_millis(150),
            observer_pairs: 15,
        }
    }

    /// A quick look: three short rounds of the plain rows.
    pub fn quick(selections: Vec<Selection>) -> Self {
        Self { rounds: 3, window: Duration::from_millis(100), observer_pairs: 5, ..Self::new(selections) }
    }
}

/// How far a run has come.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Rows measured, counting each round.
    pub done: usize,
    /// How many there will be.
    pub total: usize,
    /// What is measured next.
    pub next: String,
}

/// How long the machine is kept quiet before and after each round to calibrate the meter.
pub(crate) const CALIBRATION: Duration = Duration::from_millis(150);
/// How long a connection runs before it is measured: slow start is over after a few milliseconds here, and
/// the buffers have grown to their size.
pub(crate) const WARM_UP: Duration = Duration::from_millis(60);
/// The most rounds that make sense.
const ROUNDS_MAX: usize = 1000;

pub(crate) const MIB: f64 = (1u64 << 20) as f64;

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then
/// reported.
pub fn run(
    plan: &Plan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, BenchError> {
    if !(1..=ROUNDS_MAX).contains(&plan.rounds) {
        return Err(BenchError::BadInput(format!("rounds must be 1 to {ROUNDS_MAX}, not {}", plan.rounds)));
    }
    let cells = matrix::cells(&plan.selections);
    let workloads = open_workloads(&cells)?;
    let started = crate::now();
    let lab = Lab::open(&Settings { mtu: plan.mtu, cpus: None })?;
    let congestion = congestion::choose(&lab, plan.congestion.as_deref())?;
    let mut cpus = vec![lab.sender.cpu(), lab.receiver.cpu()];
    cpus.dedup();
    let mut run = Run {
        plan,
        congestion,
        lab: &lab,
        workloads,
        meter: Meter::start(&cpus)?,
        host: HostFacts::here(),
        warnings: lab.caveats().iter().map(|caveat| Warning::new(Kind::Lab, caveat)).collect(),
        disturbances: Vec::new(),
        round_trips_ns: Vec::new(),
        series: cells.into_iter().map(Series::new).collect(),
    };
    run.prove_copies();
    let observer_pairs = if plan.rate.is_none() { plan.observer_pairs } else { 0 };
    let total = plan.rounds * run.series.len() + observer_pairs;
    let mut done = 0;
    let mut step = |next: &str| {
        progress(Progress { done, total, next: next.into() });
        done += 1;
        !is_stopped.load(Relaxed)
    };
    let mut is_complete = true;
    for round in 0..plan.rounds {
        is_complete = run.round(round, &mut step)?;
        if !is_complete {
            break;
        }
    }
    let observer = if is_complete { run.observer_effect(observer_pairs, &mut step) } else { Ok(None) };
    let observer = observer.unwrap_or_else(|error| {
        let unknown = format!("the meter's own effect is not known: {error}");
        run.warnings.push(Warning::new(Kind::Observer, unknown));
        None
    });
    if !is_complete {
        run.warnings.insert(
            0,
            Warning::new(Kind::Interrupted, "stopped before it was complete: some rows have fewer rounds"),
        );
    }
    Ok(run.into_report(started, observer))
}

fn open_workloads(cells: &[Cell]) -> Result<HashMap<Workload, Opened>, BenchError> {
    let mut workloads = HashMap::new();
    for Condition { workload, chunk, .. } in cells.iter().map(|cell| &cell.condition) {
        matrix::check_chunk(*chunk)?;
        if !workloads.contains_key(workload) {
            workloads.insert(workload.clone(), workload.open()?);
        }
        matrix::check_chunk_in(*chunk, &workloads[workload])?;
    }
    Ok(workloads)
}

struct Run<'a> {
    plan: &'a Plan,
    congestion: String,
    lab: &'a Lab,
    workloads: HashMap<Workload, Opened>,
    meter: Meter,
    host: HostFacts,
    warnings: Vec<Warning>,
    /// How much of a CPU others used, in percent: an entry for each round in which that was too much.
    disturbances: Vec<f64>,
    /// The round trip of a cache line between the hosts' CPUs, read around every round.
    round_trips_ns: Vec<f64>,
    series: Vec<Series>,
}

/// What was measured of one row, one entry a round. Rounds carry their number, so that those of different
/// rows can be put side by side though one has failed.
struct Series {
    cell: Cell,
    refused: Option<String>,
    proved_copied_percent: Option<f64>,
    rounds: Vec<Round>,
    /// Why rounds are missing.
    failures: Vec<String>,
}

#[derive(Clone, Copy)]
struct Round {
    number: usize,
    throughput_bits_per_second: f64,
    sender: CpuLoad,
    receiver: CpuLoad,
    sender_us_per_mib: f64,
    receiver_us_per_mib: f64,
    rusage_us_per_mib: f64,
    syscalls_per_mib: f64,
    zero_copied_bytes: u64,
    copied_bytes: u64,
}

impl Series {
    fn new(cell: Cell) -> Self {
        Self { cell, refused: None, proved_copied_percent: None, rounds: Vec::new(), failures: Vec::new() }
    }

    fn figure(&self, of: impl Fn(&Round) -> f64) -> Option<Figure> {
        Figure::of(&self.rounds.iter().map(of).collect::<Vec<_>>())
    }
}

impl Run<'_> {
    /// Measures every row once, between two calibrations. Every other round runs backwards, so that a
    /// drift within a round weighs on no row twice. Returns whether it came to its end.
    fn round(&mut self, number: usize, step: &mut dyn FnMut(&str) -> bool) -> Result<bool, BenchError> {
        self.note_distance()?;
        let before = self.meter.calibrate(CALIBRATION);
        let mut samples = Vec::new();
        let mut is_complete = true;
        let mut order: Vec<usize> = (0..self.series.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        let mut offloads = None;
        for index in order {
            if !step(self.series[index].cell.path.name()) {
                is_complete = false;
                break;
            }
            if self.series[index].refused.is_some() {
                continue;
            }
            let condition = self.series[index].cell.condition.clone();
            if offloads != Some(condition.offloads) {
                offloads = Some(condition.offloads);
                if let Err(reason) = self.set_offloads(condition.offloads) {
                    self.refuse_all(condition.offloads, &reason);
                }
            }
            if self.series[index].refused.is_some() {
                continue;
            }
            match self.flow(&self.series[index].cell).run(Some(&self.meter)) {
                Ok(sample) => samples.push((index, sample)),
                Err(FlowError::Refused(reason)) => self.series[index].refused = Some(reason),
                Err(error @ (FlowError::Lab(_) | FlowError::Soak(_))) => return Err(error.into()),
                // One bad round is no reason to lose the others.
                Err(error) => self.series[index].failures.push(error.to_string()),
            }
        }
        let after = self.meter.calibrate(CALIBRATION);
        self.note_distance()?;
        self.note_calibration(number, &before, &after);
        let baseline = before.middle(&after);
        for (index, sample) in samples {
            if let Some(round) = self.judge(number, &sample, &baseline) {
                self.series[index].rounds.push(round);
            }
        }
        Ok(is_complete)
    }

    /// Offloads are on by nature; only a change needs a lab that can make it.
    fn set_offloads(&self, offloads: Offloads) -> Result<(), String> {
        match (self.lab.kind(), offloads) {
            (haul_lab::Kind::Loopback, Offloads::On) => Ok(()),
            _ => self.lab.set_offloads(offloads).map_err(|error| error.to_string()),
        }
    }

    fn refuse_all(&mut self, offloads: Offloads, reason: &str) {
        for series in &mut self.series {
            if series.cell.condition.offloads == offloads {
                series.refused = Some(reason.to_owned());
            }
        }
    }

    fn flow<'a>(&'a self, cell: &Cell) -> Flow<'a> {
        Flow {
            lab: self.lab,
            workload: &self.workloads[&cell.condition.workload],
            path: cell.path,
            chunk_bytes: cell.condition.chunk.0 as usize,
            cork: cell.condition.cork,
            congestion: &self.congestion,
            rate_bits_per_second: self.plan.rate.map(|rate| rate.0),
            warm_up: WARM_UP,
            window: self.plan.window,
        }
    }

    /// Turns counters into costs. `None` when nothing arrived in the window.
    fn judge(&mut self, number: usize, sample: &Sample, baseline: &Baseline) -> Option<Round> {
        let load = sample.interval.as_ref()?.load(baseline);
        self.host.steal_percent = self.host.steal_percent.max(load.steal_percent());
        let sender = *load.of(self.lab.sender.cpu())?;
        let receiver = *load.of(self.lab.receiver.cpu())?;
        let received_mib = sample.received_bytes as f64 / MIB;
        let sent_mib = sample.sent.bytes as f64 / MIB;
        if sample.received_bytes == 0 || sample.sent.bytes == 0 {
            return None;
        }
        let us_per_mib = |cpu: &CpuLoad| cpu.load_percent / 100.0 * load.seconds * 1e6 / received_mib;
        Some(Round {
            number,
            throughput_bits_per_second: sample.received_bytes as f64 * 8.0 / sample.seconds,
            sender_us_per_mib: us_per_mib(&sender),
            receiver_us_per_mib: us_per_mib(&receiver),
            rusage_us_per_mib: sample.sent.cpu_seconds * 1e6 / sent_mib,
            syscalls_per_mib: sample.sent.calls as f64 / sent_mib,
            zero_copied_bytes: sample.sent.zero_copied_bytes,
            copied_bytes: sample.sent.copied_bytes,
            sender,
            receiver,
        })
    }

    /// Throughput with the meter against throughput without, in pairs, on the first sendfile row, or the
    /// first row.
    fn observer_effect(
        &self,
        pairs: usize,
        step: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Option<Observer>, BenchError> {
        let measured = || self.series.iter().filter(|series| !series.rounds.is_empty());
        let is_sendfile = |series: &&Series| series.cell.path == Path::Sendfile.into();
        let Some(series) = measured().find(is_sendfile).or_else(|| measured().next()) else {
            return Ok(None);
        };
        if self.set_offloads(series.cell.condition.offloads).is_err() {
            return Ok(None);
        }
        let flow = self.flow(&series.cell);
        let rate = |sample: &Sample| sample.received_bytes as f64 / sample.seconds;
        let mut ratios = Vec::new();
        for pair in 0..pairs {
            if !step("the meter's own effect") {
                break;
            }
            let with = || flow.run(Some(&self.meter));
            let without = || self.meter.paused(|| flow.run(None));
            // Every other pair the other way round, so that a drift helps neither.
            let (with, without) = if pair % 2 == 0 {
                let with = with()?;
                (with, without()?)
            } else {
                let without = without()?;
                (with()?, without)
            };
            ratios.push(rate(&with) / rate(&without));
        }
        let observer = Figure::of(&ratios).map(|throughput_ratio| Observer {
            path: series.cell.path.name().into(),
            pairs: ratios.len(),
            throughput_ratio,
        });
        Ok(observer)
    }
}
