//! The served folder: opening what a target names, and nothing outside.
//!
//! The kernel itself keeps every path below the root (`openat2` with `RESOLVE_BENEATH`, Linux 5.6), so that no rename and no
//! symbolic link can lead out between a check and its use. With `RESOLVE_CACHED` (Linux 5.12) it also says when it
//! would have to wait for the disk, and then a helper asks again.
//!
//! Where the call is refused (an older kernel, a container whose filter does not know it), paths are walked folder by folder and no
//! symbolic link is followed, which is slower and as safe.

use crate::config::Symlinks;
use crate::files::object::{Opened, Patience};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// How often an open is tried again that a rename somewhere in the tree has disturbed.
const TRIES_MAX: usize = 16;

/// The served folder.
#[derive(Debug)]
pub struct Root {
    folder: OwnedFd,
    symlinks: Symlinks,
    /// Whether the kernel does not resolve paths as it is told.
    walks: bool,
}

impl Root {
    /// The folder at `path`.
    pub fn open(path: &Path, symlinks: Symlinks) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut root = Self { folder: rustix::fs::open(path, flags, Mode::empty())?, symlinks, walks: false };
        match root.check() {
            // Filters of before 2020 say that it is not permitted, where a folder that may not be read is said to be so otherwise.
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOSYS | Errno::PERM)) => {
                root.walks = true;
                root.check()?;
            }
            checked => checked?,
        }
        Ok(root)
    }

    /// What the kernel does not do, and what that means.
    pub fn caveat(&self) -> Option<String> {
        let means = match self.symlinks {
            Symlinks::Inside => "symbolic links are not followed, and files are opened more slowly",
            Symlinks::Never | Symlinks::Anywhere => "files are opened more slowly",
        };
        self.walks.then(|| format!("openat2 is refused here (Linux 5.6, or a container's filter): {means}"))
    }

    /// Whether it can be read by whoever this is.
    pub fn check(&self) -> io::Result<()> {
        self.open_below(b"", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty(), Patience::Disk).map(drop)
    }

    /// Opens what lies at `path` below the root, for reading; files of up to `content_bytes_max` are read at once.
    pub fn find(&self, path: &[u8], content_bytes_max: u64, patience: Patience) -> io::Result<Opened> {
        // NONBLOCK, so that a pipe without a writer does not hold us up.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        Opened::of(self.open_below(path, flags, Mode::empty(), patience)?, content_bytes_max, patience)
    }

    /// Opens a path below the root, or the root where it is empty.
    pub fn open_below(&self, path: &[u8], flags: OFlags, mode: Mode, patience: Patience) -> io::Result<File> {
        let path = if path.is_empty() { b"." } else { path };
        if self.walks {
            return self.walk(path, flags | OFlags::CLOEXEC, mode, patience);
        }
        let mut resolve = ResolveFlags::NO_MAGICLINKS;
        resolve |= match self.symlinks {
            Symlinks::Inside => ResolveFlags::BENEATH,
            Symlinks::Never => ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
            Symlinks::Anywhere => ResolveFlags::empty(),
        };
        if patience == Patience::None {
            resolve |= ResolveFlags::CACHED;
        }
        let mut tries = 0;
        loop {
            match rustix::fs::openat2(&self.folder, path, flags | OFlags::CLOEXEC, mode, resolve) {
                Ok(file) => return Ok(file.into()),
                // It would have to wait for the disk; or, before Linux 5.12, it cannot tell whether it would.
                Err(Errno::AGAIN | Errno::INVAL) if patience == Patience::None => {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                // A rename went on at the same time; the kernel could not be sure where `..` led.
                Err(Errno::AGAIN) if tries < TRIES_MAX => tries += 1,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Opens a path folder by folder.
    fn walk(&self, path: &[u8], flags: OFlags, mode: Mode, patience: Patience) -> io::Result<File> {
        if patience == Patience::None {
            // Nothing tells whether it would have to wait.
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if self.symlinks == Symlinks::Anywhere {
            return Ok(rustix::fs::openat(&self.folder, path, flags, mode)?.into());
        }
        let (folders, last) = match path.iter().rposition(|&byte| byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&[][..], path),
        };
        let mut at = self.folder.try_clone()?;
        if path.contains(&b'/') {
            for name in folders.split(|&byte| byte == b'/') {
                let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                at = rustix::fs::openat(&at, checked(name)?, step, Mode::empty())?;
            }
        }
        Ok(rustix::fs::openat(&at, checked(last)?, flags | OFlags::NOFOLLOW, mode)?.into())
    }
}

/// A name that leads one folder down, or nowhere else than to this one.
fn checked(name: &[u8]) -> io::Result<&[u8]> {
    if name.is_empty() || name == b".." { Err(Errno::XDEV.into()) } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn find(root: &Root, path: &str) -> Result<&'static str, Errno> {
        match root.find(path.as_bytes(), 100, Patience::Disk) {
            Ok(Opened::File(_)) => Ok("file"),
            Ok(Opened::Folder(_)) => Ok("folder"),
            Ok(Opened::Other) => Ok("other"),
            Err(error) => Err(Errno::from_io_error(&error).unwrap()),
        }
    }

    #[test]
    fn links_lead_where_the_policy_lets_them() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("root");
        fs::create_dir_all(inside.join("sub")).unwrap();
        fs::write(folder.path().join("secret"), "s").unwrap();
        fs::write(inside.join("sub/a"), "a").unwrap();
        symlink("sub/a", inside.join("to-a")).unwrap();
        symlink("../secret", inside.join("out")).unwrap();
        symlink(folder.path().join("secret"), inside.join("out-absolute")).unwrap();
        symlink("sub/../../secret", inside.join("out-winding")).unwrap();
        symlink("/proc/self/root/etc", inside.join("magic")).unwrap();
        symlink("loop", inside.join("loop")).unwrap();

        let root = Root::open(&inside, Symlinks::Inside).unwrap();
        assert_eq!(find(&root, ""), Ok("folder"));
        assert_eq!(find(&root, "sub/a"), Ok("file"));
        assert_eq!(find(&root, "to-a"), Ok("file"));
        for path in ["out", "out-absolute", "out-winding", "magic", "../secret", "/etc/passwd"] {
            assert_eq!(find(&root, path), Err(Errno::XDEV), "{path}");
        }
        assert_eq!(find(&root, "loop"), Err(Errno::LOOP));
        assert_eq!(find(&root, "sub/a/b"), Err(Errno::NOTDIR));

        let root = Root::open(&inside, Symlinks::Never).unwrap();
        assert_eq!(find(&root, "to-a"), Err(Errno::LOOP));
        assert_eq!(find(&root, "sub/a"), Ok("file"));

        let root = Root::open(&inside, Symlinks::Anywhere).unwrap();
        assert_eq!(find(&root, "out"), Ok("file"));

        // As where openat2 is refused.
        let root = |symlinks| Root { walks: true, ..Root::open(&inside, symlinks).unwrap() };
        for walking in [root(Symlinks::Inside), root(Symlinks::Never)] {
            assert_eq!((find(&walking, ""), find(&walking, "sub")), (Ok("folder"), Ok("folder")));
            assert_eq!(find(&walking, "sub/a"), Ok("file"));
            for link in ["to-a", "out", "out-absolute", "out-winding", "magic", "loop"] {
                assert_eq!(find(&walking, link), Err(Errno::LOOP), "{link}");
            }
            for path in ["..", "../secret", "sub/../../secret", "/etc/passwd", "sub/..", "sub//a"] {
                assert_eq!(find(&walking, path), Err(Errno::XDEV), "{path}");
            }
            symlink("sub", inside.join("to-sub")).ok();
            assert_eq!(find(&walking, "to-sub/a"), Err(Errno::NOTDIR));
            assert_eq!(find(&walking, "sub/a/b"), Err(Errno::NOTDIR));
            assert_eq!(find(&walking, "nothing/a"), Err(Errno::NOENT));
            let impatient = walking.find(b"sub/a", 100, Patience::None).unwrap_err();
            assert_eq!(impatient.kind(), io::ErrorKind::WouldBlock, "a helper asks again");
            assert!(walking.caveat().unwrap().contains("openat2"));
        }
        assert_eq!(find(&root(Symlinks::Anywhere), "out"), Ok("file"));
    }

    #[test]
    fn a_pipe_without_a_writer_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        assert_eq!(find(&root, "pipe"), Ok("other"));
    }

    #[test]
    fn what_is_in_memory_is_found_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "a").unwrap();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        root.find(b"a", 100, Patience::Disk).unwrap();
        assert!(matches!(root.find(b"a", 100, Patience::None), Ok(Opened::File(_))));
    }
}
