//! What is sent: a file, or memory that nobody writes again.

use haul_sys::region::Region;
use rustix::fs::{FileType, MemfdFlags};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes to send.
///
/// A file is read while it is sent: who changes it meanwhile changes what the peer receives, and a file that
/// shrinks ends the sending early with [`crate::PathError::Ended`].
#[derive(Debug)]
pub struct Source {
    file: File,
    len: u64,
    memory: Option<Arc<Region>>,
    number: u64,
}

/// Numbers the sources of a process, so that a path can tell whose bytes it holds.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Why something cannot be sent from.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Neither a regular file nor a block device.
    #[error("it is not a regular file: only those can be sent without passing through the program")]
    NotAFile,
    /// There is nothing in it.
    #[error("it is empty, or the kernel makes its content up as it is read: there is nothing to send")]
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

impl Source {
    /// The bytes of a regular file, as many as it has now.
    pub fn file(file: File) -> Result<Self, SourceError> {
        let failed = |source| SourceError::Failed { step: "asking for the file's size", source };
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(SourceError::NotAFile);
        }
        match u64::try_from(stat.st_size) {
            Ok(len) if len > 0 => {
                Ok(Self { file, len, memory: None, number: NEXT_NUMBER.fetch_add(1, Relaxed) })
            }
            _ => Err(SourceError::Empty),
        }
    }

    /// The next `len` bytes of `content`, held in memory.
    ///
    /// The memory is a memory file (memfd, Linux 3.17), so that the paths that take a descriptor can send it
    /// as well as those that take an address. No method of a source writes to it, so pages of it may travel;
    /// who gets hold of its descriptor another way must not write either. (It is not sealed: io_uring
    /// registers only writable memory.)
    pub fn memory(content: impl Read, len: usize) -> Result<Self, SourceError> {
        let failed = |step| move |source| SourceError::Failed { step, source };
        if len == 0 {
            return Err(SourceError::Empty);
        }
        let mut file = rustix::fs::memfd_create("haul-source", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|errno| failed("making a memory file")(errno.into()))?;
        let written =
            io::copy(&mut content.take(len as u64), &mut file).map_err(failed("filling a memory file"))?;
        if written < len as u64 {
            return Err(failed("filling a memory file")(io::ErrorKind::UnexpectedEof.into()));
        }
        Self::memory_file(file)
    }

    /// The memory of a memory file that somebody has filled and nobody writes again.
    ///
    /// The file must be open for writing, since only writable memory can be registered with io_uring.
    pub fn memory_file(file: File) -> Result<Self, SourceError> {
        let source = Self::file(file)?;
        let region = Region::of_memory_file(&source.file, source.len as usize)
            .map_err(|error| SourceError::Failed { step: "mapping a memory file", source: error })?;
        Ok(Self { memory: Some(Arc::new(region)), ..source })
    }

    /// The same bytes as a file, without the memory.
    pub(crate) fn into_file(self) -> Self {
        Self { memory: None, ..self }
    }

    /// How many bytes there are to send.
    #[expect(clippy::len_without_is_empty, reason = "an empty source cannot be made")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Its number, no other source's of this process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether it is memory.
    pub fn is_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// The descriptor behind it: the file's own, or the memory file's. Not for writing.
    pub fn descriptor(&self) -> &File {
        &self.file
    }

    /// Its memory, if that is what it is.
    pub(crate) fn as_memory(&self) -> Option<&Arc<Region>> {
        self.memory.as_ref()
    }
}
