//! `haul bench interrupts`: runs the experiment, which has no arguments of its own.

use super::{Context, ExperimentResult};
use crate::output::Failure;
use haul_bench::interrupts::{self, InterruptsParameters};

pub fn run(context: &Context<'_>) -> Result<ExperimentResult, Failure> {
    let parameters = InterruptsParameters {
        pace: context.pace(),
        congestion: context.common.congestion.clone(),
        is_quick: context.is_quick,
    };
    context.run(|stop, progress| interrupts::run(&parameters, stop, progress))
}
