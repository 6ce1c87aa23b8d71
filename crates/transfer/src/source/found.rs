//! What the walk found, and what it takes to read it.

use rustix::fs::{Mode, OFlags};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A regular file that was found.
#[derive(Debug)]
pub struct FoundFile {
    /// Its number as an entry.
    pub id: u64,
    /// The folder that holds it.
    pub folder: Arc<OpenFolder>,
    /// Its name in the folder.
    pub name: Vec<u8>,
    /// The size, in bytes.
    pub size: u64,
    /// Whether the file is packed with others.
    pub is_small: bool,
    /// The version of the content that was listed.
    pub version: u64,
    /// The ranges that the destination has.
    pub held: Vec<Range<u64>>,
    /// Whether the destination can compare blocks of the file.
    pub is_comparable: bool,
    /// Whether the name is a symbolic link, which is followed.
    pub is_behind_link: bool,
}

impl FoundFile {
    /// The path below the root of the transfer.
    pub fn relative_path(&self) -> Vec<u8> {
        joined(&self.folder.relative, &self.name)
    }
}

/// An open folder of the source.
#[derive(Debug)]
pub struct OpenFolder {
    pub folder: OwnedFd,
    /// The path, as the user will see it in messages; empty for the process's directory.
    pub path: Vec<u8>,
    /// The path below the root of the transfer, for the filter.
    pub relative: Vec<u8>,
    pub device: u64,
    pub inode: u64,
}

impl OpenFolder {
    /// An open folder with these paths.
    pub fn new(folder: OwnedFd, path: Vec<u8>, relative: Vec<u8>) -> rustix::io::Result<Self> {
        let stat = rustix::fs::fstat(&folder)?;
        Ok(Self { folder, path, relative, device: stat.st_dev, inode: stat.st_ino })
    }

    /// Opens a folder of this folder, through a link if `follows`.
    pub fn subfolder(&self, name: &[u8], follows: bool) -> rustix::io::Result<Self> {
        let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        flags.set(OFlags::NOFOLLOW, !follows);
        let folder = rustix::fs::openat(self, name, flags, Mode::empty())?;
        Self::new(folder, self.path_of(name), joined(&self.relative, name))
    }

    /// Whether both are the same folder.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }

    /// The path of an entry, for messages.
    pub fn path_of(&self, name: &[u8]) -> Vec<u8> {
        joined(&self.path, name)
    }
}

impl AsFd for OpenFolder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

/// A folder that was listed.
#[derive(Debug)]
pub struct ListedFolder {
    pub name: Vec<u8>,
    /// The number of the folder.
    pub id: u64,
    pub open: Arc<OpenFolder>,
}

/// The path of an entry of a folder.
pub fn joined(folder: &[u8], name: &[u8]) -> Vec<u8> {
    match folder {
        b"" => name.to_vec(),
        b"/" => [b"/", name].concat(),
        folder => [folder, b"/", name].concat(),
    }
}
