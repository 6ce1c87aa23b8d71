//! Which of two regimes a connection is in, and how an experiment keeps it in one.
//!
//! A sender that is slower than its receiver finds the other CPU idle with each packet and has to interrupt it: 17 to 24
//! interrupts a MiB each way where packets hold 64 KiB. A sender that the receive window holds back sends a burst each time the
//! window opens, and the packets of a burst share an interrupt: 2 to 4 a MiB. The same path costs 1.5 to 3 times as much
//! in the first regime (docs/findings.md). At full speed a path is in one or the other by how fast it is beside the receiver,
//! and changes from round to round where both are about as fast.
//!
//! So the receiving program reads at a share of what the path can send, with buffers that are large enough and do not
//! change: then every path is held back by the window.
//!
//! What a MiB costs depends on the rate, too: at half of it, a tenth more. Full speed is a poor measure of the rate to hold, since
//! it is that of either regime by chance. Where the sending host is what is measured, the reader is therefore held at the rate
//! that gives the sending CPU a certain load, by what the row has cost so far.

use crate::flow::{Flow, FlowError, WARM_UP};
use crate::worker::Outcome;
use crate::worker::receiver::Receiving;
use crate::worker::socket::SocketOptions;
use crate::{Figure, MIB};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

/// The share of a path's full speed that the receiver reads at: low enough for the sender to be held back all the time,
/// high enough for its load to be read well.
const HELD_SHARE: f64 = 0.5;
/// The load of the sending CPU at which it is held, once its cost is known. A sender that interrupts its receiver with each
/// packet is busy at a quarter to a half of the rate of one that is held back, and would stay in that regime above it.
const HELD_LOAD: f64 = 0.3;
/// The share of full speed that is not exceeded for the sake of that load: where a network is the limit, a sender is never busy.
const HELD_SHARE_MAX: f64 = 0.7;
/// The socket buffers where a rate is held. The kernel doubles the number; about half of that is window.
const BUFFER_BYTES: usize = 4 << 20;
/// What fits into the buffers and the window of a connection. Until they are full the sender sends more than arrives.
const FILL_BYTES: f64 = (2 * BUFFER_BYTES) as f64;

/// Windows that full speed is the median of: the held rate follows it, and costs depend a little on the rate.
const FULL_SPEED_WINDOWS: usize = 3;

/// What to know of rows that were measured so.
pub(crate) const HELD: &str = "The receiver of a bulk transfer reads at half of each row's full speed, so that its window holds the sender back and packets share \
     interrupts alike in every row. interrupts are those of both CPUs for each MiB.";
/// What to know of rows whose rate follows the load of the sending CPU.
pub(crate) const HELD_BY_LOAD: &str = "The receiver of a bulk transfer reads at the rate at which the sending CPU is busy for 30 % of the time (at most 70 % of the row's \
     full speed), so that its window holds the sender back and packets share interrupts alike in every row. interrupts are those \
     of both CPUs for each MiB.";

/// How the receiving program reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reading {
    /// At a share of the path's full speed: the receive window holds the sender back.
    #[default]
    Held,
    /// As fast as it can.
    Free,
}

impl Reading {
    /// Socket options of both ends.
    pub(crate) fn socket(self, congestion: &str) -> SocketOptions {
        let buffer_bytes = match self {
            Self::Held => Some(BUFFER_BYTES),
            Self::Free => None,
        };
        SocketOptions { buffer_bytes, ..SocketOptions::with_congestion(congestion) }
    }
}

/// What each row can move when the reader is as fast as it can be, in bytes a second: measured when it is first asked for.
#[derive(Debug)]
pub(crate) struct FullSpeeds<K>(HashMap<K, f64>);

impl<K> Default for FullSpeeds<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> FullSpeeds<K> {
    /// A row's, by its flow with such a reader.
    pub(crate) fn of(&mut self, row: &K, flow: &Flow<'_>) -> Result<f64, FlowError> {
        if let Some(&known) = self.0.get(row) {
            return Ok(known);
        }
        let speed = full_speed(flow)?;
        self.0.insert(row.clone(), speed);
        Ok(speed)
    }

    /// A row's, where it was measured, in bits a second.
    pub(crate) fn bits_per_second(&self, row: &K) -> Option<f64> {
        self.0.get(row).map(|speed| speed * 8.0)
    }
}

/// What a flow with a reader that is as fast as it can be moves, in bytes a second.
pub(crate) fn full_speed(flow: &Flow<'_>) -> Result<f64, FlowError> {
    let mut speeds = Vec::new();
    for _ in 0..FULL_SPEED_WINDOWS {
        let sample = flow.run(None)?;
        speeds.extend(sample.outcomes.first().map(Outcome::bytes_per_second));
    }
    let speed = Figure::of(&speeds).map_or(0.0, |figure| figure.median);
    if speed > 0.0 { Ok(speed) } else { Err(FlowError::Worker("nothing was received at full speed".into())) }
}

/// The same reader at the rate that is held beside a path of this full speed.
pub(crate) fn held(receiving: &Receiving, full_speed_bytes_per_second: f64) -> Receiving {
    let rate = (HELD_SHARE * full_speed_bytes_per_second) as u64;
    Receiving { read_bytes_per_second: Some(rate.max(1)), ..receiving.clone() }
}

/// How long such a connection runs until its buffers are full.
pub(crate) fn warm_up(full_speed_bytes_per_second: f64) -> Duration {
    fill_time(full_speed_bytes_per_second, HELD_SHARE * full_speed_bytes_per_second)
}

/// How long the buffers take to fill by what the sender is faster than the reader.
fn fill_time(full_speed_bytes_per_second: f64, held_bytes_per_second: f64) -> Duration {
    let fills_bytes_per_second = full_speed_bytes_per_second - held_bytes_per_second;
    WARM_UP.max(Duration::from_secs_f64((FILL_BYTES / fills_bytes_per_second).min(1.0)))
}

/// The rate of each row's reader that gives the sending CPU the same load in every row and every run.
#[derive(Debug)]
pub(crate) struct HeldRates<K> {
    full_speeds: FullSpeeds<K>,
    /// What a MiB cost the sending CPU in the rounds so far, in µs.
    costs: HashMap<K, Vec<f64>>,
}

impl<K> Default for HeldRates<K> {
    fn default() -> Self {
        Self { full_speeds: FullSpeeds::default(), costs: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash> HeldRates<K> {
    /// A row's reader at its rate, and how long the connection runs until its buffers are full; `flow` is the row's with a
    /// reader at full speed.
    pub(crate) fn receiving(&mut self, row: &K, flow: &Flow<'_>) -> Result<(Receiving, Duration), FlowError> {
        let full_speed = self.full_speeds.of(row, flow)?;
        let rate = held_rate(full_speed, self.costs.get(row).map_or(&[], Vec::as_slice));
        let receiving =
            Receiving { read_bytes_per_second: Some((rate as u64).max(1)), ..Receiving::plainly() };
        Ok((receiving, fill_time(full_speed, rate)))
    }

    /// Takes what a round of a row cost the sending CPU into account.
    pub(crate) fn learn(&mut self, row: &K, us_per_mib: f64) {
        self.costs.entry(row.clone()).or_default().push(us_per_mib);
    }

    /// A row's full speed, where it was measured, in bits a second.
    pub(crate) fn full_speed_bits_per_second(&self, row: &K) -> Option<f64> {
        self.full_speeds.bits_per_second(row)
    }
}

/// The rate in bytes a second that gives the sending CPU its load by the median of the costs so far; half of full speed
/// before there are any.
fn held_rate(full_speed_bytes_per_second: f64, costs_us_per_mib: &[f64]) -> f64 {
    match Figure::of(costs_us_per_mib) {
        Some(cost) if cost.median > 0.0 => {
            (HELD_LOAD * 1e6 / cost.median * MIB).min(HELD_SHARE_MAX * full_speed_bytes_per_second)
        }
        _ => HELD_SHARE * full_speed_bytes_per_second,
    }
}

impl std::str::FromStr for Reading {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "held" => Ok(Self::Held),
            "free" => Ok(Self::Free),
            _ => Err(format!("unknown way of reading {text:?}: held or free")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_held_rate_follows_the_cost_and_stays_below_full_speed() {
        let full_speed = 4e9;
        assert!((held_rate(full_speed, &[]) - 2e9).abs() < 1.0);
        // 1000 MiB a second at 300 µs each are 30 %. A stray round does not move the median.
        let rate = held_rate(full_speed, &[300.0, 1100.0, 300.0]);
        assert!((rate / MIB - 1000.0).abs() < 1e-6, "{rate}");
        assert!((held_rate(1e9, &[30.0]) - 0.7e9).abs() < 1.0);
    }
}
