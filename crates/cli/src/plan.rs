//! `haul plan`: measures, tests, checks and prints plans.

use crate::arguments::PlanArguments;
use crate::exclusive::Measuring;
use crate::limits;
use crate::output::{self, Destination, Failure};
use haul_bench::export;
use haul_bench::plan::{self, Effort, MeasuredPlan, Plan};
use haul_bench::report::SCHEMA;
use haul_bench::send::SendReport;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Maximum number of bytes that are read of a report.
const REPORT_BYTES_MAX: u64 = 64 << 20;
/// The time of a measurement. On a quiet machine the rounds of a plan take four minutes.
const TIME: Duration = Duration::from_secs(6 * 60);
/// Default plan file.
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
    let made = make(arguments, &file)?;
    let plan = &made.plan;
    let is_printed = arguments.json != Some(Destination::StandardOutput);
    match arguments.rate {
        Some(rate) if is_printed => print(&plan::describe_rate(plan, rate))?,
        _ if is_printed => print(&plan::describe(plan))?,
        _ => {}
    }
    if made.is_new && is_printed {
        print(&plan::describe_tests(plan))?;
    }
    // A measured plan is written, and one that was made from a report with --json.
    let default = Destination::File(file.clone());
    let destination = arguments.json.as_ref().or(made.is_new.then_some(&default));
    let is_refused = made.is_stopped || !arguments.force && destination.is_some();
    let obstacle = made.obstacle.filter(|_| is_refused);
    if let Some(obstacle) = obstacle {
        let message = format!("no plan was written: {obstacle}");
        return Err(if made.is_stopped {
            Failure::stopped(message)
        } else {
            Failure::unmeasured(format!(
                "{message} (measure again on a quieter machine, or use --force)"
            ))
        });
    }
    if let Some(destination) = destination {
        destination.write(&export::json(plan))?;
        if is_printed && made.is_new {
            output::print(&format!("Written to {}; haul::Plan::load reads it.\n", file.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A plan, and where it comes from.
struct MadePlan {
    plan: Plan,
    /// Whether the plan was measured now.
    is_new: bool,
    /// What forbids the use of the plan.
    obstacle: Option<String>,
    /// Whether a signal ended the measurement.
    is_stopped: bool,
}

/// Makes the plan from a report, loads it from `file`, or measures it.
fn make(arguments: &PlanArguments, file: &Path) -> Result<MadePlan, Failure> {
    let known = |plan, obstacle| MadePlan { plan, is_new: false, obstacle, is_stopped: false };
    match (&arguments.from, arguments.rate) {
        (Some(file), _) => {
            let report = load_report(file)?;
            let plan = from_report(file, &report)?;
            warn_of_pacing(&plan);
            Ok(known(plan, plan::noise_obstacle(&report)))
        }
        // To predict the cores for a rate, an existing plan is enough.
        (None, Some(_)) if file.exists() => {
            let plan = load(file)?;
            warn_of_changes(file, &plan);
            warn_of_pacing(&plan);
            Ok(known(plan, None))
        }
        (None, rate) => {
            if rate.is_some() {
                eprintln!(
                    "haul: {} does not exist yet: measuring for about four minutes",
                    file.display()
                );
            }
            let _measuring = Measuring::begin_unforced()?;
            limits::raise_descriptor_limit();
            let time = arguments.time.unwrap_or(TIME);
            let effort = arguments.rounds.map_or(Effort::Time(time), Effort::Rounds);
            let stop = output::stop_flag()?;
            let measured = measure(effort, &stop)?;
            Ok(MadePlan {
                is_new: true,
                obstacle: measured.obstacle(),
                is_stopped: stop.load(Relaxed),
                plan: measured.plan,
            })
        }
    }
}

/// Measures, makes a plan and tests its predictions.
fn measure(effort: Effort, stop: &AtomicBool) -> Result<MeasuredPlan, Failure> {
    let _ = haul_lab::enter_user_namespace();
    let bar = output::progress_bar();
    let measured =
        plan::make(effort, stop, &mut |progress| output::update_progress(&bar, progress));
    bar.finish_and_clear();
    let measured = measured.map_err(output::bench_failure)?;
    print_warning_kinds(&measured.report);
    warn_of_pacing(&measured.plan);
    Ok(measured)
}

/// Loads the plan of a file.
pub fn load(file: &Path) -> Result<Plan, Failure> {
    if !file.exists() {
        return Err(Failure::bad_input(format!(
            "{} does not exist: make a plan with `haul plan`",
            file.display()
        )));
    }
    Plan::load(file).map_err(Failure::bad_input)
}

/// Warns of changes to this machine since the plan was measured.
pub fn warn_of_changes(file: &Path, plan: &Plan) {
    for change in plan::changes(plan) {
        eprintln!("haul: {} was made before this machine changed: {change}", file.display());
    }
}

/// Warns if this host's default congestion control paces sockets and the plan was measured without
/// pacing.
fn warn_of_pacing(plan: &Plan) {
    if let Some(note) = plan::pacing_note(plan) {
        eprintln!("haul: the plan was {note}");
    }
}

/// Prints the changes to this machine since the plan was measured.
fn check(file: &Path) -> Result<ExitCode, Failure> {
    let plan = load(file)?;
    warn_of_pacing(&plan);
    for caveat in plan.caveats() {
        print(&format!("{}: {caveat}\n", file.display()))?;
    }
    let changes = plan::changes(&plan);
    if changes.is_empty() {
        output::print(&format!(
            "{}: measured on this kernel, CPU and network cards ({}); the distance of the CPUs is \
             not checked\n",
            file.display(),
            plan.measured
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    for change in changes {
        output::print(&format!("{change}\n"))?;
    }
    output::print("measure the plan again with `haul plan`\n")?;
    Ok(ExitCode::FAILURE)
}

/// Reads a report of `haul bench send`.
fn load_report(path: &Path) -> Result<SendReport, Failure> {
    let name = path.display();
    let file = File::open(path).map_err(|error| {
        Failure::bad_input(format!(
            "cannot open {name}: {error} (name a report of `haul bench send --json FILE`, or \
             measure with plain `haul plan`)"
        ))
    })?;
    let report: SendReport = serde_json::from_reader(BufReader::new(file.take(REPORT_BYTES_MAX)))
        .map_err(|error| {
        Failure::bad_input(format!("{name} is not a report of `haul bench send`: {error}"))
    })?;
    if report.schema != SCHEMA {
        let found = &report.schema;
        return Err(Failure::bad_input(format!(
            "{name} has schema {found:?}, and this version reads {SCHEMA:?}"
        )));
    }
    Ok(report)
}

/// Makes a plan from the report of a file.
fn from_report(path: &Path, report: &SendReport) -> Result<Plan, Failure> {
    print_warning_kinds(report);
    plan::of(report).ok_or_else(|| {
        let name = path.display();
        Failure::bad_input(format!("{name} has no measured row to make a plan from"))
    })
}

/// Prints the kinds of warning that the report of the measurement has.
fn print_warning_kinds(report: &SendReport) {
    let kinds: BTreeSet<String> =
        report.warnings.iter().map(|warning| warning.kind.to_string()).collect();
    if !kinds.is_empty() {
        let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
        eprintln!("haul: the plan is made from a measurement that has warnings ({kinds})");
    }
}

/// Prints text, wrapped at the terminal's width.
fn print(text: &str) -> Result<(), Failure> {
    let options =
        textwrap::Options::new(usize::from(output::terminal_width())).subsequent_indent("  ");
    text.lines().try_for_each(|line| output::print(&(textwrap::fill(line, &options) + "\n")))
}
