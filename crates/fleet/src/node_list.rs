//! Host lists in the notation of Slurm, such as `node[1-3,08],gpu[0-1]n[01-02]`.
//!
//! `scontrol show hostnames` expands these lists, but needs a configuration of Slurm, which
//! containers lack.

/// The most names of a list. Slurm's own limit is 64 Ki names (`MAX_RANGE` in its source).
pub const NAMES_MAX: usize = 64 << 10;

/// Why a list cannot be expanded. The number is the byte of the list where the fault is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeListError {
    /// A bracket is not closed, or a closing bracket comes first.
    #[error("unbalanced bracket at byte {0}")]
    Bracket(usize),
    /// The text between brackets is not a list of numbers and ranges.
    #[error("not a number or a range at byte {0}")]
    Range(usize),
    /// A name is empty.
    #[error("an empty name at byte {0}")]
    Empty(usize),
    /// The list has more than [`NAMES_MAX`] names.
    #[error("more than {NAMES_MAX} names")]
    TooMany,
}

/// Expands a list. Order and duplicates stay as they are in the list.
///
/// Numbers keep their leading zeros. If a name has several brackets, the numbers of the last
/// bracket change first.
pub fn expand(list: &str) -> Result<Vec<String>, NodeListError> {
    let mut names = Vec::new();
    let mut start = 0;
    for end in ends_of_names(list)? {
        let name = &list[start..end];
        if name.is_empty() {
            return Err(NodeListError::Empty(start));
        }
        names.extend(expand_name(name, start)?);
        if names.len() > NAMES_MAX {
            return Err(NodeListError::TooMany);
        }
        start = end + 1;
    }
    Ok(names)
}

/// The ends of the names: commas outside brackets, and the end of the list.
fn ends_of_names(list: &str) -> Result<Vec<usize>, NodeListError> {
    let mut ends = Vec::new();
    let mut open = None;
    for (at, byte) in list.bytes().enumerate() {
        match (byte, open) {
            (b'[', None) => open = Some(at),
            (b']', Some(_)) => open = None,
            (b'[', Some(_)) | (b']', None) => return Err(NodeListError::Bracket(at)),
            (b',', None) => ends.push(at),
            _ => {}
        }
    }
    if let Some(at) = open {
        return Err(NodeListError::Bracket(at));
    }
    ends.push(list.len());
    Ok(ends)
}

/// Expands one name, which begins at this byte of the list. Its brackets are balanced.
fn expand_name(name: &str, at: usize) -> Result<Vec<String>, NodeListError> {
    let mut names = vec![String::new()];
    let mut rest = name;
    while let Some((text, after)) = rest.split_once('[') {
        let begin = at + name.len() - after.len();
        let (ranges, after) = after.split_once(']').ok_or(NodeListError::Bracket(begin))?;
        let numbers = expand_ranges(ranges, begin)?;
        if names.len().saturating_mul(numbers.len()) > NAMES_MAX {
            return Err(NodeListError::TooMany);
        }
        let with_numbers = |prefix: &String| {
            numbers.iter().map(|number| format!("{prefix}{text}{number}")).collect::<Vec<_>>()
        };
        names = names.iter().flat_map(with_numbers).collect();
        rest = after;
    }
    Ok(names.iter().map(|prefix| format!("{prefix}{rest}")).collect())
}

/// Expands the text between two brackets, which begins at this byte of the list.
fn expand_ranges(ranges: &str, begin: usize) -> Result<Vec<String>, NodeListError> {
    let mut numbers = Vec::new();
    let mut at = begin;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first_number = parse_number(first).ok_or(NodeListError::Range(at))?;
        let last_number = parse_number(last).ok_or(NodeListError::Range(at))?;
        if first_number > last_number {
            return Err(NodeListError::Range(at));
        }
        if last_number - first_number >= NAMES_MAX as u64 - numbers.len() as u64 {
            return Err(NodeListError::TooMany);
        }
        // The width of the first number counts: [08-11] is 08, 09, 10 and 11.
        let width = first.len();
        numbers.extend((first_number..=last_number).map(|number| format!("{number:0width$}")));
        at += range.len() + 1;
    }
    Ok(numbers)
}

/// A number of at most 18 digits, without a sign.
fn parse_number(text: &str) -> Option<u64> {
    let is_number = (1..=18).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What `scontrol show hostnames` of Slurm 22.05 printed for the same lists.
    #[test]
    fn lists_expand_as_by_scontrol() {
        for (list, names) in [
            ("node1", "node1"),
            ("node[1-2]", "node1 node2"),
            ("n[001-003,010]", "n001 n002 n003 n010"),
            ("n[08-11]", "n08 n09 n10 n11"),
            ("rack[0-1]n[01-02]", "rack0n01 rack0n02 rack1n01 rack1n02"),
            ("n[1-3],n[2-5]", "n1 n2 n3 n2 n3 n4 n5"),
            ("n[3,1-2]", "n3 n1 n2"),
            ("head,node[1,4]", "head node1 node4"),
        ] {
            let expected: Vec<_> = names.split(' ').map(str::to_owned).collect();
            assert_eq!(expand(list), Ok(expected), "{list}");
        }
    }

    #[test]
    fn torn_lists_are_refused_with_their_place() {
        for (list, error) in [
            ("n[1-2", NodeListError::Bracket(1)),
            ("n1]", NodeListError::Bracket(2)),
            ("n[[1]]", NodeListError::Bracket(2)),
            ("n[]", NodeListError::Range(2)),
            ("n[1,]", NodeListError::Range(4)),
            ("n[2-1]", NodeListError::Range(2)),
            ("n[1-x]", NodeListError::Range(2)),
            ("n[+1]", NodeListError::Range(2)),
            ("", NodeListError::Empty(0)),
            ("n1,,n2", NodeListError::Empty(3)),
            ("n[1-99999999]", NodeListError::TooMany),
            ("n[0-999]m[0-999]", NodeListError::TooMany),
            ("n[1-999999999999999999999]", NodeListError::Range(2)),
        ] {
            assert_eq!(expand(list), Err(error), "{list}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(list in "[n\\[\\],\\-0-9]{0,40}") {
            if let Ok(names) = expand(&list) {
                prop_assert!(!names.is_empty() && names.len() <= NAMES_MAX);
                prop_assert!(names.iter().all(|name| !name.contains(['[', ']', ','])));
            }
        }

        #[test]
        fn ranges_expand_to_their_numbers(
            ranges in prop::collection::vec((0_u64..2000, 0_u64..20), 1..6),
            width in 1_usize..6,
        ) {
            let text: Vec<_> = ranges
                .iter()
                .map(|(first, more)| format!("{first:0width$}-{:0width$}", first + more))
                .collect();
            let expected: Vec<_> = ranges
                .iter()
                .flat_map(|(first, more)| {
                    let width = format!("{first:0width$}").len();
                    (*first..=first + more).map(move |number| format!("n{number:0width$}"))
                })
                .collect();
            prop_assert_eq!(expand(&format!("n[{}]", text.join(","))).unwrap(), expected);
        }
    }
}
