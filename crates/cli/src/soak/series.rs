//! `haul soak --runs`: several runs of a command, compared with another command or an earlier day.

use super::{command_of, write};
use crate::arguments::SoakArguments;
use crate::output::{self, Failure};
use crate::user_command;
use haul_bench::Estimate;
use haul_bench::soak_series::{COMPARED_RUNS_MIN, SCHEMA, SoakRun, SoakSeries, unit};
use haul_soak::{process, reference};
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The runs of a comparison with another command, if their number is not given.
const VERSUS_RUNS: u32 = 20;
/// The runs of a comparison with a baseline, if their number is not given. With fewer, a difference
/// of 10 % is often missed (docs/measurements/repeatability.md).
const BASELINE_RUNS: u32 = 50;
/// The largest baseline that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

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
    let count = arguments.runs.unwrap_or(default) as usize;
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
    let stop = output::stop_flag()?;
    let (runs, others) = match measure_in_turn(arguments, count, &stop)? {
        Ok(runs) => runs,
        Err(failed) => return Ok(failed),
    };
    let command =
        arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let versus = arguments.versus.clone().map(|text| (text, others));
    let mut series = SoakSeries::of(command, runs, versus);
    if let (Some(file), Some(baseline)) = (&arguments.baseline, &baseline) {
        series.compare_with(&file.display().to_string(), baseline);
    }
    let is_above = arguments.fail_above.is_some_and(|limit| series.is_above_baseline(limit));
    write(&series, &text(&series, baseline.as_ref()), arguments.json.as_ref())?;
    Ok(if is_above { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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

/// The runs of the command, and of the one that it is compared with.
type Runs = (Vec<SoakRun>, Vec<SoakRun>);

/// Runs both commands in turn. If a run fails, returns its exit code.
fn measure_in_turn(
    arguments: &SoakArguments,
    count: usize,
    stop: &AtomicBool,
) -> Result<Result<Runs, ExitCode>, Failure> {
    let versus = arguments
        .versus
        .as_ref()
        .map(|text| [OsString::from("sh"), OsString::from("-c"), OsString::from(text)]);
    // A shell starts the other command, so one starts this command, too: its cost is in both.
    let started: Vec<OsString> = match &versus {
        Some(_) => ["sh", "-c", "exec \"$@\"", "sh"]
            .into_iter()
            .map(OsString::from)
            .chain(arguments.command.iter().cloned())
            .collect(),
        None => arguments.command.clone(),
    };
    let (mut runs, mut others) = (Vec::new(), Vec::new());
    for index in 0..count {
        // The order alternates, so that drift favours neither command.
        let mut order = vec![(&started[..], &mut runs)];
        if let Some(versus) = &versus {
            order.push((&versus[..], &mut others));
        }
        if index % 2 == 1 {
            order.reverse();
        }
        for (command, runs) in order {
            let run = measure(command, arguments)?;
            if run.exit_code != 0 {
                let line = command.join(&OsString::from(" "));
                eprintln!(
                    "haul: run {} of {}: exit code {}; the series was ended",
                    index + 1,
                    line.display(),
                    run.exit_code
                );
                return Ok(Err(ExitCode::from(run.exit_code)));
            }
            runs.push(run);
        }
        if stop.load(Relaxed) {
            return Err(Failure::stopped(format!("stopped after {} of {count} runs", index + 1)));
        }
    }
    Ok(Ok((runs, others)))
}

/// Runs a command once, with the fixed work before and after it.
fn measure(words: &[OsString], arguments: &SoakArguments) -> Result<SoakRun, Failure> {
    let reference = || reference::cpu_time().map_err(Failure::failed);
    let bytes = |device: &String| device_bytes(device);
    let mut command: Command = command_of(words, arguments.json.as_ref())?;
    let before = (reference()?, arguments.per_mib_of.as_ref().map(bytes).transpose()?);
    let (mut report, status) = process::during(&mut command)
        .map_err(Failure::failed)?
        .map_err(|error| user_command::start_failure(&words[0], &error))?;
    let after = (arguments.per_mib_of.as_ref().map(bytes).transpose()?, reference()?);
    report.exit_code = Some(user_command::exit_code(status));
    let moved = after.0.zip(before.1).map(|(after, before)| after.saturating_sub(before));
    let bytes = moved.or(arguments.bytes.map(|size| size.0));
    if bytes == Some(0) {
        return Err(Failure::failed("no bytes were moved: name another device or size"));
    }
    let reference_seconds = f64::midpoint(before.0.as_secs_f64(), after.1.as_secs_f64());
    Ok(SoakRun::of(&report, bytes, reference_seconds))
}

/// The bytes that a network device has received and sent so far.
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
    if let Some(baseline_ratio) = &series.baseline {
        let _ = writeln!(
            text,
            "{} the baseline of {}, relative to the speed of the machine",
            verdict(baseline_ratio.ratio),
            baseline_ratio.started
        );
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
