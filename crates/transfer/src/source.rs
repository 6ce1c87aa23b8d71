//! The end that sends: it walks the sources, lists what is found, and sends the files that the
//! destination requests.
//!
//! The session walks, lists and takes the answers. Each stream has a thread, which reads the files
//! that it sends. The stream of ssh sends content until a direct stream does.

mod compressor;
mod content;
mod fan_out;
mod found;
mod frame_writer;
mod implied;
mod jobs;
mod large_file;
mod named;
mod pace;
mod reading;
mod requested;
mod stream_count;
mod walk;

pub use fan_out::{Host, HostEnd, HostResult, send_to_all};
pub use named::{kept_names, open_named, split};
pub use reading::next_data;

use crate::block::BlockKey;
use crate::direct::{DataStream, DirectStreams, STREAM_BYTES_MAX, StreamCount};
use crate::error::Error;
use crate::frame::{self, FrameReader};
use crate::message::{BATCH_MAX, Held, Kind, Listed, ToDestination, ToSource, UNANSWERED_MAX};
use crate::options::{Delta, Options};
use crate::progress::{Progress, REPORT_INTERVAL};
use crate::setup::{OnFile, Setup};
use crate::summary::Summary;
use content::{ContentSender, ContentSettings};
use found::FoundFile;
use frame_writer::FrameWriter;
use jobs::{Jobs, StreamKind};
use large_file::LargeFile;
use pace::Pace;
use requested::Requested;
use std::collections::VecDeque;
use std::io::{BufWriter, Read, Write};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};
use walk::{Found, Walk, failure};

/// A group of small files that one stream sends has so many bytes.
const GROUP_BYTES: u64 = 512 << 10;
/// The most folders of a group, which are open.
const GROUP_FOLDERS_MAX: usize = 8;
/// The bytes of lists that wait in memory.
const CONTROL_BUFFER_BYTES: usize = 64 << 10;
/// The most files of a group.
const GROUP_FILES_MAX: usize = 256;
/// The most bytes of a list, estimated. Attributes make the entries of some files large.
const LIST_BYTES: usize = 256 << 10;
/// The most folders, done and with files that were not sent yet, which are kept open.
const PENDING_FOLDERS_MAX: usize = 256;
/// The time for the destination's reason to arrive after the connection failed.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends these sources to the destination at the other end of the streams.
pub fn send(
    from: impl Read + Send,
    to: impl Write + Send,
    sources: &[Vec<u8>],
    setup: Setup,
) -> Result<Summary, Error> {
    let Setup { options, direct, on_file, progress, abort, .. } = setup;
    let direct = direct.as_ref();
    let (jobs, pace) = (Jobs::default(), Pace::new(options.rate_max));
    let settings = ContentSettings::new(&options, pace, on_file, progress.clone())?;
    let control = Control::new(to);
    let ssh_bytes = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| take_answers(from, &jobs, &progress));
        scope.spawn(|| report_times(&progress, &control));
        if let Some(direct) = direct {
            send_directly(scope, &jobs, direct, &settings);
        }
        scope.spawn(|| {
            let kind = StreamKind::Ssh;
            ContentSender::new(&jobs, kind, &settings, &control, &ssh_bytes, u64::MAX).run();
        });
        let session = SourceSession::new(&control, &jobs, sources, options, &settings);
        let result = session.run();
        jobs.end();
        progress.end();
        if let Some(direct) = direct {
            direct.end();
        }
        if let Err(Error::Connection(_)) = result {
            // A thread may wait for the stream of ssh.
            abort();
        }
        // The destination's reader of this stream ends, and then the reader of answers here.
        control.close();
        result
    })
}

/// Reports the times of this end to the destination, until the transfer ends.
fn report_times(progress: &Progress, mut control: &Control<impl Write>) {
    while progress.wait(REPORT_INTERVAL) {
        let times = ToDestination::Times(progress.own_times());
        // A failure shows in the session.
        let _ = control.write_frame(&times, &[]).and_then(|()| control.flush());
    }
}

/// Sends content through direct streams, as they open.
fn send_directly<'s>(
    scope: &'s Scope<'s, '_>,
    jobs: &'s Jobs,
    direct: &'s DirectStreams,
    settings: &'s ContentSettings,
) {
    match direct.count() {
        StreamCount::Exactly(count) => jobs.set_working_max(count.into()),
        StreamCount::Auto => {
            jobs.set_working_max(1);
            scope.spawn(|| stream_count::adapt(jobs, direct.bytes()));
        }
    }
    // ssh sends no content if a direct stream is open already.
    while let Some(stream) = direct.try_next() {
        send_through(scope, stream, jobs, direct, settings);
    }
    scope.spawn(move || {
        while let Some(stream) = direct.next() {
            send_through(scope, stream, jobs, direct, settings);
        }
    });
}

/// Sends content through a direct stream, on a new thread.
fn send_through<'s>(
    scope: &'s Scope<'s, '_>,
    stream: DataStream,
    jobs: &'s Jobs,
    direct: &'s DirectStreams,
    settings: &'s ContentSettings,
) {
    jobs.begin_direct();
    scope.spawn(move || {
        let (id, to) = (stream.id(), stream.into_writer());
        let (kind, sent) = (StreamKind::Direct, direct.bytes());
        ContentSender::new(jobs, kind, settings, to, sent, STREAM_BYTES_MAX)
            .with_first(|| direct.mark_used(id))
            .run();
        direct.forget(id);
        jobs.end_direct();
    });
}

/// Takes the answers of the destination, up to the last.
fn take_answers(from: impl Read, jobs: &Jobs, progress: &Progress) {
    let mut frames = FrameReader::new(from);
    loop {
        match frames.next::<ToSource>() {
            // Not answers that the session waits for.
            Ok(Some((ToSource::Times(times), _))) => progress.set_peer(times),
            Ok(Some((ToSource::Differing { place, ranges }, _))) => {
                match jobs.end_comparison(place, ranges) {
                    Ok(equal_bytes) => progress.add_bytes(equal_bytes),
                    Err(error) => return jobs.end_answers(error),
                }
            }
            Ok(Some((answer, _))) => {
                let is_last = !matches!(answer, ToSource::Requested { .. });
                jobs.add_answer(answer);
                if is_last {
                    return;
                }
            }
            Ok(None) => {
                let end = std::io::ErrorKind::UnexpectedEof;
                return jobs.end_answers(Error::Connection(end.into()));
            }
            Err(error) => return jobs.end_answers(error),
        }
    }
}

/// The stream of ssh, which the session and one thread write to.
struct Control<W: Write>(Mutex<Option<BufWriter<W>>>);

impl<W: Write> Control<W> {
    fn new(to: W) -> Self {
        Self(Mutex::new(Some(BufWriter::with_capacity(CONTROL_BUFFER_BYTES, to))))
    }

    fn lock(&self) -> MutexGuard<'_, Option<BufWriter<W>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the stream, and discards what waits in memory.
    fn close(&self) {
        drop(self.lock().take().map(BufWriter::into_parts));
    }
}

impl<W: Write> FrameWriter for &Control<W> {
    fn write_frame(&mut self, message: &ToDestination, data: &[u8]) -> Result<(), Error> {
        let mut to = self.lock();
        let to = to.as_mut().ok_or(Error::Connection(std::io::ErrorKind::BrokenPipe.into()))?;
        frame::write(to, message, data)
    }

    fn write_compressed_frame(
        &mut self,
        message: &ToDestination,
        data: &[u8],
    ) -> Result<(), Error> {
        let mut to = self.lock();
        let to = to.as_mut().ok_or(Error::Connection(std::io::ErrorKind::BrokenPipe.into()))?;
        frame::write_compressed(to, message, data)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.lock().as_mut().map_or(Ok(()), Write::flush).map_err(Error::Connection)
    }
}

/// What is listed and waits for its turn, in the order of the list.
#[derive(Debug)]
enum Pending {
    File(FoundFile),
    FolderDone(u64),
}

/// What the destination has of a file that it requests.
#[derive(Debug, Default)]
struct RequestedFile {
    /// The ranges that the destination has.
    held: Vec<Range<u64>>,
    is_comparable: bool,
}

struct SourceSession<'s, C> {
    /// Where lists go.
    control: C,
    jobs: &'s Jobs,
    /// Whether the answers state what would be requested.
    is_dry_run: bool,
    delta: Delta,
    block_key: BlockKey,
    on_file: &'s OnFile,
    progress: &'s Progress,
    walk: Walk,
    is_walked: bool,
    pending: VecDeque<Pending>,
    /// What the destination requests of the first regular files of `pending`; `None`: nothing.
    requested: VecDeque<Option<RequestedFile>>,
    /// Regular files that are listed and not answered.
    unanswered: usize,
    /// Folders among `pending` that hold files: an upper limit of the open ones.
    pending_folders: usize,
    /// Small files for the next job.
    group: Vec<FoundFile>,
    group_bytes: u64,
    /// The changes of the folder within the group.
    group_folders: usize,
    /// Folders that the next message ends.
    done_folders: Vec<u64>,
    summary: Option<Summary>,
}

impl<'s, C: FrameWriter> SourceSession<'s, C> {
    /// A session that writes its lists to `control`.
    fn new(
        control: C,
        jobs: &'s Jobs,
        sources: &[Vec<u8>],
        options: Options,
        settings: &'s ContentSettings,
    ) -> Self {
        Self {
            control,
            jobs,
            is_dry_run: options.dry_run,
            delta: options.delta,
            block_key: settings.block_key,
            on_file: &settings.on_file,
            progress: &settings.progress,
            walk: Walk::new(sources, options),
            is_walked: false,
            pending: VecDeque::new(),
            requested: VecDeque::new(),
            unanswered: 0,
            pending_folders: 0,
            group: Vec::new(),
            group_bytes: 0,
            group_folders: 0,
            done_folders: Vec::new(),
            summary: None,
        }
    }

    fn run(mut self) -> Result<Summary, Error> {
        match self.transfer() {
            Err(Error::Connection(failure)) => Err(self.reason_for(failure)),
            result => result,
        }
    }

    /// Why the connection failed: a destination that gives up reports the reason and closes the
    /// connection.
    fn reason_for(&mut self, failure: std::io::Error) -> Error {
        let deadline = Instant::now() + REASON_TIMEOUT;
        while let Some(answer) = self.jobs.wait_for_answer(deadline) {
            match self.take(answer) {
                Ok(()) => {}
                Err(Error::Connection(_)) => break,
                Err(reason) => return reason,
            }
        }
        Error::Connection(failure)
    }

    fn transfer(&mut self) -> Result<Summary, Error> {
        let is_single_file = self.walk.is_single_file();
        let has_several_sources = self.walk.has_several_sources();
        let block_key = self.block_key;
        self.write(&ToDestination::Begin { is_single_file, has_several_sources, block_key })?;
        loop {
            while let Some(answer) = self.jobs.try_answer()? {
                self.take(answer)?;
            }
            if let Some(failure) = self.jobs.take_failure() {
                return Err(failure);
            }
            let has_room = self.jobs.has_room();
            if has_room && self.add_next()? {
                continue;
            }
            let may_list =
                self.unanswered < UNANSWERED_MAX && self.pending_folders < PENDING_FOLDERS_MAX;
            if has_room && !self.is_walked && may_list {
                self.list()?;
            } else if self.is_walked && self.pending.is_empty() {
                break;
            } else {
                if self.jobs.is_idle() {
                    // No stream waits for a group that is full.
                    self.add_group();
                }
                self.end_folders()?;
                self.flush()?;
                let has_group = !self.group.is_empty();
                self.jobs.wait(|counts| {
                    (!has_room && counts.are_few()) || (has_group && counts.waiting == 0)
                })?;
            }
        }
        self.progress.end_walk();
        self.add_group();
        self.end_folders()?;
        self.flush()?;
        while !self.jobs.is_complete() {
            self.jobs.wait(|counts| counts.incomplete == 0)?;
            if let Some(answer) = self.jobs.try_answer()? {
                self.take(answer)?;
            }
        }
        self.write(&ToDestination::Times(self.progress.own_times()))?;
        self.write(&ToDestination::End)?;
        self.flush()?;
        while self.summary.is_none() {
            self.jobs.wait(|_| false)?;
            if let Some(answer) = self.jobs.try_answer()? {
                self.take(answer)?;
            }
        }
        let mut summary = self.summary.take().unwrap_or_default();
        summary.entries = self.walk.found_entries();
        Ok(summary)
    }

    fn take(&mut self, answer: ToSource) -> Result<(), Error> {
        match answer {
            ToSource::Requested { count, bits, held, comparable } => {
                let answer = Requested { count, bits, held, comparable };
                self.take_requested(answer)?;
            }
            // The thread that reads answers handles these.
            ToSource::Times(_) | ToSource::Differing { .. } => {}
            ToSource::Chain(_) => return Err(Error::Protocol("a report of a chain")),
            ToSource::Done(summary) => self.summary = Some(summary),
            ToSource::BadDestination { path, problem } => {
                return Err(Error::Destination { path, problem });
            }
            ToSource::GaveUp(reason) => return Err(Error::Remote(reason)),
        }
        Ok(())
    }

    fn take_requested(&mut self, answer: Requested) -> Result<(), Error> {
        let count = answer.count as usize;
        if count > self.unanswered {
            return Err(Error::Protocol("an answer to nothing"));
        }
        answer.check(answer.count).map_err(Error::Protocol)?;
        self.unanswered -= count;
        let before = self.requested.len();
        let files = (0..answer.count).map(|at| answer.has(at).then(RequestedFile::default));
        self.requested.extend(files);
        let Requested { held, comparable, .. } = answer;
        for Held { index, ranges } in held {
            if let Some(Some(file)) = self.requested.get_mut(before + index as usize) {
                file.held = ranges.into_iter().map(|(start, end)| start..end).collect();
            }
        }
        for index in comparable {
            if let Some(Some(file)) = self.requested.get_mut(before + index as usize) {
                file.is_comparable = true;
            }
        }
        Ok(())
    }

    fn write(&mut self, message: &ToDestination) -> Result<(), Error> {
        self.control.write_frame(message, &[])
    }

    /// Sends everything that waits in memory.
    fn flush(&mut self) -> Result<(), Error> {
        self.control.flush()
    }

    /// Lists the next entries.
    fn list(&mut self) -> Result<(), Error> {
        let mut listed = Vec::new();
        let mut bytes = 0;
        while listed.len() < BATCH_MAX && bytes < LIST_BYTES {
            match self.walk.next() {
                Some(Found::Listed(item, file)) => {
                    bytes += estimate(&item);
                    listed.push(item);
                    if let Some(file) = file {
                        self.unanswered += 1;
                        self.pending.push_back(Pending::File(file));
                    }
                }
                Some(Found::FolderDone(id)) => {
                    self.pending_folders += 1;
                    self.pending.push_back(Pending::FolderDone(id));
                }
                Some(Found::Failed(error)) => self.write(&ToDestination::Failed(error))?,
                None => {
                    self.is_walked = true;
                    break;
                }
            }
        }
        self.progress.set_entries(self.walk.found_entries());
        if !listed.is_empty() {
            self.write(&ToDestination::List(listed))?;
            // The destination answers while this end walks on.
            self.flush()?;
        }
        if self.is_walked {
            self.write(&ToDestination::Walked)?;
        }
        Ok(())
    }

    /// Adds the next file that was answered to the jobs, or ends a folder; false if neither is
    /// next.
    fn add_next(&mut self) -> Result<bool, Error> {
        if let Some(Pending::File(_)) = self.pending.front()
            && self.requested.is_empty()
        {
            return Ok(false);
        }
        match self.pending.pop_front() {
            Some(Pending::FolderDone(id)) => {
                self.pending_folders -= 1;
                self.done_folders.push(id);
                if self.done_folders.len() == BATCH_MAX {
                    self.end_folders()?;
                }
            }
            Some(Pending::File(file)) => {
                if let Some(requested) = self.requested.pop_front().flatten() {
                    let RequestedFile { held, is_comparable } = requested;
                    let held_bytes: u64 = held.iter().map(|range| range.end - range.start).sum();
                    self.progress.request(file.size.saturating_sub(held_bytes));
                    self.add_file(FoundFile { held, is_comparable, ..file })?;
                }
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    fn add_file(&mut self, found: FoundFile) -> Result<(), Error> {
        if self.is_dry_run {
            (self.on_file)(&found.relative_path());
            return Ok(());
        }
        if found.is_small {
            let is_folder_last =
                |last: &FoundFile| std::sync::Arc::ptr_eq(&last.folder, &found.folder);
            self.group_folders += usize::from(!self.group.last().is_some_and(is_folder_last));
            self.group_bytes += found.size;
            self.group.push(found);
            let is_full = self.group_bytes >= GROUP_BYTES
                || self.group.len() >= GROUP_FILES_MAX
                || self.group_folders >= GROUP_FOLDERS_MAX;
            if is_full {
                self.add_group();
            }
            return Ok(());
        }
        (self.on_file)(&found.relative_path());
        let path = found.folder.path_of(&found.name);
        match reading::open(&found) {
            Ok((file, stat)) => {
                self.jobs.add_large(LargeFile::new(found, path, file, stat, self.delta));
                Ok(())
            }
            Err(errno) => {
                let error = failure(&path, errno);
                self.write(&ToDestination::Unreadable { id: found.id, bytes: 0, error })
            }
        }
    }

    fn add_group(&mut self) {
        (self.group_bytes, self.group_folders) = (0, 0);
        if !self.group.is_empty() {
            self.jobs.add_small(std::mem::take(&mut self.group));
        }
    }

    fn end_folders(&mut self) -> Result<(), Error> {
        if self.done_folders.is_empty() {
            return Ok(());
        }
        let folders = std::mem::take(&mut self.done_folders);
        self.write(&ToDestination::FoldersDone(folders))
    }
}

/// About the bytes of an item in a list.
fn estimate(item: &Listed) -> usize {
    let xattrs = |attributes: &crate::message::Attributes| -> usize {
        attributes.xattrs.iter().map(|(name, value)| name.len() + value.len() + 8).sum()
    };
    40 + match item {
        Listed::Folder(folder) => folder.name.len() + folder.attributes.as_ref().map_or(0, xattrs),
        Listed::Entry(entry) => {
            let target = if let Kind::Symlink(target) = &entry.kind { target.len() } else { 0 };
            entry.name.len() + target + xattrs(&entry.attributes)
        }
    }
}
