//! Ticks counted while something runs.

use super::owner::Owners;
use haul_sys::perf::{Sampler, Tick};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Looks a second: prime, so that they fall out of step with the kernel's own timers. A look takes some
/// microseconds.
pub(super) const HERTZ: u64 = 1999;
/// Half of what an ordinary user may have locked for each CPU (`kernel.perf_event_mlock_kb`).
const RING_BYTES: usize = 256 << 10;
/// How often the rings are emptied: at 1999 looks of some 300 bytes they fill in half a second.
const TAKE_INTERVAL: Duration = Duration::from_millis(50);

/// What was seen on one CPU: how often it was there.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub ticks: HashMap<Tick, u64>,
    pub lost: u64,
}

/// The rings, what was read from them, and whose the processes are that were seen.
struct Rings {
    rings: Vec<(Sampler, Seen)>,
    owners: Owners,
}

/// Watches CPUs until it is dropped.
pub(super) struct Recorder {
    rings: Arc<Mutex<Rings>>,
    is_over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Recorder {
    /// Starts watching; the error is why that is not allowed.
    pub(super) fn start(cpus: &[usize]) -> io::Result<Self> {
        let samplers: Vec<Sampler> = cpus
            .iter()
            .map(|&cpu| Sampler::start(cpu, HERTZ, RING_BYTES))
            .collect::<io::Result<_>>()?;
        let rings = samplers.into_iter().map(|sampler| (sampler, Seen::default())).collect();
        let rings = Rings { rings, owners: Owners::default() };
        let (rings, is_over) = (Arc::new(Mutex::new(rings)), Arc::new(AtomicBool::new(false)));
        let thread = thread::Builder::new().name("haul-profile".into()).spawn({
            let (rings, is_over) = (Arc::clone(&rings), Arc::clone(&is_over));
            move || {
                while !is_over.load(Relaxed) {
                    take(&rings);
                    thread::sleep(TAKE_INTERVAL);
                }
            }
        })?;
        Ok(Self { rings, is_over, thread: Some(thread) })
    }

    /// What was seen on each CPU since the last call, in their order.
    pub(super) fn take(&self) -> Vec<Seen> {
        take(&self.rings);
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings.rings.iter_mut().map(|(_, seen)| std::mem::take(seen)).collect()
    }

    /// Whose the processes are that were seen so far.
    pub(super) fn take_owners(&self) -> Owners {
        std::mem::take(&mut self.rings.lock().unwrap_or_else(PoisonError::into_inner).owners)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic in the loop has been printed; there is nothing to add while dropping.
            let _ = thread.join();
        }
    }
}

/// Empties the rings into what was seen.
fn take(rings: &Mutex<Rings>) {
    let mut locked = rings.lock().unwrap_or_else(PoisonError::into_inner);
    let Rings { rings, owners } = &mut *locked;
    for (sampler, seen) in rings {
        let lost_before = sampler.lost();
        for tick in sampler.take() {
            owners.learn(tick.process);
            *seen.ticks.entry(tick).or_default() += 1;
        }
        seen.lost += sampler.lost() - lost_before;
    }
}
