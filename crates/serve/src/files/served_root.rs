//! The served directory, which is looked up again by its name.
//!
//! A deployment may point a symbolic link at another directory, or remove the directory and make it
//! again. The name is looked up at most once a second, when a request comes.

use haul_fs::{Blocking, Root, Symlinks};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use tracing::{info, warn};

/// The directory that has the name of the served directory now.
#[derive(Debug)]
pub struct ServedRoot {
    path: PathBuf,
    symlinks: Symlinks,
    /// Whether this process cannot open other directories (Landlock).
    is_confined: bool,
    current: RwLock<Arc<Root>>,
    started: Instant,
    /// The second since `started`, counted from 1, in which the name was last looked up.
    looked_up_at: AtomicU64,
    /// Held while the name is looked up. True if the latest lookup failed, which is logged once.
    is_lost: Mutex<bool>,
}

impl ServedRoot {
    /// Opens the directory at `path`.
    pub fn open(path: &Path, symlinks: Symlinks) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            symlinks,
            is_confined: false,
            current: RwLock::new(Arc::new(Root::open(path, symlinks)?)),
            started: Instant::now(),
            looked_up_at: AtomicU64::new(1),
            is_lost: Mutex::new(false),
        })
    }

    /// Sets whether this process cannot open other directories, for the advice in messages.
    pub fn with_confined(self, is_confined: bool) -> Self {
        Self { is_confined, ..self }
    }

    /// The directory.
    pub fn get(&self) -> Arc<Root> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks the name up again, unless that happened within this second. If another directory has
    /// the name now, that one is served. [`io::ErrorKind::WouldBlock`] if the lookup may not block
    /// and would.
    pub fn follow(&self, blocking: Blocking) -> io::Result<()> {
        let now = self.started.elapsed().as_secs() + 1;
        if self.looked_up_at.load(Relaxed) == now {
            return Ok(());
        }
        // Another thread that looks the name up is not waited for.
        let Ok(mut is_lost) = self.is_lost.try_lock() else { return Ok(()) };
        self.look_up(blocking, &mut is_lost)?;
        self.looked_up_at.store(now, Relaxed);
        Ok(())
    }

    fn look_up(&self, blocking: Blocking, is_lost: &mut bool) -> io::Result<()> {
        let found = match self.get().is_at(&self.path, blocking) {
            Ok(true) => {
                *is_lost = false;
                return Ok(());
            }
            // Opening the other directory may block.
            Ok(false) if blocking == Blocking::None => {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(false) => Root::open(&self.path, self.symlinks),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
            Err(error) => Err(error),
        };
        let path = self.path.display();
        match found {
            Ok(found) => {
                let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
                *current = Arc::new(found);
                drop(current);
                *is_lost = false;
                info!("{path} is another directory now, which is served from now on");
            }
            Err(error) if !std::mem::replace(is_lost, true) => {
                let advice = match error.kind() {
                    io::ErrorKind::PermissionDenied if self.is_confined => {
                        ": restart haul, or start it with --confine=false"
                    }
                    _ => "",
                };
                warn!(
                    %error,
                    "{path} is another directory now, or is gone, and cannot be opened ({error}): \
                     the earlier directory is served{advice}"
                );
            }
            Err(_) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    fn content(root: &ServedRoot) -> Option<String> {
        let flags = OFlags::RDONLY;
        let file = root.get().open_below(b"a", flags, Mode::empty(), Blocking::Disk);
        let mut text = String::new();
        file.ok()?.read_to_string(&mut text).unwrap();
        Some(text)
    }

    /// The directories `v1` and `v2`, each with a file.
    fn versions() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for version in ["v1", "v2"] {
            fs::create_dir(folder.path().join(version)).unwrap();
            fs::write(folder.path().join(version).join("a"), version).unwrap();
        }
        folder
    }

    /// An event loop does not open the other directory: a job does.
    #[test]
    fn an_event_loop_leaves_the_other_directory_to_a_job() {
        let folder = versions();
        let site = folder.path().join("site");
        symlink("v1", &site).unwrap();
        let root = ServedRoot::open(&site, Symlinks::Inside).unwrap();
        fs::remove_file(&site).unwrap();
        symlink("v2", &site).unwrap();
        // As after a second.
        root.looked_up_at.store(0, Relaxed);
        let refused = root.follow(Blocking::None).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(content(&root).as_deref(), Some("v1"));
        root.follow(Blocking::Disk).unwrap();
        assert_eq!(content(&root).as_deref(), Some("v2"));
        // An unchanged name does not wait for the disk.
        root.looked_up_at.store(0, Relaxed);
        root.follow(Blocking::None).unwrap();
    }

    #[test]
    fn the_directory_that_has_the_name_now_is_served() {
        let folder = versions();
        let site = folder.path().join("site");
        symlink("v1", &site).unwrap();
        let root = ServedRoot::open(&site, Symlinks::Inside).unwrap();
        assert_eq!(content(&root).as_deref(), Some("v1"));
        fs::remove_file(&site).unwrap();
        // For a moment there is none.
        root.look_up(Blocking::Disk, &mut false).unwrap();
        assert_eq!(content(&root).as_deref(), Some("v1"));
        symlink("v2", &site).unwrap();
        root.look_up(Blocking::Disk, &mut false).unwrap();
        assert_eq!(content(&root).as_deref(), Some("v2"));
        // A build that empties its output directory.
        fs::remove_dir_all(folder.path().join("v2")).unwrap();
        fs::create_dir(folder.path().join("v2")).unwrap();
        fs::write(folder.path().join("v2/a"), "again").unwrap();
        root.look_up(Blocking::Disk, &mut false).unwrap();
        assert_eq!(content(&root).as_deref(), Some("again"));
    }
}
