//! The origin of a plan's costs: the network that they were measured on, and the tests of its
//! predictions.

use super::Spread;

/// The network on which a plan was measured.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct Network {
    /// The sockets' congestion control; never one that paces by itself.
    pub congestion: String,
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The rate that pacing held; `None` if the sockets were not paced.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub rate_bits_per_second: Option<u64>,
    /// The round trip of a cache line between the CPUs of two hosts on one machine. Costs of
    /// copying depend on it by a half.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub cache_line_round_trip_ns: Option<f64>,
    /// How the receiver read: `held`, so that its window held the sender back, or `free`; `None` if
    /// unknown. Costs depend on it by a factor of 1.5 to 3.
    #[cfg_attr(feature = "plan-file", serde(default))]
    pub reading: Option<String>,
}

impl Network {
    /// Creates a network of unpaced sockets, with nothing else known.
    pub fn new(congestion: impl Into<String>, mtu: u32) -> Self {
        Self {
            congestion: congestion.into(),
            mtu,
            rate_bits_per_second: None,
            cache_line_round_trip_ns: None,
            reading: None,
        }
    }
}

/// A test of a prediction, by a measurement that was made after the measurements of the plan.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "plan-file", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct PlanTest {
    /// The workload that was sent.
    pub workload: String,
    /// The predicted cost of a MiB, in µs of the sending host's CPU.
    pub predicted_us_per_mib: f64,
    /// The measured cost.
    pub measured_us_per_mib: Spread,
}

impl PlanTest {
    /// Creates the result of a test.
    pub fn new(
        workload: impl Into<String>,
        predicted_us_per_mib: f64,
        measured_us_per_mib: Spread,
    ) -> Self {
        Self { workload: workload.into(), predicted_us_per_mib, measured_us_per_mib }
    }

    /// The error of the prediction, in percent of the measured cost; negative if it was too low.
    pub fn error_percent(&self) -> f64 {
        100.0 * (self.predicted_us_per_mib / self.measured_us_per_mib.median - 1.0)
    }
}
