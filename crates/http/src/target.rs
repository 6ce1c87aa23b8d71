//! Parses a request target into a path below the root: percent-encoding, dot segments, the query.
//!
//! A parsed path has no empty, `.` or `..` segment, no NUL and no slash inside a segment. It may
//! still leave the root through a symbolic link; the kernel prevents that (`haul_fs::Root`).

use crate::host::is_host;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};
use std::borrow::Cow;

/// The characters that are escaped in a path segment: all but RFC 3986's unreserved characters.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A parsed request target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target<'t> {
    /// The decoded path below the root, without a slash at either end; empty for the root itself.
    pub path: Vec<u8>,
    /// Whether the target names a directory: it ends in a slash or in a dot segment.
    pub is_directory: bool,
    /// The query (after the question mark), not decoded.
    pub query: &'t str,
}

/// Why a request target is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetError {
    /// It has neither origin form nor absolute form.
    Malformed,
    /// Its path leads out of the root, or no file can have it.
    InvalidPath,
}

impl<'t> Target<'t> {
    /// Parses a target in origin form (`/a?b`) or in absolute form (`http://host/a?b`).
    pub fn parse(target: &'t str) -> Result<Self, TargetError> {
        let target = strip_authority(target)?;
        let target = target.split_once('#').map_or(target, |(before, _)| before);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if !has_whole_escapes(path.as_bytes()) {
            return Err(TargetError::Malformed);
        }
        let mut segments: Vec<Cow<'_, [u8]>> = Vec::new();
        let mut is_directory = true;
        for encoded in path.split('/') {
            let segment: Cow<'_, [u8]> = percent_decode(encoded.as_bytes()).into();
            is_directory = matches!(&*segment, b"" | b"." | b"..");
            match &*segment {
                b"" | b"." => {}
                b".." => {
                    segments.pop().ok_or(TargetError::InvalidPath)?;
                }
                name if name.contains(&b'/') || name.contains(&0) => {
                    return Err(TargetError::InvalidPath);
                }
                _ => segments.push(segment),
            }
        }
        Ok(Self { path: segments.join(&b'/'), is_directory, query })
    }

    /// Whether a segment begins with a dot, as the names of hidden files do. `.well-known` (RFC
    /// 8615) is not hidden.
    pub fn is_hidden(&self) -> bool {
        let mut segments = self.path.split(|&byte| byte == b'/');
        segments.any(|segment| segment.starts_with(b".") && segment != b".well-known")
    }

    /// Whether the last segment has an extension, as the names of scripts and images have.
    pub fn has_extension(&self) -> bool {
        let name = self.path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        !self.is_directory && name.iter().skip(1).any(|&byte| byte == b'.')
    }

    /// The value of a parameter of the query, not decoded.
    pub fn parameter(&self, name: &str) -> Option<&'t str> {
        self.query.split('&').find_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (key == name).then_some(value)
        })
    }
}

/// Percent-encodes a path for a `Location` field or a link. The result begins with exactly one
/// slash, so that it never names a host; for the root itself it is empty.
pub fn encode_path(path: &[u8]) -> String {
    let mut encoded = String::with_capacity(path.len() + 1);
    for segment in path.split(|&byte| byte == b'/').filter(|segment| !segment.is_empty()) {
        encoded.push('/');
        encoded.push_str(&encode_segment(segment));
    }
    encoded
}

/// Percent-encodes one segment of a path.
pub fn encode_segment(segment: &[u8]) -> String {
    percent_encode(segment, ESCAPED).to_string()
}

/// Decodes the value of a query's parameter. A `%` that begins no escape stays.
pub fn decode_parameter(value: &str) -> Vec<u8> {
    percent_decode(value.as_bytes()).collect()
}

/// Whether each `%` is followed by two hexadecimal digits (RFC 3986 section 2.1).
fn has_whole_escapes(path: &[u8]) -> bool {
    path.split(|&byte| byte == b'%')
        .skip(1)
        .all(|after| after.iter().take(2).filter(|byte| byte.is_ascii_hexdigit()).count() == 2)
}

/// Removes the scheme and authority of the absolute form.
fn strip_authority(target: &str) -> Result<&str, TargetError> {
    if target.starts_with('/') {
        return Ok(target);
    }
    let scheme = ["http://", "https://"].into_iter().find(|scheme| {
        target.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    });
    let after =
        scheme.and_then(|scheme| target.get(scheme.len()..)).ok_or(TargetError::Malformed)?;
    let at = after.find(['/', '?', '#']).unwrap_or(after.len());
    let (authority, rest) = after.split_at(at);
    // An `http` URI has a host (RFC 9110 section 4.2.1) and no user (section 4.2.4).
    if authority.is_empty() || !is_host(authority.as_bytes()) {
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
            let end = if target.is_directory { "/" } else { "" };
            String::from_utf8_lossy(&target.path).into_owned() + end
        })
    }

    #[test]
    fn segments_are_decoded_and_dot_segments_are_removed() {
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
            ("/\u{e4}", "\u{e4}"),
            ("http://host/a", "a"),
            ("HTTP://host", "/"),
            ("http://host?x", "/"),
            ("/a#b", "a"),
        ] {
            let found = path(target).unwrap_or_else(|error| {
                assert_eq!(error, TargetError::InvalidPath, "{target}");
                "!".into()
            });
            assert_eq!(found, expected, "{target}");
        }
        for malformed in [
            "http:///a",
            "/%zz",
            "/a%",
            "/%4",
            "/a%4/b",
            "http://h:x/",
            "http://u@h/",
            "http://%zz/",
        ] {
            assert_eq!(path(malformed), Err(TargetError::Malformed), "{malformed}");
        }
        assert_eq!(path("*"), Err(TargetError::Malformed));
        assert_eq!(path("ftp://host/a"), Err(TargetError::Malformed));
        assert_eq!(path(""), Err(TargetError::Malformed));
    }

    #[test]
    fn one_hidden_segment_makes_a_target_hidden() {
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
        fn no_target_leaves_the_root(target in "/[a-c./%2eE?#\\\\]{0,40}") {
            if let Ok(parsed) = Target::parse(&target) {
                for segment in parsed.path.split(|&byte| byte == b'/') {
                    prop_assert!(!matches!(segment, b"." | b".."));
                    prop_assert!(!segment.is_empty() || parsed.path.is_empty());
                    prop_assert!(!segment.contains(&0));
                }
            }
        }

        #[test]
        fn an_encoded_path_parses_to_the_same_path(
            path in prop::collection::vec("[^/\0]{1,8}", 1..4),
        ) {
            prop_assume!(path.iter().all(|segment| segment != "." && segment != ".."));
            let joined = path.join("/").into_bytes();
            let encoded = encode_path(&joined);
            prop_assert_eq!(Target::parse(&encoded).unwrap().path, joined);
        }
    }
}
