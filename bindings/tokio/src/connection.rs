//! The state that the two halves of a stream and its loans share.

use crate::reactor::{Direction, Reactor, Tick};
use haul::{Buffer, Error, LendError, LoanId, Returned};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

/// A socket with its sender, its loans and its events.
#[derive(Debug)]
pub struct Connection {
    lender: Mutex<Lender>,
    pub reactor: Reactor,
}

/// The sender of a socket, and the loans whose futures exist.
#[derive(Debug)]
pub struct Lender {
    pub sender: haul::Sender<Arc<OwnedFd>>,
    /// The returned buffers of loans whose futures exist; `None` while a buffer is lent.
    loans: HashMap<LoanId, Option<Returned>>,
    /// The error of the socket, which the kernel reports once.
    failure: Option<Failure>,
}

/// The error of the socket, which each half returns once.
#[derive(Debug, Clone, Copy)]
struct Failure {
    errno: i32,
    is_sent_told: bool,
    is_received_told: bool,
}

impl Connection {
    pub fn new(sender: haul::Sender<Arc<OwnedFd>>, reactor: Reactor) -> Self {
        let lender = Lender { sender, loans: HashMap::new(), failure: None };
        Self { lender: Mutex::new(lender), reactor }
    }

    /// Calls the sender. Buffers that came back during the call go to their loans, and the tasks
    /// that wait for them are woken.
    pub fn with_lender<T>(&self, call: impl FnOnce(&mut Lender) -> T) -> T {
        let (result, has_returned, orphans) = {
            let mut lender = self.lender.lock().unwrap_or_else(PoisonError::into_inner);
            let result = call(&mut lender);
            let (has_returned, orphans) = lender.distribute();
            (result, has_returned, orphans)
        };
        if has_returned {
            self.reactor.notify(Direction::Completion);
        }
        // Dropped outside of the lock, because an owner may run code when it is dropped.
        drop(orphans);
        result
    }

    /// Reads the completions that arrived, and keeps the error of the socket.
    pub fn process_completions(&self) {
        self.with_lender(|lender| {
            if let Err(error) = lender.sender.on_error_event() {
                lender.keep_failure(&error);
            }
        });
    }

    /// Waits for an event after `seen`.
    pub fn poll_event(
        &self,
        context: &mut Context<'_>,
        direction: Direction,
        seen: Tick,
    ) -> Poll<io::Result<()>> {
        self.reactor.poll_event(context, direction, seen, || self.process_completions())
    }

    /// Waits for an event after `seen`.
    pub async fn event(&self, direction: Direction, seen: Tick) -> io::Result<()> {
        std::future::poll_fn(|context| self.poll_event(context, direction, seen)).await
    }

    /// The error of the socket for the half that receives, once. Without this, a reset connection
    /// whose error the sending half took would look like the end of the stream.
    pub fn failure_of_receiver(&self) -> io::Result<()> {
        self.with_lender(|lender| match &mut lender.failure {
            Some(failure) if !failure.is_received_told => {
                failure.is_received_told = true;
                Err(io::Error::from_raw_os_error(failure.errno))
            }
            _ => Ok(()),
        })
    }
}

impl Lender {
    /// Moves the buffers that came back to their loans. Returns whether there were any, and the
    /// buffers of loans whose futures were dropped.
    fn distribute(&mut self) -> (bool, Vec<Returned>) {
        let mut orphans = Vec::new();
        if !self.sender.has_returned_buffers() {
            return (false, orphans);
        }
        let reclaimed = self.sender.reclaim().map(Iterator::collect::<Vec<_>>);
        match reclaimed {
            Ok(all_returned) => {
                for returned in all_returned {
                    match self.loans.get_mut(&returned.id) {
                        Some(place) => *place = Some(returned),
                        None => orphans.push(returned),
                    }
                }
            }
            Err(error) => {
                self.keep_failure(&error);
                return (false, orphans);
            }
        }
        (true, orphans)
    }

    fn keep_failure(&mut self, error: &Error) {
        if let (None, Some(errno)) = (self.failure, error.raw_os_error()) {
            let failure = Failure { errno, is_sent_told: false, is_received_told: false };
            self.failure = Some(failure);
        }
    }

    /// Returns the error of the socket for the half that sends, once.
    pub fn check(&mut self) -> io::Result<()> {
        match &mut self.failure {
            Some(failure) if !failure.is_sent_told => {
                failure.is_sent_told = true;
                Err(io::Error::from_raw_os_error(failure.errno))
            }
            _ => Ok(()),
        }
    }

    /// Lends a buffer, whose future is about to be made.
    pub fn lend(&mut self, buffer: Buffer) -> Result<LoanId, LendError> {
        let id = self.sender.lend(buffer)?;
        // In the same turn of the lock, because the buffer may come back at once.
        self.loans.insert(id, None);
        Ok(id)
    }

    /// The returned buffer of a loan, if it came back.
    pub fn take(&mut self, id: LoanId) -> Option<Returned> {
        let returned = self.loans.get_mut(&id)?.take()?;
        self.loans.remove(&id);
        Some(returned)
    }

    /// Forgets a loan whose future was dropped.
    pub fn forget(&mut self, id: LoanId) -> Option<Returned> {
        self.loans.remove(&id).flatten()
    }
}
