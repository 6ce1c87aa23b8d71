//! Rules that leave entries out of a transfer, with the patterns of rsync.
//!
//! The first rule that matches decides; without a match, an entry is included. A folder that is
//! excluded is not read, so rules for its content do not matter.

use serde::{Deserialize, Serialize};

/// The maximum number of rules of a transfer.
pub const RULES_MAX: usize = 10_000;
/// The maximum length of a pattern, in bytes.
pub const PATTERN_BYTES_MAX: usize = 4096;

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Whether entries that match are included.
    pub includes: bool,
    /// The pattern as the user wrote it.
    pub pattern: Vec<u8>,
}

/// Rules in the order in which they are tried.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter(pub Vec<Rule>);

impl Filter {
    /// Whether an entry is excluded. The path begins below the root of the transfer, without a
    /// slash.
    pub fn excludes(&self, path: &[u8], is_folder: bool) -> bool {
        let decides = |rule: &&Rule| matches(&rule.pattern, path, is_folder);
        self.0.iter().find(decides).is_some_and(|rule| !rule.includes)
    }
}

/// Whether a pattern matches an entry:
///
/// * With `/` at the end, the pattern matches folders alone.
/// * With `/` at the beginning, the pattern begins at the root of the transfer.
/// * With `/` elsewhere or with `**`, the pattern matches the end of the path, and otherwise the
///   name.
/// * `name/***` matches a folder and everything below.
fn matches(pattern: &[u8], path: &[u8], is_folder: bool) -> bool {
    if let Some(folder) = pattern.strip_suffix(b"/***") {
        return matches(&[folder, b"/"].concat(), path, is_folder)
            || matches(&[folder, b"/**"].concat(), path, is_folder);
    }
    let (pattern, is_for_folders) = match pattern.strip_suffix(b"/") {
        Some(pattern) if !pattern.is_empty() => (pattern, true),
        _ => (pattern, false),
    };
    if is_for_folders && !is_folder {
        return false;
    }
    if let Some(anchored) = pattern.strip_prefix(b"/") {
        return matches_whole(anchored, path);
    }
    let is_path = pattern.contains(&b'/') || pattern.windows(2).any(|two| two == b"**");
    if !is_path {
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        return matches_whole(pattern, name);
    }
    // The end of the path from each component on.
    if pattern.starts_with(b"**") && matches_whole(pattern, &[b"/", path].concat()) {
        return true;
    }
    let after_slashes = (1..path.len()).filter(|&at| path[at - 1] == b'/');
    std::iter::once(0).chain(after_slashes).any(|start| matches_whole(pattern, &path[start..]))
}

/// Whether a pattern matches a text from its beginning to its end. Without wildcards, a backslash
/// is a letter.
fn matches_whole(pattern: &[u8], text: &[u8]) -> bool {
    if !pattern.iter().any(|byte| b"*?[".contains(byte)) {
        return pattern == text;
    }
    let mut matcher = Matcher { steps: 0 };
    matcher.matches(pattern, text)
}

/// Steps of a match before it counts as failed: a pattern with many wildcards may take very long.
const STEPS_MAX: u32 = 1_000_000;

struct Matcher {
    steps: u32,
}

impl Matcher {
    fn matches(&mut self, mut pattern: &[u8], mut text: &[u8]) -> bool {
        loop {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return false;
            }
            match pattern {
                [] => return text.is_empty(),
                [b'*', b'*', rest @ ..] => return self.matches_after(rest, text, |_| true),
                [b'*', rest @ ..] => return self.matches_after(rest, text, |byte| byte != b'/'),
                [b'?', rest @ ..] => match text {
                    [first, after @ ..] if *first != b'/' => (pattern, text) = (rest, after),
                    _ => return false,
                },
                [b'[', rest @ ..] => {
                    let ([first, after @ ..], Some((fits, rest))) =
                        (text, class(rest, *text.first().unwrap_or(&0)))
                    else {
                        return false;
                    };
                    if !fits || *first == b'/' {
                        return false;
                    }
                    (pattern, text) = (rest, after);
                }
                [b'\\', letter, rest @ ..] | [letter, rest @ ..] => match text {
                    [first, after @ ..] if first == letter => (pattern, text) = (rest, after),
                    _ => return false,
                },
            }
        }
    }

    /// Whether the rest of a pattern matches after so many bytes that a wildcard may match.
    fn matches_after(&mut self, rest: &[u8], text: &[u8], may_match: fn(u8) -> bool) -> bool {
        for at in 0..=text.len() {
            if self.matches(rest, &text[at..]) {
                return true;
            }
            if self.steps > STEPS_MAX || text.get(at).is_none_or(|&byte| !may_match(byte)) {
                return false;
            }
        }
        false
    }
}

/// Whether a byte is in a class, and the pattern after the class; `None` without an end. `!` and
/// `^` at the beginning negate.
fn class(pattern: &[u8], byte: u8) -> Option<(bool, &[u8])> {
    let (is_negated, mut rest) = match pattern {
        [b'!' | b'^', rest @ ..] => (true, rest),
        _ => (false, pattern),
    };
    let (mut fits, mut is_first) = (false, true);
    loop {
        match rest {
            [b']', after @ ..] if !is_first => return Some((fits != is_negated, after)),
            [b'[', b':', after @ ..] => {
                let end = after.windows(2).position(|two| two == b":]")?;
                fits |= is_in(&after[..end], byte)?;
                rest = &after[end + 2..];
            }
            [first, b'-', last, after @ ..] if *last != b']' => {
                fits |= (*first..=*last).contains(&byte);
                rest = after;
            }
            [b'\\', letter, after @ ..] | [letter, after @ ..] => {
                fits |= *letter == byte;
                rest = after;
            }
            [] => return None,
        }
        is_first = false;
    }
}

/// Whether a byte is in a class of POSIX; `None` for an unknown class.
fn is_in(name: &[u8], byte: u8) -> Option<bool> {
    Some(match name {
        b"alnum" => byte.is_ascii_alphanumeric(),
        b"alpha" => byte.is_ascii_alphabetic(),
        b"digit" => byte.is_ascii_digit(),
        b"lower" => byte.is_ascii_lowercase(),
        b"upper" => byte.is_ascii_uppercase(),
        b"space" => byte.is_ascii_whitespace(),
        b"punct" => byte.is_ascii_punctuation(),
        b"xdigit" => byte.is_ascii_hexdigit(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_rsyncs_do() {
        let fits = |pattern: &str, path: &str| {
            let (path, is_folder) =
                path.strip_suffix('/').map_or((path, false), |path| (path, true));
            matches(pattern.as_bytes(), path.as_bytes(), is_folder)
        };
        for (pattern, path) in [
            ("*.o", "a.o"),
            ("*.o", "sub/a.o"),
            ("a", "sub/a"),
            ("/a", "a"),
            ("sub/", "sub/"),
            ("sub/", "x/sub/"),
            ("sub/a", "x/sub/a"),
            ("/sub/*", "sub/a"),
            ("/sub/**", "sub/x/y"),
            ("**/a", "x/y/a"),
            ("**/a", "a"),
            ("x**y", "x/a/y"),
            ("a?c", "abc"),
            ("[a-c]x", "bx"),
            ("[!a-c]x", "dx"),
            ("[[:digit:]]", "7"),
            ("[]]", "]"),
            ("a\\*[b]", "a*b"),
            ("a\\b", "a\\b"),
            ("cache/***", "cache/"),
            ("cache/***", "cache/x/y"),
            ("/", "/"),
        ] {
            assert!(fits(pattern, path) || pattern == "/", "{pattern} {path}");
        }
        for (pattern, path) in [
            ("*.o", "a.c"),
            ("/a", "sub/a"),
            ("sub/", "sub"),
            ("/sub/*", "sub/x/y"),
            ("sub/a", "xsub/a"),
            ("a?c", "a/c"),
            ("a*c", "a/c"),
            ("[a-c]x", "dx"),
            ("[a", "a"),
            ("cache/***", "cache"),
            ("a*[b]", "a*"),
        ] {
            assert!(!fits(pattern, path), "{pattern} {path}");
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rule = |includes, pattern: &str| Rule { includes, pattern: pattern.into() };
        let filter = Filter(vec![rule(true, "keep.o"), rule(false, "*.o")]);
        assert!(filter.excludes(b"a.o", false));
        assert!(!filter.excludes(b"sub/keep.o", false) && !filter.excludes(b"a.c", false));
    }

    #[test]
    fn a_pattern_with_many_wildcards_ends() {
        let pattern = "*a".repeat(100) + "[b]";
        assert!(!matches(pattern.as_bytes(), &[b'a'; 4000], false));
    }
}
