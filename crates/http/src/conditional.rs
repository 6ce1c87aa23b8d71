//! Evaluates the preconditions of conditional requests (RFC 9110 section 13).

use crate::list_field::ListField;
use crate::request::{Fields, Method};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The validators of a representation (RFC 9110 section 8.8).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Validators {
    /// The strong entity tag, with its quotes.
    pub etag: Option<Box<str>>,
    /// The time of the last modification, in seconds since 1970.
    pub modified: Option<u64>,
}

/// The outcome of evaluating the preconditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The method is to be carried out.
    Proceed,
    /// The client's copy is current: status 304.
    NotModified,
    /// A precondition is false: status 412.
    Failed,
}

/// Evaluates the preconditions in the order of RFC 9110 section 13.2.2.
///
/// `current` holds the validators of the representation that would be sent; `None` if the target
/// does not exist yet.
pub fn evaluate(method: Method, fields: &Fields<'_>, current: Option<&Validators>) -> Outcome {
    if fields.if_match.is_present() {
        // Section 13.1.1: strong comparison.
        if !has_match(&fields.if_match, current, Comparison::Strong) {
            return Outcome::Failed;
        }
    } else if let Some(date) = fields.if_unmodified_since.and_then(parse_date)
        && let Some(modified) = current.and_then(|current| current.modified)
        && modified > date
    {
        return Outcome::Failed;
    }
    let is_read = matches!(method, Method::Get | Method::Head);
    if fields.if_none_match.is_present() {
        // Section 13.1.2: weak comparison.
        if has_match(&fields.if_none_match, current, Comparison::Weak) {
            return if is_read { Outcome::NotModified } else { Outcome::Failed };
        }
    } else if is_read
        && let Some(date) = fields.if_modified_since.and_then(parse_date)
        && let Some(modified) = current.and_then(|current| current.modified)
        && modified <= date
    {
        return Outcome::NotModified;
    }
    Outcome::Proceed
}

/// Whether the `Range` field applies (RFC 9110 section 13.1.5): if there is no `If-Range`, or if it
/// matches the current representation exactly.
pub fn range_applies(fields: &Fields<'_>, current: &Validators, now: SystemTime) -> bool {
    let Some(condition) = fields.if_range else { return true };
    if condition.starts_with(b"\"") {
        return current.etag.as_deref().is_some_and(|etag| etag.as_bytes() == condition);
    }
    // A weak tag never matches. A date is a strong validator only if the file was modified in an
    // earlier second (section 8.8.2.2): within one second it may change twice.
    match (parse_date(condition), current.modified) {
        (Some(date), Some(modified)) => date == modified && modified < unix_seconds(now),
        _ => false,
    }
}

/// The comparison of entity tags (RFC 9110 section 8.8.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Strong,
    Weak,
}

/// Whether an entity tag of the list matches the current representation (RFC 9110 section 8.8.3.2).
/// `*` matches any representation that exists.
fn has_match(list: &ListField<'_>, current: Option<&Validators>, comparison: Comparison) -> bool {
    let Some(current) = current else { return false };
    list.lines().any(|line| {
        line.trim_ascii() == b"*"
            || current.etag.as_deref().is_some_and(|etag| {
                EntityTags(line).any(|tag| {
                    tag.opaque == etag.as_bytes()
                        && (comparison == Comparison::Weak || !tag.is_weak)
                })
            })
    })
}

/// An entity tag of a list.
struct EntityTag<'l> {
    is_weak: bool,
    /// The opaque tag, with its quotes.
    opaque: &'l [u8],
}

/// Iterates over the entity tags of a list, up to the first malformed element.
struct EntityTags<'l>(&'l [u8]);

impl<'l> Iterator for EntityTags<'l> {
    type Item = EntityTag<'l>;

    fn next(&mut self) -> Option<EntityTag<'l>> {
        let start = self.0.iter().position(|byte| !matches!(byte, b',' | b' ' | b'\t'))?;
        let rest = &self.0[start..];
        let is_weak = rest.starts_with(b"W/");
        let quoted = if is_weak { &rest[2..] } else { rest };
        if quoted.first() != Some(&b'"') {
            self.0 = &[];
            return None;
        }
        let Some(end) = quoted[1..].iter().position(|&byte| byte == b'"') else {
            self.0 = &[];
            return None;
        };
        let (opaque, after) = quoted.split_at(end + 2);
        self.0 = after;
        Some(EntityTag { is_weak, opaque })
    }
}

/// Parses a date in one of the three forms of RFC 9110 section 5.6.7, as seconds since 1970. The
/// caller ignores a field whose date is malformed.
fn parse_date(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    httpdate::parse_http_date(text).ok().map(unix_seconds)
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current() -> Validators {
        // Sun, 06 Nov 1994 08:49:37 GMT
        Validators { etag: Some("\"now\"".into()), modified: Some(784_111_777) }
    }

    const SAME: &[u8] = b"Sun, 06 Nov 1994 08:49:37 GMT";
    const BEFORE: &[u8] = b"Sun, 06 Nov 1994 08:49:36 GMT";
    const AFTER: &[u8] = b"Sunday, 06-Nov-94 08:49:38 GMT";

    #[test]
    fn entity_tags_are_parsed_from_lists() {
        let parsed = |line: &'static [u8]| -> Vec<(bool, &[u8])> {
            EntityTags(line).map(|tag| (tag.is_weak, tag.opaque)).collect()
        };
        assert_eq!(
            parsed(b"\"a\", W/\"b\" ,,\"c,d\""),
            [(false, &b"\"a\""[..]), (true, b"\"b\""), (false, b"\"c,d\"")]
        );
        assert_eq!(parsed(b""), []);
        assert_eq!(parsed(b"a, \"b\""), [], "a malformed element ends the list");
        assert_eq!(parsed(b"\"open"), []);
        assert_eq!(parsed(b"w/\"a\""), [], "the W is a capital letter");
    }

    #[test]
    fn preconditions_are_evaluated_in_the_order_of_section_13_2_2() {
        let tagged =
            |if_match: Option<&'static [u8]>, if_none_match: Option<&'static [u8]>| Fields {
                if_match: if_match.map(ListField::of).unwrap_or_default(),
                if_none_match: if_none_match.map(ListField::of).unwrap_or_default(),
                ..Fields::default()
            };
        let get = |fields: &Fields<'_>| evaluate(Method::Get, fields, Some(&current()));
        assert_eq!(
            get(&tagged(Some(b"\"old\""), Some(b"\"now\""))),
            Outcome::Failed,
            "If-Match comes first"
        );
        assert_eq!(get(&tagged(Some(b"\"now\""), Some(b"\"now\""))), Outcome::NotModified);
        assert_eq!(get(&tagged(Some(b"W/\"now\""), None)), Outcome::Failed, "strong comparison");
        assert_eq!(get(&tagged(None, Some(b"W/\"now\""))), Outcome::NotModified, "weak comparison");
        assert_eq!(
            evaluate(Method::Put, &tagged(None, Some(b"*")), Some(&current())),
            Outcome::Failed
        );
        assert_eq!(
            evaluate(Method::Put, &tagged(None, Some(b"*")), None),
            Outcome::Proceed,
            "the file does not exist"
        );
        assert_eq!(
            evaluate(Method::Put, &tagged(Some(b"*"), None), None),
            Outcome::Failed,
            "the file must exist"
        );

        let dated = Fields { if_modified_since: Some(SAME), ..tagged(None, Some(b"\"old\"")) };
        assert_eq!(get(&dated), Outcome::Proceed, "If-None-Match overrides If-Modified-Since");
        let dated = Fields { if_unmodified_since: Some(BEFORE), ..tagged(Some(b"\"now\""), None) };
        assert_eq!(get(&dated), Outcome::Proceed, "If-Match overrides If-Unmodified-Since");
    }

    #[test]
    fn dates_in_every_form_are_compared_to_the_second() {
        let since = |date| {
            evaluate(
                Method::Get,
                &Fields { if_modified_since: Some(date), ..Fields::default() },
                Some(&current()),
            )
        };
        assert_eq!(since(SAME), Outcome::NotModified);
        assert_eq!(since(AFTER), Outcome::NotModified);
        assert_eq!(since(BEFORE), Outcome::Proceed);
        assert_eq!(since(b"Sun Nov  6 08:49:37 1994"), Outcome::NotModified);
        assert_eq!(since(b"yesterday"), Outcome::Proceed, "a malformed date is ignored");
        let unless = |date| {
            evaluate(
                Method::Get,
                &Fields { if_unmodified_since: Some(date), ..Fields::default() },
                Some(&current()),
            )
        };
        assert_eq!(unless(SAME), Outcome::Proceed);
        assert_eq!(unless(BEFORE), Outcome::Failed);
    }

    #[test]
    fn a_range_applies_only_to_exactly_the_version_of_if_range() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        let applies = |if_range: Option<&'static [u8]>, later| {
            range_applies(
                &Fields { if_range, ..Fields::default() },
                &current(),
                now + Duration::from_secs(later),
            )
        };
        assert!(applies(None, 0));
        assert!(applies(Some(b"\"now\""), 0));
        assert!(!applies(Some(b"W/\"now\""), 10), "a weak tag never matches");
        assert!(!applies(Some(b"\"old\""), 10));
        assert!(applies(Some(SAME), 10));
        assert!(!applies(Some(SAME), 0), "the file may change twice within this second");
        assert!(!applies(Some(AFTER), 10), "a later date does not match");
        assert!(!applies(Some(b"\"no"), 10));
    }
}
