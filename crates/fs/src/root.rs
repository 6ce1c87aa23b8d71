//! Path lookup confined to a directory: opens a path below a root, and nothing outside it.
//!
//! The kernel resolves the path (`openat2` with `RESOLVE_BENEATH`, Linux 5.6), so no rename and no
//! symbolic link can lead out between a check and its use. With `RESOLVE_CACHED` (Linux 5.12) it
//! also reports when the lookup would block on the disk.
//!
//! If the call is refused (an older kernel, a container's seccomp filter), paths are resolved
//! directory by directory and symbolic links are refused: slower, and as safe.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Attempts at a lookup that concurrent renames interrupt (`EAGAIN`).
const TRIES_MAX: usize = 16;

/// Where symbolic links may lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Symlinks {
    /// Anywhere below the root.
    #[default]
    Inside,
    /// Nowhere: a path with a symbolic link in it is refused.
    Never,
    /// Outside the root too: a user who can create a link below it publishes any file that this
    /// process can read.
    Anywhere,
}

/// Whether a lookup may block on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocking {
    /// It may not: what is not in memory is [`io::ErrorKind::WouldBlock`].
    None,
    /// It may.
    Disk,
}

/// An open directory below which paths are looked up.
#[derive(Debug)]
pub struct Root {
    folder: OwnedFd,
    symlinks: Symlinks,
    /// Whether paths are resolved here, because the kernel refuses `openat2`.
    walks: bool,
}

impl Root {
    /// Opens the directory at `path`.
    pub fn open(path: &Path, symlinks: Symlinks) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut root =
            Self { folder: rustix::fs::open(path, flags, Mode::empty())?, symlinks, walks: false };
        match root.check() {
            // Seccomp filters older than 2020 answer EPERM; an unreadable directory is EACCES.
            Err(error)
                if matches!(Errno::from_io_error(&error), Some(Errno::NOSYS | Errno::PERM)) =>
            {
                root.walks = true;
                root.check()?;
            }
            checked => checked?,
        }
        Ok(root)
    }

    /// Whether the directory at `path` is this one. [`io::ErrorKind::WouldBlock`] if the lookup may
    /// not block and would.
    pub fn is_at(&self, path: &Path, blocking: Blocking) -> io::Result<bool> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let found = match blocking {
            Blocking::Disk => rustix::fs::open(path, flags, Mode::empty()),
            Blocking::None => {
                let resolve = ResolveFlags::CACHED;
                rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve)
            }
        };
        let found = match found {
            // It would block, or the kernel does not know the call or the flag.
            Err(Errno::AGAIN | Errno::INVAL | Errno::NOSYS | Errno::PERM)
                if blocking == Blocking::None =>
            {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            found => rustix::fs::fstat(found?)?,
        };
        let own = rustix::fs::fstat(&self.folder)?;
        Ok((own.st_dev, own.st_ino) == (found.st_dev, found.st_ino))
    }

    /// A limitation of this kernel and its consequence, as one line; `None` if there is none.
    pub fn caveat(&self) -> Option<String> {
        let means = match self.symlinks {
            Symlinks::Inside => "symbolic links are not followed, and files are opened more slowly",
            Symlinks::Never | Symlinks::Anywhere => "files are opened more slowly",
        };
        self.walks.then(|| {
            format!("openat2 is refused here (Linux 5.6, or a container's filter): {means}")
        })
    }

    /// Checks that this process may read the directory.
    pub fn check(&self) -> io::Result<()> {
        self.open_below(b"", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty(), Blocking::Disk)
            .map(drop)
    }

    /// Opens a path below the root; the empty path is the root itself.
    ///
    /// Errors: `EXDEV` for a path that leaves the root, `ELOOP` for a refused symbolic link,
    /// [`io::ErrorKind::WouldBlock`] if the lookup may not block and would.
    pub fn open_below(
        &self,
        path: &[u8],
        flags: OFlags,
        mode: Mode,
        blocking: Blocking,
    ) -> io::Result<File> {
        let path = if path.is_empty() { b"." } else { path };
        if self.walks {
            return self.walk(path, flags | OFlags::CLOEXEC, mode, blocking);
        }
        let mut resolve = ResolveFlags::NO_MAGICLINKS;
        resolve |= match self.symlinks {
            Symlinks::Inside => ResolveFlags::BENEATH,
            Symlinks::Never => ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
            Symlinks::Anywhere => ResolveFlags::empty(),
        };
        if blocking == Blocking::None {
            resolve |= ResolveFlags::CACHED;
        }
        let mut tries = 0;
        loop {
            match rustix::fs::openat2(&self.folder, path, flags | OFlags::CLOEXEC, mode, resolve) {
                Ok(file) => return Ok(file.into()),
                // It would block; or, before Linux 5.12, the kernel does not know the flag.
                Err(Errno::AGAIN | Errno::INVAL) if blocking == Blocking::None => {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                // A concurrent rename: the kernel could not be sure where `..` led.
                Err(Errno::AGAIN) if tries < TRIES_MAX => tries += 1,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Resolves a path directory by directory.
    fn walk(&self, path: &[u8], flags: OFlags, mode: Mode, blocking: Blocking) -> io::Result<File> {
        if blocking == Blocking::None {
            // Without openat2 there is no way to know whether a lookup would block.
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

/// Refuses the components that do not lead one directory down: the empty one and `..`.
fn checked(name: &[u8]) -> io::Result<&[u8]> {
    if name.is_empty() || name == b".." { Err(Errno::XDEV.into()) } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn find(root: &Root, path: &str) -> Result<&'static str, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let opened = root.open_below(path.as_bytes(), flags, Mode::empty(), Blocking::Disk);
        let opened = opened.map_err(|error| Errno::from_io_error(&error).unwrap())?;
        let kind = opened.metadata().unwrap().file_type();
        Ok(if kind.is_file() { "file" } else { "folder" })
    }

    #[test]
    fn symbolic_links_lead_where_the_policy_allows() {
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
            let refused = walking
                .open_below(b"sub/a", OFlags::RDONLY, Mode::empty(), Blocking::None)
                .unwrap_err();
            assert_eq!(
                refused.kind(),
                io::ErrorKind::WouldBlock,
                "the caller tries again where it may block"
            );
            assert!(walking.caveat().unwrap().contains("openat2"));
        }
        assert_eq!(find(&root(Symlinks::Anywhere), "out"), Ok("file"));
    }

    #[test]
    fn a_cached_path_is_opened_without_blocking() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "a").unwrap();
        let root = Root::open(folder.path(), Symlinks::Inside).unwrap();
        root.open_below(b"a", OFlags::RDONLY, Mode::empty(), Blocking::Disk).unwrap();
        root.open_below(b"a", OFlags::RDONLY, Mode::empty(), Blocking::None).unwrap();
    }
}
