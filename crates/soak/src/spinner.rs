//! The thread that runs when nothing else does.

use crate::SoakError;
use haul_sys::clock::ThreadClock;
use rustix::thread::CpuSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A pause in the loop beyond this is somebody else's doing. One turn takes about 30 ns; the shortest
/// interrupt takes over 1000 (the entry, the handler and, in a guest, the exit to the hypervisor).
const PAUSE_MIN: Duration = Duration::from_nanos(500);
/// The memory that the loop dirties: more than a first-level cache, so that others' use of the caches shows,
/// and a small part of a second-level one, so that the loop does not evict what the measured work keeps
/// there.
const MEMORY_BYTES: usize = 64 * 1024;
/// Cache lines are 64 bytes on every CPU haul runs on.
const LINE_BYTES: usize = 64;
/// Lines dirtied between two looks at the clock, so that the clock is not all that the loop does.
const LINES_PER_TURN: usize = 8;

/// A spinner's counts so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// CPU time that the scheduler gave to the spinner.
    pub own: Duration,
    /// How much of it went to interrupts.
    pub interrupted: Duration,
    /// Cache lines dirtied.
    pub work: u64,
}

/// Where the loop publishes its counts, and reads what it is to do.
pub(crate) trait Publish {
    /// Time that went to interrupts so far.
    fn interrupted(&self, ns: u64);
    /// Cache lines dirtied so far.
    fn work(&self, lines: u64);
    /// Whether the loop is to end.
    fn is_stopped(&self) -> bool;
    /// Whether the thread is to sleep.
    fn is_paused(&self) -> bool;
}

/// What the thread publishes to its own process, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Published {
    interrupted_ns: AtomicU64,
    work: AtomicU64,
    pause: AtomicBool,
    stop: AtomicBool,
}

impl Publish for Published {
    fn interrupted(&self, ns: u64) {
        self.interrupted_ns.store(ns, Relaxed);
    }

    fn work(&self, lines: u64) {
        self.work.store(lines, Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    fn is_paused(&self) -> bool {
        self.pause.load(Relaxed)
    }
}

/// An idle-priority thread on one CPU. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Spinner {
    cpu: usize,
    clock: ThreadClock,
    id: u32,
    published: Arc<Published>,
    thread: Option<JoinHandle<()>>,
}

impl Spinner {
    pub fn start(cpu: usize) -> Result<Self, SoakError> {
        let failed = |source| SoakError::Spinner { cpu, source };
        let published = Arc::new(Published::default());
        let (ready, is_ready) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(format!("haul-soak-{cpu}"))
            .spawn({
                let published = Arc::clone(&published);
                move || {
                    let set_up = set_up(cpu);
                    let is_set_up = set_up.is_ok();
                    let clock = set_up.as_ref().ok().map(|(clock, _)| *clock);
                    // The receiver is gone only if the meter is, and then there is nothing to do.
                    if ready.send(set_up).is_ok()
                        && is_set_up
                        && let Some(clock) = clock
                    {
                        spin(clock, &*published);
                    }
                }
            })
            .map_err(failed)?;
        let (clock, id) = is_ready.recv().map_err(io::Error::other).flatten().map_err(failed)?;
        Ok(Self { cpu, clock, id, published, thread: Some(thread) })
    }

    pub fn cpu(&self) -> usize {
        self.cpu
    }

    /// The kernel's number of the thread.
    pub fn thread(&self) -> u32 {
        self.id
    }

    /// Has the thread sleep, or spin again.
    pub fn set_paused(&self, is_paused: bool) {
        self.published.pause.store(is_paused, Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    pub fn counts(&self) -> Counts {
        Counts {
            // The thread lives as long as this value, so its clock can be read.
            own: self.clock.read().unwrap_or_default(),
            interrupted: Duration::from_nanos(self.published.interrupted_ns.load(Relaxed)),
            work: self.published.work.load(Relaxed),
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.published.stop.store(true, Relaxed);
        self.set_paused(false);
        if let Some(thread) = self.thread.take() {
            // A panic in the loop has been printed; there is nothing to add while dropping.
            let _ = thread.join();
        }
    }
}

/// Pins the calling thread to a CPU and gives it idle priority; returns its clock and its number.
pub(crate) fn set_up(cpu: usize) -> io::Result<(ThreadClock, u32)> {
    let mut set = CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    haul_sys::sched::run_at_idle_priority()?;
    Ok((
        ThreadClock::of_this_thread()?,
        rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs(),
    ))
}

/// Spins until it is stopped.
pub(crate) fn spin(clock: ThreadClock, published: &impl Publish) {
    let own = || clock.read().unwrap_or_default();
    let mut memory = vec![0u8; MEMORY_BYTES];
    let mut line = 0;
    let mut work = 0;
    let mut interrupted_ns = 0;
    // The last moment at which wall clock and CPU clock were read together.
    let mut mark = (Instant::now(), own());
    let mut last = mark.0;
    while !published.is_stopped() {
        if published.is_paused() {
            thread::park();
            mark = (Instant::now(), own());
            last = mark.0;
            continue;
        }
        for _ in 0..LINES_PER_TURN {
            memory[line] = memory[line].wrapping_add(1);
            line = (line + LINE_BYTES) % MEMORY_BYTES;
        }
        std::hint::black_box(&mut memory);
        work += LINES_PER_TURN as u64;
        published.work(work);
        let now = Instant::now();
        let pause = now - last;
        last = now;
        if pause > PAUSE_MIN {
            let own = own();
            let off_cpu = (now - mark.0).saturating_sub(own.saturating_sub(mark.1));
            interrupted_ns += pause.saturating_sub(off_cpu).as_nanos() as u64;
            published.interrupted(interrupted_ns);
            // Reading the CPU clock is the meter's own doing and must not look like a pause.
            last = Instant::now();
            mark = (last, own);
        }
    }
}
