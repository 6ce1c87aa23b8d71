//! Reads the files of the source.

use crate::attributes;
use crate::checksum::crc;
use crate::message::Time;
use crate::source::found::FoundFile;
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// A file of up to this many bytes is packed with others.
pub const SMALL_FILE_BYTES: usize = 128 << 10;
/// How often a file that changes while it is read is read.
pub const READS_MAX: u32 = 3;

/// What was read of a small file.
pub struct Content {
    pub bytes: usize,
    pub mtime: Time,
    /// Whether the file changed during each attempt to read it.
    pub has_changed: bool,
}

/// Opens a file that was found, unless something else than a file has its name now.
pub fn open(found: &FoundFile) -> rustix::io::Result<(File, Stat)> {
    // A named pipe that has the name now must not block.
    let mut flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, !found.is_behind_link);
    let file = rustix::fs::openat(&*found.folder, &found.name[..], flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::STALE);
    }
    Ok((file.into(), stat))
}

/// Whether a file is packed with others.
pub fn is_small(stat: &Stat) -> bool {
    let is_sparse = (stat.st_blocks as u64) * 512 < stat.st_size as u64;
    stat.st_size as u64 <= SMALL_FILE_BYTES as u64 && !is_sparse
}

/// Reads a small file into the beginning of a buffer of at least [`SMALL_FILE_BYTES`], again if the
/// file changed during the read.
pub fn read_small(file: &File, mut stat: Stat, buffer: &mut [u8]) -> rustix::io::Result<Content> {
    for attempt in 1.. {
        let size = usize::try_from(stat.st_size).unwrap_or(usize::MAX).min(SMALL_FILE_BYTES);
        let bytes = read_at(file, &mut buffer[..size], 0)?;
        let now = rustix::fs::fstat(file)?;
        let has_changed = !is_same(&now, &stat);
        let is_small = now.st_size as usize <= SMALL_FILE_BYTES;
        if !has_changed || attempt == READS_MAX || !is_small {
            return Ok(Content { bytes, mtime: attributes::mtime(&stat), has_changed });
        }
        stat = now;
    }
    Err(Errno::IO)
}

/// Fills the buffer from a place in the file, and returns the number of bytes up to the end of the
/// file.
pub fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> rustix::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }
    Ok(filled)
}

/// A number that changes whenever the content of a file changes: each change sets the time of the
/// last change (`st_ctime`), which programs cannot choose.
pub fn version(stat: &Stat) -> u64 {
    let times = [stat.st_mtime, stat.st_ctime].map(i64::to_le_bytes).concat();
    let numbers = [stat.st_ino, stat.st_size as u64, stat.st_mtime_nsec, stat.st_ctime_nsec];
    let numbers = numbers.map(u64::to_le_bytes).concat();
    crc(&[times, numbers].concat())
}

/// Whether a file did not change between two looks.
pub fn is_same(one: &Stat, other: &Stat) -> bool {
    let of = |stat: &Stat| {
        (stat.st_size, stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec)
    };
    of(one) == of(other)
}

/// The next range with data at or after a place; `None` if only a hole follows.
pub fn next_data(file: &File, at: u64, size: u64) -> rustix::io::Result<Option<Range<u64>>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not know holes.
        Err(Errno::INVAL) => return Ok((at < size).then_some(at..size)),
        Err(errno) => return Err(errno),
    };
    if start >= size {
        return Ok(None);
    }
    let end = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(size);
    Ok(Some(start..end.clamp(start, size)))
}
