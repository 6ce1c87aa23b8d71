//! The states of a connection and every transition between them.
//!
//! | from | event | to | method |
//! |---|---|---|---|
//! | `Reading` | a response is built | `Responding` | [`State::respond`] |
//! | `Reading` | the request needs an offload thread | `AwaitingJob` | [`State::await_job`] |
//! | `AwaitingJob` | its reply | `Reading` | [`State::finish_job`] |
//! | `Responding` | the file's pages are not in memory | `AwaitingPages` | [`State::await_pages`] |
//! | `AwaitingPages` | they were read | `Responding` | [`State::finish_job`] |
//! | `Responding` | all is sent | `Reading` | [`State::finish_response`] |
//! | `Reading` | a `PUT` is accepted | `Uploading` | [`State::upload`] |
//! | `Uploading` | the body is complete | `Committing` | [`State::commit`] |
//! | `Uploading` | the body is refused or late | `Committed` | [`State::reject_upload`] |
//! | `Committing` | the file is in place, or not | `Committed` | [`State::finish_commit`] |
//! | `Committed` | the response is built | `Reading`, then `Responding` | [`State::finish_upload`] |
//! | any | the last response is sent, or the peer has ended | `Closing` | [`State::close`] |
//! | `Closing` | `close_notify` is in the socket, the peer may send | `Lingering` | [`State::linger`] |
//! | `Closing` | the same, the peer has ended | `Closed` | [`State::end`] |
//! | any | a fatal error | `Closed` | [`State::end`] |
//!
//! A transition from any other state than the one named changes nothing.

use super::pending_upload::PendingUpload;
use crate::body_receiver::BodyReceiver;
use crate::response::writer::ResponseWriter;
use haul_http::status::Status;

/// The state of a connection.
#[derive(Debug)]
pub enum State {
    /// Waits for a request, or for the rest of one.
    Reading,
    /// Waits for an offload thread's reply about the request at the beginning of the input.
    AwaitingJob,
    /// Sends a response.
    Responding(Box<ResponseWriter>),
    /// Waits until an offload thread has read pages of the file that is being sent.
    AwaitingPages(Box<ResponseWriter>),
    /// Receives a request body into a file.
    Uploading(Box<BodyReceiver>, Box<PendingUpload>),
    /// Waits until an offload thread has synced and renamed the file.
    Committing(Box<PendingUpload>),
    /// The result of an upload is known and has to be reported to the client.
    Committed(Box<PendingUpload>, Status),
    /// Sends TLS's `close_notify`, until the second `until` of the clock. `lingers`: the client may
    /// still be sending.
    Closing { lingers: bool, until: u32 },
    /// Discards what the client still sends: closing a socket with unread bytes resets the
    /// connection, and the client might lose the response. Limited in bytes and time.
    Lingering { remaining_bytes: usize, until: u32 },
    /// Nothing is left to do.
    Closed,
}

impl State {
    /// `Reading` or `Committed` → `Responding`.
    pub fn respond(&mut self, writer: Box<ResponseWriter>) {
        *self = Self::Responding(writer);
    }

    /// `Reading` → `AwaitingJob`.
    pub fn await_job(&mut self) {
        *self = Self::AwaitingJob;
    }

    /// `Responding` → `AwaitingPages`.
    pub fn await_pages(&mut self) {
        self.map(|state| match state {
            Self::Responding(writer) => Self::AwaitingPages(writer),
            other => other,
        });
    }

    /// `AwaitingJob` → `Reading`, `AwaitingPages` → `Responding`.
    pub fn finish_job(&mut self) {
        self.map(|state| match state {
            Self::AwaitingJob => Self::Reading,
            Self::AwaitingPages(writer) => Self::Responding(writer),
            other => other,
        });
    }

    /// `Responding` → `Reading`. Returns the writer of the response that was sent.
    pub fn finish_response(&mut self) -> Option<Box<ResponseWriter>> {
        match std::mem::replace(self, Self::Reading) {
            Self::Responding(writer) => Some(writer),
            other => {
                *self = other;
                None
            }
        }
    }

    /// `Reading` → `Uploading`.
    pub fn upload(&mut self, receiver: BodyReceiver, upload: PendingUpload) {
        *self = Self::Uploading(Box::new(receiver), Box::new(upload));
    }

    /// `Uploading` → `Committing`. Returns the receiver, which holds the complete file, and whether
    /// the file's name must be new.
    pub fn commit(&mut self) -> Option<(Box<BodyReceiver>, bool)> {
        match std::mem::replace(self, Self::Closed) {
            Self::Uploading(receiver, upload) => {
                let only_new = upload.only_new;
                *self = Self::Committing(upload);
                Some((receiver, only_new))
            }
            other => {
                *self = other;
                None
            }
        }
    }

    /// `Uploading` → `Committed`, with the status that tells why. The rest of the body is not read,
    /// so the connection closes after the response.
    pub fn reject_upload(&mut self, status: Status) {
        self.map(|state| match state {
            Self::Uploading(_, mut upload) => {
                upload.keeps_alive = false;
                Self::Committed(upload, status)
            }
            other => other,
        });
    }

    /// `Committing` → `Committed`.
    pub fn finish_commit(&mut self, status: Status) {
        self.map(|state| match state {
            Self::Committing(upload) => Self::Committed(upload, status),
            other => other,
        });
    }

    /// `Committed` → `Reading`. Returns the upload and its result.
    pub fn finish_upload(&mut self) -> Option<(Box<PendingUpload>, Status)> {
        match std::mem::replace(self, Self::Reading) {
            Self::Committed(upload, status) => Some((upload, status)),
            other => {
                *self = other;
                None
            }
        }
    }

    /// Any state → `Closing`.
    pub fn close(&mut self, lingers: bool, until: u32) {
        *self = Self::Closing { lingers, until };
    }

    /// `Closing` → `Lingering`.
    pub fn linger(&mut self, remaining_bytes: usize, until: u32) {
        *self = Self::Lingering { remaining_bytes, until };
    }

    /// Any state → `Closed`.
    pub fn end(&mut self) {
        *self = Self::Closed;
    }

    fn map(&mut self, transition: impl FnOnce(Self) -> Self) {
        *self = transition(std::mem::replace(self, Self::Closed));
    }
}
