//! From rounds to the rows of a report.

use super::{SendRound, SendRow, SendSeries, Sends, copies};
use crate::matrix::SendCase;
use crate::stats::Figure;
use crate::tested_method::TestedMethod;
use crate::worker::Paced;
use haul::SendMethod;
use haul_lab::Offloads;

/// The row that a series comes to, beside all the others.
pub(super) fn row(series: &SendSeries, all: &[SendSeries], sends: &Sends<'_>) -> SendRow {
    let case = &series.case.case;
    let SendCase { path, condition } = case;
    let copies = copies::copies_of(series);
    let has_receiver = sends.site.has_two_hosts();
    let figure = |of: &dyn Fn(&SendRound) -> f64| series.figure(of);
    let interrupts = |of: fn((f64, f64)) -> f64| {
        series.figure_of_some(|round| round.costs.interrupts_per_mib().map(of))
    };
    SendRow {
        path: path.name().into(),
        chunk_bytes: condition.chunk.0,
        workload: condition.workload.to_string(),
        cork: condition.cork,
        offloads: match condition.offloads {
            Offloads::On => "on".into(),
            Offloads::Off => "off".into(),
        },
        taken: taken(series),
        rounds: series.rounds.len(),
        refused: series.why_none(),
        copied_percent: copies.map(|copies| copies.percent),
        copied_known_by: copies.map(|copies| copies.known_by.into()),
        throughput_bits_per_second: figure(&|round| round.costs.bytes_per_second * 8.0),
        sender_load_percent: figure(&|round| round.costs.sender.load_percent),
        receiver_load_percent: figure(&|round| round.costs.receiver.load_percent)
            .filter(|_| has_receiver),
        sender_us_per_mib: figure(&|round| round.costs.sender_us_per_mib),
        receiver_us_per_mib: figure(&|round| round.costs.receiver_us_per_mib)
            .filter(|_| has_receiver),
        sender_interference_percent: series
            .figure_of_some(|round| round.costs.sender.interference_percent),
        receiver_interference_percent: series
            .figure_of_some(|round| round.costs.receiver.interference_percent)
            .filter(|_| has_receiver),
        rusage_us_per_mib: figure(&|round| round.rusage_us_per_mib),
        syscalls_per_mib: figure(&|round| round.syscalls_per_mib).map(|figure| figure.median),
        sender_us_ratio: ratio(series, all),
        cheapest_us_ratio: cheapest_ratio(series, all),
        sender_interrupts_per_mib: interrupts(|(sender, _)| sender),
        receiver_interrupts_per_mib: interrupts(|(_, receiver)| receiver).filter(|_| has_receiver),
        sender_timer_interrupts_per_mib: series
            .figure_of_some(|round| Some(round.costs.timer_interrupts_per_mib()?.0)),
        acknowledgements_per_mib: figure(&|round| round.acknowledgements_per_mib),
        full_speed_bits_per_second: sends.full_speeds.bits_per_second(case),
        paced: paced(series),
        disturbed_percent: series.disturbed_percent,
    }
}

/// The path that the choice took, or each of several where rounds differ.
fn taken(series: &SendSeries) -> Option<String> {
    if matches!(series.case.case.path, TestedMethod::Method(_)) {
        return None;
    }
    let mut taken: Vec<&str> =
        series.rounds.iter().filter_map(|(_, round)| Some(round.taken?.name())).collect();
    taken.sort_unstable();
    taken.dedup();
    (!taken.is_empty()).then(|| taken.join(", "))
}

/// Timer interrupts of the sending CPU for each MiB, beyond the tick, from which on a socket is paced: paced ones have 2 to
/// 30, others hardly any (docs/findings.md).
const PACED_TIMERS_PER_MIB: f64 = 1.0;

/// Why packets left by timers, where they did.
pub(super) fn paced(series: &SendSeries) -> Option<Paced> {
    let told = series.rounds.iter().filter_map(|(_, round)| round.paced).max();
    let timers = series.figure_of_some(|round| Some(round.costs.timer_interrupts_per_mib()?.0));
    let has_timers = timers.is_some_and(|timers| timers.median > PACED_TIMERS_PER_MIB);
    told.or(has_timers.then_some(Paced::Leftover))
}

/// The rows of one condition that really send something, in ways that a program can choose.
fn candidates<'a>(
    series: &'a SendSeries,
    all: &'a [SendSeries],
) -> impl Iterator<Item = &'a SendSeries> {
    let is_path = |other: &&SendSeries| match other.case.case.path {
        TestedMethod::Method(path) => path != SendMethod::Floor,
        _ => false,
    };
    all.iter()
        .filter(|other| {
            other.case.case.condition == series.case.case.condition && !other.rounds.is_empty()
        })
        .filter(is_path)
}

/// The row's cost over that of the cheapest row under the same conditions, round by round, with an interval that allows for
/// the cheapest having been picked among many: whichever row is the cheapest in truth, all comparisons with it hold together
/// with 95 %, so that it is called dearer than another with 5 % at most (Hsu's multiple comparisons with the best).
fn cheapest_ratio(series: &SendSeries, all: &[SendSeries]) -> Option<Figure> {
    let cost = |row: &SendSeries| row.median(|round| round.costs.sender_us_per_mib);
    let cheapest =
        candidates(series, all).min_by(|one, other| cost(one).total_cmp(&cost(other)))?;
    if std::ptr::eq(cheapest, series) {
        return None;
    }
    let comparisons = candidates(series, all).count().saturating_sub(1);
    series.ratio_among_methods(cheapest, comparisons, |round| round.costs.sender_us_per_mib)
}

/// The row's cost over that of the plain way under the same conditions, round by round.
fn ratio(series: &SendSeries, all: &[SendSeries]) -> Option<Figure> {
    let plain = [SendMethod::ReadWrite, SendMethod::ReadSend]
        .map(TestedMethod::from)
        .into_iter()
        .find_map(|path| {
        all.iter().find(|other| {
            other.case.case.path == path
                && other.case.case.condition == series.case.case.condition
                && !other.rounds.is_empty()
        })
    })?;
    series.ratio_to_method(plain, |round| round.costs.sender_us_per_mib)
}
