//! Handover: a new process takes the listening sockets and the established connections of a running
//! proxy, so that an upgrade of the program cuts none.
//!
//! The new process asks for it at the control socket. Then, through a channel of its own:
//!
//! 1. The old process sends its listening sockets, and what the operator has set.
//! 2. The new process starts, accepts connections, and says so.
//! 3. The old process stops accepting and sends each connection as soon as it has an upstream, with
//!    the bytes that it has received and not sent yet.
//! 4. The old process ends once it has no connection.
//!
//! A new process that fails before the second step changes nothing.

mod give;
mod take;

pub use give::{Giver, Parts};
pub use take::{Taken, Taker};

/// The command at the control socket that asks for a handover.
pub const COMMAND: &str = "upgrade";
