//! `haul serve control`: sends a command to the control socket of a running file server.

use crate::daemon;
use crate::output::Failure;
use clap::{Args, ValueEnum};
use haul_serve::{ControlResponse, ServiceReload, ServiceStatus};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct ControlArguments {
    /// Path of the server's control socket (haul serve --control)
    pub socket: PathBuf,
    /// The command
    #[arg(value_enum)]
    pub command: Command,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// A command to a file server.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Command {
    /// Read the certificate and the passwords again, and open the access log again; exit code 1 if
    /// something could not be read and stays as it was
    Reload,
    /// Show the version, the addresses, the connections, the latest reload
    Status,
}

pub fn run(arguments: &ControlArguments) -> Result<ExitCode, Failure> {
    let ControlArguments { socket, command, json } = arguments;
    let command = match command {
        Command::Reload => "reload",
        Command::Status => "status",
    };
    let (answer, response) = daemon::control::command("haul serve", socket, command)?;
    let text = match &response {
        _ if *json => answer,
        ControlResponse::Reloaded(reload) => reload_text(reload),
        ControlResponse::Status(status) => status_text(status),
        _ => String::new(),
    };
    // The reader may close the pipe early, because the first lines suffice.
    let _ = io::stdout().write_all(text.as_bytes());
    match response {
        ControlResponse::Error(error) => Err(Failure::failed(error)),
        ControlResponse::Reloaded(reload) => match reload.error {
            Some(error) => Err(Failure::failed(format!("not reloaded: {error}"))),
            None => Ok(ExitCode::SUCCESS),
        },
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// What was read again, which may be a part.
fn reload_text(reload: &ServiceReload) -> String {
    let names = reload.reloaded.join(", ");
    let names = match &reload.error {
        Some(_) if names.is_empty() => String::new(),
        _ if names.is_empty() => "reloaded: nothing; other options need a restart\n".into(),
        _ => format!("reloaded: {names}; other options need a restart\n"),
    };
    let warning = reload.warning.as_ref().map(|text| format!("warning: {text}\n"));
    names + &warning.unwrap_or_default()
}

fn status_text(status: &ServiceStatus) -> String {
    let ServiceStatus { pid, started, uptime_seconds, .. } = status;
    let ending = if status.is_ending { ", ending" } else { "" };
    let plural = if status.loops == 1 { "" } else { "s" };
    let reload = status.reload.as_ref().map_or("none since the start".into(), |reload| {
        let result = match &reload.error {
            None => "succeeded".to_owned(),
            Some(error) => format!("failed: {error}"),
        };
        let warning = reload.warning.as_ref().map(|text| format!(" (warning: {text})"));
        format!("{}, {result}{}", reload.time, warning.unwrap_or_default())
    });
    let lines = [
        ("version", status.version.clone()),
        ("process", format!("{pid}, for {uptime_seconds} s (since {started}){ending}")),
        ("directory", status.root.clone()),
        ("addresses", status.addresses.join(", ")),
        (
            "connections",
            format!(
                "{} of {}, on {} loop{plural}",
                status.connections, status.connections_max, status.loops
            ),
        ),
        ("reload", reload),
    ];
    lines.map(|(name, text)| format!("{name:<13}{text}\n")).concat()
}
