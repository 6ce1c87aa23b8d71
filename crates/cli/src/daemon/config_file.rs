//! A configuration file (TOML), and where its errors are.

use crate::output::Failure;
use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use strsim::normalized_damerau_levenshtein;

/// Maximum size of a configuration file, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// The most keys that a message lists.
const KEYS_LISTED_MAX: usize = 8;
/// The problem with a table in place of a list.
const LIST_WANTED: &str = "it must be a list: write the table in [[ ]]";
/// The problem with the name of a flag that is not a key.
const FLAG_FOUND: &str = " is no key of a file, and at most a flag (--help)";
/// Flags that a configuration file cannot set.
const FLAGS_ONLY: [&str; 6] = ["background", "check", "config", "help", "upgrade", "version"];
/// The smallest likeness at which a known key is proposed for an unknown key
/// ([`normalized_damerau_levenshtein`]: 1 for equal keys, 0 for keys without a common letter).
const LIKENESS_MIN: f64 = 0.6;

/// The text of a configuration file.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    path: PathBuf,
    text: String,
}

impl ConfigFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let failed = |problem: String| {
            Failure::bad_input(format!("the configuration file {}: {problem}", path.display()))
        };
        let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
        let mut text = String::new();
        let read = file.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text);
        match read.map_err(|error| failed(error.to_string()))? as u64 {
            0..=CONFIG_BYTES_MAX => Ok(Self { path: path.to_owned(), text }),
            _ => Err(failed(format!("it has more than {CONFIG_BYTES_MAX} bytes"))),
        }
    }

    /// Parses the options of the file.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        toml::from_str(&self.text).map_err(|error| {
            let problem = plain(&error.message().replace('\n', ": "));
            let is_unknown_key = error.message().starts_with("unknown field ")
                // A key of the table is meant, or none.
                && !problem.contains(": write ")
                && !problem.ends_with(FLAG_FOUND);
            match error.span() {
                Some(span) if is_unknown_key && self.is_in_table(&span) => {
                    let problem = format!("{problem}; keys of the whole file come before tables");
                    self.failure(span, problem)
                }
                None => Failure::bad_input(format!("{}: {problem}", self.path.display())),
                // A list of tables for one table: serde takes each for the value of a key.
                Some(span) if problem == LIST_WANTED && self.is_list_head(&span) => {
                    self.failure(span, "it must be one table: write [ ] instead of [[ ]]")
                }
                Some(span) => self.failure_of_value(span, &problem),
            }
        })
    }

    /// A message that names the line of a problem.
    pub fn failure(&self, span: Range<usize>, problem: impl Display) -> Failure {
        let line = self.line(&span);
        Failure::bad_input(format!("{}: line {line}: {problem}", self.path.display()))
    }

    /// A message that names the line and the key of a problem.
    fn failure_of_value(&self, span: Range<usize>, problem: &str) -> Failure {
        let line = self.text.lines().nth(self.line(&span) - 1);
        let key = line.and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
        let is_bare = |key: &str| {
            !key.is_empty()
                && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        match key.filter(|key| is_bare(key) && !problem.contains(key)) {
            Some(key) => {
                let line = self.line(&span);
                Failure::bad_input(format!(
                    "{}: line {line}, {key}: {problem}",
                    self.path.display()
                ))
            }
            None => self.failure(span, problem),
        }
    }

    /// Whether the key at `key` is inside a table.
    fn is_in_table(&self, key: &Range<usize>) -> bool {
        let is_head = |line: &str| line.trim_start().starts_with('[');
        let lines: Vec<_> = self.text.lines().take(self.line(key)).collect();
        lines
            .split_last()
            .is_some_and(|(line, before)| !is_head(line) && before.iter().any(|line| is_head(line)))
    }

    /// Whether a list of tables begins at a place.
    fn is_list_head(&self, span: &Range<usize>) -> bool {
        let line = self.text.lines().nth(self.line(span) - 1);
        line.is_some_and(|line| line.trim_start().starts_with("[["))
    }

    /// The number of the line in which `span` starts, from 1.
    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.get(..span.start).unwrap_or(&self.text);
        before.matches('\n').count() + 1
    }
}

/// Translates an error message of serde to the terms of TOML. Other messages stay as they are.
fn plain(message: &str) -> String {
    let unknown = |kind: &str| {
        let (name, known) = message.strip_prefix(kind)?.strip_prefix('`')?.split_once("`, ")?;
        // `one of` and names in backquotes, or two with `or`, or one.
        Some((name, known.split('`').skip(1).step_by(2).collect::<Vec<_>>()))
    };
    if let Some((name, known)) = unknown("unknown field ") {
        return match known.len() {
            _ if FLAGS_ONLY.contains(&name) => format!("{name}{FLAG_FOUND}"),
            0..=KEYS_LISTED_MAX => unknown_name(name, &known),
            _ => likely_name(name, &known).unwrap_or_else(|| {
                format!("{name} is unknown: keys are the names of the flags (--help)")
            }),
        };
    }
    if let Some((name, known)) = unknown("unknown variant ") {
        return unknown_name(name, &known);
    }
    if let Some(name) = message.strip_prefix("missing field ") {
        return format!("{} is missing", name.trim_matches('`'));
    }
    let wrong = ["invalid type: ", "invalid value: "].into_iter();
    let mut wrong =
        wrong.filter_map(|prefix| message.strip_prefix(prefix)?.rsplit_once(", expected "));
    match wrong.next() {
        Some(("map", "a sequence")) => LIST_WANTED.into(),
        // Of the names of an `enum`.
        None if message == "wanted string or table" => "it must be text in quotes".into(),
        Some((found, expected)) => {
            format!("it must be {}, and is {}", kind(expected), kind(found).replace('`', ""))
        }
        None => message.to_owned(),
    }
}

/// A message about an unknown name: the known name that is most like it, or all known names.
pub fn unknown_name(name: &str, known: &[&str]) -> String {
    likely_name(name, known)
        .unwrap_or_else(|| format!("{name} is unknown: known are {}", known.join(", ")))
}

/// A message about an unknown name, if a known name is like the unknown name.
fn likely_name(name: &str, known: &[&str]) -> Option<String> {
    let likeness = |other: &&str| normalized_damerau_levenshtein(name, other);
    let best = known.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    let best = best.filter(|best| likeness(best) >= LIKENESS_MIN)?;
    Some(format!("{name} is unknown: write {best}"))
}

/// Translates serde's name of a type or of a value to the terms of TOML.
fn kind(name: &str) -> String {
    match name {
        "a string" => "text in quotes".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list in brackets".into(),
        "sequence" => "a list".into(),
        "map" => "a table".into(),
        "usize" | "u16" | "u32" | "u64" => "a whole number of at least 0".into(),
        _ if name == "a map" || name.starts_with("struct ") => "a table".into(),
        _ => name
            .replacen("string ", "the text ", 1)
            .replacen("integer ", "the number ", 1)
            .replacen("floating point ", "the number ", 1)
            .replacen("boolean ", "", 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    struct Options {
        listen: Vec<String>,
        max_connections: Option<usize>,
        control: Option<String>,
        confine: Option<bool>,
        balance: Option<Balance>,
        route: Vec<String>,
        group: BTreeMap<String, Group>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its type counts")]
    struct Group {
        to: Vec<String>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Balance {
        RoundRobin,
        LeastConnections,
    }

    fn problem(text: &str) -> String {
        let file = ConfigFile { path: "haul.toml".into(), text: text.into() };
        file.parse::<Options>().unwrap_err().to_string()
    }

    #[test]
    fn an_error_names_the_line_the_key_and_what_to_write() {
        for (text, expected) in [
            (
                "\nlisten = \"80\"",
                "line 2, listen: it must be a list in brackets, and is the text \"80\"",
            ),
            ("listen = [80]", "line 1, listen: it must be text in quotes, and is the number 80"),
            ("max-connections = \"9\"", "it must be a whole number of at least 0, and is the text"),
            (
                "max-connections = -1",
                "it must be a whole number of at least 0, and is the number -1",
            ),
            (
                "max-connections = 1.5",
                "it must be a whole number of at least 0, and is the number 1.5",
            ),
            ("control = true", "line 1, control: it must be text in quotes, and is true"),
            ("confine = \"yes\"", "it must be true or false, and is the text \"yes\""),
            ("group = 1", "it must be a table, and is the number 1"),
            ("route = [\n\"a=b\", 7]", "line 2: it must be text in quotes, and is the number 7"),
            ("[route]\n", "line 1: it must be a list: write the table in [[ ]]"),
            (
                "[[group.a]]\nto = [\"a\"]",
                "line 1: it must be one table: write [ ] instead of [[ ]]",
            ),
            ("balance = 1", "line 1, balance: it must be text in quotes"),
            ("config = \"x\"", "line 1: config is no key of a file, and at most a flag"),
            ("[\"é\"]\nconfine = \"é\"", "line 1: é is unknown: known are"),
            (
                "control = \"a, expected b\"\nconfine = \", expected 7\"",
                "and is the text \", expected 7\"",
            ),
            ("max-conections = 1", "line 1: max-conections is unknown: write max-connections"),
            ("color = 1", "line 1: color is unknown: known are listen, max-connections, control,"),
            ("balance = \"round-robbin\"", "round-robbin is unknown: write round-robin"),
            ("balance = \"x\"", "x is unknown: known are round-robin, least-connections"),
            ("[group.a]\n", "line 1: to is missing"),
            (
                "[group.a]\nto = [\"a\"]\nbalance = \"x\"",
                "line 3: balance is unknown: known are to; keys of the whole file come before",
            ),
            ("this is no TOML", "line 1: "),
        ] {
            let problem = problem(text);
            assert!(problem.starts_with("haul.toml: line "), "{problem}");
            assert!(problem.contains(expected), "{expected:?} in {problem}");
        }
    }
}
