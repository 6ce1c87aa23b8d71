//! The book of sends whose pages the kernel still holds.
//!
//! Pure: it makes no system call, so that every order of notices can be tried on it.

use haul_sys::error_queue::Notice;
use std::collections::VecDeque;

/// Sends by their number, from the oldest that has no notice yet.
///
/// The kernel numbers sends from 0 in a 32-bit counter that wraps. Notices name inclusive ranges, may come
/// out of order, and may join several sends. A send that took no byte has no number.
#[derive(Debug, Default)]
pub(crate) struct Book {
    oldest: u32,
    sends: VecDeque<Option<u32>>,
    open: usize,
}

/// What a notice settled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Settled {
    pub zero_copied_bytes: u64,
    pub copied_bytes: u64,
}

impl Book {
    /// Enters a send that took `bytes`.
    pub fn sent(&mut self, bytes: usize) {
        self.sends.push_back(Some(bytes as u32));
        self.open += 1;
    }

    /// How many sends have no notice yet.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Strikes out what `notice` names. Numbers that are not open (a repeated notice, another's) change
    /// nothing.
    pub fn settle(&mut self, notice: Notice) -> Settled {
        let mut bytes = 0;
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
                bytes += u64::from(sent);
                self.open -= 1;
            }
        }
        while let Some(None) = self.sends.front() {
            self.sends.pop_front();
            self.oldest = self.oldest.wrapping_add(1);
        }
        if notice.copied {
            Settled { copied_bytes: bytes, ..Settled::default() }
        } else {
            Settled { zero_copied_bytes: bytes, ..Settled::default() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn book_at(oldest: u32, sends: usize) -> Book {
        let mut book = Book { oldest, ..Book::default() };
        (0..sends).for_each(|_| book.sent(10));
        book
    }

    #[test]
    fn the_counter_wraps() {
        let mut book = book_at(u32::MAX - 1, 4);
        let settled = book.settle(Notice { first: u32::MAX, last: 0, copied: true });
        assert_eq!(settled, Settled { copied_bytes: 20, zero_copied_bytes: 0 });
        book.settle(Notice { first: u32::MAX - 1, last: u32::MAX - 1, copied: false });
        book.settle(Notice { first: 1, last: 1, copied: false });
        assert_eq!((book.open(), book.oldest), (0, 2));
    }

    proptest! {
        /// Cut the sends into ranges, tell them in any order, some twice: each byte settles once.
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
                notices.push(Notice { first: number(next), last: number(next + cut - 1), copied: cut % 2 == 0 });
                next += cut;
            }
            notices.push(notices[order.index(notices.len())]);
            // A fixed shuffle from the seed.
            let mut state = seed;
            for i in (1..notices.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                notices.swap(i, (state >> 33) as usize % (i + 1));
            }
            let mut bytes = 0;
            for notice in notices {
                let settled = book.settle(notice);
                bytes += settled.copied_bytes + settled.zero_copied_bytes;
            }
            prop_assert_eq!(bytes, 10 * total as u64);
            prop_assert_eq!(book.open(), 0);
            prop_assert!(book.sends.is_empty());
        }

        #[test]
        fn hostile_notices_change_no_more_than_what_is_open(oldest: u32, first: u32, last: u32) {
            let mut book = book_at(oldest, 5);
            let settled = book.settle(Notice { first, last, copied: true });
            prop_assert_eq!(settled.copied_bytes + 10 * book.open() as u64, 50);
        }
    }
}
