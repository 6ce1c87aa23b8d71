//! `haul bench`: runs experiments and writes their reports.

use crate::arguments::{self, BenchArguments, CommonArguments, Experiment, ListenAddress};
use crate::output::{self, Destination, Failure};
use haul_bench::export;
use haul_bench::pair::{self, Pair};
use haul_bench::report::Report;
use haul_bench::view::{TableRow, View};
use haul_bench::warning::Kind;
use haul_bench::{BenchError, Pace, Progress};
use indicatif::ProgressBar;
use serde::Serialize;
use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

mod checksum;
mod forward;
mod interrupts;
mod loan;
mod profile;
mod receive;
mod send;
mod settings;

/// Directory in which `haul bench` without an experiment writes its reports.
const REPORT_DIRECTORY: &str = "haul-report";

/// The result of an experiment of any kind, ready to be written.
struct ExperimentResult {
    experiment: String,
    view: View,
    json: String,
    /// Exit code: that of a profiled command, or 1 for an experiment that did not complete.
    exit_code: u8,
}

impl ExperimentResult {
    fn is_all_refused(&self) -> bool {
        let mut lines = self.view.groups.iter().flat_map(|group| &group.lines);
        !self.view.groups.is_empty() && lines.all(|line| line.refused.is_some())
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
            experiment: report.experiment,
            exit_code,
        }
    }
}

/// The parameters that all experiments of a run share.
struct Context<'a> {
    common: &'a CommonArguments,
    is_quick: bool,
    stop: &'a AtomicBool,
    bar: ProgressBar,
    /// The peer of `--to`, which replaces the lab.
    peer: Option<Arc<Pair>>,
}

impl Context<'_> {
    fn pace(&self) -> Pace {
        let basis = if self.is_quick { Pace::QUICK } else { Pace::FULL };
        Pace { rounds: self.common.rounds.unwrap_or(basis.rounds), ..basis }
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
        experiment(self.stop, &mut |progress| output::update_progress(&self.bar, progress))
            .map_err(output::bench_failure)
    }
}

pub fn run(arguments: &BenchArguments) -> Result<ExitCode, Failure> {
    let BenchArguments { experiment, listen, common } = arguments;
    if let Some(address) = listen {
        return listen_for_peers(*address);
    }
    let is_everything = experiment.is_none();
    let peer = common.to.as_deref().map(|peer| connect(peer, experiment.as_ref())).transpose()?;
    check_destinations(common, is_everything)?;
    if let Some(rounds) = common.rounds {
        Pace { rounds, ..Pace::FULL }.check().map_err(output::bench_failure)?;
    }
    // A user namespace must be entered before any thread starts. If the kernel refuses it, the lab
    // falls back to loopback and warns. A profiled command keeps its user, and so does a
    // measurement with another machine.
    if common.to.is_none() && !experiment.as_ref().is_some_and(Experiment::profiles_command) {
        let _ = haul_lab::enter_user_namespace();
    }
    let stop = output::stop_flag()?;
    let is_quick = common.quick || is_everything && !common.full;
    let mut all = arguments::all_experiments()?;
    all.retain(|experiment| peer.is_none() || experiment.takes_two_machines());
    let context = Context { common, is_quick, stop: &stop, bar: output::progress_bar(), peer };
    let selected = experiment.as_ref().map_or(all.as_slice(), std::slice::from_ref);
    let mut results = Vec::new();
    for experiment in selected {
        match experiment.run(&context) {
            Ok(result) => results.push(result),
            Err(_) if stop.load(Relaxed) && !results.is_empty() => break,
            // If one experiment lacks a permission or a kernel feature, the others still run.
            Err(failure) if is_everything => {
                context
                    .bar
                    .suspend(|| eprintln!("haul: {} is left out: {failure}", experiment.name()));
            }
            Err(failure) => return Err(failure),
        }
        if stop.load(Relaxed) {
            break;
        }
    }
    context.bar.finish_and_clear();
    if results.is_empty() {
        return Err(Failure::stopped("stopped before there was anything to report"));
    }
    write(&results, common, is_everything)?;
    if stop.load(Relaxed) {
        if is_everything {
            let (done, all) = (results.len(), selected.len());
            eprintln!(
                "haul: stopped: {REPORT_DIRECTORY}/index.html has {done} of {all} experiments, the \
                 last one incomplete"
            );
        }
        return Ok(ExitCode::from(130));
    }
    match results.as_slice() {
        [one] if one.is_all_refused() => {
            Err(Failure::failed("no row could be measured here; the reasons are above"))
        }
        [one] => Ok(ExitCode::from(one.exit_code)),
        all => Ok(ExitCode::from(all.iter().map(|one| one.exit_code).max().unwrap_or(0))),
    }
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
            Self::Checksum(arguments) => checksum::run(arguments, context),
        }
    }
}

/// Writes the requested reports, and prints the tables unless a report goes to standard output.
fn write(
    results: &[ExperimentResult],
    common: &CommonArguments,
    is_everything: bool,
) -> Result<(), Failure> {
    let views: Vec<View> = results.iter().map(|result| result.view.clone()).collect();
    let title = match views.as_slice() {
        [one] => one.title.clone(),
        _ => "haul bench".into(),
    };
    let json = match results {
        [one] => one.json.clone(),
        all => format!(
            "[{}]\n",
            all.iter().map(|one| one.json.trim_end()).collect::<Vec<_>>().join(",\n")
        ),
    };
    if !destinations(common).any(|to| *to == Destination::StandardOutput) {
        for (index, view) in views.iter().enumerate() {
            if views.len() > 1 {
                output::print(&format!(
                    "{}== {} ==\n",
                    if index > 0 { "\n" } else { "" },
                    view.title
                ))?;
            }
            output::print(&export::terminal::render(view, output::terminal_width()))?;
        }
        if is_everything {
            output::print(&format!("\nFull report: {REPORT_DIRECTORY}/index.html\n"))?;
        }
    }
    for (destination, text) in [
        (&common.json, &json),
        (&common.markdown, &export::markdown::render(&views)),
        (&common.html, &export::html::render(&title, &views)),
    ] {
        if let Some(destination) = destination {
            destination.write(text)?;
        }
    }
    if is_everything {
        let directory = Path::new(REPORT_DIRECTORY);
        for result in results {
            Destination::File(directory.join(format!("{}.json", result.experiment)))
                .write(&result.json)?;
        }
        Destination::File(directory.join("report.md")).write(&export::markdown::render(&views))?;
        Destination::File(directory.join("index.html"))
            .write(&export::html::render(&title, &views))?;
    }
    Ok(())
}

fn destinations(common: &CommonArguments) -> impl Iterator<Item = &Destination> {
    [&common.json, &common.markdown, &common.html].into_iter().flatten()
}

/// Checks that every destination can be written, before the run.
fn check_destinations(common: &CommonArguments, is_everything: bool) -> Result<(), Failure> {
    if is_everything {
        fs::create_dir_all(REPORT_DIRECTORY).map_err(|error| {
            Failure::bad_input(format!(
                "cannot create the directory {REPORT_DIRECTORY}: {error} (run it in another \
                 directory, or run `haul bench send`)"
            ))
        })?;
        Destination::File(Path::new(REPORT_DIRECTORY).join("index.html")).check()?;
    }
    if destinations(common).filter(|to| **to == Destination::StandardOutput).count() > 1 {
        return Err(Failure::bad_input(
            "only one of --json, --markdown and --html can be standard output (-)",
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
fn non_empty_or<T>(given: Vec<T>, default: Vec<T>) -> Vec<T> {
    if given.is_empty() { default } else { given }
}
