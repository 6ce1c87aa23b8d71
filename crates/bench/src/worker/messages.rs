//! The two ends of a conversation: one sends a message and waits for it to come back, the other sends back what
//! comes.

use super::{Message, Outcome, Tally, failed, now_ns, say_started, set_nodelay};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering::Relaxed;

/// Room for the round trips of a window; later ones are not kept.
const ROUND_TRIPS_MAX: usize = 1 << 20;

/// How long messages took there and back.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half took no longer.
    pub p50_us: f64,
    /// One in a hundred took longer.
    pub p99_us: f64,
    /// How many there were.
    pub messages: usize,
}

/// Sends a message and waits for it to come back, again and again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Asking {
    pub message_bytes: usize,
}

/// Sends back what comes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Answering {}

impl Asking {
    pub(super) fn run(&self, mut stream: &TcpStream, tally: &Tally) -> Result<Outcome, Message> {
        set_nodelay(stream)?;
        let mut buffer = vec![0; self.message_bytes];
        let mut round_trips_ns: Vec<u64> = Vec::new();
        let mut has_started = false;
        while !tally.is_over() {
            let start_ns = now_ns();
            let exchanged = stream.write_all(&buffer).and_then(|()| stream.read_exact(&mut buffer));
            exchanged.map_err(|error| failed("exchanging messages", error))?;
            let end_ns = now_ns();
            tally.bytes.fetch_add(self.message_bytes as u64, Relaxed);
            if !has_started {
                has_started = true;
                say_started()?;
            }
            let is_seen = tally
                .planned()
                .is_some_and(|window| start_ns >= window.start_ns && end_ns < window.end_ns);
            if is_seen && round_trips_ns.len() < ROUND_TRIPS_MAX {
                round_trips_ns.push(end_ns - start_ns);
            }
        }
        round_trips_ns.sort_unstable();
        let at = |share: f64| {
            let index = (round_trips_ns.len().saturating_sub(1) as f64 * share).round() as usize;
            round_trips_ns.get(index).map(|&ns| ns as f64 / 1000.0)
        };
        let latency = at(0.5).zip(at(0.99)).map(|(p50_us, p99_us)| Latency {
            p50_us,
            p99_us,
            messages: round_trips_ns.len(),
        });
        Ok(Outcome { latency, ..tally.outcome()? })
    }
}

impl Answering {
    pub(super) fn run(mut stream: &TcpStream, tally: &Tally) -> Result<Outcome, Message> {
        set_nodelay(stream)?;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let answered = match stream.read(&mut buffer) {
                Ok(0) => return tally.outcome(),
                Ok(count) => stream.write_all(&buffer[..count]).map(|()| count as u64),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return tally.outcome();
                }
                Err(error) => Err(error),
            };
            tally.bytes.fetch_add(answered.map_err(|error| failed("answering", error))?, Relaxed);
        }
    }
}
