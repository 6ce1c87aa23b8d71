//! Files that are written to, replaced, truncated and deleted while they are sent: what comes whole under a tag is that version.

use crate::common::{Client, Service, eventually, large};
use haul_serve::Transport;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How large files go that have not changed for a while.
const SENDFILE: Transport = Transport::Method(haul::SendMethod::Sendfile);
/// For how long files change: a burst of changes, and then a pause long enough for a tag, and so on.
const DURATION: Duration = Duration::from_secs(9);
const PAUSE: Duration = Duration::from_millis(2500);

/// The content of a version: all of it says which.
fn content(version: u32, len: usize) -> Vec<u8> {
    version.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// Changes `path` once more.
fn change(path: &Path, version: u32, how: u32) {
    let len = 1 + (version as usize * 7919) % 3_000_000;
    let fresh = content(version, len);
    match how {
        // As a careful program does it.
        0 => {
            let aside = path.with_extension("aside");
            fs::write(&aside, fresh).unwrap();
            fs::rename(&aside, path).unwrap();
        }
        // As a careless one does: over what is there, and then the rest.
        1 => {
            let mut file =
                fs::File::options().write(true).create(true).truncate(false).open(path).unwrap();
            for piece in fresh.chunks(100_000) {
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

/// Whether all bytes are of one version.
fn is_of_one_version(body: &[u8]) -> bool {
    body.iter().zip(body.iter().skip(4)).all(|(one, next)| one == next)
}

#[test]
fn what_comes_whole_under_a_tag_is_that_version() {
    let service = Service::start(
        |root| fs::write(root.join("changing"), content(0, 2_000_000)).unwrap(),
        |_| {},
    );
    let path = service.path("changing");
    let is_over = Arc::new(AtomicBool::new(false));
    let changer = {
        let (path, is_over) = (path.clone(), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(11);
            let mut version = 1;
            while !is_over.load(Relaxed) {
                change(&path, version, random.u32(0..4));
                version += 1;
                let pause = if version % 40 == 0 {
                    PAUSE
                } else {
                    Duration::from_micros(random.u64(0..30_000))
                };
                std::thread::sleep(pause);
            }
        })
    };
    // Every body that came under a tag; of one tag there is one body.
    let bodies: Arc<Mutex<HashMap<String, u64>>> = Arc::default();
    let deadline = Instant::now() + DURATION;
    let outcomes: Vec<(usize, usize, usize)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                let mut client = service.connect();
                let (bodies, service) = (Arc::clone(&bodies), &service);
                scope.spawn(move || {
                    let (mut whole, mut cut, mut tagged) = (0, 0, 0);
                    while Instant::now() < deadline {
                        client.send("GET /changing HTTP/1.1\r\nHost: h\r\n\r\n");
                        match try_response(&mut client) {
                            Some((200, etag, body)) => {
                                // A program that writes over its file in several calls leaves mixtures there for a while:
                                // those are versions too, but none that has a tag.
                                if let Some(etag) = etag {
                                    assert!(
                                        is_of_one_version(&body),
                                        "{} bytes of several versions",
                                        body.len()
                                    );
                                    tagged += 1;
                                    let hash = fnv(&body);
                                    let known =
                                        *bodies.lock().unwrap().entry(etag.clone()).or_insert(hash);
                                    assert_eq!(known, hash, "two bodies under {etag}");
                                }
                                whole += 1;
                            }
                            Some((404, ..)) => {}
                            Some((status, ..)) => panic!("status {status}"),
                            None => {
                                cut += 1;
                                client = service.connect();
                            }
                        }
                    }
                    (whole, cut, tagged)
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    is_over.store(true, Relaxed);
    changer.join().unwrap();
    let whole: usize = outcomes.iter().map(|outcome| outcome.0).sum();
    let tagged: usize = outcomes.iter().map(|outcome| outcome.2).sum();
    assert!(whole > 20 && tagged > 20, "hardly anything came: {outcomes:?}");
    let counted: usize = outcomes.iter().map(|outcome| outcome.1).sum();
    assert_eq!(
        service.handle.counters()[0].cut_short.get(),
        counted as u64,
        "every end before the end has this reason"
    );
}

/// The next response, or `None` where it was cut short.
fn try_response(client: &mut Client) -> Option<(u16, Option<String>, Vec<u8>)> {
    let response = client.response_or_cut()?;
    Some((response.status, response.field("etag").map(str::to_owned), response.body))
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[test]
fn a_change_is_seen_by_the_next_request() {
    let service = Service::plain();
    let mut client = service.connect();
    let path = service.path("ten.txt");
    let mut get = || {
        client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
        let response = client.response(false).unwrap();
        (response.status, response.text())
    };
    for turn in 0..50 {
        assert_eq!(get().0, 200);
        // Once it is kept in memory, too.
        std::thread::sleep(Duration::from_millis(if turn % 25 == 0 { 2100 } else { 0 }));
        assert_eq!(get().0, 200);
        match turn % 4 {
            0 => fs::write(&path, format!("written {turn}")).unwrap(),
            1 => {
                fs::write(path.with_extension("new"), format!("written {turn}")).unwrap();
                fs::rename(path.with_extension("new"), &path).unwrap();
            }
            2 => {
                fs::remove_file(&path).unwrap();
                assert_eq!(get().0, 404);
                fs::write(&path, format!("written {turn}")).unwrap();
            }
            _ => {
                fs::rename(&path, path.with_extension("away")).unwrap();
                assert_eq!(get().0, 404);
                fs::write(&path, format!("written {turn}")).unwrap();
            }
        }
        assert_eq!(get(), (200, format!("written {turn}")));
    }
}

#[test]
fn pages_that_change_on_their_way_end_the_connection() {
    let service = Service::plain().settled();
    let large = large();
    assert!(service.get("/large.bin").body == large);
    let by_pages = || -> u64 {
        service.handle.counters().iter().map(|counters| counters.by(SENDFILE).bytes.get()).sum()
    };
    // It is old enough for its pages to travel. The client may have them before the server has counted them.
    eventually(|| by_pages() == large.len() as u64);
    let mut client = service.connect();
    client.send("GET /large.bin HTTP/1.1\r\nHost: h\r\n\r\n");
    // It has begun and cannot end: nobody reads.
    eventually(|| by_pages() > large.len() as u64);
    let mut file = fs::File::options().write(true).open(service.path("large.bin")).unwrap();
    file.write_all(b"other").unwrap();
    assert_eq!(client.response_or_cut(), None, "as long as before, and yet another");
    assert_eq!(service.handle.counters()[0].cut_short.get(), 1);
    assert!(service.get("/large.bin").body.starts_with(b"other"));
}

#[test]
fn what_is_replaced_or_deleted_on_its_way_comes_whole_all_the_same() {
    type Removal = fn(&Path);
    let removals: [(&str, Removal); 2] = [
        ("replaced", |path| {
            fs::write(path.with_extension("aside"), "other").unwrap();
            fs::rename(path.with_extension("aside"), path).unwrap();
        }),
        ("deleted", |path| fs::remove_file(path).unwrap()),
    ];
    let fresh = || {
        Service::start(
            |root| {
                removals.iter().for_each(|(name, _)| fs::write(root.join(name), large()).unwrap())
            },
            |_| {},
        )
    };
    for service in [fresh(), fresh().settled()] {
        let sent = || -> u64 {
            let counters = service.handle.counters().iter();
            counters
                .flat_map(|counters| {
                    Transport::all().map(|transport| counters.by(transport).bytes.get())
                })
                .sum()
        };
        for (name, remove) in removals {
            let before = sent();
            let mut client = service.connect();
            client.send(&format!("GET /{name} HTTP/1.1\r\nHost: h\r\n\r\n"));
            // It has begun and cannot end: nobody reads.
            eventually(|| sent() > before + 100_000);
            assert!(sent() < before + large().len() as u64, "all of it has gone already");
            remove(&service.path(name));
            assert!(
                client.response_or_cut().is_some_and(|response| response.body == large()),
                "{name}"
            );
        }
        assert_eq!(service.handle.counters()[0].cut_short.get(), 0);
    }
}

/// Requests for files that come and go; `HAUL_TEST_REQUESTS` asks for more than CI has time for.
fn requests() -> usize {
    std::env::var("HAUL_TEST_REQUESTS")
        .ok()
        .and_then(|requests| requests.parse().ok())
        .unwrap_or(20_000)
}

#[test]
fn no_descriptor_stays_behind() {
    const FILES: usize = 300;
    /// The others are kept open, as far as there is room.
    const CHANGING: usize = 150;
    /// Asked for at once.
    const BATCH: usize = 50;
    let service = Service::start(
        |root| {
            for at in 0..FILES {
                fs::write(root.join(format!("file-{at}")), vec![b'x'; 20_000]).unwrap();
            }
        },
        |config| config.limits.cached_files_max = 20,
    )
    .aged();
    let is_over = Arc::new(AtomicBool::new(false));
    let changer = {
        let (folder, is_over) = (service.path(""), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let mut version = 0;
            while !is_over.load(Relaxed) {
                version += 1;
                let path = folder.join(format!("file-{}", version as usize * 31 % CHANGING));
                // 23 to 71 KB: too large to be kept in memory.
                change(&path, 3 + version % 7, version / 7 % 4);
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    };
    // Other tests of this process have connections of their own: those to files of this one are counted.
    let open = || {
        let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.filter(|target| target.starts_with(service.folder.path())).count()
    };
    let (mut most, mut whole, mut gone, mut cut) = (0, 0, 0, 0);
    let mut client = service.connect();
    for batch in 0..requests() / BATCH {
        let mut asked = String::new();
        for at in 0..BATCH {
            let file = (batch * BATCH + at) * 7919 % FILES;
            write!(asked, "GET /file-{file} HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        }
        client.send(&asked);
        for _ in 0..BATCH {
            match client.response_or_cut().map(|response| response.status) {
                Some(200) => whole += 1,
                Some(404) => gone += 1,
                Some(other) => panic!("status {other}"),
                None => {
                    cut += 1;
                    client = service.connect();
                    break;
                }
            }
        }
        most = most.max(open());
    }
    is_over.store(true, Relaxed);
    changer.join().unwrap();
    eprintln!("{whole} whole, {gone} gone, {cut} cut short, at most {most} files of it open");
    assert!(
        whole > 0 && gone > 0 && most >= 20,
        "{whole} whole, {gone} gone, {cut} cut, {most} open"
    );
    // Those that are kept, one that is being sent, one that a helper is opening, the folder, and the changer's own.
    assert!(most <= 20 + 8, "{most} files stay open");
}
