//! The experiment `settings`: what the settings of the hosts are worth beside the choice of path.
//!
//! A row changes one setting of a lab that is otherwise as a host comes: its own congestion control, MTU 1500, its own
//! buffers. One row changes nothing, and shows by how much two equal rows differ here; what paid more surely than that is then put
//! together and measured beside the unchanged lab again. Each row has a lab of its own, so that nothing has to be put back, and
//! nothing of the machine itself is changed.
//!
//! What it cannot show: a veth passes segments on uncut, so that an MTU costs less here than where a card or the stack cuts them;
//! and it has neither delay nor loss, for which buffers are large and congestion controls differ.

use crate::endpoint::Endpoint;
use crate::flow::{Flow, FlowError, Sample};
use crate::matrix;
use crate::quantity::{Rate, Size};
use crate::rounds::{Costs, Pace, Progress, Run, Series, Steps, Subject};
use crate::stats::Figure;
use crate::tested_method::TestedMethod;
use crate::topology::Loads;
use crate::worker::socket::SocketOptions;
use crate::worker::{Outcome, receiver::Receiving, sender::Sending};
use crate::workload::{Opened, Workload};
use crate::{BenchError, congestion, doctor};
use haul::SendMethod;
use haul_lab::{CpuPair, Lab};
use haul_soak::Meter;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::AtomicBool;

mod answer;
mod change;
mod row;

pub use change::Name;
use change::{Change, Tuning};
pub use row::SettingRow;

/// The result of `settings`.
pub type SettingsReport = crate::report::Report<SettingRow>;

/// At most how much a call sends.
const CHUNK: Size = Size(64 << 10);

/// What to run.
#[derive(Debug, Clone)]
pub struct SettingsPlan {
    /// How it is sent.
    pub paths: Vec<TestedMethod>,
    /// Which settings to change.
    pub settings: Vec<Name>,
    /// What is sent.
    pub workload: Workload,
    /// The rate to hold, or full speed.
    pub rate: Option<Rate>,
    /// How often and how long.
    pub pace: Pace,
    /// The congestion control of the rows that do not change it; `None` for the host's own.
    pub congestion: Option<String>,
}

impl SettingsPlan {
    /// Every setting, by the path that copies and by the one that usually is the cheapest.
    pub fn new(pace: Pace) -> Self {
        Self {
            paths: [SendMethod::ReadWrite, SendMethod::Sendfile].map(TestedMethod::from).into(),
            settings: Name::ALL.into(),
            workload: Workload::USUAL,
            rate: None,
            pace,
            congestion: None,
        }
    }

    /// A quick look: one path.
    pub fn quick(pace: Pace) -> Self {
        Self { paths: vec![SendMethod::Sendfile.into()], ..Self::new(pace) }
    }
}

/// What a row is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Nothing is changed: what the others are compared with.
    Basis,
    /// The same again: how much two equal rows differ.
    Control,
    /// One more change.
    Setting,
    /// All that paid.
    Together,
}

/// One row: a path, and all that is changed for it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SettingCase {
    path: TestedMethod,
    changes: Vec<Change>,
    role: Role,
}

impl SettingCase {
    /// What it is compared with: all but the last change, or nothing changed at all.
    fn beside(&self) -> &[Change] {
        match self.role {
            Role::Setting => &self.changes[..self.changes.len().saturating_sub(1)],
            Role::Basis | Role::Control | Role::Together => &[],
        }
    }
}

/// Runs the experiment. `is_stopped` ends it after the row in progress; what was measured so far is then reported.
pub fn run(
    plan: &SettingsPlan,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<SettingsReport, BenchError> {
    plan.pace.check()?;
    if plan.paths.contains(&TestedMethod::Planned) {
        return Err(BenchError::BadInput(
            "planned needs a plan to choose by: use haul bench send --plan".into(),
        ));
    }
    let workload = plan.workload.open()?;
    matrix::check_chunk_in(CHUNK, &workload)?;
    let started = crate::now();
    let basis = Tuning::as_it_is(plan.congestion.clone());
    let lab = basis.open(None)?;
    let congestion = congestion::choose(&lab, Some(&basis.congestion))?;
    let changes = change::rows(&plan.settings, &basis);
    let mut tunings = Tunings {
        basis,
        cpus: lab.cpus(),
        labs: Vec::new(),
        workload,
        rate: plan.rate,
        pace: plan.pace,
    };
    let mut run = Run::new(&lab, plan.pace)?;
    let mut rows: Vec<SettingsSeries> = Vec::new();
    for &path in &plan.paths {
        rows.extend([series(path, &[], Role::Basis), series(path, &[], Role::Control)]);
        rows.extend(changes.iter().map(|changes| series(path, changes, Role::Setting)));
    }
    let mut steps = Steps::new(run.steps(rows.len() + 2 * plan.paths.len()), is_stopped, progress);
    let mut together = Vec::new();
    if run.all(&mut tunings, &mut rows, &mut steps)? {
        for &path in &plan.paths {
            let paid = paid(path, &rows);
            if paid.len() > 1 {
                together
                    .extend([series(path, &[], Role::Basis), series(path, &paid, Role::Together)]);
            }
        }
        if !together.is_empty() {
            run.all(&mut tunings, &mut together, &mut steps)?;
        }
    }
    let choice = choice(&plan.paths, &rows);
    let device = device();
    let mut reported: Vec<SettingRow> =
        rows.iter().map(|series| row::of(series, &rows, &tunings.basis, &device)).collect();
    let of_together = together.iter().filter(|series| series.case.role == Role::Together);
    reported.extend(of_together.map(|series| row::of(series, &together, &tunings.basis, &device)));
    rows.extend(together);
    run.warn(&rows, SettingCase::to_string, SettingRound::us_per_mib);
    let mut report =
        SettingsReport::of_run("settings", started, run, &congestion, plan.rate, reported);
    report.answers = answer::of(&report, choice.as_ref());
    Ok(report)
}

type SettingsSeries = Series<SettingCase, SettingRound>;

fn series(path: TestedMethod, changes: &[Change], role: Role) -> SettingsSeries {
    Series::new(SettingCase { path, changes: changes.to_vec(), role })
}

/// Of each setting the value that surely cost less with this path, and did not cost throughput.
fn paid(path: TestedMethod, rows: &[SettingsSeries]) -> Vec<Change> {
    let mut paid: Vec<(f64, &Change)> = Vec::new();
    let of_path = || rows.iter().filter(|row| row.case.path == path);
    let control = of_path().find(|row| row.case.role == Role::Control);
    let equal = control.and_then(|control| row::ratio(control, rows, SettingRound::us_per_mib));
    for row in of_path() {
        // What takes another change first is not a choice by itself.
        let ([change], Some(ratio), Some(throughput)) = (
            row.case.changes.as_slice(),
            row::ratio(row, rows, SettingRound::us_per_mib),
            row::ratio(row, rows, |round| round.costs.bytes_per_second),
        ) else {
            continue;
        };
        if !row::pays(ratio, throughput, equal) {
            continue;
        }
        match paid.iter_mut().find(|(_, other)| other.name() == change.name()) {
            Some(best) if ratio.median < best.0 => *best = (ratio.median, change),
            Some(_) => {}
            None => paid.push((ratio.median, change)),
        }
    }
    paid.into_iter().map(|(_, change)| change.clone()).collect()
}

/// The cheapest path's cost over the dearest's, with nothing changed.
struct Choice {
    cheap: TestedMethod,
    dear: TestedMethod,
    ratio: Figure,
}

fn choice(paths: &[TestedMethod], rows: &[SettingsSeries]) -> Option<Choice> {
    let basis = |path: TestedMethod| {
        rows.iter().find(|row| row.case.path == path && row.case.role == Role::Basis)
    };
    let cost = |path: &TestedMethod| {
        basis(*path).map_or(f64::NAN, |row| row.median(SettingRound::us_per_mib))
    };
    let cheap = *paths.iter().min_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    let dear = *paths.iter().max_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    let ratio = basis(cheap)?.ratio_to(basis(dear)?, SettingRound::us_per_mib)?;
    (cheap != dear).then_some(Choice { cheap, dear, ratio })
}

#[derive(Debug, Clone, Copy)]
struct SettingRound {
    costs: Costs,
    received: Outcome,
}

impl SettingRound {
    /// What both hosts paid.
    fn us_per_mib(&self) -> f64 {
        self.costs.sender_us_per_mib + self.costs.receiver_us_per_mib
    }
}

/// The labs, each made when it is first needed.
struct Tunings {
    basis: Tuning,
    cpus: CpuPair,
    /// A lab for each set of changes, or why there is none.
    labs: Vec<(Vec<Change>, Result<Lab, String>)>,
    workload: Opened,
    rate: Option<Rate>,
    pace: Pace,
}

impl Tunings {
    fn lab(&mut self, changes: &[Change]) -> Result<&Lab, FlowError> {
        let known = self.labs.iter().position(|(other, _)| other == changes);
        let index = known.unwrap_or_else(|| {
            let made =
                self.basis.with(changes).open(Some(self.cpus)).map_err(|error| error.to_string());
            self.labs.push((changes.to_vec(), made));
            self.labs.len() - 1
        });
        self.labs[index].1.as_ref().map_err(|reason| FlowError::Refused(reason.clone()))
    }
}

impl Subject for Tunings {
    type Case = SettingCase;
    type Round = SettingRound;

    fn name(&self, case: &SettingCase) -> String {
        case.to_string()
    }

    fn measure(&mut self, case: &SettingCase, meter: &Meter) -> Result<Sample, FlowError> {
        let tuning = self.basis.with(&case.changes);
        let sending = Sending {
            path: case.path.name().into(),
            chunk_bytes: CHUNK.0 as usize,
            cork: false,
            rate_bits_per_second: self.rate.map(|rate| rate.0),
            pieces: self.workload.handed_over(),
            plan: None,
        };
        let receiving = Receiving {
            low_water_bytes: tuning.low_water_bytes,
            busy_poll_us: tuning.busy_poll_us,
            read_pause_us: tuning.read_pause_us,
            ..Receiving::plainly()
        };
        let socket = SocketOptions {
            buffer_bytes: tuning.buffer_bytes,
            ..SocketOptions::with_congestion(tuning.congestion)
        };
        let window = self.pace.window;
        let lab = self.lab(&case.changes)?;
        let (from, to) =
            ((Endpoint::Lab(&lab.sender), sending), (Endpoint::Lab(&lab.receiver), receiving));
        Flow::stream(from, to, socket, window).run(Some(meter))
    }

    fn judge(&self, _: &SettingCase, sample: &Sample, loads: &Loads) -> Option<SettingRound> {
        let received = *sample.outcomes.first()?;
        let costs = Costs::of(loads, received.bytes_per_second())?;
        Some(SettingRound { costs, received })
    }
}

impl fmt::Display for SettingCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changes: Vec<String> = self.changes.iter().map(Change::to_string).collect();
        let words = match self.role {
            Role::Basis => "as it is".into(),
            Role::Control => "unchanged".into(),
            Role::Setting | Role::Together => changes.join(", "),
        };
        write!(formatter, "{}, {words}", self.path)
    }
}

/// The device that packets of this machine leave by, for commands that can be copied.
fn device() -> String {
    match doctor::device_towards(None) {
        Ok(device) if device.name != "lo" => device.name,
        _ => "DEV".into(),
    }
}
