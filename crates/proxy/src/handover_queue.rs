//! Connections on their way from the event loops to the thread that sends them to another process.

use crate::handed::HandedConnection;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// The most connections on their way, one more for each event loop: nothing of a connection is
/// forwarded until those before it are sent.
const LENGTH_MAX: usize = 32;
/// The number at which the event loops are asked for more.
const LENGTH_LOW: usize = LENGTH_MAX / 4;

/// Creates a queue without connections.
pub fn handover_queue() -> (HandoverSender, HandoverReceiver) {
    let (sender, receiver) = mpsc::channel();
    let state = Arc::new(State::default());
    (HandoverSender { sender, state: Arc::clone(&state) }, HandoverReceiver { receiver, state })
}

/// An event loop's end of the queue.
#[derive(Debug, Clone)]
pub struct HandoverSender {
    sender: Sender<HandedConnection>,
    state: Arc<State>,
}

/// The thread's end of the queue.
#[derive(Debug)]
pub struct HandoverReceiver {
    receiver: Receiver<HandedConnection>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    length: AtomicUsize,
    /// Whether an event loop has found no room.
    lacked_room: AtomicBool,
}

impl HandoverSender {
    /// Whether the queue has room for another connection. If not, [`HandoverReceiver::wants_more`]
    /// returns true once it has.
    pub fn has_room(&self) -> bool {
        let is_full = || self.state.length.load(SeqCst) >= LENGTH_MAX;
        if !is_full() {
            return true;
        }
        self.state.lacked_room.store(true, SeqCst);
        // The receiver may have made room before that.
        !is_full()
    }

    /// Sends a connection. It is reset if there is no receiver any more.
    pub fn send(&self, connection: HandedConnection) {
        self.state.length.fetch_add(1, SeqCst);
        if let Err(error) = self.sender.send(connection) {
            error.0.reset();
        }
    }
}

impl HandoverReceiver {
    /// The next connection. [`RecvTimeoutError::Disconnected`] once all senders are gone.
    pub fn receive(&self, timeout: Duration) -> Result<HandedConnection, RecvTimeoutError> {
        let connection = self.receiver.recv_timeout(timeout)?;
        self.state.length.fetch_sub(1, SeqCst);
        Ok(connection)
    }

    /// Whether event loops are to be asked for more: there is room that one has lacked.
    pub fn wants_more(&self) -> bool {
        self.state.length.load(SeqCst) <= LENGTH_LOW && self.state.lacked_room.swap(false, SeqCst)
    }
}
