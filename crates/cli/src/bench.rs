//! `haul bench`.

use crate::arguments::{BenchArguments, Switch};
use crate::output::{self, Destination, Failure};
use haul_bench::matrix::Selection;
use haul_bench::report::Report;
use haul_bench::send::{self, Plan, Progress};
use haul_bench::{BenchError, export};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;

/// Where plain `haul bench` leaves its report.
const FOLDER: &str = "haul-report";

pub fn run(arguments: &BenchArguments) -> Result<ExitCode, Failure> {
    let destinations = destinations(arguments)?;
    let plan = plan(arguments);
    // Before any thread is started; where it is refused, the lab falls back and says so.
    let _ = haul_lab::become_lab_user();
    let stop = output::stop_flag()?;
    let bar = ProgressBar::new(0).with_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len}, about {eta} left, {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let report = send::run(&plan, &stop, &mut |Progress { done, total, next }| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        bar.set_message(next);
    });
    bar.finish_and_clear();
    let report = report.map_err(|error: BenchError| {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed(error) }
    })?;
    let is_stdout_taken = destinations.iter().any(|(to, _)| *to == Destination::StandardOutput);
    if !is_stdout_taken {
        output::print(&export::terminal::render(&report, output::width()))?;
    }
    for (destination, render) in &destinations {
        destination.write(&render(&report))?;
    }
    if arguments.experiment.is_none() && !is_stdout_taken {
        output::print(&format!("\nThe whole report: {FOLDER}/index.html\n"))?;
    }
    Ok(if stop.load(Relaxed) { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

type Render = fn(&Report) -> String;

/// Every file to write, checked before the run.
fn destinations(arguments: &BenchArguments) -> Result<Vec<(Destination, Render)>, Failure> {
    let json: Render = |report| export::json(report);
    let mut destinations = Vec::new();
    for (destination, render) in [
        (&arguments.json, json),
        (&arguments.markdown, export::markdown::render as Render),
        (&arguments.html, export::html::render as Render),
    ] {
        destinations.extend(destination.clone().map(|destination| (destination, render)));
    }
    if arguments.experiment.is_none() {
        let folder = Path::new(FOLDER);
        fs::create_dir_all(folder).map_err(|error| {
            Failure::bad_input(format!(
                "cannot make the folder {FOLDER}: {error} (run it in another folder, or `haul bench send`)"
            ))
        })?;
        for (name, render) in [
            ("report.json", json),
            ("report.md", export::markdown::render as Render),
            ("index.html", export::html::render as Render),
        ] {
            destinations.push((Destination::File(folder.join(name)), render));
        }
    }
    if destinations.iter().filter(|(to, _)| *to == Destination::StandardOutput).count() > 1 {
        return Err(Failure::bad_input(
            "only one of --json, --markdown and --html can be standard output (-)",
        ));
    }
    for (destination, _) in &destinations {
        destination.check()?;
    }
    Ok(destinations)
}

/// The rows that the flags name; the default set when they name none.
fn plan(arguments: &BenchArguments) -> Plan {
    let BenchArguments { paths, chunk, workload, cork, offloads, .. } = arguments;
    let is_named = !(paths.is_empty()
        && chunk.is_empty()
        && workload.is_empty()
        && cork.is_empty()
        && offloads.is_empty());
    let plain = Selection::plain();
    let selections = match (is_named, arguments.quick) {
        (false, false) => Selection::default_set(),
        (false, true) => vec![plain],
        (true, _) => vec![Selection {
            paths: or(paths.clone(), plain.paths),
            chunks: or(chunk.clone(), plain.chunks),
            workloads: or(workload.clone(), plain.workloads),
            corks: or(cork.iter().map(|&cork| cork == Switch::On).collect(), plain.corks),
            offloads: or(offloads.iter().map(|&offloads| offloads.into()).collect(), plain.offloads),
        }],
    };
    let basis = if arguments.quick { Plan::quick(selections) } else { Plan::new(selections) };
    Plan {
        rounds: arguments.rounds.unwrap_or(basis.rounds),
        rate: arguments.rate,
        mtu: arguments.mtu.unwrap_or(basis.mtu),
        congestion: arguments.congestion.clone(),
        ..basis
    }
}

fn or<T>(named: Vec<T>, otherwise: Vec<T>) -> Vec<T> {
    if named.is_empty() { otherwise } else { named }
}
