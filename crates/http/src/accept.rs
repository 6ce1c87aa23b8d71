//! Chooses between media types by the field `Accept` (RFC 9110 section 12.5.1).

use crate::list_field::ListField;

/// Whether the client prefers the media type `one` to `other`. Of two types of the same weight it
/// prefers the one that it names first; a type that it does not name itself is not preferred.
pub fn prefers(field: &ListField<'_>, one: &str, other: &str) -> bool {
    match (preference(field, one), preference(field, other)) {
        (Some((weight, Some(place))), other) if weight > 0 => {
            other.is_none_or(|(other_weight, other_place)| {
                let is_before = other_place.is_none_or(|other_place| place < other_place);
                weight > other_weight || (weight == other_weight && is_before)
            })
        }
        _ => false,
    }
}

/// Whether the client names the media type itself, as browsers do when they load a page. Ranges
/// such as `*/*` do not count.
pub fn names(field: &ListField<'_>, media_type: &str) -> bool {
    preference(field, media_type).is_some_and(|(weight, place)| weight > 0 && place.is_some())
}

/// The weight of a media type in thousandths, by the most specific range that has it, and the place
/// of the type itself in the list. `None` if no range has it.
fn preference(field: &ListField<'_>, media_type: &str) -> Option<(u16, Option<usize>)> {
    let main_type = media_type.split('/').next().unwrap_or_default();
    let mut best: Option<(u8, u16, Option<usize>)> = None;
    let items = field.lines().flat_map(|line| line.split(|&byte| byte == b','));
    for (place, item) in items.enumerate() {
        let mut parts = item.split(|&byte| byte == b';').map(<[u8]>::trim_ascii);
        let range = parts.next().unwrap_or_default();
        let (specificity, place) = if range.eq_ignore_ascii_case(media_type.as_bytes()) {
            (2, Some(place))
        } else if range == b"*/*" {
            (0, None)
        } else if let Some(of_type) = range.strip_suffix(b"/*")
            && of_type.eq_ignore_ascii_case(main_type.as_bytes())
        {
            (1, None)
        } else {
            continue;
        };
        let mut weight = 1000;
        let mut has_parameter = false;
        for parameter in parts {
            match crate::encoding::parse_weight(parameter) {
                Some(value) => {
                    weight = value;
                    break;
                }
                // A parameter of the type: another representation than the ones here.
                None => has_parameter |= !parameter.is_empty(),
            }
        }
        let is_better = best.is_none_or(|(other, ..)| specificity > other);
        if !has_parameter && is_better {
            best = Some((specificity, weight, place));
        }
    }
    best.map(|(_, weight, place)| (weight, place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn json_is_preferred_where_the_field_says_so() {
        let prefers = |line: &'static str| {
            prefers(&ListField::of(line.as_bytes()), "application/json", "text/html")
        };
        for line in [
            "application/json",
            "APPLICATION/JSON",
            "text/html;q=0.1, application/json",
            "application/json, text/html",
            "application/json, */*",
            "text/*;q=0.5, application/json;q=0.6",
            "application/json;q=0.9, text/html;Q=0.8",
        ] {
            assert!(prefers(line), "{line}");
        }
        for line in [
            "",
            "*/*",
            "application/json;q=0, text/html",
            "application/json;q=0",
            "application/jsonx",
            "application/*",
            "text/html, application/json",
            "text/html,application/xhtml+xml,*/*;q=0.8",
            "application/json;q=0.5, text/*",
            "application/json;charset=x, text/html",
        ] {
            assert!(!prefers(line), "{line}");
        }
        assert!(!super::prefers(&ListField::default(), "application/json", "text/html"));
    }

    proptest! {
        #[test]
        fn two_types_are_not_preferred_to_each_other(
            line in "((a|\\*)/(b|c|\\*)(;q=(0|1|0\\.5))?[, ]{0,2}){0,4}",
        ) {
            let line: &'static [u8] = Box::leak(line.into_bytes().into_boxed_slice());
            let field = ListField::of(line);
            prop_assert!(!(prefers(&field, "a/b", "a/c") && prefers(&field, "a/c", "a/b")));
        }
    }
}
