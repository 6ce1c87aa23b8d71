//! `haul bench interrupts`: runs the experiment, which has no arguments of its own.

use super::{Context, ExperimentResult};
use crate::output::Failure;
use haul_bench::interrupts::{self, InterruptsPlan};

pub fn run(context: &Context<'_>) -> Result<ExperimentResult, Failure> {
    let plan =
        InterruptsPlan { pace: context.pace(), congestion: context.common.congestion.clone() };
    context.run(|stop, progress| interrupts::run(&plan, stop, progress))
}
