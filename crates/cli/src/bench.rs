//! `haul bench`: runs experiments and writes their reports.

use crate::arguments::{self, BenchArguments, CommonArguments, Experiment, ListenAddress};
use crate::exclusive::Measuring;
use crate::limits;
use crate::output::{self, Destination, Failure};
use folder::RunDirectory;
use haul_bench::export;
use haul_bench::export::summary::verdict_lines;
use haul_bench::pair::{self, Pair};
use haul_bench::report::Report;
use haul_bench::summary::{Findings, LeftOut, Summary};
use haul_bench::view::{TableRow, View};
use haul_bench::warning::Kind;
use haul_bench::{BenchError, Pace, Progress, TimeLimit};
use haul_soak::exclusive;
use progress::RunProgress;
use serde::Serialize;
use std::cell::Cell;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

mod checksum;
mod copies;
mod folder;
mod forward;
mod interrupts;
mod loan;
mod profile;
mod progress;
mod receive;
mod send;
mod settings;

/// Time of all experiments in quick form, and with `--full`.
const ALL_QUICK: Duration = Duration::from_secs(120);
const ALL_FULL: Duration = Duration::from_secs(900);
/// Time of one experiment in quick form, and with all its rows.
const ONE_QUICK: Duration = Duration::from_secs(30);
const ONE_FULL: Duration = Duration::from_secs(120);
/// Precision that is sufficient by default, in percent.
const WITHIN_PERCENT: f64 = 5.0;

/// The result of an experiment of any kind, ready to be written.
struct ExperimentResult {
    experiment: String,
    view: View,
    json: String,
    /// The costs of the rounds in the format of Go's benchmarks.
    benchfmt: String,
    /// The costs in Bencher Metric Format.
    bmf: serde_json::Map<String, serde_json::Value>,
    findings: Findings,
    /// The exit code of a profiled command, or 1 for an experiment that did not complete.
    exit_code: u8,
}

impl ExperimentResult {
    /// Whether a row was measured.
    fn has_figures(&self) -> bool {
        let mut lines = self.view.groups.iter().flat_map(|group| &group.lines);
        lines.any(|line| line.refused.is_none())
    }
}

impl<R: TableRow + Serialize> From<Report<R>> for ExperimentResult {
    fn from(report: Report<R>) -> Self {
        // An experiment that no signal stopped is interrupted if the peer was lost.
        let exit_code =
            u8::from(report.warnings.iter().any(|warning| warning.kind == Kind::Interrupted));
        Self {
            view: report.view(),
            json: export::json(&report),
            benchfmt: export::rounds::benchfmt(&report),
            bmf: export::rounds::bmf(&report),
            findings: Findings::from(&report),
            experiment: report.experiment,
            exit_code,
        }
    }
}

/// The parameters that all experiments of a run share.
struct Context<'a> {
    common: &'a CommonArguments,
    is_quick: bool,
    /// Whether all experiments are run, in the time of one run.
    is_everything: bool,
    /// The time limit of the current experiment; `None` for a fixed number of rounds.
    limit: Cell<Option<TimeLimit>>,
    stop: &'a AtomicBool,
    progress: RunProgress,
    /// The peer of `--to`, which replaces the lab.
    peer: Option<Arc<Pair>>,
}

impl Context<'_> {
    fn pace(&self) -> Pace {
        let basis = if self.is_quick { Pace::QUICK } else { Pace::FULL };
        match (self.common.rounds, self.limit.get()) {
            (Some(rounds), _) => Pace { rounds, ..basis },
            (None, Some(limit)) => basis.with_limit(limit),
            (None, None) => basis,
        }
    }

    /// The time of the whole run.
    fn time(&self) -> Duration {
        let default = match (self.is_everything, self.is_quick) {
            (true, true) => ALL_QUICK,
            (true, false) => ALL_FULL,
            (false, true) => ONE_QUICK,
            (false, false) => ONE_FULL,
        };
        self.common.time.unwrap_or(default)
    }

    /// Sets the time limit of the next experiment: its share of the time that remains.
    fn set_limit(&self, start: Instant, experiment: &Experiment, following: &[Experiment]) {
        if self.common.rounds.is_some() {
            return;
        }
        // Waiting for another measurement takes none of the time.
        let used = start.elapsed().saturating_sub(exclusive::waited());
        let remaining = self.time().saturating_sub(used);
        let weights: f64 = following.iter().map(Experiment::weight).sum();
        let budget = remaining.mul_f64(experiment.weight() / (experiment.weight() + weights));
        let within_percent = self.common.within.unwrap_or(WITHIN_PERCENT);
        self.limit.set(Some(TimeLimit::starting_now(budget, within_percent)));
    }

    /// Runs one experiment and shows its progress.
    fn run<R, E>(&self, experiment: E) -> Result<ExperimentResult, Failure>
    where
        R: TableRow + Serialize,
        E: FnOnce(&AtomicBool, &mut dyn FnMut(Progress)) -> Result<Report<R>, BenchError>,
    {
        self.run_with_progress(experiment).map(ExperimentResult::from)
    }

    /// Like [`Context::run`], but returns the experiment's own result, which may be more than a
    /// report.
    fn run_with_progress<T>(
        &self,
        experiment: impl FnOnce(&AtomicBool, &mut dyn FnMut(Progress)) -> Result<T, BenchError>,
    ) -> Result<T, Failure> {
        experiment(self.stop, &mut |progress| self.progress.update(progress))
            .map_err(output::bench_failure)
    }
}

pub fn run(arguments: &BenchArguments) -> Result<ExitCode, Failure> {
    let BenchArguments { experiment, listen, out, common } = arguments;
    if let Some(address) = listen {
        return listen_for_peers(*address);
    }
    let is_everything = experiment.is_none();
    check_destinations(common)?;
    // A listening machine disconnects a peer that waits, so this process waits before it connects.
    // Until then, signals end the process.
    let connected = match common.to.as_deref() {
        Some(peer) => {
            let measuring = Measuring::begin(common.force)?;
            Some((measuring, connect(peer, experiment.as_ref())?))
        }
        None => None,
    };
    let stop = output::stop_flag()?;
    let (_measuring, peer) = match connected {
        Some((measuring, peer)) => (measuring, Some(peer)),
        None => (Measuring::manage(common.force, &stop), None),
    };
    let directory = is_everything.then(|| RunDirectory::prepare(out.as_deref())).transpose()?;
    if let Some(rounds) = common.rounds {
        Pace { rounds, ..Pace::FULL }.check().map_err(output::bench_failure)?;
    }
    // A user namespace must be entered before any thread starts. If the kernel refuses it, the lab
    // falls back to loopback and warns. A profiled command keeps its user and its limits, and a
    // measurement with another machine keeps the user.
    if !experiment.as_ref().is_some_and(Experiment::profiles_command) {
        limits::raise_descriptor_limit();
        if common.to.is_none() {
            let _ = haul_lab::enter_user_namespace();
        }
    }
    let is_quick = common.quick || is_everything && !common.full;
    let mut all = arguments::all_experiments()?;
    all.retain(|experiment| peer.is_none() || experiment.takes_two_machines());
    let limit = Cell::new(None);
    let progress = RunProgress::new();
    let context = Context { common, is_quick, is_everything, limit, stop: &stop, progress, peer };
    let selected = experiment.as_ref().map_or(all.as_slice(), std::slice::from_ref);
    let mut summary = Summary::start();
    let results = run_experiments(selected, &context, &mut summary)?;
    context.progress.finish();
    if results.is_empty() {
        return Err(if stop.load(Relaxed) {
            Failure::stopped("stopped before there was anything to report")
        } else {
            Failure::unmeasured("nothing could be measured here; the reasons are above")
        });
    }
    write(&results, &summary, common, directory.as_ref())?;
    // A command got the signal, and its exit code tells what the command did.
    let has_command = experiment.as_ref().is_some_and(Experiment::profiles_command);
    if stop.load(Relaxed) && !has_command {
        return Ok(ExitCode::from(130));
    }
    if !results.iter().any(ExperimentResult::has_figures) {
        return Err(Failure::unmeasured("no row could be measured here; the reasons are above"));
    }
    Ok(ExitCode::from(results.iter().map(|result| result.exit_code).max().unwrap_or(0)))
}

/// Runs the selected experiments one after the other. Of several, the verdicts of each are printed
/// when it ends, unless a report goes to standard output.
fn run_experiments(
    selected: &[Experiment],
    context: &Context<'_>,
    summary: &mut Summary,
) -> Result<Vec<ExperimentResult>, Failure> {
    let start = Instant::now();
    let mut results = Vec::new();
    if context.is_everything && context.common.rounds.is_none() {
        context.progress.set_time(start, context.time());
    }
    for (index, experiment) in selected.iter().enumerate() {
        let name = experiment.name();
        context.set_limit(start, experiment, &selected[index + 1..]);
        context.progress.begin(index, selected.len(), name);
        match experiment.run(context) {
            Ok(result) => {
                summary.add(&result.findings);
                if context.is_everything && !has_standard_output(context.common) {
                    context.progress.print(&verdicts_text(&result));
                }
                results.push(result);
            }
            Err(_) if context.stop.load(Relaxed) && !results.is_empty() => break,
            // If one experiment lacks a permission or a kernel feature, the others still run.
            Err(failure) if context.is_everything => {
                context.progress.print_error(&format!("haul: {name} is left out: {failure}\n"));
                let (experiment, reason) = (name.into(), failure.to_string());
                summary.left_out.push(LeftOut { experiment, reason });
            }
            Err(failure) => return Err(failure),
        }
        if context.stop.load(Relaxed) {
            break;
        }
    }
    let stopped = context.stop.load(Relaxed);
    let done = results.len() + summary.left_out.len();
    for experiment in selected.iter().skip(done).filter(|_| stopped) {
        let (experiment, reason) = (experiment.name().into(), "the run was stopped".into());
        summary.left_out.push(LeftOut { experiment, reason });
    }
    summary.seconds = start.elapsed().as_secs_f64();
    Ok(results)
}

/// The verdicts of an experiment, as lines of the terminal.
fn verdicts_text(result: &ExperimentResult) -> String {
    let width = usize::from(output::terminal_width().clamp(60, 100));
    let verdicts = result.view.verdicts.iter();
    verdicts.map(|verdict| verdict_lines(verdict, width, output::has_colour(), false)).collect()
}

/// Listens for other machines until Ctrl-C, and measures with them.
fn listen_for_peers(address: ListenAddress) -> Result<ExitCode, Failure> {
    let stop = output::stop_flag()?;
    // The IPv4 address is for hosts without IPv6.
    let all_addresses =
        [(Ipv6Addr::UNSPECIFIED, pair::PORT).into(), (Ipv4Addr::UNSPECIFIED, pair::PORT).into()];
    let addresses = match address {
        ListenAddress::All => all_addresses.to_vec(),
        ListenAddress::One(address) => vec![address],
    };
    // If standard error is closed, the message has no other destination.
    let log = |message: &str| drop(writeln!(io::stderr(), "haul: {message}"));
    haul_bench::listen(&addresses, &stop, &log).map_err(output::bench_failure)?;
    Ok(ExitCode::SUCCESS)
}

/// Connects to the peer of `--to`. Rejects an experiment that does not use two machines.
fn connect(peer: &str, experiment: Option<&Experiment>) -> Result<Arc<Pair>, Failure> {
    if let Some(alone) = experiment.filter(|experiment| !experiment.takes_two_machines()) {
        return Err(Failure::bad_input(format!(
            "--to applies to send, receive and forward: {} measures this machine alone",
            alone.name()
        )));
    }
    Pair::connect(peer).map(Arc::new).map_err(|error| output::bench_failure(error.into()))
}

impl Experiment {
    /// The share of this experiment in the time of a run, by the number of its rows and the
    /// importance of its questions.
    fn weight(&self) -> f64 {
        match self {
            Self::Send(_) | Self::Copies(_) => 30.0,
            Self::Receive(_) => 9.0,
            Self::Forward(_) => 18.0,
            Self::Profile(_) => 4.0,
            Self::Interrupts => 11.0,
            Self::Settings(_) => 28.0,
            Self::Loan(_) => 13.0,
            Self::Checksum(_) => 5.0,
        }
    }

    fn takes_two_machines(&self) -> bool {
        matches!(self, Self::Send(_) | Self::Receive(_) | Self::Forward(_))
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Send(_) => "send",
            Self::Receive(_) => "receive",
            Self::Forward(_) => "forward",
            Self::Profile(_) => "profile",
            Self::Interrupts => "interrupts",
            Self::Settings(_) => "settings",
            Self::Loan(_) => "loan",
            Self::Copies(_) => "copies",
            Self::Checksum(_) => "checksum",
        }
    }

    fn profiles_command(&self) -> bool {
        matches!(self, Self::Profile(arguments) if !arguments.command.is_empty())
    }

    fn run(&self, context: &Context<'_>) -> Result<ExperimentResult, Failure> {
        match self {
            Self::Send(arguments) => send::run(arguments, context),
            Self::Receive(arguments) => receive::run(arguments, context),
            Self::Forward(arguments) => forward::run(arguments, context),
            Self::Profile(arguments) => profile::run(arguments, context),
            Self::Interrupts => interrupts::run(context),
            Self::Settings(arguments) => settings::run(arguments, context),
            Self::Loan(arguments) => loan::run(arguments, context),
            Self::Copies(arguments) => copies::run(arguments, context),
            Self::Checksum(arguments) => checksum::run(arguments, context),
        }
    }
}

/// Writes the requested reports, and prints the tables and the summary unless a report goes to
/// standard output.
fn write(
    results: &[ExperimentResult],
    summary: &Summary,
    common: &CommonArguments,
    directory: Option<&RunDirectory>,
) -> Result<(), Failure> {
    let views: Vec<View> = results.iter().map(|result| result.view.clone()).collect();
    let json = match results {
        [one] => one.json.clone(),
        all => format!(
            "[{}]\n",
            all.iter().map(|one| one.json.trim_end()).collect::<Vec<_>>().join(",\n")
        ),
    };
    let html = match (views.as_slice(), directory) {
        ([one], None) => export::html::render(&summary.title(&one.title), &views),
        _ => export::html::render_run(summary, &views),
    };
    let page = directory.map(|directory| directory.write(summary, results)).transpose()?;
    if !has_standard_output(common) {
        let (width, has_colour) = (output::terminal_width(), output::has_colour());
        if common.verbose || directory.is_none() {
            for view in &views {
                if views.len() > 1 {
                    output::print(&format!("\n== {} ==\n", view.title))?;
                }
                output::print(&export::terminal::render(view, width, has_colour))?;
            }
        }
        if let Some(page) = page {
            output::print("\n")?;
            output::print(&export::summary::terminal(summary, width, has_colour))?;
            output::print(&format!("Report, with all tables: {}\n", page.display()))?;
        }
    }
    for (destination, text) in [
        (&common.json, &json),
        (&common.markdown, &export::markdown::render(&views)),
        (&common.html, &html),
        (&common.benchfmt, &results.iter().map(|one| one.benchfmt.as_str()).collect()),
        (&common.bmf, &export::json(&bmf(results))),
    ] {
        if let Some(destination) = destination {
            destination.write(text)?;
        }
    }
    Ok(())
}

/// The benchmarks of all experiments in one map.
fn bmf(results: &[ExperimentResult]) -> serde_json::Map<String, serde_json::Value> {
    results.iter().flat_map(|one| one.bmf.clone()).collect()
}

fn destinations(common: &CommonArguments) -> impl Iterator<Item = &Destination> {
    let formats = [&common.json, &common.markdown, &common.html, &common.benchfmt, &common.bmf];
    formats.into_iter().flatten()
}

/// Whether a report goes to standard output.
fn has_standard_output(common: &CommonArguments) -> bool {
    destinations(common).any(|to| *to == Destination::StandardOutput)
}

/// Checks that every destination can be written, before the run.
fn check_destinations(common: &CommonArguments) -> Result<(), Failure> {
    if destinations(common).filter(|to| **to == Destination::StandardOutput).count() > 1 {
        return Err(Failure::bad_input(
            "only one of --json, --markdown, --html, --benchfmt and --bmf can be standard output \
             (-)",
        ));
    }
    destinations(common).try_for_each(Destination::check)
}

/// Rejects a flag that configures the lab if the measurement is between two machines.
fn reject_with_peer(context: &Context<'_>, is_given: bool, flag: &str) -> Result<(), Failure> {
    if context.peer.is_some() && is_given {
        return Err(Failure::bad_input(format!(
            "{flag} configures the lab; with --to the machines are not changed: omit it"
        )));
    }
    Ok(())
}

/// Returns the given values, or the default if there are none.
pub fn non_empty_or<T>(given: Vec<T>, default: Vec<T>) -> Vec<T> {
    if given.is_empty() { default } else { given }
}
