//! The control protocol between two machines that measure together: one JSON line per message.
//!
//! The measuring machine sends [`Request`]s in sequence. A worker runs from [`Request::Start`] to
//! [`Reply::Ended`]. Neither side trusts the other: the length of lines is limited, and requests
//! are checked before they are carried out.

use crate::host::HostFacts;
use haul_soak::{Baseline, Interval};
use haul_workers::lines::{Line, read_line};
use haul_workers::worker::socket::SocketOptions;
use haul_workers::worker::{Message, Task};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Name and version of the protocol.
pub(crate) const SCHEMA: &str = "haul.pair/2";
/// Default port of the control connection (HAUL on a telephone keypad). Data goes to the port after
/// it.
pub const PORT: u16 = 4285;
/// Maximum length of a line: enough for the counters of a thousand CPUs.
pub(crate) const LINE_BYTES_MAX: usize = 1 << 20;

/// The CPUs that a meter measures, and the boot of the machine they belong to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MeterFacts {
    pub boot_id: String,
    pub cpus: Vec<usize>,
}

impl MeterFacts {
    /// A meter on every CPU that this process may use.
    pub(crate) fn local() -> Self {
        let boot_id =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { boot_id: boot_id.trim().into(), cpus: haul_lab::allowed_cpus().unwrap_or_default() }
    }

    /// Whether both would measure the same CPU, and so each other.
    pub(crate) fn shares_cpu_with(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id && self.cpus.iter().any(|cpu| other.cpus.contains(cpu))
    }
}

/// Requests of the measuring machine.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first request.
    Hello { schema: String, haul: String },
    /// Measures the baseline of the quiet machine for this long. Answered by [`Reply::Baseline`].
    Calibrate { length_ms: u64 },
    /// Starts a worker. Its messages arrive as [`Reply::WorkerMessage`], its end as
    /// [`Reply::Ended`].
    Start { task: Box<Task>, socket: SocketOptions, peer: Option<SocketAddr> },
    /// Measures a window that begins after this delay. Answered by [`Reply::Measured`].
    Window { start_in_ns: u64, length_ns: u64 },
    /// Every worker has measured the window, so the worker may end.
    End,
    /// Stops the worker at once, if there is one.
    Stop,
}

/// Replies of the listening machine.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The answer to the first request.
    Hello {
        schema: String,
        host: HostFacts,
        congestion: Vec<String>,
        #[serde(default)]
        meter: MeterFacts,
    },
    /// The baseline of the quiet machine.
    Baseline(Baseline),
    /// A message of the worker.
    WorkerMessage(Message),
    /// The meter's counters of this machine over the window.
    Measured(Interval),
    /// The worker has exited.
    Ended,
    /// The request is refused, for this reason.
    Refused(String),
}

/// Counts the lines that parse as requests and those that parse as replies, for fuzzing both
/// parsers.
#[doc(hidden)]
pub fn words_in(bytes: &[u8]) -> (usize, usize) {
    fn count<T: DeserializeOwned>(mut bytes: &[u8]) -> usize {
        let mut count = 0;
        while let Ok(line) = read_line::<T>(&mut bytes, LINE_BYTES_MAX, None) {
            match line {
                Line::Value(_) => count += 1,
                Line::Invalid(_) => {}
                Line::End => break,
            }
        }
        count
    }
    (count::<Request>(bytes), count::<Reply>(bytes))
}
