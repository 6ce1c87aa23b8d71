//! `haul bench settings`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or};
use crate::arguments::SettingsArguments;
use crate::output::Failure;
use haul_bench::settings::{self, SettingsParameters};

pub fn run(
    arguments: &SettingsArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    let SettingsArguments { paths, settings, workload, rate } = arguments;
    let pace = context.pace();
    let basis = if context.is_quick {
        SettingsParameters::quick(pace)
    } else {
        SettingsParameters::new(pace)
    };
    let parameters = SettingsParameters {
        paths: non_empty_or(paths.clone(), basis.paths),
        settings: non_empty_or(settings.clone(), basis.settings),
        verdict_only: basis.verdict_only && settings.is_empty(),
        workload: workload.clone().unwrap_or(basis.workload),
        rate: *rate,
        pace,
        congestion: context.common.congestion.clone(),
    };
    context.run(|stop, progress| settings::run(&parameters, stop, progress))
}
