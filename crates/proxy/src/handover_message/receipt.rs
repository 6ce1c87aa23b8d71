//! Acknowledgement of connections that arrived in the new process.

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
    /// The connections that arrived since the last message.
    unsent: AtomicUsize,
}

/// A number of connections that arrived. The drop of this value sends the number to the old
/// process, which then gives up other connections.
#[derive(Debug)]
pub struct Receipt {
    state: Arc<State>,
    connections: usize,
}

impl Receipts {
    /// The receipts of this channel.
    pub fn new(channel: &Arc<FdChannel>) -> Self {
        Self(Arc::new(State { channel: Arc::clone(channel), unsent: AtomicUsize::new(0) }))
    }

    /// The receipt of one connection.
    pub fn next(&self) -> Receipt {
        Receipt { state: Arc::clone(&self.0), connections: 1 }
    }
}

impl Receipt {
    /// Adds the connections of another receipt, so that one message has both.
    pub fn add(&mut self, mut other: Self) {
        self.connections += std::mem::take(&mut other.connections);
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        let State { channel, unsent } = &*self.state;
        unsent.fetch_add(std::mem::take(&mut self.connections), SeqCst);
        let count = unsent.swap(0, SeqCst);
        if count == 0 {
            return;
        }
        // At most 128 connections are on their way, and one for each event loop, and the channel
        // has room for 200 messages. If the channel is full, the message of the next receipt
        // includes these connections.
        let sent = serde_json::to_vec(&Message::Adopted(count)).map(|text| channel.try_send(&text));
        if !matches!(sent, Ok(Ok(()))) {
            unsent.fetch_add(count, SeqCst);
        }
    }
}
