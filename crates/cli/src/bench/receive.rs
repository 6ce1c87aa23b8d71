//! `haul bench receive`: converts the arguments to the rows to measure.

use super::{Context, ExperimentResult, non_empty_or, reject_with_peer};
use crate::arguments::{ReceiveArguments, Switch};
use crate::output::Failure;
use haul_bench::receive::{self, PageOrder, ReceiveParameters, ReceiveSelection};

pub fn run(
    arguments: &ReceiveArguments,
    context: &Context<'_>,
) -> Result<ExperimentResult, Failure> {
    reject_with_peer(context, !arguments.mtu.is_empty(), "--mtu")?;
    reject_with_peer(context, !arguments.page_order.is_empty(), "--page-order")?;
    let mut selections = selections(arguments, context.is_quick);
    if let Some(peer) = &context.peer {
        for selection in &mut selections {
            selection.mtus = vec![peer.mtu()];
            selection.page_orders = vec![PageOrder::Default];
        }
    }
    let parameters = ReceiveParameters {
        selections,
        are_mtus_requested: !arguments.mtu.is_empty(),
        pace: context.pace(),
        congestion: context.common.congestion.clone(),
        peer: context.peer.clone(),
    };
    context.run(|stop, progress| receive::run(&parameters, stop, progress))
}

/// Returns the rows that the arguments select, or the default set if they select none.
fn selections(arguments: &ReceiveArguments, is_quick: bool) -> Vec<ReceiveSelection> {
    let ReceiveArguments { paths, mtu, sent_by, page_order, buffer, touch } = arguments;
    let is_named = !(paths.is_empty()
        && mtu.is_empty()
        && sent_by.is_empty()
        && page_order.is_empty()
        && buffer.is_empty()
        && touch.is_empty());
    let default = ReceiveSelection::every_method();
    match (is_named, is_quick) {
        (false, false) => ReceiveSelection::default_set(),
        (false, true) => vec![default],
        (true, _) => vec![ReceiveSelection {
            methods: non_empty_or(paths.clone(), default.methods),
            mtus: non_empty_or(mtu.clone(), default.mtus),
            sent_by: non_empty_or(sent_by.clone(), default.sent_by),
            page_orders: non_empty_or(page_order.clone(), default.page_orders),
            buffers: non_empty_or(buffer.clone(), default.buffers),
            touches: non_empty_or(
                touch.iter().map(|&touch| touch == Switch::On).collect(),
                default.touches,
            ),
        }],
    }
}
