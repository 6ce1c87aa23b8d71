//! Threads for calls that may block (disk, password hashes, name resolution), so that no event loop
//! blocks.
//!
//! An event loop pushes a [`Job`]; the reply arrives in the loop's [`Inbox`] and wakes it. Jobs run
//! in pools: a slow kind of job in one pool does not delay the jobs of another. The locks here are
//! taken for offloaded jobs only.

use crate::join::join_with_timeout;
use crate::waker::Waker;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A call that may block.
pub trait Job: Debug + Send + Sized + 'static {
    /// The result of the call.
    type Reply: Debug + Send + 'static;

    /// The index of the pool that runs it.
    fn pool_index(&self) -> usize {
        0
    }

    /// Makes the call.
    fn run(self) -> Self::Reply;

    /// Whether the queue of the job's pool holds enough similar jobs (of one client, say) already.
    fn exceeds_share(&self, queued: &VecDeque<Queued<Self>>) -> bool {
        let _ = queued;
        false
    }

    /// The reply to a job that is refused, because its queue is full or its share is used up.
    fn refused() -> Self::Reply;

    /// The reply to a job that panicked.
    fn failed() -> Self::Reply;
}

/// A job in a queue.
#[derive(Debug)]
pub struct Queued<J: Job> {
    /// The job.
    pub job: J,
    token: u64,
    inbox: Arc<Inbox<J::Reply>>,
}

/// The replies for one event loop.
#[derive(Debug)]
pub struct Inbox<R> {
    replies: Mutex<Vec<(u64, R)>>,
    waker: Arc<Waker>,
}

/// The job of a service that offloads nothing: there is none.
#[derive(Debug)]
pub enum NoJob {}

impl Job for NoJob {
    type Reply = ();

    fn run(self) {
        match self {}
    }

    fn refused() {}

    fn failed() {}
}

/// A pool of threads.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PoolSettings {
    /// The threads' name, at most 15 bytes.
    pub name: &'static str,
    /// The number of threads.
    pub threads: usize,
    /// The number of jobs that may wait.
    pub jobs_max: usize,
}

impl PoolSettings {
    /// A pool of so many threads and waiting jobs.
    pub fn new(name: &'static str, threads: usize, jobs_max: usize) -> Self {
        Self { name, threads, jobs_max }
    }
}

/// The pools of threads. Dropping it discards waiting jobs and waits up to two seconds for running
/// ones.
#[derive(Debug)]
pub struct Offload<J: Job> {
    pools: Arc<[Pool<J>]>,
    threads: Vec<JoinHandle<()>>,
}

/// One event loop's access to the pools.
#[derive(Debug)]
pub struct OffloadQueue<J: Job> {
    pools: Arc<[Pool<J>]>,
    inbox: Arc<Inbox<J::Reply>>,
}

#[derive(Debug)]
struct Pool<J: Job> {
    state: Mutex<PoolState<J>>,
    jobs_max: usize,
    is_filled: Condvar,
}

#[derive(Debug)]
struct PoolState<J: Job> {
    jobs: VecDeque<Queued<J>>,
    is_closed: bool,
}

impl<R> Inbox<R> {
    /// An inbox that wakes the event loop of `waker`.
    pub fn new(waker: Arc<Waker>) -> Arc<Self> {
        Arc::new(Self { replies: Mutex::default(), waker })
    }

    /// Takes the replies, each with the token of its job.
    pub fn take(&self) -> Vec<(u64, R)> {
        std::mem::take(&mut *lock(&self.replies))
    }

    fn put(&self, token: u64, reply: R) {
        lock(&self.replies).push((token, reply));
        self.waker.wake();
    }
}

impl<J: Job> Offload<J> {
    /// Starts the threads. [`Job::pool_index`] is an index into `settings`.
    pub fn start(settings: &[PoolSettings]) -> io::Result<Self> {
        let pool = |settings: &PoolSettings| Pool {
            state: Mutex::new(PoolState { jobs: VecDeque::new(), is_closed: false }),
            jobs_max: settings.jobs_max,
            is_filled: Condvar::new(),
        };
        let pools: Arc<[Pool<J>]> = settings.iter().map(pool).collect();
        let mut offload = Self { pools, threads: Vec::new() };
        for (index, PoolSettings { name, threads, .. }) in settings.iter().enumerate() {
            for _ in 0..*threads {
                let pools = Arc::clone(&offload.pools);
                let thread = std::thread::Builder::new().name((*name).into());
                offload.threads.push(thread.spawn(move || pools[index].work())?);
            }
        }
        Ok(offload)
    }

    /// The access of the event loop that owns `inbox`.
    pub fn queue(&self, inbox: &Arc<Inbox<J::Reply>>) -> OffloadQueue<J> {
        OffloadQueue { pools: Arc::clone(&self.pools), inbox: Arc::clone(inbox) }
    }
}

impl<J: Job> Drop for Offload<J> {
    fn drop(&mut self) {
        for pool in self.pools.iter() {
            let mut state = lock(&pool.state);
            state.is_closed = true;
            state.jobs.clear();
            drop(state);
            pool.is_filled.notify_all();
        }
        for thread in self.threads.drain(..) {
            join_with_timeout(thread);
        }
    }
}

impl<J: Job> OffloadQueue<J> {
    /// Queues a job; the reply carries the same token.
    pub fn push(&self, token: u64, job: J) {
        let pool = &self.pools[job.pool_index()];
        let mut state = lock(&pool.state);
        if state.jobs.len() >= pool.jobs_max || job.exceeds_share(&state.jobs) {
            drop(state);
            return self.inbox.put(token, J::refused());
        }
        state.jobs.push_back(Queued { job, token, inbox: Arc::clone(&self.inbox) });
        drop(state);
        pool.is_filled.notify_one();
    }

    /// Takes the replies, each with the token of its job.
    pub fn replies(&self) -> Vec<(u64, J::Reply)> {
        self.inbox.take()
    }
}

impl<J: Job> Pool<J> {
    fn work(&self) {
        while let Some(Queued { token, job, inbox }) = self.next() {
            // The event loop waits for a reply, so a panic is one.
            let reply = catch_unwind(AssertUnwindSafe(|| job.run()));
            inbox.put(token, reply.unwrap_or_else(|_| J::failed()));
        }
    }

    fn next(&self) -> Option<Queued<J>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(queued) = state.jobs.pop_front() {
                return Some(queued);
            }
            if state.is_closed {
                return None;
            }
            state = self.is_filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Locks a list. A panic of its holder leaves a list that is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::{Duration, Instant};

    /// A job of the client with this number. It waits for a message of its channel, or panics
    /// without one. At most two queued jobs of one client are accepted.
    #[derive(Debug)]
    struct Wait(u32, Option<Receiver<()>>);

    impl Job for Wait {
        type Reply = &'static str;

        fn run(self) -> &'static str {
            self.1.expect("a job without a receiver").recv().unwrap();
            "done"
        }

        fn exceeds_share(&self, queued: &VecDeque<Queued<Self>>) -> bool {
            queued.iter().filter(|queued| queued.job.0 == self.0).count() >= 2
        }

        fn refused() -> &'static str {
            "refused"
        }

        fn failed() -> &'static str {
            "failed"
        }
    }

    fn replies(queue: &OffloadQueue<Wait>, count: usize) -> Vec<(u64, &'static str)> {
        let mut replies = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        while replies.len() < count && Instant::now() < deadline {
            replies.extend(queue.replies());
            std::thread::sleep(Duration::from_millis(1));
        }
        replies.sort_unstable();
        replies
    }

    #[test]
    fn every_job_gets_its_reply_also_if_it_panics_or_is_refused() {
        let pool = PoolSettings { name: "test", threads: 1, jobs_max: 3 };
        let offload = Offload::start(&[pool]).unwrap();
        let waker = Arc::new(Waker::new().unwrap());
        let queue = offload.queue(&Inbox::new(waker));
        let (tx, rx): (Sender<()>, _) = channel();
        queue.push(0, Wait(0, Some(rx)));
        // Taken up by the thread, so that it no longer counts as waiting.
        while !lock(&offload.pools[0].state).jobs.is_empty() {
            std::thread::yield_now();
        }
        let ready = || {
            let (tx, rx) = channel();
            tx.send(()).unwrap();
            Some(rx)
        };
        queue.push(1, Wait(1, ready()));
        queue.push(2, Wait(1, None));
        queue.push(3, Wait(1, ready()));
        queue.push(4, Wait(2, ready()));
        queue.push(5, Wait(3, ready()));
        assert_eq!(replies(&queue, 2), [(3, "refused"), (5, "refused")]);
        tx.send(()).unwrap();
        assert_eq!(replies(&queue, 4), [(0, "done"), (1, "done"), (2, "failed"), (4, "done")]);
    }

    #[test]
    fn dropping_the_pools_leaves_a_stuck_thread_behind() {
        let pool = PoolSettings { name: "test", threads: 1, jobs_max: 3 };
        let offload = Offload::start(&[pool]).unwrap();
        let queue = offload.queue(&Inbox::new(Arc::new(Waker::new().unwrap())));
        let (_tx, rx) = channel();
        queue.push(0, Wait(0, Some(rx)));
        while !lock(&offload.pools[0].state).jobs.is_empty() {
            std::thread::yield_now();
        }
        drop(offload);
        assert!(queue.replies().is_empty());
    }
}
