//! `haul bench loan`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or};
use crate::arguments::LoanArguments;
use crate::output::Failure;
use haul_bench::loan::{self, LoanPlan};

pub fn run(arguments: &LoanArguments, context: &Context<'_>) -> Result<ExperimentResult, Failure> {
    let pace = context.pace();
    let basis = if context.is_quick { LoanPlan::quick(pace) } else { LoanPlan::new(pace) };
    let plan = LoanPlan {
        pieces: non_empty_or(arguments.piece.clone(), basis.pieces),
        pace,
        congestion: context.common.congestion.clone(),
    };
    context.run(|stop, progress| loan::run(&plan, stop, progress))
}
