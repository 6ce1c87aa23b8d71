//! `haul soak`: measures the CPU load of the machine.

use crate::arguments::SoakArguments;
use crate::exclusive::Measuring;
use crate::output::{self, Destination, Failure};
use crate::user_command::{self, PassedSignals};
use haul_bench::self_check::{self, DutyCycleReading, SelfCheck};
use haul_soak::process;
use haul_soak::report::SoakReport;
use haul_soak::sources::{CpuSources, SourceRate};
use haul_soak::{CpuLoad, CpuQuotas};
use rustix::fs::OFlags;
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

mod series;

/// The columns of the table, below it.
const LEGEND: &str = "load: taken by programs and the kernel's threads, plus interrupted \
    (interrupt work on top). interference: slower memory access in the rest. /proc/stat: the \
    kernel's account.";

pub fn run(arguments: &SoakArguments) -> Result<ExitCode, Failure> {
    if let Some(json) = &arguments.json {
        json.check()?;
    }
    if arguments.self_check {
        let _measuring = Measuring::begin(arguments.force)?;
        return self_check(arguments.json.as_ref());
    }
    if series::is_requested(arguments) {
        return series::run(arguments);
    }
    warn_of_quota();
    let _measuring = Measuring::begin(arguments.force)?;
    let started = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default();
    let (mut report, code) = if arguments.command.is_empty() {
        let stop = output::stop_flag()?;
        let report = process::watch(arguments.time, &stop).map_err(Failure::failed)?;
        (report, stopped_code(&stop))
    } else {
        let report = MeasuredCommand::new(arguments)?.run(&arguments.command)?;
        let code = report.exit_code.unwrap_or(0);
        (report, code)
    };
    report.started = started.to_string();
    let words = arguments.command.iter().map(|word| word.to_string_lossy().into_owned());
    report.command = words.collect();
    write(&report, &report_text(&report), arguments.json.as_ref())?;
    let code = if code == 0 && !report.has_readings() { output::UNMEASURED_CODE } else { code };
    Ok(ExitCode::from(code))
}

/// The input of several runs if no file is named.
const NULL: &str = "/dev/null";

/// Runs commands under the meter, and passes signals on to them.
struct MeasuredCommand<'a> {
    signals: PassedSignals,
    /// Where the JSON report goes. If it goes to standard output, the output of the command goes to
    /// standard error.
    json: Option<&'a Destination>,
    /// The file that is the standard input of every run. `None`: this program's.
    input: Option<&'a Path>,
}

impl<'a> MeasuredCommand<'a> {
    fn new(arguments: &'a SoakArguments) -> Result<Self, Failure> {
        let (json, input) = (arguments.json.as_ref(), arguments.input.as_deref());
        open_input(input)?;
        Ok(Self { signals: PassedSignals::catch()?, json, input })
    }

    /// Runs a command, which is not empty. The report has its exit code.
    fn run(&self, words: &[OsString]) -> Result<SoakReport, Failure> {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        if let Some(input) = open_input(self.input)? {
            command.stdin(input);
        }
        if self.json == Some(&Destination::StandardOutput) {
            let stderr = rustix::io::dup(io::stderr()).map_err(Failure::failed)?;
            command.stdout(Stdio::from(stderr));
        }
        let (mut report, status) = process::during(&mut command, |child| self.signals.wait(child))
            .map_err(Failure::failed)?
            .map_err(|error| user_command::start_failure(&words[0], &error))?;
        report.exit_code = Some(user_command::exit_code(status));
        Ok(report)
    }
}

/// Opens the input of a run. A pipe would be empty after the first run.
fn open_input(path: Option<&Path>) -> Result<Option<File>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let refused = |reason: String| {
        Failure::bad_input(format!("cannot use --input {}: {reason}", path.display()))
    };
    // A named pipe would wait for a writer.
    let file = File::options()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(|error| refused(error.to_string()))?;
    let is_file = file.metadata().is_ok_and(|found| found.is_file());
    if is_file || path == Path::new(NULL) {
        Ok(Some(file))
    } else {
        Err(refused("it is not a regular file, so each run would read something else".into()))
    }
}

/// Prints at the start that the meter cannot read the load, if a CPU quota forbids it.
fn warn_of_quota() {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(0, |cpus| cpus.count() as usize);
    if let Some(shortage) = CpuQuotas::read().shortage(cpus) {
        eprintln!("haul: no reading is possible here: {shortage}");
    }
}

fn self_check(json: Option<&Destination>) -> Result<ExitCode, Failure> {
    let _ = haul_lab::enter_user_namespace();
    let stop = output::stop_flag()?;
    let bar = indicatif::ProgressBar::new_spinner();
    let check = self_check::run(&stop, &mut |next| bar.set_message(next.to_owned()));
    bar.finish_and_clear();
    let check = check.map_err(output::bench_failure)?;
    write(&check, &self_check_text(&check), json)?;
    Ok(ExitCode::from(stopped_code(&stop)))
}

/// Returns the exit code of a shell: 130 after Ctrl-C.
fn stopped_code(stop: &AtomicBool) -> u8 {
    if stop.load(Relaxed) { 130 } else { 0 }
}

/// Prints the text, and writes the JSON report if it is requested. JSON on standard output replaces
/// the text.
fn write(report: &impl Serialize, text: &str, json: Option<&Destination>) -> Result<(), Failure> {
    if json != Some(&Destination::StandardOutput) {
        output::print(text)?;
    }
    match json {
        Some(json) => json.write(&haul_bench::export::json(report)),
        None => Ok(()),
    }
}

fn report_text(report: &SoakReport) -> String {
    let charged = report.rusage_cpu_seconds.map_or(String::new(), |seconds| {
        format!("; getrusage charges the command with {seconds:.3} CPU-seconds")
    });
    if report.warnings.iter().any(|warning| warning.kind == "too-short") {
        let details: Vec<&str> =
            report.warnings.iter().map(|warning| warning.detail.as_str()).collect();
        return format!("{}{charged}\n", details.join("; "));
    }
    let (Some(load_percent), Some(cpu_seconds)) = (report.total_load_percent, report.cpu_seconds)
    else {
        let reasons: Vec<&str> =
            report.warnings.iter().map(|warning| warning.detail.as_str()).collect();
        return format!("no reading of the load: {}{charged}\n", reasons.join("; "));
    };
    let mut text = table_text(report, load_percent, cpu_seconds);
    if let Some(percent) = report.resolution_percent {
        let _ = writeln!(
            text,
            "resolution on this machine: {percent:.1} points (the difference of readings in the \
             quietest quarter of the time)"
        );
    }
    if let Some(charged) = report.rusage_cpu_seconds {
        let _ = writeln!(text, "getrusage charges the command with {charged:.3} CPU-seconds");
    }
    let options =
        textwrap::Options::new(usize::from(output::terminal_width())).subsequent_indent("  ");
    let mut paragraph = |line: &str| {
        let _ = writeln!(text, "{}", textwrap::fill(line, &options));
    };
    paragraph(LEGEND);
    for CpuSources { cpu, interrupts, softirqs } in &report.sources {
        let rates = |rates: &[SourceRate]| {
            let texts: Vec<String> = rates
                .iter()
                .map(|rate| format!("{} {:.0}/s", rate.name, rate.per_second))
                .collect();
            if texts.is_empty() { "none".into() } else { texts.join(", ") }
        };
        paragraph(&format!("CPU {cpu} interrupts: {}", rates(interrupts)));
        paragraph(&format!("CPU {cpu} softirqs: {}", rates(softirqs)));
    }
    let threads: Vec<String> = report
        .kernel_threads
        .iter()
        .map(|thread| format!("{} {:.1} %", thread.name, thread.percent))
        .collect();
    if !threads.is_empty() {
        paragraph(&format!("kernel threads: {}", threads.join(", ")));
    }
    paragraph("haul bench profile -- sleep 10 shows the functions behind this load.");
    for warning in &report.warnings {
        paragraph(&format!("warning: {}", warning.detail));
    }
    text
}

/// The readings of each CPU, and of all CPUs.
fn table_text(report: &SoakReport, load_percent: f64, cpu_seconds: f64) -> String {
    let mut text =
        String::from("CPU   load %   taken  interrupted   interference  /proc/stat  steal\n");
    for cpu in &report.cpus {
        let CpuLoad { cpu: number, load_percent, taken_percent, interrupted_percent, .. } = cpu;
        let _ = writeln!(
            text,
            "{number:>3} {load_percent:>8.2} {taken_percent:>7.2} {interrupted_percent:>12.2} \
             {:>14} {:>11.2} {:>6.2}",
            cpu.interference_percent.map_or("?".into(), |percent| format!("{percent:.1}")),
            cpu.proc_stat_percent,
            cpu.steal_percent,
        );
    }
    let _ = writeln!(
        text,
        "all {load_percent:>8.2}   that is {cpu_seconds:.3} CPU-seconds in {:.3} s on {} CPUs",
        report.seconds,
        report.cpus.len()
    );
    text
}

fn self_check_text(check: &SelfCheck) -> String {
    let mut text = format!("load of the idle machine: {:.2} %\n\n", check.idle_percent);
    text.push_str("a thread that is busy for a known share of the time, in percent\n");
    text.push_str("   made  + others = expected    read   error  /proc/stat\n");
    for duty in &check.duties {
        let _ = writeln!(
            text,
            "{:>7.2} {:>9.2} {:>10.2} {:>7.2} {:>+7.2} {:>11.2}",
            duty.made_percent,
            duty.others_percent,
            duty.expected_percent,
            duty.read_percent,
            duty.read_percent - duty.expected_percent,
            duty.proc_stat_percent
        );
    }
    let _ = writeln!(text, "{}", verdict(check));
    text.push_str(
        "\npackets to a CPU whose processes sleep: load by each account, in percent of that CPU\n",
    );
    text.push_str("packets/s   meter  (taken + interrupted)  /proc/stat  getrusage\n");
    for packets in &check.packets {
        let read = &packets.read;
        let _ = writeln!(
            text,
            "{:>9.0} {:>7.2}  ({:>5.2} + {:>11.2})  {:>10.2} {:>10.2}",
            packets.per_second,
            read.load_percent,
            read.taken_percent,
            read.interrupted_percent,
            read.proc_stat_percent,
            packets.rusage_percent
        );
    }
    for warning in &check.warnings {
        let _ = writeln!(text, "warning: {}", warning.detail);
    }
    text
}

/// The verdict on the known loads: the largest error, or the reason why there is no verdict.
fn verdict(check: &SelfCheck) -> String {
    /// The load of other processes above which it varies by more than the error that the check is
    /// to show.
    const OTHERS_PERCENT_MAX: f64 = 5.0;
    let largest =
        |value: fn(&DutyCycleReading) -> f64| check.duties.iter().map(value).fold(0.0, f64::max);
    let others = largest(|duty| duty.others_percent);
    let error = largest(|duty| (duty.read_percent - duty.expected_percent).abs());
    if others > OTHERS_PERCENT_MAX {
        format!(
            "no verdict: other processes used up to {others:.0} % of the CPU; repeat on a quiet \
             machine"
        )
    } else if error > 1.0 {
        format!("the largest error is {error:.2} points, more than the 1 point that is allowed")
    } else {
        format!("the largest error is {error:.2} points")
    }
}
