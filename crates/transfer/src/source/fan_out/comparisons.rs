//! The answers of all hosts to hashes of blocks, as one answer.

use crate::message::BlocksPlace;
use std::collections::HashMap;

/// Ranges of a file, in order and without overlap.
pub type Ranges = Vec<(u64, u64)>;

/// What the hosts answered so far, by the blocks and by the host.
#[derive(Debug, Default)]
pub struct Comparisons(HashMap<BlocksPlace, HashMap<usize, Ranges>>);

impl Comparisons {
    /// Adds the answer of a host about blocks that end there. Refuses an answer that does not fit.
    pub fn add(
        &mut self,
        host: usize,
        (place, end): (BlocksPlace, Option<u64>),
        ranges: Ranges,
    ) -> Result<(), &'static str> {
        let end = end.ok_or("an answer to nothing")?;
        let are_ordered = ranges.iter().all(|(start, stop)| start < stop)
            && ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0)
            && ranges.first().is_none_or(|first| first.0 >= place.offset)
            && ranges.last().is_none_or(|last| last.1 <= end);
        if !are_ordered {
            return Err("blocks that are not in order");
        }
        let answers = self.0.entry(place).or_default();
        let is_first = answers.insert(host, ranges).is_none();
        if is_first { Ok(()) } else { Err("a second answer") }
    }

    /// Takes the ranges that a host lacks of these blocks, if all of these hosts answered.
    pub fn take(&mut self, place: BlocksPlace, hosts: &[usize]) -> Option<Ranges> {
        let answers = self.0.get(&place)?;
        if !hosts.iter().all(|host| answers.contains_key(host)) {
            return None;
        }
        self.0.remove(&place).map(|answers| union(answers.into_values()))
    }

    /// Takes all blocks that all of these hosts answered, with the ranges that a host lacks.
    pub fn take_answered(&mut self, hosts: &[usize]) -> Vec<(BlocksPlace, Ranges)> {
        let places: Vec<_> = self.0.keys().copied().collect();
        let take = |place| self.take(place, hosts).map(|ranges| (place, ranges));
        places.into_iter().filter_map(take).collect()
    }
}

/// All ranges, joined where they touch.
fn union(all: impl Iterator<Item = Ranges>) -> Ranges {
    let mut ranges: Ranges = all.flatten().collect();
    ranges.sort_unstable();
    let mut joined: Ranges = Vec::new();
    for (start, end) in ranges {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: BlocksPlace = BlocksPlace { id: 3, attempt: 1, offset: 100 };

    #[test]
    fn blocks_are_sent_if_one_host_lacks_them() {
        let mut comparisons = Comparisons::default();
        let asked = (PLACE, Some(500));
        comparisons.add(0, asked, vec![(100, 200), (300, 400)]).unwrap();
        assert_eq!(comparisons.take_answered(&[0, 1]), []);
        comparisons.add(1, asked, vec![(150, 300), (450, 500)]).unwrap();
        let expected = vec![(PLACE, vec![(100, 400), (450, 500)])];
        assert_eq!(comparisons.take_answered(&[0, 1]), expected);
        // A host that failed.
        comparisons.add(0, asked, Vec::new()).unwrap();
        assert_eq!(comparisons.take_answered(&[0]), [(PLACE, Vec::new())]);
    }

    #[test]
    fn an_answer_that_does_not_fit_the_blocks_is_refused() {
        let mut comparisons = Comparisons::default();
        for ranges in [&[(90, 200)][..], &[(100, 501)], &[(200, 200)], &[(200, 300), (250, 400)]] {
            assert!(comparisons.add(0, (PLACE, Some(500)), ranges.to_vec()).is_err(), "{ranges:?}");
        }
        assert!(comparisons.add(0, (PLACE, None), Vec::new()).is_err());
        comparisons.add(0, (PLACE, Some(500)), Vec::new()).unwrap();
        assert!(comparisons.add(0, (PLACE, Some(500)), Vec::new()).is_err());
    }
}
