//! `haul bench interrupts`.

use super::{Context, Finished};
use crate::output::Failure;
use haul_bench::interrupts::{self, InterruptsPlan};

pub fn run(context: &Context<'_>) -> Result<Finished, Failure> {
    let plan =
        InterruptsPlan { pace: context.pace(), congestion: context.common.congestion.clone() };
    context.run(|stop, progress| interrupts::run(&plan, stop, progress))
}
