//! The version of a file that the destination has, whose blocks become a part of the new version.
//!
//! Where the file system can share blocks between files (Btrfs, XFS), the basis is a snapshot, and
//! equal blocks take no space. Elsewhere another program may change the file, so a block is
//! compared and copied from one read.

use crate::block::{BlockHash, BlockKey, for_each_block};
use crate::options::Delta;
use crate::read_ahead::read_ahead;
use crate::source::next_data;
use rustix::fs::{Advice, FileType, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The most blocks that are found at any place: 256 GiB in blocks of 64 KiB, and about 200 MiB of
/// memory.
const PLACES_MAX: usize = 1 << 22;

/// The places of a file that are sampled.
const SAMPLES: u64 = 32;
/// The pages of the write leave the page cache once they are on the disk (`RWF_DONTCACHE`, Linux
/// 6.14).
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
/// File systems share blocks of this size, or of a smaller size.
const SHARED_BYTES: u64 = 64 << 10;

/// The version of a file that the destination has.
#[derive(Debug)]
pub struct Basis {
    file: File,
    /// Whether the file is a snapshot, which no other program can change.
    is_snapshot: bool,
    /// Whether the basis was in the page cache before the comparison.
    was_cached: bool,
    /// Whether copies of equal blocks leave the page cache, because the basis was not there. False
    /// after the file system refused `RWF_DONTCACHE`.
    skips_cache: AtomicBool,
    /// The places of blocks that are cut by their content.
    places: OnceLock<HashMap<BlockHash, u64>>,
}

impl Basis {
    /// Opens the regular file with this name. For [`Delta::Fixed`], makes a snapshot in the folder
    /// of the new version if the file system can.
    pub fn open(
        folder: impl AsFd,
        name: &[u8],
        snapshot_folder: &OwnedFd,
        delta: Delta,
    ) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::STALE);
        }
        let was_cached = is_cached(&file, stat.st_size as u64);
        // Blocks that are cut by their content are not aligned.
        let snapshot = (delta == Delta::Fixed).then(|| snapshot(snapshot_folder, &file).ok());
        let snapshot = snapshot.flatten();
        let is_snapshot = snapshot.is_some();
        let file = snapshot.unwrap_or(file);
        let skips_cache = AtomicBool::new(!was_cached);
        Ok(Self { file, is_snapshot, was_cached, skips_cache, places: OnceLock::new() })
    }

    /// Reads a range ahead.
    pub fn read_ahead(&self, at: u64, bytes: u64) {
        read_ahead(&self.file, at..at + bytes);
    }

    /// Removes a range from the page cache, unless the basis was in the page cache before.
    pub fn forget(&self, at: u64, bytes: u64) {
        if !self.was_cached {
            let bytes = NonZeroU64::new(bytes);
            let _ = rustix::fs::fadvise(&self.file, at, bytes, Advice::DontNeed);
        }
    }

    /// Writes equal blocks to the new version. Their pages stay in the page cache if the basis was
    /// in the page cache.
    pub fn write_to(&self, to: &File, data: &[u8], at: u64) -> rustix::io::Result<()> {
        let mut written = 0;
        while self.skips_cache.load(Relaxed) && written < data.len() {
            let part = [IoSlice::new(&data[written..])];
            match rustix::io::pwritev2(to, &part, at + written as u64, DONTCACHE) {
                Ok(count @ 1..) => written += count,
                Err(Errno::INTR) => {}
                Ok(0) | Err(_) => self.skips_cache.store(false, Relaxed),
            }
        }
        let rest = to.write_all_at(&data[written..], at + written as u64);
        rest.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// Where a block is expected; `None` if no block has the hash.
    pub fn find(&self, key: &BlockKey, hash: &BlockHash, at: u64, delta: Delta) -> Option<u64> {
        if delta == Delta::Rolling { self.places(key).get(hash).copied() } else { Some(at) }
    }

    /// The places of all blocks, as far as the file can be read.
    fn places(&self, key: &BlockKey) -> &HashMap<BlockHash, u64> {
        self.places.get_or_init(|| {
            let (mut places, mut end) = (HashMap::new(), 0);
            // Holes are skipped, as the source skips holes.
            while let Ok(Some(data)) = next_data(&self.file, end, u64::MAX) {
                let mut at = data.start;
                let Ok((_, failure)) =
                    for_each_block(&self.file, data.clone(), Delta::Rolling, |block| {
                        if places.len() < PLACES_MAX {
                            places.insert(key.hash(block), at);
                        }
                        at += block.len() as u64;
                        Ok::<_, Infallible>(())
                    });
                if failure.is_some() || at < data.end {
                    break;
                }
                end = data.end;
            }
            places
        })
    }

    /// Reads a block. False if the basis ends before the end of the block.
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

/// Whether most of a file is in the page cache, by a sample.
fn is_cached(file: &File, size: u64) -> bool {
    let mut byte = [0];
    let is_place_cached = |place: &u64| {
        let at = size / SAMPLES * place;
        let mut parts = [IoSliceMut::new(&mut byte)];
        rustix::io::preadv2(file, &mut parts, at, ReadWriteFlags::NOWAIT).is_ok()
    };
    let cached = (0..SAMPLES).filter(is_place_cached).count();
    cached as u64 > SAMPLES / 2
}

/// A file without a name that shares the blocks of another file (FICLONE, Linux 4.5).
fn snapshot(folder: &OwnedFd, file: &File) -> rustix::io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let snapshot = rustix::fs::openat(folder, c".", flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::ioctl_ficlone(&snapshot, file)?;
    Ok(snapshot.into())
}
