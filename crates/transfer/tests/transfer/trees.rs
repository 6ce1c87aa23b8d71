//! Copies of random trees, compared with their originals.

use crate::common::{content_of, copy, dump, random_tree};
use fastrand::Rng;
use haul_transfer::{AcceptedPaths, Durable, Options, Preserve, Session, Verify};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::slice;

#[test]
fn a_copy_of_a_random_tree_equals_the_tree() {
    for seed in 0..20 {
        let mut random = Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
        random_tree(&mut random, &source);
        let from = content_of(&source);
        let summary = copy(slice::from_ref(&from), &destination, &Options::default());
        assert_eq!(summary.errors, [], "seed {seed}");
        assert_eq!(dump(&source), dump(&destination), "seed {seed}");
        // Nothing is sent again.
        let again = copy(slice::from_ref(&from), &destination, &Options::default());
        assert_eq!((again.files_sent, again.bytes_sent), (0, 0), "seed {seed}");
        assert_eq!(again.errors, [], "seed {seed}");
        assert_eq!(dump(&source), dump(&destination), "seed {seed}");
        // A changed tree is brought up to date, in place of what has the names.
        let other = folder.path().join("other");
        random_tree(&mut random, &other);
        let from = content_of(&other);
        let over = folder.path().join("over");
        copy(slice::from_ref(&from), &over, &Options::default());
        let mut options = Options::default();
        options.replacement.ignores_times = true;
        let summary = copy(&[from], &over, &options);
        assert_eq!(summary.errors, [], "seed {seed}");
        assert_eq!(dump(&other), dump(&over), "seed {seed}");
    }
}

/// Every checksum, and every time of a sync.
#[test]
fn options_of_certainty_change_nothing_about_the_copy() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    random_tree(&mut Rng::with_seed(9), &source);
    for number in 0..1000 {
        fs::write(source.join(format!("many{number}")), number.to_string()).unwrap();
    }
    let from = content_of(&source);
    for (verify, durable) in [
        (Verify::Blake3, Durable::Batch),
        (Verify::Crc64, Durable::Each),
        (Verify::Crc64, Durable::No),
    ] {
        let destination = folder.path().join(format!("{durable:?}"));
        let mut options = Options::default();
        (options.verify, options.durable) = (verify, durable);
        let summary = copy(slice::from_ref(&from), &destination, &options);
        assert_eq!(summary.errors, [], "{durable:?}");
        assert_eq!(dump(&source), dump(&destination), "{durable:?}");
    }
}

#[test]
fn names_follow_the_rule_of_the_trailing_slash() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let bytes = |name: &str| path(name).as_os_str().as_bytes().to_vec();
    fs::create_dir(path("tree")).unwrap();
    fs::write(path("tree/a"), "a").unwrap();
    fs::write(path("file"), "content").unwrap();
    let read = |name: &str| fs::read_to_string(path(name)).unwrap();
    let options = Options::default();
    copy(&[bytes("tree")], &path("named"), &options);
    assert_eq!(read("named/tree/a"), "a");
    copy(&[bytes("tree/")], &path("content"), &options);
    assert_eq!(read("content/a"), "a");
    copy(&[bytes("file")], &path("other-name"), &options);
    assert_eq!(read("other-name"), "content");
    fs::create_dir(path("existing")).unwrap();
    copy(&[bytes("file")], &path("existing"), &options);
    assert_eq!(read("existing/file"), "content");
    copy(&[bytes("file")], &path("new/"), &options);
    assert_eq!(read("new/file"), "content");
    copy(&[bytes("file"), bytes("tree")], &path("both"), &options);
    assert_eq!((read("both/file"), read("both/tree/a")), ("content".into(), "a".into()));
    // A link to a directory is a link, and with a slash its content.
    std::os::unix::fs::symlink("tree", path("link")).unwrap();
    copy(&[bytes("link/")], &path("through"), &options);
    assert_eq!(read("through/a"), "a");
    copy(&[bytes("link")], &path("links/"), &options);
    assert_eq!(fs::read_link(path("links/link")).unwrap().to_str(), Some("tree"));
}

#[test]
fn what_cannot_be_copied_is_listed_and_the_rest_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("source/sub")).unwrap();
    for name in ["a", "b", "sub/c"] {
        fs::write(path("source").join(name), name).unwrap();
    }
    // A directory has the name of a file, and a file has the name of a directory.
    fs::create_dir_all(path("copy/a/full")).unwrap();
    fs::write(path("copy/sub"), "old").unwrap();
    let from = content_of(&path("source"));
    let missing = path("missing").as_os_str().as_bytes().to_vec();
    let summary = copy(&[from, missing], &path("copy"), &Options::default());
    assert_eq!(fs::read_to_string(path("copy/b")).unwrap(), "b");
    assert_eq!(fs::read_to_string(path("copy/sub/c")).unwrap(), "sub/c");
    let errors: Vec<_> =
        summary.errors.iter().map(|error| (&*error.path, &*error.problem)).collect();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors.iter().any(|(path, problem)| *path == "a" && problem.contains("directory")));
    assert!(errors.iter().any(|(path, _)| path.ends_with("missing")), "{errors:?}");
}

#[test]
fn a_dry_run_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    random_tree(&mut Rng::with_seed(7), &source);
    fs::create_dir(&destination).unwrap();
    let before = dump(&destination);
    let mut options = Options::default();
    options.dry_run = true;
    let from = content_of(&source);
    let summary = copy(&[from], &destination, &options);
    assert!(summary.files_sent > 0 && summary.errors.is_empty(), "{summary:?}");
    assert_eq!(dump(&destination), before);
    // As without the option: one missing folder is made, and two are an error.
    let missing = folder.path().join("missing");
    assert_eq!(copy(&[content_of(&source)], &missing, &options).errors, []);
    let (one, other) = UnixStream::pair().unwrap();
    let path = missing.join("below/").into_os_string().into_encoded_bytes();
    let theirs = options.clone();
    let receiver = std::thread::spawn(move || {
        let to = other.try_clone().unwrap();
        Session::new(other, to, theirs).receive(&path, &AcceptedPaths::All).unwrap_err()
    });
    let session = Session::new(one.try_clone().unwrap(), one, options);
    let error = session.send(&[content_of(&source)]).unwrap_err().to_string();
    assert!(error.contains("directory that would hold it is missing"), "{error}");
    receiver.join().unwrap();
}

/// Only root can make most of what is not preserved differ.
#[test]
fn without_preservation_only_the_content_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    fs::create_dir_all(source.join("sub")).unwrap();
    fs::write(source.join("sub/a"), "a").unwrap();
    std::os::unix::fs::symlink("a", source.join("link")).unwrap();
    let mut options = Options::default();
    options.preserve = Preserve { recursive: true, ..Preserve::NOTHING };
    let from = content_of(&source);
    copy(&[from], &destination, &options);
    assert_eq!(fs::read_to_string(destination.join("sub/a")).unwrap(), "a");
    assert!(!destination.join("link").is_symlink());
}

/// Deeper than a path may be long, and with more folders than an ordinary process may open.
#[test]
fn a_deep_tree_is_copied() {
    const LEVELS: usize = 300;
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    let mut path = source.clone();
    for level in 0..LEVELS {
        path.push(format!("folder-{level}"));
    }
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("deepest"), "content").unwrap();
    let from = content_of(&source);
    let summary = copy(&[from], &destination, &Options::default());
    assert_eq!(summary.errors, []);
    assert_eq!(dump(&source), dump(&destination));
}

/// Many folders with one file each: more than are kept open.
#[test]
fn a_wide_tree_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    for number in 0..1500 {
        let sub = source.join(format!("{}/{number}", number % 7));
        fs::create_dir_all(&sub).unwrap();
        fs::write(sub.join("file"), number.to_string()).unwrap();
    }
    // A hard link to a file in a folder that is complete by then, or the other way round.
    fs::hard_link(source.join("0/0/file"), source.join("6/1490/link")).unwrap();
    fs::hard_link(source.join("6/1483/file"), source.join("0/7/link")).unwrap();
    let from = content_of(&source);
    let summary = copy(&[from], &destination, &Options::default());
    assert_eq!(summary.errors, []);
    assert_eq!(dump(&source), dump(&destination));
}

/// A file does not get the permissions of a link in whose place it comes.
#[test]
fn a_file_in_place_of_a_link_gets_the_permissions_of_a_new_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("copy")).unwrap();
    fs::write(path("file"), "content").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", path("copy/file")).unwrap();
    let mut options = Options::default();
    options.preserve = Preserve { recursive: true, ..Preserve::NOTHING };
    copy(&[path("file").as_os_str().as_bytes().to_vec()], &path("copy"), &options);
    let metadata = fs::symlink_metadata(path("copy/file")).unwrap();
    assert!(metadata.is_file());
    let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions());
    assert_eq!(mode & 0o022, 0, "{mode:o}");
}

/// Files of /sys and of some file systems are shorter than their size.
#[test]
fn a_file_that_is_shorter_than_its_size_gets_no_zeros() {
    let from = "/sys/kernel/mm/transparent_hugepage/enabled";
    let Ok(content) = fs::read(from) else {
        return eprintln!("SKIPPED: there is no {from}");
    };
    let folder = tempfile::tempdir().unwrap();
    let destination = folder.path().join("copy");
    copy(&[from.into()], &destination, &Options::default());
    assert_eq!(fs::read(destination).unwrap(), content);
}

#[test]
fn a_missing_source_makes_no_destination() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).as_os_str().as_bytes().to_vec();
    let destination = folder.path().join("copy");
    for sources in [&[path("none")][..], &[path("none/")], &[path("one"), path("other")]] {
        let summary = copy(sources, &destination, &Options::default());
        assert_eq!(summary.errors.len(), sources.len(), "{summary:?}");
        assert!(!destination.exists());
    }
}
