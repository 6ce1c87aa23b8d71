//! Receive settings of a host's device: GRO, NAPI deferral and threaded polling.

use crate::error::LabError;
use crate::host::Host;
use crate::steer;
use haul_lab_sys::ethtool::{self, Offload};
use rustix::process::Pid;
use rustix::thread::CpuSet;
use std::fs;
use std::io;

/// How a host's network device handles received packets: GRO, deferral of NAPI interrupts, threaded
/// polling.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Reception {
    /// Generic receive offload: merges packets into larger ones; on a veth this also enables
    /// polling (NAPI).
    pub gro: bool,
    /// Empty polls before interrupts are enabled again (`napi_defer_hard_irqs`, Linux 5.8).
    pub defer_hard_irqs: u32,
    /// How long packets may wait to be merged with later ones, and the time between deferred polls
    /// (`gro_flush_timeout`).
    pub flush_timeout_ns: u64,
    /// A kernel thread polls instead of a softirq (`threaded`, Linux 5.12); it is pinned to the
    /// host's CPU.
    pub threaded: bool,
}

impl Host {
    /// Applies the receive settings to the host's device.
    ///
    /// Settings other than GRO need root unless they have their default values.
    pub fn set_reception(&self, wanted: Reception) -> Result<(), LabError> {
        let step_error =
            |setting: &str| LabError::step(format!("setting {setting} of {}", self.device()));
        self.run(|| {
            ethtool::set_offload(self.device(), Offload::GenericReceive, wanted.gro)
                .map_err(step_error("GRO"))?;
            let attributes = [
                ("napi_defer_hard_irqs", wanted.defer_hard_irqs.to_string()),
                ("gro_flush_timeout", wanted.flush_timeout_ns.to_string()),
                ("threaded", u8::from(wanted.threaded).to_string()),
            ];
            let threads_before = napi_threads(self.device());
            let written = write_attributes(self.device(), &attributes);
            // sysfs is not writable for an ordinary user; a device with its default settings needs
            // no write.
            let is_default = wanted == Reception { gro: wanted.gro, ..Reception::default() };
            match written {
                Err(error) if !is_default => Err(step_error("NAPI (it needs root)")(error)),
                _ if wanted.threaded => {
                    pin_napi_threads(self.device(), &threads_before, self.cpu())
                        .map_err(step_error("the polling thread's CPU"))
                }
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

/// Lists the kernel's polling threads for devices of this name, in any network namespace.
fn napi_threads(device: &str) -> Vec<i32> {
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

/// Pins the polling threads that are not in `threads_before` to `cpu`. Older threads were pinned
/// before.
fn pin_napi_threads(device: &str, threads_before: &[i32], cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    for thread in napi_threads(device).into_iter().filter(|thread| !threads_before.contains(thread))
    {
        rustix::thread::sched_setaffinity(Pid::from_raw(thread), &set)?;
    }
    Ok(())
}
