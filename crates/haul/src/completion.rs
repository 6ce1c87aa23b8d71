//! [`CompletionTracker`]: tracks the zero-copy sends in flight, by their kernel sequence number.
//!
//! The tracker makes no system call, so that tests can apply completions in every order.

use haul_sys::error_queue::Completion;
use std::collections::VecDeque;

/// The zero-copy sends in flight by sequence number, oldest first, each with the caller's token.
///
/// The kernel numbers a socket's sends in a 32-bit counter that wraps. Completions name inclusive
/// ranges, may arrive out of order, and may merge several sends. On TCP a failed send does not have
/// a number; on UDP it may have one.
///
/// The kernel does not report the next number, and the counter of a socket that was used before is
/// not at 0, even if `SO_ZEROCOPY` was off in between. So the first send must be alone in flight,
/// and its completion shows its number. This is repeated whenever the next number is unknown.
#[derive(Debug)]
pub(crate) struct CompletionTracker<T = ()> {
    numbering: Numbering,
    /// The number of the first element of `sends`, unless the numbering is unknown.
    oldest: u32,
    sends: VecDeque<Option<TrackedSend<T>>>,
    in_flight: usize,
}

/// Whether the number of the next send is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbering {
    /// The next send must be alone in flight: its completion shows its number.
    Unknown,
    /// The sends in flight have known numbers, and the next number is known.
    Known,
    /// The sends in flight have known numbers, but the next number is unknown.
    Ending,
}

/// A send in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TrackedSend<T = ()> {
    pub bytes: usize,
    pub token: T,
}

impl<T> Default for CompletionTracker<T> {
    fn default() -> Self {
        Self { numbering: Numbering::Unknown, oldest: 0, sends: VecDeque::new(), in_flight: 0 }
    }
}

impl<T> CompletionTracker<T> {
    /// Whether a zero-copy send can be made now. If not, completions must arrive first, and other
    /// bytes can only be copied.
    pub fn accepts_send(&self) -> bool {
        self.numbering == Numbering::Known || self.in_flight == 0
    }

    /// Whether the next send's completion will show the numbers. Completions that are queued before
    /// that send belong to other sends: drain them first.
    pub fn is_next_send_first(&self) -> bool {
        self.numbering != Numbering::Known && self.in_flight == 0
    }

    /// Records that an unknown number of numbers was used, as by a datagram that failed.
    pub fn record_unknown_numbers(&mut self) {
        if self.numbering == Numbering::Known {
            self.numbering = Numbering::Ending;
        }
    }

    /// Records a send of `bytes` bytes, at least one.
    pub fn record_send(&mut self, bytes: usize, token: T) {
        debug_assert!(self.accepts_send(), "the number of this send is unknown");
        if self.in_flight == 0 && self.numbering == Numbering::Ending {
            self.numbering = Numbering::Unknown;
        }
        self.sends.push_back(Some(TrackedSend { bytes, token }));
        self.in_flight += 1;
    }

    /// The number of sends in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The bytes of the sends in flight.
    pub fn bytes_in_flight(&self) -> usize {
        self.sends.iter().flatten().map(|sent| sent.bytes).sum()
    }

    /// Removes the sends that `completion` names, and passes each to `on_completed`. Numbers that
    /// are not in flight (a repeated completion, another sender's) change nothing.
    pub fn complete(
        &mut self,
        completion: Completion,
        mut on_completed: impl FnMut(TrackedSend<T>),
    ) {
        if self.numbering == Numbering::Unknown && self.in_flight == 1 {
            self.oldest = completion.last;
            self.numbering = Numbering::Known;
        }
        let first = completion.first.wrapping_sub(self.oldest) as usize;
        let count = completion.last.wrapping_sub(completion.first) as usize;
        // A completion may begin before the oldest send in flight: its distance then wraps to far
        // beyond the end.
        let range = if first < self.sends.len() {
            first..first.saturating_add(count).saturating_add(1).min(self.sends.len())
        } else {
            let end = completion.last.wrapping_sub(self.oldest) as usize;
            0..if end < self.sends.len() { end + 1 } else { 0 }
        };
        for send in self.sends.range_mut(range) {
            if let Some(sent) = send.take() {
                self.in_flight -= 1;
                on_completed(sent);
            }
        }
        while let Some(None) = self.sends.front() {
            self.sends.pop_front();
            self.oldest = self.oldest.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tracker_at(oldest: u32, sends: usize) -> CompletionTracker<usize> {
        let numbering = Numbering::Known;
        let mut tracker = CompletionTracker { numbering, oldest, ..CompletionTracker::default() };
        (0..sends).for_each(|token| tracker.record_send(10, token));
        tracker
    }

    /// The tokens of the sends that a completion removes.
    fn complete(tracker: &mut CompletionTracker<usize>, first: u32, last: u32) -> Vec<usize> {
        let mut tokens = Vec::new();
        tracker.complete(Completion { first, last, copied: false }, |sent| tokens.push(sent.token));
        tokens
    }

    #[test]
    fn completions_wrap_with_the_counter() {
        let mut tracker = tracker_at(u32::MAX - 1, 4);
        assert_eq!(complete(&mut tracker, u32::MAX, 0), [1, 2]);
        assert_eq!(complete(&mut tracker, u32::MAX - 1, u32::MAX - 1), [0]);
        assert_eq!(complete(&mut tracker, 1, 1), [3]);
        assert_eq!((tracker.in_flight(), tracker.oldest), (0, 2));
    }

    #[test]
    fn a_completion_that_begins_before_the_oldest_send_completes_the_rest_of_its_range() {
        let mut tracker = tracker_at(0, 4);
        assert_eq!(complete(&mut tracker, 0, 1), [0, 1]);
        assert_eq!(complete(&mut tracker, 0, 2), [2]);
        assert!(complete(&mut tracker, 0, 2).is_empty());
        assert_eq!(tracker.in_flight(), 1);
    }

    #[test]
    fn the_completion_of_a_send_that_is_alone_shows_the_numbers() {
        let mut tracker = CompletionTracker::default();
        // Nothing is in flight, so this belongs to another sender.
        assert!(complete(&mut tracker, 3, 3).is_empty());
        assert!(tracker.is_next_send_first());
        tracker.record_send(10, 0);
        assert!(!tracker.accepts_send());
        // Merged with the completion of a send before it.
        assert_eq!(complete(&mut tracker, 6, 7), [0]);
        assert!(tracker.accepts_send() && !tracker.is_next_send_first());
        tracker.record_send(10, 1);
        tracker.record_send(10, 2);
        tracker.record_unknown_numbers();
        assert!(!tracker.accepts_send());
        // The number of the failed send.
        assert!(complete(&mut tracker, 10, 10).is_empty());
        assert_eq!(complete(&mut tracker, 8, 9), [1, 2]);
        assert!(tracker.is_next_send_first());
        tracker.record_send(10, 3);
        assert_eq!(complete(&mut tracker, 12, 12), [3]);
        assert_eq!(tracker.oldest, 13);
    }

    proptest! {
        /// Splits the sends into ranges and completes these in any order, one of them twice: each
        /// send completes once.
        #[test]
        fn every_order_of_completions_completes_each_send_once(
            oldest: u32,
            cuts in proptest::collection::vec(1usize..6, 1..20),
            order in any::<proptest::sample::Index>(),
            seed: u64,
        ) {
            let total: usize = cuts.iter().sum();
            let mut tracker = tracker_at(oldest, total);
            let mut completions = Vec::new();
            let mut next = 0;
            for cut in &cuts {
                let number = |offset: usize| oldest.wrapping_add(offset as u32);
                completions.push((number(next), number(next + cut - 1)));
                next += cut;
            }
            completions.push(completions[order.index(completions.len())]);
            // A shuffle that depends only on the seed.
            let mut state = seed;
            for i in (1..completions.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                completions.swap(i, (state >> 33) as usize % (i + 1));
            }
            let mut completed: Vec<usize> = completions
                .into_iter()
                .flat_map(|(first, last)| complete(&mut tracker, first, last))
                .collect();
            completed.sort_unstable();
            prop_assert_eq!(completed, (0..total).collect::<Vec<_>>());
            prop_assert_eq!(tracker.in_flight(), 0);
            prop_assert!(tracker.sends.is_empty());
        }

        #[test]
        fn arbitrary_completions_remove_only_sends_in_flight(oldest: u32, first: u32, last: u32) {
            let mut tracker = tracker_at(oldest, 5);
            let completed = complete(&mut tracker, first, last);
            prop_assert_eq!(completed.len() + tracker.in_flight(), 5);
        }
    }
}
