//! An open file with everything that a response needs, and checks that it has not changed since.
//!
//! The bytes that are sent must belong to the entity tag that is sent with them. A version of a
//! file is identified by its inode, the time when the inode was made, the size and the time of the
//! last write (`mtime`). A change of metadata alone, such as a new mode, name or link, is no other
//! version. It sets `ctime`, as a write does, so a [`Watch`] tells them apart while the file is
//! sent.
//!
//! A file that is being written has no entity tag (`files/opener.rs`), and may grow while it is
//! sent. The response has the bytes up to the length that the file had, as a copy of a log has.
//!
//! Limitations: if a program has mapped the file, the kernel records only its first write to a
//! page. Later writes to that page change the bytes but no time, and are not detected. A program
//! that writes to a file in place, keeps its size and sets `mtime` back gives two versions one tag,
//! unless the file is being sent meanwhile.

use crate::files::history::{FileHistory, FileId};
use crate::files::watch::Watch;
use haul::Source;
use haul_fs::Blocking;
use haul_http::conditional::Validators;
use rustix::fs::Stat;
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time after a write in which another one is likely; see [`Object::is_settled`].
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// The time for which one `fstat` is valid. Sending a few hundred KiB takes as long, and no `fstat`
/// detects a change in that time.
pub const REVALIDATE_AFTER_NS: u64 = 100_000;
/// The length of the samples that tell growth from other bytes.
const SAMPLE_BYTES: u64 = 4096;

/// The state of a file, which holds its version. Times are in seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileVersion {
    pub device: u64,
    pub inode: u64,
    pub len: u64,
    pub changed: (i64, u64),
    pub modified: (i64, u64),
    pub links: u64,
}

/// An open regular file.
#[derive(Debug)]
pub struct Object {
    file: File,
    id: FileId,
    version: FileVersion,
    validators: Validators,
    history: Arc<FileHistory>,
    /// The whole content of a small file.
    content: Option<Box<[u8]>>,
    /// Sees writes to a large file.
    watch: Option<Watch>,
    /// Samples of a large file that may grow.
    samples: Option<Samples>,
    /// Whether no program was writing to the file when it was opened, or none ever does.
    is_complete: bool,
    /// The second of the clock in which the whole file was last found in memory.
    resident_at: AtomicU32,
    /// Without a watch: the time `ctime` at the first check after the file's last name was removed.
    ctime_after_unlink: OnceLock<(i64, u64)>,
    /// The time by the event loop's clock at which the file was last found unchanged.
    validated_at_ns: AtomicU64,
}
impl FileVersion {
    /// The state that `fstat` has returned.
    pub fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            len: u64::try_from(stat.st_size).unwrap_or(0),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            links: stat.st_nlink,
        }
    }

    /// The time since the last write. A time in the future that no running clock explains was set
    /// by a program, and is as good as an old one.
    pub fn age(&self, now: SystemTime) -> Duration {
        let modified =
            Duration::new(u64::try_from(self.modified.0).unwrap_or(0), self.modified.1 as u32);
        let modified = UNIX_EPOCH + modified;
        now.duration_since(modified).unwrap_or_else(|ahead| ahead.duration())
    }
}

impl Object {
    /// A file of this version. Errors of `fstat` while it is sent count as a change.
    pub fn new(
        file: File,
        id: FileId,
        version: FileVersion,
        validators: Validators,
        history: &Arc<FileHistory>,
    ) -> Self {
        Self {
            file,
            id,
            version,
            validators,
            history: Arc::clone(history),
            content: None,
            watch: None,
            samples: None,
            is_complete: false,
            resident_at: AtomicU32::new(u32::MAX),
            ctime_after_unlink: OnceLock::new(),
            validated_at_ns: AtomicU64::new(u64::MAX),
        }
    }

    /// Adds the whole content, read in this version.
    pub fn with_content(self, content: Option<Box<[u8]>>) -> Self {
        Self { content, ..self }
    }

    /// Adds a watch that began before this version was found.
    pub fn with_watch(self, watch: Option<Watch>) -> Self {
        Self { watch, ..self }
    }

    /// Lets the file grow while it is sent.
    pub fn with_samples(self, samples: Option<Samples>) -> Self {
        Self { samples, ..self }
    }

    /// Sets whether no program was writing to the file in this version, or none ever does. Then its
    /// pages may be sent.
    pub fn with_is_complete(self, is_complete: bool) -> Self {
        Self { is_complete, ..self }
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.version.len
    }

    /// Adds text to the entity tag, if there is one.
    pub fn add_to_tag(&mut self, text: &str) {
        if let Some(etag) = &mut self.validators.etag {
            let tag = etag.strip_suffix('"').unwrap_or(etag);
            *etag = format!("{tag}{text}\"").into();
        }
    }

    /// The validators of this version.
    pub fn validators(&self) -> &Validators {
        &self.validators
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The whole content of this version, if the file is small.
    pub fn content(&self) -> Option<&[u8]> {
        self.content.as_deref()
    }

    /// The memory that the content takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.content.as_ref().map_or(0, |content| content.len())
    }

    /// Whether it may be cached and sent to other clients: its version is unambiguous.
    pub fn is_cacheable(&self) -> bool {
        self.validators.etag.is_some() && self.version.links > 0
    }

    /// Whether the file is still this version: not written to, replaced, renamed or deleted. Costs
    /// one `fstat`.
    pub fn is_current(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| FileVersion::of(&stat) == self.version)
    }

    /// Whether the bytes of the file up to its length in this version are unchanged. Other than for
    /// [`Object::is_current`], it may have been deleted, replaced, renamed, or got another mode.
    ///
    /// A file that was opened while it was being written may also have grown. Of its bytes only the
    /// samples are compared.
    pub fn is_unchanged(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| self.has_bytes_of(FileVersion::of(&stat)))
    }

    fn has_bytes_of(&self, now: FileVersion) -> bool {
        if now == self.version {
            return true;
        }
        if now.len > self.version.len {
            self.history.record_growth(self.id);
        }
        if let Some(samples) = self.samples.filter(|_| now.len >= self.version.len) {
            // An append changes the time first, and the length after that.
            return Samples::read(&self.file, self.version.len, Blocking::Disk)
                .is_ok_and(|found| found == samples);
        }
        if now.modified != self.version.modified || now.len != self.version.len {
            return false;
        }
        let Some(watch) = &self.watch else {
            return now.links == 0
                && *self.ctime_after_unlink.get_or_init(|| now.changed) == now.changed;
        };
        if watch.has_seen_write() {
            self.history.record_disguised_write(self.id);
            return false;
        }
        true
    }

    /// Like [`Object::is_unchanged`], but a check within the last 0.1 ms ([`REVALIDATE_AFTER_NS`])
    /// is enough. For a caller that sends pages of the file and checks it again afterwards.
    ///
    /// `now_ns` is the time by the event loop's clock.
    pub fn is_unchanged_at(&self, now_ns: u64) -> bool {
        let validated_ns = self.validated_at_ns.load(Relaxed);
        now_ns.checked_sub(validated_ns).is_some_and(|age_ns| age_ns <= REVALIDATE_AFTER_NS)
            || self.revalidate_at(now_ns)
    }

    /// Like [`Object::is_unchanged`], and records the check for [`Object::is_unchanged_at`].
    ///
    /// `now_ns` is the time by the event loop's clock, or an earlier one.
    pub fn revalidate_at(&self, now_ns: u64) -> bool {
        let is_unchanged = self.is_unchanged();
        self.validated_at_ns.store(if is_unchanged { now_ns } else { u64::MAX }, Relaxed);
        is_unchanged
    }

    /// Whether it was modified at the same time as `other` or later.
    pub fn is_as_new_as(&self, other: &Self) -> bool {
        self.version.modified >= other.version.modified
    }

    /// Whether its pages may be sent: no program was writing to it when it was opened, or the last
    /// write is at least ten seconds old ([`SETTLED_AFTER`]).
    ///
    /// Pages of a file that is being written to would change on their way to the client. So such a
    /// file is copied piece by piece, and each copy is checked before it is sent.
    pub fn is_settled(&self, now: SystemTime) -> bool {
        self.is_complete || self.version.age(now) >= SETTLED_AFTER
    }

    /// Whether a range of the file is in memory, so that sending it does not wait for the disk.
    ///
    /// As [`Source::is_resident`]. If the range is the whole file, one positive check is valid for
    /// one second: `seconds` of the caller's clock.
    pub fn is_resident(&self, range: &Range<u64>, seconds: u32) -> bool {
        let is_whole = range.end - range.start >= self.version.len;
        if is_whole && self.resident_at.load(Relaxed) == seconds {
            return true;
        }
        let is_resident = Source::from(&self.file).is_resident(range.clone());
        if is_whole && is_resident {
            self.resident_at.store(seconds, Relaxed);
        }
        is_resident
    }
}

/// Hashes of the first and the last bytes of a version of a file.
///
/// A file that has grown has them still. A program that writes a longer file in its place changes
/// them, unless both begin and end alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Samples {
    first: u64,
    last: u64,
}

impl Samples {
    /// Reads the samples of a file's first `len` bytes. The errors come from `preadv2`:
    /// `WouldBlock` if the file is not in memory and may not be waited for, and `UnexpectedEof` if
    /// the file became shorter.
    pub fn read(file: &File, len: u64, blocking: Blocking) -> io::Result<Self> {
        let sample = |range: Range<u64>| {
            let bytes = read_range(file, range, blocking)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let mut hasher = DefaultHasher::new();
            hasher.write(&bytes);
            io::Result::Ok(hasher.finish())
        };
        Ok(Self {
            first: sample(0..len.min(SAMPLE_BYTES))?,
            last: sample(len.saturating_sub(SAMPLE_BYTES)..len)?,
        })
    }
}

/// Reads a range of a file; `None` if the file is shorter.
pub fn read_range(
    file: impl AsFd,
    range: Range<u64>,
    blocking: Blocking,
) -> io::Result<Option<Box<[u8]>>> {
    let flags = match blocking {
        Blocking::None => ReadWriteFlags::NOWAIT,
        Blocking::Disk => ReadWriteFlags::empty(),
    };
    let mut content = vec![0; (range.end - range.start) as usize];
    let mut filled = 0;
    while filled < content.len() {
        let rest = &mut [IoSliceMut::new(&mut content[filled..])];
        match rustix::io::preadv2(&file, rest, range.start + filled as u64, flags) {
            Ok(0) => return Ok(None),
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            // The file system cannot read without blocking, so an offload thread has to read.
            Err(Errno::OPNOTSUPP) if blocking == Blocking::None => {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(Some(content.into()))
}
