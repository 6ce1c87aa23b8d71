//! `haul bench forward`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or, reject_with_peer};
use crate::arguments::ForwardArguments;
use crate::output::Failure;
use haul_bench::forward::{self, ForwardParameters};

pub fn run(
    arguments: &ForwardArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    let ForwardArguments { paths, buffer, traffic, rate, mtu } = arguments;
    reject_with_peer(context, mtu.is_some(), "--mtu")?;
    let pace = context.pace();
    let basis = if context.is_quick {
        ForwardParameters::quick(pace)
    } else {
        ForwardParameters::new(pace)
    };
    let parameters = ForwardParameters {
        methods: non_empty_or(paths.clone(), basis.methods),
        buffers: non_empty_or(buffer.clone(), basis.buffers),
        traffic: non_empty_or(traffic.clone(), basis.traffic),
        rate: *rate,
        mtu: mtu.unwrap_or(basis.mtu),
        congestion: context.common.congestion.clone(),
        peer: context.peer.clone(),
        pace,
    };
    context.run(|stop, progress| forward::run(&parameters, stop, progress))
}
