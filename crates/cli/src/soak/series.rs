//! `haul soak --runs`: several runs of a command, compared with another command or an earlier day.

use super::{MeasuredCommand, NULL, warn_of_quota, write};
use crate::arguments::SoakArguments;
use crate::exclusive::Measuring;
use crate::output::{self, Failure};
use haul_bench::Estimate;
use haul_bench::soak_series::{
    BASELINE_RUNS, BaselineRatio, COMPARED_RUNS_MIN, SCHEMA, SoakRun, SoakSeries, unit,
};
use haul_soak::report::{SoakReport, Warning};
use haul_soak::{exclusive, reference};
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The runs of a comparison with another command, if their number is not given.
const VERSUS_RUNS: usize = 20;
/// The largest baseline that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Warnings whose presence means that costs are wrong or incomplete.
const WRONG_COST: [&str; 2] = ["another-measurement", "outlived"];

/// Whether the arguments ask for a series.
pub fn is_requested(arguments: &SoakArguments) -> bool {
    arguments.runs.is_some()
        || arguments.versus.is_some()
        || arguments.baseline.is_some()
        || arguments.bytes.is_some()
        || arguments.per_mib_of.is_some()
}

pub fn run(arguments: &SoakArguments) -> Result<ExitCode, Failure> {
    let is_compared = arguments.versus.is_some() || arguments.baseline.is_some();
    let default = match (&arguments.baseline, &arguments.versus) {
        (Some(_), _) => BASELINE_RUNS,
        (None, Some(_)) => VERSUS_RUNS,
        (None, None) => 1,
    };
    let count = arguments.runs.map_or(default, |runs| runs as usize);
    if is_compared && count < COMPARED_RUNS_MIN {
        return Err(Failure::bad_input(format!(
            "--runs {count} is too few to compare: use {COMPARED_RUNS_MIN} or more"
        )));
    }
    let baseline = arguments.baseline.as_deref().map(load).transpose()?;
    if let (Some(file), Some(baseline)) = (&arguments.baseline, &baseline) {
        check_unit(file, baseline, arguments)?;
    }
    if let Some(device) = &arguments.per_mib_of {
        device_bytes(device)?;
    }
    warn_of_quota();
    let _measuring = Measuring::begin(arguments.force)?;
    let (input, mut warnings) = input_of(arguments, count);
    let stop = output::stop_flag()?;
    let measured = MeasuredCommand { input, ..MeasuredCommand::new(arguments)? };
    let (runs, end) = measure_in_turn(arguments, &measured, count, &stop)?;
    let BothSeries { runs, others, warnings: of_runs } = runs;
    warnings.extend(of_runs);
    if let Some(Ended { detail, .. }) = &end {
        warnings.push(Warning { kind: "interrupted".into(), detail: detail.clone() });
    }
    if runs.is_empty() {
        let Ended { detail, code } = end.unwrap_or_default();
        return Err(Failure::with_code(detail, code));
    }
    let command =
        arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let versus = arguments.versus.clone().map(|text| (text, others));
    let mut series = SoakSeries::of(command, runs, versus);
    if let (Some(file), Some(baseline)) = (&arguments.baseline, &baseline) {
        series.compare_with(&file.display().to_string(), baseline);
    }
    if exclusive::is_disturbed() {
        let detail = "another haul measured at the same time, so the costs are wrong".into();
        warnings.push(Warning { kind: "another-measurement".into(), detail });
    }
    series.warnings.splice(0..0, warnings);
    write(&series, &text(&series, baseline.as_ref()), arguments.json.as_ref())?;
    Ok(ExitCode::from(end.map_or_else(|| verdict_code(&series, arguments), |end| end.code)))
}

/// The exit code of a complete series.
fn verdict_code(series: &SoakSeries, arguments: &SoakArguments) -> u8 {
    match arguments.fail_above {
        Some(_)
            if series.baseline.as_ref().is_none_or(|baseline| !baseline.ratio.has_interval()) =>
        {
            eprintln!("haul: the costs cannot be compared with the baseline");
            output::UNMEASURED_CODE
        }
        Some(_) if series.warnings.iter().any(|warning| WRONG_COST.contains(&&*warning.kind)) => {
            eprintln!("haul: the costs are wrong or incomplete, so the check has no answer");
            output::UNMEASURED_CODE
        }
        Some(limit) => u8::from(series.is_above_baseline(limit)),
        None => 0,
    }
}

/// The file that each run reads. Several runs cannot share one pipe: the first would empty it.
fn input_of(arguments: &SoakArguments, count: usize) -> (Option<&Path>, Vec<Warning>) {
    let is_series = count > 1 || arguments.versus.is_some();
    if arguments.input.is_some() || !is_series {
        return (arguments.input.as_deref(), Vec::new());
    }
    let stdin = rustix::fs::fstat(io::stdin()).ok();
    let null = rustix::fs::stat(NULL).ok();
    let is_null = stdin.zip(null).is_some_and(|(stdin, null)| stdin.st_rdev == null.st_rdev);
    let warning = Warning {
        kind: "input".into(),
        detail: "every run reads an empty input, because only one run could read standard input: \
                 name a file with --input"
            .into(),
    };
    let is_ignored = !io::stdin().is_terminal() && !is_null;
    (Some(Path::new(NULL)), is_ignored.then_some(warning).into_iter().collect())
}

/// Checks that the runs have costs in the unit of the baseline.
fn check_unit(
    file: &Path,
    baseline: &SoakSeries,
    arguments: &SoakArguments,
) -> Result<(), Failure> {
    let unit = unit(arguments.bytes.is_some() || arguments.per_mib_of.is_some());
    if baseline.unit == unit {
        return Ok(());
    }
    Err(Failure::bad_input(format!(
        "{} has costs in {}, and these runs in {unit}: use the same --bytes or --per-mib-of",
        file.display(),
        baseline.unit,
    )))
}

/// The runs of the command, and of the command that it is compared with.
#[derive(Default)]
struct BothSeries {
    runs: Vec<SoakRun>,
    others: Vec<SoakRun>,
    /// Warnings about the cost of a run: the first of each kind.
    warnings: Vec<Warning>,
}

/// Why a series ended before its last run.
#[derive(Default)]
struct Ended {
    detail: String,
    /// The exit code of the whole series.
    code: u8,
}

/// Runs both commands in turn. Keeps the runs that were complete when a run failed or a signal
/// arrived.
fn measure_in_turn(
    arguments: &SoakArguments,
    measured: &MeasuredCommand<'_>,
    count: usize,
    stop: &AtomicBool,
) -> Result<(BothSeries, Option<Ended>), Failure> {
    let versus = arguments
        .versus
        .as_ref()
        .map(|text| [OsString::from("sh"), OsString::from("-c"), OsString::from(text)]);
    // A shell starts the other command. A shell starts this command as well, so that the cost of
    // the shell is in both.
    let started: Vec<OsString> = match &versus {
        Some(_) => ["sh", "-c", "exec \"$@\"", "sh"]
            .into_iter()
            .map(OsString::from)
            .chain(arguments.command.iter().cloned())
            .collect(),
        None => arguments.command.clone(),
    };
    let mut all = BothSeries::default();
    for index in 0..count {
        let BothSeries { runs, others, warnings } = &mut all;
        // The order alternates, so that drift favours neither command.
        let mut order = vec![(&started[..], runs)];
        if let Some(versus) = &versus {
            order.push((&versus[..], others));
        }
        if index % 2 == 1 {
            order.reverse();
        }
        for (command, runs) in order {
            let (run, report) = match measure(command, arguments, measured) {
                Ok(measured) => measured,
                // The complete runs are worth a report.
                Err(failure) if !runs.is_empty() => {
                    let detail = format!("run {} of {count}: {failure}", index + 1);
                    return Ok((all, Some(Ended { detail, code: failure.code() })));
                }
                Err(failure) => return Err(failure),
            };
            if stop.load(Relaxed) {
                let detail = format!("stopped after {index} of {count} runs");
                return Ok((all, Some(Ended { detail, code: 130 })));
            }
            if run.exit_code != 0 {
                let line = command.join(&OsString::from(" "));
                let detail = format!(
                    "run {} of {}: exit code {}; the series was ended",
                    index + 1,
                    line.display(),
                    run.exit_code
                );
                return Ok((all, Some(Ended { detail, code: run.exit_code })));
            }
            keep_warning_of_cost(warnings, report);
            runs.push(run);
        }
        show_progress(index + 1, count, &all);
    }
    Ok((all, None))
}

/// Keeps the first warning of a run whose cost is incomplete.
fn keep_warning_of_cost(warnings: &mut Vec<Warning>, report: SoakReport) {
    for warning in report.warnings {
        let is_known = warnings.iter().any(|known| known.kind == warning.kind);
        if warning.kind == "outlived" && !is_known {
            warnings.push(warning);
        }
    }
}

/// Prints a line for each run on a terminal.
fn show_progress(done: usize, count: usize, all: &BothSeries) {
    if count > 1 && io::stderr().is_terminal() {
        let cost = |runs: &[SoakRun]| {
            runs.last().map_or(String::new(), |run| format!(" {:.3}", run.cpu_seconds))
        };
        eprintln!("run {done} of {count}:{}{} CPU-seconds", cost(&all.runs), cost(&all.others));
    }
}

/// Runs a command once, with the fixed work before and after it.
fn measure(
    words: &[OsString],
    arguments: &SoakArguments,
    measured: &MeasuredCommand<'_>,
) -> Result<(SoakRun, SoakReport), Failure> {
    let reference = || reference::cpu_time().map_err(Failure::failed);
    let bytes = |device: &String| device_bytes(device);
    let before = (reference()?, arguments.per_mib_of.as_ref().map(bytes).transpose()?);
    let report = measured.run(words)?;
    let after = (arguments.per_mib_of.as_ref().map(bytes).transpose()?, reference()?);
    let moved = after.0.zip(before.1).map(|(after, before)| after.saturating_sub(before));
    let bytes = moved.or(arguments.bytes.map(|size| size.0));
    if bytes == Some(0) && report.exit_code == Some(0) {
        return Err(Failure::failed("no bytes were moved: name another device or size"));
    }
    let reference_seconds = f64::midpoint(before.0.as_secs_f64(), after.1.as_secs_f64());
    let run = SoakRun::of(&report, bytes, reference_seconds).ok_or_else(|| {
        let reasons: Vec<&str> =
            report.warnings.iter().map(|warning| warning.detail.as_str()).collect();
        Failure::unmeasured(format!("no reading of a run: {}", reasons.join("; ")))
    })?;
    Ok((run, report))
}

/// The bytes that a network device received and sent since it was created.
fn device_bytes(device: &str) -> Result<u64, Failure> {
    let counter = |name: &str| {
        let file = format!("/sys/class/net/{device}/statistics/{name}");
        // A device's name has no slash, so the path stays in this directory.
        let is_name = !device.is_empty() && !device.contains('/') && device != "..";
        let text = fs::read_to_string(&file).ok().filter(|_| is_name);
        text.and_then(|text| text.trim().parse::<u64>().ok()).ok_or_else(|| {
            Failure::bad_input(format!("there is no network device {device:?} (see ip link)"))
        })
    };
    Ok(counter("rx_bytes")? + counter("tx_bytes")?)
}

/// Reads an earlier series.
fn load(path: &Path) -> Result<SoakSeries, Failure> {
    let name = path.display();
    let failed = |error| {
        Failure::bad_input(format!(
            "cannot read {name}: {error} (write it with haul soak --runs 50 --json {name} -- …)"
        ))
    };
    if fs::metadata(path).map_err(failed)?.len() > FILE_BYTES_MAX {
        return Err(Failure::bad_input(format!("{name} is too large to be a baseline")));
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    let series: SoakSeries = serde_json::from_str(&text).map_err(|error| {
        Failure::bad_input(format!("{name} is not a report of haul soak --runs: {error}"))
    })?;
    if series.schema != SCHEMA {
        let found = &series.schema;
        return Err(Failure::bad_input(format!(
            "{name} has schema {found:?}, and this version reads {SCHEMA:?}"
        )));
    }
    if series.runs.len() < COMPARED_RUNS_MIN {
        let runs = series.runs.len();
        return Err(Failure::bad_input(format!(
            "{name} has {runs} runs, and a comparison takes {COMPARED_RUNS_MIN}"
        )));
    }
    Ok(series)
}

fn text(series: &SoakSeries, baseline: Option<&SoakSeries>) -> String {
    let mut text = String::new();
    let cost = |estimate: &Estimate| {
        let digits = if series.unit == "CPU-seconds" { 3 } else { 0 };
        format!("{:.digits$} {} ({})", estimate.median, series.unit, estimate.interval(digits))
    };
    let line = series.command.join(" ");
    if let Some(estimate) = &series.cost {
        let runs = series.runs.len();
        let plural = if runs == 1 { "" } else { "s" };
        let _ = writeln!(text, "{line}: {}, {runs} run{plural}", cost(estimate));
    }
    if let Some(versus) = &series.versus {
        if let Some(estimate) = &versus.cost {
            let _ = writeln!(text, "{}: {}", versus.command, cost(estimate));
        }
        if let Some(ratio) = versus.ratio {
            let _ = writeln!(text, "{line} costs {} the other command", verdict(ratio));
        }
    }
    if let Some(BaselineRatio { ratio, started, raw_ratio, slowness, .. }) = &series.baseline {
        let _ = write!(text, "cost ÷ baseline of {started}: {}", verdict(*ratio));
        if let (Some(raw), Some(slowness)) = (raw_ratio, slowness) {
            let _ = write!(
                text,
                "; corrected for the speed of the machine (measured: {raw:.3} ×; fixed work takes \
                 {slowness:.3} × as long as in the baseline)"
            );
        }
        text.push('\n');
    }
    if let Some(baseline) = baseline {
        let differs = |what: &str, one: &str, other: &str| {
            (one != other).then(|| format!("warning: {what}: {other} in the baseline, {one} now\n"))
        };
        let lines = [
            differs("command", &series.command.join(" "), &baseline.command.join(" ")),
            differs("kernel", &series.host.kernel, &baseline.host.kernel),
            differs("CPU", &series.host.cpu, &baseline.host.cpu),
        ];
        text.extend(lines.into_iter().flatten());
    }
    for warning in &series.warnings {
        let _ = writeln!(text, "warning: {}", warning.detail);
    }
    text
}

/// A ratio with its interval, and what it shows.
fn verdict(ratio: Estimate) -> String {
    let shown = if ratio.is_above(1.0) {
        "costs more"
    } else if ratio.is_below(1.0) {
        "costs less"
    } else {
        "no difference shown"
    };
    format!("{:.3} × ({}; {shown})", ratio.median, ratio.interval(3))
}
