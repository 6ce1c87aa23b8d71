//! The cost model: the cost of each send method, from which the cheapest is chosen. In files and on
//! the command line it is called a plan.
//!
//! The cost of sending a file or a piece of memory was measured at several sizes. Between them it
//! is linear, so choosing is arithmetic. A plan without such points has a cost per call and per
//! byte instead.
//!
//! The model covers CPU time of the sending host only: not that of the peer, and not descriptors or
//! pinned memory. Methods that need much of those for each socket (a ring, registered buffers) are
//! therefore never chosen, only used if set by hand. The same holds for `zerocopy`, because a
//! sender's loans need its completions.

use crate::method::SendMethod;

mod builtin;
#[cfg(feature = "plan-file")]
mod file;
mod provenance;

#[cfg(feature = "plan-file")]
pub use file::PlanError;
pub use provenance::{Network, PlanTest};

/// Name and version of the plan file's format.
pub const SCHEMA: &str = "haul.plan/1";
/// Costs that differ by less than this fraction count as equal: the method with fewer needs is
/// chosen.
const TIE_FRACTION: f64 = 0.03;
const MIB: f64 = (1u64 << 20) as f64;
/// The largest error of a prediction that passes a test, in percent.
pub const ERROR_PERCENT_MAX: f64 = 15.0;
/// Up to a page, a call costs more than its bytes. If no size that small was measured, linear costs
/// are used.
const SMALL_BYTES_MAX: u64 = 4096;
/// A long transfer, in bytes.
const LONG_TRANSFER_BYTES: u64 = 64 << 20;

/// The methods that a plan chooses from; of equals, the first: `sendfile` needs no pipe and no
/// buffer.
const CANDIDATES: [SendMethod; 6] = [
    SendMethod::Sendfile,
    SendMethod::ReadSend,
    SendMethod::ReadWrite,
    SendMethod::Splice,
    SendMethod::Vmsplice,
    SendMethod::MmapSend,
];

/// The methods that a plan chooses from, in the order of preference.
pub fn candidates() -> &'static [SendMethod] {
    &CANDIDATES
}

/// The bytes that a method is given in one call if a plan chooses it. A method without a buffer
/// gets the size beyond which larger calls save nothing. One with a buffer gets the size that stays
/// in a second-level cache.
pub fn call_bytes(method: SendMethod) -> usize {
    match method {
        SendMethod::ReadWrite | SendMethod::ReadSend => 64 << 10,
        _ => 1 << 20,
    }
}

/// A cost model: the cost of each send method that was measured.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Plan {
    /// Name and version of the format.
    #[cfg_attr(feature = "schemars", schemars(extend("const" = SCHEMA)))]
    pub schema: String,
    /// The kernel on which it was measured.
    pub kernel: String,
    /// The CPU on which it was measured.
    pub cpu: String,
    /// The network cards, each with its driver.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub devices: Vec<String>,
    /// The time of the measurement, RFC 3339.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub measured: String,
    /// The network conditions of the measurement. The plan was not tested under others.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub network: Option<Network>,
    /// Predictions for workloads that the plan was not made from, and the measured costs of these.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub tests: Vec<PlanTest>,
    /// Warnings about the measurement, for readers of the plan.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub warnings: Vec<String>,
    /// One entry for each method and condition.
    pub costs: Vec<Cost>,
}

/// The cost of a method under a condition, in CPU time of the sending host.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Cost {
    /// The send method.
    pub path: SendMethod,
    /// The condition.
    #[cfg_attr(feature = "plan-file", serde(flatten))]
    pub condition: Condition,
    /// Microseconds per call, whatever its size.
    pub us_per_call: Spread,
    /// Microseconds per MiB.
    pub us_per_mib: Spread,
    /// Measured costs of files or pieces of memory, in ascending order of size. From the smallest
    /// of these sizes on, they apply instead of `us_per_call` and `us_per_mib`.
    #[cfg_attr(feature = "plan-file", serde(default, skip_serializing_if = "Vec::is_empty"))]
    pub points: Vec<Point>,
}

/// The cost of sending a file, or a piece of memory, of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct Point {
    /// The size.
    pub bytes: u64,
    /// Microseconds for all of it.
    pub us: Spread,
}

/// The condition under which a method is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Condition {
    /// The kind of source.
    pub source: SourceKind,
    /// Whether the device gathers pages and computes checksums. A socket does not report it; most
    /// devices do.
    pub offloads: bool,
}

/// A kind of source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "plan-file", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum SourceKind {
    /// A file.
    File,
    /// Memory of the program ([`crate::Memory`]).
    Memory,
}

/// A median and its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end of the interval.
    pub high: f64,
}

impl Plan {
    /// Creates a plan from costs, with all other fields empty.
    pub fn new(costs: Vec<Cost>) -> Self {
        Self {
            schema: SCHEMA.into(),
            kernel: String::new(),
            cpu: String::new(),
            devices: Vec::new(),
            measured: String::new(),
            network: None,
            tests: Vec::new(),
            warnings: Vec::new(),
            costs,
        }
    }

    /// The built-in plan, used if there is no other: figures of docs/measurements/plan.md.
    pub fn builtin() -> &'static Self {
        builtin::plan()
    }

    /// The cheapest allowed method for `bytes` under `condition`; `None` if the plan contains none.
    ///
    /// Each method is judged by calls of its own size: [`call_bytes`], or all of it if that is
    /// less.
    pub fn choose(
        &self,
        condition: Condition,
        bytes: u64,
        is_allowed: impl Fn(SendMethod) -> bool,
    ) -> Option<SendMethod> {
        let costs = CANDIDATES.map(|method| {
            let cost = self
                .costs
                .iter()
                .find(|cost| cost.path == method && cost.condition == condition)?;
            is_allowed(method).then(|| cost.us_for(bytes.max(1)))
        });
        let cheapest = costs.into_iter().flatten().min_by(f64::total_cmp)?;
        let chosen = costs
            .iter()
            .position(|cost| cost.is_some_and(|us| us <= cheapest * (1.0 + TIE_FRACTION)))?;
        Some(CANDIDATES[chosen])
    }

    /// Ranks the candidates under `condition` for a long transfer in calls of the method's
    /// size, the cheapest first, with the cost of a MiB.
    pub fn ranking(&self, condition: Condition) -> Vec<(SendMethod, Spread)> {
        let cost_per_mib = |method: SendMethod| {
            let cost = self
                .costs
                .iter()
                .find(|cost| cost.path == method && cost.condition == condition)?;
            // As much as a long transfer, and a whole number of every method's calls.
            let per_mib = MIB / LONG_TRANSFER_BYTES as f64;
            Some((method, cost.spread_for(LONG_TRANSFER_BYTES).scaled(per_mib)))
        };
        let mut ranking: Vec<(SendMethod, Spread)> =
            CANDIDATES.into_iter().filter_map(cost_per_mib).collect();
        ranking.sort_by(|(_, a), (_, b)| a.median.total_cmp(&b.median));
        ranking
    }

    /// Predicts the CPU time in µs of sending pieces of these lengths, each by the method that is
    /// chosen for it; `None` if the plan has no method for one.
    pub fn predict(
        &self,
        condition: Condition,
        pieces: impl IntoIterator<Item = u64>,
    ) -> Option<Spread> {
        let mut sum = Spread { median: 0.0, low: 0.0, high: 0.0 };
        for bytes in pieces {
            let method = self.choose(condition, bytes, |_| true)?;
            let cost = self
                .costs
                .iter()
                .find(|cost| cost.path == method && cost.condition == condition)?;
            let spread = cost.spread_for(bytes);
            sum.median += spread.median;
            sum.low += spread.low;
            sum.high += spread.high;
        }
        Some(sum)
    }

    /// What limits the trust in the plan, one sentence each: predictions that missed the measured
    /// cost by over 15 %, and the warnings of its measurement. Empty if nothing does.
    pub fn caveats(&self) -> Vec<String> {
        let missed = |test: &&PlanTest| test.error_percent().abs() > ERROR_PERCENT_MAX;
        let misses = self.tests.iter().filter(missed).map(|test| {
            format!(
                "its prediction for {} was off by {:+.0} %",
                test.workload,
                test.error_percent()
            )
        });
        misses.chain(self.warnings.iter().cloned()).collect()
    }
}

impl Cost {
    /// Creates a cost without measured points.
    pub fn new(
        path: SendMethod,
        condition: Condition,
        us_per_call: Spread,
        us_per_mib: Spread,
    ) -> Self {
        Self { path, condition, us_per_call, us_per_mib, points: Vec::new() }
    }

    /// The cost of sending a file, or a piece of memory, of `bytes` bytes, in µs.
    pub fn us_for(&self, bytes: u64) -> f64 {
        self.interpolate(bytes, |spread| spread.median)
    }

    /// Like [`Cost::us_for`], with its interval.
    pub fn spread_for(&self, bytes: u64) -> Spread {
        let [median, low, high] = [
            self.interpolate(bytes, |spread| spread.median),
            self.interpolate(bytes, |spread| spread.low),
            self.interpolate(bytes, |spread| spread.high),
        ];
        Spread { median, low, high }
    }

    fn interpolate(&self, bytes: u64, end: impl Fn(Spread) -> f64) -> f64 {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            let calls = bytes.div_ceil(call_bytes(self.path) as u64) as f64;
            return end(self.us_per_call) * calls + end(self.us_per_mib) * bytes as f64 / MIB;
        };
        // Above the largest measured size the cost is proportional to the bytes. Below the smallest
        // size the call dominates the cost: the cost is the cost of the smallest size if that size
        // is small, and otherwise at most this cost.
        if bytes <= first.bytes {
            let is_small = first.bytes <= SMALL_BYTES_MAX;
            let line = end(self.us_per_call) + end(self.us_per_mib) * bytes as f64 / MIB;
            return if is_small { end(first.us) } else { line.min(end(first.us)) };
        }
        if bytes >= last.bytes {
            return end(last.us) * bytes as f64 / last.bytes as f64;
        }
        let above = self.points.partition_point(|point| point.bytes < bytes);
        let (lower, upper) = (self.points[above - 1], self.points[above]);
        let share = (bytes - lower.bytes) as f64 / (upper.bytes - lower.bytes) as f64;
        end(lower.us) + share * (end(upper.us) - end(lower.us))
    }
}

impl Condition {
    /// Creates a condition.
    pub fn new(source: SourceKind, offloads: bool) -> Self {
        Self { source, offloads }
    }
}

impl Spread {
    fn scaled(self, factor: f64) -> Self {
        Self { median: self.median * factor, low: self.low * factor, high: self.high * factor }
    }

    #[cfg(feature = "plan-file")]
    fn is_valid(self) -> bool {
        let Self { median, low, high } = self;
        0.0 <= low && low <= median && median <= high && high.is_finite()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Condition = Condition { source: SourceKind::File, offloads: true };

    pub(super) fn cost(method: SendMethod, us_per_call: f64, us_per_mib: f64) -> Cost {
        let exactly = |median| Spread { median, low: median, high: median };
        Cost::new(method, FILE, exactly(us_per_call), exactly(us_per_mib))
    }

    pub(super) fn plan(costs: Vec<Cost>) -> Plan {
        Plan {
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
            ..Plan::new(costs)
        }
    }

    #[test]
    fn the_cheapest_method_for_a_size_is_chosen() {
        let plan = plan(vec![
            cost(SendMethod::ReadSend, 1.0, 500.0),
            cost(SendMethod::Splice, 5.0, 200.0),
        ]);
        // The costs are equal at 4 µs ÷ 300 µs/MiB: 13,981 bytes.
        assert_eq!(plan.choose(FILE, 0, |_| true), Some(SendMethod::ReadSend));
        assert_eq!(plan.choose(FILE, 10_000, |_| true), Some(SendMethod::ReadSend));
        assert_eq!(plan.choose(FILE, 20_000, |_| true), Some(SendMethod::Splice));
        assert_eq!(
            plan.choose(FILE, 20_000, |method| method != SendMethod::Splice),
            Some(SendMethod::ReadSend)
        );
        assert_eq!(plan.choose(FILE, 20_000, |_| false), None);
        let memory = Condition { source: SourceKind::Memory, ..FILE };
        assert_eq!(plan.choose(memory, 20_000, |_| true), None);
    }

    #[test]
    fn a_prediction_adds_up_the_costs_of_the_chosen_methods() {
        let plan = plan(vec![
            cost(SendMethod::ReadSend, 1.0, 500.0),
            cost(SendMethod::Splice, 5.0, 200.0),
        ]);
        // Half a KiB by `read+send` in one call, 2.5 MiB by `splice` in three.
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
    fn costs_are_linear_between_measured_sizes() {
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
    }

    #[test]
    fn a_method_without_a_buffer_is_judged_by_larger_calls() {
        // Dearer per call and per MiB, but with a sixteenth of the calls.
        let plan = plan(vec![
            cost(SendMethod::ReadSend, 20.0, 300.0),
            cost(SendMethod::Sendfile, 21.0, 310.0),
        ]);
        assert_eq!(plan.choose(FILE, 60_000, |_| true), Some(SendMethod::ReadSend));
        assert_eq!(plan.choose(FILE, 10 << 20, |_| true), Some(SendMethod::Sendfile));
    }

    #[test]
    fn of_equal_costs_fewer_needs_win_and_some_methods_are_never_chosen() {
        let plan = plan(vec![
            cost(SendMethod::Splice, 0.0, 199.0),
            cost(SendMethod::Sendfile, 0.0, 200.0),
            cost(SendMethod::Zerocopy, 0.0, 1.0),
            cost(SendMethod::Floor, 0.0, 1.0),
        ]);
        assert_eq!(plan.choose(FILE, 65_536, |_| true), Some(SendMethod::Sendfile));
    }

    #[test]
    fn the_builtin_plan_covers_files_and_memory() {
        for source in [SourceKind::File, SourceKind::Memory] {
            for offloads in [true, false] {
                let choice =
                    Plan::builtin().choose(Condition { source, offloads }, 65_536, |_| true);
                assert!(choice.is_some(), "{source:?} {offloads}");
            }
        }
    }
}
