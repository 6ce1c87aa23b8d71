//! A file that is being received: it gets its name when it is whole.

use haul_fs::temporary_name;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Attempts to find a free temporary name.
const TRIES_MAX: u32 = 16;

/// Dropping it removes the temporary file.
#[derive(Debug)]
pub struct PartialFile {
    folder: Arc<OwnedFd>,
    temporary_name: Vec<u8>,
    file: File,
    is_committed: bool,
}

impl PartialFile {
    /// A temporary file in the folder of its final name, which only this user can open.
    pub fn create(folder: &Arc<OwnedFd>, name: &[u8]) -> rustix::io::Result<Self> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let (file, temporary_name) = with_temporary_name(name, |temporary_name| {
            rustix::fs::openat(&**folder, temporary_name, flags, mode)
        })?;
        Ok(Self {
            folder: Arc::clone(folder),
            temporary_name,
            file: file.into(),
            is_committed: false,
        })
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name, in place of what has the name.
    pub fn commit(mut self, name: &[u8]) -> rustix::io::Result<()> {
        rustix::fs::renameat(&*self.folder, &self.temporary_name[..], &*self.folder, name)?;
        self.is_committed = true;
        Ok(())
    }
}

impl AsFd for PartialFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.is_committed {
            let name = &self.temporary_name[..];
            let _ = rustix::fs::unlinkat(&*self.folder, name, AtFlags::empty());
        }
    }
}

/// Makes something under a temporary name, and then gives it its name, in place of what has it,
/// also if it could not be prepared fully.
pub fn replace(
    folder: &OwnedFd,
    name: &[u8],
    make: impl FnMut(&[u8]) -> rustix::io::Result<()>,
    prepare: impl FnOnce(&[u8]) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let ((), temporary_name) = with_temporary_name(name, make)?;
    let prepared = prepare(&temporary_name);
    let replaced = rustix::fs::renameat(folder, &temporary_name[..], folder, name);
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
