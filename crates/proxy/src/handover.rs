//! Handover: a new process takes the listening sockets and the connections of a running proxy, so
//! that an upgrade of the program cuts none.
//!
//! The new process asks for it at the control socket. Then, through a channel of its own:
//!
//! 1. The old process sends its listening sockets and the state of its upstreams.
//! 2. The new process creates everything that it needs, and tells the old one that it starts.
//! 3. The old process stops accepting, connects no other client to an upstream that has a limit,
//!    and sends the number of its clients, and of each upstream's connections. In the new one they
//!    count for the limits from the start.
//! 4. The old process agrees, and the new one accepts. The old one sends each connection: with the
//!    bytes that it has received and not sent yet, and with the socket of its upstream, or of each
//!    attempt to connect to one. Few are on their way at a time: the new one tells how many have
//!    arrived on its event loops, and the old one forwards the others meanwhile. Connections that
//!    have ended meanwhile, it reports. It keeps those of which a side has failed, until the other
//!    side has what was received for it.
//! 5. The old process ends once it has no connection, and the new one has said that it runs and has
//!    adopted all.
//!
//! A new process that fails before the old one has agreed changes nothing: the old one accepts
//! again. If it fails later, or adopts no connection for some seconds, the old process keeps what
//! it has not sent, and accepts again once the new one has ended.

mod give;
mod take;

pub use give::{Giver, Parts};
pub use take::{CLOSE_INTERVAL, CLOSE_TIME_MAX, ClientRoom, GIVER_ENDED, Taken, Taker};

/// The command at the control socket that asks for a handover.
pub const COMMAND: &str = "upgrade";
