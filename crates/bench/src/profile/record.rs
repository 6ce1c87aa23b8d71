//! Records samples in the background.

use super::owner::Owners;
use haul_lab_sys::perf::{CpuSample, Sampler};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Samples per second: prime, so that they do not stay in step with the kernel's own timers.
/// DatagramSinkTask one costs some microseconds.
pub(super) const HERTZ: u64 = 1999;
/// Size of a ring: half of the memory that an ordinary user may lock for each CPU
/// (`kernel.perf_event_mlock_kb`).
const RING_BYTES: usize = 256 << 10;
/// Interval at which the rings are drained. At 1999 samples per second of some 300 bytes they fill
/// in half a second.
const DRAIN_INTERVAL: Duration = Duration::from_millis(50);

/// Samples recorded on one CPU: each distinct sample and its count.
#[derive(Debug, Default)]
pub(super) struct CpuSamples {
    pub samples: HashMap<CpuSample, u64>,
    pub lost: u64,
}

/// The rings, the samples read from them, and the owners of the processes found in the samples.
struct Rings {
    rings: Vec<(Sampler, CpuSamples)>,
    owners: Owners,
}

/// Records the samples of CPUs until it is dropped.
pub(super) struct Recorder {
    rings: Arc<Mutex<Rings>>,
    is_over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Recorder {
    /// Whether the kernel allows this user to sample a CPU.
    pub(super) fn probe(cpu: usize) -> io::Result<()> {
        Sampler::start(cpu, HERTZ, RING_BYTES).map(drop)
    }

    /// Starts recording. The error is the reason why the kernel does not allow it.
    pub(super) fn start(cpus: &[usize]) -> io::Result<Self> {
        let samplers: Vec<Sampler> = cpus
            .iter()
            .map(|&cpu| Sampler::start(cpu, HERTZ, RING_BYTES))
            .collect::<io::Result<_>>()?;
        let rings = samplers.into_iter().map(|sampler| (sampler, CpuSamples::default())).collect();
        let rings = Rings { rings, owners: Owners::default() };
        let (rings, is_over) = (Arc::new(Mutex::new(rings)), Arc::new(AtomicBool::new(false)));
        let thread = thread::Builder::new().name("haul-profile".into()).spawn({
            let (rings, is_over) = (Arc::clone(&rings), Arc::clone(&is_over));
            move || {
                while !is_over.load(Relaxed) {
                    drain(&rings);
                    thread::sleep(DRAIN_INTERVAL);
                }
            }
        })?;
        Ok(Self { rings, is_over, thread: Some(thread) })
    }

    /// The samples of each CPU since the last call, in the order of the CPUs.
    pub(super) fn take(&self) -> Vec<CpuSamples> {
        drain(&self.rings);
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings.rings.iter_mut().map(|(_, recorded)| std::mem::take(recorded)).collect()
    }

    /// Takes the owners of the processes recorded so far.
    pub(super) fn take_owners(&self) -> Owners {
        std::mem::take(&mut self.rings.lock().unwrap_or_else(PoisonError::into_inner).owners)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic in the loop has already been printed.
            let _ = thread.join();
        }
    }
}

/// Moves the samples from perf's ring buffers to the recorded ones.
fn drain(rings: &Mutex<Rings>) {
    let mut locked = rings.lock().unwrap_or_else(PoisonError::into_inner);
    let Rings { rings, owners } = &mut *locked;
    for (sampler, recorded) in rings {
        let lost_before = sampler.lost();
        for sample in sampler.take() {
            owners.resolve(sample.process);
            *recorded.samples.entry(sample).or_default() += 1;
        }
        recorded.lost += sampler.lost() - lost_before;
    }
}
