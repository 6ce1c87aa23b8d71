//! From a request's target to a path below the root: percent-encoding, dot segments, the query.
//!
//! What comes out has no empty, `.` or `..` segment, no NUL and no slash inside a segment. That it does not leave the root
//! by a symbolic link is the kernel's business ([`haul_fs::Root`]), not this module's.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};
use std::borrow::Cow;

/// What a path segment may hold unescaped: RFC 3986's unreserved characters.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A target, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target<'t> {
    /// The path below the root without a slash at either end; empty is the root itself.
    pub path: Vec<u8>,
    /// Whether it names a folder: it ends in a slash or in a dot segment.
    pub is_folder: bool,
    /// What follows the question mark, as it came.
    pub query: &'t str,
}

/// Why a target names nothing here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetError {
    /// It is no path and no address with one.
    Malformed,
    /// It is a path that no file can have, or that leads out of the root.
    Nowhere,
}

impl<'t> Target<'t> {
    /// Takes a target in origin form (`/a?b`) or in absolute form (`http://host/a?b`) apart.
    pub fn parse(target: &'t str) -> Result<Self, TargetError> {
        let target = without_authority(target)?;
        let target = target.split_once('#').map_or(target, |(before, _)| before);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut segments: Vec<Cow<'_, [u8]>> = Vec::new();
        let mut is_folder = true;
        for encoded in path.split('/') {
            let segment: Cow<'_, [u8]> = percent_decode(encoded.as_bytes()).into();
            is_folder = matches!(&*segment, b"" | b"." | b"..");
            match &*segment {
                b"" | b"." => {}
                b".." => {
                    segments.pop().ok_or(TargetError::Nowhere)?;
                }
                name if name.contains(&b'/') || name.contains(&0) => {
                    return Err(TargetError::Nowhere);
                }
                _ => segments.push(segment),
            }
        }
        Ok(Self { path: segments.join(&b'/'), is_folder, query })
    }

    /// Whether a segment begins with a dot, as hidden files do; `.well-known` (RFC 8615) is no such one.
    pub fn is_hidden(&self) -> bool {
        let mut segments = self.path.split(|&byte| byte == b'/');
        segments.any(|segment| segment.starts_with(b".") && segment != b".well-known")
    }

    /// The value of a parameter of the query, as it came.
    pub fn parameter(&self, name: &str) -> Option<&'t str> {
        self.query.split('&').find_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key == name).then_some(value)
        })
    }
}

/// The path for a `Location` field or a link: beginning with exactly one slash, so that it never names a host.
pub fn encode_path(path: &[u8]) -> String {
    let mut encoded = String::with_capacity(path.len() + 1);
    for segment in path.split(|&byte| byte == b'/').filter(|segment| !segment.is_empty()) {
        encoded.push('/');
        encoded.push_str(&encode_segment(segment));
    }
    encoded
}

/// One name of a path, escaped.
pub fn encode_segment(segment: &[u8]) -> String {
    percent_encode(segment, SEGMENT).to_string()
}

fn without_authority(target: &str) -> Result<&str, TargetError> {
    if target.starts_with('/') {
        return Ok(target);
    }
    let scheme = ["http://", "https://"].into_iter().find(|scheme| {
        target.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    });
    let after =
        scheme.and_then(|scheme| target.get(scheme.len()..)).ok_or(TargetError::Malformed)?;
    let at = after.find(['/', '?', '#']).unwrap_or(after.len());
    let rest = &after[at..];
    if at == 0 {
        return Err(TargetError::Malformed);
    }
    Ok(if rest.is_empty() { "/" } else { rest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn path(target: &str) -> Result<String, TargetError> {
        Target::parse(target).map(|target| {
            let end = if target.is_folder { "/" } else { "" };
            String::from_utf8_lossy(&target.path).into_owned() + end
        })
    }

    #[test]
    fn segments_are_decoded_and_dots_followed() {
        for (target, expected) in [
            ("/", "/"),
            ("/a/b", "a/b"),
            ("/a/b/", "a/b/"),
            ("//a///b", "a/b"),
            ("/a/./b/../c", "a/c"),
            ("/a/b/..", "a/"),
            ("/a%20b?q=1", "a b"),
            ("/%2e%2E/%61", "!"),
            ("/a/%2e%2e/b", "b"),
            ("/..", "!"),
            ("/a/../../b", "!"),
            ("/a%2fb", "!"),
            ("/a%00b", "!"),
            ("/%zz%", "%zz%"),
            ("/\u{e4}", "\u{e4}"),
            ("http://host/a", "a"),
            ("HTTP://host", "/"),
            ("http://host?x", "/"),
            ("/a#b", "a"),
        ] {
            let found = path(target).unwrap_or_else(|error| {
                assert_eq!(error, TargetError::Nowhere, "{target}");
                "!".into()
            });
            assert_eq!(found, expected, "{target}");
        }
        assert_eq!(path("http:///a"), Err(TargetError::Malformed));
        assert_eq!(path("*"), Err(TargetError::Malformed));
        assert_eq!(path("ftp://host/a"), Err(TargetError::Malformed));
        assert_eq!(path(""), Err(TargetError::Malformed));
    }

    #[test]
    fn hidden_names_are_known_everywhere_in_a_path() {
        let is_hidden = |target| Target::parse(target).unwrap().is_hidden();
        assert!(is_hidden("/.git/config"));
        assert!(is_hidden("/a/.env"));
        assert!(is_hidden("/%2eenv"));
        assert!(!is_hidden("/.well-known/acme-challenge/x"));
        assert!(!is_hidden("/a.b/c"));
    }

    #[test]
    fn a_location_never_names_a_host() {
        let target = Target::parse("//evil.example/%2e./%5cx").unwrap();
        assert_eq!(encode_path(&target.path), "/%5Cx");
        assert_eq!(encode_path(b"a b/\xff"), "/a%20b/%FF");
        assert_eq!(encode_path(b""), "");
    }

    proptest! {
        #[test]
        fn no_target_leads_out(target in "/[a-c./%2eE?#\\\\]{0,40}") {
            if let Ok(parsed) = Target::parse(&target) {
                for segment in parsed.path.split(|&byte| byte == b'/') {
                    prop_assert!(!matches!(segment, b"." | b".."));
                    prop_assert!(!segment.is_empty() || parsed.path.is_empty());
                    prop_assert!(!segment.contains(&0));
                }
            }
        }

        #[test]
        fn what_is_encoded_is_read_back(path in prop::collection::vec("[^/\0]{1,8}", 1..4)) {
            prop_assume!(path.iter().all(|segment| segment != "." && segment != ".."));
            let joined = path.join("/").into_bytes();
            let encoded = encode_path(&joined);
            prop_assert_eq!(Target::parse(&encoded).unwrap().path, joined);
        }
    }
}
