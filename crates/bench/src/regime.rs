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

use crate::Figure;
use crate::flow::{Flow, FlowError, WARM_UP};
use crate::rounds::at_most_again;
use crate::worker::Outcome;
use crate::worker::receiver::Receiving;
use crate::worker::socket::SocketOptions;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

/// The share of a path's full speed that the receiver reads at: low enough for the sender to be held back all the time,
/// high enough for its load to be read well.
const HELD_SHARE: f64 = 0.5;
/// The socket buffers where a rate is held. The kernel doubles the number; about half of that is window.
const BUFFER_BYTES: usize = 4 << 20;
/// What fits into the buffers and the window of a connection. Until they are full the sender sends more than arrives.
const FILL_BYTES: f64 = (2 * BUFFER_BYTES) as f64;

/// Windows that full speed is the median of: the held rate follows it, and costs depend a little on the rate.
const FULL_SPEED_WINDOWS: usize = 3;

/// What to know of rows that were measured so.
pub(crate) const HELD: &str = "The receiver of a bulk transfer reads at half of each row's full speed, so that its window holds the sender back and packets share \
     interrupts alike in every row. interrupts are those of both CPUs for each MiB.";

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
        // A rate does not depend on the window's length, so slips are not worth a warning here.
        let sample = at_most_again(&mut 0, || flow.run(None))?;
        speeds.extend(sample.outcomes.first().map(Outcome::bytes_per_second));
    }
    let speed = Figure::of(&speeds).map_or(0.0, |figure| figure.median);
    if speed > 0.0 {
        Ok(speed)
    } else {
        Err(FlowError::Worker("nothing was received at full speed".into()))
    }
}

/// The same reader at the rate that is held beside a path of this full speed.
pub(crate) fn held(receiving: &Receiving, full_speed_bytes_per_second: f64) -> Receiving {
    let rate = (HELD_SHARE * full_speed_bytes_per_second) as u64;
    Receiving { read_bytes_per_second: Some(rate.max(1)), ..receiving.clone() }
}

/// How long such a connection runs until its buffers are full.
pub(crate) fn warm_up(full_speed_bytes_per_second: f64) -> Duration {
    // They fill by what the sender is faster than the reader.
    let fills_bytes_per_second = (1.0 - HELD_SHARE) * full_speed_bytes_per_second;
    WARM_UP.max(Duration::from_secs_f64((FILL_BYTES / fills_bytes_per_second).min(1.0)))
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
