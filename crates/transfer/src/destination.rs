//! The end that receives: it says which files it requests, and creates the copy.
//!
//! The session reads the stream of ssh, which has the lists. Each direct stream has a thread, which
//! writes the files of that stream.

mod accepted;
mod basis;
mod blocks;
mod chained;
mod committer;
mod content;
mod deletion;
mod earlier_copies;
mod folders;
mod journal;
mod listing;
mod open;
mod partial_file;
mod requested_file;
mod special;
mod tree;

pub use accepted::AcceptedPaths;

use crate::attributes::AttributeSetter;
use crate::block::BlockKey;
use crate::direct::{DataStream, DirectStreams};
use crate::error::Error;
use crate::frame::{self, FrameReader};
use crate::message::{ToDestination, ToSource};
use crate::options::{Durable, Options};
use crate::progress::{Progress, REPORT_INTERVAL};
use crate::setup::{OnFile, Setup};
use crate::summary::{FileError, Summary};
use crate::times::{Activity, Stopwatch};
use chained::{ChainMember, MESSAGES_MAX, PassedOn};
use committer::Batch;
use folders::DoneFolder;
use listing::DestinationSession;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};
use tree::Tree;

/// The interval at which it is noticed that no stream is left for the last files.
const END_INTERVAL: Duration = Duration::from_millis(500);
/// The time without an open stream after which the last files do not arrive: the source may send
/// through a stream whose handshake (10 s at most) is not complete at this end.
const END_TIME_MAX: Duration = Duration::from_secs(12);

/// Receives a copy from the source at the other end of the streams, into the destination that the
/// user named.
pub fn receive(
    from: impl Read + Send,
    to: impl Write + Send,
    destination: &[u8],
    accepted: &AcceptedPaths,
    setup: Setup,
) -> Result<Summary, Error> {
    let Setup { options, direct, chain, on_file, progress, abort } = setup;
    let direct = direct.as_ref();
    // Neither makes folders.
    let makes_none = options.dry_run || options.replacement.only_existing;
    let tree = Tree::new(makes_none, options.replacement);
    let shared = Shared {
        destination,
        direct,
        chain: chain.map(ChainMember::new),
        saved_bytes: AtomicU64::new(0),
        block_key: OnceLock::new(),
        setter: AttributeSetter::new(options.preserve),
        options,
        tree: Mutex::new(tree),
        batch: Mutex::default(),
        on_file,
        progress,
        abort: Mutex::new(Some(abort)),
        streams: Mutex::default(),
        changed: Condvar::new(),
        to: Mutex::new(Some(to)),
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            while shared.progress.wait(REPORT_INTERVAL) {
                // A failure shows in the session.
                let _ = shared.answer(&ToSource::Times(shared.progress.own_times()));
            }
        });
        let session = DestinationSession::new(&shared, accepted);
        let result = if let Some(chain) = &shared.chain {
            let (passed_on_tx, passed_on_rx) = mpsc::sync_channel(MESSAGES_MAX);
            start_chain(scope, &shared, chain);
            let shared = &shared;
            scope.spawn(move || chained::read_control(from, &passed_on_tx, shared, chain));
            session.run(PassedOn(passed_on_rx))
        } else {
            if let Some(direct) = direct {
                let shared = &shared;
                scope.spawn(move || {
                    while let Some(stream) = direct.next() {
                        receive_through(scope, stream, shared, direct);
                    }
                });
            }
            session.run(FrameReader::new(from))
        };
        shared.end(result)
    })
}

/// Starts the threads of a host of a chain.
fn start_chain<'s, W: Write + Send>(
    scope: &'s Scope<'s, '_>,
    shared: &'s Shared<'_, W>,
    chain: &'s ChainMember,
) {
    scope.spawn(|| chain.link.run(&chain.queue));
    scope.spawn(move || chained::report(shared, chain));
    if let Some(direct) = shared.direct {
        scope.spawn(move || chained::receive(scope, shared, direct, chain));
    }
}

/// Receives content through a direct stream, on a new thread.
fn receive_through<'s, W: Write + Send>(
    scope: &'s Scope<'s, '_>,
    stream: DataStream,
    shared: &'s Shared<'_, W>,
    direct: &'s DirectStreams,
) {
    scope.spawn(move || {
        let (id, from) = (stream.id(), stream.into_reader());
        let result = take_stream(FrameReader::new(from), shared, direct, id);
        direct.forget(id);
        if let Err(error) = result {
            shared.fail(error);
        }
    });
}

/// Takes the messages of a direct stream, until the stream or the session ends.
fn take_stream<W: Write + Send>(
    mut frames: FrameReader<impl Read>,
    shared: &Shared<'_, W>,
    direct: &DirectStreams,
    id: u64,
) -> Result<(), Error> {
    let (mut is_used, mut counted) = (false, 0);
    let mut watch = Stopwatch::new(shared.progress.clocks());
    loop {
        watch.skip();
        let (message, data) = match frames.next::<ToDestination>() {
            _ if shared.streams().is_over => return Ok(()),
            Ok(Some((ToDestination::StreamDone, _))) => return Ok(()),
            Ok(Some(next)) => next,
            // A second address of this host answered too late.
            Ok(None) if !is_used => return Ok(()),
            Ok(None) => return Err(Error::Connection(std::io::ErrorKind::UnexpectedEof.into())),
            Err(error) => return Err(error),
        };
        if !std::mem::replace(&mut is_used, true) {
            direct.mark_used(id);
        }
        direct.add_bytes(data.len() as u64);
        watch.lap(Activity::Stream);
        shared.take_content(message, data)?;
        watch.lap(Activity::Storage);
        let saved = frames.saved_bytes();
        shared.saved_bytes.fetch_add(saved - std::mem::replace(&mut counted, saved), Relaxed);
    }
}

/// What the streams of a destination share.
struct Shared<'a, W> {
    destination: &'a [u8],
    direct: Option<&'a DirectStreams>,
    /// `None` for a destination that is not part of a chain.
    chain: Option<ChainMember>,
    /// The key of all hashes of blocks, which the source sent first.
    block_key: OnceLock<BlockKey>,
    /// The bytes that compression saved in direct streams.
    saved_bytes: AtomicU64,
    options: Options,
    setter: AttributeSetter,
    tree: Mutex<Tree>,
    batch: Mutex<Batch>,
    on_file: OnFile,
    progress: Progress,
    /// Ends the stream of ssh, which the session may wait for.
    abort: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    streams: Mutex<Streams>,
    /// All requested files are here, or a stream failed.
    changed: Condvar,
    /// The stream to the source; `None` once the source was told the end.
    to: Mutex<Option<W>>,
}

/// How the streams end.
#[derive(Debug, Default)]
struct Streams {
    /// Whether everything was sent.
    is_over: bool,
    /// The failure of a direct stream.
    failure: Option<Error>,
}

impl<W: Write> Shared<'_, W> {
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn batch(&self) -> MutexGuard<'_, Batch> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the session with this result of its lists.
    fn end(&self, result: Result<Summary, Error>) -> Result<Summary, Error> {
        let result = self.streams().failure.take().map_or(result, Err);
        // What is whole stays after a failure.
        let ended = self.end_batches();
        let result = result.and_then(|summary| ended.map(|()| summary));
        self.progress.end();
        let _ = self.answer(&ToSource::Times(self.progress.own_times()));
        // Before the streams close, so that the source knows the reason.
        let told = self.tell_end(&result);
        if let Some(chain) = &self.chain {
            if result.is_ok() {
                // The next host may lack content that this host has.
                chain.wait_for_end(None);
            }
            chain.close();
        }
        if let Some(direct) = self.direct {
            direct.end();
        }
        result.and_then(|summary| told.map(|()| summary))
    }

    /// Ends the session because of a direct stream.
    fn fail(&self, error: Error) {
        if self.streams().is_over {
            return;
        }
        let is_broken = matches!(error, Error::Connection(_));
        let result = Err(error);
        // The session waits for the source, which ends the session when it knows the reason.
        let _ = self.tell_end(&result);
        self.streams().failure = result.err();
        let tree = self.tree();
        self.changed.notify_all();
        drop(tree);
        let abort = self.abort.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(abort) = abort.filter(|_| is_broken) {
            abort();
        }
    }

    /// Sends the last message, unless it was sent.
    fn tell_end(&self, result: &Result<Summary, Error>) -> Result<(), Error> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        let last = match result {
            Ok(summary) => ToSource::Done(summary.clone()),
            // The destination of a broken connection ends without a word.
            Err(Error::Connection(_)) => {
                *to = None;
                return Ok(());
            }
            Err(Error::Destination { path, problem }) => {
                ToSource::BadDestination { path: path.clone(), problem: problem.clone() }
            }
            Err(error) => ToSource::GaveUp(error.to_string()),
        };
        let Some(stream) = to.as_mut() else { return Ok(()) };
        let written = frame::write(stream, &last, &[]);
        let written = written.and_then(|()| stream.flush().map_err(Error::Connection));
        // A host of a chain goes on to report that it is alive.
        if self.chain.is_none() || result.is_err() {
            *to = None;
        }
        written
    }

    /// Sends an answer.
    fn answer(&self, answer: &ToSource) -> Result<(), Error> {
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(to) = to.as_mut() else { return Ok(()) };
        frame::write(to, answer, &[])?;
        to.flush().map_err(Error::Connection)
    }

    /// Gives folders their attributes, after all of their entries.
    fn end_folders(&self, tree: &mut Tree, folders: Vec<DoneFolder>) {
        for folder in folders {
            let collected = self.collect_extras(tree, &folder);
            if self.options.dry_run {
                continue;
            }
            let DoneFolder { path, open, attributes, old, .. } = folder;
            let keeps = self.options.replacement.keeps_folders && old.is_some();
            let attributes = attributes.filter(|_| !keeps);
            let done = open.and_then(|open| collected.map(|()| open));
            let done = done.and_then(|open| match attributes {
                Some(attributes) => {
                    self.setter.set(&open, &attributes, attributes.mtime, old.as_ref())
                }
                None => Ok(()),
            });
            if let Err(errno) = done {
                let error = FileError::new(&path, &std::io::Error::from(errno));
                tree.summary.add_error(FileError { is_at_destination: true, ..error });
            }
        }
    }

    /// Writes the names to the disk, which are in memory after the renames.
    fn sync_names(&self) {
        let destination = self.tree().destination.clone();
        if let (Durable::Batch, Some(destination)) = (self.options.durable, destination) {
            // An error was one of content, which the sync before the names reports.
            let _ = rustix::fs::syncfs(&*destination);
        }
    }

    /// Waits until all requested files are here, after everything was sent.
    fn wait_for_files(&self) -> Result<(), Error> {
        self.end_batches()?;
        let mut without_stream = Instant::now();
        let mut tree = self.tree();
        while !tree.is_complete() {
            if let Some(failure) = self.streams().failure.take() {
                return Err(failure);
            }
            // A stream is forgotten after its last message was taken.
            if self.direct.is_some_and(|direct| direct.open() > 0) {
                without_stream = Instant::now();
            }
            // The source of a chain finds out whether a host fails.
            let may_wait = self.chain.is_some() || without_stream.elapsed() <= END_TIME_MAX;
            if self.direct.is_none() || !may_wait {
                return Err(Error::Protocol("an end before the content of all files"));
            }
            let waited = self.changed.wait_timeout(tree, END_INTERVAL);
            tree = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.streams().is_over = true;
        Ok(())
    }
}
