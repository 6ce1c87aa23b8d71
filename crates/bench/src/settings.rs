//! The experiment `settings`: the gain of the hosts' settings, compared with the gain of the choice
//! of method.
//!
//! A row changes one setting of a lab that otherwise has the host's defaults: its congestion
//! control, MTU 1500, its buffers. A control row changes nothing and shows how much two equal rows
//! differ. The settings that gain more than this difference are then combined, and measured again
//! together with the unchanged lab. Each set of changes has a separate lab, so that nothing must be
//! restored and the machine itself is not changed.
//!
//! Limits: a veth passes segments on unsegmented, so an MTU costs less here than if a network card
//! or the stack segments. It has neither delay nor loss, which are the reasons for large buffers
//! and for differences between congestion controls.

use crate::congestion;
use crate::doctor;
use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flow::{Flow, FlowError, Sample};
use crate::matrix;
use crate::rounds::{Costs, Experiment, Pace, Part, Progress, Run, Series, Steps};
use crate::stats::Estimate;
use crate::topology::Loads;
use crate::verdict::Safety;
use haul::SendMethod;
use haul_lab::{CpuPair, Lab};
use haul_soak::Meter;
use haul_units::{Rate, Size};
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::socket::SocketOptions;
use haul_workers::worker::{Outcome, receiver::ReceiveTask, sender::SendTask};
use haul_workers::workload::{Opened, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::AtomicBool;

mod answer;
mod change;
mod row;
mod verdict;

pub use change::Name;
use change::{Change, Tuning};
pub use row::SettingRow;

/// The report of the experiment `settings`.
pub type SettingsReport = crate::report::Report<SettingRow>;

/// The share of a time limit in which each change is measured alone. The rest is for all changes
/// that pay, together.
const SINGLE_SHARE: f64 = 0.8;
/// The most bytes that one call sends.
const CHUNK: Size = Size(64 << 10);

/// The configuration of the experiment.
#[derive(Debug, Clone)]
pub struct SettingsParameters {
    /// The send methods.
    pub paths: Vec<TestedMethod>,
    /// The settings to change.
    pub settings: Vec<Name>,
    /// Whether to measure only changes that can be a verdict's.
    pub verdict_only: bool,
    /// The data to send.
    pub workload: Workload,
    /// The rate that the sender holds by pacing; `None` for full speed.
    pub rate: Option<Rate>,
    /// The number of rounds and the length of a window.
    pub pace: Pace,
    /// The congestion control of the rows that do not change it; `None` for the host's default.
    pub congestion: Option<String>,
}

impl SettingsParameters {
    /// The default: every setting, with the copying method `read+write` and with `sendfile`, which
    /// is usually the cheapest.
    pub fn new(pace: Pace) -> Self {
        Self {
            paths: [SendMethod::ReadWrite, SendMethod::Sendfile].map(TestedMethod::from).into(),
            settings: Name::ALL.into(),
            verdict_only: false,
            workload: Workload::USUAL,
            rate: None,
            pace,
            congestion: None,
        }
    }

    /// A short measurement: `sendfile`, and the changes that can be a verdict's.
    pub fn quick(pace: Pace) -> Self {
        Self { paths: vec![SendMethod::Sendfile.into()], verdict_only: true, ..Self::new(pace) }
    }
}

/// The purpose of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Changes nothing: the row that the others are compared with.
    Basis,
    /// Changes nothing either: shows how much two equal rows differ.
    Control,
    /// Makes one more change than the row that it is compared with.
    Setting,
    /// Makes all changes that paid alone.
    Together,
}

/// One row: a send method, and all changes made for it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SettingCase {
    method: TestedMethod,
    changes: Vec<Change>,
    role: Role,
}

impl SettingCase {
    /// The changes of the row that it is compared with: all except the last change, or none.
    fn compared_changes(&self) -> &[Change] {
        match self.role {
            Role::Setting => &self.changes[..self.changes.len().saturating_sub(1)],
            Role::Basis | Role::Control | Role::Together => &[],
        }
    }
}

/// Runs the experiment. If `is_stopped` becomes true, it ends after the current row and reports the
/// rounds measured so far.
pub fn run(
    parameters: &SettingsParameters,
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<SettingsReport, BenchError> {
    parameters.pace.check()?;
    if parameters.paths.contains(&TestedMethod::Planned) {
        return Err(BenchError::BadInput(
            "planned needs a plan to choose by: use haul bench send --plan".into(),
        ));
    }
    let workload = parameters.workload.open()?;
    matrix::check_chunk_in(CHUNK, &workload)?;
    let started = crate::report::now();
    let basis = Tuning::host_default(parameters.congestion.clone());
    let lab = basis.open(None)?;
    let congestion = congestion::choose(&lab, Some(&basis.congestion))?;
    let changes = change::rows(&parameters.settings, &basis, parameters.verdict_only);
    let mut experiment = SettingsExperiment {
        basis,
        cpus: lab.cpus(),
        labs: Vec::new(),
        workload,
        rate: parameters.rate,
        pace: parameters.pace,
    };
    let mut run = Run::new(&lab, parameters.pace)?;
    let mut rows: Vec<SettingsSeries> = Vec::new();
    for &method in &parameters.paths {
        rows.extend([series(method, &[], Role::Basis), series(method, &[], Role::Control)]);
        rows.extend(changes.iter().map(|changes| series(method, changes, Role::Setting)));
    }
    let mut steps =
        Steps::new(run.steps(rows.len() + 2 * parameters.paths.len()), is_stopped, progress)
            .with_limit(parameters.pace.limit);
    let mut together = Vec::new();
    if run.measure_in_share(SINGLE_SHARE, &mut experiment, &mut rows, &mut steps)? {
        for &method in &parameters.paths {
            let changes = paying_changes(method, &rows);
            if changes.len() > 1 {
                together.extend([
                    series(method, &[], Role::Basis),
                    series(method, &changes, Role::Together),
                ]);
            }
        }
        if !together.is_empty() {
            run.measure_all(&mut experiment, &mut together, &mut steps)?;
        }
    }
    let comparison = compare_methods(&parameters.paths, &rows);
    let device = device();
    let verdict = verdict::of(&rows, &run, &device, &experiment.basis);
    let mut reported: Vec<SettingRow> =
        rows.iter().map(|series| row::of(series, &rows, &experiment.basis, &device)).collect();
    let combined = together.iter().filter(|series| series.case.role == Role::Together);
    let combined_row =
        |series: &SettingsSeries| row::of(series, &together, &experiment.basis, &device);
    reported.extend(combined.map(combined_row));
    rows.extend(together);
    run.warn(&rows, SettingCase::to_string, SettingRound::total_us_per_mib);
    let mut report =
        SettingsReport::of_run("settings", started, run, &congestion, parameters.rate, reported);
    report.add_verdicts(verdict);
    report.answers = answer::of(&report, comparison.as_ref());
    Ok(report)
}

type SettingsSeries = Series<SettingCase, SettingRound>;

fn series(method: TestedMethod, changes: &[Change], role: Role) -> SettingsSeries {
    Series::new(SettingCase { method, changes: changes.to_vec(), role })
}

/// The changes that pay with this method and are not risky, at most one for each setting: the value
/// with the lowest cost.
fn paying_changes(method: TestedMethod, rows: &[SettingsSeries]) -> Vec<Change> {
    let mut best_changes: Vec<(f64, &Change)> = Vec::new();
    let rows_of_method = || rows.iter().filter(|row| row.case.method == method);
    let control = rows_of_method().find(|row| row.case.role == Role::Control);
    let control_ratio =
        control.and_then(|control| row::ratio(control, rows, SettingRound::total_us_per_mib));
    for row in rows_of_method() {
        // A change that requires another one first cannot be selected alone.
        let ([change], Some(ratio), Some(throughput)) = (
            row.case.changes.as_slice(),
            row::ratio(row, rows, SettingRound::total_us_per_mib),
            row::ratio(row, rows, |round| round.costs.bytes_per_second),
        ) else {
            continue;
        };
        if change.safety() == Safety::Risky || !row::pays(ratio, throughput, control_ratio) {
            continue;
        }
        match best_changes.iter_mut().find(|(_, other)| other.name() == change.name()) {
            Some(best) if ratio.median < best.0 => *best = (ratio.median, change),
            Some(_) => {}
            None => best_changes.push((ratio.median, change)),
        }
    }
    best_changes.into_iter().map(|(_, change)| change.clone()).collect()
}

/// The cost of the cheapest method divided by the cost of the most expensive method, without a
/// changed setting.
struct MethodComparison {
    cheapest: TestedMethod,
    most_expensive: TestedMethod,
    ratio: Estimate,
}

fn compare_methods(methods: &[TestedMethod], rows: &[SettingsSeries]) -> Option<MethodComparison> {
    let basis = |method: TestedMethod| {
        rows.iter().find(|row| row.case.method == method && row.case.role == Role::Basis)
    };
    let cost = |method: &TestedMethod| {
        basis(*method).map_or(f64::NAN, |row| row.median(SettingRound::total_us_per_mib))
    };
    let cheapest = *methods.iter().min_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    let most_expensive = *methods.iter().max_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    let ratio =
        basis(cheapest)?.ratio_to(basis(most_expensive)?, SettingRound::total_us_per_mib)?;
    (cheapest != most_expensive).then_some(MethodComparison { cheapest, most_expensive, ratio })
}

#[derive(Debug, Clone, Copy)]
struct SettingRound {
    costs: Costs,
    received: Outcome,
}

impl SettingRound {
    /// The CPU time of both hosts per MiB.
    fn total_us_per_mib(&self) -> f64 {
        self.costs.sender_us_per_mib + self.costs.receiver_us_per_mib
    }
}

/// The experiment's state: the labs, each created when it is first needed, and the settings.
struct SettingsExperiment {
    basis: Tuning,
    cpus: CpuPair,
    /// A lab for each set of changes, or the reason why there is none.
    labs: Vec<(Vec<Change>, Result<Lab, String>)>,
    workload: Opened,
    rate: Option<Rate>,
    pace: Pace,
}

impl SettingsExperiment {
    fn lab(&mut self, changes: &[Change]) -> Result<&Lab, FlowError> {
        let known = self.labs.iter().position(|(other, _)| other == changes);
        let index = known.unwrap_or_else(|| {
            let lab =
                self.basis.with(changes).open(Some(self.cpus)).map_err(|error| error.to_string());
            self.labs.push((changes.to_vec(), lab));
            self.labs.len() - 1
        });
        self.labs[index].1.as_ref().map_err(|reason| FlowError::Refused(reason.clone()))
    }
}

impl Experiment for SettingsExperiment {
    type Case = SettingCase;
    type Round = SettingRound;

    fn name(&self, case: &SettingCase) -> String {
        case.to_string()
    }

    fn measure(&mut self, case: &SettingCase, meter: &Meter) -> Result<Sample, FlowError> {
        let tuning = self.basis.with(&case.changes);
        let sending = SendTask {
            path: case.method.name().into(),
            chunk_bytes: CHUNK.0 as usize,
            cork: false,
            rate_bits_per_second: self.rate.map(|rate| rate.0),
            pieces: self.workload.handed_over(),
            plan: None,
        };
        let receiving = ReceiveTask {
            low_water_bytes: tuning.low_water_bytes,
            busy_poll_us: tuning.busy_poll_us,
            read_pause_us: tuning.read_pause_us,
            ..ReceiveTask::plainly()
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

    fn part(&self, case: &SettingCase) -> Option<Part> {
        let question = case.method.name().to_owned();
        Some(Part { question, is_baseline: case.role == Role::Basis })
    }

    fn compared_cost(round: &SettingRound) -> f64 {
        round.total_us_per_mib()
    }

    fn evaluate(&self, _: &SettingCase, sample: &Sample, loads: &Loads) -> Option<SettingRound> {
        let received = *sample.outcomes.first()?;
        let costs = Costs::of(loads, received.bytes_per_second())?;
        Some(SettingRound { costs, received })
    }
}

impl fmt::Display for SettingCase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changes: Vec<String> = self.changes.iter().map(Change::to_string).collect();
        let changes_text = match self.role {
            Role::Basis => "as it is".into(),
            Role::Control => "unchanged".into(),
            Role::Setting | Role::Together => changes.join(", "),
        };
        write!(formatter, "{}, {changes_text}", self.method)
    }
}

/// The device that carries this machine's outgoing packets, for the printed commands; `DEV` if it
/// is unknown.
fn device() -> String {
    match doctor::device_towards(None) {
        Ok(device) if device.name != "lo" => device.name,
        _ => "DEV".into(),
    }
}
