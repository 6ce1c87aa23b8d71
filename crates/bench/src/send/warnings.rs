//! The warnings that are specific to the experiment `send`.

use super::copies::copied_share;
use super::verdict::observer_warning;
use super::{Kind, SendSeries, WINDOW_LIMITED_SHARE_MIN, Warning, rows};
use crate::matrix::SendCase;
use crate::regime::Reading;
use crate::report::Observer;
use crate::rounds::{LOW_LOAD_PERCENT_MAX, short_list};
use haul::Copying;
use haul_units::Rate;
use haul_workers::worker::Paced;
use std::collections::BTreeMap;

/// A host whose load is higher than this limits the throughput.
const BUSY_PERCENT_MIN: f64 = 85.0;
/// The smallest share of the requested rate that counts as held.
const RATE_SHARE_MIN: f64 = 0.95;
/// The largest share of the sender's cost that `getrusage` may miss without a warning.
const UNCHARGED_SHARE_MAX: f64 = 0.15;

/// The warnings about a run's figures: one for each kind, which names the rows that it applies to.
pub(super) fn of(
    rows: &[SendSeries],
    rate: Option<Rate>,
    reading: Reading,
    observer: Option<&Observer>,
) -> Vec<Warning> {
    let mut rows_by_kind: BTreeMap<Kind, Vec<String>> = BTreeMap::new();
    for row in rows.iter().filter(|row| !row.rounds.is_empty()) {
        for kind in warning_kinds(row, rate, reading) {
            rows_by_kind.entry(kind).or_default().push(name(&row.case.case));
        }
    }
    let mut warnings = Vec::new();
    for (kind, rows) in rows_by_kind {
        let statement = match kind {
            Kind::Disturbed => "the load is so low that other processes are a good part of it in",
            Kind::Copied => "the kernel copied although the method avoids copies in",
            Kind::Paced => {
                "timers paced the packets, which costs CPU time that is not the method's \
                 (docs/measurements/congestion.md), in"
            }
            Kind::Regime => {
                "the receive window did not hold the sender back, so that fewer packets shared an \
                 interrupt, in"
            }
            Kind::NotSaturated => "neither host was busy, something else bounds the throughput in",
            Kind::RateNotHeld => "the rate was not held in",
            _ => {
                "getrusage misses over 15 % of the sending host's cost (interrupts, charged to no \
                 process) in"
            }
        };
        warnings.push(Warning::new(kind, format!("{statement} {}", short_list(&rows))));
    }
    warnings.extend(observer.and_then(observer_warning));
    warnings
}

fn warning_kinds(row: &SendSeries, rate: Option<Rate>, reading: Reading) -> Vec<Kind> {
    let mut kinds = Vec::new();
    if row.median(|round| round.costs.sender.load_percent) < LOW_LOAD_PERCENT_MAX {
        kinds.push(Kind::Disturbed);
    }
    let copied = copied_share(row).is_some_and(|copies| copies.percent > 50.0);
    if copied && row.case.copying() != Copying::Always {
        kinds.push(Kind::Copied);
    }
    if rows::reason_for_pacing(row).is_some_and(|paced| paced != Paced::Rate || rate.is_none()) {
        kinds.push(Kind::Paced);
    }
    match rate {
        None if reading == Reading::Held => {
            if row.median(|round| round.window_limited_share) < WINDOW_LIMITED_SHARE_MIN {
                kinds.push(Kind::Regime);
            }
        }
        None => {
            let busiest = |round: &super::SendRound| {
                round.costs.sender.load_percent.max(round.costs.receiver.load_percent)
            };
            if row.median(busiest) < BUSY_PERCENT_MIN {
                kinds.push(Kind::NotSaturated);
            }
        }
        Some(rate) => {
            let bits_per_second = row.median(|round| round.costs.bytes_per_second * 8.0);
            if bits_per_second < RATE_SHARE_MIN * rate.0 as f64 {
                kinds.push(Kind::RateNotHeld);
            }
        }
    }
    let charged_share = row.median(|round| round.rusage_us_per_mib / round.costs.sender_us_per_mib);
    if charged_share < 1.0 - UNCHARGED_SHARE_MAX {
        kinds.push(Kind::AccountsDisagree);
    }
    kinds
}

/// The name of a row in a warning.
pub(super) fn name(case: &SendCase) -> String {
    let condition = &case.condition;
    let mut name = format!("{} {} {}", case.method, condition.workload, condition.chunk);
    if condition.cork {
        name.push_str(" cork");
    }
    if condition.offloads == haul_lab::Offloads::Off {
        name.push_str(" offloads off");
    }
    name
}
