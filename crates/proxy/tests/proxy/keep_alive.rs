//! Both sockets of a connection have keep-alive, the upstream's some seconds after it began.

use crate::common::{LIMIT, Proxy, accept, start_proxy};
use std::fs;
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

/// The connections on the proxy's host whose keep-alive timer runs: their line in net/tcp has the
/// state 01 (established) and the timer 02, in the fourth and the sixth column.
fn kept_alive(proxy: &Proxy) -> usize {
    let text = proxy.lab.sender.run(|| fs::read_to_string("/proc/thread-self/net/tcp"));
    let text = text.unwrap().unwrap();
    let is_kept_alive = |line: &&str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        columns[3] == "01" && columns[5].starts_with("02:")
    };
    text.lines().skip(1).filter(is_kept_alive).count()
}

#[test]
fn both_sockets_get_their_keep_alive() {
    let (proxy, listener) = start_proxy(|_| {});
    if !proxy.is_alone() {
        return;
    }
    let mut pairs: Vec<_> = (0..3).map(|_| (proxy.connect(), accept(&listener))).collect();
    let deadline = Instant::now() + LIMIT;
    while kept_alive(&proxy) < 2 * pairs.len() {
        // One of them is not idle.
        pairs[0].0.write_all(b"x").unwrap();
        pairs[0].1.read_exact(&mut [0]).unwrap();
        assert!(Instant::now() < deadline, "{} of 6", kept_alive(&proxy));
        thread::sleep(Duration::from_millis(100));
    }
    drop(pairs);
    proxy.finish();
}

/// Probes within seconds are due before the others would be set.
#[test]
fn a_short_keep_alive_is_set_at_once() {
    let (proxy, listener) = start_proxy(|config| {
        config.limits.keepalive_time = Duration::from_secs(5);
    });
    if !proxy.is_alone() {
        return;
    }
    let (mut client, mut server) = (proxy.connect(), accept(&listener));
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    assert_eq!(kept_alive(&proxy), 2);
    drop((client, server));
    proxy.finish();
}
