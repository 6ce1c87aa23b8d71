//! Removal of temporary files that a killed process has left behind.

use crate::atomic_file::is_temporary_name;
use crate::root::{Blocking, Root};
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock};
use std::fs::File;
use std::time::Duration;

/// A younger file may belong to an upload that has just begun and is not locked yet.
const AGE_MIN: Duration = Duration::from_secs(60);

/// Removes the temporary files below a root that no process has open; returns their number.
///
/// It reads every directory below the root, but follows no symbolic link. It stops early once
/// `is_cancelled`. What cannot be read or removed stays.
pub fn remove_abandoned_files(root: &Root, is_cancelled: impl Fn() -> bool) -> usize {
    let mut removed = 0;
    let mut unread = vec![Vec::new()];
    while let Some(path) = unread.pop() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let Ok(directory) = root.open_below(&path, flags, Mode::empty(), Blocking::Disk) else {
            continue;
        };
        let Ok(entries) = Dir::read_from(&directory) else { continue };
        for entry in entries.flatten() {
            if is_cancelled() {
                return removed;
            }
            let name = entry.file_name().to_bytes();
            match file_type(&directory, name, entry.file_type()) {
                FileType::Directory if !matches!(name, b"." | b"..") => {
                    unread
                        .push([&path[..], if path.is_empty() { b"" } else { b"/" }, name].concat());
                }
                FileType::RegularFile if is_temporary_name(name) => {
                    removed += usize::from(remove_if_abandoned(&directory, name));
                }
                _ => {}
            }
        }
    }
    removed
}

/// The type of an entry, also on file systems that do not tell it with the name.
fn file_type(directory: &File, name: &[u8], listed: FileType) -> FileType {
    if listed != FileType::Unknown {
        return listed;
    }
    let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode))
}

/// Removes a temporary file that is old and that no process has locked.
fn remove_if_abandoned(directory: &File, name: &[u8]) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(directory, name, flags, Mode::empty()).map(File::from) else {
        return false;
    };
    let modified = file.metadata().and_then(|metadata| metadata.modified());
    let is_old = modified.is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age >= AGE_MIN));
    is_old
        && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        && rustix::fs::unlinkat(directory, name, AtFlags::empty()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AtomicFile, Symlinks};
    use std::fs;
    use std::path::Path;
    use std::time::SystemTime;

    fn make_old(path: &Path) {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - 2 * AGE_MIN).unwrap();
    }

    #[test]
    fn only_temporary_files_without_a_process_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let sub = folder.path().join("sub/deeper");
        fs::create_dir_all(&sub).unwrap();
        let abandoned = [".a.haul-0123456789abcdef", ".haul-0123456789abcdef"];
        let others = [".a.haul-0123456789abcde", "a.haul-0123456789abcdef", ".a.haul-x", "a"];
        for name in abandoned.iter().chain(&others) {
            fs::write(sub.join(name), "").unwrap();
            make_old(&sub.join(name));
        }
        let young = folder.path().join(".young.haul-0123456789abcdef");
        fs::write(&young, "").unwrap();
        fs::write(outside.path().join(abandoned[0]), "").unwrap();
        make_old(&outside.path().join(abandoned[0]));
        std::os::unix::fs::symlink(outside.path(), folder.path().join("link")).unwrap();
        let root = Root::open(folder.path(), Symlinks::Anywhere).unwrap();
        let in_use = AtomicFile::create_below(&root, b"sub/used").unwrap();
        in_use.file().set_modified(SystemTime::now() - 2 * AGE_MIN).unwrap();

        assert_eq!(remove_abandoned_files(&root, || true), 0);
        assert_eq!(remove_abandoned_files(&root, || false), abandoned.len());
        assert!(abandoned.iter().all(|name| !sub.join(name).exists()));
        assert!(others.iter().all(|name| sub.join(name).exists()));
        assert!(young.exists() && outside.path().join(abandoned[0]).exists());
        in_use.commit(true).unwrap();
        assert!(folder.path().join("sub/used").exists());
    }
}
