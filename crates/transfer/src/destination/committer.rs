//! Gives files that are whole their times and names: at once, or in batches after a sync.
//!
//! After a crash of the host, a file that has its name and its time has its content: otherwise the
//! next transfer would take the file for up to date.

use crate::destination::Shared;
use crate::destination::partial_file::PartialFile;
use crate::destination::requested_file::RequestedFile;
use crate::error::Error;
use crate::message::Time;
use crate::options::Durable;
use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most files of a batch, which are open.
const BATCH_FILES_MAX: usize = 400;
/// The most bytes of a batch.
const BATCH_BYTES_MAX: u64 = 256 << 20;
/// The longest time that a file waits for the others of its batch, while files arrive.
const BATCH_TIME_MAX: Duration = Duration::from_secs(2);
/// Up to this many files are synced one by one. A sync of the whole file system also writes what
/// other programs wrote.
const SINGLE_SYNCS_MAX: usize = 8;

/// A file that is whole and lacks its time and its name.
#[derive(Debug)]
pub struct WholeFile {
    pub id: u64,
    pub file: Arc<RequestedFile>,
    /// The file, or why it could not be written.
    pub partial: rustix::io::Result<PartialFile>,
    pub bytes: u64,
    pub mtime: Time,
}

/// Files that are whole, and wait for a sync.
#[derive(Debug, Default)]
pub struct Batch {
    files: Vec<WholeFile>,
    bytes: u64,
    begun: Option<Instant>,
    /// Whether the session waits for all files, so no file waits for others.
    is_last: bool,
}

impl Batch {
    fn is_due(&self) -> bool {
        self.is_last
            || self.files.len() >= BATCH_FILES_MAX
            || self.bytes >= BATCH_BYTES_MAX
            || self.begun.is_some_and(|begun| begun.elapsed() >= BATCH_TIME_MAX)
    }

    fn take(&mut self) -> Vec<WholeFile> {
        (self.bytes, self.begun) = (0, None);
        std::mem::take(&mut self.files)
    }
}

/// What [`Shared::commit_all`] did with a file: the inner error is one of an attribute.
type Committed = rustix::io::Result<rustix::io::Result<()>>;

impl<W: Write> Shared<'_, W> {
    /// Takes files that are whole.
    pub fn add_whole(&self, files: Vec<WholeFile>) -> Result<(), Error> {
        let due = match self.options.durable {
            Durable::No | Durable::Each => files,
            Durable::Batch => {
                for file in &files {
                    if let Ok(partial) = &file.partial {
                        start_write_back(partial);
                    }
                }
                let mut batch = self.batch();
                batch.bytes += files.iter().map(|file| file.bytes).sum::<u64>();
                batch.begun.get_or_insert_with(Instant::now);
                batch.files.extend(files);
                if !batch.is_due() {
                    return Ok(());
                }
                batch.take()
            }
        };
        self.commit_all(due)
    }

    /// Gives all files that wait their names. Later files do not wait.
    pub fn end_batches(&self) -> Result<(), Error> {
        let due = {
            let mut batch = self.batch();
            batch.is_last = true;
            batch.take()
        };
        self.commit_all(due)
    }

    /// Gives files their times and names, after a sync unless the user wants none.
    fn commit_all(&self, files: Vec<WholeFile>) -> Result<(), Error> {
        if files.is_empty() {
            return Ok(());
        }
        let synced = self.sync(&files);
        let mut committed = Vec::with_capacity(files.len());
        for (whole, synced) in files.into_iter().zip(synced) {
            let WholeFile { id, file, partial, bytes, mtime } = whole;
            let partial = synced.and(partial);
            let result = partial.and_then(|partial| self.commit(&file, partial, mtime));
            committed.push((id, file, bytes, result));
        }
        let mut tree = self.tree();
        for (id, file, bytes, result) in committed {
            tree.summary.bytes_sent += bytes;
            self.progress.add_files(1);
            self.record(&mut tree, id, &file.place, result)?;
        }
        Ok(())
    }

    /// Writes files to the disk. The results are in the order of the files.
    fn sync(&self, files: &[WholeFile]) -> Vec<rustix::io::Result<()>> {
        let sync_each = || {
            let partials = files.iter().map(|file| file.partial.as_ref());
            partials.map(|partial| partial.map_or(Ok(()), rustix::fs::fdatasync)).collect()
        };
        match self.options.durable {
            Durable::No => files.iter().map(|_| Ok(())).collect(),
            Durable::Batch
                if files.len() > SINGLE_SYNCS_MAX
                    && sync_large(files).and_then(|()| sync_file_systems(files)).is_ok() =>
            {
                files.iter().map(|_| Ok(())).collect()
            }
            // After an error, each sync shows which file it is of.
            Durable::Batch | Durable::Each => sync_each(),
        }
    }

    /// Gives a file its time and its name.
    fn commit(&self, file: &RequestedFile, partial: PartialFile, mtime: Time) -> Committed {
        // The content counts more than an attribute that cannot be set.
        let set = self.setter.set(&partial, &file.attributes, mtime, file.old.as_ref());
        if self.options.durable == Durable::Each {
            // The time and the other attributes.
            rustix::fs::fsync(&partial)?;
        }
        let folder = partial.folder();
        partial.commit(&file.place.name, !self.options.replacement.keeps_existing)?;
        if self.options.durable == Durable::Each {
            rustix::fs::fsync(folder)?;
        }
        Ok(set)
    }
}

/// Lets the kernel write the file in the background, so that the sync later waits less.
pub fn start_write_back(partial: &PartialFile) {
    // Without this hint, the sync writes everything.
    let _ = haul_sys::write_back::start_write_back(partial);
}

/// Syncs large files: a failure to write them may be older than the descriptors by which syncfs(2)
/// reports failures.
fn sync_large(files: &[WholeFile]) -> rustix::io::Result<()> {
    let partials = files.iter().filter_map(|file| file.partial.as_ref().ok());
    partials.filter(|partial| partial.has_journal()).try_for_each(rustix::fs::fdatasync)
}

/// Syncs each file system of these files once (syncfs(2) reports errors since Linux 5.8).
fn sync_file_systems(files: &[WholeFile]) -> rustix::io::Result<()> {
    let mut devices = HashMap::new();
    for partial in files.iter().filter_map(|file| file.partial.as_ref().ok()) {
        devices.entry(rustix::fs::fstat(partial)?.st_dev).or_insert(partial);
    }
    devices.values().try_for_each(rustix::fs::syncfs)
}
