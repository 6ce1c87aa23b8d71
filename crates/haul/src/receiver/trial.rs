//! Whether mapping pays on this connection: both ways are tried in turn, and the dearer one is dropped.
//!
//! The measure is the CPU clock of the calling thread during the calls themselves. What it cannot see: what
//! the program's own reading of the bytes costs, which is more where they were mapped and are in no cache yet.

use super::Mapping;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Bytes each way is given in its turns, and how many turns. A megabyte is several windows long, and four turns
/// each see past a slow start.
const TURN_BYTES: u64 = 1 << 20;
const TURNS: u32 = 8;
/// Mapping that moves a smaller share than this of what arrives only adds calls.
const MAPPED_PERCENT_MIN: u64 = 50;

/// The trial of one connection.
#[derive(Debug)]
pub(super) struct Trial {
    state: State,
    /// What the turns of mapping, and of reading, have cost so far.
    mapping: Cost,
    reading: Cost,
    /// Of the bytes in mapping's turns, those that were mapped.
    mapped_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In the trial: which turn, and how many bytes it has moved. Even turns map.
    Turn(u32, u64),
    Map,
    Read,
}

#[derive(Debug, Default, Clone, Copy)]
struct Cost {
    bytes: u64,
    time: Duration,
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    GoOn,
    /// Mapping does not pay, for this reason.
    StopMapping(String),
}

impl Trial {
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

    pub fn never_map(&mut self) {
        self.state = State::Read;
    }

    /// The clock before a call, while the trial lasts.
    pub fn clock(&self) -> Option<Duration> {
        matches!(self.state, State::Turn(..)).then(cpu_time)
    }

    /// Enters a call that began at `started` and moved so many bytes.
    pub fn judge(&mut self, started: Option<Duration>, mapped: usize, read: usize) -> Verdict {
        let (State::Turn(turn, so_far), Some(started)) = (self.state, started) else {
            return Verdict::GoOn;
        };
        self.enter(turn, so_far, cpu_time().saturating_sub(started), mapped, read)
    }

    fn enter(
        &mut self,
        turn: u32,
        so_far: u64,
        time: Duration,
        mapped: usize,
        read: usize,
    ) -> Verdict {
        let cost = if turn.is_multiple_of(2) { &mut self.mapping } else { &mut self.reading };
        let bytes = (mapped + read) as u64;
        cost.bytes += bytes;
        cost.time += time;
        self.mapped_bytes += mapped as u64;
        self.state = State::Turn(turn, so_far + bytes);
        if so_far + bytes < TURN_BYTES {
            return Verdict::GoOn;
        }
        self.state = State::Turn(turn + 1, 0);
        if turn + 1 == TURNS { self.decide() } else { Verdict::GoOn }
    }

    fn decide(&mut self) -> Verdict {
        let mapped_percent = 100 * self.mapped_bytes / self.mapping.bytes.max(1);
        let (mapping, reading) = (self.mapping.us_per_mib(), self.reading.us_per_mib());
        self.state = State::Map;
        if mapped_percent < MAPPED_PERCENT_MIN {
            return Verdict::StopMapping(format!(
                "only {mapped_percent} % of what arrived lay in pages that can be mapped"
            ));
        }
        if mapping > reading {
            return Verdict::StopMapping(format!(
                "mapping cost {mapping:.0} µs/MiB on this connection, and reading {reading:.0}"
            ));
        }
        Verdict::GoOn
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

    /// Runs a trial in which each MiB costs so much and so much of it is mapped; returns the last verdict.
    fn tried(mapping_us: u64, reading_us: u64, mapped_percent: usize) -> (Trial, Verdict) {
        let mut trial = Trial::new(Mapping::Measured);
        for turn in 0..TURNS {
            let State::Turn(at, so_far) = trial.state else {
                panic!("the trial is over at turn {turn}")
            };
            assert_eq!((at, trial.maps()), (turn, turn % 2 == 0));
            let (us, mapped) = if trial.maps() {
                (mapping_us, (1 << 20) * mapped_percent / 100)
            } else {
                (reading_us, 0)
            };
            let verdict =
                trial.enter(turn, so_far, Duration::from_micros(us), mapped, (1 << 20) - mapped);
            if turn + 1 == TURNS {
                return (trial, verdict);
            }
            assert_eq!(verdict, Verdict::GoOn);
        }
        unreachable!()
    }

    #[test]
    fn the_cheaper_way_is_kept() {
        let (trial, verdict) = tried(100, 150, 99);
        assert_eq!((verdict, trial.maps()), (Verdict::GoOn, true));
        let (_, verdict) = tried(150, 100, 99);
        assert!(
            matches!(&verdict, Verdict::StopMapping(reason) if reason.contains("150 µs/MiB")),
            "{verdict:?}"
        );
    }

    #[test]
    fn mapping_little_does_not_pay_however_cheap_it_looks() {
        let (_, verdict) = tried(10, 100, 25);
        assert!(
            matches!(&verdict, Verdict::StopMapping(reason) if reason.contains("25 %")),
            "{verdict:?}"
        );
    }

    #[test]
    fn who_is_told_what_to_do_does_not_try() {
        assert!(
            Trial::new(Mapping::Always).maps() && Trial::new(Mapping::Always).clock().is_none()
        );
        assert!(!Trial::new(Mapping::Never).maps() && Trial::new(Mapping::Never).clock().is_none());
    }
}
