//! What was found out about files while they were sent, for the entity tags of later responses.

use lru::LruCache;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most files that are remembered. The one that was recorded longest ago is forgotten first.
const FILES_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// Identifies a file. The kernel uses the numbers of deleted inodes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The number of the device.
    pub device: u64,
    /// The number of the inode.
    pub inode: u64,
    /// The time when the inode was made, in seconds and nanoseconds since 1970; 0 if the file
    /// system does not record it.
    pub born: (i64, u32),
}

/// The recorded facts about one file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileFacts {
    /// A write left its size and `mtime` as they had been.
    pub has_disguised_writes: bool,
    /// It grew while it was sent.
    pub has_grown: bool,
}

/// The recorded facts about files.
#[derive(Debug)]
pub struct FileHistory(Mutex<LruCache<FileId, FileFacts>>);

impl FileHistory {
    /// Records a write after which the size and `mtime` were the same as before.
    pub fn record_disguised_write(&self, file: FileId) {
        self.lock().get_or_insert_mut(file, FileFacts::default).has_disguised_writes = true;
    }

    /// Records that a file grew while it was sent.
    pub fn record_growth(&self, file: FileId) {
        self.lock().get_or_insert_mut(file, FileFacts::default).has_grown = true;
    }

    /// The facts about a file.
    pub fn facts(&self, file: FileId) -> FileFacts {
        self.lock().peek(&file).copied().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<FileId, FileFacts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for FileHistory {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(FILES_MAX)))
    }
}
