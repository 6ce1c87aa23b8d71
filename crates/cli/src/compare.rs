//! `haul compare`: two runs row by row, or two builds of haul in one run.

use crate::arguments::CompareArguments;
use crate::exclusive::Measuring;
use crate::output::{self, Destination, Failure};
use haul_bench::compare::{
    self, Comparison, Difference, Finding, LoadError, RowComparison, RunReports,
};
use haul_bench::export;
use haul_bench::matrix::SendSelection;
use haul_bench::send::SendParameters;
use haul_bench::verdict::Confidence;
use haul_bench::{Pace, TimeLimit};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Time of a comparison of two builds.
const TIME: Duration = Duration::from_secs(120);
/// Precision that is sufficient by default, in percent.
const WITHIN_PERCENT: f64 = 2.0;

pub fn run(arguments: &CompareArguments) -> Result<ExitCode, Failure> {
    let destinations = [&arguments.json, &arguments.markdown, &arguments.html];
    let destinations = || destinations.into_iter().flatten();
    if destinations().filter(|to| **to == Destination::StandardOutput).count() > 1 {
        return Err(Failure::bad_input(
            "only one of --json, --markdown and --html can be standard output (-)",
        ));
    }
    destinations().try_for_each(Destination::check)?;
    let compared = [Compared::open(&arguments.a)?, Compared::open(&arguments.b)?];
    // From here on a signal sets the flag only. Before, it ends a read from a pipe.
    let stop = output::stop_flag()?;
    let _measuring = Measuring::manage(arguments.force, &stop);
    let comparison = match &compared {
        [Compared::Program, Compared::Program] => measure(arguments, &stop)?,
        [Compared::Program, _] | [_, Compared::Program] => {
            return Err(Failure::bad_input(
                "one of the two is a program and the other is not: name two runs or two builds",
            ));
        }
        [a, b] => compare_runs(arguments, &a.load(&arguments.a)?, &b.load(&arguments.b)?)?,
    };
    let view = comparison.view();
    if !destinations().any(|to| *to == Destination::StandardOutput) {
        let text = export::terminal::render(&view, output::terminal_width(), output::has_colour());
        output::print(&text)?;
    }
    let views = [view];
    for (destination, text) in [
        (&arguments.json, export::json(&comparison)),
        (&arguments.markdown, export::markdown::render(&views)),
        (&arguments.html, export::html::render(&views[0].title, &views)),
    ] {
        if let Some(destination) = destination {
            destination.write(&text)?;
        }
    }
    if stop.load(Relaxed) {
        return Ok(ExitCode::from(130));
    }
    let undecided = comparison.undecided();
    if comparison.rows.iter().all(|row| !row.is_decided()) {
        return Err(Failure::unmeasured("no row could be compared; the reasons are above"));
    }
    let Some(limit) = arguments.fail_above else { return Ok(ExitCode::SUCCESS) };
    if rows_above(&comparison, limit, Confidence::Certain).next().is_some() {
        return Ok(ExitCode::FAILURE);
    }
    if !undecided.is_empty() {
        return Err(Failure::unmeasured(format!("not compared: {}", undecided.join("; "))));
    }
    let likely: Vec<_> = rows_above(&comparison, limit, Confidence::Likely).collect();
    if !likely.is_empty() {
        return Err(Failure::unmeasured(format!(
            "likely dearer, but not certainly with so few rounds: {} (measure longer, with --for, \
             or more --rounds)",
            likely.join("; ")
        )));
    }
    Ok(ExitCode::SUCCESS)
}

/// A or B of the command line.
enum Compared {
    /// A folder of reports.
    Folder,
    /// The content of a report.
    Report(Vec<u8>),
    /// A build of haul: its file begins like an ELF file.
    Program,
}

impl Compared {
    /// Reads a file once, because it may be a pipe.
    fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |error| Failure::bad_input(format!("cannot read {}: {error}", path.display()));
        if fs::metadata(path).map_err(failed)?.is_dir() {
            return Ok(Self::Folder);
        }
        let mut file = File::open(path).map_err(failed)?;
        let mut content = Vec::new();
        file.by_ref().take(4).read_to_end(&mut content).map_err(failed)?;
        if content == b"\x7fELF" {
            return Ok(Self::Program);
        }
        file.take(compare::FILE_BYTES_MAX).read_to_end(&mut content).map_err(failed)?;
        Ok(Self::Report(content))
    }

    /// The run that was measured earlier.
    fn load(&self, path: &Path) -> Result<RunReports, Failure> {
        let run = match self {
            Self::Report(content) => compare::load_report(path, content),
            Self::Folder | Self::Program => compare::load_folder(path),
        };
        run.map_err(|error| match error {
            LoadError::Unmeasured { .. } => Failure::unmeasured(error),
            error => Failure::bad_input(format!(
                "{error} (name a folder of haul bench, such as haul-report/latest, or a report of \
                 haul bench, haul soak or iperf3 with --json)"
            )),
        })
    }
}

/// Compares two measurements that were made earlier.
fn compare_runs(
    arguments: &CompareArguments,
    a: &RunReports,
    b: &RunReports,
) -> Result<Comparison, Failure> {
    let CompareArguments { time, within, paths, chunk, workload, .. } = arguments;
    let is_measured = time.is_some()
        || within.is_some()
        || !(paths.is_empty() && chunk.is_empty() && workload.is_empty());
    if is_measured {
        return Err(Failure::bad_input(
            "--for, --within, --paths, --chunk and --workload are for two builds: two runs are not \
             measured again",
        ));
    }
    compare::runs(a, b).ok_or_else(|| {
        Failure::bad_input(format!(
            "{} and {} have no row in common: compare runs of the same experiment and conditions \
             (A has {}; B has {})",
            arguments.a.display(),
            arguments.b.display(),
            a.groups(),
            b.groups()
        ))
    })
}

/// Measures both builds in the same rounds.
fn measure(arguments: &CompareArguments, stop: &AtomicBool) -> Result<Comparison, Failure> {
    let absolute = |path: &Path| {
        fs::canonicalize(path)
            .map_err(|error| Failure::bad_input(format!("cannot read {}: {error}", path.display())))
    };
    let programs: [PathBuf; 2] = [absolute(&arguments.a)?, absolute(&arguments.b)?];
    let plain = SendSelection::plain();
    let selection = SendSelection {
        paths: super::bench::non_empty_or(arguments.paths.clone(), plain.paths),
        chunks: super::bench::non_empty_or(arguments.chunk.clone(), plain.chunks),
        workloads: super::bench::non_empty_or(arguments.workload.clone(), plain.workloads),
        ..plain
    };
    let within_percent = arguments.within.unwrap_or(WITHIN_PERCENT);
    let limit = TimeLimit::starting_now(arguments.time.unwrap_or(TIME), within_percent);
    let parameters = SendParameters {
        pace: Pace::QUICK.with_limit(limit),
        observer_pairs: 0,
        ..SendParameters::new(vec![selection])
    };
    let _ = haul_lab::enter_user_namespace();
    let bar = output::progress_bar();
    let comparison = compare::builds(&programs, &parameters, stop, &mut |progress| {
        output::update_progress(&bar, progress);
    });
    bar.finish_and_clear();
    comparison.map_err(output::bench_failure)
}

/// The rows that cost more with this confidence, and by more than `limit` percent.
fn rows_above(
    comparison: &Comparison,
    limit: f64,
    confidence: Confidence,
) -> impl Iterator<Item = String> {
    let finding = Finding { difference: Difference::More, confidence };
    let is_above = move |row: &&RowComparison| {
        row.finding == finding && row.ratio.is_some_and(|ratio| ratio.median > 1.0 + limit / 100.0)
    };
    comparison.rows.iter().filter(is_above).map(|row| format!("{} {}", row.experiment, row.name))
}
