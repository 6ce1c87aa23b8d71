//! The new process tells the old one which connections have arrived.

use super::Message;
use haul_server::fd_channel::FdChannel;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The receipts of the connections that come through a channel.
#[derive(Debug)]
pub struct Receipts(Arc<State>);

#[derive(Debug)]
struct State {
    channel: Arc<FdChannel>,
    /// Connections that have arrived, and of which the old process was not told.
    untold: AtomicUsize,
}

/// A number of connections that have arrived. The old process is told when this is dropped, and
/// gives up others.
#[derive(Debug)]
pub struct Receipt {
    state: Arc<State>,
    connections: usize,
}

impl Receipts {
    /// The receipts of this channel.
    pub fn new(channel: &Arc<FdChannel>) -> Self {
        Self(Arc::new(State { channel: Arc::clone(channel), untold: AtomicUsize::new(0) }))
    }

    /// The receipt of one connection.
    pub fn next(&self) -> Receipt {
        Receipt { state: Arc::clone(&self.0), connections: 1 }
    }
}

impl Receipt {
    /// Adds the connections of another one: one message tells of all.
    pub fn add(&mut self, mut other: Self) {
        self.connections += std::mem::take(&mut other.connections);
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        let State { channel, untold } = &*self.state;
        untold.fetch_add(std::mem::take(&mut self.connections), SeqCst);
        let count = untold.swap(0, SeqCst);
        if count == 0 {
            return;
        }
        // Some dozens are on their way at most, and the channel has room for hundreds of messages.
        // If it has none, the next receipt tells of these, too.
        let told = serde_json::to_vec(&Message::Adopted(count)).map(|text| channel.try_send(&text));
        if !matches!(told, Ok(Ok(()))) {
            untold.fetch_add(count, SeqCst);
        }
    }
}
