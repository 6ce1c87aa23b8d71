//! Files that are overwritten, replaced, truncated and deleted while they are sent.
//!
//! A complete body that is sent with an entity tag must be the version which that tag names.

use crate::common::{Client, Service, large_content, wait_until};
use haul_serve::Transport;
use rustix::thread::CapabilitySet;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The transport of large files that no program is writing to.
const SENDFILE: Transport = Transport::Method(haul::SendMethod::Sendfile);
/// The last bytes of a large response, which are copied.
const HELD_BACK_BYTES: u64 = 4096;
/// The time in which a file changes: bursts of changes, each followed by [`PAUSE`].
const DURATION: Duration = Duration::from_secs(9);
/// The pause between two bursts, long enough (2 s) for the file to have an entity tag.
const PAUSE: Duration = Duration::from_millis(2500);

/// The content of a version: its number, repeated.
fn content(version: u32, len: usize) -> Vec<u8> {
    version.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// Changes the file at `path`. `kind`: 0 replaces it, 1 overwrites it, 2 truncates it, any other
/// deletes it. `prepare` is called with a new file before it has its name.
fn change(path: &Path, version: u32, kind: u32, prepare: fn(&Path)) {
    let len = 1 + (version as usize * 7919) % 3_000_000;
    let bytes = content(version, len);
    match kind {
        // Atomically, as a careful program does it.
        0 => {
            let temporary = path.with_extension("tmp");
            fs::write(&temporary, bytes).unwrap();
            prepare(&temporary);
            fs::rename(&temporary, path).unwrap();
        }
        // In place and in several calls, as a careless program does it.
        1 => {
            let mut file =
                fs::File::options().write(true).create(true).truncate(false).open(path).unwrap();
            prepare(path);
            for piece in bytes.chunks(100_000) {
                file.write_all(piece).unwrap();
            }
            file.set_len(len as u64).unwrap();
        }
        2 => {
            if let Ok(file) = fs::File::options().write(true).open(path) {
                file.set_len(1000).unwrap();
            }
        }
        _ => drop(fs::remove_file(path)),
    }
}

/// Whether all bytes belong to one version.
fn is_of_one_version(body: &[u8]) -> bool {
    body.iter().zip(body.iter().skip(4)).all(|(one, next)| one == next)
}

/// The changes that a careful program makes. The server proves that such a file is complete, and
/// sends its pages.
#[test]
fn a_complete_body_of_a_replaced_file_is_the_version_of_its_tag() {
    let service = start_service_with_changing_file();
    request_while_changing(&service, &[0, 3], |_| {});
}

/// All changes. The server has no such proof for the file of another user, and copies it.
#[test]
fn a_complete_body_of_a_copied_file_is_the_version_of_its_tag() {
    if !give_away(tempfile::NamedTempFile::new().unwrap().path()) {
        eprintln!("SKIPPED: only root can give a file to another user");
        return;
    }
    // The threads of the service inherit what this one has left.
    let mut capabilities = rustix::thread::capabilities(None).unwrap();
    capabilities.effective -= CapabilitySet::LEASE;
    rustix::thread::set_capabilities(None, capabilities).unwrap();
    let service = start_service_with_changing_file();
    assert!(give_away(&service.path("changing")));
    request_while_changing(&service, &[0, 1, 2, 3], |path| assert!(give_away(path)));
    let counters = &service.handle.counters()[0];
    assert_eq!(counters.by(SENDFILE).bytes.get(), 0, "a file in its first ten seconds");
}

/// Sets a flag when it is dropped.
struct FinishOnDrop<'a>(&'a AtomicBool);

impl Drop for FinishOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Gives a file to another user, unless the file was deleted. Returns false on failure.
fn give_away(path: &Path) -> bool {
    let given = std::os::unix::fs::chown(path, Some(65534), None);
    given.is_ok() || !path.exists()
}

fn start_service_with_changing_file() -> Service {
    Service::start(|root| fs::write(root.join("changing"), content(0, 2_000_000)).unwrap(), |_| {})
}

/// Requests a file that changes in these ways. `prepare` is called with each version before it has
/// its name.
fn request_while_changing(service: &Service, kinds: &'static [u32], prepare: fn(&Path)) {
    let path = service.path("changing");
    let is_finished = AtomicBool::new(false);
    let hashes = Hashes::default();
    let deadline = Instant::now() + DURATION;
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        // Also if a client panics: the scope waits for the writer.
        let _end = FinishOnDrop(&is_finished);
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(11);
            let mut version = 1;
            while !is_finished.load(Relaxed) {
                // A new file stays long enough to have a tag.
                let stays = version % 40 == 0;
                let kind = if stays { 0 } else { kinds[random.usize(0..kinds.len())] };
                change(&path, version, kind, prepare);
                version += 1;
                let pause = Duration::from_micros(random.u64(0..30_000));
                std::thread::sleep(if stays { PAUSE } else { pause });
            }
        });
        let request_until = || request_changing_file(service, &hashes, deadline);
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(request_until)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let complete: usize = outcomes.iter().map(|outcome| outcome.complete).sum();
    let tagged: usize = outcomes.iter().map(|outcome| outcome.tagged).sum();
    // A slow machine makes few versions in this time.
    assert!(complete > 20 && tagged > 3, "too few responses were complete: {outcomes:?}");
    let cut_short_count: usize = outcomes.iter().map(|outcome| outcome.cut_short).sum();
    assert_eq!(
        service.handle.counters()[0].cut_short.get(),
        cut_short_count as u64,
        "every incomplete response is counted"
    );
}

/// The hash of the body that was received with each entity tag.
type Hashes = Mutex<HashMap<String, u64>>;

/// The responses that one client received.
#[derive(Debug, Default)]
struct Outcome {
    complete: usize,
    /// Complete ones with an entity tag.
    tagged: usize,
    cut_short: usize,
}

/// Requests a file that is changing until the deadline.
fn request_changing_file(service: &Service, hashes: &Hashes, deadline: Instant) -> Outcome {
    let mut client = service.connect();
    let mut outcome = Outcome::default();
    while Instant::now() < deadline {
        client.send("GET /changing HTTP/1.1\r\nHost: h\r\n\r\n");
        match status_tag_and_body(&mut client) {
            Some((200, etag, body)) => {
                outcome.complete += 1;
                // A program that overwrites a file in several calls leaves mixtures of versions
                // there for a while. They have no tag.
                if let Some(etag) = etag {
                    assert!(is_of_one_version(&body), "{} bytes of several versions", body.len());
                    outcome.tagged += 1;
                    let hash = fnv1a(&body);
                    let known = *hashes.lock().unwrap().entry(etag.clone()).or_insert(hash);
                    assert_eq!(known, hash, "two bodies with the tag {etag}");
                }
            }
            Some((404, ..)) => {}
            Some((status, ..)) => panic!("status {status}"),
            None => {
                outcome.cut_short += 1;
                client = service.connect();
            }
        }
    }
    outcome
}

/// The next response's status, entity tag and body; `None` if it was cut short.
fn status_tag_and_body(client: &mut Client) -> Option<(u16, Option<String>, Vec<u8>)> {
    let response = client.try_response()?;
    Some((response.status, response.field("etag").map(str::to_owned), response.body))
}

/// The 64-bit FNV-1a hash.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[test]
fn the_next_request_reflects_a_change() {
    let service = Service::start_default();
    let mut client = service.connect();
    let path = service.path("ten.txt");
    let mut get = || {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        let response = client.response(false).unwrap();
        (response.status, response.text())
    };
    for iteration in 0..50 {
        assert_eq!(get().0, 200);
        // In some iterations the file becomes old enough (2 s) to be cached in memory.
        std::thread::sleep(Duration::from_millis(if iteration % 25 == 0 { 2100 } else { 0 }));
        assert_eq!(get().0, 200);
        match iteration % 4 {
            0 => fs::write(&path, format!("written {iteration}")).unwrap(),
            1 => {
                fs::write(path.with_extension("new"), format!("written {iteration}")).unwrap();
                fs::rename(path.with_extension("new"), &path).unwrap();
            }
            2 => {
                fs::remove_file(&path).unwrap();
                assert_eq!(get().0, 404);
                fs::write(&path, format!("written {iteration}")).unwrap();
            }
            _ => {
                fs::rename(&path, path.with_extension("moved")).unwrap();
                assert_eq!(get().0, 404);
                fs::write(&path, format!("written {iteration}")).unwrap();
            }
        }
        assert_eq!(get(), (200, format!("written {iteration}")));
    }
}

#[test]
fn a_write_to_a_file_that_is_being_sent_resets_the_connection() {
    let service = Service::start_default().with_old_files();
    let large = large_content();
    assert!(service.get("/large.bin").body == large);
    let sendfile_bytes = || -> u64 {
        service.handle.counters().iter().map(|counters| counters.by(SENDFILE).bytes.get()).sum()
    };
    // The file is old enough for sendfile. The client may receive the bytes before the server
    // counts them.
    // Its last bytes are held back until the last check, and copied.
    wait_until("all but the last bytes are sent by sendfile", || {
        sendfile_bytes() == large.len() as u64 - HELD_BACK_BYTES
    });
    let mut client = service.connect();
    client.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    // The response has begun and cannot finish, because the client does not read.
    wait_until("the whole file is sent by sendfile", || sendfile_bytes() > large.len() as u64);
    let mut file = fs::File::options().write(true).open(service.path("large.bin")).unwrap();
    file.write_all(b"other").unwrap();
    assert_eq!(client.try_response(), None, "the length is the same, the content is not");
    assert_eq!(service.handle.counters()[0].cut_short.get(), 1);
    assert!(service.get("/large.bin").body.starts_with(b"other"));
}

/// A publisher links, renames, and changes modes; the bytes stay the same.
#[test]
fn changes_of_metadata_neither_reset_nor_copy_nor_change_the_tag() {
    let service = Service::start_default();
    let path = service.path("large.bin");
    let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    fs::File::options().write(true).open(&path).unwrap().set_modified(hour_ago).unwrap();
    let tag = service.get("/large.bin").field("etag").unwrap().to_owned();
    let change_metadata = || {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let accessed = fs::FileTimes::new().set_accessed(std::time::UNIX_EPOCH);
        fs::File::open(&path).unwrap().set_times(accessed).unwrap();
        fs::hard_link(&path, path.with_extension("link")).unwrap();
        fs::rename(&path, path.with_extension("moved")).unwrap();
        fs::rename(path.with_extension("moved"), &path).unwrap();
        fs::remove_file(path.with_extension("link")).unwrap();
    };
    for _ in 0..3 {
        let mut client = service.connect();
        client.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
        // The response has begun and cannot finish, because the client does not read.
        let mut first = [0];
        assert_eq!(client.stream.peek(&mut first).unwrap(), 1);
        change_metadata();
        let response = client.response(false).unwrap();
        assert!(response.body == large_content());
        assert_eq!(response.field("etag"), Some(&*tag));
    }
    let counters = &service.handle.counters()[0];
    let copied = counters.by(Transport::Method(haul::SendMethod::ReadSend)).bytes.get();
    assert_eq!((counters.cut_short.get(), copied), (0, 4 * HELD_BACK_BYTES));
    assert!(counters.by(SENDFILE).bytes.get() > 0);
}

#[test]
fn a_growing_log_arrives_up_to_the_length_that_it_had() {
    const LINE: &[u8] = b"a line of a log\n";
    let service =
        Service::start(|root| fs::write(root.join("log"), LINE.repeat(100_000)).unwrap(), |_| {});
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = FinishOnDrop(&is_over);
        scope.spawn(|| {
            let mut log = fs::File::options().append(true).open(service.path("log")).unwrap();
            while !is_over.load(Relaxed) {
                log.write_all(LINE).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for _ in 0..20 {
            let response = service.get("/log");
            assert!(response.body.len() >= 100_000 * LINE.len());
            assert!(response.body.chunks(LINE.len()).all(|line| line == LINE));
            assert_eq!(response.field("etag"), None);
        }
    });
    assert_eq!(service.handle.counters()[0].cut_short.get(), 0);
}

#[test]
fn a_file_replaced_or_deleted_while_it_is_sent_arrives_complete() {
    type Removal = fn(&Path);
    let removals: [(&str, Removal); 2] = [
        ("replaced", |path| {
            fs::write(path.with_extension("tmp"), "other").unwrap();
            fs::rename(path.with_extension("tmp"), path).unwrap();
        }),
        ("deleted", |path| fs::remove_file(path).unwrap()),
    ];
    let start = || {
        Service::start(
            |root| {
                for (name, _) in removals {
                    fs::write(root.join(name), large_content()).unwrap();
                }
            },
            |_| {},
        )
    };
    for service in [start(), start().with_old_files()] {
        let sent_bytes = || -> u64 {
            let counters = service.handle.counters().iter();
            counters
                .flat_map(|counters| {
                    Transport::all().map(|transport| counters.by(transport).bytes.get())
                })
                .sum()
        };
        for (name, remove) in removals {
            let before = sent_bytes();
            let mut client = service.connect();
            client.send(&format!("GET /{name} HTTP/1.1\r\nHost: h\r\n\r\n"));
            // The response has begun and cannot finish, because the client does not read.
            wait_until("100,000 more bytes are sent", || sent_bytes() > before + 100_000);
            assert!(
                sent_bytes() < before + large_content().len() as u64,
                "the response was sent completely"
            );
            remove(&service.path(name));
            assert!(
                client.try_response().is_some_and(|response| response.body == large_content()),
                "{name}"
            );
        }
        assert_eq!(service.handle.counters()[0].cut_short.get(), 0);
    }
}

/// Number of requests for files that change, 20,000 by default. `HAUL_TEST_REQUESTS` sets another
/// number, for longer runs than CI has time for.
fn request_count() -> usize {
    std::env::var("HAUL_TEST_REQUESTS")
        .ok()
        .and_then(|requests| requests.parse().ok())
        .unwrap_or(20_000)
}

/// The number of open files below the service's root: other tests of this process have separate
/// descriptors.
fn open_files(service: &Service) -> usize {
    let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.starts_with(service.directory.path())).count()
}

/// Sends these requests; `false` if the service has reset the connection. The body of a file of up
/// to 256 KiB may be complete when the service finds that the file has changed: the reset comes
/// after it.
fn send_unless_reset(client: &mut Client, requests: &str) -> bool {
    match client.try_send(requests.as_bytes()) {
        Ok(()) => true,
        Err(error) => {
            let kind = error.kind();
            let is_reset = matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
            assert!(is_reset, "{error}");
            false
        }
    }
}

#[test]
fn no_descriptor_leaks() {
    const FILES: usize = 300;
    /// Files that change. The others stay in the cache, as far as it has room.
    const CHANGING: usize = 150;
    /// Requests that are pipelined.
    const BATCH: usize = 50;
    let service = Service::start(
        |root| {
            for index in 0..FILES {
                fs::write(root.join(format!("file-{index}")), vec![b'x'; 20_000]).unwrap();
            }
        },
        |config| config.limits.cached_files_max = 20,
    )
    .wait_for_tags();
    let is_finished = Arc::new(AtomicBool::new(false));
    let writer = {
        let (root, is_finished) = (service.path(""), Arc::clone(&is_finished));
        std::thread::spawn(move || {
            let mut version = 0;
            while !is_finished.load(Relaxed) {
                version += 1;
                let path = root.join(format!("file-{}", version as usize * 31 % CHANGING));
                // 23 to 71 KB: too large to be cached in memory.
                change(&path, 3 + version % 7, version / 7 % 4, |_| {});
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    };
    let (mut open_max, mut complete, mut missing, mut cut_short) = (0, 0, 0, 0);
    let mut client = service.connect();
    for batch in 0..request_count() / BATCH {
        let mut requests = String::new();
        for index in 0..BATCH {
            let file = (batch * BATCH + index) * 7919 % FILES;
            write!(requests, "GET /file-{file} HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        }
        if !send_unless_reset(&mut client, &requests) {
            cut_short += 1;
            client = service.connect();
            continue;
        }
        for _ in 0..BATCH {
            match client.try_response().map(|response| response.status) {
                Some(200) => complete += 1,
                Some(404) => missing += 1,
                Some(other) => panic!("status {other}"),
                None => {
                    cut_short += 1;
                    client = service.connect();
                    break;
                }
            }
        }
        open_max = open_max.max(open_files(&service));
    }
    is_finished.store(true, Relaxed);
    writer.join().unwrap();
    eprintln!(
        "{complete} complete, {missing} not found, {cut_short} cut short, at most {open_max} open"
    );
    assert!(
        complete > 0 && missing > 0 && open_max >= 20,
        "{complete} complete, {missing} not found, {cut_short} cut short, {open_max} open"
    );
    // At most 20 cached files, one that is being sent, one that an offload thread is opening, the
    // root, and the writer's own.
    assert!(open_max <= 20 + 8, "{open_max} files are open");
}
