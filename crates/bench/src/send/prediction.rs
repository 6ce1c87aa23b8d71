//! Compares a plan with a report: its predictions with the measured costs, and the two
//! networks.

use super::{Kind, SendReport, SendRow, Warning};
use crate::congestion::paces;
use crate::regime::Reading;
use crate::rounds::MOVED_FACTOR_MIN;
use crate::stats::Estimate;
use haul::Plan;
use haul::plan::{Condition, Network, PlanTest, SourceKind, Spread};
use haul_units::MIB;
use haul_units::Rate;
use haul_workers::workload::Workload;

/// The plan's prediction for a row's workload, with the measured cost. `None` if the plan does not
/// have a cost for it, or if nothing was measured.
pub(crate) fn test(plan: &Plan, row: &SendRow) -> Option<PlanTest> {
    let measured = row.sender_us_per_mib.filter(|estimate| estimate.median > 0.0)?;
    let predicted_us_per_mib = predict(plan, &row.workload.parse().ok()?, row.offloads == "on")?;
    let Estimate { median, low, high, .. } = measured;
    let measured_us_per_mib = Spread { median, low, high };
    Some(PlanTest::new(&row.workload, predicted_us_per_mib, measured_us_per_mib))
}

/// The predicted CPU time for a workload, in µs per MiB. `None` if the plan does not have a cost
/// for it, or if its sizes are unknown.
fn predict(plan: &Plan, workload: &Workload, offloads: bool) -> Option<f64> {
    let source =
        if matches!(workload, Workload::Memory(_)) { SourceKind::Memory } else { SourceKind::File };
    let sizes = workload.sizes();
    let mib = sizes.iter().sum::<u64>() as f64 / MIB;
    let predicted = plan.predict(Condition::new(source, offloads), sizes).filter(|_| mib > 0.0)?;
    Some(predicted.median / mib)
}

/// The network that a report was measured on; `None` if the report does not record it.
pub(crate) fn network(report: &SendReport) -> Option<Network> {
    let lab = report.lab.as_ref()?;
    let mut network = Network::new(&lab.congestion, lab.mtu);
    network.rate_bits_per_second = lab.rate_bits_per_second;
    network.cache_line_round_trip_ns = lab.cache_line_round_trip_ns.map(|estimate| estimate.median);
    network.reading =
        lab.reading.map(|reading| if reading == Reading::Held { "held" } else { "free" }.into());
    Some(network)
}

/// Whether two cache-line round trips, in ns, belong to the same distance between CPUs. Also true
/// if either is unknown.
pub(crate) fn is_same_cpu_distance(one: Option<f64>, other: Option<f64>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return true };
    one < MOVED_FACTOR_MIN * other && other < MOVED_FACTOR_MIN * one
}

/// The prediction and the measurement for each row that the plan chose the method of, one
/// sentence each.
pub(super) fn sentences(plan: &Plan, report: &SendReport) -> Vec<String> {
    let planned = report.rows.iter().filter(|row| row.path == "planned" && !row.cork);
    let sentence = |row: &SendRow| {
        let test = test(plan, row)?;
        Some(format!(
            "The plan predicts {:.0} µs of the sending host's CPU per MiB of {}, offloads {}; \
             {:.0} ({}) were measured: the prediction is {:+.0} % off.",
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

/// A warning, if the plan was measured under other conditions than the report.
pub(super) fn warning(plan: &Plan, report: &SendReport) -> Option<Warning> {
    let differences = differences(plan.network.as_ref()?, &network(report)?);
    (!differences.is_empty()).then(|| {
        let detail =
            format!("the plan was measured under other conditions ({})", differences.join(", "));
        Warning::new(Kind::Plan, format!("{detail}: its predictions may not apply here"))
    })
}

/// The differences between two networks that change what methods cost.
fn differences(plan: &Network, report: &Network) -> Vec<String> {
    let rate = |network: &Network| {
        network.rate_bits_per_second.map_or("no rate".into(), |rate| Rate(rate).to_string())
    };
    let ns = |network: &Network| network.cache_line_round_trip_ns.unwrap_or_default();
    let mut differences = Vec::new();
    if plan.mtu != report.mtu {
        differences.push(format!("MTU {} in the plan, {} here", plan.mtu, report.mtu));
    }
    if plan.rate_bits_per_second != report.rate_bits_per_second {
        differences.push(format!("{} in the plan, {} here", rate(plan), rate(report)));
    }
    if paces(&plan.congestion) != paces(&report.congestion) {
        differences.push(format!("{} in the plan, {} here", plan.congestion, report.congestion));
    }
    if let (Some(planned), Some(measured)) = (&plan.reading, &report.reading)
        && planned != measured
    {
        differences.push(format!("receiver's rate {planned} in the plan, {measured} here"));
    }
    if !is_same_cpu_distance(plan.cache_line_round_trip_ns, report.cache_line_round_trip_ns) {
        let (planned, measured) = (ns(plan), ns(report));
        differences.push(format!("CPUs {planned:.0} ns apart in the plan, {measured:.0} ns here"));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        let mut network = Network::new("cubic", 9000);
        network.cache_line_round_trip_ns = Some(60.0);
        network.reading = Some("held".into());
        network
    }

    #[test]
    fn only_conditions_that_change_costs_are_differences() {
        let mut like = network();
        like.congestion = "reno".into();
        like.cache_line_round_trip_ns = Some(66.0);
        assert!(differences(&network(), &like).is_empty());
        let mut unlike = Network::new("bbr", 1500);
        unlike.rate_bits_per_second = Some(4_000_000_000);
        unlike.cache_line_round_trip_ns = Some(300.0);
        unlike.reading = Some("free".into());
        let text = differences(&network(), &unlike).join("; ");
        for part in [
            "MTU 9000 in the plan, 1500 here",
            "no rate in the plan, 4gbit here",
            "cubic in the plan, bbr here",
            "300 ns here",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let unknown = Network::new("cubic", 9000);
        assert!(differences(&network(), &unknown).is_empty());
    }

    /// A workload of a named file does not contain the file's size.
    #[test]
    fn unknown_sizes_have_no_prediction() {
        let plan = Plan::builtin();
        assert_eq!(predict(plan, &"file:/etc/passwd".parse().unwrap(), true), None);
        assert!(predict(plan, &"3=30KB".parse().unwrap(), true).is_some_and(|us| us > 0.0));
    }
}
