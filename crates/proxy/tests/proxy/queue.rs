//! Clients wait while all upstreams have as many connections as their limits allow.

use crate::common::{LIMIT, Proxy, accept, lab, listen, upstream};
use haul_proxy::{GroupConfig, UpstreamConfig};
use rustix::net::sockopt::set_socket_linger;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// The upstream at a listener, with a limit.
pub fn limited(listener: &TcpListener, connections_max: usize) -> UpstreamConfig {
    let mut upstream = upstream(listener);
    upstream.connections_max = NonZeroUsize::new(connections_max);
    upstream
}

/// A client that has sent its name.
pub fn client(proxy: &Proxy, name: u8) -> TcpStream {
    let mut client = proxy.connect();
    client.write_all(&[name]).unwrap();
    client
}

/// The next connection to the upstream, and its client's name.
pub fn next(listener: &TcpListener) -> (TcpStream, u8) {
    let mut server = accept(listener);
    let mut name = [0];
    server.read_exact(&mut name).unwrap();
    (server, name[0])
}

pub fn has_none(listener: &TcpListener) -> bool {
    thread::sleep(Duration::from_millis(100));
    listener.set_nonblocking(true).unwrap();
    listener.accept().is_err()
}

#[test]
fn clients_wait_for_a_slot_in_the_order_in_which_they_came() {
    let lab = lab();
    let listener = listen(&lab);
    // One loop accepts them in this order.
    let proxy = Proxy::start(lab, [limited(&listener, 2)], |_| {});
    let mut clients: Vec<_> = (0..5).map(|name| Some(client(&proxy, name))).collect();
    let mut servers = vec![next(&listener), next(&listener)];
    servers.sort_by_key(|(_, name)| *name);
    assert_eq!([servers[0].1, servers[1].1], [0, 1]);
    assert!(has_none(&listener));
    // The second in the queue gives up, so that its place is the third one's.
    set_socket_linger(clients[3].as_ref().unwrap(), Some(Duration::ZERO)).unwrap();
    clients[3] = None;
    thread::sleep(Duration::from_millis(100));
    let (first, _) = servers.remove(0);
    drop((first, clients[0].take()));
    servers.push(next(&listener));
    assert_eq!(servers[1].1, 2);
    assert!(has_none(&listener));
    let (second, _) = servers.remove(0);
    drop((second, clients[1].take()));
    servers.push(next(&listener));
    assert_eq!(servers[1].1, 4);
    drop((clients, servers));
    let log = proxy.finish();
    let queued = log.iter().filter(|line| line["queue_ms"].as_f64().is_some_and(|ms| ms >= 100.0));
    assert_eq!(queued.count(), 3, "{log:?}");
    assert_eq!(log.iter().filter(|line| line["end"] == "client-failed").count(), 1, "{log:?}");
}

#[test]
fn a_client_that_has_waited_too_long_or_finds_the_queue_full_is_reset() {
    let lab = lab();
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [limited(&listener, 1)], |config| {
        config.limits.queue_length_max = 1;
        config.limits.timeouts.queue = Duration::from_secs(1);
    });
    let mut first = client(&proxy, 0);
    let mut server = next(&listener);
    // In the middle of a second of the loop's clock.
    thread::sleep(Duration::from_millis(500));
    let started = Instant::now();
    let mut waiting = client(&proxy, 1);
    assert!(proxy.turns_away());
    // An event loop that has nothing else to do looks after the time late.
    waiting.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    while waiting.read(&mut [0]).unwrap_err().kind() == ErrorKind::WouldBlock {
        first.write_all(b"x").unwrap();
        server.0.read_exact(&mut [0]).unwrap();
    }
    assert!(started.elapsed() >= Duration::from_secs(1), "{:?}", started.elapsed());
    // The queue has a place again.
    let last = client(&proxy, 2);
    drop((first, server));
    assert_eq!(next(&listener).1, 2);
    drop(last);
    let log = proxy.finish();
    let mut ends: Vec<_> = log.iter().map(|line| line["end"].as_str().unwrap()).collect();
    ends.sort_unstable();
    assert_eq!(ends, ["complete", "complete", "queue-full", "queue-timeout"]);
}

#[test]
fn a_client_that_ends_its_stream_while_it_waits_is_given_up_if_that_is_wanted() {
    for aborts_on_close in [false, true] {
        let lab = lab();
        let listener = listen(&lab);
        let proxy = Proxy::start(lab, [limited(&listener, 1)], |config| {
            config.limits.aborts_on_close = aborts_on_close;
            config.limits.timeouts.queue = LIMIT;
        });
        let first = client(&proxy, 0);
        let server = next(&listener);
        let mut ended = client(&proxy, 1);
        ended.shutdown(Shutdown::Write).unwrap();
        if aborts_on_close {
            assert!(ended.read(&mut [0]).is_err());
        }
        let last = client(&proxy, 2);
        assert!(has_none(&listener));
        drop((first, server));
        if !aborts_on_close {
            assert_eq!(next(&listener).1, 1);
        }
        assert_eq!(next(&listener).1, 2);
        drop((ended, last));
        let log = proxy.finish();
        let failed = log.iter().filter(|line| line["end"] == "client-failed").count();
        assert_eq!(failed, usize::from(aborts_on_close), "{log:?}");
    }
}

/// What cannot be waited for is not: the client's upstream has refused it, and the others are
/// excluded.
#[test]
fn a_client_that_no_upstream_is_left_for_does_not_wait_in_the_queue() {
    let lab = lab();
    let (listener, gone) = (listen(&lab), listen(&lab));
    let upstreams = [limited(&listener, 1), limited(&gone, 1)];
    drop(gone);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.reporting.control = Some(control.clone());
        config.limits.timeouts.queue = LIMIT;
    });
    let first = client(&proxy, 0);
    let server = next(&listener);
    let mut waiting: Vec<_> = (1..4).map(|name| client(&proxy, name)).collect();
    assert!(has_none(&listener));
    let name = listener.local_addr().unwrap();
    haul_proxy::control::send_command(&control, &format!("drain {name}")).unwrap();
    for client in &mut waiting {
        assert!(client.read(&mut [0]).is_err());
    }
    drop((first, server));
    let log = proxy.finish();
    let ends: Vec<_> = log.iter().map(|line| line["end"].as_str().unwrap()).collect();
    assert_eq!(ends.iter().filter(|end| **end == "unreachable").count(), 3, "{log:?}");
}

#[test]
fn a_reload_with_a_higher_limit_connects_those_that_wait() {
    let lab = lab();
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [limited(&listener, 1)], |_| {});
    let mut clients = vec![client(&proxy, 0)];
    let mut servers = vec![next(&listener)];
    clients.extend((1..4).map(|name| client(&proxy, name)));
    assert!(has_none(&listener));
    let mut config = proxy.config.clone();
    config.groups = vec![GroupConfig::new("servers", [limited(&listener, 3)])];
    proxy.handle.reload(&config).unwrap();
    servers.extend([next(&listener), next(&listener)]);
    assert!(has_none(&listener));
    // A connection from before the reload also counts in the new limit.
    drop((clients.remove(0), servers.remove(0)));
    assert_eq!(next(&listener).1, 3);
    drop((clients, servers));
    proxy.finish();
}

#[test]
fn no_upstream_ever_has_more_connections_than_its_limit() {
    const CLIENTS: usize = 300;
    let lab = lab();
    let listeners = [listen(&lab), listen(&lab)];
    let limits = [3, 5];
    let upstreams: Vec<_> =
        listeners.iter().zip(limits).map(|(listener, limit)| limited(listener, limit)).collect();
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.process.workers = Some(2);
        config.limits.timeouts.queue = LIMIT;
    });
    let most = [const { AtomicUsize::new(0) }; 2];
    let (served, barrier) = (AtomicUsize::new(0), Barrier::new(CLIENTS / 10));
    let deadline = Instant::now() + LIMIT;
    thread::scope(|scope| {
        for (listener, most) in listeners.iter().zip(&most) {
            let served = &served;
            let open = Arc::new(AtomicUsize::new(0));
            scope.spawn(move || {
                listener.set_nonblocking(true).unwrap();
                thread::scope(|scope| {
                    while served.load(SeqCst) < CLIENTS && Instant::now() < deadline {
                        let Ok((mut server, _)) = listener.accept() else {
                            thread::sleep(Duration::from_millis(1));
                            continue;
                        };
                        server.set_nonblocking(false).unwrap();
                        server.set_read_timeout(Some(LIMIT)).unwrap();
                        most.fetch_max(open.fetch_add(1, SeqCst) + 1, SeqCst);
                        let open = Arc::clone(&open);
                        scope.spawn(move || {
                            let mut name = [0];
                            server.read_exact(&mut name).unwrap();
                            thread::sleep(Duration::from_millis(u64::from(name[0]) % 7));
                            // The proxy frees the slot only after the end of this connection.
                            open.fetch_sub(1, SeqCst);
                            served.fetch_add(1, SeqCst);
                            server.write_all(&name).unwrap();
                        });
                    }
                });
            });
        }
        for thread in 0..CLIENTS / 10 {
            let (proxy, barrier) = (&proxy, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for round in 0..10 {
                    let mut client = proxy.connect();
                    let name = (thread * 10 + round) as u8;
                    client.write_all(&[name]).unwrap();
                    let mut response = Vec::new();
                    client.read_to_end(&mut response).unwrap();
                    assert_eq!(response, [name]);
                }
            });
        }
    });
    assert_eq!(most.map(AtomicUsize::into_inner), limits);
    let log = proxy.finish();
    assert!(log.iter().all(|line| line["end"] == "complete"), "{log:?}");
    assert!(log.iter().any(|line| !line["queue_ms"].is_null()));
}
