//! Starts a service in the background, and waits until it accepts clients or has failed.
//!
//! Three processes run this program with the same arguments: the foreground process, which waits; a
//! process that starts the service and ends; and the service. So the parent of the service is the
//! machine's first process and not the foreground process. This matters to systemd, which waits for
//! a main process only if the process is its child.
//!
//! The service's standard input is a socket to the foreground process. The service writes a line to
//! the socket when it is ready. If the service fails, the socket closes.

use crate::output::Failure;
use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

/// How a service is started.
#[derive(Debug, Clone, Copy, Args)]
pub struct BackgroundOptions {
    /// Start in the background, and return once clients are accepted; an exit status other than 0
    /// tells that it has failed
    #[arg(long)]
    background: bool,
    /// Which of the processes this is.
    #[arg(long, hide = true, value_enum, conflicts_with = "background")]
    background_role: Option<Role>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    /// The process that starts the service and ends.
    Starter,
    /// The process that runs the service.
    Service,
}

impl BackgroundOptions {
    /// Starts the service in the background if that is asked for; `None`: this process is to be it.
    /// `writes_to_stdout`: the service has something to write there.
    pub fn start(self, writes_to_stdout: bool) -> Option<Result<ExitCode, Failure>> {
        match self.background_role {
            None if self.background => Some(wait_for_service(writes_to_stdout)),
            Some(Role::Starter) => Some(start_service()),
            None | Some(Role::Service) => None,
        }
    }

    /// Whether this process is to start the service and wait for it.
    pub fn is_asked_for(self) -> bool {
        self.background
    }

    /// The service accepts clients.
    pub fn report_ready(self) {
        if self.background_role == Some(Role::Service) {
            // Fails if the foreground process was killed.
            let _ = rustix::io::write(rustix::stdio::stdin(), b"\n");
        }
    }
}

fn wait_for_service(writes_to_stdout: bool) -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::failed(format!("starting in the background: {error}"));
    let (mut ready, stdin) = UnixStream::pair().map_err(failed)?;
    let mut command = this_program(Role::Starter).map_err(failed)?;
    command.stdin(OwnedFd::from(stdin));
    if !writes_to_stdout {
        // A shell that takes the output of this command waits for the end of all that have it.
        command.stdout(Stdio::null());
    }
    // Inherited descriptors, such as the lock file of a script, would stay open for as long as the
    // service runs. Linux before 5.11 keeps them open.
    let _ = haul_sys::descriptors::close_all_on_exec();
    let mut starter = command.spawn().map_err(failed)?;
    // The command holds an end of the socket, which would stay open after the service failed.
    drop(command);
    starter.wait().map_err(failed)?;
    let is_ready = matches!(ready.read(&mut [0]), Ok(1));
    // A service that failed has already printed the reason.
    Ok(if is_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn start_service() -> Result<ExitCode, Failure> {
    let failed = |error: io::Error| Failure::failed(format!("starting in the background: {error}"));
    let mut command = this_program(Role::Service).map_err(failed)?;
    // Signals of a terminal are for the process in the foreground.
    command.stdin(Stdio::inherit()).process_group(0).spawn().map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// This program with the same arguments, in another role. Its messages go to the same standard
/// error.
fn this_program(role: Role) -> io::Result<Command> {
    let is_passed_on = |argument: &OsString| {
        argument != "--background" && !argument.to_string_lossy().starts_with(ROLE_OPTION)
    };
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1).filter(is_passed_on));
    let role = if role == Role::Starter { "starter" } else { "service" };
    command.arg(format!("{ROLE_OPTION}{role}"));
    Ok(command)
}

/// The hidden option above.
const ROLE_OPTION: &str = "--background-role=";
