//! The experiment `send`: what each way of putting files or memory into a socket costs the two hosts.

use crate::flow::{Flow, FlowError, Sample};
use crate::matrix::{self, SendCase, SendCondition, SendSelection};
use crate::pair::Pair;
use crate::quantity::Rate;
use crate::regime::{self, FullSpeeds, Reading};
use crate::report::Observer;
use crate::rounds::{Costs, Pace, Progress, Run, Series, Steps, Subject};
use crate::stats::Figure;
use crate::tested_method::TestedMethod;
use crate::topology::{Loads, Topology};
use crate::warning::{Kind, Warning};
use crate::worker::{Outcome, Paced, receiver::Receiving, sender::Sending};
use crate::workload::{Opened, Workload};
use crate::{BenchError, congestion};
use haul::SendMethod;
use haul_lab::{Lab, Offloads, Settings};
use haul_soak::Meter;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

mod answer;
mod copies;
pub(crate) mod prediction;
mod row;
mod rows;
mod warnings;

pub use row::SendRow;

/// The result of `send`.
pub type SendReport = crate::report::Report<SendRow>;

/// The share of a window in which the peer's window must hold the sender back, where it is to.
const WINDOW_LIMITED_MIN: f64 = 0.8;

/// What to run.
#[derive(Debug, Clone)]
pub struct SendPlan {
    /// The rows.
    pub selections: Vec<SendSelection>,
    /// How often and how long.
    pub pace: Pace,
    /// The rate to hold, or full speed.
    pub rate: Option<Rate>,
    /// The machine to measure with, instead of the lab's second host.
    pub peer: Option<Arc<Pair>>,
    /// How the receiving program reads; at full speed where a rate is to be held.
    pub reading: Reading,
    /// The lab's MTU in bytes.
    pub mtu: u32,
    /// The sockets' congestion control; `None` for the first of cubic and reno that may be set.
    pub congestion: Option<String>,
    /// What the rows `planned` choose by.
    pub planned: Option<haul::Plan>,
    /// How many pairs of runs, with the meter and without, for the observer effect.
    pub observer_pairs: usize,
}

impl SendPlan {
    /// The default: twenty-one rounds, MTU 9000, cubic or reno, a reader that holds the rate. BBR, the default on some hosts,
    /// paces every send with timers, which would be read as the path's cost.
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
        }
    }

    /// A quick look: fifteen short rounds of the plain rows.
    pub fn quick(selections: Vec<SendSelection>) -> Self {
        Self { pace: Pace::QUICK, observer_pairs: 15, ..Self::new(selections) }
    }
}

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then
/// reported.
pub fn run(
    plan: &SendPlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<SendReport, BenchError> {
    plan.pace.check()?;
    let cases = matrix::cases(&plan.selections);
    if plan.planned.is_none() && cases.iter().any(|case| case.path == TestedMethod::Planned) {
        return Err(BenchError::BadInput("planned needs a plan to choose by: --plan FILE".into()));
    }
    let workloads = open_workloads(&cases)?;
    let started = crate::now();
    let lab;
    let site = if let Some(pair) = plan.peer.as_deref() {
        Topology::Pair(pair)
    } else {
        lab = Lab::open(&Settings { mtu: plan.mtu, cpus: None })?;
        Topology::Lab(&lab)
    };
    let congestion = congestion::choose(site, plan.congestion.as_deref())?;
    let mut run = Run::new(site, plan.pace)?;
    let mut sends = Sends {
        site,
        workloads,
        congestion,
        rate: plan.rate,
        // A rate that the sender holds is the regime that was asked for.
        reading: if plan.rate.is_some() { Reading::Free } else { plan.reading },
        full_speeds: FullSpeeds::default(),
        planned: plan.planned.as_ref(),
        pace: plan.pace,
        offloads: None,
    };
    let proved = copies::prove(&mut sends, &cases);
    let mut rows: Vec<SendSeries> = cases
        .into_iter()
        .zip(proved)
        .map(|(case, proved_copied_percent)| Series::new(Candidate { case, proved_copied_percent }))
        .collect();
    // The other machine's meter cannot be paused.
    let has_observer = plan.rate.is_none() && site.lab().is_some();
    let observer_pairs = if has_observer { plan.observer_pairs } else { 0 };
    let mut steps = Steps::new(run.steps(rows.len()) + observer_pairs, is_stopped, progress);
    let is_complete = run.all(&mut sends, &mut rows, &mut steps)?;
    let observer = if is_complete {
        observer_effect(&mut sends, &run.meter, &rows, observer_pairs, &mut steps)
    } else {
        Ok(None)
    };
    let observer = observer.unwrap_or_else(|error| {
        let unknown = format!("the meter's own effect is not known: {error}");
        run.warnings.push(Warning::new(Kind::Observer, unknown));
        None
    });
    run.warn(
        &rows,
        |candidate| warnings::name(&candidate.case),
        |round| round.costs.sender_us_per_mib,
    );
    run.warnings.extend(warnings::of(&rows, plan.rate, sends.reading, observer.as_ref()));
    let rows = rows.iter().map(|series| rows::row(series, &rows, &sends)).collect();
    let mut report = SendReport::of_run("send", started, run, &sends.congestion, plan.rate, rows)
        .with_reading(sends.reading);
    report.observer = observer;
    report.answers = answer::of(&report);
    if let Some(planned) = &plan.planned {
        report.answers.extend(prediction::sentences(planned, &report));
        report.warnings.extend(prediction::warning(planned, &report));
    }
    Ok(report)
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

/// A row to be measured.
struct Candidate {
    case: SendCase,
    proved_copied_percent: Option<f64>,
}

/// A row and its rounds.
type SendSeries = Series<Candidate, SendRound>;

#[derive(Clone, Copy)]
struct SendRound {
    costs: Costs,
    rusage_us_per_mib: f64,
    syscalls_per_mib: f64,
    acknowledgements_per_mib: f64,
    /// The share of the window in which only the peer's window held the sender back.
    window_limited: f64,
    zero_copied_bytes: u64,
    copied_bytes: u64,
    taken: Option<SendMethod>,
    paced: Option<Paced>,
}

/// What sends.
struct Sends<'a> {
    site: Topology<'a>,
    workloads: HashMap<Workload, Opened>,
    congestion: String,
    rate: Option<Rate>,
    reading: Reading,
    full_speeds: FullSpeeds<SendCase>,
    planned: Option<&'a haul::Plan>,
    pace: Pace,
    /// How the sending device stands.
    offloads: Option<Offloads>,
}

impl Sends<'_> {
    /// Offloads are on by nature; only a change needs a lab that can make it.
    fn set_offloads(&mut self, wanted: Offloads) -> Result<(), FlowError> {
        if self.offloads == Some(wanted) {
            return Ok(());
        }
        match self.site.lab() {
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

    fn flow(&self, case: &SendCase, receiving: Receiving) -> Flow<'_> {
        let SendCase { path, condition } = case;
        let sending = Sending {
            path: path.name().into(),
            chunk_bytes: condition.chunk.0 as usize,
            cork: condition.cork,
            rate_bits_per_second: self.rate.map(|rate| rate.0),
            pieces: self.workloads[&condition.workload].handed_over(),
            plan: self.planned.cloned().map(Box::new),
        };
        let to = (self.site.receiver(), receiving);
        Flow::stream(
            (self.site.sender(), sending),
            to,
            self.reading.socket(&self.congestion),
            self.pace.window,
        )
    }

    /// The flow of a row as it is measured.
    fn measured_flow(&mut self, case: &SendCase) -> Result<Flow<'_>, FlowError> {
        if self.reading == Reading::Free {
            return Ok(self.flow(case, Receiving::plainly()));
        }
        let mut full_speeds = std::mem::take(&mut self.full_speeds);
        let full_speed = full_speeds.of(case, &self.flow(case, Receiving::plainly()));
        self.full_speeds = full_speeds;
        let full_speed = full_speed?;
        let warm_up = regime::warm_up(full_speed);
        Ok(Flow { warm_up, ..self.flow(case, regime::held(&Receiving::plainly(), full_speed)) })
    }
}

impl Subject for Sends<'_> {
    type Case = Candidate;
    type Round = SendRound;

    fn name(&self, candidate: &Candidate) -> String {
        candidate.case.path.name().into()
    }

    fn measure(&mut self, candidate: &Candidate, meter: &Meter) -> Result<Sample, FlowError> {
        self.set_offloads(candidate.case.condition.offloads)?;
        self.measured_flow(&candidate.case)?.run(Some(meter))
    }

    fn judge(&self, _: &Candidate, sample: &Sample, loads: &Loads) -> Option<SendRound> {
        let [received, sent] = sample.outcomes.as_slice() else { return None };
        let mut costs = Costs::of(loads, received.bytes_per_second())?;
        // The buffers between both ends are not equally full at both ends of a window. What the sender did is between what it
        // was given and what arrived.
        costs.sender_us_per_mib *=
            2.0 / (1.0 + sent.bytes_per_second() / received.bytes_per_second());
        (sent.bytes > 0).then(|| SendRound {
            costs,
            rusage_us_per_mib: sent.cpu_seconds() * 1e6 / sent.mib(),
            syscalls_per_mib: sent.calls as f64 / sent.mib(),
            acknowledgements_per_mib: sent.segments_in as f64 / sent.mib(),
            window_limited: sent.window_limited_seconds / sent.seconds,
            zero_copied_bytes: sent.zero_copied_bytes,
            copied_bytes: sent.copied_bytes,
            taken: sent.taken,
            paced: sent.paced,
        })
    }

    /// Switching a device's offloads takes milliseconds.
    fn block(&self, candidate: &Candidate) -> usize {
        usize::from(candidate.case.condition.offloads == Offloads::Off)
    }

    /// Held back by the window, where the receiver holds the rate.
    fn is_in_regime(&self, round: &SendRound) -> bool {
        self.reading == Reading::Free || round.window_limited >= WINDOW_LIMITED_MIN
    }

    fn costs(round: &SendRound) -> Option<&Costs> {
        Some(&round.costs)
    }
}

/// Throughput with the meter against throughput without, in pairs, on the first sendfile row, or the first row.
fn observer_effect(
    sends: &mut Sends<'_>,
    meter: &Meter,
    rows: &[SendSeries],
    pairs: usize,
    steps: &mut Steps<'_>,
) -> Result<Option<Observer>, BenchError> {
    let measured = || rows.iter().filter(|row| !row.rounds.is_empty()).map(|row| &row.case.case);
    let is_sendfile = |case: &&SendCase| case.path == SendMethod::Sendfile.into();
    let Some(case) = measured().find(is_sendfile).or_else(|| measured().next()) else {
        return Ok(None);
    };
    if sends.set_offloads(case.condition.offloads).is_err() {
        return Ok(None);
    }
    let flow = sends.flow(case, Receiving::plainly());
    let rate =
        |sample: &Sample| sample.outcomes.first().map_or(f64::NAN, Outcome::bytes_per_second);
    let mut ratios = Vec::new();
    for pair in 0..pairs {
        if !steps.go_on("the meter's own effect") {
            break;
        }
        let with = || flow.run(Some(meter));
        let without = || meter.paused(|| flow.run(None));
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
        path: case.path.name().into(),
        pairs: ratios.len(),
        throughput_ratio,
    });
    Ok(observer)
}
