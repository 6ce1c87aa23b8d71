//! A plan beside what its rows cost: what it predicts of a workload, and where it was measured on another network.

use super::{Kind, SendReport, SendRow, Warning};
use crate::MIB;
use crate::congestion::paces;
use crate::quantity::Rate;
use crate::regime::Reading;
use crate::rounds::MOVED;
use crate::stats::Figure;
use crate::workload::Workload;
use haul::Plan;
use haul::plan::{Condition, Network, SourceKind, Spread, Test};

/// The plan's prediction for a row's workload beside what the row measured; `None` where the plan has no cost for it, or
/// nothing was measured.
pub(crate) fn test(plan: &Plan, row: &SendRow) -> Option<Test> {
    let measured = row.sender_us_per_mib.filter(|figure| figure.median > 0.0)?;
    let predicted_us_per_mib = predict(plan, &row.workload.parse().ok()?, row.offloads == "on")?;
    let Figure { median, low, high, .. } = measured;
    let measured_us_per_mib = Spread { median, low, high };
    Some(Test { workload: row.workload.clone(), predicted_us_per_mib, measured_us_per_mib })
}

/// The CPU time in µs that a plan predicts for a MiB of a workload; `None` where the plan has no cost for it, or the sizes are
/// not known.
fn predict(plan: &Plan, workload: &Workload, offloads: bool) -> Option<f64> {
    let source =
        if matches!(workload, Workload::Memory(_)) { SourceKind::Memory } else { SourceKind::File };
    let sizes = workload.sizes();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    let predicted = plan.predict(Condition { source, offloads }, sizes).filter(|_| mib > 0.0)?;
    Some(predicted.median / mib)
}

/// The network that a report was measured on; `None` where it does not tell.
pub(crate) fn network(report: &SendReport) -> Option<Network> {
    let lab = report.lab.as_ref()?;
    Some(Network {
        congestion: lab.congestion.clone(),
        mtu: lab.mtu,
        rate_bits_per_second: lab.rate_bits_per_second,
        cache_line_round_trip_ns: lab.cache_line_round_trip_ns.map(|figure| figure.median),
        reading: lab
            .reading
            .map(|reading| if reading == Reading::Held { "held" } else { "free" }.into()),
    })
}

/// Whether two round trips of a cache line in ns are of CPUs at one distance, as far as they are known.
pub(crate) fn is_same_distance(one: Option<f64>, other: Option<f64>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return true };
    one < MOVED * other && other < MOVED * one
}

/// A sentence for each measured row that a plan has chosen for: the prediction and the measurement.
pub(super) fn sentences(plan: &Plan, report: &SendReport) -> Vec<String> {
    let planned = report.rows.iter().filter(|row| row.path == "planned" && !row.cork);
    let sentence = |row: &SendRow| {
        let test = test(plan, row)?;
        Some(format!(
            "The plan predicts {:.0} µs of the sending host's CPU per MiB of {}, offloads {}; {:.0} ({}) were measured: the \
             prediction is {:+.0} % off.",
            test.predicted_us_per_mib,
            row.workload,
            row.offloads,
            test.measured_us_per_mib.median,
            row.sender_us_per_mib?.interval(0),
            test.error_percent()
        ))
    };
    planned.filter_map(sentence).collect()
}

/// A warning where the plan was measured under other conditions than the report.
pub(super) fn warning(plan: &Plan, report: &SendReport) -> Option<Warning> {
    let differences = differences(plan.network.as_ref()?, &network(report)?);
    (!differences.is_empty()).then(|| {
        let words =
            format!("the plan was measured under other conditions ({})", differences.join(", "));
        Warning::new(Kind::Plan, format!("{words}: its predictions may not apply here"))
    })
}

/// What differs between two networks and changes what paths cost.
fn differences(there: &Network, here: &Network) -> Vec<String> {
    let rate = |network: &Network| {
        network.rate_bits_per_second.map_or("no rate".into(), |rate| Rate(rate).to_string())
    };
    let ns = |network: &Network| network.cache_line_round_trip_ns.unwrap_or_default();
    let mut differences = Vec::new();
    if there.mtu != here.mtu {
        differences.push(format!("MTU {} there, {} here", there.mtu, here.mtu));
    }
    if there.rate_bits_per_second != here.rate_bits_per_second {
        differences.push(format!("{} there, {} here", rate(there), rate(here)));
    }
    if paces(&there.congestion) != paces(&here.congestion) {
        differences.push(format!("{} there, {} here", there.congestion, here.congestion));
    }
    if let (Some(there), Some(here)) = (&there.reading, &here.reading)
        && there != here
    {
        differences.push(format!("the receiver's reading {there} there, {here} here"));
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
            reading: Some("held".into()),
        }
    }

    #[test]
    fn only_what_changes_costs_is_a_difference() {
        let like = Network {
            congestion: "reno".into(),
            cache_line_round_trip_ns: Some(66.0),
            ..network()
        };
        assert!(differences(&network(), &like).is_empty());
        let unlike = Network {
            congestion: "bbr".into(),
            mtu: 1500,
            rate_bits_per_second: Some(4_000_000_000),
            cache_line_round_trip_ns: Some(300.0),
            reading: Some("free".into()),
        };
        let words = differences(&network(), &unlike).join("; ");
        for part in [
            "MTU 9000 there, 1500 here",
            "no rate there, 4gbit here",
            "cubic there, bbr here",
            "300 ns here",
        ] {
            assert!(words.contains(part), "{part} in {words}");
        }
        let unknown = Network { cache_line_round_trip_ns: None, reading: None, ..network() };
        assert!(differences(&network(), &unknown).is_empty());
    }

    /// The sizes in a file that is only named are not known.
    #[test]
    fn nothing_is_predicted_of_unknown_sizes() {
        let plan = Plan::builtin();
        assert_eq!(predict(plan, &"file:/etc/passwd".parse().unwrap(), true), None);
        assert!(predict(plan, &"3=30KB".parse().unwrap(), true).is_some_and(|us| us > 0.0));
    }
}
