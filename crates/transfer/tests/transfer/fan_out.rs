//! Copies to several destinations, which pass the content on.

use crate::common::{content_of, dump, random_tree};
use haul_transfer::{
    AcceptedPaths, Delta, DirectRequest, Host, HostEnd, HostResult, Options, Progress, Session,
    SshConnection, Verify, send_to_all,
};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Shutdown};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A destination in this process.
struct Destination {
    path: PathBuf,
    /// The user's end of its stream.
    stream: UnixStream,
    received: JoinHandle<bool>,
}

impl Destination {
    fn start(path: &Path, options: &Options, request: &DirectRequest) -> (Self, TestHost) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = SshConnection { client: LOCALHOST, server: LOCALHOST };
        let (answer, direct) = haul_transfer::answer(request, Some(connection));
        let (chain, options, place) = (request.clone(), options.clone(), path.to_owned());
        let received = thread::spawn(move || {
            let session = Session::new(theirs.try_clone().unwrap(), theirs, options);
            let session = session.with_direct(direct).with_chain(Some(chain));
            session.receive(place.as_os_str().as_bytes(), &AcceptedPaths::All).is_ok()
        });
        let (stream, writer) = (ours.try_clone().unwrap(), ours.try_clone().unwrap());
        let aborted = ours.try_clone().unwrap();
        let host = Host {
            name: path.file_name().unwrap().to_str().unwrap().to_owned(),
            is_local: false,
            from: ours,
            to: ClosingWriter(writer),
            answer: Some(answer),
            abort: Box::new(move || drop(aborted.shutdown(Shutdown::Both))),
        };
        (Self { path: path.to_owned(), stream, received }, host)
    }
}

/// Closes the direction that it writes to, as the end of a pipe does.
struct ClosingWriter(UnixStream);

impl std::io::Write for ClosingWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for ClosingWriter {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

type TestHost = Host<UnixStream, ClosingWriter>;

/// Sends a tree to destinations below a folder. `disturb` runs while the content is sent.
fn send(
    source: &Path,
    places: &[PathBuf],
    options: &Options,
    is_plain: bool,
    disturb: impl FnOnce(&[Destination], &Progress) + Send,
) -> Vec<HostResult> {
    let request = DirectRequest::for_chain(is_plain, 0..=0).unwrap();
    let (destinations, hosts): (Vec<_>, Vec<_>) =
        places.iter().map(|path| Destination::start(path, options, &request)).unzip();
    let progress = Progress::default();
    let results = thread::scope(|scope| {
        scope.spawn(|| disturb(&destinations, &progress));
        send_to_all(
            hosts,
            Some(&request),
            &[content_of(source)],
            options.clone(),
            &progress,
            Box::new(|_| {}),
            Arc::new(|_| {}),
        )
    });
    for destination in destinations {
        let _ = destination.stream.shutdown(Shutdown::Both);
        destination.received.join().unwrap();
        assert!(destination.path.exists());
    }
    results.unwrap()
}

fn is_complete(result: &HostResult) -> bool {
    matches!(&result.end, HostEnd::Complete(summary) if summary.errors.is_empty())
}

fn places(folder: &Path, count: usize) -> Vec<PathBuf> {
    (0..count).map(|number| folder.join(format!("copy{number}"))).collect()
}

/// Small files, large files and holes.
fn make_source(random: &mut fastrand::Rng, path: &Path, large_bytes: usize) {
    random_tree(random, path);
    for number in 0..2 {
        let large = fs::File::create(path.join(format!("large{number}"))).unwrap();
        let mut part = vec![0; large_bytes];
        random.fill(&mut part);
        large.write_all_at(&part, random.u64(..10 << 20)).unwrap();
    }
}

/// The guest of `cargo xtask vm` has TLS in the kernel.
#[test]
fn a_tree_reaches_hosts_through_encrypted_connections() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    make_source(&mut fastrand::Rng::with_seed(4), &source, 9 << 20);
    let places = places(folder.path(), 2);
    let results = send(&source, &places, &Options::default(), false, |_, _| {});
    assert!(results.iter().all(is_complete), "{results:?}");
    for place in &places {
        assert_eq!(dump(place), dump(&source));
    }
}

/// Each host has something else already: nothing, the whole copy, or other files with the names.
#[test]
fn random_trees_reach_all_hosts_whatever_they_have() {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    for round in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        make_source(&mut random, &source, 9 << 20);
        let places = places(folder.path(), 4);
        let mut options = Options::default();
        options.compress = round == 4;
        options.verify = if round == 5 { Verify::Blake3 } else { Verify::Crc64 };
        if round > 0 {
            // The second host has the copy, and the third host has a part of the copy.
            let none = |_: &[Destination], _: &Progress| {};
            send(&source, &places[1..3], &options, true, none);
            fs::write(places[2].join("large0"), "other").unwrap();
            fs::remove_file(places[2].join("large1")).unwrap();
        }
        let results = send(&source, &places, &options, round % 2 == 0, |_, _| {});
        assert!(results.iter().all(is_complete), "{results:?}");
        let lines = dump(&source);
        for place in &places {
            assert_eq!(dump(place), lines, "round {round}, {}", place.display());
        }
    }
}

/// Hosts with different earlier versions, and a host with the copy.
#[test]
fn blocks_that_a_host_lacks_are_sent_to_all() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut content = vec![0; 20 << 20];
    random.fill(&mut content);
    for delta in [Delta::Fixed, Delta::Rolling] {
        // The command line refuses rolling, because each host makes its index before the next host.
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("large"), &content).unwrap();
        let places = places(folder.path(), 4);
        let mut options = Options::default();
        options.delta = delta;
        send(&source, &places, &options, true, |_, _| {});
        for (number, place) in places[1..].iter().enumerate() {
            let file = fs::File::options().write(true).open(place.join("large")).unwrap();
            file.write_all_at(&[7; 10_000], (number as u64 + 1) * 5_000_000).unwrap();
        }
        let results = send(&source, &places, &options, true, |_, _| {});
        for (number, (result, place)) in results.iter().zip(&places).enumerate() {
            assert!(fs::read(place.join("large")).unwrap() == content, "{number}");
            let HostEnd::Complete(summary) = &result.end else { panic!("{result:?}") };
            assert_eq!((&summary.errors[..], summary.files_sent), (&[][..], (number > 0).into()));
            assert!(summary.bytes_sent < 2 << 20, "{summary:?}");
        }
        // A host that lacks the file gets the whole file.
        fs::remove_dir_all(&places[2]).unwrap();
        fs::write(places[3].join("large"), &content[..10 << 20]).unwrap();
        let results = send(&source, &places, &options, true, |_, _| {});
        assert!(results.iter().all(is_complete), "{results:?}");
        assert!(places.iter().all(|place| fs::read(place.join("large")).unwrap() == content));
    }
}

/// A host ends while the content is sent: the others complete, and the host goes on later.
#[test]
fn hosts_that_end_are_bridged_and_resumed() {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    for round in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        make_source(&mut random, &source, 40 << 20);
        let places = places(folder.path(), 4);
        let is_compared = round >= 4;
        let earlier = ["large0", "large1"].map(|name| fs::read(source.join(name)).unwrap());
        if is_compared {
            // The hosts have an earlier version.
            send(&source, &places, &Options::default(), true, |_, _| {});
            for number in 0..2 {
                let path = source.join(format!("large{number}"));
                let file = fs::File::options().write(true).open(path).unwrap();
                for at in 0..40 {
                    file.write_all_at(&[7; 5000], at << 20).unwrap();
                }
            }
        }
        let victims = [random.usize(..4), random.usize(..4)];
        let at = random.u64(..80 << 20);
        let mut options = Options::default();
        options.delta = if is_compared { Delta::Fixed } else { Delta::No };
        // So that there is time to disturb.
        options.rate_max = if is_compared { 2 << 20 } else { 100 << 20 };
        let is_disturbed = AtomicBool::new(false);
        let results = send(&source, &places, &options, round % 2 == 0, |destinations, progress| {
            while progress.snapshot().bytes_done < at && progress.wait(Duration::from_millis(2)) {}
            for victim in victims {
                let _ = destinations[victim].stream.shutdown(Shutdown::Both);
            }
            is_disturbed.store(true, Relaxed);
        });
        assert!(is_disturbed.load(Relaxed));
        let lines = dump(&source);
        for (number, result) in results.iter().enumerate() {
            assert_eq!(result.name, format!("copy{number}"));
            // A host that had the copy already keeps the copy.
            if !victims.contains(&number) {
                assert!(is_complete(result), "{result:?}, without {victims:?} at {at}");
            }
            if is_complete(result) {
                assert_eq!(dump(&places[number]), lines, "{result:?}");
            } else {
                // What is whole has its name, and nothing else has.
                for (name, earlier) in ["large0", "large1"].iter().zip(&earlier) {
                    let Ok(copy) = fs::read(places[number].join(name)) else { continue };
                    let is_earlier = is_compared && copy == *earlier;
                    assert!(is_earlier || copy == fs::read(source.join(name)).unwrap());
                }
            }
        }
        let results = send(&source, &places, &options, true, |_, _| {});
        assert!(results.iter().all(is_complete), "{results:?}");
        for place in &places {
            assert_eq!(dump(place), lines);
        }
    }
}

/// A host sends what no destination sends: the host alone is left out.
#[test]
fn a_hostile_host_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    make_source(&mut fastrand::Rng::with_seed(3), &source, 1 << 20);
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    for round in 0..20 {
        let request = DirectRequest::for_chain(true, 0..=0).unwrap();
        let place = folder.path().join(format!("copy{round}"));
        let options = Options::default();
        let (honest, host) = Destination::start(&place, &options, &request);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut bytes = vec![0; random.usize(8..200)];
        random.fill(&mut bytes);
        // A small frame, so that the message is read.
        let length = bytes.len() as u8 - 8;
        bytes[..8].copy_from_slice(&[length, 0, 0, 0, 0, 0, 0, 0]);
        std::io::Write::write_all(&mut &theirs, &bytes).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        let hostile = Host {
            name: "hostile".to_owned(),
            is_local: false,
            from: ours.try_clone().unwrap(),
            to: ClosingWriter(ours.try_clone().unwrap()),
            answer: host.answer.clone(),
            abort: Box::new(move || drop(ours.shutdown(Shutdown::Both))),
        };
        let hosts = vec![hostile, host];
        let progress = Progress::default();
        let (on_file, notice) = (Box::new(|_: &[u8]| {}), Arc::new(|_: &str| {}));
        let sources = [content_of(&source)];
        let results =
            send_to_all(hosts, Some(&request), &sources, options, &progress, on_file, notice);
        let results = results.unwrap();
        assert!(is_complete(&results[1]), "{results:?}");
        assert_eq!(dump(&place), dump(&source));
        honest.received.join().unwrap();
    }
}
