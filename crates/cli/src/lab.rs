//! `haul lab`: runs commands in two network namespaces joined by a veth pair.

use crate::arguments::LabArguments;
use crate::output::Failure;
use crate::user_command::{self, PassedSignals};
use haul_lab::{Lab, LabError, Settings};
use std::process::{Command, ExitCode, Stdio};

pub fn run(arguments: &LabArguments) -> Result<ExitCode, Failure> {
    haul_lab::enter_user_namespace().map_err(Failure::failed)?;
    let lab =
        Lab::veth(&Settings::default().with_mtu(arguments.mtu)).map_err(|error| match error {
            LabError::Mtu(_) => Failure::bad_input(error),
            error => Failure::failed(error),
        })?;
    if let Some(name) = &arguments.congestion {
        lab.set_default_congestion(name).map_err(|error| {
            let allowed =
                std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
            let allowed = allowed.unwrap_or_default();
            Failure::bad_input(format!(
                "congestion control {name}: {error}; a network namespace may use: {} \
                 (net.ipv4.tcp_allowed_congestion_control)",
                allowed.trim()
            ))
        })?;
    }
    if let Some(rate) = arguments.rate {
        lab.set_rate(Some(rate.0)).map_err(Failure::failed)?;
    }
    if let Some(loss) = arguments.loss {
        lab.set_loss(loss).map_err(Failure::failed)?;
    }
    for caveat in lab.caveats() {
        eprintln!("haul: {caveat}");
    }
    let Some((program, rest)) = arguments.command.split_first() else {
        return Err(Failure::bad_input("no command"));
    };
    let signals = PassedSignals::catch()?;
    let mut receiver = match &arguments.receiver {
        None => None,
        Some(line) => {
            let mut command = Command::new("sh");
            command
                .args(["-c", line])
                .stdin(Stdio::null())
                .env("HAUL_PEER", lab.sender.address().to_string());
            Some(lab.receiver.start_program(command).map_err(Failure::failed)?)
        }
    };
    let mut command = Command::new(program);
    command.args(rest).env("HAUL_PEER", lab.receiver.address().to_string());
    let run = lab.sender.run_program_with(&mut command, |child| signals.wait(child));
    let status = run.map_err(Failure::failed)?;
    let receiver_status = receiver.as_mut().and_then(haul_lab::Running::kill);
    if let Some(status) = receiver_status.filter(|status| !status.success()) {
        eprintln!("haul: the receiving host's command failed before COMMAND ended: {status}");
    }
    let status = status.map_err(|error| user_command::start_failure(program, &error))?;
    Ok(ExitCode::from(user_command::exit_code(status)))
}
