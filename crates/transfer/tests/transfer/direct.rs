//! Copies through direct streams.

use crate::common::{content_of, dump, random_tree};
use haul_transfer::{
    AcceptedPaths, DataFrom, Delta, DirectOffer, DirectReport, DirectSettings, DirectStreams,
    Options, Session, SshConnection, StreamCount, Summary,
};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn settings(from: DataFrom, is_plain: bool) -> DirectSettings {
    DirectSettings { streams: StreamCount::Exactly(3), is_plain, ports: 0..=0, from }
}

/// The direct streams of the user's end and of the other end.
fn open(settings: &DirectSettings) -> [DirectStreams; 2] {
    let connection = SshConnection { client: LOCALHOST, server: LOCALHOST };
    let offer = DirectOffer::new(settings).unwrap();
    let (answer, theirs) = haul_transfer::answer(offer.request(), Some(connection));
    let notice = Arc::new(|message: &str| panic!("{message}"));
    [offer.start(answer, OsStr::new("user@127.0.0.1"), notice), theirs.unwrap()]
}

fn wait_for(is_reached: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_reached() {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Copies from the end with the first streams to the end with the second.
fn copy(source: &Path, destination: &Path, streams: [DirectStreams; 2]) -> (Summary, DirectReport) {
    copy_with(source, destination, streams, &Options::default())
}

fn copy_with(
    source: &Path,
    destination: &Path,
    [ours, theirs]: [DirectStreams; 2],
    options: &Options,
) -> (Summary, DirectReport) {
    let for_destination = options.clone();
    let (one, other) = UnixStream::pair().unwrap();
    let destination = destination.as_os_str().as_bytes().to_vec();
    let direct = theirs.clone();
    let receiver = thread::spawn(move || {
        let to = other.try_clone().unwrap();
        let session = Session::new(other, to, for_destination).with_direct(Some(direct));
        session.receive(&destination, &AcceptedPaths::All).unwrap()
    });
    let session = Session::new(one.try_clone().unwrap(), &one, options.clone());
    let sent = session.with_direct(Some(ours.clone())).send(&[content_of(source)]).unwrap();
    assert_eq!(sent, receiver.join().unwrap());
    (sent, ours.report())
}

/// A tree with small files, large files and holes.
fn make_source(path: &Path) {
    random_tree(&mut fastrand::Rng::with_seed(5), path);
    let mut random = fastrand::Rng::with_seed(6);
    for number in 0..4 {
        let large = File::create(path.join(format!("large{number}"))).unwrap();
        for _ in 0..5 {
            let part: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(3 << 20).collect();
            large.write_all_at(&part, random.u64(..100 << 20)).unwrap();
        }
    }
    File::create(path.join("hole")).unwrap().set_len(1 << 40).unwrap();
}

/// The streams send hashes, and then the chunks that differ.
#[test]
fn versions_are_compared_through_direct_streams() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    make_source(&source);
    fs::remove_file(source.join("hole")).unwrap();
    for (is_plain, delta) in [(true, Delta::Fixed), (false, Delta::Rolling)] {
        let destination = folder.path().join(format!("{is_plain}"));
        let streams = || open(&settings(DataFrom::Here, is_plain));
        copy(&source, &destination, streams());
        for number in 0..4 {
            let path = destination.join(format!("large{number}"));
            let large = File::options().write(true).open(path).unwrap();
            large.write_all_at(b"other", number * 1_000_000).unwrap();
        }
        let mut options = Options::default();
        options.delta = delta;
        let (summary, _) = copy_with(&source, &destination, streams(), &options);
        assert_eq!(dump(&destination), dump(&source));
        assert_eq!(summary.files_sent, 4);
        assert!(summary.bytes_sent < 8 << 20 && summary.bytes_equal > 8 << 20, "{summary:?}");
    }
}

/// Both directions of the connection, with and without encryption.
#[test]
fn trees_are_copied_through_direct_streams() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    make_source(&source);
    fs::remove_file(source.join("hole")).unwrap();
    let lines = dump(&source);
    for (number, from) in
        [DataFrom::Here, DataFrom::There, DataFrom::Here, DataFrom::There].into_iter().enumerate()
    {
        let is_plain = number % 2 == number / 2;
        let destination = folder.path().join(format!("copy{number}"));
        let mut streams = open(&settings(from, is_plain));
        wait_for(|| streams.iter().all(|streams| streams.report().opened == 3));
        if from == DataFrom::There {
            streams.reverse();
        }
        let (summary, report) = copy(&source, &destination, streams);
        assert_eq!(summary.errors, []);
        assert_eq!(dump(&destination), lines, "{from:?} {is_plain}");
        assert_eq!((report.opened, report.is_plain), (3, is_plain));
        // The guest of `cargo xtask vm` has TLS in the kernel.
        let protocols = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_ulp");
        let has_kernel_tls = protocols.is_ok_and(|names| names.contains("tls"));
        assert_eq!(report.is_in_kernel, has_kernel_tls && !is_plain, "{report:?}");
        assert!(report.streams > 0);
        assert!(report.bytes * 10 > summary.bytes_sent * 9, "{report:?} of {summary:?}");
    }
}

/// A file with nothing but a hole, and sizes beyond 32 bits.
#[test]
fn a_hole_of_a_tebibyte_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    fs::create_dir(&source).unwrap();
    let file = File::create(source.join("hole")).unwrap();
    file.set_len(1 << 40).unwrap();
    let file = File::create(source.join("end")).unwrap();
    file.write_all_at(b"the end", 1 << 40).unwrap();
    let streams = open(&settings(DataFrom::Here, false));
    let (summary, _) = copy(&source, &destination, streams);
    assert_eq!(summary.errors, []);
    assert_eq!(fs::metadata(destination.join("hole")).unwrap().len(), 1 << 40);
    let mut end = [0; 7];
    File::open(destination.join("end")).unwrap().read_exact_at(&mut end, 1 << 40).unwrap();
    assert_eq!(&end, b"the end");
}

/// A source that changes while streams read it is read again.
#[test]
fn a_file_that_changes_is_sent_again() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    fs::create_dir(&source).unwrap();
    let path = source.join("log");
    fs::write(&path, vec![1; 64 << 20]).unwrap();
    let is_over = Arc::new(Mutex::new(false));
    let writer = {
        let (is_over, path) = (Arc::clone(&is_over), path.clone());
        thread::spawn(move || {
            use std::io::Write;
            let mut file = File::options().append(true).open(path).unwrap();
            while !*is_over.lock().unwrap() {
                file.write_all(&[2; 100]).unwrap();
            }
        })
    };
    let streams = open(&settings(DataFrom::Here, false));
    let (summary, _) = copy(&source, &destination, streams);
    *is_over.lock().unwrap() = true;
    writer.join().unwrap();
    // On a busy machine, the file may not change during an attempt.
    if let [error] = &summary.errors[..] {
        assert!(error.problem.contains("changed each time"), "{error:?}");
    } else {
        assert_eq!(summary.errors, []);
    }
    let copied = fs::read(destination.join("log")).unwrap();
    assert!(copied.len() >= 64 << 20);
    assert!(copied[..64 << 20].iter().all(|&byte| byte == 1));
    assert!(copied[64 << 20..].iter().all(|&byte| byte == 2));
    assert_eq!(fs::read_dir(&destination).unwrap().count(), 1);
}

/// The port is closed, so ssh carries the bytes, and the user knows why.
#[test]
fn a_closed_port_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (source, destination) = (folder.path().join("source"), folder.path().join("copy"));
    make_source(&source);
    let port = TcpListener::bind((LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let connection = SshConnection { client: LOCALHOST, server: LOCALHOST };
    let offer =
        DirectOffer::new(&DirectSettings { ports: port..=port, ..settings(DataFrom::Here, false) });
    let offer = offer.unwrap();
    let (answer, theirs) = haul_transfer::answer(offer.request(), Some(connection));
    let theirs = theirs.unwrap();
    // The other end no longer listens.
    theirs.end();
    wait_for(|| TcpListener::bind((LOCALHOST, port)).is_ok());
    let notices = Arc::new(Mutex::new(Vec::new()));
    let ours = {
        let notices = Arc::clone(&notices);
        let notice = Arc::new(move |message: &str| notices.lock().unwrap().push(message.into()));
        offer.start(answer, OsStr::new("127.0.0.1"), notice)
    };
    wait_for(|| !notices.lock().unwrap().is_empty());
    let (summary, report) = copy(&source, &destination, [ours, theirs]);
    assert_eq!((summary.errors.len(), report.bytes), (0, 0));
    let notices: Vec<String> = notices.lock().unwrap().clone();
    let [notice] = &notices[..] else { panic!("{notices:?}") };
    let expected = format!("no direct connection to 127.0.0.1 port {port} (Connection refused");
    assert!(notice.starts_with(&expected), "{notice}");
}
