//! Opens files below the served directory, and gives them entity tags.
//!
//! The time `mtime` of a file is ambiguous at first. A write sets it at the start of the call and
//! changes bytes after that, and before Linux 6.13 two changes within one clock tick have the same
//! time. So a file that has just been written gets no entity tag and is not cached. The same holds
//! for a file that a program has open for writing and has written lately, such as a log.
//!
//! A file that was renamed into place does not have a writer, which a lease proves. So its pages
//! can be sent from its first request on. Limitation: only the owner of a file and a process with
//! `CAP_LEASE` can get that proof. Other files are copied in the first ten seconds after a write.

use crate::config::{ContentRules, EntityTags, FileUpdates};
use crate::files::history::{FileHistory, FileId};
use crate::files::object::{self, FileVersion, Object, Samples};
use crate::files::served_root::ServedRoot;
use crate::files::watch::Watches;
use haul_fs::Blocking;
use haul_http::conditional::Validators;
use haul_sys::lease;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxFlags};
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time after a write in which `mtime` is ambiguous: the call may still be writing, or another
/// write may have the same time.
const AMBIGUOUS_FOR: Duration = Duration::from_secs(2);
/// The time after a write in which a file with a writer, or one that has grown, is likely to grow.
const WRITTEN_WITHIN: Duration = Duration::from_secs(600);
/// Twice the longest clock tick (`CONFIG_HZ=100`), in which two writes may have the same time.
const CLOCK_TICK_MAX: Duration = Duration::from_millis(20);
/// The last second of the year 9999, in seconds since 1970.
const HTTP_DATE_SECONDS_MAX: u64 = 253_402_300_799;
/// The first second of the year 1990, in seconds since 1970. Reproducible builds give every file
/// one earlier time: Nix and Jib second 1, OSTree second 0, and archives of the ZIP format a day in
/// 1980. Content that is served by HTTP is not so old.
const HTTP_SINCE_SECONDS: u64 = 631_152_000;
/// Later times that reproducible builds give every file: Bazel's packages the last second of 1999,
/// and other tools the first one of 2000.
const FIXED_SECONDS: [u64; 2] = [946_684_799, 946_684_800];
/// Attempts to read a small file that changes while it is read.
const READS_MAX: usize = 3;

/// An opened file, by its kind.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack, and a box would cost an allocation for each file"
)]
pub enum Opened {
    /// A regular file.
    File(Object),
    /// A directory.
    Directory(File),
    /// A file without content to serve: a device, a pipe, a socket.
    Other,
}

/// Opens files below a root.
#[derive(Debug)]
pub struct Opener {
    root: ServedRoot,
    /// `None` if the kernel has no more watches for this user.
    watches: Option<Arc<Watches>>,
    history: Arc<FileHistory>,
    updates: FileUpdates,
    entity_tags: EntityTags,
}

impl Opener {
    /// Opens files below `root`, of which the configuration tells how programs change them.
    pub fn new(root: ServedRoot, content: &ContentRules) -> Self {
        Self {
            root,
            watches: Watches::new().ok(),
            history: Arc::default(),
            updates: content.updates,
            entity_tags: content.entity_tags,
        }
    }

    /// The root.
    pub fn root(&self) -> &ServedRoot {
        &self.root
    }

    /// Opens the file at `path` below the root for reading. The content of files of up to
    /// `content_bytes_max` bytes is read at once.
    pub fn open(
        &self,
        path: &[u8],
        content_bytes_max: u64,
        blocking: Blocking,
    ) -> io::Result<Opened> {
        // NONBLOCK: opening a FIFO without a writer must not block.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = self.root.get().open_below(path, flags, Mode::empty(), blocking)?;
        self.examine(file, content_bytes_max, blocking)
    }

    /// Determines the kind of an open file, and reads files of up to `content_bytes_max` bytes into
    /// memory.
    fn examine(
        &self,
        file: File,
        content_bytes_max: u64,
        blocking: Blocking,
    ) -> io::Result<Opened> {
        let stat = rustix::fs::fstat(&file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if stat.st_size as u64 <= content_bytes_max => {
                self.open_small(file, &stat, content_bytes_max, blocking).map(Opened::File)
            }
            FileType::RegularFile => self.open_large(file, blocking).map(Opened::File),
            FileType::Directory => Ok(Opened::Directory(file)),
            _ => Ok(Opened::Other),
        }
    }

    /// A small file, whose content is read.
    fn open_small(
        &self,
        file: File,
        stat: &Stat,
        content_bytes_max: u64,
        blocking: Blocking,
    ) -> io::Result<Object> {
        let mut version = FileVersion::of(stat);
        let mut content = None;
        let mut is_consistent = true;
        for _ in 0..READS_MAX {
            content = object::read_range(&file, 0..version.len, blocking)?;
            let after = FileVersion::of(&rustix::fs::fstat(&file)?);
            is_consistent = after == version && content.is_some();
            if is_consistent || after.len > content_bytes_max {
                break;
            }
            version = after;
        }
        let is_ambiguous = !is_consistent || self.is_ambiguous(&version);
        let id = file_id(&file, &version);
        let validators = self.validators(id, &version, is_ambiguous);
        let content = content.filter(|_| is_consistent);
        Ok(Object::new(file, id, version, validators, &self.history).with_content(content))
    }

    /// A large file, whose pages are sent.
    fn open_large(&self, file: File, blocking: Blocking) -> io::Result<Object> {
        // The watch comes before the version: a write in between shows in the version.
        let watch = self.watches.as_ref().and_then(|watches| watches.watch(&file).ok());
        let version = FileVersion::of(&rustix::fs::fstat(&file)?);
        let id = file_id(&file, &version);
        let age = version.age(SystemTime::now());
        let is_written_in_place = self.updates == FileUpdates::InPlace;
        let is_recent = is_written_in_place && age < WRITTEN_WITHIN;
        let has_writer =
            if is_recent { lease::has_no_writer(&file).ok().map(|no| !no) } else { None };
        let is_being_written =
            is_recent && (has_writer == Some(true) || self.history.facts(id).has_grown);
        let is_ambiguous = is_being_written || self.is_ambiguous(&version);
        let samples = match is_ambiguous.then(|| Samples::read(&file, version.len, blocking)) {
            // The file became shorter, so the response ends at the first check.
            Some(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            samples => samples.transpose()?,
        };
        // A write between version and proof shows now, unless both fall into one tick.
        let is_complete = !is_written_in_place
            || has_writer == Some(false)
                && age >= CLOCK_TICK_MAX
                && FileVersion::of(&rustix::fs::fstat(&file)?) == version;
        let validators = self.validators(id, &version, is_ambiguous);
        Ok(Object::new(file, id, version, validators, &self.history)
            .with_watch(watch)
            .with_samples(samples)
            .with_is_complete(is_complete))
    }

    /// Whether another write may have the same time as the last one.
    fn is_ambiguous(&self, version: &FileVersion) -> bool {
        // Tags of copies name whole seconds, in which a file may be replaced twice.
        let may_share_tag =
            self.updates == FileUpdates::InPlace || self.entity_tags == EntityTags::OfCopies;
        may_share_tag && version.age(SystemTime::now()) < AMBIGUOUS_FOR
    }

    /// The validators of a version; none if it may not be told from another one.
    fn validators(&self, id: FileId, version: &FileVersion, is_ambiguous: bool) -> Validators {
        if is_ambiguous {
            return Validators::default();
        }
        let FileVersion { len, changed, modified, .. } = *version;
        let date = date_of_content(modified.0);
        let mut etag = if self.entity_tags == EntityTags::OfCopies && date.is_some() {
            // Some tools that copy files restore whole seconds only.
            format!("\"{len:x}-{:x}", modified.0)
        } else {
            // Tools that restore times (rsync, tar, reproducible builds) give a new file the
            // `mtime` of the one that it replaces, and the kernel may give it the same inode
            // number.
            let (born, born_ns) = id.born;
            let inode = id.inode;
            let version = format!("{len:x}-{:x}{:08x}", modified.0, modified.1);
            format!("\"{inode:x}-{version}-{born:x}{born_ns:08x}")
        };
        if self.history.facts(id).has_disguised_writes {
            let _ = write!(etag, "-{:x}{:08x}", changed.0, changed.1);
        }
        etag.push('"');
        Validators { etag: Some(etag.into()), modified: date }
    }
}

/// The date for `Last-Modified`, in seconds since 1970. `None` if the time of the last write does
/// not tell when the content changed.
fn date_of_content(modified: i64) -> Option<u64> {
    let seconds = u64::try_from(modified).ok()?;
    // A date in the future, or one that cannot be expressed (RFC 9110 has four digits for the
    // year), is also omitted.
    let is_valid = seconds <= HTTP_DATE_SECONDS_MAX
        && SystemTime::now() >= UNIX_EPOCH + Duration::from_secs(seconds);
    let is_fixed = seconds < HTTP_SINCE_SECONDS || FIXED_SECONDS.contains(&seconds);
    (is_valid && !is_fixed).then_some(seconds)
}

fn file_id(file: &File, version: &FileVersion) -> FileId {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME);
    let born = found
        .ok()
        .filter(|found| found.stx_mask & StatxFlags::BTIME.bits() != 0)
        .map_or((0, 0), |found| (found.stx_btime.tv_sec, found.stx_btime.tv_nsec));
    FileId { device: version.device, inode: version.inode, born }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::object::REVALIDATE_AFTER_NS;
    use haul_fs::Symlinks;
    use std::fs;
    use std::io::Write as _;

    fn opener(folder: &std::path::Path, updates: FileUpdates) -> Opener {
        let content = ContentRules { updates, ..ContentRules::default() };
        Opener::new(ServedRoot::open(folder, Symlinks::Inside).unwrap(), &content)
    }

    /// Opens a file of up to 100 bytes with its content, a larger one without.
    fn open(opener: &Opener, path: &std::path::Path) -> Object {
        match opener.examine(File::open(path).unwrap(), 100, Blocking::Disk).unwrap() {
            Opened::File(object) => object,
            other => panic!("{other:?}"),
        }
    }

    fn object(path: &std::path::Path) -> Object {
        open(&opener(path.parent().unwrap(), FileUpdates::InPlace), path)
    }

    fn set_modified(path: &std::path::Path, time: SystemTime) {
        File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    fn an_hour_ago() -> SystemTime {
        SystemTime::now() - Duration::from_secs(3600)
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

    /// Changes of metadata, of the file `a` in a folder.
    fn change_metadata(path: &std::path::Path) {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        let accessed = fs::FileTimes::new().set_accessed(UNIX_EPOCH);
        File::open(path).unwrap().set_times(accessed).unwrap();
        fs::hard_link(path, path.with_extension("link")).unwrap();
        fs::rename(path, path.with_extension("moved")).unwrap();
        fs::rename(path.with_extension("moved"), path).unwrap();
        fs::remove_file(path.with_extension("link")).unwrap();
    }

    /// Nix, OSTree, Bazel and archives of reproducible builds have one time for every file.
    #[test]
    fn a_time_that_says_nothing_about_the_content_is_not_a_date() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "content").unwrap();
        for seconds in [0, 1, 315_532_800, 946_684_799, 946_684_800] {
            set_modified(&path, UNIX_EPOCH + Duration::from_secs(seconds));
            let object = object(&path);
            assert_eq!(object.validators().modified, None, "{seconds}");
            assert!(object.validators().etag.is_some(), "{seconds}");
        }
        let usual = 1_000_000_000;
        set_modified(&path, UNIX_EPOCH + Duration::from_secs(usual));
        assert_eq!(object(&path).validators().modified, Some(usual));
    }

    #[test]
    fn copies_of_a_file_have_one_tag_if_the_files_are_replicated() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| folder.path().join(name));
        let tags = |content: &ContentRules| {
            let root = ServedRoot::open(folder.path(), Symlinks::Inside).unwrap();
            let opener = Opener::new(root, content);
            paths.each_ref().map(|path| open(&opener, path).validators().etag.clone().unwrap())
        };
        let replicated =
            ContentRules { entity_tags: EntityTags::OfCopies, ..ContentRules::default() };
        for (seconds, are_equal) in [(1_000_000_000, true), (1, false)] {
            for path in &paths {
                fs::write(path, "content").unwrap();
                set_modified(path, UNIX_EPOCH + Duration::from_secs(seconds));
            }
            let [one, other] = tags(&replicated);
            assert_eq!(one == other, are_equal, "{one} {other}");
            let [one, other] = tags(&ContentRules::default());
            assert_ne!(one, other);
        }
        set_modified(&paths[1], UNIX_EPOCH + Duration::from_secs(1_000_000_001));
        let [one, other] = tags(&replicated);
        assert_ne!(one, other);
    }

    #[test]
    fn a_change_of_metadata_is_no_other_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let opener = opener(folder.path(), FileUpdates::InPlace);
        for len in [50, 5000] {
            fs::write(&path, vec![1; len]).unwrap();
            set_modified(&path, an_hour_ago());
            let before = open(&opener, &path);
            assert!(before.is_settled(SystemTime::now()));
            change_metadata(&path);
            if len > 100 {
                assert!(before.is_unchanged(), "the file is being sent");
            }
            let after = open(&opener, &path);
            assert!(before.validators().etag.is_some());
            assert_eq!(after.validators(), before.validators());
            assert!(after.is_settled(SystemTime::now()));
        }
    }

    /// A program may write to a file and set its time back. Clients that resume a download would
    /// mix two versions if they had one tag.
    #[test]
    fn a_write_that_is_disguised_is_seen_while_a_file_is_sent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let opener = opener(folder.path(), FileUpdates::InPlace);
        fs::write(&path, vec![1; 5000]).unwrap();
        let modified = an_hour_ago();
        set_modified(&path, modified);
        let before = open(&opener, &path);
        fs::write(&path, vec![2; 5000]).unwrap();
        set_modified(&path, modified);
        assert!(!before.is_unchanged());
        assert_ne!(open(&opener, &path).validators().etag, before.validators().etag);
    }

    fn append(path: &std::path::Path) {
        File::options().append(true).open(path).unwrap().write_all(b"more").unwrap();
    }

    #[test]
    fn a_file_that_has_just_been_written_may_grow_but_not_change_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let rewrites: [(&str, Vec<u8>); 3] = [
            ("the length that it had, and other bytes", vec![2; 5000]),
            ("more bytes, and others", vec![2; 6000]),
            ("more bytes, and others at its former end", [[1; 4500], [2; 4500]].concat()),
        ];
        for (name, content) in rewrites {
            fs::write(&path, vec![1; 5000]).unwrap();
            let growing = object(&path);
            assert_eq!(growing.validators(), &Validators::default());
            append(&path);
            assert!(growing.is_unchanged() && !growing.is_current());
            fs::write(&path, content).unwrap();
            assert!(!growing.is_unchanged(), "it has {name}");
        }
    }

    /// Nothing shows whether the first bytes of a file that grew belong to its tag.
    #[test]
    fn a_file_with_a_tag_may_not_grow_and_has_none_after_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let opener = opener(folder.path(), FileUpdates::InPlace);
        fs::write(&path, vec![1; 5000]).unwrap();
        set_modified(&path, an_hour_ago());
        let settled = open(&opener, &path);
        assert!(settled.validators().etag.is_some());
        append(&path);
        assert!(!settled.is_unchanged());
        let minute_ago = SystemTime::now() - Duration::from_secs(60);
        set_modified(&path, minute_ago);
        let growing = open(&opener, &path);
        assert_eq!(growing.validators(), &Validators::default());
        append(&path);
        assert!(growing.is_unchanged());
        set_modified(&path, an_hour_ago());
        assert!(open(&opener, &path).validators().etag.is_some(), "it has long been complete");
    }

    #[test]
    fn a_log_that_is_open_for_writing_has_no_tag_and_may_grow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, vec![1; 5000]).unwrap();
        let minute_ago = SystemTime::now() - Duration::from_secs(60);
        set_modified(&path, minute_ago);
        assert!(object(&path).validators().etag.is_some());
        let _writer = File::options().append(true).open(&path).unwrap();
        let log = object(&path);
        if let Err(error) = lease::has_no_writer(log.file()) {
            eprintln!("SKIPPED: this file system has no leases: {error}");
            return;
        }
        assert_eq!(log.validators(), &Validators::default());
        assert!(log.is_settled(SystemTime::now()), "its pages do not change any more");
        append(&path);
        assert!(log.is_unchanged());
    }

    #[test]
    fn a_file_without_a_writer_is_settled_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut writer = File::create(&path).unwrap();
        writer.write_all(&[1; 5000]).unwrap();
        assert!(!object(&path).is_settled(SystemTime::now()), "it is open for writing");
        drop(writer);
        std::thread::sleep(CLOCK_TICK_MAX);
        let complete = object(&path);
        match lease::has_no_writer(complete.file()) {
            Ok(true) => assert!(complete.is_settled(SystemTime::now())),
            other => eprintln!("SKIPPED: this file system proves no end of writing: {other:?}"),
        }
        assert_eq!(complete.validators(), &Validators::default(), "its time is ambiguous");
        let replaced = open(&opener(folder.path(), FileUpdates::ByRename), &path);
        assert!(replaced.is_settled(SystemTime::now()) && replaced.is_cacheable());
    }

    #[test]
    fn a_time_in_the_future_is_no_recent_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, vec![1; 5000]).unwrap();
        set_modified(&path, SystemTime::now() + Duration::from_secs(3600));
        let object = object(&path);
        assert!(object.validators().etag.is_some() && object.validators().modified.is_none());
        assert!(object.is_settled(SystemTime::now()));
    }

    /// Tools that restore times give a new file the `mtime` of the one that it replaces.
    #[test]
    fn a_new_file_with_the_same_mtime_has_another_entity_tag() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut tags = Vec::new();
        for content in ["one", "two"] {
            // The inode number may be the number of the file before.
            let _ = fs::remove_file(&path);
            fs::write(&path, content).unwrap();
            set_modified(&path, UNIX_EPOCH);
            tags.push(object(&path).validators().etag.clone().unwrap());
        }
        assert_ne!(tags[0], tags[1]);
    }

    #[test]
    fn a_fifo_without_a_writer_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let opened = opener(folder.path(), FileUpdates::InPlace).open(b"pipe", 100, Blocking::Disk);
        assert!(matches!(opened, Ok(Opened::Other)));
    }
}
