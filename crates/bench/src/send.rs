//! The experiment `send`: the CPU cost of each send method, on the sending and the receiving host,
//! for files and memory.

use crate::congestion;
use crate::error::BenchError;
use crate::flow::{Flow, FlowError, Sample};
use crate::matrix::{self, SendCase, SendCondition, SendSelection};
use crate::pair::Pair;
use crate::regime::{self, FullSpeedThroughputs, Reading};
use crate::report::Observer;
use crate::rounds::{Costs, Experiment, Pace, Part, Progress, Run, Series, Steps};
use crate::topology::{Loads, Topology};
use crate::warning::{Kind, Warning};
use haul::SendMethod;
use haul_lab::{Lab, Offloads, Settings};
use haul_soak::Meter;
use haul_units::Rate;
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::{Outcome, Paced, receiver::ReceiveTask, sender::SendTask};
use haul_workers::workload::{Opened, Workload};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

mod answer;
pub(crate) mod builds;
mod copies;
pub(crate) mod prediction;
mod row;
mod rows;
mod verdict;
mod warnings;

pub use row::SendRow;

/// The report of the experiment `send`.
pub type SendReport = crate::report::Report<SendRow>;

/// The share of a time limit in which the observer effect is measured.
const OBSERVER_SHARE: f64 = 0.15;
/// The smallest share of a window in which the receive window alone must limit the sender, when the
/// receiver holds the rate.
const WINDOW_LIMITED_SHARE_MIN: f64 = 0.8;

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct SendParameters {
    /// The rows to measure.
    pub selections: Vec<SendSelection>,
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// The rate that the sender holds by pacing; `None` for full speed.
    pub rate: Option<Rate>,
    /// The other machine to measure with, instead of the lab's second host.
    pub peer: Option<Arc<Pair>>,
    /// How the receiving program reads. Ignored if `rate` is set: then it reads as fast as it can.
    pub reading: Reading,
    /// The lab's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that can be set.
    pub congestion: Option<String>,
    /// The plan that rows of the method `planned` choose by.
    pub planned: Option<haul::Plan>,
    /// The number of run pairs, one with the meter and one without, that measure the observer
    /// effect.
    pub observer_pairs: usize,
    /// Whether the copies of each row are proved, and not only of methods that avoid copies.
    pub proves_all: bool,
}

impl SendParameters {
    /// The default: 21 rounds, MTU 9000, cubic or reno, and a receiver that holds the rate. BBR,
    /// the default on some hosts, is not used: it paces every send with timers, whose cost would be
    /// attributed to the send method.
    pub fn new(selections: Vec<SendSelection>) -> Self {
        Self {
            selections,
            pace: Pace::FULL,
            rate: None,
            reading: Reading::Held,
            peer: None,
            mtu: Settings::default().mtu,
            congestion: None,
            planned: None,
            observer_pairs: 15,
            proves_all: false,
        }
    }

    /// A short measurement: fifteen rounds with short windows.
    pub fn quick(selections: Vec<SendSelection>) -> Self {
        Self { pace: Pace::QUICK, observer_pairs: 15, ..Self::new(selections) }
    }
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &SendParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<SendReport, BenchError> {
    parameters.pace.check()?;
    let cases = matrix::cases(&parameters.selections);
    if parameters.planned.is_none() && cases.iter().any(|case| case.method == TestedMethod::Planned)
    {
        return Err(BenchError::BadInput("planned needs a plan to choose by: --plan FILE".into()));
    }
    let workloads = open_workloads(&cases)?;
    let started = crate::report::now();
    let lab;
    let topology = if let Some(pair) = parameters.peer.as_deref() {
        Topology::Pair(pair)
    } else {
        lab = Lab::open(&Settings::default().with_mtu(parameters.mtu))?;
        Topology::Lab(&lab)
    };
    let congestion = congestion::choose(topology, parameters.congestion.as_deref())?;
    let mut run = Run::new(topology, parameters.pace)?;
    let mut experiment = SendExperiment::new(topology, workloads, congestion, parameters, &[]);
    let copied_percents = copies::prove(&mut experiment, &cases, parameters.proves_all);
    let mut rows: Vec<SendSeries> = cases
        .into_iter()
        .zip(copied_percents)
        .map(|(case, proved_copied_percent)| CaseWithProof {
            case,
            proved_copied_percent,
            build: 0,
        })
        .map(Series::new)
        .collect();
    let observer =
        measure_all(parameters, &mut run, &mut experiment, &mut rows, is_stopped, progress)?;
    run.warn(
        &rows,
        |proved_case| warnings::name(&proved_case.case),
        |round| round.costs.sender_us_per_mib,
    );
    run.warnings.extend(warnings::of(
        &rows,
        parameters.rate,
        experiment.reading,
        observer.as_ref(),
    ));
    let verdicts = verdict::of(&rows, &experiment, &run, observer.as_ref());
    let rows = rows.iter().map(|series| rows::row(series, &rows, &experiment)).collect();
    let mut report =
        SendReport::of_run("send", started, run, &experiment.congestion, parameters.rate, rows)
            .with_reading(experiment.reading);
    report.observer = observer;
    report.add_verdicts(verdicts);
    report.answers = answer::of(&report);
    if let Some(planned) = &parameters.planned {
        report.answers.extend(prediction::sentences(planned, &report));
        report.warnings.extend(prediction::warning(planned, &report));
    }
    Ok(report)
}

/// Measures the rows and the observer effect, which is `None` if it is not known.
fn measure_all(
    parameters: &SendParameters,
    run: &mut Run<'_>,
    experiment: &mut SendExperiment<'_>,
    rows: &mut [SendSeries],
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Option<Observer>, BenchError> {
    // The other machine's meter cannot be paused.
    let has_observer = parameters.rate.is_none() && experiment.topology.lab().is_some();
    let observer_pairs = if has_observer { parameters.observer_pairs } else { 0 };
    let mut steps = Steps::new(run.steps(rows.len()) + observer_pairs, is_stopped, progress)
        .with_limit(parameters.pace.limit);
    let share = if has_observer { 1.0 - OBSERVER_SHARE } else { 1.0 };
    if !run.measure_in_share(share, experiment, rows, &mut steps)? {
        return Ok(None);
    }
    let observer = observer_effect(experiment, &run.meter, rows, observer_pairs, &mut steps);
    Ok(observer.unwrap_or_else(|error| {
        let detail = format!("the meter's own effect is not known: {error}");
        run.warnings.push(Warning::new(Kind::Observer, detail));
        None
    }))
}

fn open_workloads(cases: &[SendCase]) -> Result<HashMap<Workload, Opened>, BenchError> {
    let mut workloads = HashMap::new();
    for SendCondition { workload, chunk, .. } in cases.iter().map(|case| &case.condition) {
        matrix::check_chunk(*chunk)?;
        if !workloads.contains_key(workload) {
            workloads.insert(workload.clone(), workload.open()?);
        }
        matrix::check_chunk_in(*chunk, &workloads[workload])?;
    }
    Ok(workloads)
}

/// A row to measure, with the result of the test whether its method copies.
struct CaseWithProof {
    case: SendCase,
    proved_copied_percent: Option<f64>,
    /// The index of the build of haul that the row measures, if builds are compared.
    build: usize,
}

/// A row and its rounds.
type SendSeries = Series<CaseWithProof, SendRound>;

#[derive(Clone, Copy)]
struct SendRound {
    costs: Costs,
    rusage_us_per_mib: f64,
    syscalls_per_mib: f64,
    acknowledgements_per_mib: f64,
    /// The share of the measured time in which only the peer's receive window limited the sender.
    window_limited_share: f64,
    zero_copied_bytes: u64,
    copied_bytes: u64,
    chosen_method: Option<SendMethod>,
    paced: Option<Paced>,
}

/// The experiment's state: hosts, workloads and settings.
struct SendExperiment<'a> {
    topology: Topology<'a>,
    workloads: HashMap<Workload, Opened>,
    congestion: String,
    rate: Option<Rate>,
    reading: Reading,
    full_speeds: FullSpeedThroughputs<SendCase>,
    planned: Option<&'a haul::Plan>,
    /// The builds of haul that are compared; empty for this program.
    builds: &'a [PathBuf],
    pace: Pace,
    /// The current state of the sending device's offloads; `None` if it was not set yet.
    offloads: Option<Offloads>,
}

impl<'a> SendExperiment<'a> {
    fn new(
        topology: Topology<'a>,
        workloads: HashMap<Workload, Opened>,
        congestion: String,
        parameters: &'a SendParameters,
        builds: &'a [PathBuf],
    ) -> Self {
        Self {
            topology,
            workloads,
            congestion,
            rate: parameters.rate,
            // If the sender holds a rate, that rate already determines the regime.
            reading: if parameters.rate.is_some() { Reading::Free } else { parameters.reading },
            full_speeds: FullSpeedThroughputs::default(),
            planned: parameters.planned.as_ref(),
            builds,
            pace: parameters.pace,
            offloads: None,
        }
    }

    /// Switches the sending device's offloads. They are on by default, so only a change needs a lab
    /// that supports it.
    fn set_offloads(&mut self, wanted: Offloads) -> Result<(), FlowError> {
        if self.offloads == Some(wanted) {
            return Ok(());
        }
        match self.topology.lab() {
            Some(lab) if lab.kind() != haul_lab::Kind::Loopback || wanted != Offloads::On => {
                lab.set_offloads(wanted).map_err(|error| FlowError::Refused(error.to_string()))?;
            }
            None if wanted != Offloads::On => {
                return Err(FlowError::Refused(
                    "a real device's offloads are left as they are".into(),
                ));
            }
            _ => {}
        }
        self.offloads = Some(wanted);
        Ok(())
    }

    fn flow(&self, case: &SendCase, receiving: ReceiveTask) -> Flow<'_> {
        let SendCase { method, condition } = case;
        let sending = SendTask {
            path: method.name().into(),
            chunk_bytes: condition.chunk.0 as usize,
            cork: condition.cork,
            rate_bits_per_second: self.rate.map(|rate| rate.0),
            pieces: self.workloads[&condition.workload].handed_over(),
            plan: self.planned.cloned().map(Box::new),
        };
        let to = (self.topology.receiver(), receiving);
        let mut socket = self.reading.socket(&self.congestion);
        if let Some(buffers) = condition.buffers {
            socket.buffer_bytes = Some(buffers.0 as usize);
        }
        Flow::stream((self.topology.sender(), sending), to, socket, self.pace.window)
    }

    /// The flow that measures a row.
    fn measured_flow(&mut self, case: &SendCase) -> Result<Flow<'_>, FlowError> {
        if self.reading == Reading::Free {
            return Ok(self.flow(case, ReceiveTask::plainly()));
        }
        let mut full_speeds = std::mem::take(&mut self.full_speeds);
        let full_speed = full_speeds.get_or_measure(case, &self.flow(case, ReceiveTask::plainly()));
        self.full_speeds = full_speeds;
        let full_speed = full_speed?;
        let warm_up = regime::warm_up(full_speed);
        Ok(Flow { warm_up, ..self.flow(case, regime::held(&ReceiveTask::plainly(), full_speed)) })
    }
}

impl Experiment for SendExperiment<'_> {
    type Case = CaseWithProof;
    type Round = SendRound;

    fn name(&self, proved_case: &CaseWithProof) -> String {
        let build =
            self.builds.get(proved_case.build).map(|build| format!(" of {}", build.display()));
        format!("{}{}", proved_case.case.method.name(), build.unwrap_or_default())
    }

    fn measure(&mut self, proved_case: &CaseWithProof, meter: &Meter) -> Result<Sample, FlowError> {
        self.set_offloads(proved_case.case.condition.offloads)?;
        let builds = self.builds;
        let program = builds.get(proved_case.build).map(PathBuf::as_path);
        Flow { program, ..self.measured_flow(&proved_case.case)? }.run(Some(meter))
    }

    fn evaluate(&self, _: &CaseWithProof, sample: &Sample, loads: &Loads) -> Option<SendRound> {
        let [received, sent] = sample.outcomes.as_slice() else { return None };
        let mut costs = Costs::of(loads, received.bytes_per_second())?;
        // The buffers between the two ends may be filled differently at the start and the end of a
        // window. So the bytes attributed to the sender are the mean of the bytes sent and the
        // bytes received.
        costs.sender_us_per_mib *=
            2.0 / (1.0 + sent.bytes_per_second() / received.bytes_per_second());
        (sent.bytes > 0).then(|| SendRound {
            costs,
            rusage_us_per_mib: sent.cpu_seconds() * 1e6 / sent.mib(),
            syscalls_per_mib: sent.calls as f64 / sent.mib(),
            acknowledgements_per_mib: sent.segments_in as f64 / sent.mib(),
            window_limited_share: sent.window_limited_seconds / sent.seconds,
            zero_copied_bytes: sent.zero_copied_bytes,
            copied_bytes: sent.copied_bytes,
            chosen_method: sent.taken,
            paced: sent.paced,
        })
    }

    /// Groups rows by the state of the offloads, because switching a device's offloads takes
    /// milliseconds.
    fn block(&self, proved_case: &CaseWithProof) -> usize {
        usize::from(proved_case.case.condition.offloads == Offloads::Off)
    }

    /// Whether the receive window limited the sender, if the receiver holds the rate.
    fn is_in_regime(&self, round: &SendRound) -> bool {
        // A build that is slower in the program is limited by the window for less of the time. Of
        // two builds the rounds with the same interrupts are compared.
        !self.builds.is_empty()
            || self.reading == Reading::Free
            || round.window_limited_share >= WINDOW_LIMITED_SHARE_MIN
    }

    fn costs(round: &SendRound) -> Option<&Costs> {
        Some(&round.costs)
    }

    fn part(&self, proved_case: &CaseWithProof) -> Option<Part> {
        let SendCase { method, condition } = &proved_case.case;
        if !self.builds.is_empty() {
            let question = format!("{method} {condition:?}");
            return Some(Part { question, is_baseline: proved_case.build == 0 });
        }
        let is_floor = *method == SendMethod::Floor.into();
        let is_one_copy = matches!(method, TestedMethod::OneCopy(_));
        (verdict::is_nameable(*method) || is_floor || is_one_copy).then(|| Part {
            // The floor is not a candidate, but a verdict needs it.
            question: if is_floor { String::new() } else { format!("{condition:?}") },
            is_baseline: *method == SendMethod::ReadWrite.into(),
        })
    }

    fn compared_cost(round: &SendRound) -> f64 {
        round.costs.sender_us_per_mib
    }
}

/// Measures the observer effect: the ratio of the throughput with the meter to that without. Runs
/// in pairs, on the first `sendfile` row, else on the first row.
fn observer_effect(
    experiment: &mut SendExperiment<'_>,
    meter: &Meter,
    rows: &[SendSeries],
    pairs: usize,
    steps: &mut Steps<'_>,
) -> Result<Option<Observer>, BenchError> {
    let measured_cases =
        || rows.iter().filter(|row| !row.rounds.is_empty()).map(|row| &row.case.case);
    let is_sendfile = |case: &&SendCase| case.method == SendMethod::Sendfile.into();
    let Some(case) = measured_cases().find(is_sendfile).or_else(|| measured_cases().next()) else {
        return Ok(None);
    };
    if experiment.set_offloads(case.condition.offloads).is_err() {
        return Ok(None);
    }
    let flow = experiment.flow(case, ReceiveTask::plainly());
    let rate =
        |sample: &Sample| sample.outcomes.first().map_or(f64::NAN, Outcome::bytes_per_second);
    let mut ratios = Vec::new();
    let path = case.method.name();
    let end = experiment.pace.limit.map(|limit| limit.end_of_share(1.0));
    for pair in 0.. {
        let is_enough = match end {
            None => pair >= pairs,
            Some(end) => {
                Instant::now() >= end
                    || Observer::of(path, &ratios).is_some_and(|observer| observer.is_known)
            }
        };
        if pairs == 0 || is_enough || !steps.go_on("the meter's own effect") {
            break;
        }
        let with = || flow.run(Some(meter));
        let without = || meter.paused(|| flow.run(None));
        // The order alternates from pair to pair, so that drift favours neither side.
        let (with, without) = if pair % 2 == 0 {
            let with = with()?;
            (with, without()?)
        } else {
            let without = without()?;
            (with()?, without)
        };
        ratios.push(rate(&with) / rate(&without));
    }
    Ok(Observer::of(path, &ratios))
}
