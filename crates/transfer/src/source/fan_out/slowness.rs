//! Finds hosts that are slower than the others, and judges whether the chain is faster without
//! them.
//!
//! A slow host delays all hosts behind. A slow host at the end of the chain delays no host. A
//! suspected host moves to the end, because a move only sends some MiB twice. The next host at the
//! place then shows whether the host or the connection before is slow.

use super::moves::Move;
use super::rate::rate_text;
use super::state::State;
use std::time::{Duration, Instant};

/// A host that is silent for so long is not compared with other hosts.
const COMPARE_SILENCE_MAX: Duration = Duration::from_millis(2500);
/// The most bytes that a host may be behind the host before, however slow it is: the buffers of
/// sockets and the sync of a disk.
const BEHIND_BYTES_MAX: u64 = 48 << 20;
/// A host is suspected if the host before was so many times faster.
const SLOW_RATIO: f64 = 3.0;
/// Another first host is tried if the transfer would take so many seconds more.
const TRIAL_SECONDS_MIN: f64 = 10.0;
/// The time before the first trial. The time before each further trial is twice as long.
const TRIAL_INTERVAL: Duration = Duration::from_secs(4);
/// The most trials.
const TRIALS_MAX: u32 = 4;
/// A move is a gain if the next host at the place is so many times faster.
const GAIN: f64 = 1.5;
/// The time in which a move is judged.
const JUDGE_TIME_MAX: Duration = Duration::from_secs(10);

impl State {
    /// Forgets the rates of the hosts from a place on, which get another host before.
    pub fn measure_again(&mut self, place: usize) {
        for &number in &self.chain[place.min(self.chain.len())..] {
            self.members[number].rate.forget();
        }
    }

    /// The place of a host that is much slower than the host before, with the reason.
    pub fn slow(&self, now: Instant) -> Option<(usize, String)> {
        self.chain.windows(2).enumerate().find_map(|(place, pair)| {
            let (before, member) = (&self.members[pair[0]], &self.members[pair[1]]);
            // A host that is silent may be cut off, which is found out later.
            let is_silent = now - member.heard > COMPARE_SILENCE_MAX;
            let behind = before.report.bytes.saturating_sub(member.report.bytes);
            let rate = member.rate.recent().filter(|_| !is_silent && !before.is_local)?;
            if behind <= BEHIND_BYTES_MAX || rate * SLOW_RATIO >= before.rate.highest {
                return None;
            }
            let (rate, faster) = (rate_text(rate), rate_text(before.rate.highest));
            let reason = format!("it receives {rate}, where {} received {faster}", before.name);
            Some((place + 1, reason))
        })
    }

    /// The place of the first host that the network reaches, if it is time to try whether another
    /// host is faster there. No other connection of the source shows which end is slow.
    pub fn trial(&mut self, now: Instant, bytes_requested: u64) -> Option<usize> {
        let place = usize::from(self.members[*self.chain.first()?].is_local);
        let first = &self.members[*self.chain.get(place)?];
        let rate = first.rate.recent()?;
        let left = bytes_requested.saturating_sub(first.report.bytes) as f64 / rate.max(1.0);
        let interval = TRIAL_INTERVAL * 2_u32.pow(self.moves.trials);
        let is_due = self.moves.trials < TRIALS_MAX && now - self.moves.trial_at >= interval;
        if !is_due || left < TRIAL_SECONDS_MIN || !self.may_move(place) {
            return None;
        }
        self.moves.trials += 1;
        self.moves.trial_at = now;
        Some(place)
    }

    /// Whether a host may move to the end of the chain, for the first time.
    pub fn may_move(&self, place: usize) -> bool {
        place + 1 < self.chain.len() && !self.members[self.chain[place]].rate.was_moved
    }

    /// Records that the host of this place moves.
    pub fn begin_move(&mut self, place: usize, now: Instant) {
        let member = &mut self.members[self.chain[place]];
        member.rate.was_moved = true;
        let rate = member.rate.recent().unwrap_or(0.0);
        self.moves.last = Some(Move { name: member.name.clone(), rate, place, at: now });
    }

    /// Whether a move is not judged yet.
    pub fn has_move(&self) -> bool {
        self.moves.last.is_some()
    }

    /// Judges the last move. Returns what the user should know, if the move was a gain.
    pub fn end_move(&mut self, now: Instant) -> Option<String> {
        let Move { place, at, .. } = *self.moves.last.as_ref()?;
        let next = self.chain.get(place).map(|&next| &self.members[next].rate);
        let Some(after) = next.and_then(super::rate::MemberRate::recent) else {
            if now - at > JUDGE_TIME_MAX {
                self.moves.last = None;
            }
            return None;
        };
        let Move { name, rate, .. } = self.moves.last.take()?;
        if after > rate * GAIN {
            let (rate, after) = (rate_text(rate), rate_text(after));
            return Some(format!(
                "{name}: it received {rate}, and the next host {after} in its place, so the others \
                 go first"
            ));
        }
        // The connection before is slow, or all hosts behind.
        if let Some(before) = place.checked_sub(1).and_then(|before| self.chain.get(before)) {
            self.members[*before].rate.highest = after;
        }
        None
    }
}
