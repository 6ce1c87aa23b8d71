//! Glob patterns over the paths of served files.

use std::borrow::Cow;

/// The largest product of the alternatives in braces: the matcher tries every combination.
const COMBINATIONS_MAX: usize = 64;

/// The reason why a pattern is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PatternError {
    /// The syntax is wrong.
    #[error("{0}")]
    Syntax(fast_glob::Error),
    /// The alternatives in braces have too many combinations.
    #[error("its braces have {0} combinations, and {COMBINATIONS_MAX} are allowed: divide it")]
    Combinations(usize),
}

/// A glob pattern: `*`, `**`, `?`, `[ab]`, `[!ab]` or `[^ab]`, `{a,b}`, and `\` before a character
/// that stands for itself (`\n`, `\r`, `\t` and `\b` are control characters).
///
/// In a pattern with a `/`, only `**` matches several path components. In a pattern without one,
/// every wildcard also matches `/`, so that `*.html` stands for all HTML files.
#[derive(Debug)]
pub(crate) struct PathPattern(String);

impl PathPattern {
    /// Checks a pattern that is relative to the root; a leading `/` is ignored.
    pub(crate) fn new(pattern: &str) -> Result<Self, PatternError> {
        // Before the slash is removed, so that an error names the byte of the configured pattern.
        fast_glob::validate(pattern).map_err(PatternError::Syntax)?;
        let combinations = combinations(pattern);
        if combinations > COMBINATIONS_MAX {
            return Err(PatternError::Combinations(combinations));
        }
        let pattern = pattern.trim_start_matches('/');
        // Negation of the whole pattern is not offered: the first match wins already.
        let escape = if pattern.starts_with('!') { "\\" } else { "" };
        Ok(Self(format!("{escape}{pattern}")))
    }

    /// Returns whether the pattern matches a path relative to the root.
    pub(crate) fn matches(&self, path: &str) -> bool {
        let path = if self.0.contains('/') {
            Cow::Borrowed(path)
        } else {
            // The matcher treats `/` as a separator. A path has no zero bytes, so one replaces it.
            Cow::Owned(path.replace('/', "\0"))
        };
        fast_glob::glob_match(&self.0, &*path)
    }
}

/// An upper bound of the combinations of alternatives, nested ones included.
fn combinations(pattern: &str) -> usize {
    let mut alternatives = Vec::new();
    let mut product = 1_usize;
    for byte in pattern.bytes() {
        match byte {
            b'{' => alternatives.push(1),
            b',' => alternatives.iter_mut().rev().take(1).for_each(|count| *count += 1),
            b'}' => product = product.saturating_mul(alternatives.pop().unwrap_or(1)),
            _ => {}
        }
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, path: &str) -> bool {
        PathPattern::new(pattern).unwrap().matches(path)
    }

    #[test]
    fn a_pattern_without_a_slash_matches_in_every_directory() {
        assert!(matches("*.html", "index.html"));
        assert!(matches("*.html", "a/b/index.html"));
        assert!(matches("*", "a/b"));
        assert!(matches("a*z.{html,css}", "a/b/z.css"));
        assert!(matches("a?b", "a/b"));
        assert!(!matches("index.html", "a/index.html"));
        assert!(!matches("*.html", "index.htm"));
    }

    #[test]
    fn in_a_pattern_with_a_slash_only_two_stars_cross_components() {
        assert!(matches("/assets/**", "assets/a/b.js"));
        assert!(matches("assets/*.js", "assets/b.js"));
        assert!(!matches("assets/*.js", "assets/a/b.js"));
        assert!(matches("**/*.js", "b.js"));
        assert!(matches("a/**/z", "a/z"));
        assert!(!matches("a/[!b]c", "a//c"));
        assert!(!matches("assets/**", "other/assets/a"));
    }

    #[test]
    fn an_exclamation_mark_at_the_start_matches_itself() {
        assert!(matches("!important", "!important"));
        assert!(!matches("!important", "other"));
    }

    #[test]
    fn an_invalid_pattern_is_refused() {
        for pattern in ["/[", "/{a,b", "a\\"] {
            let error = PathPattern::new(pattern).unwrap_err();
            let PatternError::Syntax(error) = error else { panic!("{pattern}: {error}") };
            assert_eq!(error.index, 1, "{pattern}: {error}");
        }
        assert!(PathPattern::new("*.{html,css,js}").is_ok());
        let combinations = "{a,b,c,d}*".repeat(10);
        let error = PathPattern::new(&combinations).unwrap_err();
        assert!(matches!(error, PatternError::Combinations(1_048_576)), "{error}");
    }
}
