//! Ping and echo workers: one sends a message and waits for its echo, the other echoes all it
//! receives.

use super::{Message, Outcome, WorkCounters, failed, now_ns, report_started, set_nodelay};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of round-trip times kept per window; later ones are dropped.
const ROUND_TRIPS_MAX: usize = 1 << 20;

/// Round-trip times of messages.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Latency {
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Number of messages measured.
    pub messages: usize,
}

/// Sends a message and waits for its echo, repeatedly.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PingTask {
    /// The size of each message.
    pub message_bytes: usize,
}

/// Echoes all it receives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EchoTask {}

impl PingTask {
    /// Sends messages and waits for each echo, until the window is over.
    pub fn run(&self, mut stream: &TcpStream, counters: &WorkCounters) -> Result<Outcome, Message> {
        set_nodelay(stream)?;
        let mut buffer = vec![0; self.message_bytes];
        let mut round_trips_ns: Vec<u64> = Vec::new();
        let mut has_started = false;
        while !counters.is_over() {
            let start_ns = now_ns();
            let exchanged = stream.write_all(&buffer).and_then(|()| stream.read_exact(&mut buffer));
            exchanged.map_err(|error| failed("exchanging messages", error))?;
            let end_ns = now_ns();
            counters.bytes.fetch_add(self.message_bytes as u64, Relaxed);
            if !has_started {
                has_started = true;
                report_started()?;
            }
            let is_in_window = counters
                .planned_window()
                .is_some_and(|window| start_ns >= window.start_ns && end_ns < window.end_ns);
            if is_in_window && round_trips_ns.len() < ROUND_TRIPS_MAX {
                round_trips_ns.push(end_ns - start_ns);
            }
        }
        round_trips_ns.sort_unstable();
        let quantile_us = |share: f64| {
            let index = (round_trips_ns.len().saturating_sub(1) as f64 * share).round() as usize;
            round_trips_ns.get(index).map(|&ns| ns as f64 / 1000.0)
        };
        let latency = quantile_us(0.5).zip(quantile_us(0.99)).map(|(p50_us, p99_us)| Latency {
            p50_us,
            p99_us,
            messages: round_trips_ns.len(),
        });
        Ok(Outcome { latency, ..counters.outcome()? })
    }
}

impl EchoTask {
    /// Echoes messages until the peer ends.
    pub fn run(mut stream: &TcpStream, counters: &WorkCounters) -> Result<Outcome, Message> {
        set_nodelay(stream)?;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let echoed = match stream.read(&mut buffer) {
                Ok(0) => return counters.outcome(),
                Ok(count) => stream.write_all(&buffer[..count]).map(|()| count as u64),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return counters.outcome();
                }
                Err(error) => Err(error),
            };
            counters.bytes.fetch_add(echoed.map_err(|error| failed("echoing", error))?, Relaxed);
        }
    }
}
