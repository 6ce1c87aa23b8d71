//! From a report of `send` to a plan for programs: what each path costs for a call, and for a MiB.

use crate::MIB;
use crate::quantity::Size;
use crate::send::{Report, Row};
use crate::stats::Figure;
use haul::plan::{Condition, Cost, Plan, SCHEMA, SourceKind, Spread};
use haul::{Copying, Path};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Which end of an interval a line is fitted to.
type End = fn(Figure) -> f64;

/// The plan that a report's rows support; `None` where no row was measured.
///
/// A row says what a MiB costs at one chunk size. Rows of one path at several sizes give a line over calls per
/// MiB: its slope is the cost of a call. With a single size the calls' cost cannot be told apart and stays
/// within the MiB's.
pub fn of(report: &Report) -> Option<Plan> {
    let mut points: BTreeMap<(Path, bool, bool), Vec<(f64, Figure)>> = BTreeMap::new();
    for row in report.rows.iter().filter(|row| !row.cork) {
        let (Some(path), Some(figure)) = (path_of(row), row.sender_us_per_mib) else { continue };
        let key = (path, row.workload.starts_with("memory:"), row.offloads == "on");
        points.entry(key).or_default().push((MIB / row.chunk_bytes as f64, figure));
    }
    let costs: Vec<Cost> = points
        .into_iter()
        .map(|((path, is_memory, offloads), points)| {
            let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
            cost(path, Condition { source, offloads }, &points)
        })
        .collect();
    (!costs.is_empty()).then(|| Plan {
        schema: SCHEMA.into(),
        kernel: report.host.kernel.clone(),
        cpu: report.host.cpu.clone(),
        costs,
    })
}

/// The row's path, if it is one to choose: `floor` sends nothing, and `auto` is the choice.
fn path_of(row: &Row) -> Option<Path> {
    row.path.parse().ok().filter(|&path| path != Path::Floor)
}

fn cost(path: Path, condition: Condition, points: &[(f64, Figure)]) -> Cost {
    let ends: [End; 3] = [|figure| figure.median, |figure| figure.low, |figure| figure.high];
    let [middle, low, high] = ends
        .map(|end| line(&points.iter().map(|(calls, figure)| (*calls, end(*figure))).collect::<Vec<_>>()));
    // Lines through the ends of intervals may cross the one through the middles.
    let spread = |median: f64, low: f64, high: f64| Spread {
        median,
        low: median.min(low).min(high),
        high: median.max(low).max(high),
    };
    Cost {
        path,
        condition,
        us_per_call: spread(middle.0, low.0, high.0),
        us_per_mib: spread(middle.1, low.1, high.1),
    }
}

/// The line through points of calls per MiB and µs per MiB that is nearest in proportion; as µs per call and
/// µs per MiB, neither below 0.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    // Each point weighs as one over its square, so that a cheap row counts as much as a dear one.
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        points.iter().map(|&(calls, us)| of(calls, us) / (us * us).max(f64::MIN_POSITIVE)).sum()
    };
    let (n, x, y) = (sum(&|_, _| 1.0), sum(&|calls, _| calls), sum(&|_, us| us));
    let (xx, xy) = (sum(&|calls, _| calls * calls), sum(&|calls, us| calls * us));
    let determinant = n * xx - x * x;
    let has_one_size = points.windows(2).all(|pair| pair[0].0.total_cmp(&pair[1].0).is_eq());
    let slope =
        if has_one_size || determinant <= 0.0 { 0.0 } else { ((n * xy - x * y) / determinant).max(0.0) };
    let rest = (y - slope * x) / n;
    if rest < 0.0 { (xy / xx, 0.0) } else { (slope, rest) }
}

/// What the plan says, for people: which path for which size, and what it is expected to cost.
pub fn describe(plan: &Plan) -> String {
    let mut text = format!("Measured on Linux {}, {}\n", plan.kernel, plan.cpu);
    for (source, name) in [(SourceKind::File, "a file"), (SourceKind::Memory, "memory")] {
        for offloads in [true, false] {
            let condition = Condition { source, offloads };
            for (sizes, path) in choices(plan, condition) {
                let state = if offloads { "on" } else { "off" };
                let _ = writeln!(
                    text,
                    "{name}, offloads {state}, {sizes}: {}",
                    expectation(plan, condition, path)
                );
            }
        }
    }
    text.push_str("zerocopy and the io_uring paths are never chosen, only taken by hand.\n");
    text
}

/// The paths that are chosen from the smallest piece to the largest, each with the sizes it is chosen for.
fn choices(plan: &Plan, condition: Condition) -> Vec<(String, Path)> {
    let mut runs: Vec<(u64, Path)> = Vec::new();
    for bytes in (10..=24).map(|power| 1u64 << power) {
        let chosen = plan.choose(condition, bytes, |_| true);
        if let Some(path) = chosen.filter(|path| runs.last().is_none_or(|(_, last)| last != path)) {
            runs.push((bytes, path));
        }
    }
    let ends = runs.iter().skip(1).map(|(bytes, _)| Some(Size(*bytes))).chain([None]);
    let sizes = runs.iter().zip(ends).enumerate().map(|(index, ((from, _), end))| match (index, end) {
        (0, None) => "of any size".into(),
        (0, Some(end)) => format!("under {end}"),
        (_, None) => format!("from {}", Size(*from)),
        (_, Some(end)) => format!("from {} to {end}", Size(*from)),
    });
    sizes.zip(runs.iter().map(|(_, path)| *path)).collect()
}

fn expectation(plan: &Plan, condition: Condition, path: Path) -> String {
    let copies = if path.copying() == Copying::Always { "copies" } else { "moves pages" };
    let Some(cost) = plan.costs.iter().find(|cost| cost.path == path && cost.condition == condition) else {
        return path.to_string();
    };
    let Spread { median, low, high } = cost.us_per_mib;
    let call = if cost.us_per_call.median > 0.0 {
        format!("{:.1} µs a call and ", cost.us_per_call.median)
    } else {
        // One chunk size, or rows too unsteady for a line.
        "a call's cost is not known; ".into()
    };
    format!("{path} ({copies}), {call}{median:.0} µs a MiB ({low:.0} to {high:.0})")
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
    fn nothing_costs_less_than_nothing() {
        let (call, mib) = line(&[(256.0, 100.0), (1.0, 500.0)]);
        assert!(call >= 0.0 && mib >= 0.0, "{call} {mib}");
        let (call, mib) = line(&[(256.0, 4000.0), (16.0, 10.0), (1.0, 1.0)]);
        assert!(call > 0.0 && mib >= 0.0, "{call} {mib}");
    }

    proptest! {
        #[test]
        fn the_line_that_made_the_points_is_found(call in 0.01f64..50.0, mib in 1.0f64..2000.0) {
            let points: Vec<(f64, f64)> =
                [256.0, 64.0, 16.0, 1.0].iter().map(|&calls| (calls, mib + call * calls)).collect();
            let (found_call, found_mib) = line(&points);
            prop_assert!((found_call - call).abs() < 1e-6 * call.max(1.0), "{found_call} for {call}");
            prop_assert!((found_mib - mib).abs() < 1e-6 * mib, "{found_mib} for {mib}");
        }
    }
}
