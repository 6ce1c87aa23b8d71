//! A response's way into the socket: the head with what is in memory in one call, files by the cheapest path.
//!
//! A file's pages travel as they are, so a file that is written to on its way could reach the client as a mixture under
//! the tag of one version. Hence: what is small goes from memory; a file that has changed a moment ago is copied, and each piece
//! looked at after it was read and before it goes; any other is looked at before each piece (a look at it a tenth of a millisecond ago
//! will do) and after the last, and if it has changed, the connection is reset, so that nobody takes what he has got for the
//! whole. What remains is a change after that last look and before the client's acknowledgement.

use crate::counters::Way;
use crate::event_loop::context::Context;
use crate::event_loop::helper::AWAITED_BYTES;
use crate::event_loop::sending::Sending;
use crate::event_loop::sent::Sent;
use crate::event_loop::stream::Stream;
use crate::files::resource::Representation;
use crate::response::body::Piece;
use haul::SendMethod;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

/// How much of a file is looked at, and sent, at a time: what a helper waits for.
const PIECE_BYTES: u64 = AWAITED_BYTES;

/// A body of this size fits into most sockets at once.
const UNCORKED_BYTES_MAX: u64 = 256 << 10;

/// How far a response has come.
#[derive(Debug)]
pub enum Progress {
    /// The kernel has all of it.
    Done,
    /// The socket takes no more now.
    Blocked,
    /// It has had its turn.
    Turn,
    /// These bytes of a file are not in memory.
    Cold(Arc<Representation>, Range<u64>),
    /// A file is not what it was when the head was written.
    Changed,
    /// The connection is no more.
    Broken,
}

/// Sends what is left of a response, at most so many bytes of files; what went is taken from it.
pub fn transmit(
    stream: &mut Stream,
    sending: &mut Sending,
    budget_bytes: &mut u64,
    context: &mut Context,
) -> Progress {
    let Sending { head, body, warm, .. } = sending;
    loop {
        let timer;
        let (sent, way) = match body.next() {
            None if head.is_empty() => {
                stream.cork(false);
                return match stream.flush() {
                    Sent::Bytes(_) => Progress::Done,
                    Sent::Blocked => Progress::Blocked,
                    Sent::Ended | Sent::Broken => Progress::Broken,
                };
            }
            Some(Piece::File(form, range)) if head.is_empty() => {
                timer = context.timer();
                let (form, range) = (Arc::clone(form), range.clone());
                match send_piece(stream, &form, range, budget_bytes, warm, context) {
                    Ok(sent_by) => sent_by,
                    Err(progress) => return progress,
                }
            }
            next => {
                timer = context.timer();
                let memory = next.and_then(Piece::memory).unwrap_or_default();
                let follows = matches!(next, Some(Piece::File(..))) || !body.is_last();
                let parts = [IoSlice::new(head), IoSlice::new(memory)];
                let parts = if memory.is_empty() { &parts[..1] } else { &parts[..] };
                let sent = if context.holds && !follows {
                    stream.hold(parts)
                } else {
                    stream.send(parts, follows)
                };
                (sent, stream.way(Way::Memory))
            }
        };
        match sent {
            Sent::Bytes(count) => {
                context.counters.moved(way, count, timer.and_then(|timer| timer.elapsed()));
                let of_head = head.len().min(count as usize);
                head.drain(..of_head);
                body.sent(count - of_head as u64);
            }
            Sent::Blocked => return Progress::Blocked,
            Sent::Ended => return Progress::Changed,
            Sent::Broken => return Progress::Broken,
        }
    }
}

/// Has the kernel take a head that a file follows, and wait for that: with the heads of all out of the way, their files leave one right
/// after the other.
pub fn send_head(stream: &mut Stream, sending: &mut Sending, context: &mut Context) {
    if stream.is_tls() || !matches!(sending.body.next(), Some(Piece::File(..))) {
        return;
    }
    let timer = context.timer();
    // What goes wrong here does so again when the file is sent.
    if let Sent::Bytes(count) = stream.send(&[IoSlice::new(&sending.head)], true) {
        let way = stream.way(Way::Memory);
        context.counters.moved(way, count, timer.and_then(|timer| timer.elapsed()));
        sending.head.drain(..count as usize);
    }
}

/// Sends a beginning of a range of a file.
fn send_piece(
    stream: &mut Stream,
    form: &Arc<Representation>,
    range: Range<u64>,
    budget_bytes: &mut u64,
    warm: &mut Range<u64>,
    context: &mut Context,
) -> Result<(Sent, Way), Progress> {
    if *budget_bytes == 0 {
        return Err(Progress::Turn);
    }
    let object = &form.object;
    if !warm.contains(&range.start) {
        *warm = range.start..range.end.min(range.start + PIECE_BYTES);
        if !object.is_resident(warm, context.clock.seconds()) {
            return Err(Progress::Cold(Arc::clone(form), range));
        }
    }
    let piece = range.start..range.end.min(warm.end);
    let (sent, way) = if object.is_settled(context.clock.now()) {
        let ns = context.clock.ns();
        if !object.is_intact_at(ns) {
            return Err(Progress::Changed);
        }
        if range.end - range.start > UNCORKED_BYTES_MAX {
            stream.cork(true);
        }
        let sent = stream.send_file(object.file(), piece, &mut context.copy);
        let is_last = sent == Sent::Bytes(range.end - range.start);
        if is_last && !object.looks_intact_at(ns) {
            return Err(Progress::Changed);
        }
        (sent, stream.latest_way())
    } else {
        let len = context.copy.len().min((piece.end - piece.start) as usize);
        let read = rustix::io::pread(object.file(), &mut context.copy[..len], piece.start);
        let copied = match read {
            Ok(count) if count > 0 && object.is_intact() => &context.copy[..count],
            Ok(_) => return Err(Progress::Changed),
            Err(_) => return Err(Progress::Broken),
        };
        let more = piece.start + (copied.len() as u64) < range.end;
        let sent = stream.send(&[IoSlice::new(copied)], more);
        (sent, stream.way(Way::SendMethod(SendMethod::ReadSend)))
    };
    if let Sent::Bytes(count) = sent {
        *budget_bytes = budget_bytes.saturating_sub(count);
    }
    Ok((sent, way))
}
