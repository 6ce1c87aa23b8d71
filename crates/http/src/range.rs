//! Parses the `Range` field: the byte ranges of a representation that a client requests (RFC 9110
//! section 14).
//!
//! It is written here because the available crates do not distinguish malformed from unsatisfiable
//! ranges. After a malformed field the client gets the whole file, after an unsatisfiable one an
//! error.

use crate::request::parse_digits;
use std::ops::Range;

/// The largest number of ranges in one request, as at nginx. zchunk, the format of dnf's metadata,
/// asks for up to 255. More ranges can cost more CPU time than the selected bytes (RFC 9110 section
/// 17.15).
const RANGES_MAX: usize = 300;

/// The part of a representation that a `Range` field selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SelectedRanges {
    /// The whole representation: the field has another unit, is malformed or is unreasonable, and
    /// may be ignored.
    Everything,
    /// One range.
    One(Range<u64>),
    /// Several ranges in the order of the field, none of them empty.
    Many(Vec<Range<u64>>),
    /// No range of the field is satisfiable: status 416.
    Unsatisfiable,
}

/// Parses the field for a representation of `len` bytes.
pub fn parse(field: &[u8], len: u64) -> SelectedRanges {
    let Some(set) =
        field.split_at_checked(6).filter(|(unit, _)| unit.eq_ignore_ascii_case(b"bytes="))
    else {
        return SelectedRanges::Everything;
    };
    let mut ranges = Vec::new();
    let mut specs = 0;
    for spec in
        set.1.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|spec| !spec.is_empty())
    {
        specs += 1;
        match parse_spec(spec, len) {
            _ if specs > RANGES_MAX => return SelectedRanges::Everything,
            RangeSpec::Malformed => return SelectedRanges::Everything,
            RangeSpec::Unsatisfiable => {}
            RangeSpec::Bytes(range) => ranges.push(range),
        }
    }
    if specs == 0 {
        return SelectedRanges::Everything;
    }
    // Overlapping ranges may select more bytes than the representation has. RFC 9110 section 14.2
    // allows a server to ignore them.
    let selected_bytes: u64 =
        ranges.iter().map(|range| range.end - range.start).fold(0, u64::saturating_add);
    match <[_; 1]>::try_from(ranges) {
        Ok([range]) if range.is_empty() => SelectedRanges::Everything,
        Ok([range]) => SelectedRanges::One(range),
        Err(ranges) if ranges.is_empty() => SelectedRanges::Unsatisfiable,
        Err(ranges) if selected_bytes > len || ranges.iter().any(Range::is_empty) => {
            SelectedRanges::Everything
        }
        Err(ranges) => SelectedRanges::Many(ranges),
    }
}

/// One range of the field.
enum RangeSpec {
    Malformed,
    /// Well formed, but without a byte of the representation.
    Unsatisfiable,
    Bytes(Range<u64>),
}

fn parse_spec(spec: &[u8], len: u64) -> RangeSpec {
    let Some(dash) = spec.iter().position(|&byte| byte == b'-') else {
        return RangeSpec::Malformed;
    };
    let (first, last) = (&spec[..dash], &spec[dash + 1..]);
    // A number that overflows is beyond the end of every representation.
    let number = |digits: &[u8]| {
        (!digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
            .then(|| parse_digits(digits).unwrap_or(u64::MAX))
    };
    match (number(first), number(last)) {
        (None, Some(suffix)) if first.is_empty() => match suffix {
            0 => RangeSpec::Unsatisfiable,
            // A suffix of an empty representation is satisfiable, and empty.
            _ => RangeSpec::Bytes(len.saturating_sub(suffix)..len),
        },
        (Some(first), Some(last)) if last < first => RangeSpec::Malformed,
        (Some(first), Some(_)) if first >= len => RangeSpec::Unsatisfiable,
        (Some(first), Some(last)) => RangeSpec::Bytes(first..len.min(last.saturating_add(1))),
        (Some(first), None) if last.is_empty() => {
            if first >= len {
                RangeSpec::Unsatisfiable
            } else {
                RangeSpec::Bytes(first..len)
            }
        }
        _ => RangeSpec::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_form_of_section_14_1_2_is_parsed() {
        let of_ten = |field: &str| parse(field.as_bytes(), 10);
        for (field, expected) in [
            ("bytes=0-3", SelectedRanges::One(0..4)),
            ("Bytes=0-0", SelectedRanges::One(0..1)),
            ("bytes=5-", SelectedRanges::One(5..10)),
            ("bytes=-3", SelectedRanges::One(7..10)),
            ("bytes=-30", SelectedRanges::One(0..10)),
            ("bytes=5-99999999999999999999999", SelectedRanges::One(5..10)),
            ("bytes=9-9", SelectedRanges::One(9..10)),
            ("bytes=10-", SelectedRanges::Unsatisfiable),
            ("bytes=-0", SelectedRanges::Unsatisfiable),
            ("bytes=99999999999999999999999-", SelectedRanges::Unsatisfiable),
            ("bytes=10-11,12-", SelectedRanges::Unsatisfiable),
            ("bytes=0-1, 4-5", SelectedRanges::Many(vec![0..2, 4..6])),
            ("bytes=4-5 ,,0-1", SelectedRanges::Many(vec![4..6, 0..2])),
            ("bytes=0-1,10-", SelectedRanges::One(0..2)),
            ("bytes=0-8,1-9", SelectedRanges::Everything),
            ("bytes=3-2", SelectedRanges::Everything),
            ("bytes=0-1,a", SelectedRanges::Everything),
            ("bytes=", SelectedRanges::Everything),
            ("bytes=,", SelectedRanges::Everything),
            ("bytes=-", SelectedRanges::Everything),
            ("bytes=--1", SelectedRanges::Everything),
            ("bytes=+1-2", SelectedRanges::Everything),
            ("bytes=1 - 2", SelectedRanges::Everything),
            ("bytes 0-1", SelectedRanges::Everything),
            ("rows=0-1", SelectedRanges::Everything),
            ("", SelectedRanges::Everything),
        ] {
            assert_eq!(of_ten(field), expected, "{field}");
        }
        let many = format!("bytes={}", "0-0,".repeat(RANGES_MAX + 1));
        assert_eq!(parse(many.as_bytes(), 1000), SelectedRanges::Everything);
        assert_eq!(parse(b"bytes=0-", 0), SelectedRanges::Unsatisfiable);
        assert_eq!(
            parse(b"bytes=-1", 0),
            SelectedRanges::Everything,
            "a suffix of an empty file is the whole file"
        );
    }

    proptest! {
        #[test]
        fn parsed_ranges_lie_inside_the_file(
            field in "(bytes=)?[-0-9, a]{0,30}",
            len in 0u64..100,
        ) {
            let ranges = match parse(field.as_bytes(), len) {
                SelectedRanges::One(range) => vec![range],
                SelectedRanges::Many(ranges) => { prop_assert!(ranges.len() > 1); ranges }
                _ => vec![],
            };
            for range in ranges {
                prop_assert!(range.start < range.end && range.end <= len);
            }
        }
    }
}
