//! Facts about the machine on which a report was measured.

use crate::kernel_hardening;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;

/// Facts about a machine that affect the cost of network work.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct HostFacts {
    /// The host's name.
    #[serde(default)]
    pub name: String,
    /// The kernel's release.
    pub kernel: String,
    /// The CPU's model name; `unknown` if another program made the report without it.
    pub cpu: String,
    /// Number of CPUs on which the program may run; 0 if unknown.
    pub cpus: usize,
    /// Whether the kernel fills each new page with zeros (`init_on_alloc`), which a copy into new
    /// pages pays for; `null` if unknown.
    #[serde(default)]
    pub zeroes_new_pages: Option<bool>,
    /// The weaknesses of the CPU against which the kernel takes measures; `null` if unknown.
    #[serde(default)]
    pub mitigations: Option<Vec<String>>,
    /// Maximum steal of any CPU in any window of the run.
    pub steal_percent: f64,
}

impl HostFacts {
    /// A host of which another program reported the name and the kernel's release only.
    pub(crate) fn without_cpu(name: String, kernel: String) -> Self {
        Self {
            name,
            kernel,
            cpu: "unknown".into(),
            cpus: 0,
            zeroes_new_pages: None,
            mitigations: None,
            steal_percent: 0.0,
        }
    }

    /// Reads the facts of this machine. Steal is 0 until a run has measured it.
    pub fn here() -> Self {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpus = haul_lab::allowed_cpus().map_or(0, |cpus| cpus.len());
        let name = haul_version::host_name();
        Self {
            name,
            kernel,
            cpu: cpu_model(&cpu_info).into(),
            cpus,
            zeroes_new_pages: kernel_hardening::zeroes_new_pages(),
            mitigations: kernel_hardening::mitigations(),
            steal_percent: 0.0,
        }
    }
}

/// The network devices that have a driver, each with its name. Those of the network namespace in
/// which sysfs was mounted.
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

/// The CPU model in `/proc/cpuinfo`. x86 names the line `model name`; other architectures use other
/// names or have none.
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
    fn the_cpu_model_falls_back_to_the_architecture() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: A CPU: fast\n"), "A CPU: fast");
        assert_eq!(cpu_model("nothing"), std::env::consts::ARCH);
    }
}
