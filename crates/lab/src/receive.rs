//! How a host's device receives: when it is polled, by whom, and what is put together before the stack sees it.

use crate::steer;
use crate::{Host, LabError};
use haul_sys::ethtool::{self, Offload};
use rustix::process::Pid;
use rustix::thread::CpuSet;
use std::fs;
use std::io;

/// How a device receives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Reception {
    /// Packets are put together into larger ones (GRO); on a veth this also makes the receiving side poll (NAPI).
    pub gro: bool,
    /// Empty polls before interrupts are switched on again (`napi_defer_hard_irqs`, Linux 5.8).
    pub defer_hard_irqs: u32,
    /// How long packets may wait for more to be put together with, and between deferred polls (`gro_flush_timeout`).
    pub flush_timeout_ns: u64,
    /// A thread polls instead of a softirq (`threaded`, Linux 5.12); it is given the host's CPU.
    pub threaded: bool,
}

impl Host {
    /// Has the host's device receive so. What is left at its default needs no right; the rest needs root.
    pub fn set_reception(&self, wanted: Reception) -> Result<(), LabError> {
        let at = |what: &str| LabError::step(format!("setting {what} of {}", self.device()));
        self.run(|| {
            ethtool::set_offload(self.device(), Offload::GenericReceive, wanted.gro)
                .map_err(at("GRO"))?;
            let attributes = [
                ("napi_defer_hard_irqs", wanted.defer_hard_irqs.to_string()),
                ("gro_flush_timeout", wanted.flush_timeout_ns.to_string()),
                ("threaded", u8::from(wanted.threaded).to_string()),
            ];
            let before = pollers(self.device());
            let written = write_attributes(self.device(), &attributes);
            // An ordinary user sees no writable sysfs; a device that is as it was made needs none.
            let needs_nothing = wanted == Reception { gro: wanted.gro, ..Reception::default() };
            match written {
                Err(error) if !needs_nothing => Err(at("NAPI (it needs root)")(error)),
                _ if wanted.threaded => pin_pollers(self.device(), &before, self.cpu())
                    .map_err(at("the polling thread's CPU")),
                _ => Ok(()),
            }
        })?
    }
}

fn write_attributes(device: &str, attributes: &[(&str, String)]) -> io::Result<()> {
    steer::mount_own_sysfs()?;
    for (name, value) in attributes {
        let path = format!("/sys/class/net/{device}/{name}");
        fs::write(&path, value)?;
        if fs::read_to_string(&path)?.trim() != value {
            return Err(io::Error::other(format!("{path} did not keep {value}")));
        }
    }
    Ok(())
}

/// The kernel's polling threads for a device of this name. Their names do not tell network namespaces apart.
fn pollers(device: &str) -> Vec<i32> {
    let prefix = format!("napi/{device}-");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|process| {
            fs::read_to_string(format!("/proc/{process}/comm"))
                .is_ok_and(|name| name.starts_with(&prefix))
        })
        .collect()
}

/// Gives the threads that were not there `before` a CPU. A device whose threads were made earlier has them pinned.
fn pin_pollers(device: &str, before: &[i32], cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    for thread in pollers(device).into_iter().filter(|thread| !before.contains(thread)) {
        rustix::thread::sched_setaffinity(Pid::from_raw(thread), &set)?;
    }
    Ok(())
}
