//! Receives the content of files, through any stream.

use crate::checksum::Checksum;
use crate::destination::Shared;
use crate::destination::committer::{WholeFile, start_write_back};
use crate::destination::folders::Place;
use crate::destination::partial_file::PartialFile;
use crate::destination::requested_file::{End, RequestedFile};
use crate::destination::tree::Tree;
use crate::error::Error;
use crate::message::{BATCH_MAX, BlocksPlace, Packed, ToDestination, ToSource};
use crate::options::Durable;
use rustix::io::Errno;
use std::io::Write;
use std::sync::Arc;

/// The largest file: the largest offset of the kernel.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

const NOT_REQUESTED: Error = Error::Protocol("a file that is not requested");
const TOO_SHORT: Error = Error::Protocol("fewer bytes than it announced");

impl<W: Write> Shared<'_, W> {
    /// Takes a message with content.
    pub fn take_content(&self, message: ToDestination, data: &[u8]) -> Result<(), Error> {
        if self.is_for_others(&message) {
            return self.skip(&message);
        }
        match message {
            ToDestination::Pack(items) => self.unpack(items, data),
            ToDestination::Chunk { id, attempt, offset, checksum } => {
                let end = offset.checked_add(data.len() as u64);
                if end.is_none_or(|end| end > FILE_BYTES_MAX) {
                    return Err(Error::Protocol("a chunk behind the end of all files"));
                }
                self.take_chunk(id, attempt, offset, data, checksum)
            }
            ToDestination::Blocks { place, lengths } => self.take_blocks(place, &lengths, data),
            ToDestination::FileDone { id, attempt, bytes, size, mtime } => {
                if size > FILE_BYTES_MAX {
                    return Err(Error::Protocol("a file larger than all files"));
                }
                let file = self.tree().requested(id)?;
                if !file.progress().begin(attempt) {
                    return Err(Error::Protocol("the end of an earlier attempt"));
                }
                self.end_file(id, &file, End { bytes, content: Some((size, mtime)) })
            }
            ToDestination::Unreadable { id, bytes, error } => {
                self.tree().summary.add_error(error);
                let file = self.tree().requested(id)?;
                self.end_file(id, &file, End { bytes, content: None })
            }
            ToDestination::Failed(error) => {
                self.tree().summary.add_error(error);
                Ok(())
            }
            _ => Err(Error::Protocol("a message in the wrong stream")),
        }
    }

    /// Whether a file of a chain was requested by other hosts alone.
    fn is_for_others(&self, message: &ToDestination) -> bool {
        let (ToDestination::Chunk { id, .. }
        | ToDestination::Blocks { place: BlocksPlace { id, .. }, .. }
        | ToDestination::FileDone { id, .. }
        | ToDestination::Unreadable { id, .. }) = message
        else {
            return false;
        };
        self.chain.is_some() && !self.tree().is_requested(*id)
    }

    /// Skips content of a file that was not requested. The source waits until each host of a chain
    /// compared blocks.
    fn skip(&self, message: &ToDestination) -> Result<(), Error> {
        let ToDestination::Blocks { place, .. } = *message else { return Ok(()) };
        self.answer(&ToSource::Differing { place, ranges: Vec::new() })
    }

    fn unpack(&self, items: Vec<Packed>, data: &[u8]) -> Result<(), Error> {
        if items.len() > BATCH_MAX {
            return Err(Error::Protocol("a pack with too many files"));
        }
        let mut rest = data;
        let mut files = Vec::with_capacity(items.len());
        {
            let mut tree = self.tree();
            for Packed { id, bytes, checksum, mtime } in items {
                let (content, after) = rest.split_at_checked(bytes as usize).ok_or(TOO_SHORT)?;
                rest = after;
                if self.chain.is_some() && !tree.is_requested(id) {
                    continue;
                }
                let file = tree.requested(id)?;
                let folder = tree.folders.get(file.place.folder)?;
                files.push((id, file, folder, content, checksum, mtime));
            }
        }
        if !rest.is_empty() {
            return Err(Error::Protocol("bytes of no file"));
        }
        let mut whole = Vec::with_capacity(files.len());
        for (id, file, folder, content, checksum, mtime) in files {
            self.check(content, checksum)?;
            if std::mem::replace(&mut file.progress().is_taken, true) {
                return Err(NOT_REQUESTED);
            }
            let partial = folder.and_then(|folder| {
                let partial = PartialFile::create(&folder, &file.place.name)?;
                file.write_at(&partial, content, 0)?;
                Ok(partial)
            });
            let bytes = content.len() as u64;
            self.progress.add_bytes(bytes);
            whole.push(WholeFile { id, file, partial, bytes, mtime });
        }
        self.add_whole(whole)
    }

    /// Makes the file for the content of an attempt. Only the first attempt is of the version that
    /// a journal names.
    fn create(
        &self,
        file: &RequestedFile,
        attempt: u32,
    ) -> Result<Result<PartialFile, Errno>, Error> {
        let folder = self.tree().folders.get(file.place.folder)?;
        let name = &file.place.name[..];
        Ok(folder.and_then(|folder| match file.original.filter(|_| attempt == 1) {
            Some(original) => PartialFile::create_with_journal(&folder, name, original),
            None => PartialFile::create(&folder, name),
        }))
    }

    /// The file for the chunks of an attempt; `None` if the chunk is ignored.
    pub fn partial(
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
            match self.create(file, attempt)? {
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
        checksum: Checksum,
    ) -> Result<(), Error> {
        let file = self.tree().requested(id)?;
        let is_damaged = self.check(data, checksum).is_err();
        let written = match self.partial(&file, attempt)? {
            Some(Ok(_)) if is_damaged => Ok(()),
            Some(Ok(partial)) => self.write_chunk(&file, &partial, data, offset).inspect(|()| {
                if let Some(chain) = self.chain.as_ref().filter(|_| file.original.is_some()) {
                    chain.set_stored(id, attempt, partial.file());
                }
            }),
            Some(Err(errno)) => Err(errno),
            None => Ok(()),
        };
        let bytes = data.len() as u64;
        self.progress.add_bytes(bytes);
        written.or_else(|errno| self.fail_content(&file, errno))?;
        self.tree().summary.bytes_sent += bytes;
        let end = {
            let mut progress = file.progress();
            progress.bytes += bytes;
            progress.is_damaged |= is_damaged && progress.attempt == attempt;
            progress.take_end()?
        };
        end.map_or(Ok(()), |end| self.end_attempt(id, &file, end))
    }

    /// Fails a file, because its content cannot be written. Content that follows is ignored.
    pub fn fail_content(&self, file: &RequestedFile, errno: Errno) -> Result<(), Error> {
        let is_first = {
            let mut progress = file.progress();
            progress.partial.take().inspect(|partial| partial.discard());
            !std::mem::replace(&mut progress.has_failed, true)
        };
        if is_first { self.fail_write(&mut self.tree(), &file.place, errno) } else { Ok(()) }
    }

    /// Writes a chunk and records it. Now and then, what was written is synced.
    fn write_chunk(
        &self,
        file: &RequestedFile,
        partial: &PartialFile,
        data: &[u8],
        offset: u64,
    ) -> rustix::io::Result<()> {
        file.write_at(partial, data, offset)?;
        let bytes = data.len() as u64;
        partial.record(offset..offset + bytes);
        if self.options.durable == Durable::No {
            return Ok(());
        }
        let (starts, syncs) = file.progress().count_written(bytes);
        if starts {
            start_write_back(partial);
        }
        if syncs { partial.sync_records() } else { Ok(()) }
    }

    /// Takes the end of a file, some of whose chunks may arrive later.
    fn end_file(&self, id: u64, file: &Arc<RequestedFile>, end: End) -> Result<(), Error> {
        let is_complete = {
            let mut progress = file.progress();
            if progress.is_taken || progress.end.is_some() {
                return Err(Error::Protocol("a second end of a file"));
            }
            progress.end = Some(end);
            progress.take_end()?.is_some()
        };
        if is_complete { self.end_attempt(id, file, end) } else { Ok(()) }
    }

    /// Ends a large file, of which all bytes are here.
    fn end_attempt(&self, id: u64, file: &Arc<RequestedFile>, end: End) -> Result<(), Error> {
        file.close_basis();
        let (has_failed, is_damaged, attempt, partial) = {
            let mut progress = file.progress();
            let partial = progress.partial.take();
            (progress.has_failed, progress.is_damaged, progress.attempt, partial)
        };
        let Some((size, mtime)) = end.content.filter(|_| !has_failed && !is_damaged) else {
            partial.inspect(|partial| partial.discard());
            let mut tree = self.tree();
            if is_damaged && !has_failed && end.content.is_some() {
                tree.fail(&file.place, &"it was damaged on the way, so it was not copied");
            }
            return self.complete(&mut tree, id, false);
        };
        let partial = match partial {
            // The other streams wrote their last chunks, so no other reference is left.
            Some(partial) => Arc::into_inner(partial).ok_or(Errno::IO),
            // A file with nothing but a hole comes without a chunk.
            None => self.create(file, attempt)?,
        };
        let partial = partial.and_then(|partial| {
            // The last bytes may be a hole.
            if rustix::fs::fstat(&partial)?.st_size as u64 != size {
                rustix::fs::ftruncate(&partial, size)?;
            }
            Ok(partial)
        });
        let (file, bytes) = (Arc::clone(file), 0);
        self.add_whole(vec![WholeFile { id, file, partial, bytes, mtime }])
    }

    /// Records that a requested file is here, or failed.
    pub fn record(
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
                (self.on_file)(&tree.folders.path_of(place.folder, &place.name));
            }
            Err(errno) => self.fail_write(tree, place, *errno)?,
        }
        self.complete(tree, id, committed.is_ok())
    }

    /// Refuses content that does not have its checksum.
    fn check(&self, content: &[u8], checksum: Checksum) -> Result<(), Error> {
        // TCP, TLS and ssh check too, so this is a fault of a program or of memory.
        let fits = checksum.fits(content, self.options.verify);
        if fits { Ok(()) } else { Err(Error::Protocol("a wrong checksum")) }
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
