//! Groups of kernel functions, defined by the file `groups.txt`.

/// The groups file, compiled into the program.
const GROUPS: &str = include_str!("groups.txt");
/// Group of functions that match no pattern.
pub(super) const OTHER: &str = "other";
/// Group of time in programs.
pub(super) const USER: &str = "programs";
/// Group of functions in which a CPU waits for work.
pub(super) const IDLE: &str = "idle";

/// Groups and the patterns of their functions.
#[derive(Debug)]
pub(super) struct Groups(Vec<(&'static str, Vec<&'static str>)>);

impl Groups {
    /// The groups of `groups.txt`.
    pub(super) fn builtin() -> Self {
        Self::parse(GROUPS)
    }

    /// Parses a groups file. A line is `group: pattern pattern …`; a line that begins with a space
    /// continues the group above; `#` begins a comment.
    fn parse(text: &'static str) -> Self {
        let mut groups: Vec<(&'static str, Vec<&'static str>)> = Vec::new();
        for line in text.lines().map(|line| line.split('#').next().unwrap_or_default()) {
            let patterns = match line.split_once(':') {
                Some((name, patterns)) if !line.starts_with(' ') => {
                    groups.push((name.trim(), Vec::new()));
                    patterns
                }
                _ => line,
            };
            if let Some((_, all)) = groups.last_mut() {
                all.extend(patterns.split_ascii_whitespace());
            }
        }
        Self(groups)
    }

    /// The group of a function. The longest matching pattern decides, so the order of the file does
    /// not have an effect.
    pub(super) fn of(&self, function: &str) -> &'static str {
        self.0
            .iter()
            .flat_map(|(group, patterns)| patterns.iter().map(move |pattern| (*group, *pattern)))
            .filter(|(_, pattern)| matches(pattern, function))
            .max_by_key(|(_, pattern)| pattern.len())
            .map_or(OTHER, |(group, _)| group)
    }
}

/// `*` matches any text, at the beginning of a pattern, at its end or at both.
fn matches(pattern: &str, name: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(_), Some(_)) => name.contains(pattern.trim_matches('*')),
        (Some(end), None) => name.ends_with(end),
        (None, Some(start)) => name.starts_with(start),
        (None, None) => name == pattern,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_pattern_decides() {
        let groups =
            Groups::parse("# remark\none: tcp_* *_copy\n  exact\ntwo: tcp_ack* *middle*\n");
        for (function, group) in [
            ("tcp_sendmsg", "one"),
            ("tcp_ack_update", "two"),
            ("skb_copy", "one"),
            ("exact", "one"),
            ("in_middle_of", "two"),
            ("inexact", OTHER),
        ] {
            assert_eq!(groups.of(function), group, "{function}");
        }
    }

    #[test]
    fn the_builtin_groups_contain_well_known_functions() {
        let groups = Groups::builtin();
        for (function, group) in [
            ("tcp_sendmsg_locked", "TCP"),
            ("ip_output", "IP"),
            ("kmem_cache_free", "packet memory"),
            ("rep_movs_alternative", "copy"),
            ("do_syscall_64", "system-call entry"),
            ("veth_xmit", "driver and veth"),
        ] {
            assert_eq!(groups.of(function), group, "{function}");
        }
    }
}
