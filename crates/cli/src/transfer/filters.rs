//! `--exclude` and its like, whose order on the command line counts, and the options of rsync that
//! haul answers in another way.

use crate::output::Failure;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use haul_transfer::{Filter, Rule};
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

/// Where rules come from, in the order of the command line.
#[derive(Debug)]
pub struct FilterArguments {
    sources: Vec<(RuleSource, OsString)>,
    /// The option of rsync that haul lacks, and what to do.
    refused: Option<(&'static str, &'static str)>,
}

/// An option that adds rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RuleSource {
    Exclude,
    Include,
    ExcludeFrom,
    IncludeFrom,
}

const SOURCES: [(RuleSource, &str, &str, &str); 4] = [
    (
        RuleSource::Exclude,
        "exclude",
        "PATTERN",
        "Leave out what matches, such as *.o, /cache/ or **/target; the first pattern that matches \
         decides",
    ),
    (RuleSource::Include, "include", "PATTERN", "Do not leave out what matches"),
    (
        RuleSource::ExcludeFrom,
        "exclude-from",
        "FILE",
        "Read patterns to leave out from a file, one in a line; - is standard input",
    ),
    (RuleSource::IncludeFrom, "include-from", "FILE", "Read patterns to include from a file"),
];

/// Options of rsync that change nothing, because haul does so always.
const ALWAYS: [(&str, Option<char>); 13] = [
    ("partial", None),
    ("sparse", Some('S')),
    ("numeric-ids", None),
    ("whole-file", Some('W')),
    ("stats", None),
    ("human-readable", Some('h')),
    ("delete-after", None),
    ("delete-delay", None),
    ("mkpath", None),
    ("fsync", None),
    ("protect-args", Some('s')),
    ("secluded-args", None),
    ("inc-recursive", None),
];

/// Options of rsync that haul lacks, and what to do. An option with a value takes the value.
const REFUSED: [(&str, Option<char>, bool, &str); 46] = [
    (
        "checksum",
        Some('c'),
        false,
        "-I --delta compares the content, and --size-only the sizes alone",
    ),
    (
        "no-whole-file",
        None,
        false,
        "--delta sends blocks that differ, and --delta=rolling finds moved ones",
    ),
    ("block-size", Some('B'), true, "--delta uses blocks of 64 KiB"),
    ("inplace", None, false, "a name appears only when its file is whole"),
    ("append", None, false, "an interrupted file goes on by its journal"),
    ("append-verify", None, false, "an interrupted file goes on by its journal"),
    ("filter", Some('f'), true, "use --include and --exclude"),
    ("cvs-exclude", Some('C'), false, "use --exclude"),
    ("compare-dest", None, true, "--link-dest compares with an earlier copy, and makes a full one"),
    ("copy-dest", None, true, "--link-dest compares with an earlier copy"),
    ("backup", Some('b'), false, "haul keeps no old versions; --link-dest makes daily copies"),
    ("backup-dir", None, true, "haul keeps no old versions; --link-dest makes daily copies"),
    ("suffix", None, true, "haul keeps no old versions; --link-dest makes daily copies"),
    ("chmod", None, true, "change the permissions before or after the transfer"),
    ("chown", None, true, "change the owner before or after the transfer"),
    ("timeout", None, true, "a direct connection that hangs ends after 15 minutes"),
    ("contimeout", None, true, "use ConnectTimeout of ssh"),
    ("itemize-changes", Some('i'), false, "-v lists the names of files"),
    ("info", None, true, "the progress is shown on a terminal, and by -P in a log"),
    ("debug", None, true, "-v lists the names of files"),
    ("out-format", None, true, "--json prints the names with -v"),
    ("log-file", None, true, "redirect the output: -v 2>&1 >FILE"),
    ("list-only", None, false, "-n -v lists what would be sent"),
    ("prune-empty-dirs", Some('m'), false, "leave directories out by --exclude"),
    ("partial-dir", None, true, "parts are kept beside their files as .NAME.haul-part"),
    (
        "temp-dir",
        Some('T'),
        true,
        "a part has the directory of its file, so that it can be renamed",
    ),
    ("max-delete", None, true, "a brake limits --delete to a quarter of the destination"),
    ("delete-before", None, false, "--delete deletes at the end, if there was no error"),
    ("delete-during", None, false, "--delete deletes at the end, if there was no error"),
    ("del", None, false, "use --delete, which deletes at the end, if there was no error"),
    ("delete-missing-args", None, false, "delete what is missing there yourself"),
    ("force", None, false, "a directory with entries does not make way for a file"),
    ("ignore-errors", None, false, "after an error nothing is deleted"),
    ("remove-source-files", None, false, "remove the sources after exit code 0"),
    ("keep-dirlinks", Some('K'), false, "a link there is replaced by the directory"),
    ("copy-dirlinks", Some('k'), false, "-L copies what all links lead to"),
    ("copy-unsafe-links", None, false, "-L copies what all links lead to"),
    ("safe-links", None, false, "leave links out by letters without -l"),
    ("dirs", Some('d'), false, "leave out the content of directories by --exclude '/*/*'"),
    ("executability", Some('E'), false, "-p copies all permissions"),
    ("modify-window", None, true, "--size-only compares sizes alone"),
    ("fuzzy", Some('y'), false, "--delta compares with the file of the same name"),
    ("delay-updates", None, false, "each name appears when its file is whole"),
    ("iconv", None, true, "names are copied byte for byte"),
    ("ipv4", Some('4'), false, "use -e 'ssh -4'"),
    ("ipv6", Some('6'), false, "use -e 'ssh -6'"),
];

impl FilterArguments {
    /// The rules, or the problem with a file of rules or with an option.
    pub fn filter(&self) -> Result<Filter, Failure> {
        if let Some((option, advice)) = self.refused {
            return Err(Failure::bad_input(format!("--{option} is an option of rsync: {advice}")));
        }
        let mut rules = Vec::new();
        for (source, value) in &self.sources {
            let includes = matches!(source, RuleSource::Include | RuleSource::IncludeFrom);
            if let RuleSource::Exclude | RuleSource::Include = source {
                add_rule(&mut rules, includes, value.as_bytes());
                continue;
            }
            let failed =
                |error: std::io::Error| Failure::bad_input(format!("{}: {error}", value.display()));
            let mut text = Vec::new();
            if value == "-" {
                std::io::stdin().read_to_end(&mut text).map_err(failed)?;
            } else {
                text = fs::read(value).map_err(failed)?;
            }
            // As by rsync, empty lines and comments do not count.
            let lines = text.split(|&byte| byte == b'\n');
            let lines = lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line));
            for line in lines.filter(|line| !matches!(line.first(), None | Some(b'#' | b';'))) {
                add_rule(&mut rules, includes, line);
            }
        }
        if let Some(empty) = rules.iter().find(|rule| rule.pattern.is_empty()) {
            let option = if empty.includes { "include" } else { "exclude" };
            return Err(Failure::bad_input(format!("--{option}: the pattern is empty")));
        }
        Ok(Filter(rules))
    }
}

/// Adds a rule. As by rsync, `+ ` and `- ` before the pattern count more than the option, and `!`
/// removes the rules before.
fn add_rule(rules: &mut Vec<Rule>, includes: bool, text: &[u8]) {
    if text == b"!" {
        return rules.clear();
    }
    let (includes, pattern) = match text {
        [b'+', b' ', pattern @ ..] => (true, pattern),
        [b'-', b' ', pattern @ ..] => (false, pattern),
        pattern => (includes, pattern),
    };
    rules.push(Rule { includes, pattern: pattern.to_vec() });
}

impl FromArgMatches for FilterArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut sources = Vec::new();
        for (source, name, ..) in SOURCES {
            let (Some(indices), Some(values)) =
                (matches.indices_of(name), matches.get_many::<OsString>(name))
            else {
                continue;
            };
            sources.extend(indices.zip(values).map(|(at, value)| (at, source, value.clone())));
        }
        sources.sort_by_key(|(at, ..)| *at);
        let sources = sources.into_iter().map(|(_, source, value)| (source, value)).collect();
        let is_given = |(name, _, has_value, _): &&(&str, Option<char>, bool, &str)| {
            if *has_value { matches.contains_id(name) } else { matches.get_flag(name) }
        };
        let refused = REFUSED.iter().find(is_given).map(|(name, _, _, advice)| (*name, *advice));
        Ok(Self { sources, refused })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for FilterArguments {
    fn augment_args(command: Command) -> Command {
        let mut command = command;
        for (_, name, value, help) in SOURCES {
            let argument = Arg::new(name).long(name).value_name(value).help(help);
            let argument = argument.value_parser(clap::value_parser!(OsString));
            command = command.arg(argument.action(ArgAction::Append).allow_hyphen_values(true));
        }
        let hidden = |name: &'static str, letter: Option<char>| {
            let argument = Arg::new(name).long(name).hide(true);
            if let Some(letter) = letter { argument.short(letter) } else { argument }
        };
        for (name, letter) in ALWAYS {
            command = command.arg(hidden(name, letter).action(ArgAction::SetTrue));
        }
        for (name, letter, has_value, _) in REFUSED {
            let action = if has_value { ArgAction::Append } else { ArgAction::SetTrue };
            let argument = hidden(name, letter).action(action);
            command = command.arg(argument.allow_hyphen_values(has_value));
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
