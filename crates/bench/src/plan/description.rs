//! Describes a plan in words: its choices, its tests, and the cores that a rate needs.

use super::{ERROR_PERCENT_MAX, misses};
use haul::plan::{Condition, Plan, SourceKind, Spread};
use haul::{Copying, SendMethod};
use haul_units::MIB;
use haul_units::{Rate, Size};
use std::fmt::Write;

/// The plan's choices: the method for each range of sizes, and its expected cost.
pub fn describe(plan: &Plan) -> String {
    let cards = if plan.devices.is_empty() {
        String::new()
    } else {
        format!(", {}", plan.devices.join(", "))
    };
    let mut text = format!("Measured on Linux {}, {}{cards}\n", plan.kernel, plan.cpu);
    for (source, name) in [(SourceKind::File, "a file"), (SourceKind::Memory, "memory")] {
        for offloads in [true, false] {
            let condition = Condition::new(source, offloads);
            for (sizes, method) in choices(plan, condition) {
                let state = if offloads { "on" } else { "off" };
                let _ = writeln!(
                    text,
                    "{name}, offloads {state}, {sizes}: {}; {}",
                    expectation(plan, condition, method),
                    confidence(plan, condition, method)
                );
            }
        }
    }
    text.push_str("zerocopy is never chosen, only used if a program selects it.\n");
    text
}

/// The methods that are chosen from the smallest piece to the largest, each with its range of
/// sizes.
fn choices(plan: &Plan, condition: Condition) -> Vec<(String, SendMethod)> {
    let mut runs: Vec<(u64, SendMethod)> = Vec::new();
    for bytes in (10..=24).map(|power| 1u64 << power) {
        let chosen = plan.choose(condition, bytes, |_| true);
        let is_new = |method: &SendMethod| runs.last().is_none_or(|(_, last)| last != method);
        if let Some(method) = chosen.filter(is_new) {
            runs.push((bytes, method));
        }
    }
    let ends = runs.iter().skip(1).map(|(bytes, _)| Some(Size(*bytes))).chain([None]);
    let sizes =
        runs.iter().zip(ends).enumerate().map(|(index, ((from, _), end))| match (index, end) {
            (0, None) => "of any size".into(),
            (0, Some(end)) => format!("under {end}"),
            (_, None) => format!("from {}", Size(*from)),
            (_, Some(end)) => format!("from {} to {end}", Size(*from)),
        });
    sizes.zip(runs.iter().map(|(_, method)| *method)).collect()
}

/// The certainty of a choice: the cost of the next method, and whether their intervals overlap.
fn confidence(plan: &Plan, condition: Condition, method: SendMethod) -> String {
    let ranking = plan.ranking(condition);
    let Some((_, own)) = ranking.iter().find(|(other, _)| *other == method) else {
        return "alone".into();
    };
    let next = ranking
        .iter()
        .filter(|(other, _)| *other != method)
        .min_by(|(_, one), (_, other)| one.median.total_cmp(&other.median));
    let Some((next, cost)) = next else { return "nothing else was measured".into() };
    let percent = 100.0 * (cost.median / own.median - 1.0);
    if percent >= 0.0 && cost.low > own.high {
        format!("in long transfers {next} costs {percent:.0} % more")
    } else if percent >= 0.0 {
        format!("in long transfers no difference from {next} was shown")
    } else {
        format!("in long transfers {next} costs {:.0} % less", -percent)
    }
}

fn expectation(plan: &Plan, condition: Condition, method: SendMethod) -> String {
    let copies = if method.copying() == Copying::Always { "copies" } else { "moves pages" };
    let Some(cost) =
        plan.costs.iter().find(|cost| cost.path == method && cost.condition == condition)
    else {
        return method.to_string();
    };
    let Spread { median, low, high } = cost.us_per_mib;
    let call = if cost.us_per_call.median > 0.0 {
        format!("{:.1} µs per call and ", cost.us_per_call.median)
    } else {
        // Only one chunk size was measured, or the rows vary too much to fit a line.
        "the cost of a call is unknown; ".into()
    };
    format!("{method} ({copies}), {call}{median:.0} µs per MiB ({low:.0} to {high:.0})")
}

/// The results of the plan's tests.
pub fn describe_tests(plan: &Plan) -> String {
    let (missed, all) = misses(plan);
    let mut text = format!(
        "Put to the test with sizes that it was not made from, in a later measurement: {} of {all} \
         within {ERROR_PERCENT_MAX:.0} %.\n",
        all - missed
    );
    for test in &plan.tests {
        let Spread { median, low, high } = test.measured_us_per_mib;
        let _ = writeln!(
            text,
            "{}: {:.0} µs per MiB predicted, {median:.0} measured ({low:.0} to {high:.0}): \
             {:+.0} %",
            test.workload,
            test.predicted_us_per_mib,
            test.error_percent()
        );
    }
    text
}

/// The sending host's cores that a rate needs, for each method.
pub fn describe_rate(plan: &Plan, rate: Rate) -> String {
    let mut text = format!(
        "Cores of the sending host for {rate} in long transfers, measured with one connection that \
         the receive window holds back. A sender that is slower than its receiver pays 1.5 to 3 \
         times as much:\n"
    );
    for (source, name) in [(SourceKind::File, "files"), (SourceKind::Memory, "memory")] {
        for (method, Spread { median, low, high }) in plan.ranking(Condition::new(source, true)) {
            let cores = |us_per_mib: f64| rate.0 as f64 / 8.0 / MIB * us_per_mib / 1e6;
            let _ = writeln!(
                text,
                "{name}, {method}: {:.2} cores ({:.2} to {:.2})",
                cores(median),
                cores(low),
                cores(high)
            );
        }
    }
    text
}
