//! Writes the same messages to all hosts. A host that does not read delays no other host.

use crate::error::Error;
use crate::frame;
use crate::message::ToDestination;
use std::io::Write;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The frames for one host.
pub type Messages = Receiver<Arc<Vec<u8>>>;
/// The other end of [`Messages`]; `None` for a host that failed.
type Queue = Option<Sender<Arc<Vec<u8>>>>;

/// The queues of frames for all hosts. A session lists a limited number of files ahead of the
/// answers, so the queues are short.
#[derive(Debug)]
pub struct Broadcast(Mutex<Vec<Queue>>);

impl Broadcast {
    /// Queues for so many hosts.
    pub fn new(hosts: usize) -> (Self, Vec<Messages>) {
        let (senders, receivers) = (0..hosts).map(|_| mpsc::channel()).unzip::<_, _, Vec<_>, _>();
        (Self(Mutex::new(senders.into_iter().map(Some).collect())), receivers)
    }

    fn senders(&self) -> MutexGuard<'_, Vec<Queue>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message to all hosts that are left.
    pub fn send(&self, message: &ToDestination) -> Result<(), Error> {
        let frame = Arc::new(frame::head(message, 0)?);
        for sender in self.senders().iter().flatten() {
            // The receiver is missing after a failure of the host.
            let _ = sender.send(Arc::clone(&frame));
        }
        Ok(())
    }

    /// Sends a message to one host.
    pub fn send_to(&self, number: usize, message: &ToDestination) {
        // Only lists may be too large for a frame.
        let Ok(frame) = frame::head(message, 0) else { return };
        if let Some(Some(sender)) = self.senders().get(number) {
            let _ = sender.send(Arc::new(frame));
        }
    }

    /// Ends the messages to one host.
    pub fn leave(&self, number: usize) {
        if let Some(sender) = self.senders().get_mut(number) {
            *sender = None;
        }
    }

    /// Ends the messages to all hosts.
    pub fn close(&self) {
        self.senders().fill_with(|| None);
    }
}

/// Writes the messages of one host to its stream, until [`Broadcast::leave`].
pub fn write(messages: &Messages, mut to: impl Write) -> Result<(), Error> {
    for frame in messages {
        to.write_all(&frame).and_then(|()| to.flush()).map_err(Error::Connection)?;
    }
    Ok(())
}
