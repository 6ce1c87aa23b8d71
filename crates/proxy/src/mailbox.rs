//! Requests of other threads to the event loops, which own the connections.

use crate::handover_message::HandedConnection;
use crate::handover_message::queue::HandoverSender;
use crate::record::status::ConnectionStatus;
use crate::upstreams::selection::ConnectionSelection;
use haul_server::Control;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A request to one event loop about its connections.
#[derive(Debug)]
pub enum Request {
    /// List the connections.
    List(Sender<Vec<ConnectionStatus>>),
    /// Close some connections, and return their number.
    Kill(ConnectionSelection, Sender<usize>),
    /// Close the connections that are due ([`crate::upstreams::closing`]).
    Close,
    /// Hand the connections over to another process, now or once there is room. `None`: keep the
    /// connections from now on.
    HandOver(Option<HandoverSender>),
    /// Continue a handover, because there is room for more connections.
    ContinueHandover,
    /// Adopt a connection of another process.
    Adopt(Box<HandedConnection>),
}

/// The requests that the event loops did not take yet.
#[derive(Debug)]
pub struct Mailboxes {
    /// `None`: the loop has ended.
    requests: Vec<Mutex<Option<Vec<Request>>>>,
    control: Arc<Control>,
    /// The loop that takes the next connection of another process.
    next: AtomicUsize,
    /// Whether connections of another process may still come, or connections that were given up may
    /// come back. Until then the loops do not end.
    expects_connections: AtomicBool,
}

impl Mailboxes {
    /// Creates a mailbox for each event loop.
    pub fn new(control: Arc<Control>) -> Arc<Self> {
        let requests = control.wakers().iter().map(|_| Mutex::new(Some(Vec::new()))).collect();
        Arc::new(Self {
            requests,
            control,
            next: AtomicUsize::new(0),
            expects_connections: AtomicBool::new(false),
        })
    }

    /// Sends a request to every event loop that still runs.
    pub fn send_all(&self, mut request: impl FnMut() -> Request) {
        for index in 0..self.requests.len() {
            if let Some(requests) = &mut *self.lock(index) {
                requests.push(request());
            }
        }
        self.control.wake();
    }

    /// Gives a connection of another process to an event loop. If all loops ended, the connection
    /// is reset.
    pub fn adopt(&self, connection: HandedConnection) {
        let loops = self.requests.len();
        let first = self.next.fetch_add(1, Relaxed);
        for index in (0..loops).map(|offset| (first + offset) % loops) {
            if let Some(requests) = &mut *self.lock(index) {
                // If there are other requests, the loop was woken for them, and takes all requests.
                let is_first = requests.is_empty();
                requests.push(Request::Adopt(Box::new(connection)));
                if is_first {
                    self.control.wakers()[index].wake();
                }
                return;
            }
        }
        connection.reset();
    }

    /// Takes the requests to an event loop.
    pub fn take(&self, index: usize) -> Vec<Request> {
        self.lock(index).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Closes the mailbox of a loop that is about to end. False if the loop has to continue,
    /// because there are requests or connections may still come.
    pub fn close(&self, index: usize, is_forced: bool) -> bool {
        let mut requests = self.lock(index);
        let has_requests = requests.as_ref().is_some_and(|requests| !requests.is_empty());
        // A loop that was resumed does not drain any more, even if nothing is expected.
        let has_nothing_left =
            || !has_requests && !self.expects_connections() && self.control.is_draining();
        let may_close = is_forced || has_nothing_left();
        if may_close {
            for request in requests.take().into_iter().flatten() {
                if let Request::Adopt(connection) = request {
                    connection.reset();
                }
            }
        }
        may_close
    }

    /// Whether the event loops cut off their connections.
    pub fn are_cut_off(&self) -> bool {
        self.control.is_cut_off()
    }

    /// Whether all event loops ended.
    pub fn are_closed(&self) -> bool {
        (0..self.requests.len()).all(|index| self.lock(index).is_none())
    }

    /// Sets whether connections may still come.
    pub fn set_expects_connections(&self, expects_connections: bool) {
        self.expects_connections.store(expects_connections, SeqCst);
        self.control.wake();
    }

    /// Whether connections may still come.
    pub fn expects_connections(&self) -> bool {
        self.expects_connections.load(SeqCst)
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, Option<Vec<Request>>> {
        self.requests[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
