//! Requests of other threads to the event loops, which own the connections.

use crate::handed::HandedConnection;
use crate::selection::ConnectionSelection;
use crate::status::ConnectionStatus;
use haul_server::Control;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// A request to one event loop about its connections.
#[derive(Debug)]
pub enum Request {
    /// To list them.
    List(Sender<Vec<ConnectionStatus>>),
    /// To close some of them, and to return their number.
    Kill(ConnectionSelection, Sender<usize>),
    /// To look which of them are to be closed ([`crate::closing`]).
    Close,
    /// To hand over those that have an upstream, now or later, to another process; `None`: to keep
    /// them from now on.
    HandOver(Option<Sender<HandedConnection>>),
    /// To take a connection of another process.
    Adopt(Box<HandedConnection>),
}

/// The requests that event loops have not taken yet.
#[derive(Debug)]
pub struct Mailboxes {
    requests: Vec<Mutex<Vec<Request>>>,
    control: Arc<Control>,
    /// The loop that takes the next connection of another process.
    next: AtomicUsize,
}

impl Mailboxes {
    /// Creates a mailbox for each event loop.
    pub fn new(control: Arc<Control>) -> Arc<Self> {
        let requests = control.wakers().iter().map(|_| Mutex::default()).collect();
        Arc::new(Self { requests, control, next: AtomicUsize::new(0) })
    }

    /// Sends a request to every event loop.
    pub fn send_all(&self, mut request: impl FnMut() -> Request) {
        for requests in &self.requests {
            requests.lock().unwrap_or_else(PoisonError::into_inner).push(request());
        }
        self.control.wake();
    }

    /// Gives a connection of another process to one of the event loops.
    pub fn adopt(&self, connection: HandedConnection) {
        let index = self.next.fetch_add(1, Relaxed) % self.requests.len();
        let request = Request::Adopt(Box::new(connection));
        self.requests[index].lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.control.wakers()[index].wake();
    }

    /// Takes the requests to an event loop.
    pub fn take(&self, index: usize) -> Vec<Request> {
        let requests = self.requests.get(index);
        let take = |requests: &Mutex<Vec<Request>>| {
            std::mem::take(&mut *requests.lock().unwrap_or_else(PoisonError::into_inner))
        };
        requests.map(take).unwrap_or_default()
    }
}
