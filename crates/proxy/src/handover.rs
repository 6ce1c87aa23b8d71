//! Handover: a new process takes the listening sockets and the connections of a running proxy, so
//! that an upgrade of the program cuts none.
//!
//! The new process asks for it at the control socket. Then, through a separate channel:
//!
//! 1. The old process sends its listening sockets and the state of its upstreams.
//! 2. The new process creates everything that it needs, and tells the old one that it starts.
//! 3. The old process stops accepting, connects no other client to an upstream that has a limit,
//!    and sends the number of its clients, and of each upstream's connections. In the new one they
//!    count for the limits from the start.
//! 4. The old process agrees, and the new process accepts. The old process sends each established
//!    connection, with the bytes that it received and did not send yet, and each client that waits
//!    for an upstream. Few connections are on their way at a time: the new process reports how many
//!    arrived on its event loops, and the old process forwards the other connections until then.
//!    The old process reports connections that ended. It keeps a connection whose greeting is
//!    incomplete or whose upstream does not answer yet, until the connection is established, fails,
//!    or waits. It also keeps a connection of which a side failed, until the other side received
//!    the bytes of the failed side.
//! 5. The old process ends once it has no connection, and the new one has said that it runs and has
//!    adopted all.
//!
//! A new process that fails before the old one has agreed changes nothing: the old one accepts
//! again. If it fails later, or adopts no connection for some seconds, the old process keeps what
//! it has not sent, and accepts again once the new one has ended.

mod source;
mod target;

pub use source::{HandoverSource, Parts};
pub use target::{
    CLOSE_INTERVAL, CLOSE_TIME_MAX, ClientRoom, HandoverTarget, InheritedSockets, SOURCE_ENDED,
};

/// The command at the control socket that asks for a handover.
pub const COMMAND: &str = "upgrade";
