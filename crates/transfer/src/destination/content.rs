//! Receives the content of files, through any stream.

use crate::destination::Shared;
use crate::destination::partial_file::PartialFile;
use crate::destination::tree::{Place, Tree};
use crate::error::Error;
use crate::message::{Attributes, BATCH_MAX, Packed, Time, ToDestination, crc};
use rustix::fs::Stat;
use rustix::io::Errno;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The largest file: the largest offset of the kernel.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

const NOT_REQUESTED: Error = Error::Protocol("a file that is not requested");
const TOO_SHORT: Error = Error::Protocol("fewer bytes than it announced");

/// A file that is requested and not here.
#[derive(Debug)]
pub struct RequestedFile {
    pub place: Place,
    pub attributes: Attributes,
    /// What has the name now.
    pub old: Option<Stat>,
    pub is_linked: bool,
    progress: Mutex<Progress>,
}

/// What is here of a file.
#[derive(Debug, Default)]
struct Progress {
    /// The attempt of the source to read the file.
    attempt: u32,
    partial: Option<Arc<PartialFile>>,
    /// The bytes of the attempt that are here.
    bytes: u64,
    /// The end of the file, once the source sent it.
    end: Option<End>,
    /// Whether a chunk of the attempt has a wrong checksum, because the source changed during the
    /// send, or by a fault on the way.
    is_damaged: bool,
    /// Whether the file cannot be written: content that follows is ignored.
    has_failed: bool,
    /// Whether a stream completes the file.
    is_taken: bool,
}

/// The end of a large file.
#[derive(Debug, Clone, Copy)]
struct End {
    bytes: u64,
    size: u64,
    mtime: Time,
}

impl Progress {
    /// Takes the end of the file, once all bytes are here.
    fn take_end(&mut self) -> Result<Option<End>, Error> {
        let Some(end) = self.end else { return Ok(None) };
        if self.bytes > end.bytes || self.is_taken {
            return Err(Error::Protocol("more chunks than a file has"));
        }
        self.is_taken = self.bytes == end.bytes;
        Ok(Some(end).filter(|_| self.is_taken))
    }

    /// Begins a later attempt. False for a part of an earlier attempt.
    fn begin(&mut self, attempt: u32) -> bool {
        if attempt > self.attempt {
            *self = Self { attempt, has_failed: self.has_failed, ..Self::default() };
        }
        attempt == self.attempt
    }
}

impl RequestedFile {
    pub fn new(place: Place, attributes: Attributes, old: Option<Stat>, is_linked: bool) -> Self {
        Self { place, attributes, old, is_linked, progress: Mutex::default() }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Write> Shared<'_, W> {
    /// Takes a message with content.
    pub fn take_content(&self, message: ToDestination, data: &[u8]) -> Result<(), Error> {
        match message {
            ToDestination::Pack(items) => self.unpack(items, data),
            ToDestination::Chunk { id, attempt, offset, crc } => {
                let end = offset.checked_add(data.len() as u64);
                if end.is_none_or(|end| end > FILE_BYTES_MAX) {
                    return Err(Error::Protocol("a chunk behind the end of all files"));
                }
                self.take_chunk(id, attempt, offset, data, crc)
            }
            ToDestination::FileDone { id, attempt, bytes, size, mtime } => {
                if size > FILE_BYTES_MAX {
                    return Err(Error::Protocol("a file larger than all files"));
                }
                self.end_file(id, attempt, End { bytes, size, mtime })
            }
            ToDestination::Unreadable { id, error } => {
                let file = self.tree().requested(id)?;
                if std::mem::replace(&mut file.progress().is_taken, true) {
                    return Err(NOT_REQUESTED);
                }
                let mut tree = self.tree();
                tree.summary.add_error(error);
                self.complete(&mut tree, id, false)
            }
            ToDestination::Failed(error) => {
                self.tree().summary.add_error(error);
                Ok(())
            }
            _ => Err(Error::Protocol("a message in the wrong stream")),
        }
    }

    fn unpack(&self, items: Vec<Packed>, data: &[u8]) -> Result<(), Error> {
        if items.len() > BATCH_MAX {
            return Err(Error::Protocol("a pack with too many files"));
        }
        let mut rest = data;
        let mut files = Vec::with_capacity(items.len());
        {
            let mut tree = self.tree();
            for Packed { id, bytes, crc, mtime } in items {
                let (content, after) = rest.split_at_checked(bytes as usize).ok_or(TOO_SHORT)?;
                rest = after;
                let file = tree.requested(id)?;
                let folder = tree.folders.get(file.place.folder)?;
                files.push((id, file, folder, content, crc, mtime));
            }
        }
        if !rest.is_empty() {
            return Err(Error::Protocol("bytes of no file"));
        }
        let mut finished = Vec::with_capacity(files.len());
        for (id, file, folder, content, crc, mtime) in files {
            check(content, crc)?;
            if std::mem::replace(&mut file.progress().is_taken, true) {
                return Err(NOT_REQUESTED);
            }
            let partial = folder.and_then(|folder| {
                let partial = PartialFile::create(&folder, &file.place.name)?;
                write_at(&partial, content, 0)?;
                Ok(partial)
            });
            let set = partial.and_then(|partial| self.commit(&file, partial, mtime));
            finished.push((id, file, set, content.len() as u64));
        }
        let mut tree = self.tree();
        for (id, file, set, bytes) in finished {
            tree.summary.bytes_sent += bytes;
            self.record(&mut tree, id, &file.place, set)?;
        }
        Ok(())
    }

    fn create(&self, file: &RequestedFile) -> Result<Result<PartialFile, Errno>, Error> {
        let folder = self.tree().folders.get(file.place.folder)?;
        Ok(folder.and_then(|folder| PartialFile::create(&folder, &file.place.name)))
    }

    /// The file for the chunks of an attempt; `None` if the chunk is ignored.
    fn partial(
        &self,
        file: &RequestedFile,
        attempt: u32,
    ) -> Result<Option<Result<Arc<PartialFile>, Errno>>, Error> {
        let mut progress = file.progress();
        if progress.is_taken {
            return Err(NOT_REQUESTED);
        }
        if !progress.begin(attempt) {
            return Ok(None);
        }
        if progress.has_failed {
            return Ok(None);
        }
        if progress.partial.is_none() {
            match self.create(file)? {
                Ok(created) => progress.partial = Some(Arc::new(created)),
                Err(errno) => return Ok(Some(Err(errno))),
            }
        }
        Ok(progress.partial.clone().map(Ok))
    }

    fn take_chunk(
        &self,
        id: u64,
        attempt: u32,
        offset: u64,
        data: &[u8],
        crc: u64,
    ) -> Result<(), Error> {
        let file = self.tree().requested(id)?;
        let is_damaged = check(data, crc).is_err();
        let written = match self.partial(&file, attempt)? {
            Some(Ok(_)) if is_damaged => Ok(()),
            Some(Ok(partial)) => write_at(&partial, data, offset),
            Some(Err(errno)) => Err(errno),
            None => Ok(()),
        };
        let bytes = data.len() as u64;
        if let Err(errno) = written {
            let is_first = !std::mem::replace(&mut file.progress().has_failed, true);
            if is_first {
                self.fail_write(&mut self.tree(), &file.place, errno)?;
            }
        } else {
            self.tree().summary.bytes_sent += bytes;
        }
        let end = {
            let mut progress = file.progress();
            if progress.attempt != attempt {
                return Ok(());
            }
            progress.bytes += bytes;
            progress.is_damaged |= is_damaged;
            progress.take_end()?
        };
        end.map_or(Ok(()), |end| self.end_attempt(id, &file, end))
    }

    fn end_file(&self, id: u64, attempt: u32, end: End) -> Result<(), Error> {
        let file = self.tree().requested(id)?;
        let is_complete = {
            let mut progress = file.progress();
            if progress.is_taken || !progress.begin(attempt) || progress.end.is_some() {
                return Err(Error::Protocol("a second end of a file"));
            }
            progress.end = Some(end);
            progress.take_end()?.is_some()
        };
        if is_complete { self.end_attempt(id, &file, end) } else { Ok(()) }
    }

    /// Ends a large file, of which all bytes are here.
    fn end_attempt(&self, id: u64, file: &RequestedFile, end: End) -> Result<(), Error> {
        let (has_failed, is_damaged, partial) = {
            let mut progress = file.progress();
            (progress.has_failed, progress.is_damaged, progress.partial.take())
        };
        if has_failed || is_damaged {
            let mut tree = self.tree();
            if !has_failed {
                tree.fail(&file.place, &"it was damaged on the way, so it was not copied");
            }
            return self.complete(&mut tree, id, false);
        }
        let partial = match partial {
            // The other streams wrote their last chunks, so no other reference is left.
            Some(partial) => Arc::into_inner(partial).ok_or(Errno::IO),
            // A file with nothing but a hole comes without a chunk.
            None => self.create(file)?,
        };
        let set = partial.and_then(|partial| {
            // The last bytes may be a hole.
            if rustix::fs::fstat(&partial)?.st_size as u64 != end.size {
                rustix::fs::ftruncate(&partial, end.size)?;
            }
            self.commit(file, partial, end.mtime)
        });
        self.record(&mut self.tree(), id, &file.place, set)
    }

    /// Gives a file its attributes and its name. The inner error is one of the attributes.
    fn commit(
        &self,
        file: &RequestedFile,
        partial: PartialFile,
        mtime: Time,
    ) -> rustix::io::Result<rustix::io::Result<()>> {
        // The content counts more than an attribute that cannot be set.
        let set = self.setter.set(&partial, &file.attributes, mtime, file.old.as_ref());
        partial.commit(&file.place.name).map(|()| set)
    }

    /// Records that a requested file is here, or failed.
    fn record(
        &self,
        tree: &mut Tree,
        id: u64,
        place: &Place,
        committed: rustix::io::Result<rustix::io::Result<()>>,
    ) -> Result<(), Error> {
        match &committed {
            Ok(set) => {
                if let Err(errno) = set {
                    let error = std::io::Error::from(*errno);
                    tree.fail(place, &format!("copied, but not with all attributes: {error}"));
                }
                tree.summary.files_sent += 1;
            }
            Err(errno) => self.fail_write(tree, place, *errno)?,
        }
        self.complete(tree, id, committed.is_ok())
    }

    /// Removes a file from the requested files, and completes its folder.
    fn complete(&self, tree: &mut Tree, id: u64, is_here: bool) -> Result<(), Error> {
        let done = tree.complete(id, is_here)?;
        self.end_folders(tree, done);
        if tree.is_complete() {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// The failure of a file that could not be written. Without space, all other files would fail.
    fn fail_write(&self, tree: &mut Tree, place: &Place, errno: Errno) -> Result<(), Error> {
        if let Errno::NOSPC | Errno::DQUOT = errno {
            let path = String::from_utf8_lossy(self.destination).into_owned();
            let name = tree.folders.path_of(place.folder, &place.name);
            let (name, error) = (String::from_utf8_lossy(&name), std::io::Error::from(errno));
            return Err(Error::Destination { path, problem: format!("{name}: {error}") });
        }
        tree.fail_errno(place, errno);
        Ok(())
    }
}

/// Refuses content that does not have its checksum.
fn check(content: &[u8], expected: u64) -> Result<(), Error> {
    // TCP, TLS and ssh check too, so this is a fault of a program or of memory.
    if crc(content) == expected { Ok(()) } else { Err(Error::Protocol("a wrong checksum")) }
}

fn write_at(partial: &PartialFile, data: &[u8], offset: u64) -> rustix::io::Result<()> {
    let written = partial.file().write_all_at(data, offset);
    written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
