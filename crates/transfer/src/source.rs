//! The end that sends: it walks the sources, lists what is found, and sends the files that the
//! destination requests.

use crate::attributes;
use crate::error::Error;
use crate::frame::{self, DATA_BYTES_MAX, FrameReader};
use crate::message::{
    BATCH_MAX, Kind, Listed, Packed, Time, ToDestination, ToSource, UNANSWERED_MAX, crc,
};
use crate::options::Options;
use crate::summary::{FileError, Summary};
use crate::walk::{Found, FoundFile, Walk, failure};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::Duration;

/// A file of up to this many bytes is packed with others.
const SMALL_FILE_BYTES: usize = 128 << 10;
/// A pack is sent once it has so many bytes.
const PACK_BYTES: usize = 512 << 10;
/// The most items of a pack.
const PACK_ITEMS_MAX: usize = 4096;
/// The most bytes of a list, estimated. Attributes make the entries of some files large.
const LIST_BYTES: usize = 256 << 10;
/// The most files, listed and not sent yet, whose folders are kept open.
const PENDING_FOLDERS_MAX: usize = 256;
/// The time for the destination's reason to arrive after the connection failed.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a file that changes while it is read is read.
const READS_MAX: usize = 3;

/// Sends these sources to the destination at the other end of the streams.
pub fn send(
    from: impl Read + Send,
    to: impl Write,
    sources: &[Vec<u8>],
    options: Options,
) -> Result<Summary, Error> {
    let (tx, rx) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut frames = FrameReader::new(from);
            loop {
                let answer = frames.next::<ToSource>().map(|next| next.map(|(answer, _)| answer));
                let is_last = !matches!(answer, Ok(Some(ToSource::Requested { .. })));
                // The receiver of the channel is gone after a failure to send.
                if tx.send(answer).is_err() || is_last {
                    return;
                }
            }
        });
        SourceSession::new(to, rx, sources, options).run()
    })
}

type Answer = Result<Option<ToSource>, Error>;

/// What is listed and waits for its turn, in the order of the list.
#[derive(Debug)]
enum Pending {
    File(FoundFile),
    FolderDone(u64),
}

struct SourceSession<W: Write> {
    to: BufWriter<W>,
    answers: Receiver<Answer>,
    walk: Walk,
    is_walked: bool,
    pending: VecDeque<Pending>,
    /// Whether the destination requests the first regular files of `pending`.
    requested: VecDeque<bool>,
    /// Regular files that are listed and not answered.
    unanswered: usize,
    /// Folders among `pending` that hold files: an upper limit of the open ones.
    pending_folders: usize,
    pack: Pack,
    summary: Option<Summary>,
}

/// Small files that are sent together.
#[derive(Debug, Default)]
struct Pack {
    items: Vec<Packed>,
    data: Vec<u8>,
}

/// The content of a file, read at once.
struct Content {
    bytes: Vec<u8>,
    mtime: Time,
    /// Whether the file changed during each attempt to read it.
    has_changed: bool,
}

impl<W: Write> SourceSession<W> {
    fn new(to: W, answers: Receiver<Answer>, sources: &[Vec<u8>], options: Options) -> Self {
        Self {
            to: BufWriter::with_capacity(64 << 10, to),
            answers,
            walk: Walk::new(sources, options),
            is_walked: false,
            pending: VecDeque::new(),
            requested: VecDeque::new(),
            unanswered: 0,
            pending_folders: 0,
            pack: Pack::default(),
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
        while let Ok(answer) = self.answers.recv_timeout(REASON_TIMEOUT) {
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
        self.write(&ToDestination::Begin { is_single_file }, &[])?;
        loop {
            self.take_answers()?;
            if self.send_next()? {
                continue;
            }
            let has_room =
                self.unanswered < UNANSWERED_MAX && self.pending_folders < PENDING_FOLDERS_MAX;
            if !self.is_walked && has_room {
                self.list()?;
            } else if self.is_walked && self.pending.is_empty() {
                break;
            } else {
                self.flush()?;
                let answer = self.answers.recv().map_err(|_| Error::Protocol("no answer"))?;
                self.take(answer)?;
            }
        }
        self.send_pack()?;
        self.write(&ToDestination::End, &[])?;
        self.flush()?;
        while self.summary.is_none() {
            let answer = self.answers.recv().map_err(|_| Error::Protocol("no result"))?;
            self.take(answer)?;
        }
        let mut summary = self.summary.take().unwrap_or_default();
        summary.entries = self.walk.found_entries();
        Ok(summary)
    }

    /// Takes the answers that are here.
    fn take_answers(&mut self) -> Result<(), Error> {
        loop {
            match self.answers.try_recv() {
                Ok(answer) => self.take(answer)?,
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    fn take(&mut self, answer: Answer) -> Result<(), Error> {
        match answer? {
            Some(ToSource::Requested { count, bits }) => {
                let count = count as usize;
                if count > self.unanswered || bits.len() != count.div_ceil(8) {
                    return Err(Error::Protocol("an answer to nothing"));
                }
                self.unanswered -= count;
                self.requested.extend((0..count).map(|at| bits[at / 8] >> (at % 8) & 1 == 1));
            }
            Some(ToSource::Done(summary)) => self.summary = Some(summary),
            Some(ToSource::BadDestination { path, problem }) => {
                return Err(Error::Destination { path, problem });
            }
            Some(ToSource::GaveUp(reason)) => return Err(Error::Remote(reason)),
            None => {
                let end = std::io::ErrorKind::UnexpectedEof;
                return Err(Error::Connection(end.into()));
            }
        }
        Ok(())
    }

    fn write(&mut self, message: &ToDestination, data: &[u8]) -> Result<(), Error> {
        frame::write(&mut self.to, message, data)
    }

    /// Sends everything that waits in memory.
    fn flush(&mut self) -> Result<(), Error> {
        self.send_pack()?;
        self.to.flush().map_err(Error::Connection)
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
                Some(Found::Failed(error)) => self.write(&ToDestination::Failed(error), &[])?,
                None => {
                    self.is_walked = true;
                    break;
                }
            }
        }
        if !listed.is_empty() {
            self.write(&ToDestination::List(listed), &[])?;
            // The destination answers while this end walks on.
            self.to.flush().map_err(Error::Connection)?;
        }
        Ok(())
    }

    /// Sends the next file that was answered, or the end of a folder; false if there is none.
    fn send_next(&mut self) -> Result<bool, Error> {
        if let Some(Pending::File(_)) = self.pending.front()
            && self.requested.is_empty()
        {
            return Ok(false);
        }
        match self.pending.pop_front() {
            Some(Pending::FolderDone(id)) => {
                self.pending_folders -= 1;
                self.add_to_pack(Packed::FolderDone(id), &[])?;
            }
            Some(Pending::File(file)) => {
                let is_requested = self.requested.pop_front() == Some(true);
                if is_requested {
                    self.send_file(&file)?;
                }
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    fn add_to_pack(&mut self, item: Packed, data: &[u8]) -> Result<(), Error> {
        if self.pack.data.len() + data.len() > DATA_BYTES_MAX {
            self.send_pack()?;
        }
        self.pack.items.push(item);
        self.pack.data.extend_from_slice(data);
        if self.pack.data.len() >= PACK_BYTES || self.pack.items.len() >= PACK_ITEMS_MAX {
            self.send_pack()?;
        }
        Ok(())
    }

    fn send_pack(&mut self) -> Result<(), Error> {
        if self.pack.items.is_empty() {
            return Ok(());
        }
        let items = std::mem::take(&mut self.pack.items);
        frame::write(&mut self.to, &ToDestination::Pack(items), &self.pack.data)?;
        self.pack.data.clear();
        Ok(())
    }

    fn send_file(&mut self, found: &FoundFile) -> Result<(), Error> {
        let path = || found.folder.path_of(&found.name);
        let sent = open(found).and_then(|(file, stat)| {
            if stat.st_size as u64 <= SMALL_FILE_BYTES as u64 && !is_sparse(&stat) {
                read_small(&file, stat).map(Some)
            } else {
                Ok(None)
            }
            .map(|content| (file, stat, content))
        });
        match sent {
            Ok((_, _, Some(content))) => {
                let item = Packed::File {
                    id: found.id,
                    bytes: content.bytes.len() as u32,
                    crc: crc(&content.bytes),
                    mtime: content.mtime,
                };
                self.add_to_pack(item, &content.bytes)?;
                if content.has_changed {
                    self.write(&ToDestination::Failed(changed(&path())), &[])?;
                }
                Ok(())
            }
            Ok((file, stat, None)) => self.send_large(found, &file, &stat),
            Err(errno) => {
                let error = failure(&path(), errno);
                self.write(&ToDestination::Unreadable { id: found.id, error }, &[])
            }
        }
    }

    /// Sends a file in chunks, without its holes.
    fn send_large(&mut self, found: &FoundFile, file: &File, first: &Stat) -> Result<(), Error> {
        // The destination takes the frames in this order.
        self.send_pack()?;
        let path = found.folder.path_of(&found.name);
        let mut stat = *first;
        for attempt in 1..=READS_MAX {
            if attempt > 1 {
                self.write(&ToDestination::Restart(found.id), &[])?;
            }
            let size = match self.send_chunks(found.id, file, stat.st_size as u64)? {
                Ok(size) => size,
                Err(errno) => {
                    let error = failure(&path, errno);
                    return self.write(&ToDestination::Unreadable { id: found.id, error }, &[]);
                }
            };
            let now = match rustix::fs::fstat(file) {
                Ok(now) => now,
                Err(errno) => {
                    let error = failure(&path, errno);
                    return self.write(&ToDestination::Unreadable { id: found.id, error }, &[]);
                }
            };
            let is_unchanged = is_same(&now, &stat);
            if is_unchanged || attempt == READS_MAX {
                if !is_unchanged {
                    self.write(&ToDestination::Failed(changed(&path)), &[])?;
                }
                let mtime = attributes::mtime(&stat);
                return self.write(&ToDestination::FileDone { id: found.id, size, mtime }, &[]);
            }
            stat = now;
        }
        Ok(())
    }

    /// Sends the data of a file up to a size, and returns the size of what was read: files of /sys
    /// and of some file systems are shorter than their size. The inner error is one of the file.
    fn send_chunks(
        &mut self,
        id: u64,
        file: &File,
        size: u64,
    ) -> Result<Result<u64, Errno>, Error> {
        let mut buffer = vec![0; DATA_BYTES_MAX];
        let mut at = 0;
        while at < size {
            let (start, end) = match next_data(file, at, size) {
                Ok(Some(range)) => range,
                Ok(None) => break,
                Err(errno) => return Ok(Err(errno)),
            };
            at = start;
            while at < end {
                let requested = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
                let count = match file.read_at(&mut buffer[..requested], at) {
                    Ok(0) => return Ok(Ok(at)),
                    Ok(count) => count,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(error) => {
                        return Ok(Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)));
                    }
                };
                let data = &buffer[..count];
                self.write(&ToDestination::Chunk { id, offset: at, crc: crc(data) }, data)?;
                at += count as u64;
            }
        }
        Ok(Ok(size))
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

/// Opens a file that was found, unless something else than a file has its name now.
fn open(found: &FoundFile) -> rustix::io::Result<(File, Stat)> {
    // A named pipe that has the name now must not block.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&*found.folder, &found.name[..], flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::STALE);
    }
    Ok((file.into(), stat))
}

/// Reads a file of up to [`SMALL_FILE_BYTES`], again if the file changed during the read.
fn read_small(file: &File, mut stat: Stat) -> rustix::io::Result<Content> {
    for attempt in 1.. {
        let mut bytes = vec![0; stat.st_size as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        bytes.truncate(filled);
        let now = rustix::fs::fstat(file)?;
        let has_changed = !is_same(&now, &stat);
        let is_small = now.st_size as usize <= SMALL_FILE_BYTES;
        if !has_changed || attempt == READS_MAX || !is_small {
            return Ok(Content { bytes, mtime: attributes::mtime(&stat), has_changed });
        }
        stat = now;
    }
    Err(Errno::IO)
}

/// Whether a file did not change between two looks.
fn is_same(one: &Stat, other: &Stat) -> bool {
    let of = |stat: &Stat| {
        (stat.st_size, stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec)
    };
    of(one) == of(other)
}

fn is_sparse(stat: &Stat) -> bool {
    (stat.st_blocks as u64) * 512 < stat.st_size as u64
}

/// The next range with data at or after a place; `None` if only a hole follows.
fn next_data(file: &File, at: u64, size: u64) -> rustix::io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not know holes.
        Err(Errno::INVAL) => return Ok(Some((at, size))),
        Err(errno) => return Err(errno),
    };
    if start >= size {
        return Ok(None);
    }
    let end = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(size);
    Ok(Some((start, end.clamp(start, size))))
}

fn changed(path: &[u8]) -> FileError {
    FileError::new(path, &"it changed each time it was read: the copy may mix two versions")
}
