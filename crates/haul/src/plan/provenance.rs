//! Where a plan's costs come from: the network they were measured on, and the tests that they passed or missed.

use super::Spread;
use serde::{Deserialize, Serialize};

/// The network that a plan was measured on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// The sockets' congestion control. None of those that pace by themselves.
    pub congestion: String,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The rate that was held by pacing; `None` for none.
    #[serde(default)]
    pub rate_bits_per_second: Option<u64>,
    /// Between two hosts on one machine, how far apart their CPUs were: the round trip of a cache line. Costs of copying
    /// depend on it by a half.
    #[serde(default)]
    pub cache_line_round_trip_ns: Option<f64>,
    /// How the receiver read: `held`, so that its window held the sender back, or `free`; `None` where unknown. Costs depend on
    /// it by a factor of 1.5 to 3.
    #[serde(default)]
    pub reading: Option<String>,
}

/// A prediction put to the test, by a measurement after the one that the plan was made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// What was sent.
    pub workload: String,
    /// What the plan says that a MiB of it costs, in µs of the sending host's CPU.
    pub predicted_us_per_mib: f64,
    /// What it cost.
    pub measured_us_per_mib: Spread,
}

impl Test {
    /// By how much the prediction missed, in percent of what was measured; negative where it was too low.
    pub fn error_percent(&self) -> f64 {
        100.0 * (self.predicted_us_per_mib / self.measured_us_per_mib.median - 1.0)
    }
}
