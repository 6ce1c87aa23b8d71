//! The frames of a chain at one host: frames for the next host, and frames that a host further
//! behind lacks.
//!
//! The source numbers the frames from 0, and each host passes on every frame unchanged. A host
//! keeps a frame until all hosts have the frame. If the next host fails, the host behind the next
//! host gets the frames from the first that it lacks.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The most bytes of frames in memory. More frames wait until other hosts have the frames before.
const MEMORY_BYTES_MAX: usize = 64 << 20;
/// The most frames: 128 GiB in chunks of 256 KiB. A frame whose data is in a file takes about
/// 200 bytes.
const FRAMES_MAX: usize = 512 << 10;
/// The most bytes that the source reads ahead of its connection.
const READ_AHEAD_BYTES: u64 = 16 << 20;
/// The most files that frames hold open.
const OPEN_FILES_MAX: usize = 256;

/// A frame.
#[derive(Debug)]
pub struct Frame {
    /// The lengths and the message.
    pub head: Vec<u8>,
    /// The data.
    pub body: Body,
}

/// The data of a frame.
#[derive(Debug)]
pub enum Body {
    Memory(Vec<u8>),
    /// A range of a file. The kernel sends the range without a copy.
    File(Arc<OpenFile>, Range<u64>),
}

impl Body {
    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Memory(data) => data.len() as u64,
            Self::File(_, range) => range.end - range.start,
        }
    }
}

/// A file that frames hold open.
#[derive(Debug)]
pub struct OpenFile {
    pub file: File,
    /// The number of such files of the queue.
    count: Arc<AtomicUsize>,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Relaxed);
    }
}

/// The frames of a chain at one host.
#[derive(Debug)]
pub struct FrameQueue {
    state: Mutex<State>,
    changed: Condvar,
    open_files: Arc<AtomicUsize>,
    /// Whether this is the source, which stops reading while the connection is slower.
    is_source: bool,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the first frame.
    first: u64,
    /// The frames, each with the bytes of data before.
    frames: VecDeque<(u64, Arc<Frame>)>,
    /// The bytes of data of all frames so far.
    bytes: u64,
    /// The bytes of frames in memory.
    memory_bytes: usize,
    /// The number of the next frame to send.
    next: u64,
    /// Changes with each order, so that a sender notices a new order.
    order: u64,
    /// Whether a frame waits for room.
    is_full: bool,
    is_over: bool,
}

/// What the connection to the next host does.
#[derive(Debug)]
pub enum Next {
    /// The frame with this number.
    Send(u64, Arc<Frame>),
    /// There is a new order, or the session ended.
    Stop,
}

impl FrameQueue {
    /// An empty queue.
    pub fn new(is_source: bool) -> Self {
        let (state, changed, open_files) = Default::default();
        Self { state, changed, open_files, is_source }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another descriptor of a file, for frames; `None` if frames hold too many files open.
    pub fn open_file(&self, file: &File) -> Option<Arc<OpenFile>> {
        if self.open_files.load(Relaxed) >= OPEN_FILES_MAX {
            return None;
        }
        let file = file.try_clone().ok()?;
        self.open_files.fetch_add(1, Relaxed);
        Some(Arc::new(OpenFile { file, count: Arc::clone(&self.open_files) }))
    }

    /// Adds a frame. Waits while the frames take too much memory. False if the session ended.
    pub fn push(&self, frame: Frame) -> bool {
        let mut state = self.state();
        while !state.is_over && !state.has_room(self.is_source) {
            state.is_full = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_full = false;
        let before = state.bytes;
        state.bytes += frame.body.bytes();
        state.memory_bytes += memory_bytes(&frame);
        state.frames.push_back((before, Arc::new(frame)));
        let is_over = state.is_over;
        drop(state);
        self.changed.notify_all();
        !is_over
    }

    /// Whether there are frames that were not sent.
    pub fn has_unsent(&self) -> bool {
        let state = self.state();
        state.next < state.first + state.frames.len() as u64
    }

    /// Whether a frame waits for room.
    pub fn is_full(&self) -> bool {
        self.state().is_full
    }

    /// Forgets the frames before this number, because all hosts have these frames.
    pub fn release(&self, number: u64) {
        let mut state = self.state();
        while state.first < number
            && let Some((_, frame)) = state.frames.pop_front()
        {
            state.memory_bytes -= memory_bytes(&frame);
            state.first += 1;
        }
        state.next = state.next.max(state.first);
        drop(state);
        self.changed.notify_all();
    }

    /// Makes senders stop, because the next host changed.
    pub fn change_order(&self) {
        self.state().order += 1;
        self.changed.notify_all();
    }

    /// The number of the present order.
    pub fn order(&self) -> u64 {
        self.state().order
    }

    /// Begins to send at this frame, which may be a frame that is not here yet. False if the frame
    /// is not here any more.
    pub fn begin(&self, number: u64) -> bool {
        let mut state = self.state();
        let is_kept = number >= state.first;
        if is_kept {
            state.next = number;
        }
        is_kept
    }

    /// Waits for the next frame of a sender with this order.
    pub fn next(&self, order: u64) -> Next {
        let mut state = self.state();
        loop {
            if state.is_over || state.order != order {
                return Next::Stop;
            }
            let at = state.next.checked_sub(state.first).map(|at| at as usize);
            if let Some(frame) = at.and_then(|at| state.frames.get(at)) {
                return Next::Send(state.next, Arc::clone(&frame.1));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that a sender with this order sent the frame with this number.
    pub fn end_send(&self, order: u64, number: u64) {
        let mut state = self.state();
        if state.order == order {
            // The frame may be released already, because the next host took the frame.
            state.next = state.next.max(number + 1);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for a new order, for at most a time. False if the session ended.
    pub fn wait_for_order(&self, order: u64, time: Option<std::time::Duration>) -> bool {
        let deadline = time.map(|time| std::time::Instant::now() + time);
        let mut state = self.state();
        while !state.is_over && state.order == order {
            let left = deadline.map(|at| at.saturating_duration_since(std::time::Instant::now()));
            state = match left {
                Some(left) if left.is_zero() => break,
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        !state.is_over
    }

    /// Ends the session: nothing waits any longer.
    pub fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }
}

impl State {
    /// The bytes of data of frames that were not sent.
    fn unsent_bytes(&self) -> u64 {
        let next = self.next.checked_sub(self.first).and_then(|at| self.frames.get(at as usize));
        next.map_or(0, |(before, _)| self.bytes - before)
    }

    fn has_room(&self, is_source: bool) -> bool {
        self.memory_bytes < MEMORY_BYTES_MAX
            && self.frames.len() < FRAMES_MAX
            && !(is_source && self.unsent_bytes() >= READ_AHEAD_BYTES)
    }
}

/// The bytes of a frame in memory.
fn memory_bytes(frame: &Frame) -> usize {
    match &frame.body {
        Body::Memory(data) => frame.head.len() + data.len(),
        Body::File(..) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(number: u64) -> Frame {
        Frame { head: number.to_le_bytes().to_vec(), body: Body::Memory(vec![0; 10]) }
    }

    #[test]
    fn a_new_order_stops_the_sender_and_the_next_host_gets_what_it_lacks() {
        let queue = FrameQueue::new(false);
        for number in 0..5 {
            assert!(queue.push(frame(number)));
        }
        let order = queue.order();
        assert!(queue.begin(0));
        for _ in 0..4 {
            let Next::Send(number, _) = queue.next(order) else { panic!("no frame") };
            queue.end_send(order, number);
        }
        queue.release(2);
        queue.change_order();
        assert!(matches!(queue.next(order), Next::Stop));
        assert!(!queue.begin(1) && queue.begin(2));
        let Next::Send(2, sent) = queue.next(queue.order()) else { panic!("no frame") };
        assert_eq!(sent.head, 2_u64.to_le_bytes());
        assert_eq!(queue.state().unsent_bytes(), 30);
    }

    /// The next host may have more than this host: it was before this host, and is now behind.
    #[test]
    fn a_sender_waits_for_a_frame_that_is_not_here_yet() {
        let queue = FrameQueue::new(false);
        assert!(queue.begin(1));
        queue.push(frame(0));
        std::thread::scope(|scope| {
            let sent = scope.spawn(|| queue.next(queue.order()));
            queue.push(frame(1));
            let Next::Send(1, sent) = sent.join().unwrap() else { panic!("no frame") };
            assert_eq!(sent.head, 1_u64.to_le_bytes());
        });
    }

    #[test]
    fn a_full_queue_waits_until_frames_are_released() {
        let queue = FrameQueue::new(false);
        let large = || Frame { head: Vec::new(), body: Body::Memory(vec![0; MEMORY_BYTES_MAX]) };
        queue.push(large());
        std::thread::scope(|scope| {
            let pushed = scope.spawn(|| queue.push(large()));
            queue.release(1);
            assert!(pushed.join().unwrap());
            let refused = scope.spawn(|| queue.push(large()));
            queue.close();
            assert!(!refused.join().unwrap());
        });
    }

    proptest! {
        /// Whatever is pushed, sent, released and begun again: the bytes are counted exactly.
        #[test]
        fn the_counts_fit_the_frames(steps in prop::collection::vec((0_u8..4, 0_u64..20), 0..60)) {
            let queue = FrameQueue::new(false);
            let mut pushed = 0;
            for (step, number) in steps {
                match step {
                    0 => {
                        queue.push(frame(pushed));
                        pushed += 1;
                    }
                    1 => queue.release(number),
                    2 => drop(queue.begin(number)),
                    _ if queue.state().next < pushed => {
                        let Next::Send(sent, _) = queue.next(0) else { panic!("no frame") };
                        prop_assert_eq!(sent, queue.state().next);
                        // The next host may take the frame before the send ends.
                        queue.release(sent + number % 2);
                        queue.end_send(0, sent);
                        prop_assert_eq!(queue.state().next, sent + 1);
                    }
                    _ => {}
                }
                let state = queue.state();
                let memory: usize = state.frames.iter().map(|(_, one)| memory_bytes(one)).sum();
                let unsent = pushed.saturating_sub(state.next);
                prop_assert_eq!((state.memory_bytes, state.unsent_bytes()), (memory, 10 * unsent));
                prop_assert_eq!(state.first + state.frames.len() as u64, pushed);
                prop_assert!(state.first <= state.next);
            }
        }
    }
}
