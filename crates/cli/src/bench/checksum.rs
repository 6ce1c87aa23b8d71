//! `haul bench checksum`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or};
use crate::arguments::ChecksumArguments;
use crate::output::Failure;
use haul_bench::checksum::{self, ChecksumPlan};

pub fn run(
    arguments: &ChecksumArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    let pace = context.pace();
    let basis = if context.is_quick { ChecksumPlan::quick(pace) } else { ChecksumPlan::new(pace) };
    let plan = ChecksumPlan { sizes: non_empty_or(arguments.size.clone(), basis.sizes), pace };
    context.run(|stop, progress| checksum::run(&plan, stop, progress))
}
