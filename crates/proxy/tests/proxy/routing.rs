//! Which upstream a client is connected to, and who may connect.

use crate::common::{LIMIT, Proxy, accept, lab, listen, pattern, start_proxy, upstream};
use haul_proxy::{Algorithm, CheckConfig, GroupConfig, ListenerConfig, UpstreamConfig};
use haul_server::command_socket::send_command;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroUsize;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn clients_are_spread_over_the_upstreams() {
    let lab = lab();
    let listeners: Vec<_> = (0..3).map(|_| listen(&lab)).collect();
    let upstreams: Vec<_> = listeners.iter().map(upstream).collect();
    let proxy = Proxy::start(lab, upstreams, |_| {});
    let clients: Vec<_> = (0..9).map(|_| proxy.connect()).collect();
    for listener in &listeners {
        for _ in 0..3 {
            accept(listener);
        }
    }
    drop(clients);
    proxy.finish();
}

#[test]
fn weights_are_shares_and_a_backup_is_for_need() {
    let lab = lab();
    let listeners: Vec<_> = (0..3).map(|_| listen(&lab)).collect();
    let mut upstreams: Vec<_> = listeners.iter().map(upstream).collect();
    upstreams[0].weight = 2;
    upstreams[2].is_backup = true;
    let proxy = Proxy::start(lab, upstreams, |_| {});
    let clients: Vec<_> = (0..6).map(|_| proxy.connect()).collect();
    for (listener, count) in listeners.iter().zip([4, 2]) {
        (0..count).for_each(|_| drop(accept(listener)));
    }
    drop(clients);
    let [first, second, backup] = listeners.try_into().unwrap();
    drop((first, second));
    let mut client = proxy.connect();
    client.write_all(b"request").unwrap();
    accept(&backup).read_exact(&mut [0; 7]).unwrap();
    drop(client);
    let log = proxy.finish();
    assert_eq!(log.last().unwrap()["connect_attempts"], 3, "{log:?}");
}

#[test]
fn least_connections_prefers_the_upstream_with_fewer() {
    let lab = lab();
    let listeners: Vec<_> = (0..2).map(|_| listen(&lab)).collect();
    let upstreams: Vec<_> = listeners.iter().map(upstream).collect();
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.groups[0].algorithm = Algorithm::LeastConnections;
    });
    // One connection of each pair ends, so that the next goes where it was.
    let mut kept = vec![proxy.connect()];
    kept.push(accept(&listeners[0]));
    for _ in 0..5 {
        let client = proxy.connect();
        let mut server = accept(&listeners[1]);
        drop(client);
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
        drop(server);
        // The proxy finds the end of the other side a moment later.
        thread::sleep(Duration::from_millis(200));
    }
    drop(kept);
    proxy.finish();
}

#[test]
fn a_client_of_an_upstream_that_refuses_is_connected_to_another() {
    let lab = lab();
    let (listener, gone) = (listen(&lab), listen(&lab));
    let upstreams = [upstream(&gone), upstream(&listener)];
    let name = upstreams[1].to_string();
    drop(gone);
    let proxy = Proxy::start(lab, upstreams, |_| {});
    for _ in 0..8 {
        let mut client = proxy.connect();
        let mut server = accept(&listener);
        client.write_all(b"request").unwrap();
        server.read_exact(&mut [0; 7]).unwrap();
    }
    let log = proxy.finish();
    assert_eq!(log.len(), 8);
    assert!(log.iter().all(|line| line["upstream"] == *name), "{log:?}");
    let attempts = |line: &Value| line["connect_attempts"].as_u64().unwrap();
    // Three failures in a row, and it is left out.
    assert_eq!(log.iter().map(attempts).filter(|&count| count == 2).count(), 3, "{log:?}");
}

#[test]
fn without_any_upstream_the_client_is_reset() {
    let lab = lab();
    let gone = listen(&lab);
    let upstreams = [upstream(&gone)];
    drop(gone);
    let proxy = Proxy::start(lab, upstreams, |_| {});
    assert!(proxy.turns_away());
    let log = proxy.finish();
    assert_eq!((&log[0]["end"], &log[0]["connect_attempts"]), (&"unreachable".into(), &3.into()));
    assert_eq!(log[0]["connect_error"], "Connection refused (os error 111)");
}

/// A name that is not resolved does not count as an attempt, and there is nothing to wait for.
#[test]
fn without_any_resolved_upstream_the_client_is_reset() {
    let unresolved = "no-such-host.invalid:80".parse().unwrap();
    let proxy = Proxy::start(lab(), [unresolved], |_| {});
    assert!(proxy.turns_away());
    let log = proxy.finish();
    assert_eq!((&log[0]["end"], &log[0]["connect_attempts"]), (&"unreachable".into(), &0.into()));
    assert!(log[0].get("connect_error").is_none());
}

/// A server that is restarted is back in a moment.
#[test]
fn an_upstream_that_refuses_for_a_moment_is_tried_again() {
    let lab = lab();
    let gone = listen(&lab);
    let address = gone.local_addr().unwrap();
    let upstreams = [upstream(&gone)];
    drop(gone);
    let proxy = Proxy::start(lab, upstreams, |_| {});
    let mut client = proxy.connect();
    client.write_all(b"request").unwrap();
    thread::sleep(Duration::from_millis(300));
    let listen_again = || std::net::TcpListener::bind(address).unwrap();
    let listener = proxy.lab.receiver.run(listen_again).unwrap();
    let mut server = accept(&listener);
    let mut request = [0; 7];
    server.read_exact(&mut request).unwrap();
    assert_eq!(request, *b"request");
    drop((client, server));
    assert_eq!(proxy.finish()[0]["connect_attempts"], 2);
}

#[test]
fn an_upstream_that_does_not_answer_times_out() {
    let lab = lab();
    let listener = listen(&lab);
    // No host has this address, so that nothing answers.
    let silent = "10.77.0.99:80".parse().unwrap();
    let proxy = Proxy::start(lab, [silent, upstream(&listener)], |config| {
        config.limits.timeouts.connect = Duration::from_secs(1);
    });
    let mut client = proxy.connect();
    let mut server = accept(&listener);
    client.write_all(b"request").unwrap();
    server.read_exact(&mut [0; 7]).unwrap();
    drop((client, server));
    let log = proxy.finish();
    assert_eq!(log[0]["connect_attempts"], 2, "{log:?}");
    assert!(log[0]["connect_ms"].as_f64().unwrap() >= 1000.0, "{log:?}");
}

#[test]
fn a_check_finds_an_upstream_down_and_up_again() {
    let lab = lab();
    let (listener, other) = (listen(&lab), listen(&lab));
    let address = other.local_addr().unwrap();
    let upstreams = [upstream(&other), upstream(&listener)];
    drop(other);
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.groups[0].check = Some(CheckConfig::new(Duration::from_millis(50)));
        // Connections that the upstream has not accepted stay open.
        config.limits.timeouts.drain = Duration::from_secs(1);
    });
    thread::sleep(Duration::from_millis(500));
    for _ in 0..4 {
        let mut client = proxy.connect();
        client.write_all(b"request").unwrap();
        // The checks also connect, and send nothing.
        while accept(&listener).read_exact(&mut [0; 7]).is_err() {}
    }
    let listen_again = || std::net::TcpListener::bind(address).unwrap();
    let other = proxy.lab.receiver.run(listen_again).unwrap();
    other.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + LIMIT;
    let is_used = || {
        let mut client = proxy.connect();
        client.write_all(b"request").unwrap();
        thread::sleep(Duration::from_millis(50));
        std::iter::from_fn(|| other.accept().ok()).any(|(mut server, _)| {
            server.set_nonblocking(false).unwrap();
            server.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            server.read(&mut [0; 7]).is_ok_and(|count| count > 0)
        })
    };
    while !is_used() {
        assert!(Instant::now() < deadline, "the upstream is back and gets no connection");
    }
    let log = proxy.finish();
    let attempts = log.iter().map(|line| line["connect_attempts"].as_u64().unwrap());
    assert_eq!(attempts.max(), Some(1), "{log:?}");
}

#[test]
fn an_upstream_may_be_a_unix_socket() {
    const LEN: usize = 16 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let upstream = format!("unix:{}", path.display()).parse().unwrap();
    let proxy = Proxy::start(lab(), [upstream], |_| {});
    let mut client = proxy.connect();
    client.write_all(b"request").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let mut request = String::new();
    server.read_to_string(&mut request).unwrap();
    assert_eq!(request, "request");
    server.write_all(b"response").unwrap();
    drop(server);
    let mut response = String::new();
    client.read_to_string(&mut response).unwrap();
    assert_eq!(response, "response");
    // Large amounts are also spliced from and to a Unix socket.
    let client = proxy.connect();
    (&client).write_all(b"?").unwrap();
    let (server, _) = listener.accept().unwrap();
    (&server).read_exact(&mut [0]).unwrap();
    let (sent, answered) = (pattern(1, LEN), pattern(2, LEN));
    thread::scope(|scope| {
        scope.spawn(|| (&client).write_all(&sent).unwrap());
        scope.spawn(|| (&server).write_all(&answered).unwrap());
        let reader = scope.spawn(|| {
            let mut received = vec![0; LEN];
            (&server).read_exact(&mut received).unwrap();
            assert!(received == sent);
        });
        let mut received = vec![0; LEN];
        (&client).read_exact(&mut received).unwrap();
        assert!(received == answered);
        reader.join().unwrap();
    });
    drop((client, server));
    let log = proxy.finish();
    for direction in ["to_upstream", "to_client"] {
        let spliced = log[1][direction]["spliced_bytes"].as_u64().unwrap();
        // A direction is copied until it is known to be bulk, and while it pauses.
        assert!(spliced * 10 >= LEN as u64 * 9, "{log:?}");
        assert!(log[1][direction]["fallbacks"].is_null(), "{log:?}");
    }
}

#[test]
fn only_clients_of_allowed_networks_are_connected() {
    for (allow, deny, is_admitted) in [
        (&["10.77.0.0/24"][..], &[][..], true),
        (&["192.0.2.0/24"], &[], false),
        (&[], &["10.77.0.2"], false),
    ] {
        let (proxy, listener) = start_proxy(|config| {
            let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
            config.access.allow = ranges(allow);
            config.access.deny = ranges(deny);
        });
        if is_admitted {
            let _client = proxy.connect();
            accept(&listener);
        } else {
            assert!(proxy.turns_away());
            listener.set_nonblocking(true).unwrap();
            assert!(listener.accept().is_err());
        }
        proxy.finish();
    }
}

/// With them an operator finds a connection in the upstream's log.
#[test]
fn the_log_names_the_listener_and_both_ends_of_the_connection_to_the_upstream() {
    let lab = lab();
    let listener = listen(&lab);
    let name = "localhost:1".parse::<UpstreamConfig>().unwrap();
    let (proxy_ip, metrics) = (lab.sender.address(), SocketAddr::new(lab.sender.address(), 9000));
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let addresses = [7001, 7002].map(|port| SocketAddr::new(proxy_ip, port));
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        config.groups.push(GroupConfig::new("refused", [name]));
        config.listeners = addresses
            .into_iter()
            .zip(["servers", "refused"])
            .map(|(at, group)| ListenerConfig::new(at.to_string().parse().unwrap(), Some(group)))
            .collect();
        config.reporting.metrics = Some(metrics);
        config.reporting.control = Some(control.clone());
    });
    let client = proxy.connect();
    let mut server = accept(&listener);
    server.write_all(b"x").unwrap();
    (&client).read_exact(&mut [0]).unwrap();
    let list = send_command(&control, "connections").unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    let open = list["connections"][0].clone();
    let source = server.peer_addr().unwrap().to_string();
    // A reset, after which the proxy's socket does not have a port.
    rustix::net::sockopt::set_socket_linger(&server, Some(Duration::ZERO)).unwrap();
    drop(server);
    assert_eq!((&client).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let refused = proxy.lab.receiver.run(|| TcpStream::connect(addresses[1])).unwrap().unwrap();
    assert_eq!((&refused).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let page = scrape(&proxy, metrics);
    for address in addresses {
        let line = format!("haul_proxy_listener_connections_total{{listener=\"{address}\"}} 1\n");
        assert!(page.contains(&line), "{page}");
    }
    let log = proxy.finish();
    let upstream_address = listener.local_addr().unwrap().to_string();
    for line in [&open, &log[0]] {
        assert_eq!(line["listener"], addresses[0].to_string(), "{line}");
        assert_eq!(line["upstream_address"], upstream_address, "{line}");
        assert_eq!(line["source"], source, "{line}");
    }
    assert_eq!(log[1]["listener"], addresses[1].to_string(), "{}", log[1]);
    let tried: SocketAddr = log[1]["upstream_address"].as_str().unwrap().parse().unwrap();
    assert!(tried.ip().is_loopback() && tried.port() == 1, "{}", log[1]);
    assert!(log[1]["source"].is_null(), "{}", log[1]);
}

/// Few long connections would all be on one loop if each kept those that it accepts.
#[test]
fn connections_are_spread_evenly_over_the_loops() {
    let lab = lab();
    let listener = listen(&lab);
    let metrics = SocketAddr::new(lab.sender.address(), 9000);
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        config.process.workers = Some(4);
        config.reporting.metrics = Some(metrics);
        config.limits.connections_max = 16;
    });
    for round in 0..3 {
        let mut pairs: Vec<_> = (0..16).map(|_| (proxy.connect(), accept(&listener))).collect();
        // Another one waits until there is room.
        let waiting = proxy.connect();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        let page = scrape(&proxy, metrics);
        for index in 0..4 {
            let line = format!("haul_proxy_loop_connections{{loop=\"{index}\"}} 4\n");
            assert!(page.contains(&line), "round {round}: {page}");
        }
        drop(pairs.swap_remove(round));
        drop(accept(&listener));
        drop((waiting, pairs));
        wait_until_closed(&proxy, metrics);
    }
    proxy.finish();
}

#[test]
fn metrics_tell_the_state_of_each_upstream() {
    let lab = lab();
    let (listener, closed) = (listen(&lab), listen(&lab));
    let metrics = SocketAddr::new(lab.sender.address(), 9000);
    let mut limited = upstream(&listener);
    (limited.weight, limited.connections_max) = (3, NonZeroUsize::new(20));
    let refusing = upstream(&closed);
    let names = [&limited, &refusing].map(|upstream| upstream.address.to_string());
    drop(closed);
    let proxy =
        Proxy::start(lab, [limited, refusing], |config| config.reporting.metrics = Some(metrics));
    // Every fourth client is connected to the other one first, which is ejected after the third.
    let pairs: Vec<_> = (0..12).map(|_| (proxy.connect(), accept(&listener))).collect();
    let page = scrape(&proxy, metrics);
    let value = |metric: &str, upstream: usize| upstream_value(&page, metric, &names[upstream]);
    for (metric, expected) in [
        ("connections", [Some(12), Some(0)]),
        ("connections_max", [Some(20), None]),
        ("connected_total", [Some(12), Some(0)]),
        ("failed_total", [Some(0), Some(3)]),
        ("up", [Some(1), Some(1)]),
        ("ejected", [Some(0), Some(1)]),
        ("enabled", [Some(1), Some(1)]),
        ("weight", [Some(3), Some(1)]),
    ] {
        assert_eq!([value(metric, 0), value(metric, 1)], expected, "{metric}: {page}");
    }
    drop(pairs);
    proxy.finish();
}

#[test]
fn metrics_tell_what_an_operator_has_set_and_a_check_has_found() {
    let lab = lab();
    let (listener, closed) = (listen(&lab), listen(&lab));
    let metrics = SocketAddr::new(lab.sender.address(), 9000);
    let upstreams = [upstream(&listener), upstream(&closed)];
    let names = upstreams.clone().map(|upstream| upstream.address.to_string());
    drop(closed);
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.reporting.metrics = Some(metrics);
        config.reporting.control = Some(control.clone());
        config.groups[0].check = Some(CheckConfig::new(Duration::from_millis(20)));
        config.limits.timeouts.idle = Some(Duration::from_secs(1));
    });
    let mut client = proxy.connect();
    client.write_all(b"x").unwrap();
    let _server = accept(&listener);
    for command in [format!("drain {}", names[0]), format!("weight {} 7", names[1])] {
        send_command(&control, &command).unwrap();
    }
    let deadline = Instant::now() + LIMIT;
    while upstream_value(&scrape(&proxy, metrics), "up", &names[1]) != Some(0) {
        assert!(Instant::now() < deadline, "the check does not find it down");
        thread::sleep(Duration::from_millis(5));
    }
    assert!(client.read(&mut [0]).is_err(), "no byte has moved for a second");
    let page = scrape(&proxy, metrics);
    for (metric, expected) in [("up", [1, 0]), ("enabled", [0, 1]), ("weight", [1, 7])] {
        let values = names.each_ref().map(|name| upstream_value(&page, metric, name));
        assert_eq!(values, expected.map(Some), "{metric}: {page}");
    }
    assert!(page.contains("\nhaul_connections_timed_out_total 1\n"), "{page}");
    proxy.finish();
}

/// An alarm for upstreams that are down is not for one that was taken out.
#[test]
fn metrics_of_a_removed_upstream_are_those_of_its_connections() {
    let lab = lab();
    let (listener, other) = (listen(&lab), listen(&lab));
    let metrics = SocketAddr::new(lab.sender.address(), 9000);
    let upstreams = [upstream(&listener), upstream(&other)];
    let proxy = Proxy::start(lab, upstreams, |config| config.reporting.metrics = Some(metrics));
    let pair = (proxy.connect(), accept(&listener));
    let mut config = proxy.config.clone();
    config.groups[0].upstreams.remove(0);
    proxy.handle.reload(&config).unwrap();
    let page = scrape(&proxy, metrics);
    let name = upstream(&listener).address.to_string();
    for (metric, expected) in [
        ("connections", Some(1)),
        ("connected_total", Some(1)),
        ("failed_total", Some(0)),
        ("up", None),
        ("ejected", None),
        ("enabled", None),
        ("weight", None),
    ] {
        assert_eq!(upstream_value(&page, metric, &name), expected, "{metric}: {page}");
    }
    drop(pair);
    proxy.finish();
}

/// The value of an upstream's metric.
fn upstream_value(page: &str, metric: &str, upstream: &str) -> Option<u64> {
    let labels = format!("{{group=\"servers\",upstream=\"{upstream}\"}} ");
    let start = format!("haul_proxy_upstream_{metric}{labels}");
    let value = page.lines().find_map(|line| line.strip_prefix(&start));
    value.map(|value| value.parse().unwrap())
}

/// The page of the metrics endpoint.
fn scrape(proxy: &Proxy, metrics: SocketAddr) -> String {
    let mut scraper = proxy.lab.sender.run(|| TcpStream::connect(metrics)).unwrap().unwrap();
    scraper.write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    scraper.read_to_string(&mut page).unwrap();
    page
}

fn wait_until_closed(proxy: &Proxy, metrics: SocketAddr) {
    let deadline = Instant::now() + LIMIT;
    while !scrape(proxy, metrics).contains("\nhaul_connections 0\n") {
        assert!(Instant::now() < deadline, "connections are still open");
        thread::sleep(Duration::from_millis(5));
    }
}
