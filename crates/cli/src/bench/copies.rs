//! `haul bench copies`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or};
use crate::arguments::{CopiesArguments, FoliosArgument, MeterArgument};
use crate::output::Failure;
use haul_bench::copies::{self, CopiesMeter, CopiesParameters};
use haul_bench::page_cache::Folios;

pub fn run(
    arguments: &CopiesArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    let pace = context.pace();
    let basis =
        if context.is_quick { CopiesParameters::quick(pace) } else { CopiesParameters::new(pace) };
    let folios = arguments.folios.iter().map(|&folios| match folios {
        FoliosArgument::Small => Folios::Small,
        FoliosArgument::Huge => Folios::Huge,
    });
    let meters = arguments.meter.iter().map(|&meter| match meter {
        MeterArgument::Spinner => CopiesMeter::Spinner,
        MeterArgument::Cycles => CopiesMeter::Cycles,
    });
    let parameters = CopiesParameters {
        meters: non_empty_or(meters.collect(), basis.meters),
        files: non_empty_or(arguments.file.clone(), basis.files),
        chunks: non_empty_or(arguments.chunk.clone(), basis.chunks),
        folios: non_empty_or(folios.collect(), basis.folios),
        buffers: non_empty_or(
            arguments.in_flight.iter().map(|in_flight| in_flight.0).collect(),
            basis.buffers,
        ),
        reading: arguments.reading.unwrap_or(basis.reading),
        mtu: arguments.mtu.unwrap_or(basis.mtu),
        congestion: context.common.congestion.clone(),
        ..basis
    };
    context.run(|stop, progress| copies::run(&parameters, stop, progress))
}
