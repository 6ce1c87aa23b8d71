//! A file on its way into the root: written aside, synced, and renamed into its place, so that nobody ever sees half of it.
//!
//! All of this may wait for the disk, so it is for helper threads. A file that is dropped before [`Upload::finish`] leaves
//! nothing behind, unless the process is killed: then a hidden file `.NAME.haul-…` (without `NAME` where that is very long) stays,
//! which is never served.

use crate::files::object::Patience;
use crate::files::root::Root;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;

/// The longest name of a file on most file systems, and on Linux (`NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;

/// A file that is being written aside.
#[derive(Debug)]
pub struct Upload {
    folder: File,
    name: Vec<u8>,
    aside: Vec<u8>,
    file: File,
    is_finished: bool,
}

/// What became of a file that is in its place now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// There was none before.
    Created,
    /// It has taken another's place.
    Replaced,
}

impl Upload {
    /// Begins a file that is to lie at `path` below the root, in a folder that is there already.
    pub fn begin(root: &Root, path: &[u8]) -> io::Result<Self> {
        let (folder, name) = match path.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&[][..], path),
        };
        if name.is_empty() {
            return Err(Errno::ISDIR.into());
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let folder = root.open_below(folder, flags, Mode::empty(), Patience::Disk)?;
        if is_folder(&folder, name)? {
            return Err(Errno::ISDIR.into());
        }
        let random = RandomState::new().hash_one(name);
        let suffix = format!(".haul-{random:016x}");
        let mut aside = [b".", name, suffix.as_bytes()].concat();
        if aside.len() > NAME_BYTES_MAX {
            aside = suffix.into_bytes();
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        let file = rustix::fs::openat(&folder, &*aside, flags, mode)?;
        Ok(Self { folder, name: name.to_vec(), aside, file: file.into(), is_finished: false })
    }

    /// Its name, without its folder's.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// The file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Puts it into its place; with `only_new` not into another's, which is [`io::ErrorKind::AlreadyExists`].
    pub fn finish(mut self, only_new: bool) -> io::Result<Finished> {
        self.file.sync_all()?;
        let rename =
            |flags| rustix::fs::renameat_with(&self.folder, &*self.aside, &self.folder, &*self.name, flags);
        // Only so is it known whether there was one: a look beforehand could be outrun.
        let finished = match rename(RenameFlags::NOREPLACE) {
            Ok(()) => Finished::Created,
            Err(Errno::EXIST) if !only_new => {
                rename(RenameFlags::empty())?;
                Finished::Replaced
            }
            Err(errno) => return Err(errno.into()),
        };
        self.is_finished = true;
        // The name is in the folder only once that is on the disk.
        self.folder.sync_all()?;
        Ok(finished)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.is_finished {
            // What cannot be removed stays, hidden.
            let _ = rustix::fs::unlinkat(&self.folder, &*self.aside, AtFlags::empty());
        }
    }
}

fn is_folder(folder: &File, name: &[u8]) -> io::Result<bool> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Symlinks;
    use std::fs;
    use std::io::Write;

    #[test]
    fn a_file_is_there_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        let names = |path: &str| {
            let mut names: Vec<_> = fs::read_dir(folder.path().join(path))
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect();
            names.sort();
            names
        };
        let upload = Upload::begin(&root, b"sub/a").unwrap();
        upload.file().write_all(b"one").unwrap();
        assert!(names("sub")[0].to_str().unwrap().starts_with(".a.haul-"));
        assert_eq!(upload.finish(true).unwrap(), Finished::Created);
        assert_eq!(names("sub"), ["a"]);

        let upload = Upload::begin(&root, b"sub/a").unwrap();
        upload.file().write_all(b"two").unwrap();
        drop(upload);
        assert_eq!(fs::read(folder.path().join("sub/a")).unwrap(), b"one");
        let second = Upload::begin(&root, b"sub/a").unwrap();
        assert_eq!(second.finish(true).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let third = Upload::begin(&root, b"sub/a").unwrap();
        third.file().write_all(b"three").unwrap();
        assert_eq!(third.finish(false).unwrap(), Finished::Replaced);
        assert_eq!(fs::read(folder.path().join("sub/a")).unwrap(), b"three");
        assert_eq!(names("sub"), ["a"], "nothing stays behind");

        let refused = |path: &[u8]| Errno::from_io_error(&Upload::begin(&root, path).unwrap_err()).unwrap();
        assert_eq!(refused(b"sub"), Errno::ISDIR);
        assert_eq!(refused(b""), Errno::ISDIR);
        assert_eq!(refused(b"none/a"), Errno::NOENT);
        assert_eq!(refused(b"sub/a/b"), Errno::NOTDIR);
        assert_eq!(refused(&[b'x'; 256]), Errno::NAMETOOLONG);
        let longest = Upload::begin(&root, &[b'x'; 255]).unwrap();
        assert_eq!(longest.finish(true).unwrap(), Finished::Created);
        assert!(folder.path().join("x".repeat(255)).exists());
    }
}
