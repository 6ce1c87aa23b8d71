//! The rounds in which all pairs meet.

/// The pairs of so many hosts, in rounds in which each host is in one pair at most. An even number
/// of hosts needs one round less than there are hosts, and an odd number as many rounds as hosts.
pub fn rounds(hosts: usize) -> Vec<Vec<(usize, usize)>> {
    // The first host stays, and the others move on by one place each round (circle method). With
    // an odd number, the partner of the last place pauses.
    let places = hosts.next_multiple_of(2);
    let count = places.saturating_sub(1);
    let at = |round: usize, place: usize| match place {
        0 => 0,
        place => 1 + (place - 1 + round) % count,
    };
    (0..count)
        .map(|round| {
            let pair = |place| {
                let (one, other) = (at(round, place), at(round, places - 1 - place));
                (one.min(other), one.max(other))
            };
            (0..places / 2).map(pair).filter(|&(_, other)| other < hosts).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_pairs_meet_once_and_no_host_is_in_two_pairs_of_a_round() {
        for hosts in 0..40 {
            let rounds = rounds(hosts);
            if hosts > 1 {
                assert_eq!(rounds.len(), hosts - 1 + hosts % 2, "{hosts}");
            }
            let mut pairs = BTreeSet::new();
            for round in rounds {
                let mut busy = BTreeSet::new();
                for (one, other) in round {
                    assert!(one < other && other < hosts);
                    assert!(busy.insert(one) && busy.insert(other), "{hosts}");
                    assert!(pairs.insert((one, other)), "{hosts}");
                }
            }
            assert_eq!(pairs.len(), hosts * hosts.saturating_sub(1) / 2, "{hosts}");
        }
    }
}
