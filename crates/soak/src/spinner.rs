//! The spinner: an idle-priority thread that measures the CPU time it gets.

use crate::error::SoakError;
use haul_lab_sys::clock::ThreadClock;
use rustix::thread::CpuSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Shortest gap in the loop that counts as an interruption. One turn takes about 30 ns. The
/// shortest interrupt takes over 1000 ns (the entry, the handler and, in a guest, the exit to the
/// hypervisor).
const GAP_MIN: Duration = Duration::from_nanos(500);
/// Memory that the loop dirties. It exceeds a first-level cache, so that cache use of other tasks
/// shows. It is a small part of a second-level one, so that the loop does not evict the measured
/// work's data there.
const MEMORY_BYTES: usize = 64 * 1024;
/// Cache lines are 64 bytes on every CPU haul runs on.
const LINE_BYTES: usize = 64;
/// Lines dirtied between two clock reads, so that reading the clock is not the loop's only work.
const LINES_PER_TURN: usize = 8;

/// Counters of a spinner so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// CPU time that the scheduler gave to the spinner.
    pub own: Duration,
    /// The part of that time that interrupts took.
    pub interrupted: Duration,
    /// Cache lines dirtied.
    pub work: u64,
}

/// Receives the spin loop's counters, and holds its control flags.
pub(crate) trait ProgressSink {
    /// Publishes the time that interrupts took so far.
    fn publish_interrupt_time(&self, ns: u64);
    /// Publishes the number of cache lines dirtied so far.
    fn publish_work(&self, lines: u64);
    /// Whether the loop must end.
    fn is_stopped(&self) -> bool;
    /// Whether the thread must sleep.
    fn is_paused(&self) -> bool;
}

/// Counters and control flags of a spinner in the same process, on a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LocalState {
    interrupted_ns: AtomicU64,
    work: AtomicU64,
    is_paused: AtomicBool,
    is_stopped: AtomicBool,
}

impl ProgressSink for LocalState {
    fn publish_interrupt_time(&self, ns: u64) {
        self.interrupted_ns.store(ns, Relaxed);
    }

    fn publish_work(&self, lines: u64) {
        self.work.store(lines, Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Relaxed)
    }

    fn is_paused(&self) -> bool {
        self.is_paused.load(Relaxed)
    }
}

/// An idle-priority thread on one CPU. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Spinner {
    cpu: usize,
    clock: ThreadClock,
    id: u32,
    state: Arc<LocalState>,
    thread: Option<JoinHandle<()>>,
}

impl Spinner {
    pub fn start(cpu: usize) -> Result<Self, SoakError> {
        let failed = |error| SoakError::Spinner { cpu, error };
        let state = Arc::new(LocalState::default());
        let (ready_tx, ready_rx) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(format!("haul-soak-{cpu}"))
            .spawn({
                let state = Arc::clone(&state);
                move || {
                    let set_up = set_up(cpu);
                    let is_set_up = set_up.is_ok();
                    let clock = set_up.as_ref().ok().map(|(clock, _)| *clock);
                    // The receiver is dropped only with the meter, and then there is nothing to do.
                    if ready_tx.send(set_up).is_ok()
                        && is_set_up
                        && let Some(clock) = clock
                    {
                        spin(clock, &*state);
                    }
                }
            })
            .map_err(failed)?;
        let (clock, id) = ready_rx.recv().map_err(io::Error::other).flatten().map_err(failed)?;
        Ok(Self { cpu, clock, id, state, thread: Some(thread) })
    }

    pub fn cpu(&self) -> usize {
        self.cpu
    }

    /// Returns the kernel's ID of the thread.
    pub fn thread_id(&self) -> u32 {
        self.id
    }

    /// Pauses the thread, or lets it spin again.
    pub fn set_paused(&self, is_paused: bool) {
        self.state.is_paused.store(is_paused, Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    pub fn counts(&self) -> Counts {
        Counts {
            // The thread lives as long as this value, so its clock can be read.
            own: self.clock.read().unwrap_or_default(),
            interrupted: Duration::from_nanos(self.state.interrupted_ns.load(Relaxed)),
            work: self.state.work.load(Relaxed),
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.state.is_stopped.store(true, Relaxed);
        self.set_paused(false);
        if let Some(thread) = self.thread.take() {
            // A panic in the loop has already been printed.
            let _ = thread.join();
        }
    }
}

/// Pins the calling thread to a CPU and gives it idle priority; returns its clock and its thread
/// ID.
pub(crate) fn set_up(cpu: usize) -> io::Result<(ThreadClock, u32)> {
    let mut set = CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    haul_lab_sys::sched::run_at_idle_priority()?;
    Ok((
        ThreadClock::for_current_thread()?,
        rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs(),
    ))
}

/// Spins until `is_stopped`, counting cache lines and interruptions.
pub(crate) fn spin(clock: ThreadClock, state: &impl ProgressSink) {
    let own = || clock.read().unwrap_or_default();
    let mut memory = vec![0u8; MEMORY_BYTES];
    let mut line = 0;
    let mut work = 0;
    let mut interrupted_ns = 0;
    // The last time at which the wall clock and the CPU clock were read together.
    let mut last_sync = (Instant::now(), own());
    let mut last = last_sync.0;
    while !state.is_stopped() {
        if state.is_paused() {
            thread::park();
            last_sync = (Instant::now(), own());
            last = last_sync.0;
            continue;
        }
        for _ in 0..LINES_PER_TURN {
            memory[line] = memory[line].wrapping_add(1);
            line = (line + LINE_BYTES) % MEMORY_BYTES;
        }
        std::hint::black_box(&mut memory);
        work += LINES_PER_TURN as u64;
        state.publish_work(work);
        let now = Instant::now();
        let gap = now - last;
        last = now;
        if gap > GAP_MIN {
            let own = own();
            let off_cpu = (now - last_sync.0).saturating_sub(own.saturating_sub(last_sync.1));
            interrupted_ns += gap.saturating_sub(off_cpu).as_nanos() as u64;
            state.publish_interrupt_time(interrupted_ns);
            // Reading the CPU clock takes time too, which must not look like an interruption.
            last = Instant::now();
            last_sync = (last, own);
        }
    }
}
