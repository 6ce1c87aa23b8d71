//! The direct streams of a session, which threads in the background open.

use super::StreamCount;
use super::endpoint::DirectRequest;
use super::stream::DataStream;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The direct streams of a session.
#[derive(Debug, Clone)]
pub struct DirectStreams(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    is_plain: bool,
    count: StreamCount,
    state: Mutex<State>,
    /// A stream arrived or ended, or the session ended.
    changed: Condvar,
    /// The bytes of content that went through direct streams.
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    arrived: VecDeque<DataStream>,
    /// The sockets of open streams, to interrupt a stream that waits.
    open: HashMap<u64, TcpStream>,
    /// The number of streams so far.
    opened: u64,
    /// The streams that carried content.
    used: HashSet<u64>,
    /// Whether the kernel encrypts a stream.
    is_in_kernel: bool,
    is_over: bool,
}

/// What went through direct streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirectReport {
    /// The number of streams that carried content.
    pub streams: usize,
    /// The number of streams that were opened.
    pub opened: u64,
    /// The bytes of content.
    pub bytes: u64,
    /// Whether the streams were not encrypted.
    pub is_plain: bool,
    /// Whether the kernel encrypted (kTLS).
    pub is_in_kernel: bool,
}

impl DirectStreams {
    pub(super) fn new(request: &DirectRequest) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let count = request.count();
        let is_plain = request.is_plain;
        Self(Arc::new(Inner { is_plain, count, state, changed, bytes: AtomicU64::new(0) }))
    }

    /// How many streams carry content at a time.
    pub fn count(&self) -> StreamCount {
        self.0.count
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a stream whose ends recognized each other.
    pub(super) fn add(&self, mut stream: DataStream) {
        let mut state = self.state();
        // A stream that cannot be interrupted would outlive the session.
        let Ok(socket) = stream.socket() else { return };
        if state.is_over {
            return;
        }
        state.opened += 1;
        stream.set_id(state.opened);
        state.is_in_kernel |= stream.is_in_kernel();
        let id = stream.id();
        state.open.insert(id, socket);
        state.arrived.push_back(stream);
        self.0.changed.notify_all();
    }

    /// The next stream that is open already.
    pub fn try_next(&self) -> Option<DataStream> {
        self.state().arrived.pop_front()
    }

    /// Waits for the next stream; `None` at the end of the session.
    pub fn next(&self) -> Option<DataStream> {
        let mut state = self.state();
        loop {
            if state.is_over {
                return None;
            }
            if let Some(stream) = state.arrived.pop_front() {
                return Some(stream);
            }
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that a stream carries content.
    pub fn mark_used(&self, id: u64) {
        self.state().used.insert(id);
    }

    /// Forgets a stream that ended.
    pub fn forget(&self, id: u64) {
        self.state().open.remove(&id);
        self.0.changed.notify_all();
    }

    /// Ends the session: no stream waits any longer.
    pub fn end(&self) {
        let mut state = self.state();
        state.is_over = true;
        state.arrived.clear();
        for socket in state.open.values() {
            // An error means that the other end closed the stream.
            let _ = socket.shutdown(Shutdown::Both);
        }
        self.0.changed.notify_all();
    }

    /// Whether the session ended.
    pub(super) fn is_over(&self) -> bool {
        self.state().is_over
    }

    /// The number of open streams.
    pub fn open(&self) -> usize {
        self.state().open.len()
    }

    /// Waits for a time. False if the session ended.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let mut state = self.state();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if state.is_over || left == Duration::ZERO {
                return !state.is_over;
            }
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The bytes of content that went through direct streams.
    pub fn bytes(&self) -> &AtomicU64 {
        &self.0.bytes
    }

    /// Counts content.
    pub fn add_bytes(&self, count: u64) {
        self.0.bytes.fetch_add(count, Relaxed);
    }

    /// What went through direct streams so far.
    pub fn report(&self) -> DirectReport {
        let state = self.state();
        DirectReport {
            streams: state.used.len(),
            opened: state.opened,
            bytes: self.0.bytes.load(Relaxed),
            is_plain: self.0.is_plain,
            is_in_kernel: state.is_in_kernel,
        }
    }
}
