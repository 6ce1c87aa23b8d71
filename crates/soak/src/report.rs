//! The report of `haul soak` and its warnings.

use crate::reading::{CpuLoad, Load};
use crate::sources::{CpuSources, ThreadLoad};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;

/// Name and version of the report's schema.
///
/// Adding a field keeps the version; changing or removing a field increases it.
pub const SCHEMA: &str = "haul.soak/2";

/// The shortest measurement with usable readings, in seconds. `/proc/stat` counts in ticks of 1 to
/// 10 ms, and the spinners' readings differ by a percentage point from one tenth of a second to the
/// next.
const SECONDS_MIN: f64 = 0.5;
/// Steal above this share, in percent, causes a warning.
const STEAL_PERCENT_MIN: f64 = 1.0;
/// A difference from `/proc/stat` above this, in percentage points, causes a warning.
const DISAGREEMENT_POINTS_MIN: f64 = 3.0;
/// Load above this share that `getrusage` does not report causes a warning.
const UNCHARGED_SHARE_MIN: f64 = 0.10;

/// The result of a measurement.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SoakReport {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Version of haul.
    #[serde(default)]
    pub haul: String,
    /// The commit that haul was built from; empty if unknown.
    #[serde(default)]
    pub commit: String,
    /// The host's name.
    #[serde(default)]
    pub host: String,
    /// The kernel's release.
    #[serde(default)]
    pub kernel: String,
    /// Start time, RFC 3339; empty if the caller did not set it.
    #[serde(default)]
    pub started: String,
    /// The command that was measured; empty without one.
    #[serde(default)]
    pub command: Vec<String>,
    /// The exit code of the command, 128 plus the signal's number if a signal ended it; `null`
    /// without a command.
    #[serde(default)]
    pub exit_code: Option<u8>,
    /// Wall time of the measurement.
    pub seconds: f64,
    /// The load of all measured CPUs: their mean, in percent. `null` if the meter did not have a
    /// reading; a warning then states why.
    pub total_load_percent: Option<f64>,
    /// The CPU time of the whole load; `null` if the meter did not have a reading.
    pub cpu_seconds: Option<f64>,
    /// Readings of each CPU; empty if the meter had none.
    pub cpus: Vec<CpuLoad>,
    /// Resolution in percentage points: by how much readings differ in the quietest quarter of the
    /// time.
    ///
    /// Smaller differences were not measured. `null` for less than a second.
    #[serde(default)]
    pub resolution_percent: Option<f64>,
    /// CPU time that `getrusage` charged to the program and its descendants; `null` without a
    /// program.
    pub rusage_cpu_seconds: Option<f64>,
    /// The most frequent interrupts and softirqs of each CPU.
    #[serde(default)]
    pub sources: Vec<CpuSources>,
    /// The busiest kernel threads.
    #[serde(default)]
    pub kernel_threads: Vec<ThreadLoad>,
    /// Conditions that affect the figures.
    pub warnings: Vec<Warning>,
}

/// A condition that affects the figures.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[schemars(rename = "SoakWarning")]
pub struct Warning {
    /// `too-short`, `interrupted`, `late`, `steal`, `accounts-disagree`, `uncharged`,
    /// `control-group`, `starved-control-group`, `outlived`, `another-measurement`; `throttled` and
    /// `meter-stopped` if the load could not be read. A series also has `input`, `uneven` and
    /// `few-runs`.
    pub kind: String,
    /// Description for a reader.
    pub detail: String,
}

impl SoakReport {
    pub(crate) fn new(load: &Load) -> Self {
        Self {
            schema: SCHEMA.into(),
            haul: haul_version::VERSION.into(),
            commit: haul_version::COMMIT.into(),
            host: haul_version::host_name(),
            kernel: haul_version::kernel_release(),
            started: String::new(),
            command: Vec::new(),
            exit_code: None,
            seconds: load.seconds,
            total_load_percent: Some(load.total_percent()),
            cpu_seconds: Some(load.cpu_seconds()),
            cpus: load.cpus.clone(),
            resolution_percent: None,
            rusage_cpu_seconds: None,
            sources: Vec::new(),
            kernel_threads: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Removes invalid readings and adds a warning with the reason.
    pub(crate) fn withdraw_readings(&mut self, kind: &str, detail: String) {
        self.total_load_percent = None;
        self.cpu_seconds = None;
        self.cpus.clear();
        self.resolution_percent = None;
        self.warn(kind, detail);
    }

    /// Whether the meter could read the load.
    pub fn has_readings(&self) -> bool {
        self.cpu_seconds.is_some()
    }

    pub(crate) fn with_warnings(mut self) -> Self {
        let Some(cpu_seconds) = self.cpu_seconds else { return self };
        if self.seconds < SECONDS_MIN {
            self.warn(
                "too-short",
                format!(
                    "{:.3} s is too short for these readings, which take {SECONDS_MIN} s: measure \
                     a longer load, or several runs (--runs 10)",
                    self.seconds
                ),
            );
            return self;
        }
        for cpu in self.cpus.clone() {
            self.warn_of_cpu(&cpu);
        }
        if let Some(charged) = self.rusage_cpu_seconds
            && charged < (1.0 - UNCHARGED_SHARE_MIN) * cpu_seconds
        {
            let uncharged = 1.0 - charged / cpu_seconds;
            self.warn(
                "uncharged",
                format!(
                    "the machine used {cpu_seconds:.3} CPU-seconds in this time, of which {:.0} % \
                     were charged to no process of the program: interrupts, kernel threads, other \
                     programs",
                    100.0 * uncharged
                ),
            );
        }
        if let Some(group) = weighted_control_group() {
            self.warn(
                "control-group",
                format!(
                    "the meter runs in control group {group}, which has a CPU weight of its own: \
                     programs of other groups that fill a CPU share it with the meter, and their \
                     load reads low (run the meter in the root group)"
                ),
            );
        }
        self
    }

    fn warn(&mut self, kind: &str, detail: String) {
        self.warnings.push(Warning { kind: kind.into(), detail });
    }

    /// Warns of steal, and of a difference from `/proc/stat`.
    fn warn_of_cpu(&mut self, reading: &CpuLoad) {
        let CpuLoad { cpu, load_percent, proc_stat_percent, steal_percent, .. } = *reading;
        if steal_percent > STEAL_PERCENT_MIN {
            self.warn(
                "steal",
                format!(
                    "the hypervisor took {steal_percent:.1} % of CPU {cpu}, which is counted as \
                     load"
                ),
            );
        }
        if (load_percent - proc_stat_percent).abs() > DISAGREEMENT_POINTS_MIN {
            let why = if reading.interrupted_percent > reading.taken_percent {
                "most of it is interrupt work, which the kernel samples at its tick"
            } else {
                "the kernel charges each tick to the task that runs at the tick"
            };
            self.warn(
                "accounts-disagree",
                format!(
                    "CPU {cpu}: the meter reads {load_percent:.1} %, /proc/stat \
                     {proc_stat_percent:.1} %: {why}"
                ),
            );
        }
    }
}

/// Returns the path of this process's control group if the CPU controller gives the group a
/// separate weight: in version 2 (Linux 4.15) a group with `cpu.weight`, in version 1 any group but
/// the root.
fn weighted_control_group() -> Option<String> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let v1_group = groups.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        (controllers.split(',').any(|name| name == "cpu") && group != "/").then(|| group.to_owned())
    });
    let v2_group = || {
        let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
        fs::exists(format!("/sys/fs/cgroup{group}/cpu.weight")).ok()?.then_some(group)
    };
    v1_group.or_else(v2_group)
}
