//! The new process tells the old one which connections have arrived.

use super::Message;
use haul_server::fd_channel::FdChannel;
use std::sync::Arc;

/// A number of connections that have arrived. The old process learns of them when this is dropped,
/// and gives up others.
#[derive(Debug)]
pub struct Receipt {
    channel: Arc<FdChannel>,
    connections: usize,
}

impl Receipt {
    /// The receipt of a connection that came through this channel.
    pub fn new(channel: &Arc<FdChannel>) -> Self {
        Self { channel: Arc::clone(channel), connections: 1 }
    }

    /// Adds the connections of another one: one message tells of all.
    pub fn add(&mut self, mut other: Self) {
        self.connections += std::mem::take(&mut other.connections);
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if self.connections == 0 {
            return;
        }
        // The channel has room for it: no more connections are on their way than fit into the
        // queue of the old process. That process may have ended.
        if let Ok(message) = serde_json::to_vec(&Message::Adopted(self.connections)) {
            let _ = self.channel.try_send(&message);
        }
    }
}
