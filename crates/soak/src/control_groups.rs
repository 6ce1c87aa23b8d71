//! Control groups of so little CPU weight that a spinner takes a good part of what their programs want.
//!
//! A spinner's session has the least weight of a session. A group of the first level can have less (`cpu.shares` of version 1,
//! `cpu.weight` and `cpu.idle` of version 2): Kubernetes gives pods without requests 2 of 1024. Programs of such a group
//! share a CPU with the spinner and read low. Deeper groups compete within their parents and not with the spinner.

use crate::report::Warning;
use crate::weight::{ORDINARY_WEIGHT, SPINNER_WEIGHT};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Beside a group of this weight a spinner gets a twentieth of a full CPU.
const WEIGHT_LOW: f64 = 19.0 * SPINNER_WEIGHT;
/// The weight that `cpu.idle` gives a group (`WEIGHT_IDLEPRIO` of kernel/sched/sched.h).
const WEIGHT_IDLE: f64 = 3.0;
/// A group's programs must have used this share of a CPU to be spoken of.
const USED_SHARE: f64 = 0.01;

/// The groups of low weight, and what their programs had used when they were looked at.
#[derive(Debug)]
pub(crate) struct LowWeights {
    at: Instant,
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    path: PathBuf,
    weight: f64,
    usage_file: PathBuf,
    used: Duration,
}

impl LowWeights {
    /// Those of this machine; none where the groups are not mounted.
    pub(crate) fn read() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let groups = Hierarchy::all(&mounts).iter().flat_map(Hierarchy::low_weights).collect();
        Self { at: Instant::now(), groups }
    }

    /// A warning for each group whose programs have used CPU time since.
    pub(crate) fn used_since(&self) -> Vec<Warning> {
        let seconds = self.at.elapsed().as_secs_f64();
        let starved = self.groups.iter().filter_map(|group| {
            let used = used(&group.usage_file)?.saturating_sub(group.used).as_secs_f64();
            (used > USED_SHARE * seconds).then(|| group.warning(used))
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
                "control group {} has CPU weight {:.0} (an ordinary one has {ORDINARY_WEIGHT:.0}): where its programs fill a CPU \
                 the meter takes up to {share:.0} % of it, they are slowed down and read low. They used {used_seconds:.2} \
                 CPU-seconds. Raise its weight while you measure",
                self.path.display(),
                self.weight
            ),
        }
    }
}

/// Where the groups that share CPUs are mounted.
#[derive(Debug, PartialEq, Eq)]
enum Hierarchy {
    /// Version 1: the controller `cpu`, and `cpuacct`, which may be mounted apart.
    First { cpu: PathBuf, cpuacct: PathBuf },
    /// Version 2.
    Second(PathBuf),
}

impl Hierarchy {
    /// From `/proc/self/mounts`.
    fn all(mounts: &str) -> Vec<Self> {
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
                "cgroup2" => all.push(Self::Second(folder.into())),
                _ => {}
            }
        }
        all.extend(cpu.zip(cpuacct).map(|(cpu, cpuacct)| Self::First { cpu, cpuacct }));
        all
    }

    /// The groups of the first level whose weight is low.
    fn low_weights(&self) -> Vec<Group> {
        let (Self::First { cpu: root, .. } | Self::Second(root)) = self;
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        let groups = entries.filter_map(|entry| {
            let path = entry.path();
            let weight = weight(&path)?;
            let usage_file = match self {
                Self::First { cpuacct, .. } => {
                    cpuacct.join(entry.file_name()).join("cpuacct.usage")
                }
                Self::Second(_) => path.join("cpu.stat"),
            };
            let used = used(&usage_file)?;
            (weight < WEIGHT_LOW).then_some(Group { path, weight, usage_file, used })
        });
        groups.collect()
    }
}

/// The weight of a group on the scale where an ordinary one has 1024.
fn weight(group: &Path) -> Option<f64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<f64>().ok();
    if number("cpu.idle") == Some(1.0) {
        return Some(WEIGHT_IDLE);
    }
    number("cpu.shares").or_else(|| Some(number("cpu.weight")? * ORDINARY_WEIGHT / 100.0))
}

/// The CPU time that a group's programs have used: `cpuacct.usage` in nanoseconds, or `usage_usec` of `cpu.stat`.
fn used(file: &Path) -> Option<Duration> {
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
    fn both_versions_are_found_among_the_mounts() {
        let mounts = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n\
                      cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\nnonsense\n";
        let both = PathBuf::from("/sys/fs/cgroup/cpu,cpuacct");
        let wanted = [
            Hierarchy::Second("/sys/fs/cgroup/unified".into()),
            Hierarchy::First { cpu: both.clone(), cpuacct: both },
        ];
        assert_eq!(Hierarchy::all(mounts), wanted);
        assert_eq!(Hierarchy::all(""), []);
    }

    #[test]
    fn weights_and_use_are_read_in_both_versions() {
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
        assert_eq!(
            names(&Hierarchy::Second(root.clone())),
            [("idle".into(), 3), ("low".into(), 10)]
        );
        let first = Hierarchy::First { cpu: root.clone(), cpuacct: root.clone() };
        assert_eq!(names(&first), [("pods".into(), 2)]);
        let seen = LowWeights { at: Instant::now(), groups: first.low_weights() };
        assert!(seen.used_since().is_empty(), "nothing was used since");
        write("pods", "cpuacct.usage", "5005000000\n");
        let warnings = seen.used_since();
        assert!(warnings.len() == 1 && warnings[0].detail.contains("up to 88 %"), "{warnings:?}");
    }
}
