//! Atomic file replacement: write to a temporary file, sync it, rename it, sync the directory.
//!
//! The calls may wait for the disk, so an event loop leaves them to another thread. A killed
//! process leaves a hidden temporary file `.NAME.haul-…` behind (without `NAME` if that would be
//! too long). It is locked (`flock`) while its process lives, so that it can be recognized.

use crate::root::{Blocking, Root};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, flock};
use rustix::io::Errno;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The longest file name on Linux, in bytes (`NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;

/// A temporary file that takes its final name when it is committed.
///
/// Dropping it removes the temporary file.
#[derive(Debug)]
pub struct AtomicFile {
    directory: File,
    name: Vec<u8>,
    temporary_name: Vec<u8>,
    file: File,
    is_committed: bool,
}

/// What a committed file did to its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Committed {
    /// The name was free.
    Created,
    /// The name belonged to another file, which was replaced.
    Replaced,
}

impl AtomicFile {
    /// A temporary file that will be `path`, in a directory that exists, with this mode less the
    /// umask.
    pub fn create(path: &Path, mode: u32) -> io::Result<Self> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let directory = match path.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory,
            _ => Path::new("."),
        };
        let open = |flags| {
            let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(directory, flags, Mode::empty())
        };
        // A directory that may be written but not read (a drop box) cannot be synced.
        let directory = match open(OFlags::RDONLY) {
            Err(Errno::ACCESS) => open(OFlags::PATH)?,
            opened => opened?,
        };
        Self::create_in(directory.into(), name.as_bytes(), Mode::from_raw_mode(mode))
    }

    /// A temporary file that will be `path` below `root`, in a directory that exists. It gets the
    /// mode of the file that it will replace, else 0666 less the umask.
    pub fn create_below(root: &Root, path: &[u8]) -> io::Result<Self> {
        let (directory, name) = match path.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&[][..], path),
        };
        // Checked before the lookup, so that a name that cannot be is not reported as a missing
        // folder.
        check_name(name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = root.open_below(directory, flags, Mode::empty(), Blocking::Disk)?;
        let mode = mode_of(&directory, name)?;
        let created = Self::create_in(directory, name, Mode::from_raw_mode(0o666))?;
        if let Some(mode) = mode {
            rustix::fs::fchmod(&created.file, mode)?;
        }
        Ok(created)
    }

    fn create_in(directory: File, name: &[u8], mode: Mode) -> io::Result<Self> {
        check_name(name)?;
        match stat(&directory, name)? {
            Some((FileType::Directory, _)) => return Err(Errno::ISDIR.into()),
            None | Some((FileType::RegularFile | FileType::Symlink, _)) => {}
            // A device, a named pipe or a socket: programs that use it would lose it.
            Some(_) => return Err(Errno::PERM.into()),
        }
        let temporary_name = temporary_name(name);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&directory, &*temporary_name, flags, mode)?;
        // Not every file system has locks.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        Ok(Self {
            directory,
            name: name.to_vec(),
            temporary_name,
            file: file.into(),
            is_committed: false,
        })
    }

    /// The final name, without its directory.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// The temporary file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Syncs the file and gives it its name. If `only_new`, a name that is taken is
    /// [`io::ErrorKind::AlreadyExists`].
    pub fn commit(mut self, only_new: bool) -> io::Result<Committed> {
        self.file.sync_all()?;
        let rename = |flags| {
            let (from, to) = (&*self.temporary_name, &*self.name);
            rustix::fs::renameat_with(&self.directory, from, &self.directory, to, flags)
        };
        // The rename itself reports whether the name was free: a check before it could be outrun.
        let committed = match rename(RenameFlags::NOREPLACE) {
            Ok(()) => Committed::Created,
            Err(Errno::EXIST) if !only_new => {
                rename(RenameFlags::empty())?;
                Committed::Replaced
            }
            // Some file systems (NFS, FUSE) know no flags. A link never replaces a name.
            Err(Errno::INVAL) => {
                let (from, to) = (&*self.temporary_name, &*self.name);
                let directory = &self.directory;
                match rustix::fs::linkat(directory, from, directory, to, AtFlags::empty()) {
                    Ok(()) => {
                        rustix::fs::unlinkat(directory, from, AtFlags::empty())?;
                        Committed::Created
                    }
                    Err(Errno::EXIST) if !only_new => {
                        rename(RenameFlags::empty())?;
                        Committed::Replaced
                    }
                    Err(errno) => return Err(errno.into()),
                }
            }
            Err(errno) => return Err(errno.into()),
        };
        self.is_committed = true;
        // The name survives a crash only once the directory is on the disk.
        match self.directory.sync_all() {
            // Some file systems cannot sync a directory; one that is not readable cannot be synced.
            Err(error)
                if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::BADF)) => {}
            synced => synced?,
        }
        Ok(committed)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.is_committed {
            // If it cannot be removed, it stays, hidden.
            let _ = rustix::fs::unlinkat(&self.directory, &*self.temporary_name, AtFlags::empty());
        }
    }
}

/// Whether a name is one that [`AtomicFile`] gives to a temporary file.
pub(crate) fn is_temporary_name(name: &[u8]) -> bool {
    const DIGITS: usize = 16;
    let Some(split) = name.len().checked_sub(DIGITS) else { return false };
    let (start, digits) = name.split_at(split);
    start.starts_with(b".")
        && start.ends_with(b".haul-")
        && digits.iter().all(u8::is_ascii_hexdigit)
}

/// A random temporary name `.NAME.haul-…` for a file that will be NAME, without NAME if that would
/// be too long.
pub fn temporary_name(name: &[u8]) -> Vec<u8> {
    let random = RandomState::new().hash_one(name);
    let suffix = format!(".haul-{random:016x}");
    let temporary_name = [b".", name, suffix.as_bytes()].concat();
    if temporary_name.len() > NAME_BYTES_MAX { suffix.into_bytes() } else { temporary_name }
}

fn check_name(name: &[u8]) -> io::Result<()> {
    match name {
        b"" | b"." | b".." => Err(Errno::ISDIR.into()),
        name if name.len() > NAME_BYTES_MAX => Err(Errno::NAMETOOLONG.into()),
        _ => Ok(()),
    }
}

/// The permissions of a regular file, without the set-user-ID, set-group-ID and sticky bits; `None`
/// if no regular file has the name.
fn mode_of(directory: &File, name: &[u8]) -> io::Result<Option<Mode>> {
    let found = stat(directory, name)?.filter(|(kind, _)| *kind == FileType::RegularFile);
    Ok(found.map(|(_, mode)| mode & (Mode::RWXU | Mode::RWXG | Mode::RWXO)))
}

fn stat(directory: &File, name: &[u8]) -> io::Result<Option<(FileType, Mode)>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => {
            Ok(Some((FileType::from_raw_mode(stat.st_mode), Mode::from_raw_mode(stat.st_mode))))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::Symlinks;
    use std::fs;
    use std::io::Write;

    fn names(path: &Path) -> Vec<std::ffi::OsString> {
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let sub = folder.path().join("sub");
        fs::create_dir(&sub).unwrap();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        let upload = AtomicFile::create_below(&root, b"sub/a").unwrap();
        upload.file().write_all(b"one").unwrap();
        assert!(names(&sub)[0].to_str().unwrap().starts_with(".a.haul-"));
        assert_eq!(upload.commit(true).unwrap(), Committed::Created);
        assert_eq!(names(&sub), ["a"]);

        let upload = AtomicFile::create_below(&root, b"sub/a").unwrap();
        upload.file().write_all(b"two").unwrap();
        drop(upload);
        assert_eq!(fs::read(sub.join("a")).unwrap(), b"one");
        let second = AtomicFile::create_below(&root, b"sub/a").unwrap();
        assert_eq!(second.commit(true).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let third = AtomicFile::create_below(&root, b"sub/a").unwrap();
        third.file().write_all(b"three").unwrap();
        assert_eq!(third.commit(false).unwrap(), Committed::Replaced);
        assert_eq!(fs::read(sub.join("a")).unwrap(), b"three");
        assert_eq!(names(&sub), ["a"], "no temporary file is left");

        let error = |path: &[u8]| AtomicFile::create_below(&root, path).unwrap_err();
        let refused = |path: &[u8]| Errno::from_io_error(&error(path)).unwrap();
        assert_eq!(refused(b"sub"), Errno::ISDIR);
        assert_eq!(refused(b""), Errno::ISDIR);
        assert_eq!(refused(b"sub/.."), Errno::ISDIR);
        assert_eq!(refused(b"none/a"), Errno::NOENT);
        assert_eq!(refused(b"sub/a/b"), Errno::NOTDIR);
        assert_eq!(refused(&[b'x'; 256]), Errno::NAMETOOLONG);
        let _socket = std::os::unix::net::UnixListener::bind(sub.join("socket")).unwrap();
        assert_eq!(refused(b"sub/socket"), Errno::PERM);
        let longest = AtomicFile::create_below(&root, &[b'x'; 255]).unwrap();
        assert_eq!(longest.commit(true).unwrap(), Committed::Created);
        assert!(folder.path().join("x".repeat(255)).exists());
    }

    #[test]
    fn a_file_that_is_replaced_below_a_root_hands_on_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        for mode in [0o600, 0o4755, 0o444] {
            fs::write(&path, "old").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            AtomicFile::create_below(&root, b"a").unwrap().commit(false).unwrap();
            let replaced = fs::metadata(&path).unwrap();
            assert_eq!((replaced.permissions().mode() & 0o7777, replaced.len()), (mode & 0o777, 0));
            fs::remove_file(&path).unwrap();
        }
    }
}
