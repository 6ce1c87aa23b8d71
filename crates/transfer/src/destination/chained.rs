//! A destination that is a host of a chain: it stores the content, and passes the content on.
//!
//! The stream of ssh has a thread, because the source may change the chain while the session waits
//! for content. The host before sends the content through one connection at a time.

use crate::chain::{Body, Frame, FrameQueue, Link, OpenFile};
use crate::destination::Shared;
use crate::destination::listing::Messages;
use crate::direct::{DataStream, DirectRequest, DirectStreams};
use crate::error::Error;
use crate::frame::FrameReader;
use crate::message::{ChainReport, ToDestination, ToSource};
use crate::times::{Activity, Stopwatch};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// The interval of reports, if there is something new.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// The interval of reports that state nothing new. They show the source that this host is alive.
const ALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// The most messages of the source that wait for the session.
pub const MESSAGES_MAX: usize = 256;

/// A file by its entry and the attempt to read it.
type LastFile = ((u64, u32), Arc<OpenFile>);

/// What a host of a chain adds to a destination.
#[derive(Debug)]
pub struct ChainMember {
    pub queue: FrameQueue,
    pub link: Link,
    /// The number of the connection whose frames are taken. Frames of earlier connections are not
    /// taken, because the present connection sends these frames again. The lock is held while a
    /// frame is taken.
    reader: Mutex<u64>,
    /// The frames that were taken.
    frames: AtomicU64,
    /// The bytes of data in these frames. Hashes count as the blocks that they stand for.
    bytes: AtomicU64,
    /// The file that was opened last, to send its ranges.
    last_file: Mutex<Option<LastFile>>,
    /// Where the chunk of the present frame was stored.
    stored: Mutex<Option<Arc<OpenFile>>>,
    /// Whether the stream of ssh ended.
    has_control_ended: Mutex<bool>,
    control_ended: Condvar,
}

impl ChainMember {
    /// A host of the chain with these connections.
    pub fn new(request: DirectRequest) -> Self {
        Self {
            queue: FrameQueue::new(false),
            link: Link::new(request),
            reader: Mutex::default(),
            frames: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            last_file: Mutex::default(),
            stored: Mutex::default(),
            has_control_ended: Mutex::new(false),
            control_ended: Condvar::new(),
        }
    }

    /// Records that the chunk of the present frame is in this file, from which the chunk can be
    /// sent.
    pub fn set_stored(&self, id: u64, attempt: u32, file: &File) {
        let mut last = self.last_file.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(key, _)| *key != (id, attempt)) {
            *last = self.queue.open_file(file).map(|open| ((id, attempt), open));
        }
        let open = last.as_ref().map(|(_, open)| Arc::clone(open));
        *self.stored.lock().unwrap_or_else(PoisonError::into_inner) = open;
    }

    fn reader(&self) -> MutexGuard<'_, u64> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a new connection the one whose frames are taken. Returns the number of the connection,
    /// and of the next frame.
    fn begin_reader(&self) -> (u64, u64) {
        let mut reader = self.reader();
        *reader += 1;
        (*reader, self.frames.load(Relaxed))
    }

    /// Ends the connections of the chain.
    pub fn close(&self) {
        self.link.close(&self.queue);
    }

    fn end_control(&self) {
        *self.has_control_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.control_ended.notify_all();
    }

    /// Waits until the stream of ssh ended, for at most a time. True if it ended.
    pub fn wait_for_end(&self, time: Option<Duration>) -> bool {
        let deadline = time.map(|time| Instant::now() + time);
        let mut has_ended = self.has_control_ended.lock().unwrap_or_else(PoisonError::into_inner);
        while !*has_ended {
            has_ended = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => break,
                Some(left) => {
                    let waited = self.control_ended.wait_timeout(has_ended, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.control_ended.wait(has_ended).unwrap_or_else(PoisonError::into_inner),
            };
        }
        *has_ended
    }

    fn report(&self) -> ChainReport {
        ChainReport {
            frames: self.frames.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            is_full: self.queue.is_full(),
            failure: self.link.failure(),
        }
    }
}

/// The messages of the source that the thread of the stream of ssh passes on.
pub struct PassedOn(pub Receiver<Result<ToDestination, Error>>);

impl Messages for PassedOn {
    fn next_message(&mut self) -> Result<Option<(ToDestination, &[u8])>, Error> {
        match self.0.recv() {
            Ok(message) => message.map(|message| Some((message, &[][..]))),
            Err(_) => Ok(None),
        }
    }

    fn saved_bytes(&self) -> u64 {
        0
    }
}

/// Reads the stream of ssh: changes the chain as the source orders, and passes on the other
/// messages.
pub fn read_control<W: Write + Send>(
    from: impl Read,
    passed_on: &SyncSender<Result<ToDestination, Error>>,
    shared: &Shared<'_, W>,
    chain: &ChainMember,
) {
    let mut frames = FrameReader::new(from);
    let mut has_ended = false;
    let error = loop {
        match frames.next::<ToDestination>() {
            Ok(Some((ToDestination::Successor { order, successor }, _))) => {
                chain.link.order(&chain.queue, order, successor);
            }
            Ok(Some((ToDestination::Released(number), _))) => chain.queue.release(number),
            Ok(Some((ToDestination::Times(times), _))) => shared.progress.set_peer(times),
            // The session reads nothing after the end of the lists, and must not delay the chain.
            Ok(Some(_)) if has_ended => {}
            Ok(Some((message, _))) => {
                has_ended = matches!(message, ToDestination::End);
                // The session may be over.
                let _ = passed_on.send(Ok(message));
            }
            Ok(None) => break Error::Connection(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => break error,
        }
    };
    chain.end_control();
    shared.fail(error);
    // A thread may wait until there is room for a frame.
    chain.close();
    let end = Error::Connection(io::ErrorKind::UnexpectedEof.into());
    let _ = passed_on.send(Err(end));
}

/// Reports to the source how far this host is, until the stream of ssh ends.
pub fn report<W: Write + Send>(shared: &Shared<'_, W>, chain: &ChainMember) {
    let (mut last, mut at) = (None, Instant::now());
    while !chain.wait_for_end(Some(REPORT_INTERVAL)) {
        let report = chain.report();
        if last.as_ref() != Some(&report) || at.elapsed() >= ALIVE_INTERVAL {
            at = Instant::now();
            // A failure shows in the session.
            let _ = shared.answer(&ToSource::Chain(report.clone()));
            last = Some(report);
        }
    }
}

/// Receives content from the host before, and from another host if the source changes the chain.
pub fn receive<'s, W: Write + Send>(
    scope: &'s Scope<'s, '_>,
    shared: &'s Shared<'_, W>,
    direct: &'s DirectStreams,
    chain: &'s ChainMember,
) {
    let mut present: Option<(TcpStream, ScopedJoinHandle<'_, ()>)> = None;
    while let Some(stream) = direct.next() {
        let Ok(socket) = stream.socket() else {
            direct.forget(stream.id());
            continue;
        };
        let number = chain.begin_reader();
        let before = present.take().map(|(socket, reader)| {
            let _ = socket.shutdown(Shutdown::Both);
            reader
        });
        let reader = scope.spawn(move || {
            let id = stream.id();
            let result = take_stream(stream, (number, before), shared, (direct, chain));
            direct.forget(id);
            match result {
                // The source decides who sends the other frames.
                Ok(()) | Err(Error::Connection(_)) => {}
                Err(error) => shared.fail(error),
            }
        });
        present = Some((socket, reader));
    }
}

/// Takes the frames of one connection, as long as no later connection replaces it. `before` is the
/// reader of the connection before, which may still wait for room for its last frame.
fn take_stream<W: Write + Send>(
    mut stream: DataStream,
    ((reader, number), mut before): ((u64, u64), Option<ScopedJoinHandle<'_, ()>>),
    shared: &Shared<'_, W>,
    (direct, chain): (&DirectStreams, &ChainMember),
) -> Result<(), Error> {
    direct.mark_used(stream.id());
    stream.send_number(number).map_err(Error::Connection)?;
    let mut frames = FrameReader::new(stream.into_reader());
    let mut watch = Stopwatch::new(shared.progress.clocks());
    loop {
        watch.skip();
        let Some(number) = frames.next_number()? else { return Ok(()) };
        let Some((message, data)) = frames.next::<ToDestination>()? else { return Ok(()) };
        watch.lap(Activity::Stream);
        let bytes = data.len() as u64;
        let offset = if let ToDestination::Chunk { offset, .. } = message { offset } else { 0 };
        // A host that compares blocks is as fast as its disk, not as the network.
        let processed = if let ToDestination::Blocks { lengths, .. } = &message {
            lengths.iter().copied().map(u64::from).sum()
        } else {
            bytes
        };
        let stored = {
            let present = chain.reader();
            if *present != reader {
                return Ok(());
            }
            if number != chain.frames.load(Relaxed) {
                return Err(Error::Protocol("a frame that is not the next"));
            }
            shared.take_content(message, data)?;
            chain.bytes.fetch_add(processed, Relaxed);
            chain.frames.fetch_add(1, Relaxed);
            // Under the lock, because the next connection stores its first chunk there.
            chain.stored.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        direct.add_bytes(bytes);
        watch.lap(Activity::Storage);
        let last = frames.last_frame();
        let body = match stored.filter(|_| !last.is_compressed) {
            Some(file) => Body::File(file, offset..offset + bytes),
            None => Body::Memory(last.data.to_vec()),
        };
        if let Some(before) = before.take() {
            // The frames stay in order. A panic shows in the scope.
            let _ = before.join();
        }
        if !chain.queue.push(Frame { head: last.head, body }) {
            return Ok(());
        }
        watch.lap(Activity::Stream);
    }
}
