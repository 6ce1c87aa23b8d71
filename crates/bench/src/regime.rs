//! The two interrupt regimes of a connection, and how an experiment keeps its connections in one of
//! them.
//!
//! A sender that is slower than its receiver finds the other CPU idle with each packet and must
//! interrupt it. That takes 17 to 24 interrupts per MiB in each direction, with packets of 64 KiB.
//! A sender that the receive window limits sends a burst each time the window opens. The packets of
//! a burst share an interrupt: 2 to 4 per MiB. The same method costs 1.5 to 3 times as much in the
//! first regime (docs/measurements/regimes.md).
//!
//! At full speed, the speed of a method relative to the receiver determines the regime. If both are
//! about as fast, it changes from round to round. So the receiving program reads at a share of the
//! method's full speed, with large buffers of fixed size. Then the window limits the sender with
//! every method.

use crate::flow::{Flow, FlowError, WARM_UP};
use crate::rounds::retry_slipped_windows;
use crate::stats::Estimate;
use haul_workers::worker::Outcome;
use haul_workers::worker::receiver::ReceiveTask;
use haul_workers::worker::socket::SocketOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::time::Duration;

/// The share of a method's full speed at which the receiver reads. It is low enough to limit the
/// sender all the time, and high enough for the sender's load to be measured well.
const HELD_SHARE: f64 = 0.5;
/// The size of the socket buffers if the receiver holds the rate. The kernel doubles the number;
/// about half of that is window.
const BUFFER_BYTES: usize = 4 << 20;
/// The capacity of a connection's buffers and window. Until they are full, the sender sends more
/// than arrives.
const FILL_BYTES: f64 = (2 * BUFFER_BYTES) as f64;

/// The windows that full speed is the median of. The receiver's rate follows full speed, and costs
/// depend a little on the rate.
const FULL_SPEED_WINDOWS: usize = 3;

/// A note for reports whose receiver holds the rate.
pub(crate) const HELD_NOTE: &str = "The receiver of a bulk transfer reads at half of each row's \
    full speed, so that its window holds the sender back and packets share interrupts alike in \
    every row.";

/// The rate at which the receiving program reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reading {
    /// A share of the method's full speed, so that the receive window limits the sender.
    #[default]
    Held,
    /// As fast as possible.
    Free,
}

impl fmt::Display for Reading {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Held => "held",
            Self::Free => "free",
        })
    }
}

impl Reading {
    /// The socket options of both ends.
    pub(crate) fn socket(self, congestion: &str) -> SocketOptions {
        let buffer_bytes = match self {
            Self::Held => Some(BUFFER_BYTES),
            Self::Free => None,
        };
        SocketOptions { buffer_bytes, ..SocketOptions::with_congestion(congestion) }
    }
}

/// The full speed of each row in bytes per second: its throughput with an unthrottled reader.
/// Measured at the first request.
#[derive(Debug)]
pub(crate) struct FullSpeedThroughputs<K>(HashMap<K, f64>);

impl<K> Default for FullSpeedThroughputs<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> FullSpeedThroughputs<K> {
    /// A row's full speed in bytes per second. `flow` is the row's flow with an unthrottled reader.
    pub(crate) fn get_or_measure(&mut self, row: &K, flow: &Flow<'_>) -> Result<f64, FlowError> {
        if let Some(&known) = self.0.get(row) {
            return Ok(known);
        }
        let speed = full_speed(flow)?;
        self.0.insert(row.clone(), speed);
        Ok(speed)
    }

    /// A row's full speed in bits per second; `None` if it was not measured.
    pub(crate) fn bits_per_second(&self, row: &K) -> Option<f64> {
        self.0.get(row).map(|speed| speed * 8.0)
    }
}

/// Measures the throughput of a flow with an unthrottled reader, in bytes per second.
pub(crate) fn full_speed(flow: &Flow<'_>) -> Result<f64, FlowError> {
    let mut speeds = Vec::new();
    for _ in 0..FULL_SPEED_WINDOWS {
        // A rate does not depend on the window's length, so slipped windows need no warning here.
        let sample = retry_slipped_windows(&mut 0, || flow.run(None))?;
        speeds.extend(sample.outcomes.first().map(Outcome::bytes_per_second));
    }
    let speed = Estimate::of(&speeds).map_or(0.0, |estimate| estimate.median);
    if speed > 0.0 {
        Ok(speed)
    } else {
        Err(FlowError::Worker("nothing was received at full speed".into()))
    }
}

/// The same receiver, reading at the share of this full speed.
pub(crate) fn held(receiving: &ReceiveTask, full_speed_bytes_per_second: f64) -> ReceiveTask {
    let rate = (HELD_SHARE * full_speed_bytes_per_second) as u64;
    ReceiveTask { read_bytes_per_second: Some(rate.max(1)), ..receiving.clone() }
}

/// The warm-up time of a connection whose receiver holds the rate: until its buffers are full.
pub(crate) fn warm_up(full_speed_bytes_per_second: f64) -> Duration {
    // The buffers fill at the difference between the sender's and the reader's rate.
    let fills_bytes_per_second = (1.0 - HELD_SHARE) * full_speed_bytes_per_second;
    WARM_UP.max(Duration::from_secs_f64((FILL_BYTES / fills_bytes_per_second).min(1.0)))
}

impl std::str::FromStr for Reading {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "held" => Ok(Self::Held),
            "free" => Ok(Self::Free),
            _ => Err(format!("unknown reading {text:?}: use held or free")),
        }
    }
}
