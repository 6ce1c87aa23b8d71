//! `haul bench settings`: flags to rows.

use super::{Context, Finished, or};
use crate::arguments::SettingsArguments;
use crate::output::Failure;
use haul_bench::settings::{self, SettingsPlan};

pub fn run(arguments: &SettingsArguments, context: &Context<'_>) -> Result<Finished, Failure> {
    let SettingsArguments { paths, settings, workload, rate } = arguments;
    let pace = context.pace();
    let basis = if context.is_quick { SettingsPlan::quick(pace) } else { SettingsPlan::new(pace) };
    let plan = SettingsPlan {
        paths: or(paths.clone(), basis.paths),
        settings: or(settings.clone(), basis.settings),
        workload: workload.clone().unwrap_or(basis.workload),
        rate: *rate,
        pace,
        congestion: context.common.congestion.clone(),
    };
    context.run(|stop, progress| settings::run(&plan, stop, progress))
}
