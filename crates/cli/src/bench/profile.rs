//! `haul bench profile`.

use super::{Context, Finished};
use crate::arguments::ProfileArguments;
use crate::output::Failure;
use haul_bench::export;
use haul_bench::profile::{self, Profile, ProfilePlan};
use std::process::{Command, ExitStatus};
use std::time::Duration;

pub fn run(arguments: &ProfileArguments, context: &Context<'_>) -> Result<Finished, Failure> {
    let mut code = 0;
    let profile = if let Some((program, rest)) = arguments.command.split_first() {
        let mut command = Command::new(program);
        command.args(rest);
        let watched = profile::during(&mut command).map_err(crate::output::bench_failure)?;
        let (profile, status) = watched.map_err(|error| {
            Failure::bad_input(format!("cannot start {}: {error}", program.to_string_lossy()))
        })?;
        code = exit_code(status);
        profile
    } else {
        let window = Duration::from_secs(if context.is_quick { 2 } else { 10 });
        let plan = ProfilePlan {
            send: arguments.send,
            receive: arguments.receive,
            workload: arguments.workload.clone(),
            window: arguments.duration.unwrap_or(window),
            mtu: arguments.mtu,
            congestion: context.common.congestion.clone(),
        };
        context.watch(|stop, progress| profile::run(&plan, stop, progress))?
    };
    let Profile { report, pictures } = profile;
    let mut view = report.view();
    view.pictures = pictures;
    Ok(Finished { view, json: export::json(&report), experiment: report.experiment, code })
}

/// As a shell has it: 128 and the signal's number where one ended it.
fn exit_code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    status
        .code()
        .or(status.signal().map(|signal| 128 + signal))
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(1)
}
