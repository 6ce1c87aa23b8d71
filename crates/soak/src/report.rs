//! What `haul soak` reports, and what a reader of it should know.

use crate::{CpuLoad, Load};
use serde::{Deserialize, Serialize};
use std::fs;

/// The contract's name and version. A field that is added keeps the version; one that changes or goes does
/// not.
pub const SCHEMA: &str = "haul.soak/1";

/// Steal beyond this is worth a word.
const STEAL_PERCENT: f64 = 1.0;
/// `/proc/stat` may differ by this many points before it is worth a word.
const DISAGREEMENT_POINTS: f64 = 3.0;
/// `getrusage` may miss this share of the load before it is worth a word.
const UNCHARGED: f64 = 0.10;

/// The result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SoakReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Wall time.
    pub seconds: f64,
    /// The mean load of the measured CPUs.
    pub total_load_percent: f64,
    /// The CPU time that the load came to.
    pub cpu_seconds: f64,
    /// Each CPU's readings.
    pub cpus: Vec<CpuLoad>,
    /// By how many points readings differ in the quietest quarter of the time: what less than that differs by was not
    /// measured. `null` for less than a second.
    #[serde(default)]
    pub resolution_percent: Option<f64>,
    /// What `getrusage` charged the program and its descendants; `null` without one.
    pub rusage_cpu_seconds: Option<f64>,
    /// What to know about the figures.
    pub warnings: Vec<Warning>,
}

/// What a reader of the figures should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// `interrupted`, `late`, `steal`, `accounts-disagree`, `uncharged`, `control-group`, `starved-control-group`.
    pub kind: String,
    /// In words.
    pub detail: String,
}

impl SoakReport {
    pub(crate) fn new(load: &Load) -> Self {
        Self {
            schema: SCHEMA.into(),
            seconds: load.seconds,
            total_load_percent: load.total_percent(),
            cpu_seconds: load.cpu_seconds(),
            cpus: load.cpus.clone(),
            resolution_percent: None,
            rusage_cpu_seconds: None,
            warnings: Vec::new(),
        }
    }

    pub(crate) fn with_warnings(mut self) -> Self {
        let mut warn =
            |kind: &str, detail| self.warnings.push(Warning { kind: kind.into(), detail });
        for &CpuLoad {
            cpu,
            load_percent,
            taken_percent,
            interrupted_percent,
            proc_stat_percent,
            steal_percent,
            ..
        } in &self.cpus
        {
            if steal_percent > STEAL_PERCENT {
                warn(
                    "steal",
                    format!(
                        "the hypervisor took {steal_percent:.1} % of CPU {cpu}; it is counted as load"
                    ),
                );
            }
            if (load_percent - proc_stat_percent).abs() > DISAGREEMENT_POINTS {
                let why = if interrupted_percent > taken_percent {
                    "most of it is interrupt work, which the kernel samples at its tick"
                } else {
                    "the kernel samples at its tick what runs at that moment"
                };
                warn(
                    "accounts-disagree",
                    format!(
                        "CPU {cpu}: the meter reads {load_percent:.1} %, /proc/stat {proc_stat_percent:.1} %: {why}"
                    ),
                );
            }
        }
        if let Some(charged) = self.rusage_cpu_seconds
            && charged < (1.0 - UNCHARGED) * self.cpu_seconds
        {
            let (seconds, uncharged) = (self.cpu_seconds, 1.0 - charged / self.cpu_seconds);
            warn(
                "uncharged",
                format!(
                    "the machine used {seconds:.3} CPU-seconds meanwhile, of which {:.0} % were charged to no process of the \
                     program: interrupts, kernel threads, other programs",
                    100.0 * uncharged
                ),
            );
        }
        if let Some(group) = weighted_control_group() {
            warn(
                "control-group",
                format!(
                    "the meter runs in control group {group}, which has a CPU weight of its own: programs of other \
                     groups that fill a CPU share it with the meter and read low (run it in the root group)"
                ),
            );
        }
        self
    }
}

/// The control group of this process, if it competes with others by a weight of its own: in version 2 (Linux 4.15) one that
/// has a weight, in version 1 any but the first.
fn weighted_control_group() -> Option<String> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let of_version_1 = groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        (controllers.split(',').any(|name| name == "cpu") && group != "/").then(|| group.to_owned())
    });
    let of_version_2 = || {
        let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        fs::exists(format!("/sys/fs/cgroup{group}/cpu.weight")).ok()?.then_some(group)
    };
    of_version_1.or_else(of_version_2)
}
