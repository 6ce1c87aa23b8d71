//! How far a transfer is, for the user.

use crate::times::{Clocks, Sshd, Times};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How far a transfer is. Clones share it.
#[derive(Debug, Clone)]
pub struct Progress(Arc<Inner>);

/// The interval at which an end reports its times to the other end.
pub(crate) const REPORT_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Inner {
    files_requested: AtomicU64,
    bytes_requested: AtomicU64,
    files_done: AtomicU64,
    bytes_done: AtomicU64,
    entries: AtomicU64,
    is_walked: AtomicBool,
    clocks: Clocks,
    /// The process of sshd whose command this process is.
    sshd: Option<Sshd>,
    /// The times that the other end reported last.
    peer: Mutex<Times>,
    /// Whether the transfer ended.
    is_over: Mutex<bool>,
    over: Condvar,
}

/// How far a transfer is at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct ProgressSnapshot {
    /// The entries that were found so far.
    pub entries: u64,
    /// The files whose content is sent, as far as they are known.
    pub files_requested: u64,
    /// The bytes of these files that are sent. A sparse file counts with its holes.
    pub bytes_requested: u64,
    /// Whether the walk through the sources ended, so that no files are added.
    pub is_total: bool,
    /// The files whose content was sent.
    pub files_done: u64,
    /// The bytes that were sent. A file that changed is sent again, so these may be more.
    pub bytes_done: u64,
    /// Where the time of this end went.
    pub own: Times,
    /// Where the time of the other end went, as it reported a second ago or less.
    pub peer: Times,
}

impl Default for Progress {
    /// A transfer that begins now.
    fn default() -> Self {
        Self(Arc::new(Inner {
            files_requested: AtomicU64::new(0),
            bytes_requested: AtomicU64::new(0),
            files_done: AtomicU64::new(0),
            bytes_done: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            is_walked: AtomicBool::new(false),
            clocks: Clocks::default(),
            sshd: Sshd::find(),
            peer: Mutex::default(),
            is_over: Mutex::new(false),
            over: Condvar::new(),
        }))
    }
}

impl Progress {
    /// How far the transfer is now.
    pub fn snapshot(&self) -> ProgressSnapshot {
        let Inner { files_requested, bytes_requested, files_done, bytes_done, .. } = &*self.0;
        ProgressSnapshot {
            entries: self.0.entries.load(Relaxed),
            is_total: self.0.is_walked.load(Relaxed),
            files_requested: files_requested.load(Relaxed),
            bytes_requested: bytes_requested.load(Relaxed),
            files_done: files_done.load(Relaxed),
            bytes_done: bytes_done.load(Relaxed),
            own: self.own_times(),
            peer: *self.peer(),
        }
    }

    /// Where the time of this end went so far.
    pub(crate) fn own_times(&self) -> Times {
        let ssh_cpu = self.0.sshd.as_ref().map_or(0.0, Sshd::cpu);
        Times { ssh_cpu, ..self.0.clocks.times() }
    }

    pub(crate) fn clocks(&self) -> &Clocks {
        &self.0.clocks
    }

    /// Counts a file of which so many bytes are sent.
    pub(crate) fn request(&self, bytes: u64) {
        self.0.files_requested.fetch_add(1, Relaxed);
        self.0.bytes_requested.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn add_bytes(&self, bytes: u64) {
        self.0.bytes_done.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn add_files(&self, files: u64) {
        self.0.files_done.fetch_add(files, Relaxed);
    }

    pub(crate) fn set_entries(&self, entries: u64) {
        self.0.entries.store(entries, Relaxed);
    }

    pub(crate) fn end_walk(&self) {
        self.0.is_walked.store(true, Relaxed);
    }

    fn peer(&self) -> MutexGuard<'_, Times> {
        self.0.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_peer(&self, times: Times) {
        if let Some(times) = times.check() {
            *self.peer() = times;
        }
    }

    /// Ends [`Progress::wait`].
    pub(crate) fn end(&self) {
        *self.0.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.over.notify_all();
    }

    /// Waits for a time. False if the transfer ended.
    pub fn wait(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let mut is_over = self.0.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if *is_over || left == Duration::ZERO {
                return !*is_over;
            }
            let waited = self.0.over.wait_timeout(is_over, left);
            is_over = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
