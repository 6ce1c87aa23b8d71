//! `PUT`: a request body becomes a file.
//!
//! The preconditions are checked against what is there now, an offload thread creates a temporary
//! file, the body is received into it, an offload thread syncs and renames it, and only then the
//! client gets its response.

use super::pending_upload::PendingUpload;
use super::{Connection, ConnectionAction, State, deadline};
use crate::body_receiver::{BodyReceiver, Stop};
use crate::handler::FileHandler;
use crate::jobs::{FileJob, refuse_write};
use haul_http::request::{BodyLength, Request};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

impl Connection {
    /// Begins an upload, as far as that is possible before the body. `None` if the state has
    /// changed.
    pub(super) fn begin_upload(
        &mut self,
        request: &Request<'_>,
        received: Instant,
        handler: &mut FileHandler,
    ) -> Option<ConnectionAction> {
        let refused = match self.pending.as_mut().and_then(|pending| pending.upload.take()) {
            None => {
                let Some(found) = self.find(request.target, handler) else {
                    let job = FileJob::find(request, handler);
                    return Some(self.offload(job, received, handler));
                };
                let Some(refused) = handler.response().refuse_upload(request, &found) else {
                    let job = FileJob::begin_upload(request.target, handler);
                    return Some(self.offload(job, received, handler));
                };
                refused
            }
            Some(Err(status)) => handler.response().refuse(request, status),
            Some(Ok(file)) => {
                let body = request.body.unwrap_or(BodyLength::Bytes(0));
                let bytes_max = handler.fixed.service.put_bytes_max.unwrap_or(0);
                let Ok(receiver) = BodyReceiver::new(*file, &self.stream, body, bytes_max) else {
                    return Some(ConnectionAction::Close);
                };
                if request.expects_continue {
                    // A socket without room for these few bytes has lost its client; a client goes
                    // on after a while without them.
                    self.stream.send(&[IoSlice::new(b"HTTP/1.1 100 Continue\r\n\r\n")], false);
                }
                let is_logged = handler.accounting.log.is_on();
                let now = handler.clock.seconds();
                let upload = PendingUpload::new(request, self.peer, received, now, is_logged);
                self.state.upload(receiver, upload);
                return None;
            }
        };
        self.respond_to(request, refused, received, handler);
        None
    }

    /// Receives more of a body; `None` if the state has changed.
    pub(super) fn receive_body(&mut self, handler: &mut FileHandler) -> Option<ConnectionAction> {
        let State::Uploading(receiver, upload) = &mut self.state else { return None };
        let before = receiver.received_bytes();
        let received = receiver.receive(&mut self.stream, &mut self.input);
        upload.progress.add(receiver.received_bytes() - before, handler.clock.seconds());
        let status = match received {
            Err(Stop::Blocked) => {
                let now = handler.clock.seconds();
                return Some(ConnectionAction::WaitUntil(deadline(
                    now,
                    handler.fixed.limits.send_timeout,
                )));
            }
            Err(Stop::Yield) => return Some(ConnectionAction::Yield),
            Err(Stop::Broken) => return Some(ConnectionAction::Close),
            Err(Stop::Refused(status)) => Some(status),
            Err(Stop::Unwritable(error)) => {
                Some(refuse_write(&handler.fixed.service, upload.target.as_bytes(), &error))
            }
            Ok(()) => None,
        };
        // What arrived after the body has left no event behind.
        self.is_readable = true;
        if let Some(status) = status {
            self.state.reject_upload(status);
            return None;
        }
        let (receiver, only_new) = self.state.commit()?;
        handler.accounting.counters.disk_waits.add(1);
        Some(ConnectionAction::Offload(FileJob::CommitUpload {
            service: Arc::clone(&handler.fixed.service),
            file: Box::new(receiver.into_file()),
            only_new,
        }))
    }

    /// Makes the response to an upload whose result is known.
    pub(super) fn answer_upload(&mut self, handler: &mut FileHandler) {
        let Some((upload, status)) = self.state.finish_upload() else { return };
        handler.cache.remove(&upload.target);
        let keeps_alive = upload.keeps_alive && !handler.is_draining();
        let response = handler.response().uploaded(status, upload.minor_version, keeps_alive);
        let entry = upload.log_entry(status, response.body.len());
        self.respond(response, entry, upload.received, handler);
    }
}
