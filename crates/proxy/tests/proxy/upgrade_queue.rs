//! Clients that wait for an upstream below its limit, while a second proxy takes over.

use crate::common::{LIMIT, Proxy, accept, lab, listen};
use crate::queue::{client, has_none, limited};
use crate::upgrade::{
    SetOnDrop, Succession, Successor, agree, read_log, receive_text, wait_for, wait_for_takeover,
};
use crate::upgrade_failures::ON_WAY_MAX;
use haul_proxy::{Config, HeaderVersion};
use haul_server::command_socket::send_command;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A proxy with a control socket, and its upstream, which has a limit.
struct Limited {
    proxy: Proxy,
    listener: TcpListener,
    control: PathBuf,
    _folder: TempDir,
}

impl Limited {
    fn start(connections_max: usize, configure: impl FnOnce(&mut Config)) -> Self {
        let lab = lab();
        let listener = listen(&lab);
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let proxy = Proxy::start(lab, [limited(&listener, connections_max)], |config| {
            config.reporting.control = Some(control.clone());
            config.process.workers = Some(2);
            config.limits.timeouts.queue = LIMIT;
            configure(config);
        });
        Self { proxy, listener, control, _folder: folder }
    }
}

/// Waits until so many clients are queued.
fn wait_for_queued(control: &Path, count: usize) {
    let is_queued = |one: &&Value| one["phase"] == "queued";
    wait_for(control, |answer| {
        answer["connections"].as_array().unwrap().iter().filter(is_queued).count() == count
    });
}

/// The next connection to the upstream: the header that names its client, and the client's name.
fn next(listener: &TcpListener) -> (TcpStream, String, u8) {
    let mut server = accept(listener);
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n") {
        let mut byte = [0];
        server.read_exact(&mut byte).unwrap();
        bytes.push(byte[0]);
    }
    let mut name = [0];
    server.read_exact(&mut name).unwrap();
    (server, String::from_utf8(bytes).unwrap(), name[0])
}

#[test]
fn clients_that_wait_keep_their_places_in_another_process() {
    let configure = |config: &mut Config| config.groups[0].send_header = Some(HeaderVersion::V1);
    let Limited { proxy, listener, control, _folder } = Limited::start(1, configure);
    let mut clients = vec![client(&proxy, 0)];
    let (mut server, ..) = next(&listener);
    for name in 1..5 {
        clients.push(client(&proxy, name));
        wait_for_queued(&control, name.into());
    }
    // Place and time are kept by one process after another, also if one upgrade follows at once.
    let middle = Successor::start(&proxy.lab, &proxy.config);
    wait_for_takeover(&control, &listener);
    let current = Successor::start(&proxy.lab, &proxy.config);
    let (address, lab, log_folder) = proxy.join();
    middle.join();
    wait_for_queued(&control, 4);
    let mut newest = lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    newest.write_all(&[5]).unwrap();
    clients.push(newest);
    wait_for_queued(&control, 5);
    assert!(has_none(&listener));
    for name in 1..6 {
        drop((server, clients.remove(0)));
        let (next, header, next_name) = next(&listener);
        assert_eq!(next_name, name);
        let port = clients[0].local_addr().unwrap().port();
        assert!(header.starts_with("PROXY TCP4 ") && header.contains(&format!(" {port} ")));
        assert!(has_none(&listener));
        server = next;
    }
    drop((server, clients));
    current.finish();
    let log = read_log(&log_folder.path().join("log"));
    assert!(log.iter().all(|line| line["end"] == "complete"), "{log:?}");
    let queued = log.iter().filter(|line| line["queue_ms"].as_f64().is_some_and(|ms| ms >= 100.0));
    assert_eq!(queued.count(), 5, "{log:?}");
}

/// An upstream that one process does not have, or its group, keeps its connections, and they count
/// again where it is back: after another upgrade, or a reload.
#[test]
fn connections_to_an_upstream_that_comes_back_count_for_its_limit() {
    for (is_reload, has_group) in [(false, true), (true, true), (false, false), (true, false)] {
        let configure = |config: &mut Config| config.process.confine = false;
        let Limited { proxy, listener, control, _folder } = Limited::start(1, configure);
        let (with, mut without) = (proxy.config.clone(), proxy.config.clone());
        let other = listen(&proxy.lab);
        without.groups[0].upstreams = vec![limited(&other, 1)];
        if !has_group {
            without.groups[0].name = "other".into();
            without.listeners[0].group = Some("other".into());
        }
        let first = client(&proxy, 0);
        let server = accept(&listener);
        let middle = Successor::start(&proxy.lab, &without);
        let (address, lab, _log_folder) = proxy.join();
        wait_for(&control, |answer| answer["connections"].as_array().unwrap().len() == 1);
        let last = if is_reload {
            middle.handle.reload(&with).unwrap();
            middle
        } else {
            let last = Successor::start(&lab, &with);
            middle.join();
            last
        };
        let mut second = lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
        second.write_all(b"x").unwrap();
        wait_for_queued(&control, 1);
        assert!(has_none(&listener));
        drop((first, server));
        drop((accept(&listener), second));
        last.finish();
    }
}

/// The new process lacks the group of a connection. It has the name, and when an operator wants the
/// connection to be closed.
#[test]
fn a_connection_of_a_removed_group_keeps_its_name_and_its_drain() {
    const DRAIN_TIME: Duration = Duration::from_secs(2);
    for is_killed in [false, true] {
        let configure = |config: &mut Config| config.process.confine = false;
        let Limited { proxy, listener, control, _folder } = Limited::start(9, configure);
        let mut without = proxy.config.clone();
        let other = listen(&proxy.lab);
        without.groups[0].upstreams = vec![limited(&other, 1)];
        without.groups[0].name = "other".into();
        without.listeners[0].group = Some("other".into());
        let pair = (client(&proxy, 0), accept(&listener));
        let name = listener.local_addr().unwrap();
        let drained = Instant::now();
        if !is_killed {
            let drain = format!("drain {name} {}s", DRAIN_TIME.as_secs());
            assert!(send_command(&control, &drain).unwrap().contains("changed"));
        }
        let successor = Successor::start(&proxy.lab, &without);
        let (_, _lab, log_folder) = proxy.join();
        wait_for(&control, |answer| answer["connections"][0]["group"] == "servers");
        if is_killed {
            for (group, expected) in
                [("other", "there is no upstream"), ("servers", r#"{"killed":1}"#)]
            {
                let command = format!("kill upstream {group}/{name}");
                let answer = send_command(&control, &command).unwrap();
                assert!(answer.contains(expected), "{answer}");
            }
        }
        wait_for(&control, |answer| answer["connections"].as_array().unwrap().is_empty());
        assert!(is_killed || drained.elapsed() >= DRAIN_TIME);
        drop(pair);
        successor.finish();
        let log = read_log(&log_folder.path().join("log"));
        let end = if is_killed { "killed" } else { "drained" };
        assert_eq!((&log[0]["end"], &log[0]["group"]), (&end.into(), &"servers".into()));
    }
}

/// A new process that ends after it was agreed: clients that were not sent wait in the old one, and
/// get the slots of connections that have ended.
#[test]
fn clients_that_a_failing_process_has_not_taken_wait_in_the_old_one() {
    const WAITING: usize = 300;
    let Limited { proxy, listener, control, _folder } = Limited::start(1, |_| {});
    let first = client(&proxy, 0);
    let server = accept(&listener);
    let waiting: Vec<_> = (0..WAITING).map(|_| client(&proxy, 1)).collect();
    wait_for_queued(&control, WAITING);
    let channel = agree(&control);
    // One that waits, not the established one.
    while !receive_text(&channel).contains(r#""queued_since":"#) {}
    drop(channel);
    // The old process takes commands again.
    wait_for(&control, |answer| answer["connections"].is_array());
    drop((first, server));
    let (open, most, served) = Default::default();
    let is_over = AtomicBool::new(false);
    let answered = thread::scope(|scope| {
        let is_over = SetOnDrop(&is_over);
        scope.spawn(|| serve(&listener, [&open, &most, &served], is_over.0));
        // What was on its way is reset.
        let read = |mut client: TcpStream| {
            let is_answered = move || {
                let read = client.read(&mut [0]);
                assert_ne!(read.as_ref().ok(), Some(&0), "it does not look like an end");
                read.ok()
            };
            scope.spawn(is_answered)
        };
        let reads: Vec<_> = waiting.into_iter().map(read).collect();
        reads.into_iter().filter_map(|read| read.join().unwrap()).sum::<usize>()
    });
    assert!((WAITING - ON_WAY_MAX..WAITING).contains(&answered), "{answered} of {WAITING} go on");
    assert_eq!(most.into_inner(), 1);
    proxy.finish();
}

/// Sends its name over one connection after another, and receives it again.
fn come_and_go(connect: &dyn Fn() -> TcpStream, name: u8, is_over: &AtomicBool) {
    while !is_over.load(SeqCst) {
        let mut client = connect();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client.write_all(&[name]).unwrap();
        let mut response = Vec::new();
        client.read_to_end(&mut response).unwrap();
        assert_eq!(response, [name]);
    }
}

/// Answers each connection on a separate thread, and records how many are open at most.
fn serve(listener: &TcpListener, [open, most, served]: [&AtomicUsize; 3], is_over: &AtomicBool) {
    listener.set_nonblocking(true).unwrap();
    thread::scope(|scope| {
        while !is_over.load(SeqCst) {
            let Ok((mut server, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            most.fetch_max(open.fetch_add(1, SeqCst) + 1, SeqCst);
            scope.spawn(move || {
                server.set_nonblocking(false).unwrap();
                server.set_read_timeout(Some(LIMIT)).unwrap();
                let mut name = [0];
                server.read_exact(&mut name).unwrap();
                thread::sleep(Duration::from_millis(3));
                // The proxy frees the slot only after the end of this connection.
                open.fetch_sub(1, SeqCst);
                served.fetch_add(1, SeqCst);
                server.write_all(&name).unwrap();
            });
        }
    });
}

#[test]
fn no_upgrade_exceeds_the_limit_of_an_upstream() {
    no_upgrade_exceeds(4, Limited::start(4, |_| {}));
}

#[test]
fn no_upgrade_exceeds_the_limit_of_clients() {
    no_upgrade_exceeds(4, Limited::start(1000, |config| config.limits.connections_max = 4));
}

fn no_upgrade_exceeds(connections_max: usize, limited: Limited) {
    const CLIENTS: u8 = 30;
    const UPGRADES: usize = 6;
    let Limited { proxy, listener, control: _, _folder } = limited;
    let address = proxy.address;
    let counts = [const { AtomicUsize::new(0) }; 3];
    let [open, most, served] = &counts;
    let (are_clients_over, is_server_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut succession = Succession::new(proxy);
    thread::scope(|scope| {
        let (are_clients_over, is_server_over) = (&are_clients_over, &is_server_over);
        scope.spawn(|| serve(&listener, [open, most, served], is_server_over));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|name| {
                // A thread belongs to the host of the thread that starts it.
                let start = || {
                    scope.spawn(move || {
                        let connect = || TcpStream::connect(address).unwrap();
                        come_and_go(&connect, name, are_clients_over);
                    })
                };
                succession.lab().receiver.run(start).unwrap()
            })
            .collect();
        for _ in 0..UPGRADES {
            thread::sleep(Duration::from_millis(200));
            succession.upgrade(|_| {});
        }
        are_clients_over.store(true, SeqCst);
        let results: Vec<_> = clients.into_iter().map(ScopedJoinHandle::join).collect();
        is_server_over.store(true, SeqCst);
        assert!(results.iter().all(Result::is_ok), "a client was cut off");
    });
    succession.finish();
    let [_, most, served] = counts.map(AtomicUsize::into_inner);
    assert_eq!(most, connections_max, "of {served} connections");
}
