//! Converts the measured rounds into the rows of a report.

use super::{SendExperiment, SendRound, SendRow, SendSeries, copies};
use crate::matrix::SendCase;
use crate::stats::Estimate;
use haul::SendMethod;
use haul_lab::Offloads;
use haul_workers::tested_method::TestedMethod;
use haul_workers::worker::Paced;

/// The row of a series; `all` holds the series that it is compared with.
pub(super) fn row(
    series: &SendSeries,
    all: &[SendSeries],
    experiment: &SendExperiment<'_>,
) -> SendRow {
    let case = &series.case.case;
    let SendCase { method, condition } = case;
    let copies = copies::copied_share(series);
    let has_receiver = experiment.topology.has_two_hosts();
    let estimate = |of: &dyn Fn(&SendRound) -> f64| series.estimate(of);
    let interrupts = |of: fn((f64, f64)) -> f64| {
        series.estimate_of_some(|round| round.costs.interrupts_per_mib().map(of))
    };
    SendRow {
        path: method.name().into(),
        chunk_bytes: condition.chunk.0,
        workload: condition.workload.to_string(),
        cork: condition.cork,
        offloads: match condition.offloads {
            Offloads::On => "on".into(),
            Offloads::Off => "off".into(),
        },
        buffer_bytes: condition.buffers.map(|size| size.0),
        taken: methods_chosen_by_library(series),
        rounds: series.rounds.len(),
        refused: series.failure_reason(),
        copied_percent: copies.map(|copies| copies.percent),
        copied_known_by: copies.map(|copies| copies.known_by.into()),
        throughput_bits_per_second: estimate(&|round| round.costs.bytes_per_second * 8.0),
        sender_load_percent: estimate(&|round| round.costs.sender.load_percent),
        receiver_load_percent: estimate(&|round| round.costs.receiver.load_percent)
            .filter(|_| has_receiver),
        sender_us_per_mib: estimate(&|round| round.costs.sender_us_per_mib),
        receiver_us_per_mib: estimate(&|round| round.costs.receiver_us_per_mib)
            .filter(|_| has_receiver),
        sender_interference_percent: series
            .estimate_of_some(|round| round.costs.sender.interference_percent),
        receiver_interference_percent: series
            .estimate_of_some(|round| round.costs.receiver.interference_percent)
            .filter(|_| has_receiver),
        rusage_us_per_mib: estimate(&|round| round.rusage_us_per_mib),
        syscalls_per_mib: estimate(&|round| round.syscalls_per_mib).map(|estimate| estimate.median),
        sender_us_ratio: ratio_to_plain(series, all),
        cheapest_us_ratio: ratio_to_cheapest(series, all),
        sender_interrupts_per_mib: interrupts(|(sender, _)| sender),
        receiver_interrupts_per_mib: interrupts(|(_, receiver)| receiver).filter(|_| has_receiver),
        sender_timer_interrupts_per_mib: series
            .estimate_of_some(|round| Some(round.costs.timer_interrupts_per_mib()?.0)),
        acknowledgements_per_mib: estimate(&|round| round.acknowledgements_per_mib),
        full_speed_bits_per_second: experiment.full_speeds.bits_per_second(case),
        paced: reason_for_pacing(series),
        disturbed_percent: series.disturbed_percent,
        round_costs: series.round_costs(
            |round| round.costs.sender_us_per_mib,
            |round| has_receiver.then_some(round.costs.receiver_us_per_mib),
        ),
    }
}

/// The method that the library chose; several, if rounds differ.
fn methods_chosen_by_library(series: &SendSeries) -> Option<String> {
    if matches!(series.case.case.method, TestedMethod::Method(_)) {
        return None;
    }
    let mut names: Vec<&str> =
        series.rounds.iter().filter_map(|(_, round)| Some(round.chosen_method?.name())).collect();
    names.sort_unstable();
    names.dedup();
    (!names.is_empty()).then(|| names.join(", "))
}

/// Timer interrupts of the sending CPU per MiB, beyond the tick, above which a socket counts as
/// paced. Paced sockets have 2 to 30, others hardly any (docs/measurements/congestion.md).
const PACED_TIMERS_PER_MIB_MIN: f64 = 1.0;

/// The reason why timers sent the packets; `None` if the socket was not paced.
pub(super) fn reason_for_pacing(series: &SendSeries) -> Option<Paced> {
    let reported = series.rounds.iter().filter_map(|(_, round)| round.paced).max();
    let timers = series.estimate_of_some(|round| Some(round.costs.timer_interrupts_per_mib()?.0));
    let has_timers = timers.is_some_and(|timers| timers.median > PACED_TIMERS_PER_MIB_MIN);
    reported.or(has_timers.then_some(Paced::Leftover))
}

/// The methods that the library chooses from, in the order of preference; the baselines included.
pub(super) fn preferred_methods() -> impl Iterator<Item = SendMethod> {
    haul::plan::candidates().iter().copied()
}

/// The rows of the same condition whose method the library may choose.
fn comparable_rows<'a>(
    series: &'a SendSeries,
    all: &'a [SendSeries],
) -> impl Iterator<Item = &'a SendSeries> {
    let is_selectable = |other: &&SendSeries| match other.case.case.method {
        TestedMethod::Method(method) => preferred_methods().any(|preferred| preferred == method),
        _ => false,
    };
    all.iter()
        .filter(|other| {
            other.case.case.condition == series.case.case.condition && !other.rounds.is_empty()
        })
        .filter(is_selectable)
}

/// The row's cost divided by the cost of the cheapest row under the same conditions, round by
/// round. The interval accounts for the selection of the cheapest row among several (Hsu's multiple
/// comparisons with the best). Whichever row is truly the cheapest, all comparisons with it hold
/// jointly with 95 %. So the probability that a row is wrongly called more expensive is at most 5
/// %.
fn ratio_to_cheapest(series: &SendSeries, all: &[SendSeries]) -> Option<Estimate> {
    let cost = |row: &SendSeries| row.median(|round| round.costs.sender_us_per_mib);
    let cheapest =
        comparable_rows(series, all).min_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    if std::ptr::eq(cheapest, series) {
        return None;
    }
    let comparisons = comparable_rows(series, all).count().saturating_sub(1);
    series.ratio_among_methods(cheapest, comparisons, |round| round.costs.sender_us_per_mib)
}

/// The row's cost divided by the cost of `read+write`, or else of `read+send`, under the same
/// conditions, round by round.
fn ratio_to_plain(series: &SendSeries, all: &[SendSeries]) -> Option<Estimate> {
    let plain = [SendMethod::ReadWrite, SendMethod::ReadSend]
        .map(TestedMethod::from)
        .into_iter()
        .find_map(|method| {
        all.iter().find(|other| {
            other.case.case.method == method
                && other.case.case.condition == series.case.case.condition
                && !other.rounds.is_empty()
        })
    })?;
    series.ratio_to_method(plain, |round| round.costs.sender_us_per_mib)
}
