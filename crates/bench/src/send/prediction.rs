//! A plan beside what its rows cost: what it predicts of a workload, and where it was measured on another network.

use super::{Kind, Report, Warning};
use crate::MIB;
use crate::workload::Workload;
use haul::Plan;
use haul::plan::{Condition, Network, SourceKind};

/// A cache line's round trip that differs by this factor is of CPUs that were moved.
const DISTANCE_FACTOR: f64 = 2.0;

/// The CPU time in µs that a plan predicts for a MiB of a workload; `None` where the plan has no cost for it.
pub(crate) fn predict(plan: &Plan, workload: &Workload, offloads: bool) -> Option<f64> {
    let source = if matches!(workload, Workload::Memory(_)) { SourceKind::Memory } else { SourceKind::File };
    let sizes = workload.sizes();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    Some(plan.predict(Condition { source, offloads }, sizes)?.median / mib)
}

/// Whether two round trips of a cache line in ns are of CPUs at one distance, as far as they are known.
pub(crate) fn is_same_distance(one: Option<f64>, other: Option<f64>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return true };
    one < DISTANCE_FACTOR * other && other < DISTANCE_FACTOR * one
}

/// A sentence for each measured row that a plan has chosen for: the prediction and the measurement.
pub(super) fn sentences(plan: &Plan, report: &Report) -> Vec<String> {
    let planned = report.rows.iter().filter(|row| row.path == "planned" && !row.cork);
    planned
        .filter_map(|row| {
            let measured = row.sender_us_per_mib?;
            let predicted = predict(plan, &row.workload.parse().ok()?, row.offloads == "on")?;
            Some(format!(
                "The plan predicts {predicted:.0} µs of the sending host's CPU per MiB of {}; measured were {:.0} ({}): {:+.0} %.",
                row.workload,
                measured.median,
                measured.interval(0),
                100.0 * (predicted / measured.median - 1.0)
            ))
        })
        .collect()
}

/// A warning where the plan was measured on another network than the report.
pub(super) fn warning(plan: &Plan, report: &Report) -> Option<Warning> {
    let (there, lab) = (plan.network.as_ref()?, report.lab.as_ref()?);
    let here = Network {
        congestion: lab.congestion.clone(),
        mtu: lab.mtu,
        rate_bits_per_second: lab.rate_bits_per_second,
        cache_line_round_trip_ns: lab.cache_line_round_trip_ns.map(|figure| figure.median),
    };
    let differences = differences(there, &here);
    (!differences.is_empty()).then(|| {
        let words = format!("the plan was measured on another network ({})", differences.join(", "));
        Warning::new(Kind::Plan, format!("{words}: its predictions are not of this one"))
    })
}

/// What differs between two networks and changes what paths cost.
fn differences(there: &Network, here: &Network) -> Vec<String> {
    let rate = |network: &Network| {
        network
            .rate_bits_per_second
            .map_or("no rate".into(), |rate| format!("{:.1} Gbit/s", rate as f64 / 1e9))
    };
    let paces = |network: &Network| network.congestion.starts_with("bbr");
    let ns = |network: &Network| network.cache_line_round_trip_ns.unwrap_or_default();
    let mut differences = Vec::new();
    if there.mtu != here.mtu {
        differences.push(format!("MTU {} there, {} here", there.mtu, here.mtu));
    }
    if there.rate_bits_per_second != here.rate_bits_per_second {
        differences.push(format!("{} there, {} here", rate(there), rate(here)));
    }
    if paces(there) != paces(here) {
        differences.push(format!("{} there, {} here", there.congestion, here.congestion));
    }
    if !is_same_distance(there.cache_line_round_trip_ns, here.cache_line_round_trip_ns) {
        differences.push(format!("CPUs {:.0} ns apart there, {:.0} ns here", ns(there), ns(here)));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        Network {
            congestion: "cubic".into(),
            mtu: 9000,
            rate_bits_per_second: None,
            cache_line_round_trip_ns: Some(60.0),
        }
    }

    #[test]
    fn only_what_changes_costs_is_a_difference() {
        let like = Network { congestion: "reno".into(), cache_line_round_trip_ns: Some(66.0), ..network() };
        assert!(differences(&network(), &like).is_empty());
        let unlike = Network {
            congestion: "bbr".into(),
            mtu: 1500,
            rate_bits_per_second: Some(4_000_000_000),
            cache_line_round_trip_ns: Some(300.0),
        };
        let words = differences(&network(), &unlike).join("; ");
        for part in [
            "MTU 9000 there, 1500 here",
            "no rate there, 4.0 Gbit/s here",
            "cubic there, bbr here",
            "300 ns here",
        ] {
            assert!(words.contains(part), "{part} in {words}");
        }
        let unknown = Network { cache_line_round_trip_ns: None, ..network() };
        assert!(differences(&network(), &unknown).is_empty());
    }
}
