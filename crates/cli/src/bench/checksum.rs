//! `haul bench checksum`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or};
use crate::arguments::ChecksumArguments;
use crate::output::Failure;
use haul_bench::checksum::{self, ChecksumParameters};

pub fn run(
    arguments: &ChecksumArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    let pace = context.pace();
    let basis = if context.is_quick {
        ChecksumParameters::quick(pace)
    } else {
        ChecksumParameters::new(pace)
    };
    let parameters =
        ChecksumParameters { sizes: non_empty_or(arguments.size.clone(), basis.sizes), pace };
    context.run(|stop, progress| checksum::run(&parameters, stop, progress))
}
