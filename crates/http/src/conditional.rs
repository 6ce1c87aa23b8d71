//! Preconditions: whether a request still applies to what is there now (RFC 9110 section 13).

use crate::request::{Fields, ListField, Method};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What tells a client that it has this version (RFC 9110 section 8.8).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Validators {
    /// The strong entity tag, with its quotes.
    pub etag: Option<Box<str>>,
    /// When it was last modified, in seconds since 1970.
    pub modified: Option<u64>,
}

/// What the preconditions say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Carry the method out.
    Proceed,
    /// 304: the client has it already.
    NotModified,
    /// 412: it is not what the client thinks it is.
    Failed,
}

/// Judges the preconditions in the order of RFC 9110 section 13.2.2; `current` is what would be sent, `None` where there is
/// nothing yet.
pub fn judge(method: Method, fields: &Fields<'_>, current: Option<&Validators>) -> Verdict {
    if fields.if_match.is_present() {
        // Section 13.1.1: strong comparison.
        if !names(&fields.if_match, current, Strength::Strong) {
            return Verdict::Failed;
        }
    } else if let Some(date) = fields.if_unmodified_since.and_then(parse_date)
        && let Some(modified) = current.and_then(|current| current.modified)
        && modified > date
    {
        return Verdict::Failed;
    }
    let reads = matches!(method, Method::Get | Method::Head);
    if fields.if_none_match.is_present() {
        // Section 13.1.2: weak comparison.
        if names(&fields.if_none_match, current, Strength::Weak) {
            return if reads { Verdict::NotModified } else { Verdict::Failed };
        }
    } else if reads
        && let Some(date) = fields.if_modified_since.and_then(parse_date)
        && let Some(modified) = current.and_then(|current| current.modified)
        && modified <= date
    {
        return Verdict::NotModified;
    }
    Verdict::Proceed
}

/// Whether the `Range` field is to be heeded (RFC 9110 section 13.1.5): yes without `If-Range`, else only if that
/// names exactly what is there.
pub fn range_applies(fields: &Fields<'_>, current: &Validators, now: SystemTime) -> bool {
    let Some(condition) = fields.if_range else { return true };
    if condition.starts_with(b"\"") {
        return current.etag.as_deref().is_some_and(|etag| etag.as_bytes() == condition);
    }
    // A weak tag is never enough. A date is a strong validator only where the file was a second old or more when it was
    // told (section 8.8.2.2): within one second it may have changed twice.
    match (parse_date(condition), current.modified) {
        (Some(date), Some(modified)) => date == modified && modified < seconds(now),
        _ => false,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strength {
    Strong,
    Weak,
}

/// Whether a list of tags names what is there (RFC 9110 section 8.8.3.2); `*` names anything that is.
fn names(list: &ListField<'_>, current: Option<&Validators>, strength: Strength) -> bool {
    let Some(current) = current else { return false };
    list.lines().any(|line| {
        line.trim_ascii() == b"*"
            || current.etag.as_deref().is_some_and(|etag| {
                Tags(line).any(|tag| {
                    tag.opaque == etag.as_bytes() && (strength == Strength::Weak || !tag.is_weak)
                })
            })
    })
}

/// A tag of a list, with its quotes.
struct Tag<'l> {
    is_weak: bool,
    opaque: &'l [u8],
}

/// The tags of a list; what is no tag ends it.
struct Tags<'l>(&'l [u8]);

impl<'l> Iterator for Tags<'l> {
    type Item = Tag<'l>;

    fn next(&mut self) -> Option<Tag<'l>> {
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
        Some(Tag { is_weak, opaque })
    }
}

/// A date in one of the three forms of RFC 9110 section 5.6.7, as seconds since 1970; a wrong one counts as absent.
fn parse_date(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    httpdate::parse_http_date(text).ok().map(seconds)
}

fn seconds(time: SystemTime) -> u64 {
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
    fn tags_are_read_from_lists_as_they_come() {
        let opaque = |line: &'static [u8]| -> Vec<(bool, &[u8])> {
            Tags(line).map(|tag| (tag.is_weak, tag.opaque)).collect()
        };
        assert_eq!(
            opaque(b"\"a\", W/\"b\" ,,\"c,d\""),
            [(false, &b"\"a\""[..]), (true, b"\"b\""), (false, b"\"c,d\"")]
        );
        assert_eq!(opaque(b""), []);
        assert_eq!(opaque(b"a, \"b\""), [], "what is no tag ends the list");
        assert_eq!(opaque(b"\"open"), []);
        assert_eq!(opaque(b"w/\"a\""), [], "W is a capital");
    }

    #[test]
    fn the_order_of_section_13_2_2_is_kept() {
        let tagged =
            |if_match: Option<&'static [u8]>, if_none_match: Option<&'static [u8]>| Fields {
                if_match: if_match.map(ListField::of).unwrap_or_default(),
                if_none_match: if_none_match.map(ListField::of).unwrap_or_default(),
                ..Fields::default()
            };
        let get = |fields: &Fields<'_>| judge(Method::Get, fields, Some(&current()));
        assert_eq!(
            get(&tagged(Some(b"\"old\""), Some(b"\"now\""))),
            Verdict::Failed,
            "If-Match comes first"
        );
        assert_eq!(get(&tagged(Some(b"\"now\""), Some(b"\"now\""))), Verdict::NotModified);
        assert_eq!(get(&tagged(Some(b"W/\"now\""), None)), Verdict::Failed, "strong comparison");
        assert_eq!(get(&tagged(None, Some(b"W/\"now\""))), Verdict::NotModified, "weak comparison");
        assert_eq!(
            judge(Method::Put, &tagged(None, Some(b"*")), Some(&current())),
            Verdict::Failed
        );
        assert_eq!(
            judge(Method::Put, &tagged(None, Some(b"*")), None),
            Verdict::Proceed,
            "only if there is none"
        );
        assert_eq!(
            judge(Method::Put, &tagged(Some(b"*"), None), None),
            Verdict::Failed,
            "only if there is one"
        );

        let dated = Fields { if_modified_since: Some(SAME), ..tagged(None, Some(b"\"old\"")) };
        assert_eq!(get(&dated), Verdict::Proceed, "If-None-Match overrides If-Modified-Since");
        let dated = Fields { if_unmodified_since: Some(BEFORE), ..tagged(Some(b"\"now\""), None) };
        assert_eq!(get(&dated), Verdict::Proceed, "If-Match overrides If-Unmodified-Since");
    }

    #[test]
    fn dates_are_compared_by_the_second_in_every_form() {
        let since = |date| {
            judge(
                Method::Get,
                &Fields { if_modified_since: Some(date), ..Fields::default() },
                Some(&current()),
            )
        };
        assert_eq!(since(SAME), Verdict::NotModified);
        assert_eq!(since(AFTER), Verdict::NotModified);
        assert_eq!(since(BEFORE), Verdict::Proceed);
        assert_eq!(since(b"Sun Nov  6 08:49:37 1994"), Verdict::NotModified);
        assert_eq!(since(b"yesterday"), Verdict::Proceed, "a wrong date counts as absent");
        let unless = |date| {
            judge(
                Method::Get,
                &Fields { if_unmodified_since: Some(date), ..Fields::default() },
                Some(&current()),
            )
        };
        assert_eq!(unless(SAME), Verdict::Proceed);
        assert_eq!(unless(BEFORE), Verdict::Failed);
    }

    #[test]
    fn a_range_is_heeded_only_of_exactly_this_version() {
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
        assert!(!applies(Some(b"W/\"now\""), 10), "a weak tag is never enough");
        assert!(!applies(Some(b"\"old\""), 10));
        assert!(applies(Some(SAME), 10));
        assert!(!applies(Some(SAME), 0), "it may have changed twice within this second");
        assert!(!applies(Some(AFTER), 10), "exactly, not at most");
        assert!(!applies(Some(b"\"no"), 10));
    }
}
