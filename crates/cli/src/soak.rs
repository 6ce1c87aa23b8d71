//! `haul soak`: measures the CPU load of the machine.

use crate::arguments::SoakArguments;
use crate::output::{self, Destination, Failure};
use haul_bench::self_check::{self, DutyCycleReading, SelfCheck};
use haul_soak::CpuLoad;
use haul_soak::process;
use haul_soak::report::SoakReport;
use serde::Serialize;
use std::fmt::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

pub fn run(arguments: &SoakArguments) -> Result<ExitCode, Failure> {
    if let Some(json) = &arguments.json {
        json.check()?;
    }
    if arguments.self_check {
        return self_check(arguments.json.as_ref());
    }
    let stop = output::stop_flag()?;
    let (report, code) = match arguments.command.split_first() {
        None => {
            let report = process::watch(arguments.duration, &stop).map_err(Failure::failed)?;
            (report, exit_code(&stop))
        }
        Some((program, rest)) => {
            let mut command = Command::new(program);
            command.args(rest);
            let (report, status) =
                process::during(&mut command).map_err(Failure::failed)?.map_err(|error| {
                    Failure::bad_input(format!("cannot run {}: {error}", program.display()))
                })?;
            // The same exit code as a shell's: the program's own, or 128 plus the signal's number.
            let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
            (report, ExitCode::from(code as u8))
        }
    };
    write(&report, &report_text(&report), arguments.json.as_ref())?;
    Ok(code)
}

fn self_check(json: Option<&Destination>) -> Result<ExitCode, Failure> {
    let _ = haul_lab::enter_user_namespace();
    let stop = output::stop_flag()?;
    let bar = indicatif::ProgressBar::new_spinner();
    let check = self_check::run(&stop, &mut |next| bar.set_message(next.to_owned()));
    bar.finish_and_clear();
    let check = check.map_err(Failure::failed)?;
    write(&check, &self_check_text(&check), json)?;
    Ok(exit_code(&stop))
}

/// Returns the same exit code as a shell: 130 after Ctrl-C.
fn exit_code(stop: &AtomicBool) -> ExitCode {
    if stop.load(Relaxed) { ExitCode::from(130) } else { ExitCode::SUCCESS }
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
        "all {:>8.2}   that is {:.3} CPU-seconds in {:.3} s on {} CPUs",
        report.total_load_percent,
        report.cpu_seconds,
        report.seconds,
        report.cpus.len()
    );
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
    for warning in &report.warnings {
        let options =
            textwrap::Options::new(usize::from(output::terminal_width())).subsequent_indent("  ");
        let _ =
            writeln!(text, "{}", textwrap::fill(&format!("warning: {}", warning.detail), options));
    }
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
