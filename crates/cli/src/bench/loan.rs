//! `haul bench loan`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or};
use crate::arguments::LoanArguments;
use crate::output::Failure;
use haul_bench::loan::{self, LoanParameters};

pub fn run(arguments: &LoanArguments, context: &Context<'_>) -> Result<ExperimentResult, Failure> {
    let pace = context.pace();
    let basis =
        if context.is_quick { LoanParameters::quick(pace) } else { LoanParameters::new(pace) };
    let parameters = LoanParameters {
        pieces: non_empty_or(arguments.piece.clone(), basis.pieces),
        verdict_only: basis.verdict_only,
        pace,
        congestion: context.common.congestion.clone(),
    };
    context.run(|stop, progress| loan::run(&parameters, stop, progress))
}
