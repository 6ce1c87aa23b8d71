//! Sends a response: the head together with what is in memory, files by the cheapest method.
//!
//! A file's pages are sent without a copy, so a file that is written to during the send could reach
//! the client as a mixture under the entity tag of one version. Therefore:
//!
//! * small files are sent from memory;
//! * a file that may still be written to is copied, and each piece is checked after it was read and
//!   before it is sent;
//! * any other file is checked before each piece (a check of a tenth of a millisecond ago will do)
//!   and after the last; if it has changed, the connection is reset, so that the client does not
//!   take an incomplete response for a complete one. Of a file of more than 256 KiB the last bytes
//!   are held back until that check, so that the response is not complete before it.
//!
//! A change after the last check and before the client's acknowledgement remains undetected.

use super::{Connection, ConnectionAction, State, deadline};
use crate::files::resource::Representation;
use crate::handler::FileHandler;
use crate::jobs::FileJob;
use crate::response::body::Piece;
use crate::response::writer::ResponseWriter;
use haul::SendMethod;
use haul_server::stream::Stream;
use haul_server::{Sent, Transport};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

/// The piece of a file that is checked and sent at a time: what an offload thread waits for.
const PIECE_BYTES: u64 = haul::PREFETCH_AWAITED_BYTES;
/// The largest body that is sent without a cork, in bytes: most sockets accept it in one call. Of
/// larger files the last bytes are held back.
const UNCORKED_BODY_BYTES_MAX: u64 = 256 << 10;
/// The last bytes of a large file's response, which are copied, checked and sent on their own.
const HELD_BACK_BYTES: u64 = 4096;

/// Why a response is not complete.
#[derive(Debug)]
enum Stop {
    /// The socket is full.
    Blocked,
    /// The connection has had its turn.
    Yield,
    /// This range of a file is not in memory.
    NotResident(Arc<Representation>, Range<u64>),
    /// The file has changed since the head was written.
    Changed,
    /// The connection failed.
    Broken,
}

impl Connection {
    /// Sends more of the response, at most `budget_bytes` of files; `None` once it is complete.
    pub(super) fn send_response(
        &mut self,
        budget_bytes: &mut u64,
        handler: &mut FileHandler,
    ) -> Option<ConnectionAction> {
        let State::Responding(writer) = &mut self.state else { return None };
        let before = writer.len();
        let sent = send(&mut self.stream, writer, budget_bytes, handler);
        let accepted = before - writer.len();
        if accepted > 0 {
            writer.accepted_at = handler.clock.seconds();
            writer.progress.add(accepted, writer.accepted_at);
        }
        match sent {
            Ok(()) => {
                self.finish_response(handler);
                None
            }
            Err(Stop::Yield) => Some(ConnectionAction::Yield),
            // The client has to accept bytes within the timeout, whatever else it does.
            Err(Stop::Blocked) => {
                let timeout = handler.fixed.limits.send_timeout;
                Some(ConnectionAction::WaitUntil(deadline(writer.accepted_at, timeout)))
            }
            Err(Stop::NotResident(form, range)) => {
                self.state.await_pages();
                handler.accounting.counters.disk_waits.add(1);
                Some(ConnectionAction::Offload(FileJob::ReadPages(form, range)))
            }
            Err(Stop::Broken) => Some(ConnectionAction::Close),
            Err(Stop::Changed) => {
                handler.accounting.counters.cut_short.add(1);
                self.stream.reset_on_close();
                Some(ConnectionAction::Close)
            }
        }
    }

    /// The response is in the socket.
    fn finish_response(&mut self, handler: &mut FileHandler) {
        let Some(mut writer) = self.state.finish_response() else { return };
        if let Some(entry) = writer.log_entry.take() {
            handler.accounting.log.write(&entry, &handler.clock);
        }
        handler.accounting.counters.took(writer.received.elapsed());
        self.timeout = super::Timeout::Idle(handler.clock.seconds());
        if writer.closes {
            self.begin_close(!self.is_at_end, handler);
        }
        handler.scratch.reuse(writer);
    }

    /// Sends the head of a response whose file follows (`MSG_MORE`): with all heads in their
    /// sockets, the files leave back to back.
    pub(super) fn send_head_of_file(&mut self, handler: &mut FileHandler) {
        let State::Responding(writer) = &mut self.state else { return };
        if self.stream.is_tls() || !matches!(writer.body.next(), Some(Piece::File(..))) {
            return;
        }
        let timer = handler.accounting.start_sampled_timer();
        // An error comes again when the file is sent.
        if let Sent::Bytes(count) = self.stream.send(&[IoSlice::new(&writer.head)], true) {
            let transport = self.stream.transport(Transport::Memory);
            let cost = timer.and_then(|timer| timer.elapsed());
            handler.accounting.counters.sent(transport, count, cost);
            writer.head.drain(..count as usize);
        }
    }
}

/// Sends what is left of a response, at most `budget_bytes` of files.
fn send(
    stream: &mut Stream,
    writer: &mut ResponseWriter,
    budget_bytes: &mut u64,
    handler: &mut FileHandler,
) -> Result<(), Stop> {
    let ResponseWriter { head, body, resident, .. } = writer;
    loop {
        let timer;
        let (sent, transport) = match body.next() {
            None if head.is_empty() => {
                stream.cork(false);
                return match stream.flush() {
                    Sent::Bytes(_) => Ok(()),
                    Sent::Blocked => Err(Stop::Blocked),
                    Sent::Ended | Sent::Broken => Err(Stop::Broken),
                };
            }
            Some(Piece::File(form, range)) if head.is_empty() => {
                timer = handler.accounting.start_sampled_timer();
                let (form, range) = (Arc::clone(form), range.clone());
                send_piece(stream, &form, range, budget_bytes, resident, handler)?
            }
            next => {
                timer = handler.accounting.start_sampled_timer();
                let memory = next.and_then(Piece::memory).unwrap_or_default();
                let follows = matches!(next, Some(Piece::File(..))) || !body.is_last();
                let parts = [IoSlice::new(head), IoSlice::new(memory)];
                let parts = if memory.is_empty() { &parts[..1] } else { &parts[..] };
                let sent = if handler.holds && !follows {
                    stream.send_held(parts)
                } else {
                    stream.send(parts, follows)
                };
                (sent, stream.transport(Transport::Memory))
            }
        };
        match sent {
            Sent::Bytes(count) => {
                let cost = timer.and_then(|timer| timer.elapsed());
                handler.accounting.counters.sent(transport, count, cost);
                let of_head = head.len().min(count as usize);
                head.drain(..of_head);
                body.sent(count - of_head as u64);
            }
            Sent::Blocked => return Err(Stop::Blocked),
            Sent::Ended => return Err(Stop::Changed),
            Sent::Broken => return Err(Stop::Broken),
        }
    }
}

/// Sends a beginning of a range of a file.
fn send_piece(
    stream: &mut Stream,
    form: &Arc<Representation>,
    range: Range<u64>,
    budget_bytes: &mut u64,
    resident: &mut Range<u64>,
    handler: &mut FileHandler,
) -> Result<(Sent, Transport), Stop> {
    if *budget_bytes == 0 {
        return Err(Stop::Yield);
    }
    let object = &form.object;
    if !resident.contains(&range.start) {
        *resident = range.start..range.end.min(range.start + PIECE_BYTES);
        if !object.is_resident(resident, handler.clock.seconds()) {
            return Err(Stop::NotResident(Arc::clone(form), range));
        }
    }
    let piece = range.start..range.end.min(resident.end);
    let held_back = if object.len() > UNCORKED_BODY_BYTES_MAX { HELD_BACK_BYTES } else { 0 };
    let is_held_back = range.end - range.start <= held_back;
    let (sent, transport) = if !is_held_back && object.is_settled(handler.clock.now()) {
        let now_ns = handler.clock.elapsed_ns();
        if !object.is_unchanged_at(now_ns) {
            return Err(Stop::Changed);
        }
        if range.end - range.start > UNCORKED_BODY_BYTES_MAX {
            stream.cork(true);
        }
        let piece = piece.start..piece.end.min(range.end - held_back);
        let sent = stream.send_file(object.file(), piece, &mut handler.scratch.copy);
        let is_last = sent == Sent::Bytes(range.end - range.start);
        if is_last && !object.revalidate_at(now_ns) {
            return Err(Stop::Changed);
        }
        (sent, stream.latest_file_transport())
    } else {
        let copy = &mut handler.scratch.copy;
        let len = copy.len().min((piece.end - piece.start) as usize);
        let copied = match rustix::io::pread(object.file(), &mut copy[..len], piece.start) {
            Ok(count) if count > 0 && object.is_unchanged() => &copy[..count],
            Ok(_) => return Err(Stop::Changed),
            Err(_) => return Err(Stop::Broken),
        };
        let more = piece.start + (copied.len() as u64) < range.end;
        let sent = stream.send(&[IoSlice::new(copied)], more);
        (sent, stream.transport(Transport::Method(SendMethod::ReadSend)))
    };
    if let Sent::Bytes(count) = sent {
        *budget_bytes = budget_bytes.saturating_sub(count);
    }
    Ok((sent, transport))
}
