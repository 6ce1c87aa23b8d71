//! `haul bench forward`: flags to rows.

use super::{Context, Finished, or, refuse_with_peer};
use crate::arguments::ForwardArguments;
use crate::output::Failure;
use haul_bench::forward::{self, ForwardPlan};

pub fn run(arguments: &ForwardArguments, context: &Context<'_>) -> Result<Finished, Failure> {
    let ForwardArguments { paths, buffer, traffic, rate, mtu } = arguments;
    refuse_with_peer(context, mtu.is_some(), "--mtu")?;
    let pace = context.pace();
    let basis = if context.is_quick { ForwardPlan::quick(pace) } else { ForwardPlan::new(pace) };
    let plan = ForwardPlan {
        ways: or(paths.clone(), basis.ways),
        buffers: or(buffer.clone(), basis.buffers),
        traffic: or(traffic.clone(), basis.traffic),
        rate: *rate,
        mtu: mtu.unwrap_or(basis.mtu),
        congestion: context.common.congestion.clone(),
        peer: context.peer.clone(),
        pace,
    };
    context.run(|stop, progress| forward::run(&plan, stop, progress))
}
