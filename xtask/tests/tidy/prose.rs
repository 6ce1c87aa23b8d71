//! Rules of docs/STYLE.md for comments and documents: line lengths, tables, banned words, and
//! counts of phrases that leave the noun out.
//!
//! A phrase count cannot tell a good use from a bad one, so the counts are not zero. They may only
//! shrink: `prose-counts.txt` holds them, and `HAUL_TIDY_UPDATE=1 cargo test -p xtask --test tidy`
//! writes smaller ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use super::{documents, root, sources};

/// Columns of a line of code, of a comment or of prose.
const COLUMNS_MAX: usize = 100;
/// Words that hide a term of the field (docs/STYLE.md).
const BANNED_WORDS: [&str; 6] =
    ["whoever", "whomever", "nobody", "somebody", "anybody", "everybody"];
/// Whether three words end with a phrase.
type IsPhrase = fn([&str; 3]) -> bool;
/// The phrases that are counted, in the order of the columns of `prose-counts.txt`.
const PHRASES: [(&str, IsPhrase); 6] = [
    ("that-of", |[_, word, last]| matches!(word, "that" | "those") && last == "of"),
    ("its-own", |[first, word, last]| {
        first == "of" && matches!(word, "its" | "their") && last == "own"
    }),
    ("too", |[_, word, last]| word.ends_with(',') && last == "too"),
    ("is-no", |[_, word, last]| matches!(word, "is" | "are" | "has" | "have") && last == "no"),
    ("perfect", |[first, word, last]| {
        let (has, last) = if word == "not" { (first, last) } else { (word, last) };
        matches!(has, "has" | "have") && is_participle(last)
    }),
    ("beside", |[_, word, last]| {
        matches!(last, "beside" | "meanwhile") || word == "in" && last == "vain"
    }),
];
/// Participles that do not end in "ed", of verbs that the comments use.
const IRREGULAR_PARTICIPLES: &str = "been become begun bound broken brought built chosen come cut \
    done fallen found given gone got grown held kept known left lost made met put read run said \
    seen sent set shown shut spent split stood taken thrown told understood woken won written";

fn is_participle(word: &str) -> bool {
    word.ends_with("ed") || IRREGULAR_PARTICIPLES.split(' ').any(|other| other == word)
}

/// Whether a line cannot be wrapped: a link, a table row, or one long word.
fn is_unwrappable(line: &str) -> bool {
    let text = line.trim_start_matches(['/', '!', '#', ' ']);
    text.starts_with('|') || text.contains("://") || !text.trim_end().contains(' ')
}

/// The prose of a file: the whole of a document, the comments of a source file.
fn prose<'a>(name: &str, line: &'a str) -> Option<&'a str> {
    let is_source = Path::new(name).extension().is_some_and(|end| end == "rs");
    if is_source { line.split_once("//").map(|(_, comment)| comment) } else { Some(line) }
}

/// A program that wraps prose makes one paragraph of a table's rows.
#[test]
fn tables_have_a_line_for_each_row() {
    for (name, text) in documents().into_iter().chain(sources()) {
        for (index, line) in text.lines().enumerate() {
            let text = line.trim_start_matches(['/', '!', ' ']);
            let is_rule = text.starts_with('|') && text.contains("|---|");
            let is_joined = is_rule && text.contains(char::is_alphabetic);
            assert!(!is_joined, "{name}:{}: rows are joined", index + 1);
        }
    }
}

#[test]
fn lines_have_at_most_100_columns() {
    let mut long = Vec::new();
    for (name, text) in documents().into_iter().chain(sources()) {
        for (index, line) in text.lines().enumerate() {
            if line.chars().count() > COLUMNS_MAX && !is_unwrappable(line) {
                long.push(format!("{name}:{}", index + 1));
            }
        }
    }
    assert!(long.is_empty(), "lines over {COLUMNS_MAX} columns: {long:#?}");
}

#[test]
fn comments_use_no_banned_words() {
    for (name, text) in sources().into_iter().chain(documents()) {
        if name == "docs/STYLE.md" {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            let Some(comment) = prose(&name, line) else { continue };
            let lower = comment.to_lowercase();
            let mut words = lower.split(|character: char| !character.is_alphanumeric());
            let banned = words.find(|word| BANNED_WORDS.contains(word));
            assert!(banned.is_none(), "{name}:{}: {}", index + 1, banned.unwrap_or_default());
        }
    }
}

/// How often each of `PHRASES` stands in a file, with the lines, for the message of a failure.
/// A phrase may be split over two lines.
fn phrases(name: &str, text: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut before = [String::new(), String::new()];
    for (index, line) in text.lines().enumerate() {
        let Some(line) = prose(name, line) else {
            before = Default::default();
            continue;
        };
        for word in line.to_lowercase().split_whitespace() {
            let word = word.trim_start_matches(['/', '!', '(', '*', '"', '`']);
            if word.is_empty() {
                continue;
            }
            let bare = word.trim_end_matches(['.', ',', ';', ':', ')', '"', '`', '*']);
            for (phrase, (_, is_phrase)) in PHRASES.iter().enumerate() {
                if is_phrase([&before[0], &before[1], bare]) {
                    found.push((phrase, index + 1));
                }
            }
            before.swap(0, 1);
            word.clone_into(&mut before[1]);
        }
    }
    found
}

/// The crate of a file, or the file's top folder. Phrases are counted per part.
fn part(name: &str) -> &str {
    let name = name.strip_prefix("crates/").unwrap_or(name);
    name.split_once('/').map_or("documents", |(part, _)| part)
}

type Counts = [usize; PHRASES.len()];

/// The lines of `prose-counts.txt`: a part of the tree, then one count for each of `PHRASES`.
fn parse_counts(text: &str) -> BTreeMap<String, Counts> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let mut fields = line.split_whitespace();
        let part = fields.next().unwrap().to_owned();
        (part, std::array::from_fn(|_| fields.next().unwrap().parse().unwrap()))
    };
    lines.map(parse).collect()
}

fn print_counts(counts: &BTreeMap<String, Counts>) -> String {
    let mut text = String::from("# Phrases that leave the noun out, for each part of the tree");
    text += " (docs/STYLE.md, \"Repeat the noun\").\n#         ";
    for (name, _) in PHRASES {
        write!(text, " {name:>8}").unwrap();
    }
    for (part, counts) in counts {
        write!(text, "\n{part:<10}").unwrap();
        for count in counts {
            write!(text, " {count:>8}").unwrap();
        }
    }
    text + "\n"
}

#[test]
fn phrases_without_a_noun_only_become_fewer() {
    let path = root().join("xtask/tests/tidy/prose-counts.txt");
    let allowed = parse_counts(&std::fs::read_to_string(&path).unwrap());
    let mut counts = BTreeMap::<String, Counts>::new();
    let mut places = BTreeMap::<(String, usize), Vec<String>>::new();
    for (name, text) in sources().into_iter().chain(documents()) {
        if name == "docs/STYLE.md" {
            continue;
        }
        let count = counts.entry(part(&name).to_owned()).or_default();
        for (phrase, line) in phrases(&name, &text) {
            count[phrase] += 1;
            places
                .entry((part(&name).to_owned(), phrase))
                .or_default()
                .push(format!("{name}:{line}"));
        }
    }
    let mut more = Vec::new();
    for (part, count) in &counts {
        let allowed = allowed.get(part).copied().unwrap_or_default();
        for (phrase, (name, _)) in PHRASES.iter().enumerate() {
            if count[phrase] > allowed[phrase] {
                let places = &places[&(part.clone(), phrase)];
                more.push(format!(
                    "{part}: {} of {name}, {} allowed: {places:#?}",
                    count[phrase], allowed[phrase]
                ));
            }
        }
    }
    assert!(more.is_empty(), "repeat the noun (docs/STYLE.md): {}", more.join("\n"));
    if std::env::var_os("HAUL_TIDY_UPDATE").is_some() {
        std::fs::write(&path, print_counts(&counts)).unwrap();
    } else if counts != allowed {
        // A text that improved is not a failure, so the smaller counts may be written later.
        println!("write the smaller counts: HAUL_TIDY_UPDATE=1 cargo test -p xtask --test tidy");
    }
}

#[test]
fn a_phrase_is_found_over_two_lines_and_not_in_code() {
    let text = "//! The size is that\n//! of the file, too.\nlet that = of; // has not ended\n";
    assert_eq!(phrases("a.rs", text), [(0, 2), (2, 2), (4, 3)]);
    assert_eq!(phrases("a.md", "It has begun in vain."), [(4, 1), (5, 1)]);
    assert_eq!(phrases("a.md", "A list of its own."), [(1, 1)]);
}

#[test]
fn counts_are_read_as_they_are_written() {
    let counts = BTreeMap::from([("haul".to_owned(), [1, 2, 3, 4, 5, 678])]);
    assert_eq!(parse_counts(&print_counts(&counts)), counts);
}
