//! Watches files for writes (`inotify`), to tell a write from a change of metadata.
//!
//! A new mode, owner, name or link changes the time `ctime` of a file, and so does a write. Only a
//! write makes an event `IN_MODIFY`. The kernel queues the event at the end of the call, so a write
//! that is still going on shows only in the time `mtime`.
//!
//! Limitation: writes to mapped memory make no event.

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The watches of a service.
#[derive(Debug)]
pub struct Watches {
    queue: OwnedFd,
    files: Mutex<HashMap<i32, Watched>>,
}

/// A watched file; several objects may watch it.
#[derive(Debug, Default)]
struct Watched {
    watchers: usize,
    writes: u64,
}

/// The watch of one open file. It ends when it is dropped.
#[derive(Debug)]
pub struct Watch {
    watches: Arc<Watches>,
    descriptor: i32,
    writes_before: u64,
}

impl Watches {
    /// Creates a queue of events. The errors come from `inotify_init1`: `EMFILE` at the user's
    /// limit of queues.
    pub fn new() -> io::Result<Arc<Self>> {
        let queue = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Arc::new(Self { queue, files: Mutex::default() }))
    }

    /// Watches an open file from now on. The errors come from `inotify_add_watch`: `ENOSPC` at the
    /// user's limit of watches, `ENOENT` without `/proc`.
    pub fn watch(self: &Arc<Self>, file: &File) -> io::Result<Watch> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut files = self.files();
        let descriptor = inotify::add_watch(&self.queue, path, WatchFlags::MODIFY)?;
        // What happened before belongs to no later watch.
        self.read_events(&mut files);
        let watched = files.entry(descriptor).or_default();
        watched.watchers += 1;
        let writes_before = watched.writes;
        drop(files);
        Ok(Watch { watches: Arc::clone(self), descriptor, writes_before })
    }

    fn read_events(&self, files: &mut HashMap<i32, Watched>) {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.queue, &mut buffer);
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    // Any of them may have been written to.
                    for watched in files.values_mut() {
                        watched.writes += 1;
                    }
                }
                Ok(event) => {
                    if let Some(watched) = files.get_mut(&event.wd())
                        && event.events().contains(ReadFlags::MODIFY)
                    {
                        watched.writes += 1;
                    }
                }
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    fn files(&self) -> MutexGuard<'_, HashMap<i32, Watched>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    /// Whether the file has been written to since the watch began.
    pub fn has_seen_write(&self) -> bool {
        let mut files = self.watches.files();
        self.watches.read_events(&mut files);
        files.get(&self.descriptor).is_none_or(|watched| watched.writes != self.writes_before)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut files = self.watches.files();
        let Some(watched) = files.get_mut(&self.descriptor) else { return };
        watched.watchers -= 1;
        if watched.watchers == 0 {
            files.remove(&self.descriptor);
            // The kernel has removed it if the file is gone.
            let _ = inotify::remove_watch(&self.watches.queue, self.descriptor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_write_is_seen_and_a_change_of_metadata_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "first").unwrap();
        let watches = Watches::new().unwrap();
        let file = File::open(&path).unwrap();
        let watch = watches.watch(&file).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&path, folder.path().join("b")).unwrap();
        fs::rename(&path, folder.path().join("c")).unwrap();
        fs::remove_file(folder.path().join("b")).unwrap();
        assert!(!watch.has_seen_write());
        fs::write(folder.path().join("c"), "other").unwrap();
        assert!(watch.has_seen_write());
        let later = watches.watch(&file).unwrap();
        assert!(watch.has_seen_write() && !later.has_seen_write());
        drop(watch);
        File::options().write(true).open(folder.path().join("c")).unwrap().set_len(1).unwrap();
        assert!(later.has_seen_write());
        drop(later);
        assert!(watches.files().is_empty());
    }
}
