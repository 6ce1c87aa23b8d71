//! Measures what `haul run` saves: copies are elided and made in turn, under the load meter.

use haul_bench::Estimate;
use haul_run::{Proof, Session};
use haul_soak::process;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Duration of a window.
const WINDOW: Duration = Duration::from_secs(1);
/// A window in which fewer bytes were sent says nothing about the cost of a byte.
const BYTES_MIN: u64 = 16 << 20;
const MIB: f64 = (1 << 20) as f64;

/// The cost of a MiB in two windows, one after the other.
#[derive(Debug, Clone, Copy)]
struct Pair {
    elided_us: f64,
    copied_us: f64,
}

/// Measures pairs of windows until the command ended or copying was asked for. Reports the result
/// after each pair.
pub fn measure_pairs(
    session: &Session,
    has_ended: &AtomicBool,
    is_stopped: &AtomicBool,
    report: impl Fn(Proof),
) {
    let mut pairs: Vec<Pair> = Vec::new();
    let is_over = || has_ended.load(Relaxed) || is_stopped.load(Relaxed);
    while !is_over() {
        // The order changes, so that a drift of the load concerns both.
        let is_elided_first = pairs.len().is_multiple_of(2);
        let first = window(session, is_elided_first, has_ended);
        if is_over() {
            break;
        }
        let second = window(session, !is_elided_first, has_ended);
        let (elided, copied) = if is_elided_first { (first, second) } else { (second, first) };
        if let (Some(elided_us), Some(copied_us), false) = (elided, copied, is_over()) {
            pairs.push(Pair { elided_us, copied_us });
            proof(&pairs).map(&report);
        }
    }
    session.set_eliding(!is_stopped.load(Relaxed));
}

/// The CPU time of the machine for a MiB in one window, in µs. `None` if too little was sent, or if
/// the meter could not read the load.
fn window(session: &Session, is_eliding: bool, has_ended: &AtomicBool) -> Option<f64> {
    let bytes = || session.counts().sent_by_all().bytes;
    session.set_eliding(is_eliding);
    let before = bytes();
    let report = process::watch(WINDOW, has_ended).ok()?;
    let sent = bytes().saturating_sub(before);
    let cpu_seconds = report.cpu_seconds?;
    (sent >= BYTES_MIN).then(|| cpu_seconds * 1e6 / (sent as f64 / MIB))
}

fn proof(pairs: &[Pair]) -> Option<Proof> {
    let estimate =
        |value: fn(&Pair) -> f64| Estimate::of(&pairs.iter().map(value).collect::<Vec<_>>());
    let ratio = estimate(|pair| pair.elided_us / pair.copied_us)?;
    Some(Proof {
        pairs: pairs.len(),
        elided_us_per_mib: estimate(|pair| pair.elided_us)?.median,
        copied_us_per_mib: estimate(|pair| pair.copied_us)?.median,
        ratio: ratio.median,
        ratio_low: ratio.has_interval().then_some(ratio.low),
        ratio_high: ratio.has_interval().then_some(ratio.high),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_the_pairs() {
        let pair = |elided_us, copied_us| Pair { elided_us, copied_us };
        assert!(proof(&[]).is_none());
        let proof = proof(&[pair(1.0, 2.0), pair(30.0, 40.0), pair(9.0, 10.0)]).unwrap();
        assert!((proof.ratio - 0.75).abs() < 1e-9 && proof.pairs == 3);
    }
}
