//! Copies compared with the copies of rsync, for random trees and letters.

use crate::common::{content_of, copy, dump_of, random_tree};
use fastrand::Rng;
use haul_transfer::{DeletionMode, Options, Preserve, Rule};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

/// The number of trees; the environment may set more.
pub fn trees() -> u64 {
    std::env::var("HAUL_TEST_TREES").map_or(20, |text| text.parse().unwrap())
}

/// What a letter adds.
type Choose = fn(&mut Preserve);

/// Random letters of rsync, and what they preserve.
fn random_letters(random: &mut Rng) -> (String, Preserve) {
    let mut preserve = Preserve { recursive: true, ..Preserve::NOTHING };
    let mut letters = "-rS".to_owned();
    let choices: [(char, Choose); 9] = [
        ('l', |preserve| preserve.links = true),
        ('p', |preserve| preserve.permissions = true),
        ('t', |preserve| preserve.times = true),
        ('o', |preserve| preserve.owner = true),
        ('g', |preserve| preserve.group = true),
        ('D', |preserve| preserve.specials = true),
        ('H', |preserve| preserve.hard_links = true),
        ('X', |preserve| preserve.xattrs = true),
        ('A', |preserve| (preserve.acls, preserve.permissions) = (true, true)),
    ];
    for (letter, choose) in choices {
        if random.bool() {
            letters.push(letter);
            choose(&mut preserve);
        }
    }
    if preserve.hard_links && !preserve.group {
        // The first name of a file decides which folder's group the file gets, and the order of
        // the names is not defined.
        letters.push('g');
        preserve.group = true;
    }
    (letters, preserve)
}

/// A tree with short names, so that patterns match some of them, and with few sizes and times. The
/// last letter decides the kind, because a folder with entries does not make way for a file.
pub fn letter_tree(random: &mut Rng, root: &Path) {
    fs::create_dir(root).unwrap();
    let mut folders = vec![root.to_owned()];
    for _ in 0..60 {
        let name: String = (0..random.usize(1..4)).map(|_| random.char('a'..='d')).collect();
        let path = folders[random.usize(..folders.len())].join(name);
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match path.as_os_str().as_bytes().last() {
            Some(b'c') => {
                fs::create_dir(&path).unwrap();
                folders.push(path);
            }
            Some(b'd') => std::os::unix::fs::symlink("target", &path).unwrap(),
            _ => {
                let content = vec![random.u8(1..); [10, 500, 5000][random.usize(..3)]];
                fs::write(&path, content).unwrap();
                let time = UNIX_EPOCH + Duration::from_secs(1_000_000 + random.u64(..3));
                File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            }
        }
    }
}

/// Random options of rsync that select what is copied, replaced and deleted.
fn random_selection(random: &mut Rng, options: &mut Options) -> Vec<String> {
    let mut arguments = Vec::new();
    for _ in 0..random.usize(..4) {
        let letter = random.char('a'..='d');
        let patterns = [
            format!("*{letter}*"),
            format!("/{letter}*"),
            format!("{letter}?*/"),
            format!("*/[a-{letter}]*"),
            format!("**{letter}/**"),
            format!("/*/*{letter}*"),
            format!("[!{letter}-z]*"),
            format!("*{letter}/***"),
        ];
        let pattern = patterns[random.usize(..patterns.len())].clone();
        let includes = random.bool();
        arguments.push(format!("--{}={pattern}", if includes { "include" } else { "exclude" }));
        options.selection.filter.0.push(Rule { includes, pattern: pattern.into_bytes() });
    }
    let mut choose = |argument: &str, set: &mut dyn FnMut(&mut Options)| {
        if random.u8(..4) == 0 {
            arguments.push(argument.to_owned());
            set(options);
        }
    };
    choose("--existing", &mut |options| options.replacement.only_existing = true);
    choose("--ignore-existing", &mut |options| options.replacement.keeps_existing = true);
    choose("--update", &mut |options| options.replacement.keeps_newer = true);
    choose("--size-only", &mut |options| options.replacement.size_only = true);
    choose("--max-size=3000", &mut |options| options.selection.size_max = Some(3000));
    choose("--min-size=100", &mut |options| options.selection.size_min = 100);
    choose("--delete", &mut |options| options.deletion.mode = DeletionMode::All);
    if options.deletion.mode == DeletionMode::All && random.bool() {
        arguments.push("--delete-excluded".into());
        options.deletion.deletes_excluded = true;
    }
    arguments
}

/// Fails with the lines that only one of two dumps has.
pub fn assert_equal_lines(theirs: &[String], ours: &[String], context: &str) {
    let only_theirs = theirs.iter().filter(|line| !ours.contains(line));
    let only_ours = ours.iter().filter(|line| !theirs.contains(line));
    let differ: Vec<_> = only_theirs.chain(only_ours).collect();
    assert!(differ.is_empty(), "{context}: rsync's, then haul's: {differ:#?}");
}

/// Copies the content of a folder; false without rsync.
fn rsync(letters: &[&str], from: &Path, to: &Path) -> bool {
    let mut command = Command::new("rsync");
    command.arg("--numeric-ids").args(letters).arg(from.join("")).arg(to.join(""));
    run_rsync(&mut command, letters)
}

/// Runs rsync; false without rsync.
pub fn run_rsync(command: &mut Command, letters: &[&str]) -> bool {
    match command.output() {
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "rsync {letters:?}: {error}");
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: copies are not compared with rsync's (ci/install): {error}");
            false
        }
    }
}

#[test]
fn a_copy_equals_the_copy_of_rsync() {
    for seed in 1000..1000 + trees() {
        let mut random = Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        random_tree(&mut random, &path("source"));
        let (letters, preserve) = random_letters(&mut random);
        for name in ["rsync", "haul"] {
            fs::create_dir(path(name)).unwrap();
        }
        let mut options = Options::default();
        options.preserve = preserve;
        // An earlier copy of another tree, or of the same tree with other attributes.
        if random.bool() {
            let earlier = path("earlier");
            random_tree(&mut random, &earlier);
            for name in ["rsync", "haul"] {
                if !rsync(&["-aHAXS"], &earlier, &path(name)) {
                    return;
                }
            }
        }
        if !rsync(&[&letters], &path("source"), &path("rsync")) {
            return;
        }
        let from = content_of(&path("source"));
        let summary = copy(&[from], &path("haul"), &options);
        assert_eq!(summary.errors, [], "seed {seed}, {letters}");
        let (theirs, ours) =
            (dump_of(&path("rsync"), &preserve), dump_of(&path("haul"), &preserve));
        assert_equal_lines(&theirs, &ours, &format!("seed {seed}, {letters}"));
    }
}

/// Rules, replacement and deletion, over an earlier copy of another tree.
#[test]
fn a_selection_equals_the_selection_of_rsync() {
    for seed in 5000..5000 + 2 * trees() {
        let mut random = Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        letter_tree(&mut random, &path("source"));
        letter_tree(&mut random, &path("earlier"));
        let mut options = Options::default();
        options.preserve.hard_links = false;
        let arguments = random_selection(&mut random, &mut options);
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        arguments.insert(0, "-aAXS");
        for (number, name) in ["rsync", "haul"].into_iter().enumerate() {
            fs::create_dir(path(name)).unwrap();
            // A part of the tree, and all of another.
            if !rsync(&["-aS"], &path("earlier"), &path(name))
                || !rsync(&["-aS", "--exclude=*[ab]*"], &path("source"), &path(name))
                || number == 0 && !rsync(&arguments, &path("source"), &path(name))
            {
                return;
            }
        }
        let summary = copy(&[content_of(&path("source"))], &path("haul"), &options);
        assert_eq!(summary.errors, [], "seed {seed}, {arguments:?}");
        // Folders that are left out have the time of the earlier copy.
        let preserve = Preserve { times: false, ..options.preserve };
        let (theirs, ours) =
            (dump_of(&path("rsync"), &preserve), dump_of(&path("haul"), &preserve));
        assert_equal_lines(&theirs, &ours, &format!("seed {seed}, {arguments:?}"));
    }
}
