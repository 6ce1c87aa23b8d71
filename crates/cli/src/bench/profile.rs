//! `haul bench profile`: profiles the lab's two hosts, or the whole machine while a command runs.

use super::{Context, ExperimentResult};
use crate::arguments::ProfileArguments;
use crate::output::Failure;
use crate::user_command::{self, PassedSignals};
use haul_bench::profile::{self, Profile, ProfileParameters};
use std::process::Command;
use std::time::Duration;

pub fn run(
    arguments: &ProfileArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    let mut command_exit_code = 0;
    let profile = if let Some((program, rest)) = arguments.command.split_first() {
        let mut command = Command::new(program);
        command.args(rest);
        let signals = PassedSignals::catch()?;
        let result = profile::during(&mut command, |child| signals.wait(child))
            .map_err(crate::output::bench_failure)?;
        let (profile, status) =
            result.map_err(|error| user_command::start_failure(program, &error))?;
        command_exit_code = user_command::exit_code(status);
        profile
    } else {
        let default = Duration::from_secs(if context.is_quick { 2 } else { 10 });
        let window = context.common.time.filter(|_| !context.is_everything).unwrap_or(default);
        let parameters = ProfileParameters {
            send: arguments.send,
            receive: arguments.receive,
            workload: arguments.workload.clone(),
            window,
            mtu: arguments.mtu,
            congestion: context.common.congestion.clone(),
        };
        context.run_with_progress(|stop, progress| profile::run(&parameters, stop, progress))?
    };
    let Profile { report, drawings } = profile;
    let mut result = ExperimentResult::from(report);
    result.view.drawings = drawings;
    Ok(ExperimentResult { exit_code: command_exit_code, ..result })
}
