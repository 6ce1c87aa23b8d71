//! What is sent: a file, or memory that nobody writes again.

use haul_sys::region::Region;
use rustix::fs::{FileType, MemfdFlags};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Bytes to send, borrowed from a file or from [`Memory`].
///
/// A file is read while it is sent: who changes it meanwhile changes what the peer receives, and a file that
/// shrinks ends the sending early with [`crate::Error::Ended`].
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    descriptor: BorrowedFd<'a>,
    memory: Option<&'a Arc<Region>>,
}

impl<'a, F: AsFd> From<&'a F> for Source<'a> {
    /// Anything with a descriptor that has offsets: a regular file, a block device.
    fn from(file: &'a F) -> Self {
        Self { descriptor: file.as_fd(), memory: None }
    }
}

impl<'a> From<&'a Memory> for Source<'a> {
    fn from(memory: &'a Memory) -> Self {
        Self { descriptor: memory.file.as_fd(), memory: Some(&memory.region) }
    }
}

impl<'a> Source<'a> {
    /// The descriptor behind it: the file's own, or the memory file's. Not for writing.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'a> {
        self.descriptor
    }

    /// Its memory, if that is what it is.
    pub(crate) fn as_memory(&self) -> Option<&'a Arc<Region>> {
        self.memory
    }

    /// Which file it is, and in which state: another file, or the same one after it was written to, differs.
    pub(crate) fn identity(&self) -> io::Result<Identity> {
        let stat = rustix::fs::fstat(self.descriptor)?;
        Ok(Identity {
            device: stat.st_dev,
            inode: stat.st_ino,
            changed: (stat.st_ctime, stat.st_ctime_nsec as u64),
        })
    }
}

/// What tells a file from every other, and from itself before a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, u64),
}

/// Why something cannot be sent from.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Neither a regular file nor a block device.
    #[error("it is not a regular file: only those can be sent without passing through the program")]
    NotAFile,
    /// There is nothing in it.
    #[error(
        "it is empty, or the kernel makes its content up as it is read: there is nothing to send"
    )]
    Empty,
    /// The kernel refused a step.
    #[error("{step}: {source}")]
    Failed {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The length of a regular file with something in it.
pub fn file_len(file: &File) -> Result<u64, SourceError> {
    let failed = |source| SourceError::Failed { step: "asking for the file's size", source };
    let stat = rustix::fs::fstat(file).map_err(|errno| failed(errno.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(SourceError::NotAFile);
    }
    match u64::try_from(stat.st_size) {
        Ok(len) if len > 0 => Ok(len),
        _ => Err(SourceError::Empty),
    }
}

/// Memory that is written once and sent from then on, through any path.
///
/// It is a memory file (memfd, Linux 3.17), so that the paths that take a descriptor can send it as well as
/// those that take an address. No method writes to it, so pages of it may travel; who gets hold of its
/// descriptor another way must not write either. (It is not sealed: io_uring registers only writable memory.)
/// For memory that is used again and again, see [`crate::Pool`] and [`crate::Sender::lend`].
#[derive(Debug)]
pub struct Memory {
    file: File,
    region: Arc<Region>,
}

impl Memory {
    /// The next `len` bytes of `content`.
    pub fn new(content: impl Read, len: usize) -> Result<Self, SourceError> {
        let failed = |step| move |source| SourceError::Failed { step, source };
        if len == 0 {
            return Err(SourceError::Empty);
        }
        let mut file = rustix::fs::memfd_create("haul-source", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|errno| failed("making a memory file")(errno.into()))?;
        let written = io::copy(&mut content.take(len as u64), &mut file)
            .map_err(failed("filling a memory file"))?;
        if written < len as u64 {
            return Err(failed("filling a memory file")(io::ErrorKind::UnexpectedEof.into()));
        }
        Self::of_file(file)
    }

    /// The memory of a memory file that somebody has filled and nobody writes again.
    ///
    /// The file must be open for writing, since only writable memory can be registered with io_uring.
    pub fn of_file(file: File) -> Result<Self, SourceError> {
        let len = file_len(&file)?;
        let region = Region::of_memory_file(&file, len as usize)
            .map_err(|source| SourceError::Failed { step: "mapping a memory file", source })?;
        Ok(Self { file, region: Arc::new(region) })
    }

    /// How many bytes it holds.
    #[expect(clippy::len_without_is_empty, reason = "empty memory cannot be made")]
    pub fn len(&self) -> u64 {
        self.region.len() as u64
    }

    /// The memory file. Not for writing.
    pub fn file(&self) -> &File {
        &self.file
    }
}
