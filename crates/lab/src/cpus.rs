//! Selects and assigns the CPUs of the lab's hosts.

use crate::error::LabError;
use rustix::thread::CpuSet;
use std::fs;
use std::io;

/// The CPUs of the two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuPair {
    /// CPU of the sending host.
    pub sender: usize,
    /// CPU of the receiving host.
    pub receiver: usize,
}

/// Lists the CPUs that the calling thread may run on, in ascending order.
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
    /// Chooses the first two allowed CPUs that do not share a core.
    ///
    /// Two hardware threads of one core slow each other down, and that would be measured as load.
    pub fn choose() -> Result<Self, LabError> {
        let allowed = allowed_cpus().map_err(LabError::step("reading the allowed CPUs"))?;
        let (&sender, others) = allowed.split_first().ok_or(LabError::OneCpu { cpu: 0 })?;
        let sender_siblings = siblings(sender);
        let receiver = others
            .iter()
            .find(|&&cpu| sender_siblings.is_none() || siblings(cpu) != sender_siblings)
            .or(others.first())
            .ok_or(LabError::OneCpu { cpu: sender })?;
        Ok(Self { sender, receiver: *receiver })
    }

    /// Whether the two CPUs are hardware threads of one core, which slow each other down.
    pub fn share_a_core(&self) -> bool {
        let sender_siblings = siblings(self.sender);
        sender_siblings.is_some() && sender_siblings == siblings(self.receiver)
    }
}

/// Reads the CPUs that share a core with `cpu`, in the kernel's list format; `None` if unavailable.
fn siblings(cpu: usize) -> Option<String> {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        .ok()
}
