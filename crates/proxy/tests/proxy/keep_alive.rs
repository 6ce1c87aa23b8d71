//! Both sockets of a connection have keep-alive, the upstream's some seconds after it began.

use crate::common::{LIMIT, Proxy, accept, start_proxy};
use std::io::{Read, Write};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The connections on the proxy's host whose keep-alive timer runs.
fn kept_alive(proxy: &Proxy) -> usize {
    let mut ss = Command::new("ss");
    ss.args(["--tcp", "--options", "--numeric", "--no-header", "state", "established"]);
    let output = proxy.lab.sender.run(|| ss.output()).unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).matches("timer:(keepalive").count()
}

#[test]
fn both_sockets_get_their_keep_alive() {
    let (proxy, listener) = start_proxy(|_| {});
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
    let (mut client, mut server) = (proxy.connect(), accept(&listener));
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    assert_eq!(kept_alive(&proxy), 2);
    drop((client, server));
    proxy.finish();
}
