//! Deletes what the destination has and the sources lack, at the end of the transfer.
//!
//! While folders are completed, the entries that the sources did not list are collected. Nothing is
//! deleted before the end, so a transfer that fails deletes nothing.

use crate::destination::Shared;
use crate::destination::folders::DoneFolder;
use crate::destination::tree::{Extras, Tree};
use crate::options::DeletionMode;
use crate::summary::FileError;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use std::io::Write;
use std::os::fd::OwnedFd;

/// Up to so many deletions are never too many.
const FEW: u64 = 10;
/// One of so many entries may be deleted.
const SHARE: u64 = 4;
/// The most levels of a folder that is deleted. Each level has an open folder.
const LEVELS_MAX: usize = 4000;

impl<W: Write> Shared<'_, W> {
    /// Collects the entries of a complete folder that the sources lack.
    pub fn collect_extras(&self, tree: &mut Tree, folder: &DoneFolder) -> rustix::io::Result<()> {
        let (Some(listed), Some(attributes)) = (&folder.listed, &folder.attributes) else {
            return Ok(());
        };
        let Ok(open) = &folder.open else { return Ok(()) };
        let filter = &self.options.selection.filter;
        let path = folder.path.strip_suffix(b"/").unwrap_or(&folder.path);
        let mut names = Vec::new();
        for entry in Dir::read_from(open)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            tree.present += 1;
            let is_kept = listed.contains(name)
                || is_of_haul(name)
                || !self.options.deletion.deletes_excluded
                    && filter.excludes(&joined(path, name), is_folder(open, name));
            if !is_kept {
                names.push(name.to_vec());
            }
        }
        if !names.is_empty() {
            tree.extras.push(Extras { folder: path.to_vec(), names, mtime: attributes.mtime });
        }
        Ok(())
    }

    /// Deletes what was collected, unless something failed or too much would be deleted.
    pub fn delete_extras(&self) {
        let mut tree = self.tree();
        let extras = std::mem::take(&mut tree.extras);
        if extras.is_empty() {
            return;
        }
        let (deleted, present) = Self::count(&mut tree, &extras);
        let problem = if !tree.summary.errors.is_empty() {
            Some("because of the errors above".to_owned())
        } else if self.options.deletion.mode == DeletionMode::All {
            None
        } else if tree.entries + tree.folders.count() == 0 {
            Some("because the source is empty (--delete=all deletes nevertheless)".to_owned())
        } else if deleted > FEW && deleted * SHARE > present {
            Some(format!(
                "because {deleted} of {present} entries are more than a quarter of the \
                 destination (--delete=all deletes nevertheless)"
            ))
        } else {
            None
        };
        for Extras { folder, names, .. } in &extras {
            for name in names {
                tree.summary.add_deleted(&joined(folder, name));
            }
        }
        if let Some(problem) = problem {
            tree.summary.deletions_refused = deleted;
            tree.summary.deletion_problem = Some(format!("nothing was deleted, {problem}"));
            return;
        }
        if self.options.dry_run {
            tree.summary.entries_deleted = deleted;
            return;
        }
        for extras in extras {
            if let Err(errno) = self.delete_in(&mut tree, &extras) {
                let error = FileError::new(&extras.folder, &std::io::Error::from(errno));
                tree.summary.add_error(FileError { is_at_destination: true, ..error });
            }
        }
    }

    /// The entries that would be deleted, and the entries of the destination. Both include what is
    /// below the folders that would be deleted.
    fn count(tree: &mut Tree, extras: &[Extras]) -> (u64, u64) {
        let mut deleted = 0;
        for Extras { folder, names, .. } in extras {
            for name in names {
                let below = tree.open_parent(&joined(folder, name)).map_or(0, |(parent, name)| {
                    let mut count = 0;
                    // What cannot be read cannot be deleted.
                    let _ = count_below(&parent, name, &mut count, LEVELS_MAX);
                    count
                });
                deleted += 1 + below;
                tree.present += below;
            }
        }
        (deleted, tree.present)
    }

    fn delete_in(&self, tree: &mut Tree, extras: &Extras) -> rustix::io::Result<()> {
        let Extras { folder, names, mtime } = extras;
        let entry = joined(folder, b"entry");
        let (open, _) = tree.open_parent(&entry)?;
        let stat = rustix::fs::fstat(&open)?;
        make_writable(&open, &stat)?;
        for name in names {
            let result = self.delete(tree, &open, folder, name);
            if let Err(errno) = result {
                let error = std::io::Error::from(errno);
                let problem = format!("not deleted: {error}");
                let error = FileError::new(&joined(folder, name), &problem);
                tree.summary.add_error(FileError { is_at_destination: true, ..error });
            }
        }
        if !is_writable(&stat) {
            rustix::fs::fchmod(&open, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
        }
        if self.options.preserve.times {
            let last_access = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
            let nanoseconds = mtime.nanoseconds.min(999_999_999).into();
            let last_modification = Timespec { tv_sec: mtime.seconds, tv_nsec: nanoseconds };
            rustix::fs::futimens(&open, &Timestamps { last_access, last_modification })?;
        }
        Ok(())
    }

    fn delete(
        &self,
        tree: &mut Tree,
        open: &OwnedFd,
        folder: &[u8],
        name: &[u8],
    ) -> rustix::io::Result<()> {
        let path = joined(folder, name);
        let kept = |path: &[u8], is_folder: bool| {
            !self.options.deletion.deletes_excluded
                && self.options.selection.filter.excludes(path, is_folder)
        };
        delete_tree(open, name, &path, &kept, &mut tree.summary.entries_deleted, LEVELS_MAX)
    }
}

/// The path of an entry of a folder below the destination.
fn joined(folder: &[u8], name: &[u8]) -> Vec<u8> {
    if folder.is_empty() { name.to_vec() } else { [folder, b"/", name].concat() }
}

/// Whether a name is one of an interrupted transfer.
pub fn is_of_haul(name: &[u8]) -> bool {
    name.starts_with(b".") && name.windows(6).any(|part| part == b".haul-")
}

fn is_folder(folder: &OwnedFd, name: &[u8]) -> bool {
    rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

fn is_writable(stat: &Stat) -> bool {
    Mode::from_raw_mode(stat.st_mode).contains(Mode::RWXU)
}

/// Lets the owner delete entries of a folder.
fn make_writable(folder: &OwnedFd, stat: &Stat) -> rustix::io::Result<()> {
    if is_writable(stat) {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(stat.st_mode & 0o7777) | Mode::RWXU;
    rustix::fs::fchmod(folder, mode)
}

fn open_folder(parent: &OwnedFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

/// The names in a folder.
fn names_in(folder: &OwnedFd) -> rustix::io::Result<Vec<Vec<u8>>> {
    let names = Dir::read_from(folder)?.map(|entry| Ok(entry?.file_name().to_bytes().to_vec()));
    let names: rustix::io::Result<Vec<_>> = names.collect();
    Ok(names?.into_iter().filter(|name| name != b"." && name != b"..").collect())
}

/// Counts the entries below a folder; nothing for something else.
fn count_below(
    parent: &OwnedFd,
    name: &[u8],
    count: &mut u64,
    levels: usize,
) -> rustix::io::Result<()> {
    let open = match open_folder(parent, name) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        opened => opened?,
    };
    let levels = levels.checked_sub(1).ok_or(Errno::NAMETOOLONG)?;
    for name in names_in(&open)? {
        *count += 1;
        if is_folder(&open, &name) {
            count_below(&open, &name, count, levels)?;
        }
    }
    Ok(())
}

/// Deletes an entry with everything below, without following a link. A folder with entries that are
/// kept stays.
fn delete_tree(
    parent: &OwnedFd,
    name: &[u8],
    path: &[u8],
    kept: &dyn Fn(&[u8], bool) -> bool,
    deleted: &mut u64,
    levels: usize,
) -> rustix::io::Result<()> {
    if !is_folder(parent, name) {
        rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
        *deleted += 1;
        return Ok(());
    }
    let levels = levels.checked_sub(1).ok_or(Errno::NAMETOOLONG)?;
    let open = open_folder(parent, name)?;
    let stat = rustix::fs::fstat(&open)?;
    if stat.st_dev != rustix::fs::fstat(parent)?.st_dev {
        // Another file system is mounted there.
        return Ok(());
    }
    make_writable(&open, &stat)?;
    let mut is_empty = true;
    for name in names_in(&open)? {
        let path = [path, b"/", &name].concat();
        if kept(&path, is_folder(&open, &name)) {
            is_empty = false;
        } else {
            delete_tree(&open, &name, &path, kept, deleted, levels)?;
        }
    }
    if is_empty {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            // A folder below has entries that are kept.
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            removed => {
                removed?;
                *deleted += 1;
            }
        }
    }
    Ok(())
}
