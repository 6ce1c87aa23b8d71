//! Decides whether a connection maps pages: both methods are tried in turn, and the dearer one is
//! dropped.
//!
//! The measure is the CPU clock of the calling thread during the calls themselves. It does not
//! include the program's own access to the bytes, which costs more where they were mapped and are
//! in no cache yet.

use super::Mapping;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// The bytes of one turn, and the number of turns, which alternate between the methods. A megabyte
/// is several windows long, and four turns of each outlast a slow start.
const TURN_BYTES: u64 = 1 << 20;
const TURNS: u32 = 8;
/// The smallest share of the received bytes that must be mapped. Below it, mapping only adds calls.
const MAPPED_PERCENT_MIN: u64 = 50;

/// The trial of one connection.
#[derive(Debug)]
pub(super) struct MappingTrial {
    state: State,
    /// The cost of the turns of mapping, and of reading, so far.
    mapping: Cost,
    reading: Cost,
    /// Bytes in the turns of mapping that were mapped.
    mapped_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In the trial: the number of the turn, and the bytes that it has moved. Even turns map.
    Turn(u32, u64),
    Map,
    Read,
}

#[derive(Debug, Default, Clone, Copy)]
struct Cost {
    bytes: u64,
    time: Duration,
}

/// The decision after a recorded call.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Continue,
    /// Mapping does not pay, for this reason.
    StopMapping(String),
}

impl MappingTrial {
    pub fn new(mapping: Mapping) -> Self {
        let state = match mapping {
            Mapping::Measured => State::Turn(0, 0),
            Mapping::Always => State::Map,
            Mapping::Never => State::Read,
        };
        Self { state, mapping: Cost::default(), reading: Cost::default(), mapped_bytes: 0 }
    }

    /// Whether the next bytes are to be mapped.
    pub fn maps(&self) -> bool {
        match self.state {
            State::Turn(turn, _) => turn % 2 == 0,
            State::Map => true,
            State::Read => false,
        }
    }

    /// Whether nothing will be mapped any more.
    pub fn only_reads(&self) -> bool {
        self.state == State::Read
    }

    pub fn disable_mapping(&mut self) {
        self.state = State::Read;
    }

    /// The CPU clock at the start of a call, while the trial lasts.
    pub fn start_clock(&self) -> Option<Duration> {
        matches!(self.state, State::Turn(..)).then(cpu_time)
    }

    /// Records a call that began at `started`, and the bytes that it mapped and read.
    pub fn record(&mut self, started: Option<Duration>, mapped: usize, read: usize) -> Verdict {
        let (State::Turn(turn, turn_bytes), Some(started)) = (self.state, started) else {
            return Verdict::Continue;
        };
        self.add_call(turn, turn_bytes, cpu_time().saturating_sub(started), mapped, read)
    }

    fn add_call(
        &mut self,
        turn: u32,
        turn_bytes: u64,
        time: Duration,
        mapped: usize,
        read: usize,
    ) -> Verdict {
        let cost = if turn % 2 == 0 { &mut self.mapping } else { &mut self.reading };
        let bytes = (mapped + read) as u64;
        cost.bytes += bytes;
        cost.time += time;
        self.mapped_bytes += mapped as u64;
        self.state = State::Turn(turn, turn_bytes + bytes);
        if turn_bytes + bytes < TURN_BYTES {
            return Verdict::Continue;
        }
        self.state = State::Turn(turn + 1, 0);
        if turn + 1 == TURNS { self.decide() } else { Verdict::Continue }
    }

    fn decide(&mut self) -> Verdict {
        let mapped_percent = 100 * self.mapped_bytes / self.mapping.bytes.max(1);
        let (mapping, reading) = (self.mapping.us_per_mib(), self.reading.us_per_mib());
        self.state = State::Map;
        if mapped_percent < MAPPED_PERCENT_MIN {
            return Verdict::StopMapping(format!(
                "only {mapped_percent} % of the received bytes lay in pages that can be mapped"
            ));
        }
        if mapping > reading {
            return Verdict::StopMapping(format!(
                "mapping cost {mapping:.0} µs/MiB on this connection, and reading {reading:.0}"
            ));
        }
        Verdict::Continue
    }
}

impl Cost {
    fn us_per_mib(self) -> f64 {
        self.time.as_secs_f64() * 1e6 * f64::from(1 << 20) / self.bytes.max(1) as f64
    }
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a trial with these costs per MiB, of which this share is mapped; returns the last
    /// verdict.
    fn run_trial(
        mapping_us: u64,
        reading_us: u64,
        mapped_percent: usize,
    ) -> (MappingTrial, Verdict) {
        let mut trial = MappingTrial::new(Mapping::Measured);
        for turn in 0..TURNS {
            let State::Turn(at, turn_bytes) = trial.state else {
                panic!("the trial is over at turn {turn}")
            };
            assert_eq!((at, trial.maps()), (turn, turn % 2 == 0));
            let (us, mapped) = if trial.maps() {
                (mapping_us, (1 << 20) * mapped_percent / 100)
            } else {
                (reading_us, 0)
            };
            let time = Duration::from_micros(us);
            let verdict = trial.add_call(turn, turn_bytes, time, mapped, (1 << 20) - mapped);
            if turn + 1 == TURNS {
                return (trial, verdict);
            }
            assert_eq!(verdict, Verdict::Continue);
        }
        unreachable!()
    }

    #[test]
    fn the_cheaper_method_is_kept() {
        let (trial, verdict) = run_trial(100, 150, 99);
        assert_eq!((verdict, trial.maps()), (Verdict::Continue, true));
        let (_, verdict) = run_trial(150, 100, 99);
        assert!(
            matches!(&verdict, Verdict::StopMapping(reason) if reason.contains("150 µs/MiB")),
            "{verdict:?}"
        );
    }

    #[test]
    fn mapping_stops_if_few_pages_can_be_mapped() {
        let (_, verdict) = run_trial(10, 100, 25);
        assert!(
            matches!(&verdict, Verdict::StopMapping(reason) if reason.contains("25 %")),
            "{verdict:?}"
        );
    }

    #[test]
    fn a_fixed_setting_skips_the_trial() {
        let always = MappingTrial::new(Mapping::Always);
        assert!(always.maps() && always.start_clock().is_none());
        let never = MappingTrial::new(Mapping::Never);
        assert!(!never.maps() && never.start_clock().is_none());
    }
}
