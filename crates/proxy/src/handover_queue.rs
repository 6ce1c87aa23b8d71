//! Connections on their way from the event loops to another process.

use crate::handed::HandedConnection;
use haul_server::waker::Waker;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};

/// The most connections on their way, one more for each event loop. Nothing of a connection is
/// forwarded until the other process has adopted it, and it waits for those before it: so they are
/// few, and the others are forwarded here meanwhile.
const ON_WAY_MAX: usize = 32;
/// The number at which the event loops are asked for more.
const ON_WAY_LOW: usize = ON_WAY_MAX / 4;

/// Creates a queue without connections.
pub fn handover_queue() -> io::Result<(HandoverSender, HandoverReceiver)> {
    let (sender, receiver) = mpsc::channel();
    let state = Arc::new(State {
        waker: Waker::new()?,
        is_waiting: AtomicBool::new(false),
        on_way: AtomicUsize::new(0),
        lacked_room: AtomicBool::new(false),
    });
    let sender = HandoverSender { sender, state: WakeOnDrop(Arc::clone(&state)) };
    Ok((sender, HandoverReceiver { receiver, state }))
}

/// An event loop's end of the queue.
#[derive(Debug, Clone)]
pub struct HandoverSender {
    // Dropped before the other field, which tells the receiver.
    sender: Sender<HandedConnection>,
    state: WakeOnDrop,
}

/// The thread's end of the queue.
#[derive(Debug)]
pub struct HandoverReceiver {
    receiver: Receiver<HandedConnection>,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    waker: Waker,
    /// Whether the receiver is to be woken by the next connection.
    is_waiting: AtomicBool,
    /// Connections that event loops have given up, and the other process has not adopted.
    on_way: AtomicUsize,
    /// Whether an event loop has found no room.
    lacked_room: AtomicBool,
}

/// Wakes the receiver when dropped.
#[derive(Debug, Clone)]
struct WakeOnDrop(Arc<State>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.waker.wake();
    }
}

impl HandoverSender {
    /// Whether another connection may be on its way. If not, [`HandoverReceiver::wants_more`]
    /// returns true once it may.
    pub fn has_room(&self) -> bool {
        let State { on_way, lacked_room, .. } = &*self.state.0;
        let is_full = || on_way.load(SeqCst) >= ON_WAY_MAX;
        if !is_full() {
            return true;
        }
        lacked_room.store(true, SeqCst);
        // The receiver may have made room before that.
        !is_full()
    }

    /// Sends a connection. It is reset if there is no receiver any more.
    pub fn send(&self, connection: HandedConnection) {
        self.state.0.on_way.fetch_add(1, SeqCst);
        if let Err(error) = self.sender.send(connection) {
            error.0.reset();
        }
        if self.state.0.is_waiting.swap(false, SeqCst) {
            self.state.0.waker.wake();
        }
    }
}

impl HandoverReceiver {
    /// The next connection, if there is one. [`TryRecvError::Disconnected`] once all senders are
    /// gone.
    pub fn try_receive(&self) -> Result<HandedConnection, TryRecvError> {
        self.receiver.try_recv()
    }

    /// The next connection, once there is one; `None` once all senders are gone.
    pub fn receive(&self) -> Option<HandedConnection> {
        self.receiver.recv().ok()
    }

    /// Begins to wait: what is returned is readable once a connection is sent, or a sender is gone.
    /// [`HandoverReceiver::try_receive`] shows whether one came before.
    pub fn begin_wait(&self) -> &Waker {
        self.state.waker.clear();
        self.state.is_waiting.store(true, SeqCst);
        &self.state.waker
    }

    /// The other process has adopted so many.
    pub fn record_adopted(&self, count: usize) {
        let rest = |on_way: usize| Some(on_way.saturating_sub(count));
        // It always has a value to store.
        let _ = self.state.on_way.fetch_update(SeqCst, SeqCst, rest);
    }

    /// Whether event loops are to be asked for more: there is room that one has lacked.
    pub fn wants_more(&self) -> bool {
        self.state.on_way.load(SeqCst) <= ON_WAY_LOW && self.state.lacked_room.swap(false, SeqCst)
    }
}
