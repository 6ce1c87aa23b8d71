//! What an event loop asks of a service whose connections can go to another process.

use super::handler::{Context, Handler};
use crate::admission::placement::Place;
use std::net::IpAddr;

/// A service whose connections can be listed, and can go to another process. A service without a
/// handover implements none of the methods.
pub trait Handover: Handler {
    /// Whether [`Handover::visit`] is to be called for every connection of the loop, and
    /// [`Handover::end_visits`] after them. The loop asks after [`Handler::on_wake`] and
    /// [`Handler::every_second`].
    fn begin_visits(&mut self) -> bool {
        false
    }

    /// Visits a connection, such as to list it. If it returns true, [`Handler::drive`] follows.
    fn visit(&mut self, connection: &mut Self::Connection, context: &Context<'_>) -> bool {
        let _ = (connection, context);
        false
    }

    /// All connections were visited.
    fn end_visits(&mut self) {}

    /// Takes a connection that another process handed over, and registers its sockets; `None` if no
    /// connection is left. A loop with a [`crate::admission::placement::Placement`] calls this
    /// after [`Handler::on_wake`] until no connection is left, and then calls [`Handler::drive`].
    fn adopt(&mut self, context: &Context<'_>) -> Option<Adopted<Self::Connection>> {
        let _ = context;
        None
    }

    /// The drain timeout is over, of a drain that may be resumed ([`crate::Control::resume`]): the
    /// loop goes on. Called in each turn.
    fn drain_timed_out(&mut self) {}

    /// Whether a drained loop may end. `is_forced`: the drain timeout is over, or the connections
    /// are cut off. The loop calls this in each turn until it may end.
    fn may_end(&mut self, is_forced: bool) -> bool {
        let _ = is_forced;
        true
    }
}

/// A connection that another process handed over.
#[derive(Debug)]
pub struct Adopted<C> {
    /// The state of the connection.
    pub connection: C,
    /// The client's address; `None` for a Unix socket.
    pub client: Option<IpAddr>,
    /// The place of the connection, on any loop.
    pub place: Option<Place>,
}
