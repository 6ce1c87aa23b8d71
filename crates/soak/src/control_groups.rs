//! Finds control groups with so low a CPU weight that a spinner takes a large part of their CPU
//! time.
//!
//! A spinner's session has the least weight of a session. A first-level control group can have less
//! (`cpu.shares` of version 1, `cpu.weight` and `cpu.idle` of version 2): Kubernetes gives pods
//! without requests 2 of 1024. Programs of such a group share a CPU with the spinner, so their load
//! reads low. Deeper groups compete within their parents and not with the spinner.

use crate::report::Warning;
use crate::weight::{ORDINARY_WEIGHT, SPINNER_WEIGHT};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Upper limit of a low weight: at this weight the group leaves the spinner a twentieth of a full
/// CPU.
const LOW_WEIGHT_MAX: f64 = 19.0 * SPINNER_WEIGHT;
/// The weight that `cpu.idle` gives a group (`WEIGHT_IDLEPRIO` of kernel/sched/sched.h).
const WEIGHT_IDLE: f64 = 3.0;
/// A group is reported only if its programs used more than this share of a CPU.
const USED_SHARE_MIN: f64 = 0.01;

/// The groups of low weight, and the CPU time that their programs had used when the groups were
/// read.
#[derive(Debug)]
pub(crate) struct LowWeightGroups {
    read_at: Instant,
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    path: PathBuf,
    weight: f64,
    usage_file: PathBuf,
    cpu_time: Duration,
}

impl LowWeightGroups {
    /// Reads this machine's groups; none if no control group hierarchy is mounted.
    pub(crate) fn read() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let hierarchies = Hierarchy::parse_mounts(&mounts);
        let groups = hierarchies.iter().flat_map(Hierarchy::low_weights).collect();
        Self { read_at: Instant::now(), groups }
    }

    /// Returns a warning for each group whose programs have used CPU time since [`Self::read`].
    pub(crate) fn starvation_warnings(&self) -> Vec<Warning> {
        let seconds = self.read_at.elapsed().as_secs_f64();
        let starved = self.groups.iter().filter_map(|group| {
            let used = cpu_time(&group.usage_file)?.saturating_sub(group.cpu_time).as_secs_f64();
            (used > USED_SHARE_MIN * seconds).then(|| group.warning(used))
        });
        starved.collect()
    }
}

impl Group {
    fn warning(&self, used_seconds: f64) -> Warning {
        let share = 100.0 * SPINNER_WEIGHT / (SPINNER_WEIGHT + self.weight);
        Warning {
            kind: "starved-control-group".into(),
            detail: format!(
                "control group {} has CPU weight {:.0} (an ordinary one has {ORDINARY_WEIGHT:.0}): \
                 if its programs fill a CPU, the meter takes up to {share:.0} % of it, slows them \
                 down and reads a low load. They used {used_seconds:.2} CPU-seconds. Raise the \
                 weight while you measure",
                self.path.display(),
                self.weight
            ),
        }
    }
}

/// Mount points of a control group hierarchy with CPU weights.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hierarchy {
    /// Version 1: the controllers `cpu` and `cpuacct`, which may be mounted separately.
    V1 { cpu: PathBuf, cpuacct: PathBuf },
    /// Version 2.
    V2(PathBuf),
}

impl Hierarchy {
    /// Parses `/proc/self/mounts`.
    pub(crate) fn parse_mounts(mounts: &str) -> Vec<Self> {
        let (mut cpu, mut cpuacct, mut all) = (None, None, Vec::new());
        for line in mounts.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, folder, kind, options, ..] = words.as_slice() else { continue };
            let has = |controller: &str| options.split(',').any(|option| option == controller);
            match *kind {
                "cgroup" => {
                    cpu = cpu.or(has("cpu").then(|| PathBuf::from(folder)));
                    cpuacct = cpuacct.or(has("cpuacct").then(|| PathBuf::from(folder)));
                }
                "cgroup2" => all.push(Self::V2(folder.into())),
                _ => {}
            }
        }
        all.extend(cpu.zip(cpuacct).map(|(cpu, cpuacct)| Self::V1 { cpu, cpuacct }));
        all
    }

    /// Lists the first-level groups whose weight is low.
    fn low_weights(&self) -> Vec<Group> {
        let (Self::V1 { cpu: root, .. } | Self::V2(root)) = self;
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        let groups = entries.filter_map(|entry| {
            let path = entry.path();
            let weight = weight(&path)?;
            let usage_file = match self {
                Self::V1 { cpuacct, .. } => cpuacct.join(entry.file_name()).join("cpuacct.usage"),
                Self::V2(_) => path.join("cpu.stat"),
            };
            let cpu_time = cpu_time(&usage_file)?;
            (weight < LOW_WEIGHT_MAX).then_some(Group { path, weight, usage_file, cpu_time })
        });
        groups.collect()
    }
}

/// Reads the weight of a group, on the scale where an ordinary group has 1024.
fn weight(group: &Path) -> Option<f64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<f64>().ok();
    if number("cpu.idle") == Some(1.0) {
        return Some(WEIGHT_IDLE);
    }
    number("cpu.shares").or_else(|| Some(number("cpu.weight")? * ORDINARY_WEIGHT / 100.0))
}

/// Reads the CPU time that a group's programs have used.
///
/// The file is `cpuacct.usage`, in nanoseconds, or `cpu.stat`, whose line `usage_usec` is read.
fn cpu_time(file: &Path) -> Option<Duration> {
    let text = fs::read_to_string(file).ok()?;
    match text.lines().find_map(|line| line.strip_prefix("usage_usec ")) {
        Some(us) => us.trim().parse().ok().map(Duration::from_micros),
        None => text.trim().parse().ok().map(Duration::from_nanos),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_in_the_mounts() {
        let mounts = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
                      cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\nnonsense\n";
        let both = PathBuf::from("/sys/fs/cgroup/cpu,cpuacct");
        let wanted = [
            Hierarchy::V2("/sys/fs/cgroup/unified".into()),
            Hierarchy::V1 { cpu: both.clone(), cpuacct: both },
        ];
        assert_eq!(Hierarchy::parse_mounts(mounts), wanted);
        assert_eq!(Hierarchy::parse_mounts(""), []);
    }

    #[test]
    fn weights_and_cpu_times_are_read_in_both_versions() {
        let folder = tempfile::tempdir().unwrap();
        let write = |group: &str, file: &str, text: &str| {
            fs::create_dir_all(folder.path().join(group)).unwrap();
            fs::write(folder.path().join(group).join(file), text).unwrap();
        };
        for (group, file, text) in [
            ("low", "cpu.weight", "1\n"),
            ("low", "cpu.stat", "usage_usec 1000\nuser_usec 7\n"),
            ("idle", "cpu.weight", "100\n"),
            ("idle", "cpu.idle", "1\n"),
            ("idle", "cpu.stat", "usage_usec 0\n"),
            ("usual", "cpu.weight", "100\n"),
            ("usual", "cpu.stat", "usage_usec 0\n"),
            ("pods", "cpu.shares", "2\n"),
            ("pods", "cpuacct.usage", "5000000\n"),
        ] {
            write(group, file, text);
        }
        let names = |hierarchy: &Hierarchy| {
            let mut names: Vec<(String, i64)> = hierarchy
                .low_weights()
                .iter()
                .map(|group| {
                    (group.path.file_name().unwrap().to_string_lossy().into(), group.weight as i64)
                })
                .collect();
            names.sort();
            names
        };
        let root = folder.path().to_owned();
        assert_eq!(names(&Hierarchy::V2(root.clone())), [("idle".into(), 3), ("low".into(), 10)]);
        let first = Hierarchy::V1 { cpu: root.clone(), cpuacct: root.clone() };
        assert_eq!(names(&first), [("pods".into(), 2)]);
        let seen = LowWeightGroups { read_at: Instant::now(), groups: first.low_weights() };
        assert!(seen.starvation_warnings().is_empty(), "nothing was used since");
        write("pods", "cpuacct.usage", "5005000000\n");
        let warnings = seen.starvation_warnings();
        assert!(warnings.len() == 1 && warnings[0].detail.contains("up to 88 %"), "{warnings:?}");
    }
}
