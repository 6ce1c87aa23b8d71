//! Which CPU is which host.

use crate::LabError;
use rustix::thread::CpuSet;
use std::fs;
use std::io;

/// One CPU for each host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuPair {
    /// The sending host's.
    pub sender: usize,
    /// The receiving host's.
    pub receiver: usize,
}

/// The CPUs that the calling thread may run on, ascending.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Pins the calling thread to one CPU.
pub(crate) fn pin_to(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

impl CpuPair {
    /// The first two allowed CPUs that do not share a core: two threads of one core would slow each other
    /// down and be read as load.
    pub fn choose() -> Result<Self, LabError> {
        let allowed = allowed_cpus().map_err(LabError::step("asking for the allowed CPUs"))?;
        let (&sender, others) = allowed.split_first().ok_or(LabError::OneCpu { cpu: 0 })?;
        let of_sender = siblings(sender);
        let receiver = others
            .iter()
            .find(|&&cpu| of_sender.is_none() || siblings(cpu) != of_sender)
            .or(others.first())
            .ok_or(LabError::OneCpu { cpu: sender })?;
        Ok(Self { sender, receiver: *receiver })
    }

    /// Whether the two are threads of one core, which slow each other down.
    pub fn share_a_core(&self) -> bool {
        let of_sender = siblings(self.sender);
        of_sender.is_some() && of_sender == siblings(self.receiver)
    }
}

/// The CPUs that share a core with `cpu`, as the kernel lists them; `None` where it does not say.
fn siblings(cpu: usize) -> Option<String> {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        .ok()
}
