//! `haul bench`.

use crate::arguments::{self, BenchArguments, CommonArguments, Experiment, Listen};
use crate::output::{self, Destination, Failure};
use haul_bench::export;
use haul_bench::pair::{self, Pair};
use haul_bench::report::Report;
use haul_bench::view::{Tabled, View};
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

/// Where plain `haul bench` leaves its reports.
const FOLDER: &str = "haul-report";

/// A report that is to be written out, whichever experiment it is of.
struct Finished {
    experiment: String,
    view: View,
    json: String,
    /// That of a command that was watched; 1 for a run that did not come to its end.
    code: u8,
}

impl Finished {
    fn is_all_refused(&self) -> bool {
        let mut lines = self.view.groups.iter().flat_map(|group| &group.lines);
        !self.view.groups.is_empty() && lines.all(|line| line.refused.is_some())
    }
}

impl<R: Tabled + Serialize> From<Report<R>> for Finished {
    fn from(report: Report<R>) -> Self {
        // Where nobody asked for an end, something was lost.
        let code =
            u8::from(report.warnings.iter().any(|warning| warning.kind == Kind::Interrupted));
        Self {
            view: report.view(),
            json: export::json(&report),
            experiment: report.experiment,
            code,
        }
    }
}

/// What an experiment is run with.
struct Context<'a> {
    common: &'a CommonArguments,
    is_quick: bool,
    stop: &'a AtomicBool,
    bar: ProgressBar,
    /// The machine to measure with, instead of the lab.
    peer: Option<Arc<Pair>>,
}

impl Context<'_> {
    fn pace(&self) -> Pace {
        let basis = if self.is_quick { Pace::QUICK } else { Pace::FULL };
        Pace { rounds: self.common.rounds.unwrap_or(basis.rounds), ..basis }
    }

    /// Runs one experiment under the progress bar.
    fn run<R: Tabled + Serialize>(
        &self,
        experiment: impl FnOnce(&AtomicBool, &mut dyn FnMut(Progress)) -> Result<Report<R>, BenchError>,
    ) -> Result<Finished, Failure> {
        self.watch(experiment).map(Finished::from)
    }

    /// The same for one that comes to more than a report.
    fn watch<T>(
        &self,
        experiment: impl FnOnce(&AtomicBool, &mut dyn FnMut(Progress)) -> Result<T, BenchError>,
    ) -> Result<T, Failure> {
        experiment(self.stop, &mut |progress| output::show(&self.bar, progress))
            .map_err(output::bench_failure)
    }
}

pub fn run(arguments: &BenchArguments) -> Result<ExitCode, Failure> {
    let BenchArguments { experiment, listen, common } = arguments;
    if let Some(address) = listen {
        return wait_for_peers(*address);
    }
    let is_everything = experiment.is_none();
    let peer = common.to.as_deref().map(|peer| connect(peer, experiment.as_ref())).transpose()?;
    check_destinations(common, is_everything)?;
    // Before any thread is started; where it is refused, the lab falls back and says so. A command that is watched stays
    // who it is, and so does who measures with another machine.
    if common.to.is_none() && !experiment.as_ref().is_some_and(Experiment::watches_a_command) {
        let _ = haul_lab::become_lab_user();
    }
    let stop = output::stop_flag()?;
    let is_quick = common.quick || is_everything && !common.full;
    let mut all = arguments::every_experiment()?;
    all.retain(|experiment| peer.is_none() || experiment.takes_two_machines());
    let context = Context { common, is_quick, stop: &stop, bar: output::progress_bar(), peer };
    let wanted = experiment.as_ref().map_or(all.as_slice(), std::slice::from_ref);
    let mut finished = Vec::new();
    for experiment in wanted {
        match experiment.run(&context) {
            Ok(report) => finished.push(report),
            // What one experiment lacks (permission, a feature) is no reason to go without the others.
            Err(_) if stop.load(Relaxed) && !finished.is_empty() => break,
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
    if finished.is_empty() {
        return Err(Failure::stopped("stopped before there was anything to report"));
    }
    write(&finished, common, is_everything)?;
    if stop.load(Relaxed) {
        if is_everything {
            let (done, all) = (finished.len(), wanted.len());
            eprintln!(
                "haul: stopped: {FOLDER}/index.html holds {done} of {all} experiments, the last not complete"
            );
        }
        return Ok(ExitCode::from(130));
    }
    match finished.as_slice() {
        [one] if one.is_all_refused() => {
            Err(Failure::failed("nothing could be measured here; the reasons are above"))
        }
        [one] => Ok(ExitCode::from(one.code)),
        all => Ok(ExitCode::from(all.iter().map(|one| one.code).max().unwrap_or(0))),
    }
}

/// Waits for other machines until Ctrl-C.
fn wait_for_peers(listen: Listen) -> Result<ExitCode, Failure> {
    let stop = output::stop_flag()?;
    // Where there is no IPv6 the other one will do.
    let everywhere =
        [(Ipv6Addr::UNSPECIFIED, pair::PORT).into(), (Ipv4Addr::UNSPECIFIED, pair::PORT).into()];
    let addresses = match listen {
        Listen::Everywhere => everywhere.to_vec(),
        Listen::At(address) => vec![address],
    };
    // A standard error that is closed leaves nobody to tell.
    let tell = |words: &str| drop(writeln!(io::stderr(), "haul: {words}"));
    pair::listen(&addresses, &stop, &tell).map_err(output::bench_failure)?;
    Ok(ExitCode::SUCCESS)
}

/// Greets the other machine, if what is to be measured takes two.
fn connect(peer: &str, experiment: Option<&Experiment>) -> Result<Arc<Pair>, Failure> {
    if let Some(alone) = experiment.filter(|experiment| !experiment.takes_two_machines()) {
        return Err(Failure::bad_input(format!(
            "--to goes with send, receive and forward: {} measures this machine alone",
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

    fn watches_a_command(&self) -> bool {
        matches!(self, Self::Profile(arguments) if !arguments.command.is_empty())
    }

    fn run(&self, context: &Context<'_>) -> Result<Finished, Failure> {
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

/// Prints the tables, unless a report is to have standard output, and writes what was asked for.
fn write(
    finished: &[Finished],
    common: &CommonArguments,
    is_everything: bool,
) -> Result<(), Failure> {
    let views: Vec<View> = finished.iter().map(|report| report.view.clone()).collect();
    let title = match views.as_slice() {
        [one] => one.title.clone(),
        _ => "haul bench".into(),
    };
    let json = match finished {
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
            output::print(&export::terminal::render(view, output::width()))?;
        }
        if is_everything {
            output::print(&format!("\nThe whole report: {FOLDER}/index.html\n"))?;
        }
    }
    for (to, text) in [
        (&common.json, &json),
        (&common.markdown, &export::markdown::render(&views)),
        (&common.html, &export::html::render(&title, &views)),
    ] {
        if let Some(to) = to {
            to.write(text)?;
        }
    }
    if is_everything {
        let folder = Path::new(FOLDER);
        for report in finished {
            Destination::File(folder.join(format!("{}.json", report.experiment)))
                .write(&report.json)?;
        }
        Destination::File(folder.join("report.md")).write(&export::markdown::render(&views))?;
        Destination::File(folder.join("index.html"))
            .write(&export::html::render(&title, &views))?;
    }
    Ok(())
}

fn destinations(common: &CommonArguments) -> impl Iterator<Item = &Destination> {
    [&common.json, &common.markdown, &common.html].into_iter().flatten()
}

/// Every file to write, checked before the run.
fn check_destinations(common: &CommonArguments, is_everything: bool) -> Result<(), Failure> {
    if is_everything {
        fs::create_dir_all(FOLDER).map_err(|error| {
            Failure::bad_input(format!(
                "cannot make the folder {FOLDER}: {error} (run it in another folder, or `haul bench send`)"
            ))
        })?;
        Destination::File(Path::new(FOLDER).join("index.html")).check()?;
    }
    if destinations(common).filter(|to| **to == Destination::StandardOutput).count() > 1 {
        return Err(Failure::bad_input(
            "only one of --json, --markdown and --html can be standard output (-)",
        ));
    }
    destinations(common).try_for_each(Destination::check)
}

/// A flag that sets up the lab has no meaning between two machines.
fn refuse_with_peer(context: &Context<'_>, is_given: bool, flag: &str) -> Result<(), Failure> {
    if context.peer.is_some() && is_given {
        return Err(Failure::bad_input(format!(
            "{flag} sets up the lab; with --to the machines stay as they are"
        )));
    }
    Ok(())
}

/// What was named, or else the default.
fn or<T>(named: Vec<T>, otherwise: Vec<T>) -> Vec<T> {
    if named.is_empty() { otherwise } else { named }
}
