//! `haul bench send`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or, reject_with_peer};
use crate::arguments::{SendArguments, Switch};
use crate::output::Failure;
use haul_bench::matrix::SendSelection;
use haul_bench::send::{self, SendParameters};
use haul_bench::tested_method::TestedMethod;
use haul_lab::Offloads;

pub fn run(arguments: &SendArguments, context: &Context<'_>) -> Result<ExperimentResult, Failure> {
    let parameters = parameters(arguments, context)?;
    context.run(|stop, progress| send::run(&parameters, stop, progress))
}

/// Returns the rows that the arguments select, or the default set if they select none.
fn parameters(arguments: &SendArguments, context: &Context<'_>) -> Result<SendParameters, Failure> {
    let SendArguments { paths, chunk, workload, cork, offloads, rate, reading, mtu, plan } =
        arguments;
    reject_with_peer(context, mtu.is_some(), "--mtu")?;
    reject_with_peer(context, !offloads.is_empty(), "--offloads")?;
    let is_named = !(paths.is_empty()
        && chunk.is_empty()
        && workload.is_empty()
        && cork.is_empty()
        && offloads.is_empty());
    let plain = SendSelection::plain();
    let planned = plan.as_ref().map(|file| crate::plan::load(file)).transpose()?;
    if let (Some(file), Some(planned)) = (plan, &planned) {
        crate::plan::warn_of_changes(file, planned);
    }
    let mut selections = match (is_named, context.is_quick) {
        (false, false) => SendSelection::default_set(),
        (false, true) => vec![plain],
        (true, _) => vec![SendSelection {
            paths: non_empty_or(paths.clone(), plain.paths),
            chunks: non_empty_or(chunk.clone(), plain.chunks),
            workloads: non_empty_or(workload.clone(), plain.workloads),
            corks: non_empty_or(cork.iter().map(|&cork| cork == Switch::On).collect(), plain.corks),
            offloads: non_empty_or(
                offloads.iter().map(|&offloads| offloads.into()).collect(),
                plain.offloads,
            ),
            buffers: plain.buffers,
        }],
    };
    if context.peer.is_some() {
        for selection in &mut selections {
            selection.offloads.retain(|&offloads| offloads == Offloads::On);
        }
    }
    if planned.is_some() {
        for selection in &mut selections {
            if selection.paths.contains(&TestedMethod::Auto)
                && !selection.paths.contains(&TestedMethod::Planned)
            {
                selection.paths.push(TestedMethod::Planned);
            }
        }
    }
    let basis = if context.is_quick {
        SendParameters::quick(selections)
    } else {
        SendParameters::new(selections)
    };
    Ok(SendParameters {
        pace: context.pace(),
        rate: *rate,
        reading: reading.unwrap_or(basis.reading),
        mtu: mtu.unwrap_or(basis.mtu),
        congestion: context.common.congestion.clone(),
        peer: context.peer.clone(),
        planned,
        ..basis
    })
}
