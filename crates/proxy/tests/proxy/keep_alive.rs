//! Both sockets of a connection have keep-alive, the upstream's some seconds after it began.

use crate::common::{LIMIT, Proxy, accept, start_proxy};
use crate::upgrade::{Successor, Upgradable};
use std::fs;
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

/// The connections on the proxy's host whose keep-alive timer runs, and expires within this time:
/// their line in net/tcp has the state 01 (established), and the timer 02 with the time in
/// hundredths of a second, in the fourth and the sixth column.
fn kept_alive(proxy: &Proxy, time_max: Duration) -> usize {
    let text = proxy.lab.sender.run(|| fs::read_to_string("/proc/thread-self/net/tcp"));
    let text = text.unwrap().unwrap();
    let is_kept_alive = |line: &&str| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let time = columns[5].strip_prefix("02:").map(|text| u64::from_str_radix(text, 16));
        let is_soon = |time| Duration::from_millis(10 * time) <= time_max;
        columns[3] == "01" && time.is_some_and(|time| is_soon(time.unwrap()))
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
    while kept_alive(&proxy, Duration::MAX) < 2 * pairs.len() {
        // One of them is not idle.
        pairs[0].0.write_all(b"x").unwrap();
        pairs[0].1.read_exact(&mut [0]).unwrap();
        assert!(Instant::now() < deadline, "{} of 6", kept_alive(&proxy, Duration::MAX));
        thread::sleep(Duration::from_millis(100));
    }
    drop(pairs);
    proxy.finish();
}

/// Probes within seconds are due before the others would be set.
#[test]
fn a_short_keep_alive_is_set_at_once() {
    let (proxy, listener) = start_proxy(|config| {
        config.limits.timeouts.keepalive = Duration::from_secs(5);
    });
    if !proxy.is_alone() {
        return;
    }
    let (mut client, mut server) = (proxy.connect(), accept(&listener));
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    assert_eq!(kept_alive(&proxy, Duration::MAX), 2);
    drop((client, server));
    proxy.finish();
}

#[test]
fn a_process_that_takes_over_sets_its_keep_alive() {
    const TIME: Duration = Duration::from_secs(20);
    let upgradable = Upgradable::start(|config| config.limits.timeouts.keepalive = 10 * TIME);
    if !upgradable.proxy.is_alone() {
        return;
    }
    let (mut client, mut server) = (upgradable.proxy.connect(), accept(&upgradable.listener));
    let wait_for_both = |time_max| {
        let deadline = Instant::now() + LIMIT;
        while kept_alive(&upgradable.proxy, time_max) < 2 {
            assert!(Instant::now() < deadline, "the keep-alive has another time");
            thread::sleep(Duration::from_millis(100));
        }
    };
    wait_for_both(10 * TIME);
    assert_eq!(kept_alive(&upgradable.proxy, TIME), 0);
    let mut config = upgradable.proxy.config.clone();
    config.limits.timeouts.keepalive = TIME;
    let successor = Successor::start(&upgradable.proxy.lab, &config);
    wait_for_both(TIME);
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    drop((client, server));
    let _lab = upgradable.proxy.join();
    successor.finish();
}
