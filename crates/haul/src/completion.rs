//! The book of sends whose pages the kernel still holds.
//!
//! Pure: it makes no system call, so that every order of notices can be tried on it.

use haul_sys::error_queue::Completion;
use std::collections::VecDeque;

/// Sends by their number, from the oldest that has no notice yet, each with a mark of the caller's.
///
/// The kernel numbers sends from 0 in a 32-bit counter that wraps. Notices name inclusive ranges, may come
/// out of order, and may join several sends. A send that failed has
/// no number on TCP; on UDP it may have one, so a book is closed to new sends after the first such failure.
#[derive(Debug)]
pub(crate) struct CompletionTracker<T = ()> {
    oldest: u32,
    sends: VecDeque<Option<Sent<T>>>,
    open: usize,
}

/// A send in the book.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sent<T = ()> {
    pub bytes: usize,
    pub mark: T,
}

impl<T> Default for CompletionTracker<T> {
    fn default() -> Self {
        Self { oldest: 0, sends: VecDeque::new(), open: 0 }
    }
}

impl<T> CompletionTracker<T> {
    /// Enters a send that took `bytes`, at least one.
    pub fn sent(&mut self, bytes: usize, mark: T) {
        self.sends.push_back(Some(Sent { bytes, mark }));
        self.open += 1;
    }

    /// How many sends have no notice yet.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Strikes out what `notice` names and hands each struck send to `settled`. Numbers that are not open (a
    /// repeated notice, another's) change nothing.
    pub fn settle(&mut self, notice: Completion, mut settled: impl FnMut(Sent<T>)) {
        let first = notice.first.wrapping_sub(self.oldest) as usize;
        let count = notice.last.wrapping_sub(notice.first) as usize;
        // A notice may begin before the oldest open send: its distance then wraps to far beyond the end.
        let range = if first < self.sends.len() {
            first..first.saturating_add(count).saturating_add(1).min(self.sends.len())
        } else {
            let end = notice.last.wrapping_sub(self.oldest) as usize;
            0..if end < self.sends.len() { end + 1 } else { 0 }
        };
        for send in self.sends.range_mut(range) {
            if let Some(sent) = send.take() {
                self.open -= 1;
                settled(sent);
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

    fn book_at(oldest: u32, sends: usize) -> CompletionTracker<usize> {
        let mut book = CompletionTracker { oldest, ..CompletionTracker::default() };
        (0..sends).for_each(|mark| book.sent(10, mark));
        book
    }

    /// The marks that a notice settles.
    fn settle(book: &mut CompletionTracker<usize>, first: u32, last: u32) -> Vec<usize> {
        let mut marks = Vec::new();
        book.settle(Completion { first, last, copied: false }, |sent| marks.push(sent.mark));
        marks
    }

    #[test]
    fn the_counter_wraps() {
        let mut book = book_at(u32::MAX - 1, 4);
        assert_eq!(settle(&mut book, u32::MAX, 0), [1, 2]);
        assert_eq!(settle(&mut book, u32::MAX - 1, u32::MAX - 1), [0]);
        assert_eq!(settle(&mut book, 1, 1), [3]);
        assert_eq!((book.open(), book.oldest), (0, 2));
    }

    #[test]
    fn a_notice_that_begins_before_the_oldest_settles_the_rest_of_its_range() {
        let mut book = book_at(0, 4);
        assert_eq!(settle(&mut book, 0, 1), [0, 1]);
        assert_eq!(settle(&mut book, 0, 2), [2]);
        assert!(settle(&mut book, 0, 2).is_empty());
        assert_eq!(book.open(), 1);
    }

    proptest! {
        /// Cut the sends into ranges, tell them in any order, some twice: each send settles once.
        #[test]
        fn every_order_of_notices_settles_each_send_once(
            oldest: u32,
            cuts in proptest::collection::vec(1usize..6, 1..20),
            order in any::<proptest::sample::Index>(),
            seed: u64,
        ) {
            let total: usize = cuts.iter().sum();
            let mut book = book_at(oldest, total);
            let mut notices = Vec::new();
            let mut next = 0;
            for cut in &cuts {
                let number = |offset: usize| oldest.wrapping_add(offset as u32);
                notices.push((number(next), number(next + cut - 1)));
                next += cut;
            }
            notices.push(notices[order.index(notices.len())]);
            // A fixed shuffle from the seed.
            let mut state = seed;
            for i in (1..notices.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                notices.swap(i, (state >> 33) as usize % (i + 1));
            }
            let mut settled: Vec<usize> =
                notices.into_iter().flat_map(|(first, last)| settle(&mut book, first, last)).collect();
            settled.sort_unstable();
            prop_assert_eq!(settled, (0..total).collect::<Vec<_>>());
            prop_assert_eq!(book.open(), 0);
            prop_assert!(book.sends.is_empty());
        }

        #[test]
        fn hostile_notices_change_no_more_than_what_is_open(oldest: u32, first: u32, last: u32) {
            let mut book = book_at(oldest, 5);
            let settled = settle(&mut book, first, last);
            prop_assert_eq!(settled.len() + book.open(), 5);
        }
    }
}
