//! What the streams of a source have to send, and what the session waits for.

use crate::error::Error;
use crate::message::{BlocksPlace, ToSource};
use crate::options::Delta;
use crate::source::found::FoundFile;
use crate::source::large_file::{LargeFile, Step};
use crate::times::{Activity, Clocks};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most jobs that wait. The folders of their files are open.
const WAITING_MAX: usize = 32;
/// The most files whose blocks the destination compares. The files are open.
const COMPARED_MAX: usize = 32;
/// The largest range of a file that the stream of ssh takes. The range delays the end of the
/// transfer if direct streams take the others.
const SSH_RANGE_BYTES: u64 = 1 << 20;
/// The largest range that a direct stream takes.
const DIRECT_RANGE_BYTES: u64 = 4 << 20;

/// What a stream sends next.
#[derive(Debug)]
pub enum Work {
    /// Small files, packed.
    Small(Vec<FoundFile>),
    /// A step of a large file.
    Large(Arc<LargeFile>, Step),
}

/// The kind of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// The stream of ssh, which sends content unless a direct stream does.
    Ssh,
    Direct,
}

#[derive(Debug)]
enum Job {
    Small(Vec<FoundFile>),
    Large(Arc<LargeFile>),
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Job>,
    /// The files whose blocks the destination compares, by their entries, until they are complete.
    compared: HashMap<u64, Arc<LargeFile>>,
    /// The files and groups of small files that were added and not completed.
    incomplete: usize,
    direct_streams: usize,
    /// Direct streams that carry out work.
    working: usize,
    /// The most direct streams that carry out work at a time.
    working_max: usize,
    is_over: bool,
    failure: Option<Error>,
    answers: VecDeque<ToSource>,
    /// Whether the stream of answers ended, and why.
    answers_end: Option<Error>,
    /// Whether the stream of answers ended. True even after `answers_end` was taken.
    has_answers_end: bool,
}

/// The numbers of jobs.
pub struct JobCounts {
    /// Jobs that no stream took.
    pub waiting: usize,
    /// Files whose blocks the destination compares.
    pub compared: usize,
    /// Jobs that were added and not completed.
    pub incomplete: usize,
}

impl JobCounts {
    /// Whether so few jobs wait that others should be added.
    pub fn are_few(&self) -> bool {
        self.waiting <= WAITING_MAX / 2 && self.compared <= COMPARED_MAX / 2
    }
}

/// The jobs of all streams, and the answers of the destination.
#[derive(Debug, Default)]
pub struct Jobs {
    state: Mutex<State>,
    /// Streams wait for work.
    work: Condvar,
    /// The session waits for progress.
    progress: Condvar,
    /// The thread that counts streams waits for the end.
    end: Condvar,
    compared_bytes: AtomicU64,
}

impl Jobs {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another job may be added.
    pub fn has_room(&self) -> bool {
        let state = self.state();
        state.queue.len() < WAITING_MAX && state.compared.len() < COMPARED_MAX
    }

    /// Whether every stream that waits for work would go on waiting.
    pub fn is_idle(&self) -> bool {
        self.state().queue.is_empty()
    }

    /// Adds small files.
    pub fn add_small(&self, files: Vec<FoundFile>) {
        self.add(Job::Small(files));
    }

    /// Adds a large file.
    pub fn add_large(&self, file: LargeFile) {
        let file = Arc::new(file);
        if file.delta != Delta::No {
            self.state().compared.insert(file.id, Arc::clone(&file));
        }
        self.add(Job::Large(file));
    }

    fn add(&self, job: Job) {
        let mut state = self.state();
        state.incomplete += 1;
        state.queue.push_back(job);
        // Some streams may not work now, so one stream would not be enough to wake.
        self.work.notify_all();
    }

    /// Sends all ranges of a large file once more.
    pub fn repeat(&self, file: Arc<LargeFile>) {
        self.state().queue.push_front(Job::Large(file));
        self.work.notify_all();
    }

    /// The end of these blocks, if the destination compares them now.
    pub fn comparison_end(&self, place: BlocksPlace) -> Option<u64> {
        self.state().compared.get(&place.id)?.comparison_end(place)
    }

    /// Takes which blocks of a large file differ at the destination. Returns the bytes of the
    /// others.
    pub fn end_comparison(
        &self,
        place: BlocksPlace,
        ranges: Vec<(u64, u64)>,
    ) -> Result<u64, Error> {
        let mut state = self.state();
        let file = state.compared.get(&place.id).ok_or(Error::Protocol("an answer to nothing"))?;
        let file = Arc::clone(file);
        let (equal_bytes, has_work) = file.end_comparison(place, ranges)?;
        if has_work {
            let is_queued = |job: &Job| matches!(job, Job::Large(other) if other.id == place.id);
            if !state.queue.iter().any(is_queued) {
                state.queue.push_front(Job::Large(file));
            }
            self.work.notify_all();
        }
        Ok(equal_bytes)
    }

    /// Records that a group of small files was sent.
    pub fn complete(&self) {
        self.state().incomplete -= 1;
        self.progress.notify_all();
    }

    /// Records that a large file was sent.
    pub fn complete_large(&self, id: u64) {
        self.state().compared.remove(&id);
        self.complete();
    }

    /// Whether every job is complete.
    pub fn is_complete(&self) -> bool {
        self.state().incomplete == 0
    }

    /// Waits for the next work of a stream; `None` when everything was sent, or after a failure.
    /// `clocks` gets the time in which no work was there.
    pub fn next(&self, kind: StreamKind, clocks: &Clocks) -> Option<Work> {
        let mut state = self.state();
        loop {
            if state.is_over || state.failure.is_some() {
                return None;
            }
            let waits = match kind {
                StreamKind::Ssh => state.direct_streams > 0,
                StreamKind::Direct => state.working >= state.working_max,
            };
            let before = state.queue.len();
            let work = if waits { None } else { take(&mut state.queue, kind) };
            if work.is_none() && state.queue.len() < before {
                // The session may wait for a shorter queue.
                self.progress.notify_all();
            }
            if let Some(work) = work {
                state.working += usize::from(kind == StreamKind::Direct);
                self.progress.notify_all();
                return Some(work);
            }
            let begun = Instant::now();
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            if !waits {
                clocks.add(Activity::Idle, begun.elapsed());
            }
        }
    }

    /// Records that a stream carried out its work. The stream asks for the next work, or ends.
    pub fn end_work(&self, kind: StreamKind) {
        if kind == StreamKind::Direct {
            self.state().working -= 1;
        }
    }

    /// The bytes of all blocks whose hashes were sent.
    pub fn compared_bytes(&self) -> &AtomicU64 {
        &self.compared_bytes
    }

    /// The most direct streams that carry out work at a time.
    pub fn working_max(&self) -> usize {
        self.state().working_max
    }

    /// Sets how many direct streams carry out work at a time.
    pub fn set_working_max(&self, count: usize) {
        self.state().working_max = count;
        self.work.notify_all();
    }

    /// Waits for a time. False at the end of the session.
    pub fn wait_for_end(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        let mut state = self.state();
        loop {
            let is_over = state.is_over || state.failure.is_some();
            let left = deadline.saturating_duration_since(Instant::now());
            if is_over || left == Duration::ZERO {
                return !is_over;
            }
            let waited = self.end.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Counts a direct stream.
    pub fn begin_direct(&self) {
        self.state().direct_streams += 1;
    }

    /// Counts a direct stream that ended. Without another, the stream of ssh goes on.
    pub fn end_direct(&self) {
        self.state().direct_streams -= 1;
        self.work.notify_all();
    }

    /// Ends all streams.
    pub fn end(&self) {
        self.state().is_over = true;
        self.work.notify_all();
        self.end.notify_all();
    }

    /// Ends all streams because of a failure, unless they end already.
    pub fn fail(&self, error: Error) {
        let mut state = self.state();
        if !state.is_over {
            state.failure.get_or_insert(error);
        }
        self.work.notify_all();
        self.end.notify_all();
        self.progress.notify_all();
    }

    /// Takes the failure of a stream.
    pub fn take_failure(&self) -> Option<Error> {
        self.state().failure.take()
    }

    /// Adds an answer of the destination.
    pub fn add_answer(&self, answer: ToSource) {
        self.state().answers.push_back(answer);
        self.progress.notify_all();
    }

    /// Ends the stream of answers.
    pub fn end_answers(&self, error: Error) {
        let mut state = self.state();
        (state.answers_end, state.has_answers_end) = (Some(error), true);
        drop(state);
        self.progress.notify_all();
    }

    /// Takes the next answer, if there is an answer. Fails at the end of the stream of answers.
    pub fn try_answer(&self) -> Result<Option<ToSource>, Error> {
        let mut state = self.state();
        match state.answers.pop_front() {
            Some(answer) => Ok(Some(answer)),
            None => state.answers_end.take().map_or(Ok(None), Err),
        }
    }

    /// Waits for an answer until a time, and ignores failures of streams.
    pub fn wait_for_answer(&self, deadline: Instant) -> Option<ToSource> {
        let mut state = self.state();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(answer) = state.answers.pop_front() {
                return Some(answer);
            }
            if state.has_answers_end || left == Duration::ZERO {
                return None;
            }
            let waited = self.progress.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the session can go on: for an answer, a failure, or what `is_reached` says of
    /// the jobs.
    pub fn wait(&self, is_reached: impl Fn(&JobCounts) -> bool) -> Result<(), Error> {
        let mut state = self.state();
        loop {
            if let Some(failure) = state.failure.take() {
                // The streams end by the failure.
                state.is_over = true;
                return Err(failure);
            }
            let has_answer = !state.answers.is_empty() || state.answers_end.is_some();
            let counts = JobCounts {
                waiting: state.queue.len(),
                compared: state.compared.len(),
                incomplete: state.incomplete,
            };
            if has_answer || is_reached(&counts) {
                return Ok(());
            }
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn take(queue: &mut VecDeque<Job>, kind: StreamKind) -> Option<Work> {
    let bytes_max = match kind {
        StreamKind::Ssh => SSH_RANGE_BYTES,
        StreamKind::Direct => DIRECT_RANGE_BYTES,
    };
    loop {
        match queue.pop_front()? {
            Job::Small(files) => return Some(Work::Small(files)),
            Job::Large(file) => match file.step(bytes_max) {
                Step::Nothing => {}
                Step::Complete => return Some(Work::Large(file, Step::Complete)),
                step @ Step::Send(_) => {
                    queue.push_front(Job::Large(Arc::clone(&file)));
                    return Some(Work::Large(file, step));
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::found::OpenFolder;

    const BYTES: u64 = 40 << 20;

    /// A file whose blocks the destination compares.
    fn compared_file(folder: &std::path::Path) -> LargeFile {
        let file = std::fs::File::create_new(folder.join("large")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7], BYTES - 1).unwrap();
        // Without a hole, as far as the file system knows.
        let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, BYTES);
        let open = std::fs::File::open(folder).unwrap().into();
        let found = FoundFile {
            id: 3,
            folder: Arc::new(OpenFolder::new(open, Vec::new(), Vec::new()).unwrap()),
            name: b"large".to_vec(),
            size: BYTES,
            is_small: false,
            version: 0,
            held: Vec::new(),
            is_comparable: true,
            is_behind_link: false,
        };
        let stat = rustix::fs::fstat(&file).unwrap();
        LargeFile::new(found, b"large".to_vec(), file, stat, Delta::Fixed)
    }

    /// The session may wait for a short queue, which a file must not fill.
    #[test]
    fn a_compared_file_is_in_the_queue_once() {
        let folder = tempfile::tempdir().unwrap();
        let (jobs, clocks) = (Jobs::default(), Clocks::default());
        jobs.begin_direct();
        jobs.set_working_max(1);
        jobs.add_large(compared_file(folder.path()));
        let mut bytes = 0;
        let session = || jobs.wait(|counts| counts.incomplete == 0 && counts.waiting == 0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(session);
            loop {
                let work = jobs.next(StreamKind::Direct, &clocks).unwrap();
                let Work::Large(file, step) = work else { panic!("{work:?}") };
                let Step::Send(extent) = step else {
                    jobs.complete_large(3);
                    jobs.end_work(StreamKind::Direct);
                    break;
                };
                let (start, end) = (extent.range.start, extent.range.end);
                if extent.sends_hashes {
                    file.begin_comparison(start..end);
                    let place = BlocksPlace { id: 3, attempt: extent.attempt, offset: start };
                    jobs.end_comparison(place, vec![(start, start + 1)]).unwrap();
                    assert!(jobs.state().queue.len() <= 1);
                } else {
                    bytes += end - start;
                }
                file.record(&extent, end - start, None);
                jobs.end_work(StreamKind::Direct);
            }
            // A stream that finds nothing wakes the session.
            let stream = scope.spawn(|| jobs.next(StreamKind::Direct, &clocks).is_none());
            waiting.join().unwrap().unwrap();
            jobs.end();
            assert!(stream.join().unwrap());
        });
        assert!(bytes > 0);
    }
}
