//! `haul bench loan`: flags to rows.

use super::{Context, Finished, or};
use crate::arguments::LoanArguments;
use crate::output::Failure;
use haul_bench::loan::{self, LoanPlan};

pub fn run(arguments: &LoanArguments, context: &Context<'_>) -> Result<Finished, Failure> {
    let pace = context.pace();
    let basis = if context.is_quick { LoanPlan::quick(pace) } else { LoanPlan::new(pace) };
    let plan = LoanPlan {
        pieces: or(arguments.piece.clone(), basis.pieces),
        pace,
        congestion: context.common.congestion.clone(),
    };
    context.run(|stop, progress| loan::run(&plan, stop, progress))
}
