//! A file that is being received: it gets its name when it is whole.

use crate::destination::journal::{self, Journal, Original, Unusable};
use haul_fs::{NAME_BYTES_MAX, temporary_name};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Attempts to find a free temporary name.
const TRIES_MAX: u32 = 16;
/// The end of the name of a partial file with a journal.
const PART_SUFFIX: &[u8] = b".haul-part";
/// The end of the name of a journal.
const JOURNAL_SUFFIX: &[u8] = b".haul-journal";

/// Dropping it removes the temporary file, unless the file has a journal.
#[derive(Debug)]
pub struct PartialFile {
    folder: Arc<OwnedFd>,
    temporary_name: Vec<u8>,
    file: File,
    journal: Option<(Vec<u8>, Journal)>,
    is_kept: AtomicBool,
}

/// A partial file of an earlier transfer, and the ranges that are in the file.
#[derive(Debug)]
pub struct Resumed {
    pub partial: PartialFile,
    pub ranges: Vec<Range<u64>>,
}

impl PartialFile {
    /// A temporary file in the folder of its final name, which only this user can open.
    pub fn create(folder: &Arc<OwnedFd>, name: &[u8]) -> rustix::io::Result<Self> {
        let (file, temporary_name) =
            with_temporary_name(name, |temporary_name| create(folder, temporary_name))?;
        let folder = Arc::clone(folder);
        Ok(Self { folder, temporary_name, file, journal: None, is_kept: AtomicBool::new(false) })
    }

    /// A temporary file with a journal, in place of an earlier one. The file stays if the transfer
    /// ends early.
    pub fn create_with_journal(
        folder: &Arc<OwnedFd>,
        name: &[u8],
        original: Original,
    ) -> rustix::io::Result<Self> {
        let [part_name, journal_name] = names(name);
        match rustix::fs::unlinkat(&**folder, &part_name[..], AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let file = create(folder, &part_name)?;
        let folder = Arc::clone(folder);
        let is_kept = AtomicBool::new(false);
        let mut partial = Self { folder, temporary_name: part_name, file, journal: None, is_kept };
        let stat = rustix::fs::fstat(&partial)?;
        let journal = Journal::create(&*partial.folder, &journal_name, original, &stat)?;
        partial.journal = Some((journal_name, journal));
        partial.is_kept.store(true, Relaxed);
        Ok(partial)
    }

    /// Goes on with the partial file of an earlier transfer; `None` if there is none.
    pub fn resume(
        folder: &Arc<OwnedFd>,
        name: &[u8],
        original: Original,
    ) -> Result<Option<Resumed>, Unusable> {
        let [part_name, journal_name] = names(name);
        let Ok((journal, _)) = open_own(folder, &journal_name, OFlags::RDONLY) else {
            return Ok(None);
        };
        let opened = open_own(folder, &part_name, OFlags::RDWR);
        let (file, stat) = opened.map_err(|_| Unusable::Foreign)?;
        let ranges = journal::read(journal, original, &stat)?;
        let journal = Journal::go_on(&**folder, &journal_name, original, &stat, &ranges);
        let journal = journal.map_err(|_| Unusable::Foreign)?;
        let partial = Self {
            folder: Arc::clone(folder),
            temporary_name: part_name,
            file,
            journal: Some((journal_name, journal)),
            is_kept: AtomicBool::new(true),
        };
        Ok(Some(Resumed { partial, ranges }))
    }

    /// The folder of the file.
    pub fn folder(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.folder)
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether the file has a journal.
    pub fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Records that a range was written.
    pub fn record(&self, range: Range<u64>) {
        if let Some((_, journal)) = &self.journal {
            // Without the record, the next transfer sends the range again.
            let _ = journal.record(range);
        }
    }

    /// Writes what was recorded to the disk, so that it counts after a restart of the host.
    pub fn sync_records(&self) -> rustix::io::Result<()> {
        let Some((_, journal)) = &self.journal else { return Ok(()) };
        let length = journal.length()?;
        rustix::fs::fdatasync(&self.file)?;
        let _ = journal.record_sync(length);
        Ok(())
    }

    /// Lets the drop remove the file, although the file has a journal.
    pub fn discard(&self) {
        self.is_kept.store(false, Relaxed);
    }

    /// Gives the file its name, in place of what has the name unless `replaces` is false.
    pub fn commit(self, name: &[u8], replaces: bool) -> rustix::io::Result<()> {
        if self.journal.is_some() && !self.still_has_temporary_name()? {
            // Another transfer of the same file gave it its name, or began from the start.
            self.is_kept.store(true, Relaxed);
            let now = rustix::fs::statat(&*self.folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let is_here = is_same_file(&now, &rustix::fs::fstat(&self.file)?);
            return if is_here { Ok(()) } else { Err(Errno::STALE) };
        }
        rename(&self.folder, &self.temporary_name, name, replaces)?;
        self.is_kept.store(true, Relaxed);
        if let Some((journal_name, _)) = &self.journal {
            let _ = rustix::fs::unlinkat(&*self.folder, &journal_name[..], AtFlags::empty());
        }
        Ok(())
    }

    /// Whether the temporary name still is a name of this file.
    fn still_has_temporary_name(&self) -> rustix::io::Result<bool> {
        let name = &self.temporary_name[..];
        match rustix::fs::statat(&*self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(is_same_file(&stat, &rustix::fs::fstat(&self.file)?)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for PartialFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if self.is_kept.load(Relaxed) {
            return;
        }
        let is_own = self.journal.is_none() || self.still_has_temporary_name().unwrap_or(false);
        let names = [Some(&self.temporary_name), self.journal.as_ref().map(|(name, _)| name)];
        for name in names.into_iter().flatten().filter(|_| is_own) {
            let _ = rustix::fs::unlinkat(&*self.folder, &name[..], AtFlags::empty());
        }
    }
}

fn is_same_file(one: &Stat, other: &Stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

fn create(folder: &OwnedFd, name: &[u8]) -> rustix::io::Result<File> {
    // A host of a chain passes on what it wrote.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::openat(folder, name, flags, mode).map(File::from)
}

/// Opens a file that an earlier transfer of this user made. In a folder that every user may write
/// to, another user could put wrong content into a file with this name.
fn open_own(folder: &OwnedFd, name: &[u8], access: OFlags) -> rustix::io::Result<(File, Stat)> {
    let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let is_own = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == rustix::process::geteuid().as_raw()
        && Mode::from_raw_mode(stat.st_mode).intersection(Mode::RWXG | Mode::RWXO).is_empty()
        && stat.st_nlink == 1;
    if is_own { Ok((file.into(), stat)) } else { Err(Errno::PERM) }
}

/// The names of a partial file with a journal, and of the journal.
fn names(name: &[u8]) -> [Vec<u8>; 2] {
    [PART_SUFFIX, JOURNAL_SUFFIX].map(|suffix| {
        let whole = [b".", name, suffix].concat();
        if whole.len() <= NAME_BYTES_MAX {
            return whole;
        }
        let hash = blake3::hash(name).to_hex();
        [b".", &hash.as_bytes()[..32], suffix].concat()
    })
}

/// Gives a file another name in its folder, in place of what has the name unless `replaces` is
/// false.
fn rename(folder: &OwnedFd, from: &[u8], to: &[u8], replaces: bool) -> rustix::io::Result<()> {
    if replaces {
        rustix::fs::renameat(folder, from, folder, to)
    } else {
        rustix::fs::renameat_with(folder, from, folder, to, RenameFlags::NOREPLACE)
    }
}

/// Makes something under a temporary name, and then gives it its name, also if it could not be
/// prepared fully. It takes the place of what has the name, unless `replaces` is false.
pub fn replace(
    folder: &OwnedFd,
    name: &[u8],
    replaces: bool,
    make: impl FnMut(&[u8]) -> rustix::io::Result<()>,
    prepare: impl FnOnce(&[u8]) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let ((), temporary_name) = with_temporary_name(name, make)?;
    let prepared = prepare(&temporary_name);
    let replaced = rename(folder, &temporary_name, name, replaces);
    // rename(2) does nothing if both names are links to one file, and leaves both.
    let _ = rustix::fs::unlinkat(folder, &temporary_name[..], AtFlags::empty());
    replaced.and(prepared)
}

/// Makes something under a temporary name that was free.
fn with_temporary_name<T>(
    name: &[u8],
    mut make: impl FnMut(&[u8]) -> rustix::io::Result<T>,
) -> rustix::io::Result<(T, Vec<u8>)> {
    let mut tries = 0;
    loop {
        let temporary_name = temporary_name(name);
        match make(&temporary_name) {
            Err(Errno::EXIST) if tries < TRIES_MAX => tries += 1,
            made => return made.map(|made| (made, temporary_name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that appears while another file is received.
    #[test]
    fn an_entry_is_replaced_only_if_that_is_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let open = Arc::new(OwnedFd::from(File::open(folder.path()).unwrap()));
        let path = folder.path().join("a");
        for (replaces, expected) in [(false, "earlier"), (true, "")] {
            let partial = PartialFile::create(&open, b"a").unwrap();
            std::fs::write(&path, "earlier").unwrap();
            let committed = partial.commit(b"a", replaces);
            assert_eq!(committed, if replaces { Ok(()) } else { Err(Errno::EXIST) });
            assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
            let make = |name: &[u8]| rustix::fs::symlinkat("target", &*open, name);
            std::fs::write(&path, "earlier").unwrap();
            assert_eq!(replace(&open, b"a", replaces, make, |_| Ok(())).is_ok(), replaces);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
