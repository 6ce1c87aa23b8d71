//! The answer of a host to a list, and the answers of all hosts as one answer.

use crate::message::Held;
use std::collections::BTreeSet;

/// The answer of a host to a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requested {
    pub count: u32,
    pub bits: Vec<u8>,
    pub held: Vec<Held>,
    pub comparable: Vec<u32>,
}

impl Requested {
    /// Refuses an answer that does not fit a list with so many regular files.
    pub fn check(&self, files: u32) -> Result<(), &'static str> {
        let Self { count, bits, held, comparable } = self;
        if *count != files || bits.len() != files.div_ceil(8) as usize {
            return Err("an answer to another list");
        }
        let is_requested = |index: u32| index < files && self.has(index);
        if !held.iter().all(|held| is_requested(held.index)) {
            return Err("parts of no file");
        }
        if !comparable.iter().all(|&index| is_requested(index)) || !comparable.is_sorted() {
            return Err("an earlier version of no file");
        }
        let are_ordered = |ranges: &[(u64, u64)]| {
            ranges.iter().all(|(begin, end)| begin < end)
                && ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0)
        };
        if !held.iter().all(|held| are_ordered(&held.ranges)) {
            return Err("parts that are not in order");
        }
        Ok(())
    }

    /// Whether a file is requested.
    pub fn has(&self, at: u32) -> bool {
        self.bits.get(at as usize / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
    }

    /// Whether the host requests the file and cannot compare blocks of the file.
    fn is_whole(&self, index: u32) -> bool {
        self.has(index) && self.comparable.binary_search(&index).is_err()
    }
}

/// The files that at least one host requests, and what all of these hosts have. `None` without an
/// answer. All answers fit one list ([`Requested::check`]).
pub fn union(answers: Vec<Requested>) -> Option<Requested> {
    let mut answers = answers.into_iter();
    let mut all = answers.next()?;
    for answer in answers {
        let ranges_of = |held: &[Held], index| {
            held.iter().find(|held| held.index == index).map(|held| held.ranges.clone())
        };
        let mut held = Vec::new();
        let indices = all.held.iter().chain(&answer.held).map(|held| held.index);
        let indices: BTreeSet<_> = indices.collect();
        for index in indices {
            let ours = ranges_of(&all.held, index).unwrap_or_default();
            let theirs = ranges_of(&answer.held, index).unwrap_or_default();
            let ranges = match (all.has(index), answer.has(index)) {
                (true, true) => intersection(&ours, &theirs),
                (true, false) => ours,
                (false, true) => theirs,
                (false, false) => continue,
            };
            if !ranges.is_empty() {
                held.push(Held { index, ranges });
            }
        }
        let comparable = all.comparable.iter().chain(&answer.comparable).copied();
        let comparable: BTreeSet<_> =
            comparable.filter(|&index| !all.is_whole(index) && !answer.is_whole(index)).collect();
        all.comparable = comparable.into_iter().collect();
        for (ours, theirs) in all.bits.iter_mut().zip(&answer.bits) {
            *ours |= theirs;
        }
        all.held = held;
    }
    Some(all)
}

/// The common parts of two lists of ranges in order.
fn intersection(ours: &[(u64, u64)], theirs: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut ours, mut theirs) =
        (ours.iter().copied().peekable(), theirs.iter().copied().peekable());
    let mut common = Vec::new();
    while let (Some(&one), Some(&other)) = (ours.peek(), theirs.peek()) {
        let (begin, end) = (one.0.max(other.0), one.1.min(other.1));
        if begin < end {
            common.push((begin, end));
        }
        if one.1 < other.1 {
            ours.next()
        } else {
            theirs.next()
        };
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requested(bits: u8, held: &[(u32, &[(u64, u64)])]) -> Requested {
        let held =
            held.iter().map(|(index, ranges)| Held { index: *index, ranges: ranges.to_vec() });
        Requested { count: 8, bits: vec![bits], held: held.collect(), comparable: Vec::new() }
    }

    #[test]
    fn a_file_is_sent_if_one_host_requests_it_without_what_all_of_these_have() {
        let answers = vec![
            requested(0b0111, &[(0, &[(0, 10)]), (1, &[(0, 10), (20, 30)])]),
            requested(0b1010, &[(1, &[(5, 25)]), (3, &[(0, 7)])]),
        ];
        let expected =
            requested(0b1111, &[(0, &[(0, 10)]), (1, &[(5, 10), (20, 25)]), (3, &[(0, 7)])]);
        assert_eq!(union(answers), Some(expected));
    }

    #[test]
    fn an_answer_that_does_not_fit_the_list_is_refused() {
        let good = requested(0b10, &[(1, &[(0, 5), (5, 9)])]);
        assert_eq!(good.check(8), Ok(()));
        for (answer, files) in [
            (good.clone(), 9),
            (Requested { bits: vec![2, 0], ..good.clone() }, 8),
            (requested(0b10, &[(0, &[(0, 5)])]), 8),
            (requested(0b10, &[(9, &[(0, 5)])]), 8),
            (requested(0b10, &[(1, &[(5, 5)])]), 8),
            (requested(0b10, &[(1, &[(5, 9), (0, 5)])]), 8),
        ] {
            assert!(answer.check(files).is_err(), "{answer:?}");
        }
    }

    /// A host that lacks an earlier version gets the whole file, and so do the others.
    #[test]
    fn a_file_is_compared_if_all_hosts_that_request_it_can_compare_it() {
        let answer = |bits, comparable: &[u32]| Requested {
            comparable: comparable.to_vec(),
            ..requested(bits, &[])
        };
        let answers = vec![answer(0b0111, &[0, 1, 2]), answer(0b1011, &[1, 3])];
        assert_eq!(union(answers), Some(answer(0b1111, &[1, 2, 3])));
        for comparable in [&[3, 1][..], &[4], &[9]] {
            assert!(answer(0b1011, comparable).check(8).is_err(), "{comparable:?}");
        }
    }

    proptest! {
        #[test]
        fn an_intersection_has_what_both_have(
            ours in prop::collection::btree_set(0_u64..60, 0..20),
            theirs in prop::collection::btree_set(0_u64..60, 0..20),
        ) {
            let ranges = |edges: &BTreeSet<u64>| {
                let edges: Vec<_> = edges.iter().copied().collect();
                let (pairs, _) = edges.as_chunks::<2>();
                pairs.iter().map(|[begin, end]| (*begin, *end)).collect::<Vec<_>>()
            };
            let (ours, theirs) = (ranges(&ours), ranges(&theirs));
            let common = intersection(&ours, &theirs);
            let is_in = |at| move |&(begin, end): &(u64, u64)| begin <= at && at < end;
            let has = |ranges: &[(u64, u64)], at| ranges.iter().any(is_in(at));
            for at in 0..60 {
                prop_assert_eq!(has(&common, at), has(&ours, at) && has(&theirs, at));
            }
        }
    }
}
