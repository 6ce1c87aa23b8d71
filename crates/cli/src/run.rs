//! `haul run`: runs an unmodified program, and reports what its bytes cost.

mod prove;
mod supervise;
mod text;

use crate::exclusive::Measuring;
use crate::output::{Destination, Failure, UNMEASURED_CODE};
use crate::user_command;
use clap::{Args, ValueEnum};
use haul::Plan;
use haul_run::{Expectation, ReportParts, RunReport, Session, SessionOptions};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use supervise::Supervised;

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "one for each flag")]
pub struct RunArguments {
    /// Change nothing, and only count: which bytes the command reads from where, and how it sends
    /// them
    #[arg(long, conflicts_with = "strict")]
    pub watch: bool,
    /// Measure the saving: switch between sendfile and copying every second, and compare the CPU
    /// time of the whole machine
    ///
    /// Needs a steady load, at least 16 MiB a second. Other programs on this machine disturb the
    /// measurement.
    #[arg(long, conflicts_with = "watch")]
    pub prove: bool,
    /// Copy, as the program does, if the peer has a loopback address or the address of this host
    #[arg(long)]
    pub strict: bool,
    /// Congestion control of the command's TCP connections, such as cubic or reno
    ///
    /// Set before each connect and listen. haul bench settings --settings congestion measures what
    /// each costs here.
    #[arg(long, value_name = "NAME", value_parser = congestion)]
    pub congestion: Option<String>,
    /// Keep freed memory in the process (glibc only), so that large buffers are not mapped and
    /// cleared again for each use; the process uses more memory
    #[arg(long)]
    pub keep_memory: bool,
    /// Make the command of the haul run with this process ID copy everything from now on
    #[arg(long, value_name = "PID", exclusive = true)]
    pub stop: Option<i32>,
    /// Exit with 1 if less than this share of the bytes sent to TCP goes by the method, such as
    /// sendfile=90%; with 3 if nothing was sent
    ///
    /// Methods: sendfile, splice, zerocopy (without sends that the kernel copied), and not-copied:
    /// these three and the bytes that haul run sends by sendfile. The exit code of the command
    /// comes first, unless SIGTERM or SIGINT ended the command.
    #[arg(long, value_name = "METHOD=PERCENT%")]
    pub expect: Vec<Expectation>,
    /// Plan file by which savings are computed, as haul plan writes it [default: built-in costs]
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Write the report as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<Destination>,
    /// For tests: leave something out
    #[arg(long, hide = true)]
    pub without: Vec<LeftOut>,
    /// Command to run
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "stop")]
    pub command: Vec<OsString>,
}

/// Checks that the kernel allows a congestion control.
fn congestion(name: &str) -> Result<String, String> {
    haul_run::check_congestion(name).map(|()| name.to_owned()).map_err(|error| error.to_string())
}

/// What a test leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LeftOut {
    /// The kernel's confirmation of what is mapped, so that wrong bytes can be sent.
    Confirmation,
    /// The comparison of costs, so that every call is elided that can be.
    Trial,
}

/// Runs the command to its end, prints the report to standard error, and returns the exit code of
/// the command.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    if let Some(json) = &arguments.json {
        json.check()?;
    }
    let plan = arguments.plan.as_deref().map(Plan::load).transpose().map_err(Failure::bad_input)?;
    if let Some(process) = arguments.stop {
        return supervise::stop_eliding(process);
    }
    check_program(&arguments.command)?;
    let session = Session::create(&SessionOptions {
        is_eliding: !arguments.watch,
        is_strict: arguments.strict,
        is_unconfirmed: arguments.without.contains(&LeftOut::Confirmation),
        is_untried: arguments.without.contains(&LeftOut::Trial),
        congestion: arguments.congestion.clone(),
        keeps_memory: arguments.keep_memory,
    })
    .map_err(|error| chain(&error))?;
    let mut command = Command::new(&arguments.command[0]);
    command.args(&arguments.command[1..]);
    if arguments.json == Some(Destination::StandardOutput) {
        let stderr = rustix::io::dup(io::stderr()).map_err(Failure::failed)?;
        command.stdout(Stdio::from(stderr));
    }
    session.prepare(&mut command);
    let words: Vec<String> =
        arguments.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let report_of = |supervised: &Supervised, status: Option<ExitStatus>| {
        RunReport::new(
            &session.counts(),
            ReportParts {
                started: supervised.started.to_string(),
                command: words.clone(),
                exit_code: status.map(user_command::exit_code),
                seconds: supervised.began.elapsed().as_secs_f64(),
                rusage_cpu_seconds: haul_run::children_cpu_time().as_secs_f64(),
                not_loaded: supervised.not_loaded(),
                expectations: &arguments.expect,
                plan: plan.as_ref(),
                is_eliding: !arguments.watch,
                is_proving: arguments.prove,
                proof: supervised.proof(),
            },
        )
    };
    let print_interim = |supervised: &Supervised| print(&report_of(supervised, None));
    let _measuring = arguments.prove.then(Measuring::begin_unforced).transpose()?;
    let supervised = Supervised::new(&session);
    let status = supervised
        .run(&mut command, arguments.prove, print_interim)?
        .map_err(|error| user_command::start_failure(&arguments.command[0], &error))?;
    let report = report_of(&supervised, Some(status));
    print(&report);
    if let Some(json) = &arguments.json {
        json.write(&haul_bench::export::json(&report))?;
    }
    Ok(ExitCode::from(code(&report, status)))
}

/// Prints the report to standard error, like other programs that run a command.
fn print(report: &RunReport) {
    // Fails if standard error is closed.
    let _ = io::stderr().write_all(text::report(report).as_bytes());
}

fn chain(error: &haul_run::RunError) -> Failure {
    let reason = std::error::Error::source(error).map(|source| format!(": {source}"));
    Failure::failed(format!("{error}{}", reason.unwrap_or_default()))
}

/// Refuses a program that cannot load the library, because its calls would not be counted.
fn check_program(command: &[OsString]) -> Result<(), Failure> {
    let program = command.first().map(OsString::as_os_str).unwrap_or_default();
    // A program that is not found fails when it is started, with the message of a shell.
    let Some(path) = haul_run::find(program) else { return Ok(()) };
    match haul_run::obstacle(&path) {
        Ok(Some(obstacle)) => Err(Failure::bad_input(format!(
            "cannot count the bytes of {}: {obstacle} (haul soak -- {} ... measures what the \
             program costs)",
            path.display(),
            program.display(),
        ))),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// The exit code: the command's, or the result of the expectations.
fn code(report: &RunReport, status: ExitStatus) -> u8 {
    use rustix::process::Signal;
    use std::os::unix::process::ExitStatusExt;
    let code = user_command::exit_code(status);
    let is_stopped = status
        .signal()
        .is_some_and(|signal| [Signal::TERM, Signal::INT].iter().any(|end| end.as_raw() == signal));
    if report.expectations.is_empty() || code != 0 && !is_stopped {
        code
    } else if report.tcp.bytes == 0 {
        UNMEASURED_CODE
    } else {
        u8::from(!report.meets_expectations())
    }
}
