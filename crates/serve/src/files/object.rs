//! An open file with everything that a response needs, and checks that it has not changed since.
//!
//! The bytes that are sent must belong to the entity tag that is sent with them. A version of a
//! file is identified by its inode, its size and the time of its last change (`ctime`, which cannot
//! be set back, unlike `mtime`).
//!
//! The change time is ambiguous at first. A write sets it at the start of the call and changes
//! bytes after that, and before Linux 6.13 two changes within one clock tick have the same time. So
//! a file that has just changed gets no entity tag and is not cached.
//!
//! Limitation: if a program has mapped the file, the kernel records only its first write to a page.
//! Later writes to that page change the bytes but no time, and are not detected.

use haul::Source;
use haul_fs::{Blocking, Root};
use haul_http::conditional::Validators;
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time after a change in which `ctime` is ambiguous: the call may still be writing, or another
/// change may have the same time.
const AMBIGUOUS_FOR: Duration = Duration::from_secs(2);
/// The time after a change in which another one is likely; see [`Object::is_settled`].
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// The time for which one `fstat` is valid. Sending a few hundred KiB takes as long, and no `fstat`
/// detects a change in that time.
const REVALIDATE_AFTER_NS: u64 = 100_000;
/// The last second of the year 9999, in seconds since 1970.
const HTTP_DATE_SECONDS_MAX: u64 = 253_402_300_799;
/// Attempts to read a small file that changes while it is read.
const READS_MAX: usize = 3;

/// Identifies one version of a file. Times are in seconds and nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    device: u64,
    inode: u64,
    len: u64,
    changed: (i64, u64),
    modified: (i64, u64),
    links: u64,
}

/// An opened file, by its kind.
#[derive(Debug)]
pub enum Opened {
    /// A regular file.
    File(Object),
    /// A directory.
    Directory(File),
    /// A file without content to serve: a device, a pipe, a socket.
    Other,
}

/// Opens the file at `path` below the root for reading. The content of files of up to
/// `content_bytes_max` bytes is read at once.
pub fn open(
    root: &Root,
    path: &[u8],
    content_bytes_max: u64,
    blocking: Blocking,
) -> io::Result<Opened> {
    // NONBLOCK: opening a FIFO without a writer must not block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    Opened::of(root.open_below(path, flags, Mode::empty(), blocking)?, content_bytes_max, blocking)
}

/// An open regular file.
#[derive(Debug)]
pub struct Object {
    file: File,
    version: FileVersion,
    validators: Validators,
    content: Option<Box<[u8]>>,
    is_cacheable: bool,
    /// The second of the clock in which the whole file was last found in memory.
    resident_at: AtomicU32,
    /// The change time (`ctime`) at the first check after the file's last name was removed.
    ctime_after_unlink: OnceLock<(i64, u64)>,
    /// The time by the event loop's clock at which the file was last found unchanged.
    validated_at_ns: AtomicU64,
}

impl FileVersion {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            len: u64::try_from(stat.st_size).unwrap_or(0),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            links: stat.st_nlink,
        }
    }

    fn changed_at(&self) -> SystemTime {
        let since =
            Duration::new(u64::try_from(self.changed.0).unwrap_or(0), self.changed.1 as u32);
        UNIX_EPOCH + since
    }

    fn age(&self) -> Duration {
        // A file from the future (the clock was set back) counts as new.
        SystemTime::now().duration_since(self.changed_at()).unwrap_or(Duration::ZERO)
    }

    fn modified_seconds(&self) -> u64 {
        u64::try_from(self.modified.0).unwrap_or(0)
    }

    fn validators(&self) -> Validators {
        if self.age() < AMBIGUOUS_FOR {
            return Validators::default();
        }
        // `ctime` rather than `mtime`: tools that restore times (rsync, tar, reproducible builds)
        // give two versions the same `mtime`, and one of them would be taken for the other.
        // A date is omitted if it is in the future or cannot be expressed: RFC 9110 has four digits
        // for the year.
        let modified = self.modified_seconds();
        let is_valid_date = modified <= HTTP_DATE_SECONDS_MAX
            && SystemTime::now() >= UNIX_EPOCH + Duration::from_secs(modified);
        let etag = format!(
            "\"{:x}-{:x}-{:x}{:08x}\"",
            self.inode, self.len, self.changed.0, self.changed.1
        );
        Validators { etag: Some(etag.into()), modified: is_valid_date.then_some(modified) }
    }
}

impl Opened {
    /// Determines the kind of an open file, and reads files of up to `content_bytes_max` bytes into
    /// memory.
    pub fn of(file: File, content_bytes_max: u64, blocking: Blocking) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                Object::of(file, &stat, content_bytes_max, blocking).map(Self::File)
            }
            FileType::Directory => Ok(Self::Directory(file)),
            _ => Ok(Self::Other),
        }
    }
}

impl Object {
    fn of(file: File, stat: &Stat, content_bytes_max: u64, blocking: Blocking) -> io::Result<Self> {
        let mut version = FileVersion::of(stat);
        let mut content = None;
        let mut is_consistent = true;
        if version.len <= content_bytes_max {
            for _ in 0..READS_MAX {
                content = read_all(&file, version.len as usize, blocking)?;
                let after = FileVersion::of(&rustix::fs::fstat(&file)?);
                is_consistent = after == version && content.is_some();
                if is_consistent || after.len > content_bytes_max {
                    break;
                }
                version = after;
            }
        }
        let validators = if is_consistent { version.validators() } else { Validators::default() };
        let is_cacheable = is_consistent && validators.etag.is_some() && version.links > 0;
        Ok(Self {
            file,
            version,
            validators,
            content: content.filter(|_| is_consistent),
            is_cacheable,
            resident_at: AtomicU32::new(u32::MAX),
            ctime_after_unlink: OnceLock::new(),
            validated_at_ns: AtomicU64::new(u64::MAX),
        })
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.version.len
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
        self.is_cacheable
    }

    /// Whether the file is still this version: not written to, replaced, renamed or deleted. Costs
    /// one `fstat`.
    pub fn is_current(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| FileVersion::of(&stat) == self.version)
    }

    /// Like [`Object::is_current`], but also true if the file was deleted or replaced meanwhile,
    /// which changes none of its bytes.
    ///
    /// Limitation: a further change between the deletion and the first check after it is not
    /// detected if it keeps the size and `mtime`.
    pub fn is_unchanged(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| {
            let now = FileVersion::of(&stat);
            let as_before =
                FileVersion { links: self.version.links, changed: self.version.changed, ..now };
            now == self.version
                || now.links == 0
                    && as_before == self.version
                    && *self.ctime_after_unlink.get_or_init(|| now.changed) == now.changed
        })
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

    /// Whether the last change is at least ten seconds old ([`SETTLED_AFTER`]).
    ///
    /// Pages of a file that is being written to would change on their way to the client. So such a
    /// file is copied piece by piece, and each copy is checked before it is sent.
    pub fn is_settled(&self, now: SystemTime) -> bool {
        now.duration_since(self.version.changed_at()).is_ok_and(|age| age >= SETTLED_AFTER)
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

/// Reads the first `len` bytes; `None` if the file has become shorter.
fn read_all(file: impl AsFd, len: usize, blocking: Blocking) -> io::Result<Option<Box<[u8]>>> {
    let flags = match blocking {
        Blocking::None => ReadWriteFlags::NOWAIT,
        Blocking::Disk => ReadWriteFlags::empty(),
    };
    let mut content = vec![0; len];
    let mut filled = 0;
    while filled < len {
        let rest = &mut [IoSliceMut::new(&mut content[filled..])];
        match rustix::io::preadv2(&file, rest, filled as u64, flags) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;

    fn object(path: &std::path::Path) -> Object {
        match Opened::of(File::open(path).unwrap(), 100, Blocking::Disk).unwrap() {
            Opened::File(object) => object,
            other => panic!("{other:?}"),
        }
    }

    type Change = fn(&std::path::Path);

    #[test]
    fn every_change_to_a_file_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let changes: [(&str, Change); 6] = [
            ("written", |path| fs::write(path, "other").unwrap()),
            ("truncated", |path| {
                File::options().write(true).open(path).unwrap().set_len(1).unwrap();
            }),
            ("deleted", |path| fs::remove_file(path).unwrap()),
            ("renamed", |path| fs::rename(path, path.with_extension("old")).unwrap()),
            ("replaced", |path| {
                fs::write(path.with_extension("new"), "first").unwrap();
                fs::rename(path.with_extension("new"), path).unwrap();
            }),
            ("written with its time set back", |path| {
                let modified = fs::metadata(path).unwrap().modified().unwrap();
                fs::write(path, "other").unwrap();
                File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
            }),
        ];
        for (name, change) in changes {
            fs::write(&path, "first").unwrap();
            let object = object(&path);
            assert!(object.is_current());
            change(&path);
            assert!(!object.is_current(), "{name}");
            let keeps_bytes = ["deleted", "replaced"].contains(&name);
            assert_eq!(object.is_unchanged(), keeps_bytes, "{name}");
            assert_eq!(object.content(), Some(&b"first"[..]), "the content that was read stays");
        }
    }

    #[test]
    fn a_check_is_valid_for_a_short_time_and_a_failed_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "first").unwrap();
        let object = object(&path);
        assert!(object.is_unchanged_at(7), "the first call checks");
        fs::write(&path, "other").unwrap();
        assert!(object.is_unchanged_at(7 + REVALIDATE_AFTER_NS));
        assert!(!object.is_unchanged_at(6), "a later check proves nothing about an earlier time");
        assert!(!object.is_unchanged_at(7), "the change was detected");
        fs::write(&path, "first").unwrap();
        let object = self::object(&path);
        assert!(object.revalidate_at(7));
        fs::write(&path, "other").unwrap();
        assert!(!object.is_unchanged_at(8 + REVALIDATE_AFTER_NS), "the check is too old");
        assert!(!object.revalidate_at(8));
    }

    #[test]
    fn a_change_after_the_deletion_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "first").unwrap();
        let object = object(&path);
        let mut writer = File::options().write(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(object.is_unchanged() && object.is_unchanged());
        let modified = writer.metadata().unwrap().modified().unwrap();
        writer.write_all(b"other").unwrap();
        writer.set_modified(modified).unwrap();
        assert!(!object.is_unchanged());
    }

    #[test]
    fn a_file_that_has_just_changed_has_no_entity_tag_and_is_not_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "first").unwrap();
        let fresh = object(&path);
        let version = FileVersion { changed: (0, 0), ..fresh.version };
        assert!(version.validators().etag.is_some());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let version = FileVersion { changed: (now.as_secs() as i64 + 1, 0), ..fresh.version };
        assert_eq!(version.validators(), Validators::default());
        assert!(!fresh.is_settled(SystemTime::now()));
    }

    #[test]
    fn two_versions_with_the_same_mtime_have_different_entity_tags() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut tags = Vec::new();
        for content in ["one", "two"] {
            fs::write(&path, content).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
            std::thread::sleep(AMBIGUOUS_FOR + Duration::from_millis(100));
            tags.push(object(&path).validators().etag.clone().unwrap());
        }
        assert_ne!(tags[0], tags[1]);
    }

    #[test]
    fn a_fifo_without_a_writer_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let root = Root::open(folder.path(), haul_fs::Symlinks::Inside).unwrap();
        assert!(matches!(open(&root, b"pipe", 100, Blocking::Disk), Ok(Opened::Other)));
    }
}
