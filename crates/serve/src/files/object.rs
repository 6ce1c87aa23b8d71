//! An open file with all that a response about it needs, and the proof that it has not changed since.
//!
//! Bytes that are sent must belong to the entity tag that is sent with them. A file's version is told by its inode, its size
//! and the time of its last change (`ctime`, which unlike `mtime` nobody can set back). But a call that writes sets the time when it
//! begins, and changes bytes after that; and before Linux 6.13 two changes within one tick of the clock look alike. So a file that
//! has changed only just now is given no tag at all, and is not kept.
//!
//! What this does not see: a program that has mapped the file and goes on writing after the kernel has noted its first write to a
//! page; that changes the bytes and no time.

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

/// For so long after a change the call that made it may still be at work, or another may carry the same time.
const AMBIGUOUS_FOR: Duration = Duration::from_secs(2);
/// A file that changed so recently is likely to change again; see [`Object::is_settled`].
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// For so long a look is as good as one made now: sending a few hundred KiB takes as long, and no look tells what happens meanwhile.
const REVALIDATE_AFTER_NS: u64 = 100_000;
/// The last second of the year 9999.
const LAST_SECOND: u64 = 253_402_300_799;
/// How often a small file is read again that changes while it is read.
const READS_MAX: usize = 3;

/// What tells one version of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    changed: (i64, u64),
    modified: (i64, u64),
    links: u64,
}

/// What kind of thing was opened.
#[derive(Debug)]
pub enum Opened {
    /// A regular file.
    File(Object),
    /// A folder.
    Folder(File),
    /// Something that has no content to serve: a device, a pipe, a socket.
    Other,
}

/// Opens what lies at `path` below the root, for reading; files of up to `content_bytes_max` are read at once.
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

/// A regular file, open.
#[derive(Debug)]
pub struct Object {
    file: File,
    stamp: Stamp,
    validators: Validators,
    content: Option<Box<[u8]>>,
    is_keepable: bool,
    /// The second in which all of it was last found in memory.
    resident_at: AtomicU32,
    /// When it last changed, as it was first found after its last name had gone.
    deleted: OnceLock<(i64, u64)>,
    /// When it was last found to be intact, by its loop's clock.
    validated_at_ns: AtomicU64,
}

impl Stamp {
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
        // A file from the future (a clock that was set back) counts as new.
        SystemTime::now().duration_since(self.changed_at()).unwrap_or(Duration::ZERO)
    }

    fn modified_seconds(&self) -> u64 {
        u64::try_from(self.modified.0).unwrap_or(0)
    }

    fn validators(&self) -> Validators {
        if self.age() < AMBIGUOUS_FOR {
            return Validators::default();
        }
        // `ctime` rather than `mtime`: tools that restore times (rsync, tar, reproducible builds) give two
        // versions the same `mtime`, and one of them would be taken for the other.
        // A date that cannot be written (RFC 9110 has four digits for a year), or that is yet to come, says nothing.
        let modified = self.modified_seconds();
        let is_sayable = modified <= LAST_SECOND
            && SystemTime::now() >= UNIX_EPOCH + Duration::from_secs(modified);
        let etag = format!(
            "\"{:x}-{:x}-{:x}{:08x}\"",
            self.inode, self.len, self.changed.0, self.changed.1
        );
        Validators { etag: Some(etag.into()), modified: is_sayable.then_some(modified) }
    }
}

impl Opened {
    /// Finds out what was opened, and reads files of up to `content_bytes_max` into memory.
    pub fn of(file: File, content_bytes_max: u64, blocking: Blocking) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                Object::of(file, &stat, content_bytes_max, blocking).map(Self::File)
            }
            FileType::Directory => Ok(Self::Folder(file)),
            _ => Ok(Self::Other),
        }
    }
}

impl Object {
    fn of(file: File, stat: &Stat, content_bytes_max: u64, blocking: Blocking) -> io::Result<Self> {
        let mut stamp = Stamp::of(stat);
        let mut content = None;
        let mut is_steady = true;
        if stamp.len <= content_bytes_max {
            for _ in 0..READS_MAX {
                content = read_all(&file, stamp.len as usize, blocking)?;
                let after = Stamp::of(&rustix::fs::fstat(&file)?);
                is_steady = after == stamp && content.is_some();
                if is_steady || after.len > content_bytes_max {
                    break;
                }
                stamp = after;
            }
        }
        let validators = if is_steady { stamp.validators() } else { Validators::default() };
        let is_keepable = is_steady && validators.etag.is_some() && stamp.links > 0;
        Ok(Self {
            file,
            stamp,
            validators,
            content: content.filter(|_| is_steady),
            is_keepable,
            resident_at: AtomicU32::new(u32::MAX),
            deleted: OnceLock::new(),
            validated_at_ns: AtomicU64::new(u64::MAX),
        })
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.stamp.len
    }

    /// What tells a client that it has this version.
    pub fn validators(&self) -> &Validators {
        &self.validators
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// All of its bytes, where it is small: exactly those of this version.
    pub fn content(&self) -> Option<&[u8]> {
        self.content.as_deref()
    }

    /// Bytes of memory that it takes beside its descriptor.
    pub fn memory_bytes(&self) -> usize {
        self.content.as_ref().map_or(0, |content| content.len())
    }

    /// Whether it may be kept and sent to others: its version is known beyond doubt.
    pub fn is_keepable(&self) -> bool {
        self.is_keepable
    }

    /// Whether the file is still this version: not written to, replaced, renamed or deleted. One cheap system call.
    pub fn is_current(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| Stamp::of(&stat) == self.stamp)
    }

    /// The same for whoever is sending it: it may have been deleted meanwhile, or another have been put in its place, which changes none
    /// of its bytes. Only what else changes its time between that and the first look after it is not told apart from that.
    pub fn is_unchanged(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| {
            let now = Stamp::of(&stat);
            let as_before = Stamp { links: self.stamp.links, changed: self.stamp.changed, ..now };
            now == self.stamp
                || now.links == 0
                    && as_before == self.stamp
                    && *self.deleted.get_or_init(|| now.changed) == now.changed
        })
    }

    /// Whether it is intact, for whoever is about to send its pages and looks at it again after that. A look made a moment ago will do.
    /// `ns` is the time by the loop's clock.
    pub fn is_unchanged_at(&self, ns: u64) -> bool {
        let validated_ns = self.validated_at_ns.load(Relaxed);
        ns.checked_sub(validated_ns).is_some_and(|age_ns| age_ns <= REVALIDATE_AFTER_NS)
            || self.revalidate_at(ns)
    }

    /// Whether it is intact; if so, others need not look again for a moment. `ns` is a time before that.
    pub fn revalidate_at(&self, ns: u64) -> bool {
        let is_unchanged = self.is_unchanged();
        self.validated_at_ns.store(if is_unchanged { ns } else { u64::MAX }, Relaxed);
        is_unchanged
    }

    /// Whether it was last modified when `other` was or later.
    pub fn is_as_new_as(&self, other: &Self) -> bool {
        self.stamp.modified >= other.stamp.modified
    }

    /// Whether it has not changed for a while. Pages of a file that somebody is writing to would change on their way to
    /// the client, so such a file is copied, piece by piece, each validated_ns at before it goes.
    pub fn is_settled(&self, now: SystemTime) -> bool {
        now.duration_since(self.stamp.changed_at()).is_ok_and(|age| age >= SETTLED_AFTER)
    }

    /// Whether these of its bytes are in memory, so that sending them does not wait for the disk. It looks at the first and the
    /// last page: readahead fills what lies between. A file that is asked for as a whole is validated_ns at once a second, by the
    /// caller's clock.
    pub fn is_resident(&self, range: &Range<u64>, seconds: u32) -> bool {
        let is_short = range.end - range.start >= self.stamp.len;
        if is_short && self.resident_at.load(Relaxed) == seconds {
            return true;
        }
        let is_resident = [range.start, range.end.saturating_sub(1)].into_iter().all(|at| {
            let mut byte = [0];
            let mut place = [IoSliceMut::new(&mut byte)];
            let read = rustix::io::preadv2(&self.file, &mut place, at, ReadWriteFlags::NOWAIT);
            // A file system that cannot tell is not asked again and again: sending finds out.
            !matches!(read, Err(Errno::AGAIN))
        });
        if is_short && is_resident {
            self.resident_at.store(seconds, Relaxed);
        }
        is_resident
    }
}

/// The first `len` bytes, or `None` where there are fewer by now.
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
            // What cannot be read without waiting, here or on this file system, is for those who may wait.
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
    fn every_change_to_a_file_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let changes: [(&str, Change); 6] = [
            ("written", |path| fs::write(path, "other").unwrap()),
            ("truncated", |path| {
                File::options().write(true).open(path).unwrap().set_len(1).unwrap()
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
            let is_another = ["deleted", "replaced"].contains(&name);
            assert_eq!(object.is_unchanged(), is_another, "{name}");
            assert_eq!(object.content(), Some(&b"first"[..]), "what was read stays");
        }
    }

    #[test]
    fn a_look_serves_those_right_behind_it_and_a_bad_one_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "first").unwrap();
        let object = object(&path);
        assert!(object.is_unchanged_at(7), "nobody has validated_ns, so it does");
        fs::write(&path, "other").unwrap();
        assert!(object.is_unchanged_at(7 + REVALIDATE_AFTER_NS));
        assert!(!object.is_unchanged_at(6), "a look from later says nothing of now");
        assert!(!object.is_unchanged_at(7), "it has been seen to change");
        fs::write(&path, "first").unwrap();
        let object = self::object(&path);
        assert!(object.revalidate_at(7));
        fs::write(&path, "other").unwrap();
        assert!(!object.is_unchanged_at(8 + REVALIDATE_AFTER_NS), "that look was too long ago");
        assert!(!object.revalidate_at(8));
    }

    #[test]
    fn what_is_done_to_a_file_after_its_name_has_gone_is_seen_too() {
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
    fn a_file_that_has_only_just_changed_has_no_tag_and_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "first").unwrap();
        let fresh = object(&path);
        let stamp = Stamp { changed: (0, 0), ..fresh.stamp };
        assert!(stamp.validators().etag.is_some());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let stamp = Stamp { changed: (now.as_secs() as i64 + 1, 0), ..fresh.stamp };
        assert_eq!(stamp.validators(), Validators::default());
        assert!(!fresh.is_settled(SystemTime::now()));
    }

    #[test]
    fn two_versions_with_one_time_of_modification_have_two_tags() {
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
