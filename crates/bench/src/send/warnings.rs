//! What in a run of `send` deserves a warning, beyond what does in any.

use super::copies::copies_of;
use super::{Kind, SendSeries, WINDOW_LIMITED_MIN, Warning, rows};
use crate::matrix::SendCase;
use crate::quantity::Rate;
use crate::regime::Reading;
use crate::report::Observer;
use crate::rounds::{LOW_LOAD_PERCENT, list};
use crate::worker::Paced;
use haul::Copying;
use std::collections::BTreeMap;

/// A host that is busier than this is what bounds the throughput.
const BUSY_PERCENT: f64 = 85.0;
/// The share of the asked-for rate that counts as held.
const RATE_HELD: f64 = 0.95;
/// `getrusage` may miss this share of the sender's cost before it is worth a word.
const UNCHARGED: f64 = 0.15;
/// The meter may change the throughput by this share.
const OBSERVER: f64 = 0.03;

/// What the figures say about themselves: one warning of a kind for all the rows it concerns, naming them.
pub(super) fn of(
    rows: &[SendSeries],
    rate: Option<Rate>,
    reading: Reading,
    observer: Option<&Observer>,
) -> Vec<Warning> {
    let mut concerned: BTreeMap<Kind, Vec<String>> = BTreeMap::new();
    for row in rows.iter().filter(|row| !row.rounds.is_empty()) {
        for kind in concerns(row, rate, reading) {
            concerned.entry(kind).or_default().push(name(&row.case.case));
        }
    }
    let mut warnings = Vec::new();
    for (kind, rows) in concerned {
        let what = match kind {
            Kind::Disturbed => "the load is so low that other processes are a good part of it in",
            Kind::Copied => "the kernel copied what was to go without a copy in",
            Kind::Paced => {
                "packets left by timers, which costs CPU that is not the path's (docs/findings.md on pacing), in"
            }
            Kind::Regime => {
                "the receive window did not hold the sender back, so that more packets had an interrupt of their own, in"
            }
            Kind::NotSaturated => "neither host was busy, something else bounds the throughput in",
            Kind::RateNotHeld => "the rate was not held in",
            _ => {
                "getrusage misses over 15 % of the sending host's cost (interrupts, charged to no process) in"
            }
        };
        warnings.push(Warning::new(kind, format!("{what} {}", list(&rows))));
    }
    warnings.extend(observer.and_then(of_observer));
    warnings
}

fn of_observer(observer: &Observer) -> Option<Warning> {
    let ratio = observer.throughput_ratio;
    // Only where the whole interval lies beyond; a wider one is noise.
    (ratio.is_below(1.0 - OBSERVER) || ratio.is_above(1.0 + OBSERVER)).then(|| {
        let effect = 100.0 * (ratio.median - 1.0);
        let words =
            format!("with the meter the throughput differs by {effect:+.1} % from that without");
        Warning::new(Kind::Observer, words)
    })
}

fn concerns(row: &SendSeries, rate: Option<Rate>, reading: Reading) -> Vec<Kind> {
    let mut kinds = Vec::new();
    if row.median(|round| round.costs.sender.load_percent) < LOW_LOAD_PERCENT {
        kinds.push(Kind::Disturbed);
    }
    let copied = copies_of(row).is_some_and(|copies| copies.percent > 50.0);
    if copied && row.case.copying() != Copying::Always {
        kinds.push(Kind::Copied);
    }
    if rows::paced(row).is_some_and(|paced| paced != Paced::Rate || rate.is_none()) {
        kinds.push(Kind::Paced);
    }
    match rate {
        None if reading == Reading::Held => {
            if row.median(|round| round.window_limited) < WINDOW_LIMITED_MIN {
                kinds.push(Kind::Regime);
            }
        }
        None => {
            let busiest = |round: &super::SendRound| {
                round.costs.sender.load_percent.max(round.costs.receiver.load_percent)
            };
            if row.median(busiest) < BUSY_PERCENT {
                kinds.push(Kind::NotSaturated);
            }
        }
        Some(rate) => {
            if row.median(|round| round.costs.bytes_per_second * 8.0) < RATE_HELD * rate.0 as f64 {
                kinds.push(Kind::RateNotHeld);
            }
        }
    }
    if row.median(|round| round.rusage_us_per_mib / round.costs.sender_us_per_mib) < 1.0 - UNCHARGED
    {
        kinds.push(Kind::AccountsDisagree);
    }
    kinds
}

/// What a row is called in a warning.
pub(super) fn name(case: &SendCase) -> String {
    let condition = &case.condition;
    let mut name = format!("{} {} {}", case.path, condition.workload, condition.chunk);
    if condition.cork {
        name.push_str(" cork");
    }
    if condition.offloads == haul_lab::Offloads::Off {
        name.push_str(" offloads off");
    }
    name
}
