//! A client waits in its group's queue until an upstream has a slot.

use super::connecting::{Chosen, NO_CONNECTION};
use super::endpoint::Events;
use super::{Connection, State};
use crate::host_instant::HostInstant;
use crate::loop_state::{LoopState, whole_seconds};
use crate::record::log::End;
use crate::upstreams::group::{QueueError, QueuedClient, UpstreamGroup};
use haul_server::admission::shortage;
use haul_server::event_loop::{Action, Context, Interest, Side};
use haul_server::offload::NoJob;
use std::sync::Arc;
use std::time::Duration;

impl Connection {
    /// Puts the client into the queue; `None` once the state changed.
    pub(super) fn enqueue(
        &mut self,
        group: &Arc<UpstreamGroup>,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        // The client does not keep the slot of the upstream that it tried before.
        if let Some(chosen) = &mut self.search.chosen {
            chosen.free_slot();
        }
        let limits = *shared.limits();
        // A client of another process already has a place.
        let (since, length_max) = self.search.queued_since.map_or_else(
            || (HostInstant::now(), limits.queue_length_max),
            |since| (since, usize::MAX),
        );
        let address = self.account.record.client.map(|client| client.ip());
        let client = QueuedClient { address, tried: &self.search.tried, since };
        let place = group.queue().push(group, &client, length_max);
        let registered = place.and_then(|place| {
            let registered = context.register(&place, Side::Upstream, Interest::BOTH);
            registered.map_or_else(|error| Err(QueueError::Failed(error)), |()| Ok(place))
        });
        let place = match registered {
            Ok(place) => place,
            Err(QueueError::Full) => return Some(self.finish(End::QueueFull, shared)),
            Err(QueueError::Failed(error)) => {
                shortage::report(NO_CONNECTION, &error);
                return Some(self.finish(End::Shortage, shared));
            }
        };
        self.search.queued_since = None;
        let left = limits.timeouts.queue.saturating_sub(since.elapsed());
        let deadline = context.deadline(whole_seconds(left));
        self.state.enqueue(place, since, deadline);
        None
    }

    /// Leaves the queue once there is a slot or the time is over; `None` once the state has
    /// changed.
    pub(super) fn wait_in_queue(
        &mut self,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        let State::Queued { client, place, since, deadline } = &self.state else { return None };
        let (deadline, waited) = (*deadline, since.elapsed());
        if self.is_client_gone(client, shared) {
            return Some(self.finish(End::ClientFailed, shared));
        }
        let Some(result) = place.take() else {
            return Some(if context.now_seconds() >= deadline {
                self.finish(End::QueueTimeout, shared)
            } else {
                Action::WaitUntil(deadline.min(self.lifetime_until))
            });
        };
        self.state.search();
        self.add_queue_time(waited);
        self.upstream.events = Events::default();
        if !self.route.group.as_ref().is_some_and(|group| Arc::ptr_eq(group, &result.group)) {
            // The indexes are of the former group.
            self.search.tried.clear();
            self.route.group = Some(result.group);
        }
        if let Some(slot) = result.slot {
            self.search.chosen = Some(Chosen::new(slot));
        }
        None
    }

    /// Records time in the queue. A client may be in the queue again after its upstream failed.
    pub(super) fn add_queue_time(&mut self, waited: Duration) {
        *self.account.record.queue_time.get_or_insert_default() += waited;
    }
}
