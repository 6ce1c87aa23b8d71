//! The version of a file that the destination has, whose blocks become a part of the new version.
//!
//! Where the file system can share blocks between files (Btrfs, XFS), the basis is a snapshot, and
//! equal blocks take no space. Elsewhere another program may change the file, so a block is
//! compared and copied from one read.

use crate::block::{BlockHash, BlockKey, for_each_block};
use crate::options::Delta;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// The most blocks that are found at any place: 256 GiB in blocks of 64 KiB, and about 200 MiB of
/// memory.
const PLACES_MAX: usize = 1 << 22;

/// File systems share blocks of this size, or of a smaller size.
const SHARED_BYTES: u64 = 64 << 10;

/// The version of a file that the destination has.
#[derive(Debug)]
pub struct Basis {
    file: File,
    /// Whether the file is a snapshot, which no other program can change.
    is_snapshot: bool,
    /// The places of blocks that are cut by their content.
    places: OnceLock<HashMap<BlockHash, u64>>,
}

impl Basis {
    /// Opens the regular file with this name. If the file system can, makes a snapshot in the
    /// folder of the new version.
    pub fn open(
        folder: impl AsFd,
        name: &[u8],
        snapshot_folder: &OwnedFd,
    ) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::STALE);
        }
        let snapshot = snapshot(snapshot_folder, &file);
        let is_snapshot = snapshot.is_ok();
        Ok(Self { file: snapshot.unwrap_or(file), is_snapshot, places: OnceLock::new() })
    }

    /// Where a block is expected; `None` if no block has the hash.
    pub fn find(&self, key: &BlockKey, hash: &BlockHash, at: u64, delta: Delta) -> Option<u64> {
        if delta == Delta::Rolling { self.places(key).get(hash).copied() } else { Some(at) }
    }

    /// The places of all blocks, as far as the file can be read.
    fn places(&self, key: &BlockKey) -> &HashMap<BlockHash, u64> {
        self.places.get_or_init(|| {
            let (mut places, mut at) = (HashMap::new(), 0);
            let Ok(_) = for_each_block(&self.file, 0..u64::MAX, Delta::Rolling, |block| {
                if places.len() < PLACES_MAX {
                    places.insert(key.hash(block), at);
                }
                at += block.len() as u64;
                Ok::<_, Infallible>(())
            });
            places
        })
    }

    /// Reads a block. False if the file does not have so many bytes there.
    pub fn read(&self, block: &mut [u8], at: u64) -> bool {
        self.file.read_exact_at(block, at).is_ok()
    }

    /// Whether two blocks of the new version that follow each other can be copied by one call.
    pub fn may_join(&self, end: u64, next: u64) -> bool {
        !self.is_snapshot || end == next
    }

    /// Shares a range with another file. False if the basis is not a snapshot, if the file system
    /// cannot share the range because the range is not aligned, or if the kernel refuses.
    pub fn share_with(&self, to: &File, from: u64, at: u64, bytes: usize) -> bool {
        let is_aligned = [from, at, bytes as u64].iter().all(|&place| place % SHARED_BYTES == 0);
        if !is_aligned {
            return false;
        }
        let (mut from, mut at, mut left) = (from, at, bytes);
        while self.is_snapshot && left > 0 {
            let copied =
                rustix::fs::copy_file_range(&self.file, Some(&mut from), to, Some(&mut at), left);
            match copied {
                Ok(0) | Err(_) => return false,
                Ok(copied) => left -= copied,
            }
        }
        left == 0
    }
}

/// A file without a name that shares the blocks of another file (FICLONE, Linux 4.5).
fn snapshot(folder: &OwnedFd, file: &File) -> rustix::io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let snapshot = rustix::fs::openat(folder, c".", flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::ioctl_ficlone(&snapshot, file)?;
    Ok(snapshot.into())
}
