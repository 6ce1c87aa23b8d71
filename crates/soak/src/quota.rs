//! CPU quotas of control groups: how much CPU time a group may use in each period.
//!
//! A spinner uses all the time that a CPU leaves, so a quota below the number of CPUs is always
//! exhausted. The kernel then runs nothing of the group until the next period ("throttling"), and
//! the CPU is idle although a spinner could run. A reading would take the idle time for load, so a
//! meter that was throttled cannot read it.

use crate::control_groups::Hierarchy;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The share of the time for which a group may be throttled without an effect on the readings. Late
/// timers throttle a group whose quota is all CPUs for moments.
const THROTTLED_SHARE_MAX: f64 = 0.01;

/// The control groups with a CPU quota that contain this process, and the time for which each was
/// throttled until now.
#[derive(Debug)]
pub struct CpuQuotas {
    quotas: Vec<Quota>,
    /// When the quotas were read.
    since: Instant,
}

#[derive(Debug)]
struct Quota {
    folder: PathBuf,
    /// The quota, in CPUs.
    cpus: f64,
    throttled: Duration,
}

impl CpuQuotas {
    /// Reads the quotas of the group of this process and of the groups that contain the group, as
    /// far as this process sees them.
    pub fn read() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let hierarchies = Hierarchy::parse_mounts(&mounts);
        let folders = hierarchies.iter().flat_map(|hierarchy| {
            let (root, group) = match hierarchy {
                Hierarchy::V1 { cpu, .. } => (cpu, group_of(&membership, "cpu")),
                Hierarchy::V2(root) => (root, group_of(&membership, "")),
            };
            folders(root, group.unwrap_or("/"))
        });
        Self { quotas: folders.filter_map(Quota::read).collect(), since: Instant::now() }
    }

    /// Describes the smallest CPU quota if the quota allows less than `cpus` CPUs, because all
    /// readings of a load meter on `cpus` CPUs would be wrong. Returns `None` otherwise.
    pub fn shortage(&self, cpus: usize) -> Option<String> {
        let smallest = self.quotas.iter().min_by(|one, other| one.cpus.total_cmp(&other.cpus))?;
        (smallest.cpus < cpus as f64).then(|| {
            let group = smallest.folder.display();
            format!(
                "control group {group} may use {} of {cpus} CPUs (cpu.max, or docker --cpus), and \
                 the meter needs all the time that a CPU is idle: measure outside the group",
                smallest.cpus
            )
        })
    }

    /// Describes the group that was throttled the longest since the quotas were read; `None` if
    /// none was throttled.
    pub fn throttled_since(&self) -> Option<String> {
        let tolerated = self.since.elapsed().mul_f64(THROTTLED_SHARE_MAX);
        let grown = self.quotas.iter().filter_map(|quota| {
            let time = throttled(&quota.folder)?.saturating_sub(quota.throttled);
            (time > tolerated).then_some((quota, time))
        });
        let (quota, time) = grown.max_by_key(|(_, time)| *time)?;
        Some(format!(
            "control group {} exhausted its quota of {} CPUs, and the kernel stopped its programs \
             for {:.2} CPU-seconds",
            quota.folder.display(),
            quota.cpus,
            time.as_secs_f64()
        ))
    }
}

impl Quota {
    fn read(folder: PathBuf) -> Option<Self> {
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse::<f64>().ok();
        let cpus = if let Some(line) = text("cpu.max") {
            parse_cpu_max(&line)?
        } else {
            let quota = number("cpu.cfs_quota_us").filter(|quota| *quota > 0.0)?;
            quota / number("cpu.cfs_period_us")?
        };
        let throttled = throttled(&folder)?;
        Some(Self { folder, cpus, throttled })
    }
}

/// The group of this process in the hierarchy with a controller (`""` for version 2), from
/// `/proc/self/cgroup`.
fn group_of<'a>(membership: &'a str, controller: &str) -> Option<&'a str> {
    membership.lines().find_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|name| name == controller).then_some(group)
    })
}

/// The folders of a group and of all groups that contain it. In a container without a control group
/// namespace, the group's path is the host's, and only the root is visible.
fn folders(root: &Path, group: &str) -> Vec<PathBuf> {
    let group = root.join(group.trim_start_matches('/'));
    let ancestors = group.ancestors().take_while(|folder| folder.starts_with(root));
    ancestors.filter(|folder| folder.is_dir()).map(Path::to_owned).collect()
}

/// Parses `cpu.max` of version 2: the quota and the period in microseconds, or `max`.
fn parse_cpu_max(line: &str) -> Option<f64> {
    let (quota, period) = line.trim().split_once(' ')?;
    let period = period.parse::<f64>().ok().filter(|period| *period > 0.0)?;
    Some(quota.parse::<f64>().ok()? / period)
}

/// Reads the time for which a group was throttled, summed over the CPUs: `throttled_usec` of
/// version 2, or `throttled_time` of version 1, in nanoseconds.
fn throttled(folder: &Path) -> Option<Duration> {
    let text = fs::read_to_string(folder.join("cpu.stat")).ok()?;
    text.lines().find_map(|line| match line.split_once(' ')? {
        ("throttled_usec", us) => us.parse().ok().map(Duration::from_micros),
        ("throttled_time", ns) => ns.parse().ok().map(Duration::from_nanos),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_of_both_versions_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("cpu.cfs_quota_us", "150000\n");
        write("cpu.cfs_period_us", "100000\n");
        write("cpu.stat", "nr_periods 5\nnr_throttled 3\nthrottled_time 2000000\n");
        let read = || Quota::read(folder.path().into());
        let quota = read().unwrap();
        assert_eq!((quota.cpus, quota.throttled), (1.5, Duration::from_millis(2)));
        write("cpu.cfs_quota_us", "-1\n");
        assert!(read().is_none(), "a group without a quota");
        write("cpu.max", "50000 100000\n");
        write("cpu.stat", "usage_usec 9\nthrottled_usec 7\n");
        let mut quotas = CpuQuotas { quotas: vec![read().unwrap()], since: Instant::now() };
        assert_eq!(quotas.quotas[0].throttled, Duration::from_micros(7));
        assert!(quotas.shortage(1).unwrap().contains("may use 0.5 of 1 CPUs"));
        assert_eq!(quotas.throttled_since(), None);
        write("cpu.stat", "usage_usec 9\nthrottled_usec 500007\n");
        assert!(quotas.throttled_since().unwrap().contains("0.50 CPU-seconds"));
        quotas.since = quotas.since.checked_sub(Duration::from_secs(60)).unwrap();
        assert_eq!(quotas.throttled_since(), None, "0.5 s of 60 s are tolerated");
        write("cpu.max", "max 100000\n");
        assert!(read().is_none());
    }

    #[test]
    fn a_quota_of_all_cpus_is_no_shortage() {
        let quota = Quota { folder: "/g".into(), cpus: 2.0, throttled: Duration::ZERO };
        let of = |quotas| CpuQuotas { quotas, since: Instant::now() };
        assert_eq!(of(vec![quota]).shortage(2), None);
        assert_eq!(of(Vec::new()).shortage(2), None);
    }

    #[test]
    fn the_group_and_all_groups_around_it_are_found() {
        let membership = "4:memory:/m\n1:cpu,cpuacct:/a/b\n0::/c\n";
        assert_eq!(group_of(membership, "cpu"), Some("/a/b"));
        assert_eq!(group_of(membership, ""), Some("/c"));
        assert_eq!(group_of("", "cpu"), None);
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        let outer = root.path().join("a");
        let all = [inner, outer, root.path().to_owned()];
        assert_eq!(folders(root.path(), "/a/b"), all);
        assert_eq!(folders(root.path(), "/docker/x"), [root.path()]);
    }
}
