//! Fits a plan to a report's rows: points where all files have one size, and a line over
//! calls per MiB.

use crate::send::prediction::network;
use crate::send::{SendReport, SendRow};
use crate::stats::Estimate;
use haul::SendMethod;
use haul::plan::{Condition, Cost, Plan, Point, SourceKind, Spread, call_bytes};
use haul_units::MIB;
use haul_workers::workload::Workload;
use std::collections::BTreeMap;

/// The least end of an interval, as a part of the median. The weight of 0 in a line would be
/// infinite.
const LEAST_PART: f64 = 0.01;

/// The end of an interval that a line is fitted to.
type IntervalEnd = fn(Estimate) -> f64;

/// The plan that a report's rows support; `None` if no row is free of disturbances.
///
/// Rows whose files have one size, and rows of memory, give points: the cost of one such file. All
/// rows together give a line over calls per MiB, whose slope is the cost of a call. The line is
/// used where there are no points, and in descriptions.
pub fn of(report: &SendReport) -> Option<Plan> {
    /// Send method, whether the source is memory, whether offloads are on.
    type Key = (SendMethod, bool, bool);
    let mut rows: BTreeMap<Key, Vec<(&SendRow, Estimate)>> = BTreeMap::new();
    for row in report.rows.iter().filter(|row| !row.cork && is_undisturbed_and_unpaced(row)) {
        let Some(method) = method_of(row) else { continue };
        let estimate = row.sender_us_per_mib.filter(Estimate::has_interval).and_then(positive);
        let Some(estimate) = estimate else { continue };
        let key = (method, row.workload.starts_with("memory:"), row.offloads == "on");
        rows.entry(key).or_default().push((row, estimate));
    }
    let costs: Vec<Cost> = rows
        .into_iter()
        .map(|((method, is_memory, offloads), rows)| {
            let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
            let line: Vec<(f64, Estimate)> =
                rows.iter().map(|(row, estimate)| (calls_per_mib(row), *estimate)).collect();
            let mut points: Vec<Point> =
                rows.iter().filter_map(|(row, estimate)| point(row, *estimate)).collect();
            points.sort_by_key(|point| point.bytes);
            points.dedup_by_key(|point| point.bytes);
            // A single point determines no other size; the line at least estimates it.
            points = if points.len() > 1 { points } else { Vec::new() };
            let mut cost = cost(method, Condition::new(source, offloads), &line);
            cost.points = points;
            cost
        })
        .collect();
    if costs.is_empty() {
        return None;
    }
    let mut plan = Plan::new(costs);
    plan.kernel.clone_from(&report.host.kernel);
    plan.cpu.clone_from(&report.host.cpu);
    plan.devices = crate::host::devices();
    plan.measured.clone_from(&report.started);
    plan.network = network(report);
    let warnings = report.warnings.iter();
    plan.warnings =
        warnings.map(|warning| format!("{}: {}", warning.kind, warning.detail)).collect();
    Some(plan)
}

/// Whether a row's cost is the cost of its method alone: other programs did not run, and the socket
/// was not paced.
pub(super) fn is_undisturbed_and_unpaced(row: &SendRow) -> bool {
    row.disturbed_percent.is_none() && row.paced.is_none()
}

/// An estimate whose values are above 0. On a busy machine the load that is subtracted may exceed
/// the measured load, and then an end of the interval is below 0. `None` if the median is.
fn positive(estimate: Estimate) -> Option<Estimate> {
    let least = estimate.median * LEAST_PART;
    (estimate.median > 0.0).then(|| Estimate { low: estimate.low.max(least), ..estimate })
}

/// The cost of one file, or one piece of memory, of a row whose pieces all have one size.
fn point(row: &SendRow, estimate: Estimate) -> Option<Point> {
    let bytes = match row.workload.parse().ok()? {
        Workload::Equal { size, .. } | Workload::Memory(size) => size.0,
        Workload::Files { .. } | Workload::File(_) | Workload::PageCache { .. } => return None,
    };
    // Only rows with the method's own call size, since programs use that size.
    let method_chunk = (call_bytes(row.path.parse().ok()?) as u64).min(bytes);
    let mib = bytes as f64 / MIB;
    let us = Spread {
        median: estimate.median * mib,
        low: estimate.low * mib,
        high: estimate.high * mib,
    };
    (row.chunk_bytes == method_chunk).then_some(Point { bytes, us })
}

/// The calls that a row makes per MiB. The last call of a file may be shorter than a chunk.
fn calls_per_mib(row: &SendRow) -> f64 {
    let sizes =
        row.workload.parse::<Workload>().map(|workload| workload.sizes()).unwrap_or_default();
    let calls: u64 = sizes.iter().map(|size| size.div_ceil(row.chunk_bytes)).sum();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    // If the sizes are unknown, all calls count as full ones.
    if mib > 0.0 { calls as f64 / mib } else { MIB / row.chunk_bytes as f64 }
}

/// The row's send method, if it can be chosen: `floor` does not send the source's bytes, and `auto`
/// is itself a choice.
fn method_of(row: &SendRow) -> Option<SendMethod> {
    row.path.parse().ok().filter(|&method| method != SendMethod::Floor)
}

fn cost(method: SendMethod, condition: Condition, points: &[(f64, Estimate)]) -> Cost {
    let ends: [IntervalEnd; 3] =
        [|estimate| estimate.median, |estimate| estimate.low, |estimate| estimate.high];
    let [middle, low, high] = ends.map(|end| {
        line(&points.iter().map(|(calls, estimate)| (*calls, end(*estimate))).collect::<Vec<_>>())
    });
    // A line through the ends of the intervals may cross the line through the medians.
    let spread = |median: f64, low: f64, high: f64| Spread {
        median,
        low: median.min(low).min(high),
        high: median.max(low).max(high),
    };
    let us_per_call = spread(middle.0, low.0, high.0);
    Cost::new(method, condition, us_per_call, spread(middle.1, low.1, high.1))
}

/// The line through points of calls per MiB and µs per MiB with the least relative error. Returns
/// µs per call and µs per MiB, both at least 0.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    // Each point has the weight of one over its square, so that a cheap row counts as much as an
    // expensive one.
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        points.iter().map(|&(calls, us)| of(calls, us) / (us * us).max(f64::MIN_POSITIVE)).sum()
    };
    let (n, x, y) = (sum(&|_, _| 1.0), sum(&|calls, _| calls), sum(&|_, us| us));
    let (xx, xy) = (sum(&|calls, _| calls * calls), sum(&|calls, us| calls * us));
    let determinant = n * xx - x * x;
    let has_one_size = points.windows(2).all(|pair| pair[0].0.total_cmp(&pair[1].0).is_eq());
    let slope = if has_one_size || determinant <= 0.0 {
        0.0
    } else {
        ((n * xy - x * y) / determinant).max(0.0)
    };
    let intercept = (y - slope * x) / n;
    if intercept < 0.0 { ((xy / xx).max(0.0), 0.0) } else { (slope, intercept) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_size_gives_no_cost_of_a_call() {
        let (call, mib) = line(&[(16.0, 400.0), (16.0, 420.0)]);
        assert!(call.abs() < 1e-9 && (400.0..420.0).contains(&mib), "{call} {mib}");
    }

    #[test]
    fn costs_are_never_negative() {
        let (call, mib) = line(&[(256.0, 100.0), (1.0, 500.0)]);
        assert!(call >= 0.0 && mib >= 0.0, "{call} {mib}");
        let (call, mib) = line(&[(256.0, 4000.0), (16.0, 10.0), (1.0, 1.0)]);
        assert!(call > 0.0 && mib >= 0.0, "{call} {mib}");
    }

    proptest! {
        /// The library refuses a plan with a cost that is negative or out of order.
        #[test]
        fn any_rows_give_a_valid_plan(
            rows in prop::collection::vec((0.5f64..300.0, -50.0f64..900.0, 0.0f64..900.0), 1..8),
        ) {
            let points: Vec<(f64, Estimate)> = rows
                .into_iter()
                .filter_map(|(calls, median, width)| {
                    let mut estimate = Estimate::exactly(median);
                    (estimate.low, estimate.high) = (median - width, median + width);
                    Some((calls, positive(estimate)?))
                })
                .collect();
            prop_assume!(!points.is_empty());
            let condition = Condition::new(SourceKind::File, true);
            let cost = cost(SendMethod::ReadWrite, condition, &points);
            for Spread { median, low, high } in [cost.us_per_call, cost.us_per_mib] {
                prop_assert!(0.0 <= low && low <= median && median <= high && high.is_finite());
            }
        }

        #[test]
        fn the_line_through_exact_points_is_found(call in 0.01f64..50.0, mib in 1.0f64..2000.0) {
            let points: Vec<(f64, f64)> =
                [256.0, 64.0, 16.0, 1.0].iter().map(|&calls| (calls, mib + call * calls)).collect();
            let (found_call, found_mib) = line(&points);
            let call_error = (found_call - call).abs();
            prop_assert!(call_error < 1e-6 * call.max(1.0), "{found_call} for {call}");
            prop_assert!((found_mib - mib).abs() < 1e-6 * mib, "{found_mib} for {mib}");
        }
    }
}
