//! A client waits in its group's queue until an upstream has a slot.

use super::connecting::{Chosen, NO_CONNECTION};
use super::{Connection, Events, State};
use crate::host_instant::HostInstant;
use crate::log::End;
use crate::loop_state::{LoopState, whole_seconds};
use crate::upstream_group::{QueueError, QueuedClient, UpstreamGroup};
use haul_server::event_loop::{Action, Context, Interest, Side};
use haul_server::offload::NoJob;
use haul_server::shortage;
use std::sync::Arc;
use std::time::Duration;

impl Connection {
    /// Puts the client into the queue; `None` once the state has changed.
    pub(super) fn enqueue(
        &mut self,
        group: &Arc<UpstreamGroup>,
        shared: &mut LoopState,
        context: &Context<'_>,
    ) -> Option<Action<NoJob>> {
        // The upstream that was tried before is not held meanwhile.
        if let Some(chosen) = &mut self.upstream {
            chosen.free_slot();
        }
        let limits = *shared.limits();
        // One that comes from another process has its place already.
        let (since, length_max) = self.search.queued_since.map_or_else(
            || (HostInstant::now(), limits.queue_length_max),
            |since| (since, usize::MAX),
        );
        let address = self.record.client.map(|client| client.ip());
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
        let State::Accepted(client) = std::mem::replace(&mut self.state, State::Closed) else {
            return Some(Action::Close);
        };
        self.search.queued_since = None;
        let left = limits.queue_timeout.saturating_sub(since.elapsed());
        let deadline = context.deadline(whole_seconds(left));
        self.state = State::Queued { client, place, since, deadline };
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
        if let State::Queued { client, .. } = std::mem::replace(&mut self.state, State::Closed) {
            self.state = State::Accepted(client);
        }
        self.add_queue_time(waited);
        self.upstream_events = Events::default();
        if !self.group.as_ref().is_some_and(|group| Arc::ptr_eq(group, &result.group)) {
            // These are places in the former group.
            self.search.tried.clear();
            self.group = Some(result.group);
        }
        if let Some(slot) = result.slot {
            self.upstream = Some(Chosen::new(slot));
        }
        None
    }

    /// Records time in the queue. A client may be there again when its upstream has failed.
    pub(super) fn add_queue_time(&mut self, waited: Duration) {
        *self.record.queue_time.get_or_insert_default() += waited;
    }
}
