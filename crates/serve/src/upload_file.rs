//! The temporary file of an upload, which another thread removes.
//!
//! Removing a file waits for the disk, and for each thread that creates one in the same directory.
//! An event loop drops the files of clients that leave, are evicted or are refused, so a dropped
//! [`UploadFile`] goes to the [`UploadRemover`]. Without that thread, or if many files wait for it,
//! it is removed where it is dropped.

use haul_fs::{AtomicFile, Committed};
use haul_server::join::join_with_timeout;
use std::fs::File;
use std::io;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The files that wait for the thread. Each has two descriptors.
const WAITING_MAX: usize = 32;
/// The longest wait for a place in the queue at the end: the disk may hang.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The temporary file of an upload.
#[derive(Debug)]
pub struct UploadFile {
    /// `None` once it is committed or dropped.
    file: Option<AtomicFile>,
    removals: Removals,
}

/// The way to the thread that removes files, if there is one.
#[derive(Debug, Clone, Default)]
pub struct Removals(Option<SyncSender<Removal>>);

/// The thread that removes files. Dropping it waits a few seconds at most for the removals that
/// were sent before.
#[derive(Debug)]
pub struct UploadRemover {
    tx: SyncSender<Removal>,
    thread: Option<JoinHandle<()>>,
}

/// A message to the thread.
#[derive(Debug)]
enum Removal {
    /// Dropping it removes the file.
    Remove {
        _file: AtomicFile,
    },
    End,
}

impl UploadFile {
    /// Takes over a temporary file.
    pub fn new(file: AtomicFile, removals: Removals) -> Self {
        Self { file: Some(file), removals }
    }

    /// The file, for writing.
    pub fn file(&self) -> io::Result<&File> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        Ok(file.file())
    }

    /// The final name, without its directory.
    pub fn name(&self) -> &[u8] {
        self.file.as_ref().map_or(&[], AtomicFile::name)
    }

    /// Gives the file its name, as [`AtomicFile::commit`] does.
    pub fn commit(mut self, only_new: bool) -> io::Result<Committed> {
        self.file.take().ok_or(io::ErrorKind::NotFound)?.commit(only_new)
    }
}

impl Drop for UploadFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take()
            && let Some(tx) = &self.removals.0
        {
            // If many wait, or the thread has ended, the file comes back in the error, and is
            // removed here.
            let _ = tx.try_send(Removal::Remove { _file: file });
        }
    }
}

impl UploadRemover {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let (tx, rx) = sync_channel(WAITING_MAX);
        let remove = move || while let Ok(Removal::Remove { .. }) = rx.recv() {};
        let thread = std::thread::Builder::new().name("haul-remover".into()).spawn(remove)?;
        Ok(Self { tx, thread: Some(thread) })
    }

    /// The way to the thread.
    pub fn removals(&self) -> Removals {
        Removals(Some(self.tx.clone()))
    }
}

impl Drop for UploadRemover {
    fn drop(&mut self) {
        let deadline = Instant::now() + END_TIMEOUT;
        while let Err(TrySendError::Full(_)) = self.tx.try_send(Removal::End)
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(thread) = self.thread.take() {
            join_with_timeout(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_lab_sys::seccomp;
    use std::path::Path;

    fn names(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    fn upload(folder: &Path, remover: &UploadRemover) -> UploadFile {
        let file = AtomicFile::create(&folder.join("name"), 0o600).unwrap();
        UploadFile::new(file, remover.removals())
    }

    #[test]
    fn a_dropped_file_is_removed_by_the_other_thread_and_a_committed_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let remover = UploadRemover::start().unwrap();
        let dropped = upload(folder.path(), &remover);
        let dropping = std::thread::spawn(|| {
            // This thread cannot remove it.
            seccomp::refuse(libc::SYS_unlinkat, &[], libc::EPERM).unwrap();
            drop(dropped);
        });
        dropping.join().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while names(folder.path()) > 0 {
            assert!(Instant::now() < deadline, "the file is still there");
            std::thread::sleep(Duration::from_millis(1));
        }
        let committed = upload(folder.path(), &remover);
        assert_eq!(committed.name(), b"name");
        assert_eq!(committed.commit(false).unwrap(), Committed::Created);
        drop(remover);
        assert_eq!(names(folder.path()), 1);
    }

    #[test]
    fn the_end_of_the_thread_waits_for_files_and_later_ones_are_removed_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let remover = UploadRemover::start().unwrap();
        let late = upload(folder.path(), &remover);
        for _ in 0..100 {
            drop(upload(folder.path(), &remover));
        }
        drop(remover);
        assert_eq!(names(folder.path()), 1, "that of the upload that goes on");
        drop(late);
        assert_eq!(names(folder.path()), 0);
    }
}
