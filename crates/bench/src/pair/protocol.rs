//! What two machines that measure together say to each other: a JSON line each.
//!
//! The one that asks sends [`Request`]s, one after the other; a worker runs from [`Request::Start`] to [`Reply::Ended`]. Neither
//! side believes the other: lines are limited, and what is asked for is checked before it is done.

use crate::host::HostFacts;
use crate::lines::{Line, read_line};
use crate::worker::socket::SocketOptions;
use crate::worker::{Message, Task};
use haul_soak::{Baseline, Interval};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// The protocol and its version.
pub(super) const SCHEMA: &str = "haul.pair/2";
/// The port of the conversation, unless another is given: HAUL on a telephone. Bytes go to the one after it.
pub const PORT: u16 = 4285;
/// The longest line: what is said of a thousand CPUs.
pub(super) const LINE_BYTES_MAX: usize = 1 << 20;

/// What a meter reads: which CPUs, of which start of which machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MeterFacts {
    pub boot_id: String,
    pub cpus: Vec<usize>,
}

impl MeterFacts {
    /// Of a meter on every CPU that this process may use.
    pub(super) fn here() -> Self {
        let boot_id =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { boot_id: boot_id.trim().into(), cpus: haul_lab::allowed_cpus().unwrap_or_default() }
    }

    /// Whether both would read the same CPU, and so each other.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id && self.cpus.iter().any(|cpu| other.cpus.contains(cpu))
    }
}

/// What the machine that asks says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first word.
    Hello { schema: String, haul: String },
    /// Learn what a quiet machine looks like, for so long. Answered by [`Reply::Baseline`].
    Calibrate { length_ms: u64 },
    /// Start a worker. Its words come as [`Reply::Said`], its end as [`Reply::Ended`].
    Start { task: Box<Task>, socket: SocketOptions, peer: Option<SocketAddr> },
    /// Measure a window that begins so much later. Answered by [`Reply::Measured`].
    Window { start_in_ns: u64, length_ns: u64 },
    /// Everybody has looked: the worker may end.
    End,
    /// End the worker at once, if there is one.
    Stop,
}

/// What the machine that listens says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The answer to the first word.
    Hello {
        schema: String,
        host: HostFacts,
        congestion: Vec<String>,
        #[serde(default)]
        meter: MeterFacts,
    },
    /// What the quiet machine looked like.
    Baseline(Baseline),
    /// A worker said this.
    Said(Message),
    /// What happened on this machine in the window.
    Measured(Interval),
    /// The worker is gone.
    Ended,
    /// What was asked for is not done.
    Refused(String),
}

/// How many of the lines are requests, and how many replies: both sides' ears, for a fuzzer.
#[doc(hidden)]
pub fn words_in(bytes: &[u8]) -> (usize, usize) {
    fn said<T: DeserializeOwned>(mut bytes: &[u8]) -> usize {
        let mut said = 0;
        while let Ok(line) = read_line::<T>(&mut bytes, LINE_BYTES_MAX, None) {
            match line {
                Line::Said(_) => said += 1,
                Line::Strange(_) => {}
                Line::End => break,
            }
        }
        said
    }
    (said::<Request>(bytes), said::<Reply>(bytes))
}
