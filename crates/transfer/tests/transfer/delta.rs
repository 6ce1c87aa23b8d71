//! Files that changed, of which only blocks that differ are sent.

use crate::common::{CutWriter, content_of, copy};
use fastrand::Rng;
use haul_transfer::{AcceptedPaths, Delta, Options, Session, Summary};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, SystemTime};

const MODES: [Delta; 2] = [Delta::Fixed, Delta::Rolling];
const BLOCK: usize = 64 << 10;

/// A source with a large file, and a destination with another version of the file.
struct Versions(tempfile::TempDir);

impl Versions {
    fn new(old: &[u8], new: &[u8]) -> Self {
        let versions = Self(tempfile::tempdir().unwrap());
        for (folder, content) in [("source", new), ("copy", old)] {
            fs::create_dir(versions.path(folder)).unwrap();
            write_with_holes(&versions.path(folder).join("large"), content);
        }
        let old = File::options().write(true).open(versions.path("copy/large")).unwrap();
        old.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)).unwrap();
        versions
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Copies the new version, and checks the copy.
    fn copy(&self, delta: Delta) -> Summary {
        let mut options = Options::default();
        options.delta = delta;
        let summary = copy(&[content_of(&self.path("source"))], &self.path("copy"), &options);
        assert_eq!(summary.errors, []);
        self.check();
        summary
    }

    fn check(&self) {
        let [source, copy] = ["source/large", "copy/large"].map(|name| self.path(name));
        assert!(fs::read(source).unwrap() == fs::read(copy).unwrap());
        assert_eq!(fs::read_dir(self.path("copy")).unwrap().count(), 1);
    }
}

/// Writes content whose pages without a byte other than 0 become holes.
fn write_with_holes(path: &std::path::Path, content: &[u8]) {
    let file = File::create(path).unwrap();
    file.set_len(content.len() as u64).unwrap();
    for (number, page) in content.chunks(4096).enumerate() {
        if page.iter().any(|&byte| byte != 0) {
            file.write_all_at(page, number as u64 * 4096).unwrap();
        }
    }
}

fn random_bytes(random: &mut Rng, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    random.fill(&mut content);
    content
}

/// Changes content as programs do: in place, by insertions and deletions, at the end, by holes.
fn edit(random: &mut Rng, content: &mut Vec<u8>) {
    for _ in 0..random.usize(..6) {
        let at = random.usize(..=content.len());
        let bytes = random.usize(1..200_000);
        let end = (at + bytes).min(content.len());
        match random.u8(..6) {
            0 => random.fill(&mut content[at..end]),
            1 => content[at..end].fill(0),
            2 => drop(content.drain(at..end)),
            3 => content.truncate(at),
            4 => content.extend(random_bytes(random, bytes)),
            _ => drop(content.splice(at..at, random_bytes(random, bytes))),
        }
    }
}

/// Each pair of versions is copied as a whole, whatever the versions have in common.
#[test]
fn random_versions_become_the_new_version() {
    let mut random = Rng::new();
    println!("seed {}", random.get_seed());
    let rounds = std::env::var("HAUL_TEST_DELTAS").map_or(30, |text| text.parse().unwrap());
    for round in 0..rounds {
        let bytes = random.usize(..12 << 20);
        let mut old = random_bytes(&mut random, bytes);
        edit(&mut random, &mut old);
        let mut new = old.clone();
        edit(&mut random, &mut new);
        let summary = Versions::new(&old, &new).copy(MODES[round % 2]);
        assert!(summary.bytes_sent + summary.bytes_equal <= new.len() as u64, "{summary:?}");
    }
}

#[test]
fn only_blocks_that_differ_are_sent() {
    let mut random = Rng::with_seed(1);
    let old = random_bytes(&mut random, 24 << 20);
    let mut new = old.clone();
    for block in [0, 77, 200] {
        new[block * BLOCK + 5] ^= 1;
    }
    new.extend([7; 10_000]);
    let sent = (3 * BLOCK + 10_000) as u64;
    let summary = Versions::new(&old, &new).copy(Delta::Fixed);
    assert_eq!((summary.bytes_sent, summary.bytes_equal), (sent, new.len() as u64 - sent));
    // As without the option.
    let summary = Versions::new(&old, &new).copy(Delta::No);
    assert_eq!((summary.bytes_sent, summary.bytes_equal), (new.len() as u64, 0));
}

#[test]
fn content_that_moved_is_found() {
    let mut random = Rng::with_seed(2);
    // Two ranges whose blocks are cut from their beginnings.
    let old = random_bytes(&mut random, 100 << 20);
    let new = [random_bytes(&mut random, BLOCK), old.clone()].concat();
    let summary = Versions::new(&old, &new).copy(Delta::Rolling);
    assert!(summary.bytes_sent <= new.len() as u64 / 50, "{summary:?}");
    let summary = Versions::new(&old, &new).copy(Delta::Fixed);
    assert_eq!(summary.bytes_equal, 0);
}

/// An interrupted transfer goes on, and compares the ranges that it lacks.
#[test]
fn an_interrupted_comparison_goes_on() {
    let mut random = Rng::with_seed(3);
    for cut in [4000, 100_000, 400_000, 2 << 20] {
        let old = random_bytes(&mut random, 40 << 20);
        let mut new = old.clone();
        for at in (0..new.len()).step_by(1 << 20) {
            new[at] ^= 1;
        }
        let versions = Versions::new(&old, &new);
        interrupt(&versions, cut);
        assert!(fs::read(versions.path("copy/large")).unwrap() == old);
        let summary = versions.copy(Delta::Fixed);
        let all = summary.bytes_sent + summary.bytes_equal + summary.bytes_held;
        assert_eq!(all, new.len() as u64, "{summary:?}");
        assert!(summary.bytes_sent <= 40 * BLOCK as u64, "{summary:?}");
    }
}

/// Copies, and ends both streams after the source sent so many bytes.
fn interrupt(versions: &Versions, bytes: u64) {
    let mut options = Options::default();
    options.delta = Delta::Fixed;
    let (one, other) = UnixStream::pair().unwrap();
    let (destination, theirs) = (versions.path("copy"), options.clone());
    let receiver = thread::spawn(move || {
        let session = Session::new(other.try_clone().unwrap(), other, theirs);
        session.receive(destination.as_os_str().as_bytes(), &AcceptedPaths::All).unwrap_err()
    });
    let to = CutWriter { to: one.try_clone().unwrap(), left: bytes };
    let session = Session::new(one, to, options);
    session.send(&[content_of(&versions.path("source"))]).unwrap_err();
    receiver.join().unwrap();
}

/// Another program writes to the old version while blocks of the old version are copied.
#[test]
fn an_old_version_that_changes_does_not_damage_the_copy() {
    let mut random = Rng::with_seed(4);
    for delta in MODES {
        let old = random_bytes(&mut random, 24 << 20);
        let mut new = old.clone();
        new[1 << 20] ^= 1;
        let versions = Versions::new(&old, &new);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let file = File::options().write(true).open(versions.path("copy/large")).unwrap();
                let mut random = Rng::new();
                while !is_over.load(Relaxed) {
                    file.write_all_at(&[random.u8(..)], random.u64(..24 << 20)).unwrap();
                }
            });
            versions.copy(delta);
            is_over.store(true, Relaxed);
        });
    }
}

/// The source changes once, so the copy is of the version before or after.
#[test]
fn a_source_that_changes_is_compared_again() {
    let mut random = Rng::with_seed(5);
    for delta in MODES {
        let old = random_bytes(&mut random, 24 << 20);
        let versions = Versions::new(&old, &old);
        let mut options = Options::default();
        options.delta = delta;
        let summary = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(random.u64(..30)));
                let file = File::options().write(true).open(versions.path("source/large")).unwrap();
                file.write_all_at(&[1; 5000], 12 << 20).unwrap();
            });
            copy(&[content_of(&versions.path("source"))], &versions.path("copy"), &options)
        });
        assert_eq!(summary.errors, []);
        let copied = fs::read(versions.path("copy/large")).unwrap();
        assert!(copied == old || copied == fs::read(versions.path("source/large")).unwrap());
    }
}

/// A daily copy of a file that grows.
#[test]
fn a_new_file_is_compared_with_the_file_of_an_earlier_copy() {
    let mut random = Rng::with_seed(7);
    let old = random_bytes(&mut random, 24 << 20);
    let new = [&old[..], &random_bytes(&mut random, 10_000)].concat();
    for delta in MODES {
        let versions = Versions::new(&old, &new);
        let mut options = Options::default();
        options.delta = delta;
        options.earlier_copies = vec![b"../copy".to_vec()];
        let source = content_of(&versions.path("source"));
        let summary = copy(&[source], &versions.path("today"), &options);
        assert_eq!(summary.errors, []);
        assert!(summary.bytes_sent <= 10_000 + (256 << 10), "{summary:?}");
        assert!(fs::read(versions.path("today/large")).unwrap() == new);
        assert!(fs::read(versions.path("copy/large")).unwrap() == old);
    }
}

/// What has the name is a directory, a link or a small file: the file is sent whole.
#[test]
fn other_entries_are_not_compared() {
    let mut random = Rng::with_seed(6);
    let new = random_bytes(&mut random, 1 << 20);
    for delta in MODES {
        for number in 0..3 {
            let versions = Versions::new(&new, &new);
            let path = versions.path("copy/large");
            match number {
                0 => {
                    fs::remove_file(&path).unwrap();
                    fs::create_dir(&path).unwrap();
                }
                1 => {
                    fs::remove_file(&path).unwrap();
                    std::os::unix::fs::symlink(versions.path("source/large"), &path).unwrap();
                }
                _ => fs::write(&path, "small").unwrap(),
            }
            let summary = versions.copy(delta);
            assert_eq!((summary.bytes_sent, summary.bytes_equal), (1 << 20, 0));
        }
    }
}
