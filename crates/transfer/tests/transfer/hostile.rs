//! A source and a destination that do not keep to the protocol.

use crate::common::{content_of, random_tree};
use haul_transfer::{AcceptedPaths, Error, Options, Session};
use rustix::fs::CWD;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

/// The bytes that a source sends for a tree.
fn recorded(source: &[u8], destination: &Path) -> Vec<u8> {
    let (one, other) = UnixStream::pair().unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    let relay = thread::spawn(move || {
        let mut all = Vec::new();
        let mut part = [0; 4096];
        let mut from = &other;
        while let Ok(count @ 1..) = std::io::Read::read(&mut from, &mut part) {
            all.extend_from_slice(&part[..count]);
            tx.send(part[..count].to_vec()).unwrap();
        }
        (all, other)
    });
    let (sink, answers) = UnixStream::pair().unwrap();
    let feeder = sink.try_clone().unwrap();
    thread::spawn(move || {
        for part in rx {
            if (&feeder).write_all(&part).is_err() {
                return;
            }
        }
        let _ = feeder.shutdown(std::net::Shutdown::Write);
    });
    let destination = destination.as_os_str().as_bytes().to_vec();
    let receiver = thread::spawn(move || {
        let to = answers.try_clone().unwrap();
        let session = Session::new(answers, to, Options::default());
        session.receive(&destination, &AcceptedPaths::All).unwrap()
    });
    Session::new(sink, &one, Options::default()).send(&[source.to_vec()]).unwrap();
    receiver.join().unwrap();
    drop(one);
    relay.join().unwrap().0
}

fn receive(bytes: &[u8], destination: &Path) -> Result<(), Error> {
    let destination = destination.as_os_str().as_bytes();
    let session = Session::new(bytes, std::io::sink(), Options::default());
    session.receive(destination, &AcceptedPaths::All).map(drop)
}

/// Every cut and many changes of a real stream end in an error or in a copy, without a panic, and
/// nothing is written outside the destination.
#[test]
fn changed_streams_neither_panic_nor_leave_the_destination() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    random_tree(&mut fastrand::Rng::with_seed(3), &source);
    // Small files alone keep the stream short.
    for entry in fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        if path.metadata().is_ok_and(|metadata| metadata.len() > 10_000 && metadata.is_file()) {
            fs::remove_file(path).unwrap();
        }
    }
    let from = content_of(&source);
    let bytes = recorded(&from, &folder.path().join("first"));
    let outside = folder.path().join("jail");
    fs::create_dir(&outside).unwrap();
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..400 {
        let mut changed = bytes.clone();
        if round % 4 == 0 {
            changed.truncate(random.usize(..changed.len()));
        } else {
            // The lists are at the beginning.
            let most = if round % 2 == 0 { changed.len() } else { changed.len().min(4000) };
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..most);
                changed[at] = random.u8(..);
            }
        }
        let _result = receive(&changed, &outside.join("copy"));
        let names: Vec<_> =
            fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(names.iter().all(|name| name == "copy"), "{names:?}");
        let _ = std::process::Command::new("chmod").args(["-R", "u+rwx"]).arg(&outside).status();
        let _ = fs::remove_dir_all(outside.join("copy"));
    }
}

/// Another process swaps a directory of the destination for a link while files are written.
#[test]
fn a_link_that_appears_during_the_transfer_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for number in 0..50 {
        let sub = path("source").join(format!("sub{}", number % 5));
        fs::create_dir_all(&sub).unwrap();
        fs::write(sub.join(format!("file{number}")), vec![7; 3000]).unwrap();
    }
    fs::create_dir(path("outside")).unwrap();
    fs::create_dir(path("copy")).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let exchange = |one: &Path, other: &Path| {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, one, CWD, other, flags)
            };
            let mut random = fastrand::Rng::new();
            while !is_over.load(Relaxed) {
                let number = random.u8(..5);
                let name = path("copy").join(format!("sub{number}"));
                let link = path("copy").join(format!("link{number}"));
                // The transfer replaces a link that it finds, so the link is made again.
                if exchange(&name, &link).is_err() {
                    let _ = symlink("../outside", &link);
                }
            }
        });
        let from = content_of(&path("source"));
        for _ in 0..100 {
            // Files fail, because their directories disappear.
            let _summary = crate::common::copy(
                std::slice::from_ref(&from),
                &path("copy"),
                &Options::default(),
            );
        }
        is_over.store(true, Relaxed);
    });
    let escaped: Vec<_> = fs::read_dir(path("outside")).unwrap().collect();
    assert!(escaped.is_empty(), "{escaped:?}");
}

/// As CVE-2022-29154 of rsync: a server sent files without being asked for them.
#[test]
fn a_pull_takes_no_name_that_was_not_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("asked"), "a").unwrap();
    fs::write(path("other"), "b").unwrap();
    fs::create_dir(path("copy")).unwrap();
    let pull = |source: &str| {
        let (one, other) = UnixStream::pair().unwrap();
        let source = path(source).as_os_str().as_bytes().to_vec();
        let sender = thread::spawn(move || {
            let from = one.try_clone().unwrap();
            Session::new(from, &one, Options::default()).send(&[source])
        });
        let accepted = AcceptedPaths::of([vec![b"asked".to_vec()]]);
        let to = other.try_clone().unwrap();
        let destination = path("copy").as_os_str().as_bytes().to_vec();
        let session = Session::new(other, to, Options::default());
        let result = session.receive(&destination, &accepted);
        (result.map(drop), sender.join().unwrap())
    };
    assert!(pull("asked").0.is_ok());
    let (refused, told) = pull("other");
    assert!(refused.unwrap_err().to_string().contains("did not ask for"));
    assert!(matches!(told, Err(Error::Remote(_))), "{told:?}");
    assert!(path("copy/asked").exists() && !path("copy/other").exists());
}

/// A source that calls itself a single file could choose the folder that holds the destination.
#[test]
fn a_source_cannot_name_the_folder_of_the_destination() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("evil/.ssh")).unwrap();
    fs::write(path("evil/.ssh/keys"), "evil").unwrap();
    fs::write(path("single"), "a").unwrap();
    let to = path("home/new");
    fs::create_dir(path("home")).unwrap();
    // The beginning says that a single file follows, and a tree follows.
    let from = |name: &str| path(name).as_os_str().as_bytes().to_vec();
    let single = recorded(&from("single"), &path("first"));
    let tree = recorded(&[&from("evil")[..], b"/"].concat(), &path("second"));
    let frame_bytes = |stream: &[u8]| {
        8 + stream[..4].iter().rev().fold(0, |sum, &byte| 256 * sum + usize::from(byte))
    };
    let begin = &single[..frame_bytes(&single)];
    let stream = [begin, &tree[frame_bytes(&tree)..]].concat();
    for names in [&AcceptedPaths::All, &AcceptedPaths::Content] {
        let to = to.as_os_str().as_bytes();
        let session = Session::new(&stream[..], std::io::sink(), Options::default());
        let _result = session.receive(to, names);
        assert!(!path("home/.ssh").exists(), "{names:?}");
    }
    // A tree in place of a tree is fine.
    assert!(path("home/new/.ssh/keys").exists());
}

/// More and longer names than a frame holds.
#[test]
fn long_links_and_many_errors_fit() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    fs::create_dir(&source).unwrap();
    for number in 0..600 {
        symlink("x".repeat(4000), source.join(format!("link{number}"))).unwrap();
    }
    let long = std::ffi::OsString::from_vec(vec![0xff; 200]);
    for number in 0..1100 {
        // A folder is in the way of each file.
        let name = [long.as_bytes(), format!("{number}").as_bytes()].concat();
        let name = std::ffi::OsString::from_vec(name);
        fs::write(source.join(&name), "content").unwrap();
        fs::create_dir_all(destination.join(&name).join("entry")).unwrap();
    }
    let from = content_of(&source);
    let summary = crate::common::copy(&[from], &destination, &Options::default());
    assert_eq!(summary.errors.len() as u64 + summary.errors_left_out, 1100);
    assert!(destination.join("link599").is_symlink());
}

/// A source that ends before it sent what was requested.
#[test]
fn an_end_before_all_content_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("single"), "content").unwrap();
    let from = path("single").as_os_str().as_bytes().to_vec();
    let stream = recorded(&from, &path("first"));
    // Frames: two lengths, a message and data. Only the frame of the file has data.
    let (mut at, mut without_content) = (0, Vec::new());
    while at < stream.len() {
        let length = |at: usize| u32::from_le_bytes(stream[at..at + 4].try_into().unwrap());
        let (message, data) = (length(at) as usize, length(at + 4) as usize);
        let end = at + 8 + message + data;
        if data == 0 {
            without_content.extend_from_slice(&stream[at..end]);
        }
        at = end;
    }
    assert!(without_content.len() < stream.len());
    let to = path("second");
    let session = Session::new(&without_content[..], std::io::sink(), Options::default());
    let result = session.receive(to.as_os_str().as_bytes(), &AcceptedPaths::All);
    assert!(result.unwrap_err().to_string().contains("before the content"));
}
