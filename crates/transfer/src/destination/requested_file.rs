//! A file that is requested, and what is here of it.

use crate::destination::basis::Basis;
use crate::destination::folders::Place;
use crate::destination::journal::{Original, Unusable};
use crate::destination::partial_file::{PartialFile, Resumed};
use crate::error::Error;
use crate::message::{Attributes, Time};
use rustix::fs::Stat;
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A file of at least this size has a journal: 2 s at 32 Mbit/s.
const JOURNAL_MIN_BYTES: u64 = 8 << 20;
/// After so many bytes of a file, the kernel starts to write the file to the disk.
const WRITE_BACK_BYTES: u64 = 32 << 20;
/// After so many bytes of a file, the file is synced, so that its journal counts after a restart of
/// the host.
const SYNC_BYTES: u64 = 256 << 20;

/// A file that is requested and not here.
#[derive(Debug)]
pub struct RequestedFile {
    pub place: Place,
    pub attributes: Attributes,
    /// What has the name now.
    pub old: Option<Stat>,
    pub is_linked: bool,
    /// Whether blocks of the file may be compared with what has the name now, or with an earlier
    /// copy.
    pub is_comparable: bool,
    basis: Mutex<BasisState>,
    /// What the journal of a large file is of; `None` for a file without a journal.
    pub original: Option<Original>,
    /// Held while a stream writes to the file. The kernel lets one thread at a time write to a
    /// file, and the others would spin.
    write_lock: Mutex<()>,
    progress: Mutex<Progress>,
}

/// The file that blocks are compared with.
#[derive(Debug, Default)]
enum BasisState {
    /// The first blocks open the file.
    #[default]
    Closed,
    Open(Arc<Basis>),
    /// The file cannot be opened, or is not needed any more.
    Missing,
}

/// What is here of a file.
#[derive(Debug)]
pub struct Progress {
    /// The attempt of the source to read the file.
    pub attempt: u32,
    pub partial: Option<Arc<PartialFile>>,
    /// The bytes that arrived, of all attempts.
    pub bytes: u64,
    /// The bytes of chunks that were written.
    pub written: u64,
    /// The bytes of blocks that were copied from the basis.
    pub copied: u64,
    /// The end of the file, once the source sent it.
    pub end: Option<End>,
    /// Whether a chunk of the attempt has a wrong checksum, because the source changed during the
    /// send, or by a fault on the way.
    pub is_damaged: bool,
    /// Whether the file cannot be written: content that follows is ignored.
    pub has_failed: bool,
    /// Whether a stream completes the file.
    pub is_taken: bool,
}

/// The end of a large file.
#[derive(Debug, Clone, Copy)]
pub struct End {
    /// The bytes of all chunks, of all attempts. They may arrive after the end.
    pub bytes: u64,
    /// The size and the modification time; `None` if the source cannot read the file.
    pub content: Option<(u64, Time)>,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            attempt: 1,
            partial: None,
            bytes: 0,
            written: 0,
            copied: 0,
            end: None,
            is_damaged: false,
            has_failed: false,
            is_taken: false,
        }
    }
}

impl Progress {
    /// Takes the end of the file, once all bytes are here.
    pub fn take_end(&mut self) -> Result<Option<End>, Error> {
        let Some(end) = self.end else { return Ok(None) };
        if self.bytes > end.bytes || self.is_taken {
            return Err(Error::Protocol("more chunks than a file has"));
        }
        self.is_taken = self.bytes == end.bytes;
        Ok(Some(end).filter(|_| self.is_taken))
    }

    /// Counts bytes that were written. Returns whether to start to write the file to the disk, and
    /// whether to sync the file.
    pub fn count_written(&mut self, bytes: u64) -> (bool, bool) {
        let before = self.written;
        self.written += bytes;
        let passes = |interval: u64| before / interval < self.written / interval;
        (passes(WRITE_BACK_BYTES), passes(SYNC_BYTES))
    }

    /// Counts bytes that were copied from the basis. Returns whether to start to write the file to
    /// the disk.
    pub fn count_copied(&mut self, bytes: u64) -> bool {
        let before = self.copied;
        self.copied += bytes;
        before / WRITE_BACK_BYTES < self.copied / WRITE_BACK_BYTES
    }

    /// Begins a later attempt. False for a part of an earlier attempt.
    pub fn begin(&mut self, attempt: u32) -> bool {
        if attempt > self.attempt {
            if let Some(partial) = &self.partial {
                partial.discard();
            }
            let Self { bytes, has_failed, .. } = *self;
            *self = Self { attempt, bytes, has_failed, ..Self::default() };
        }
        attempt == self.attempt
    }
}

impl RequestedFile {
    /// A file of which nothing is here.
    pub fn new(place: Place, attributes: Attributes, old: Option<Stat>, is_linked: bool) -> Self {
        Self {
            place,
            attributes,
            old,
            is_linked,
            is_comparable: false,
            basis: Mutex::default(),
            original: None,
            write_lock: Mutex::default(),
            progress: Mutex::default(),
        }
    }

    /// Keeps a journal if the file is large, and goes on with the partial file of an earlier
    /// transfer. Returns the ranges that are here.
    pub fn resume(
        &mut self,
        folder: &Arc<OwnedFd>,
        original: Original,
    ) -> Result<Vec<Range<u64>>, Unusable> {
        if original.size < JOURNAL_MIN_BYTES {
            return Ok(Vec::new());
        }
        self.original = Some(original);
        let resumed = PartialFile::resume(folder, &self.place.name, original)?;
        Ok(resumed.map_or_else(Vec::new, |Resumed { partial, ranges }| {
            self.progress().partial = Some(Arc::new(partial));
            ranges
        }))
    }

    /// The file that blocks are compared with, which the first call opens; `None` if the file
    /// cannot be opened.
    pub fn basis(&self, open: impl FnOnce() -> Option<Basis>) -> Option<Arc<Basis>> {
        let mut basis = self.basis.lock().unwrap_or_else(PoisonError::into_inner);
        if let BasisState::Closed = *basis {
            *basis = open().map_or(BasisState::Missing, |basis| BasisState::Open(Arc::new(basis)));
        }
        match &*basis {
            BasisState::Open(basis) => Some(Arc::clone(basis)),
            BasisState::Closed | BasisState::Missing => None,
        }
    }

    /// Closes the file that blocks are compared with, once the new version is whole.
    pub fn close_basis(&self) {
        *self.basis.lock().unwrap_or_else(PoisonError::into_inner) = BasisState::Missing;
    }

    /// Writes a part of the file.
    pub fn write_at(
        &self,
        partial: &PartialFile,
        data: &[u8],
        offset: u64,
    ) -> rustix::io::Result<()> {
        self.write_with(|| {
            let written = partial.file().write_all_at(data, offset);
            written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        })
    }

    /// Writes a part of the file by a closure.
    pub fn write_with(
        &self,
        write: impl FnOnce() -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let _lock = self.write_lock.lock().unwrap_or_else(PoisonError::into_inner);
        write()
    }

    /// What is here of the file.
    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
