//! The plan: what each path costs, and so which one to take.
//!
//! What it costs to send a file or a piece of memory was measured at several sizes; between them it is a line, and choosing
//! is arithmetic. A plan that has no such points has a cost for each call and for each byte instead.
//! The model knows CPU time of the sending host and nothing else: not the peer's, not descriptors or pinned
//! memory. Paths that need much of those for each socket (a ring, registered buffers) are therefore never
//! chosen, only taken by hand; so is `zerocopy`, whose notices a sender's loans need for themselves.

use crate::method::SendMethod;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

mod builtin;
mod provenance;

pub use provenance::{Network, Test};

/// The plan file's name and version.
pub const SCHEMA: &str = "haul.plan/1";
/// The largest plan file that is read. The largest sensible one is a hundredth of it.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Costs that differ by less than this cannot be told apart, and the path with fewer needs is taken.
const TIE: f64 = 0.03;
const MIB: f64 = (1u64 << 20) as f64;
/// Up to a page a call costs more than its bytes. Where nothing so small was measured, the line has to do.
const SMALL_BYTES: u64 = 4096;
/// A long transfer.
const LONG_BYTES: u64 = 64 << 20;

/// The paths that a plan chooses from; of equals, the first: `sendfile` needs no pipe and no buffer.
const CANDIDATES: [SendMethod; 6] = [
    SendMethod::Sendfile,
    SendMethod::ReadSend,
    SendMethod::ReadWrite,
    SendMethod::Splice,
    SendMethod::Vmsplice,
    SendMethod::MmapSend,
];

/// How much a path is given in one call where a plan chooses: a path that needs no buffer takes as much as
/// pays, one that does as much as stays in a second-level cache.
pub fn call_bytes(path: SendMethod) -> usize {
    match path {
        SendMethod::ReadWrite | SendMethod::ReadSend => 64 << 10,
        _ => 1 << 20,
    }
}

/// What each path costs, where that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`SCHEMA`].
    pub schema: String,
    /// The kernel it was measured on.
    pub kernel: String,
    /// The CPU.
    pub cpu: String,
    /// The network cards, each with its driver.
    #[serde(default)]
    pub devices: Vec<String>,
    /// When, RFC 3339.
    #[serde(default)]
    pub measured: String,
    /// Under which conditions of the network. Under others it was not tested.
    #[serde(default)]
    pub network: Option<Network>,
    /// What it predicted of workloads that it was not made of, and what those cost.
    #[serde(default)]
    pub tests: Vec<Test>,
    /// What a reader of the plan should know of the measurement.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// One entry for each path and condition.
    pub costs: Vec<Cost>,
}

/// What a path costs under a condition, in CPU time of the sending host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// The path.
    pub path: SendMethod,
    /// Under which condition.
    #[serde(flatten)]
    pub condition: Condition,
    /// Microseconds for each call, whatever its size.
    pub us_per_call: Spread,
    /// Microseconds for each MiB.
    pub us_per_mib: Spread,
    /// What a whole file or piece of memory of a size costs, in calls of the path's own size, the smallest first. Where there
    /// are any, they count, and the two numbers above are for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
}

/// What it costs to send a file, or a piece of memory, of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The size.
    pub bytes: u64,
    /// Microseconds for all of it.
    pub us: Spread,
}

/// Under which condition a path is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Condition {
    /// What is sent.
    pub source: SourceKind,
    /// Whether the device gathers pages and computes checksums. A socket does not tell; mostly it does.
    pub offloads: bool,
}

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// A file.
    File,
    /// [`crate::Memory`].
    Memory,
}

/// A middle and its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The middle.
    pub median: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file cannot be read or written.
    #[error("plan {path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is no plan.
    #[error("plan {path} is not one: {problem}; make it again with `haul plan`", path = path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl Plan {
    /// The plan that is taken where there is no other: figures of docs/findings.md.
    pub fn builtin() -> &'static Self {
        builtin::plan()
    }

    /// The cheapest allowed path for `bytes` under `condition`; `None` where the plan knows of none.
    ///
    /// Each path is judged by calls of its own size: [`call_bytes`], or all of it where that is less.
    pub fn choose(
        &self,
        condition: Condition,
        bytes: u64,
        is_allowed: impl Fn(SendMethod) -> bool,
    ) -> Option<SendMethod> {
        let costs = CANDIDATES.map(|path| {
            let known =
                self.costs.iter().find(|cost| cost.path == path && cost.condition == condition)?;
            is_allowed(path).then(|| known.us_for(bytes.max(1)))
        });
        let cheapest = costs.into_iter().flatten().min_by(f64::total_cmp)?;
        let equal =
            costs.iter().position(|cost| cost.is_some_and(|us| us <= cheapest * (1.0 + TIE)))?;
        Some(CANDIDATES[equal])
    }

    /// The candidates under `condition` for a long transfer in calls of their own size, the cheapest first, with what a
    /// MiB of it costs.
    pub fn ranking(&self, condition: Condition) -> Vec<(SendMethod, Spread)> {
        let of = |path: SendMethod| {
            let known =
                self.costs.iter().find(|cost| cost.path == path && cost.condition == condition)?;
            // As much as a long transfer, and a whole number of every path's calls.
            Some((path, known.spread_for(LONG_BYTES).scaled(MIB / LONG_BYTES as f64)))
        };
        let mut ranking: Vec<(SendMethod, Spread)> =
            CANDIDATES.into_iter().filter_map(of).collect();
        ranking.sort_by(|(_, one), (_, other)| one.median.total_cmp(&other.median));
        ranking
    }

    /// What it costs to send pieces of these lengths in µs of CPU, each by the path that is chosen for it; `None` where
    /// there is none.
    pub fn predict(
        &self,
        condition: Condition,
        pieces: impl IntoIterator<Item = u64>,
    ) -> Option<Spread> {
        let mut sum = Spread { median: 0.0, low: 0.0, high: 0.0 };
        for bytes in pieces {
            let path = self.choose(condition, bytes, |_| true)?;
            let known =
                self.costs.iter().find(|cost| cost.path == path && cost.condition == condition)?;
            let spread = known.spread_for(bytes);
            sum.median += spread.median;
            sum.low += spread.low;
            sum.high += spread.high;
        }
        Some(sum)
    }

    /// Reads a plan file.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, PlanError> {
        let path = path.as_ref();
        let failed = |source| PlanError::File { path: path.into(), source };
        let malformed = |problem| PlanError::Malformed { path: path.into(), problem };
        let mut bytes = Vec::new();
        let mut file = File::open(path).map_err(failed)?.take(FILE_BYTES_MAX + 1);
        file.read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(malformed(format!("it has more than {FILE_BYTES_MAX} bytes")));
        }
        Self::parse(&bytes).map_err(malformed)
    }

    /// Reads a plan; the error says what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let plan: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if plan.schema != SCHEMA {
            return Err(format!(
                "its schema is {:?}, and this version reads {SCHEMA:?}",
                plan.schema
            ));
        }
        if plan.costs.is_empty() {
            return Err("it has no costs".into());
        }
        for cost in &plan.costs {
            if cost.points.windows(2).any(|pair| pair[0].bytes >= pair[1].bytes)
                || cost.points.first().is_some_and(|point| point.bytes == 0)
            {
                return Err(format!(
                    "{}: its points are not in the order of their sizes",
                    cost.path
                ));
            }
            let of_points = cost.points.iter().map(|point| point.us);
            for spread in [cost.us_per_call, cost.us_per_mib].into_iter().chain(of_points) {
                if !spread.is_sound() {
                    let Spread { median, low, high } = spread;
                    return Err(format!("{}: {median} ({low} to {high}) is no cost", cost.path));
                }
            }
        }
        Ok(plan)
    }

    /// Writes the plan file atomically: readers see the old plan or the new one.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), PlanError> {
        let path = path.as_ref();
        let failed = |source| PlanError::File { path: path.into(), source };
        let mut text = serde_json::to_string_pretty(self).map_err(|error| failed(error.into()))?;
        text.push('\n');
        haul_fs::replace(path, text.as_bytes()).map_err(failed)
    }
}

impl Cost {
    /// What it costs to send a file, or a piece of memory, of so many bytes.
    pub fn us_for(&self, bytes: u64) -> f64 {
        self.at(bytes, |spread| spread.median)
    }

    /// The same with its interval.
    pub fn spread_for(&self, bytes: u64) -> Spread {
        let [median, low, high] = [
            self.at(bytes, |spread| spread.median),
            self.at(bytes, |spread| spread.low),
            self.at(bytes, |spread| spread.high),
        ];
        Spread { median, low, high }
    }

    fn at(&self, bytes: u64, end: impl Fn(Spread) -> f64) -> f64 {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            let calls = bytes.div_ceil(call_bytes(self.path) as u64) as f64;
            return end(self.us_per_call) * calls + end(self.us_per_mib) * bytes as f64 / MIB;
        };
        // Below the smallest it is the call that costs; above the largest every byte costs as much.
        if bytes <= first.bytes {
            let is_small = first.bytes <= SMALL_BYTES;
            let line = end(self.us_per_call) + end(self.us_per_mib) * bytes as f64 / MIB;
            return if is_small { end(first.us) } else { line.min(end(first.us)) };
        }
        if bytes >= last.bytes {
            return end(last.us) * bytes as f64 / last.bytes as f64;
        }
        let above = self.points.partition_point(|point| point.bytes < bytes);
        let (one, other) = (self.points[above - 1], self.points[above]);
        let share = (bytes - one.bytes) as f64 / (other.bytes - one.bytes) as f64;
        end(one.us) + share * (end(other.us) - end(one.us))
    }
}

impl Spread {
    fn scaled(self, factor: f64) -> Self {
        Self { median: self.median * factor, low: self.low * factor, high: self.high * factor }
    }

    fn is_sound(self) -> bool {
        let Self { median, low, high } = self;
        0.0 <= low && low <= median && median <= high && high.is_finite()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    const FILE: Condition = Condition { source: SourceKind::File, offloads: true };

    fn cost(path: SendMethod, us_per_call: f64, us_per_mib: f64) -> Cost {
        let exactly = |median| Spread { median, low: median, high: median };
        Cost {
            path,
            condition: FILE,
            us_per_call: exactly(us_per_call),
            us_per_mib: exactly(us_per_mib),
            points: Vec::new(),
        }
    }

    fn plan(costs: Vec<Cost>) -> Plan {
        Plan {
            schema: SCHEMA.into(),
            kernel: "6.18".into(),
            cpu: "any".into(),
            devices: vec!["eth0 driver".into()],
            measured: "2026-11-21T00:00:00Z".into(),
            network: Some(Network {
                congestion: "cubic".into(),
                mtu: 9000,
                rate_bits_per_second: None,
                cache_line_round_trip_ns: Some(61.0),
                reading: Some("held".into()),
            }),
            tests: Vec::new(),
            warnings: Vec::new(),
            costs,
        }
    }

    #[test]
    fn the_cheapest_at_this_size_is_chosen() {
        let plan = plan(vec![
            cost(SendMethod::ReadSend, 1.0, 500.0),
            cost(SendMethod::Splice, 5.0, 200.0),
        ]);
        // They meet at 4 µs ÷ 300 µs/MiB: 13,981 bytes.
        assert_eq!(plan.choose(FILE, 0, |_| true), Some(SendMethod::ReadSend));
        assert_eq!(plan.choose(FILE, 10_000, |_| true), Some(SendMethod::ReadSend));
        assert_eq!(plan.choose(FILE, 20_000, |_| true), Some(SendMethod::Splice));
        assert_eq!(
            plan.choose(FILE, 20_000, |path| path != SendMethod::Splice),
            Some(SendMethod::ReadSend)
        );
        assert_eq!(plan.choose(FILE, 20_000, |_| false), None);
        let memory = Condition { source: SourceKind::Memory, ..FILE };
        assert_eq!(plan.choose(memory, 20_000, |_| true), None);
    }

    #[test]
    fn a_prediction_adds_up_calls_and_bytes_by_the_path_that_is_chosen() {
        let plan = plan(vec![
            cost(SendMethod::ReadSend, 1.0, 500.0),
            cost(SendMethod::Splice, 5.0, 200.0),
        ]);
        // Half a KiB by read+send in one call, 2.5 MiB by splice in three.
        let predicted = plan.predict(FILE, [512, 5 << 19]).unwrap();
        assert!(
            (predicted.median - (1.0 + 500.0 / 2048.0 + 15.0 + 500.0)).abs() < 1e-9,
            "{predicted:?}"
        );
        let ranking = plan.ranking(FILE);
        assert_eq!(ranking[0].0, SendMethod::Splice);
        assert!(
            (ranking[0].1.median - 205.0).abs() < 1e-9
                && (ranking[1].1.median - 516.0).abs() < 1e-9
        );
        assert!(plan.predict(Condition { offloads: false, ..FILE }, [1]).is_none());
    }

    #[test]
    fn between_measured_sizes_a_cost_is_a_line() {
        let point =
            |bytes, us| Point { bytes, us: Spread { median: us, low: us / 2.0, high: us * 2.0 } };
        let known = Cost {
            points: vec![point(1000, 10.0), point(3000, 20.0), point(10_000, 90.0)],
            ..cost(SendMethod::Sendfile, 1e3, 1e3)
        };
        for (bytes, us) in
            [(1, 10.0), (1000, 10.0), (2000, 15.0), (3000, 20.0), (6500, 55.0), (20_000, 180.0)]
        {
            assert!((known.us_for(bytes) - us).abs() < 1e-9, "{bytes}: {}", known.us_for(bytes));
        }
        let points = vec![point(1 << 20, 100.0), point(2 << 20, 200.0)];
        let large = Cost { points, ..cost(SendMethod::Sendfile, 3.0, 90.0) };
        assert!(
            (large.us_for(1 << 10) - (3.0 + 90.0 / 1024.0)).abs() < 1e-9,
            "{}",
            large.us_for(1 << 10)
        );
        let spread = known.spread_for(2000);
        assert!((spread.low - 7.5).abs() < 1e-9 && (spread.high - 30.0).abs() < 1e-9, "{spread:?}");
        let unordered = Cost {
            points: vec![point(5, 1.0), point(5, 2.0)],
            ..cost(SendMethod::Sendfile, 1.0, 1.0)
        };
        let text = serde_json::to_vec(&plan(vec![unordered])).unwrap();
        assert!(Plan::parse(&text).unwrap_err().contains("order of their sizes"));
    }

    #[test]
    fn a_path_without_a_buffer_is_judged_by_larger_calls() {
        // Dearer by the call and by the MiB, but with a sixteenth of the calls.
        let plan = plan(vec![
            cost(SendMethod::ReadSend, 20.0, 300.0),
            cost(SendMethod::Sendfile, 21.0, 310.0),
        ]);
        assert_eq!(plan.choose(FILE, 60_000, |_| true), Some(SendMethod::ReadSend));
        assert_eq!(plan.choose(FILE, 10 << 20, |_| true), Some(SendMethod::Sendfile));
    }

    #[test]
    fn of_equals_the_one_with_fewer_needs_is_chosen_and_some_never_are() {
        let plan = plan(vec![
            cost(SendMethod::Splice, 0.0, 199.0),
            cost(SendMethod::Sendfile, 0.0, 200.0),
            cost(SendMethod::UringZerocopy, 0.0, 1.0),
            cost(SendMethod::Zerocopy, 0.0, 1.0),
            cost(SendMethod::Floor, 0.0, 1.0),
        ]);
        assert_eq!(plan.choose(FILE, 65_536, |_| true), Some(SendMethod::Sendfile));
    }

    #[test]
    fn the_builtin_plan_is_sound_and_knows_files_and_memory() {
        let text = serde_json::to_vec(Plan::builtin()).unwrap();
        assert_eq!(&Plan::parse(&text).unwrap(), Plan::builtin());
        for source in [SourceKind::File, SourceKind::Memory] {
            for offloads in [true, false] {
                let choice =
                    Plan::builtin().choose(Condition { source, offloads }, 65_536, |_| true);
                assert!(choice.is_some(), "{source:?} {offloads}");
            }
        }
    }

    #[test]
    fn a_plan_is_saved_whole_and_what_is_none_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        Plan::builtin().save(&path).unwrap();
        assert_eq!(&Plan::load(&path).unwrap(), Plan::builtin());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "something was left aside");
        let says = |text: &str| {
            fs::write(&path, text).unwrap();
            Plan::load(&path).unwrap_err().to_string()
        };
        assert!(says("").contains("haul plan"));
        assert!(says("{}").contains("missing field"));
        let text = serde_json::to_string(Plan::builtin()).unwrap();
        assert!(says(&text.replace("haul.plan/1", "haul.plan/9")).contains("haul.plan/9"));
        assert!(says(&text.replacen("sendfile", "sendfil", 1)).contains("unknown path"));
        assert!(says(&text.replacen("\"median\":", "\"median\":-", 1)).contains("no cost"));
        assert!(Plan::load("/dev/zero").unwrap_err().to_string().contains("more than"));
        let missing = Plan::load(folder.path().join("nothing")).unwrap_err();
        assert!(missing.to_string().contains("No such file"), "{missing}");
        assert!(matches!(Plan::builtin().save("/proc/no/plan"), Err(PlanError::File { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_safe(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Plan::parse(&bytes);
        }

        #[test]
        fn every_plan_survives_its_file(
            figures in proptest::collection::vec((0usize..6, 0.0f64..1e3, 0.0f64..1e4), 1..12)
        ) {
            let costs = figures.iter().map(|&(path, call, mib)| cost(CANDIDATES[path], call, mib)).collect();
            let plan = plan(costs);
            prop_assert_eq!(Plan::parse(&serde_json::to_vec(&plan).unwrap()).unwrap(), plan);
        }
    }
}
