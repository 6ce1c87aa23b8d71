//! Which machine the figures are from.

use serde::{Deserialize, Serialize};
use std::fs;

/// The machine, as far as it decides what network work costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The kernel's release.
    pub kernel: String,
    /// The CPU's model name.
    pub cpu: String,
    /// CPUs that the program may run on.
    pub cpus: usize,
    /// What the hypervisor took in the run, the worst window's CPU.
    pub steal_percent: f64,
}

impl HostFacts {
    /// Asks the kernel. Steal is not known before a run.
    pub fn here() -> Self {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpus = haul_lab::allowed_cpus().map_or(0, |cpus| cpus.len());
        Self { kernel, cpu: cpu_model(&cpu_info).into(), cpus, steal_percent: 0.0 }
    }
}

/// The network cards, each with its driver: devices that have one. Those of the namespace that sysfs was mounted in.
pub(crate) fn devices() -> Vec<String> {
    let mut devices: Vec<String> = fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let driver = fs::read_link(entry.path().join("device/driver")).ok()?;
            Some(format!(
                "{} {}",
                entry.file_name().to_string_lossy(),
                driver.file_name()?.to_string_lossy()
            ))
        })
        .collect();
    devices.sort();
    devices
}

/// The model in a `/proc/cpuinfo`: x86 names it `model name`, other architectures differ or say nothing.
fn cpu_model(cpu_info: &str) -> &str {
    ["model name", "Model", "Processor", "cpu model"]
        .into_iter()
        .find_map(|key| {
            cpu_info.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == key).then(|| value.trim())
            })
        })
        .unwrap_or(std::env::consts::ARCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_or_the_architecture_stands_in() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: A CPU: fast\n"), "A CPU: fast");
        assert_eq!(cpu_model("nothing"), std::env::consts::ARCH);
    }
}
