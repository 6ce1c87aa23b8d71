//! Copies compared with the copies of rsync, for random trees and letters.

use crate::common::{content_of, copy, dump_of, random_tree};
use fastrand::Rng;
use haul_transfer::{Options, Preserve};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The number of trees; the environment may set more.
fn trees() -> u64 {
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

fn rsync(letters: &str, from: &Path, to: &Path) -> bool {
    let mut command = Command::new("rsync");
    command.args(["--numeric-ids", letters]).arg(from.join("")).arg(to.join(""));
    match command.output() {
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "rsync {letters}: {error}");
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
                if !rsync("-aHAXS", &earlier, &path(name)) {
                    return;
                }
            }
        }
        if !rsync(&letters, &path("source"), &path("rsync")) {
            return;
        }
        let from = content_of(&path("source"));
        let summary = copy(&[from], &path("haul"), options);
        assert_eq!(summary.errors, [], "seed {seed}, {letters}");
        let (theirs, ours) =
            (dump_of(&path("rsync"), &preserve), dump_of(&path("haul"), &preserve));
        let only_theirs = theirs.iter().filter(|line| !ours.contains(line));
        let only_ours = ours.iter().filter(|line| !theirs.contains(line));
        let differ: Vec<_> = only_theirs.chain(only_ours).collect();
        assert!(differ.is_empty(), "seed {seed}, {letters}: rsync's, then haul's: {differ:#?}");
    }
}
