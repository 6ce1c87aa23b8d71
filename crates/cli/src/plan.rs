//! `haul plan`.

use crate::arguments::PlanArguments;
use crate::output::{self, Destination, Failure};
use haul_bench::export;
use haul_bench::plan::{self, Plan};
use haul_bench::report::SCHEMA;
use haul_bench::send::SendReport;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::process::ExitCode;

/// The largest report that is read.
const REPORT_BYTES_MAX: u64 = 64 << 20;
/// Where a plan is kept unless told otherwise.
const PLAN_FILE: &str = "haul-plan.json";

pub fn run(arguments: &PlanArguments) -> Result<ExitCode, Failure> {
    let file = match &arguments.json {
        Some(Destination::File(path)) => path.clone(),
        _ => PLAN_FILE.into(),
    };
    if arguments.check {
        return check(&file);
    }
    arguments.json.clone().unwrap_or(Destination::File(file.clone())).check()?;
    let (plan, is_new) = match (&arguments.from, arguments.rate) {
        (Some(report), _) => {
            let plan = from_report(report)?;
            warn_of_pacing(&plan);
            (plan, false)
        }
        // A rate needs no new measurement where there is a plan.
        (None, Some(_)) if file.exists() => {
            let plan = load(&file)?;
            warn_of_changes(&file, &plan);
            warn_of_pacing(&plan);
            (plan, false)
        }
        (None, rate) => {
            if rate.is_some() {
                eprintln!(
                    "haul: there is no {} yet: measuring for about four minutes",
                    file.display()
                );
            }
            (measure(arguments.rounds.unwrap_or(plan::ROUNDS))?, true)
        }
    };
    let is_printed = arguments.json != Some(Destination::StandardOutput);
    match arguments.rate {
        Some(rate) if is_printed => print(&plan::describe_rate(&plan, rate))?,
        _ if is_printed => print(&plan::describe(&plan))?,
        _ => {}
    }
    if is_new && is_printed {
        print(&plan::describe_tests(&plan))?;
    }
    if is_new && !arguments.force && !plan::has_stood(&plan) {
        let (missed, all) = plan::misses(&plan);
        return Err(Failure::failed(format!(
            "the plan missed {missed} of its {all} tests and was not written: measure again on a quieter machine, or take it all the same with --force"
        )));
    }
    // A plan that was measured is kept; one that was only looked at is written where somebody asks for it.
    let kept = Destination::File(file.clone());
    let to = arguments.json.as_ref().or(is_new.then_some(&kept));
    if let Some(to) = to {
        to.write(&export::json(&plan))?;
        if is_printed && is_new {
            output::print(&format!("Written to {}: haul::Plan::load takes it.\n", file.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Measures, makes a plan and puts it to the test.
fn measure(rounds: usize) -> Result<Plan, Failure> {
    let _ = haul_lab::become_lab_user();
    let stop = output::stop_flag()?;
    let bar = output::progress_bar();
    let made = plan::make(rounds, &stop, &mut |progress| output::show(&bar, progress));
    bar.finish_and_clear();
    let made = made.map_err(output::bench_failure)?;
    if stop.load(std::sync::atomic::Ordering::Relaxed) {
        return Err(Failure::stopped("stopped before it was complete: no plan was made"));
    }
    warn(&made.report);
    warn_of_pacing(&made.plan);
    Ok(made.plan)
}

/// The plan of a file.
pub fn load(file: &Path) -> Result<Plan, Failure> {
    if !file.exists() {
        return Err(Failure::bad_input(format!(
            "there is no {}: make a plan with `haul plan`",
            file.display()
        )));
    }
    Plan::load(file).map_err(Failure::bad_input)
}

/// Says where a plan that is used is of another machine.
pub fn warn_of_changes(file: &Path, plan: &Plan) {
    for change in plan::changes(plan) {
        eprintln!("haul: {} was made before this machine changed: {change}", file.display());
    }
}

/// Says where this host's sockets are paced and the plan's were not.
fn warn_of_pacing(plan: &Plan) {
    if let Some(note) = plan::pacing_note(plan) {
        eprintln!("haul: the plan was {note}");
    }
}

/// Says what has changed since.
fn check(file: &Path) -> Result<ExitCode, Failure> {
    let plan = load(file)?;
    warn_of_pacing(&plan);
    let changes = plan::changes(&plan);
    if changes.is_empty() {
        output::print(&format!(
            "{}: measured on this kernel, CPU and network cards ({}); the distance of the CPUs is not checked\n",
            file.display(),
            plan.measured
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    for change in changes {
        output::print(&format!("{change}\n"))?;
    }
    output::print("make the plan again with `haul plan`\n")?;
    Ok(ExitCode::FAILURE)
}

fn from_report(path: &Path) -> Result<Plan, Failure> {
    let name = path.display();
    let file = File::open(path).map_err(|error| {
        Failure::bad_input(format!(
            "cannot open {name}: {error} (name a report of `haul bench send --json FILE`, or measure with plain `haul plan`)"
        ))
    })?;
    let report: SendReport = serde_json::from_reader(BufReader::new(file.take(REPORT_BYTES_MAX)))
        .map_err(|error| {
        Failure::bad_input(format!("{name} is no report of `haul bench send`: {error}"))
    })?;
    if report.schema != SCHEMA {
        let found = &report.schema;
        return Err(Failure::bad_input(format!(
            "{name} is of schema {found:?}, and this version reads {SCHEMA:?}"
        )));
    }
    warn(&report);
    plan::of(&report).ok_or_else(|| {
        Failure::bad_input(format!("{name} has no measured row to make a plan from"))
    })
}

fn warn(report: &SendReport) {
    let kinds: BTreeSet<String> =
        report.warnings.iter().map(|warning| warning.kind.to_string()).collect();
    if !kinds.is_empty() {
        let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
        eprintln!(
            "haul: the measurement carries warnings ({kinds}): a plan is as good as what it was made of"
        );
    }
}

/// Prints lines no wider than the terminal.
fn print(text: &str) -> Result<(), Failure> {
    let options = textwrap::Options::new(usize::from(output::width())).subsequent_indent("  ");
    text.lines().try_for_each(|line| output::print(&(textwrap::fill(line, &options) + "\n")))
}
