//! Commands of an operator while connections are open, and what becomes of connections to upstreams
//! that are down or removed.

use crate::bulk::{assert_bulk_is_spliced, exchange_bulk};
use crate::common::{LIMIT, Proxy, accept, lab, listen, upstream};
use crate::greeting::set_example_route;
use crate::upgrade::{wait_for, wait_for_answer};
use haul_lab::Lab;
use haul_proxy::{CheckConfig, DownPolicy, GroupConfig};
use haul_server::command_socket::send_command;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A proxy with two upstreams and a control socket.
struct Controlled {
    proxy: Proxy,
    listeners: [TcpListener; 2],
    path: PathBuf,
    _folder: TempDir,
}

impl Controlled {
    fn start(configure: impl FnOnce(&mut haul_proxy::Config)) -> Self {
        let lab = lab();
        let listeners = [listen(&lab), listen(&lab)];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let proxy = Proxy::start(lab, listeners.each_ref().map(upstream), |config| {
            config.reporting.control = Some(path.clone());
            config.process.workers = Some(2);
            configure(config);
        });
        Self { proxy, listeners, path, _folder: folder }
    }

    fn name(&self, index: usize) -> String {
        self.listeners[index].local_addr().unwrap().to_string()
    }

    fn command(&self, command: &str) -> Value {
        serde_json::from_str(&send_command(&self.path, command).unwrap()).unwrap()
    }

    /// Connects a client, whose upstream is the one at `index`.
    fn pair(&self, index: usize) -> (TcpStream, TcpStream) {
        let mut client = self.proxy.connect();
        client.write_all(b"hello").unwrap();
        let mut server = accept(&self.listeners[index]);
        server.read_exact(&mut [0; 5]).unwrap();
        (client, server)
    }
}

/// Waits until a connection is reset.
fn assert_reset(stream: &mut TcpStream) {
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

fn assert_open(client: &mut TcpStream, server: &mut TcpStream) {
    server.write_all(b"y").unwrap();
    client.read_exact(&mut [0]).unwrap();
}

fn ends(log: &[Value]) -> Vec<&str> {
    log.iter().map(|line| line["end"].as_str().unwrap()).collect()
}

#[test]
fn a_drained_upstream_gets_no_connection_and_keeps_those_it_has() {
    let controlled = Controlled::start(|_| {});
    let (mut client, mut server) = controlled.pair(0);
    let answer = controlled.command("drain server/x:1");
    let known = format!("known are servers/{}, servers/{}", controlled.name(0), controlled.name(1));
    assert_eq!(answer["error"], format!("there is no upstream server/x:1: {known}"));
    let changed = controlled.command(&format!("drain servers/{}", controlled.name(0)));
    assert_eq!(changed["changed"][0]["administration"], "draining");
    assert_eq!(changed["changed"][0]["open_connections"], 1);
    // The command is in force once it is answered.
    let others: Vec<_> = (0..6).map(|_| controlled.pair(1)).collect();
    assert_open(&mut client, &mut server);
    // A reload changes nothing about it.
    let mut config = controlled.proxy.config.clone();
    config.groups[0].algorithm = haul_proxy::Algorithm::LeastConnections;
    assert!(controlled.proxy.handle.reload(&config).unwrap().is_empty());
    let more = controlled.pair(1);
    exchange_bulk(&client, &server);
    let upstreams = controlled.command("upstreams");
    let open: Vec<_> = upstreams["upstreams"]
        .as_array()
        .unwrap()
        .iter()
        .map(|upstream| (&upstream["administration"], &upstream["open_connections"]))
        .collect();
    assert_eq!(open, [(&"draining".into(), &1.into()), (&"enabled".into(), &7.into())]);
    controlled.command(&format!("enable {}", controlled.name(0)));
    let back = controlled.pair(0);
    // With a time, the established connections also end.
    controlled.command(&format!("drain {} 0s", controlled.name(0)));
    assert_reset(&mut client);
    drop((others, more, back, server));
    let log = controlled.proxy.finish();
    assert_eq!(ends(&log).iter().filter(|end| **end == "drained").count(), 2, "{log:?}");
    assert_bulk_is_spliced(log.iter().find(|line| line["id"] == 1).unwrap());
}

/// A listener whose queue is full, so that the kernel ignores the next client until one of the
/// queue is accepted, and that client.
fn full_listener(lab: &Lab) -> (TcpListener, TcpStream) {
    let open = || {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &SocketAddr::new(lab.receiver.address(), 0)).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let listener = TcpListener::from(socket);
        let queued = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener, queued)
    };
    lab.receiver.run(open).unwrap()
}

/// A client that is being connected to an upstream when an operator drains or disables it goes to
/// another one.
#[test]
fn a_client_is_not_connected_to_an_upstream_that_was_drained_meanwhile() {
    for command in ["drain", "disable"] {
        let lab = lab();
        let (drained, queued) = full_listener(&lab);
        let other = listen(&lab);
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let proxy = Proxy::start(lab, [upstream(&drained), upstream(&other)], |config| {
            config.reporting.control = Some(control.clone());
        });
        let mut client = proxy.connect();
        wait_for(&control, |answer| answer["connections"][0]["phase"] == "connecting");
        let name = drained.local_addr().unwrap().to_string();
        let answer = send_command(&control, &format!("{command} {name}")).unwrap();
        assert!(answer.contains("changed"), "{answer}");
        // The kernel's next attempt to connect succeeds.
        drop((accept(&drained), queued));
        let mut server = accept(&other);
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
        let mut left = accept(&drained);
        assert_eq!(left.read(&mut [0]).unwrap(), 0, "{command}: it got the client");
        drop((client, server));
        let log = proxy.finish();
        assert_eq!(log[0]["upstream"], other.local_addr().unwrap().to_string(), "{log:?}");
        assert_eq!(log[0]["end"], "complete", "{log:?}");
    }
}

/// As long as the upstream has connections, it can also be drained.
#[test]
fn a_removed_upstream_is_listed_until_its_connections_have_ended() {
    let controlled = Controlled::start(|_| {});
    let (mut client, mut server) = controlled.pair(0);
    let mut config = controlled.proxy.config.clone();
    config.groups[0].upstreams.remove(0);
    controlled.proxy.handle.reload(&config).unwrap();
    let listed = controlled.command("upstreams");
    let upstreams = listed["upstreams"].as_array().unwrap();
    assert_eq!(upstreams.len(), 2);
    let removed = &upstreams[1];
    assert_eq!(removed["upstream"], *controlled.name(0));
    assert_eq!(removed["administration"], "removed");
    assert_eq!(removed["open_connections"], 1);
    assert!(removed.get("addresses").is_none() && upstreams[0]["addresses"] == 1);
    controlled.command(&format!("drain servers/{}", controlled.name(0)));
    assert_open(&mut client, &mut server);
    let changed = controlled.command(&format!("drain {} 0s", controlled.name(0)));
    assert_eq!(changed["changed"][0]["administration"], "removed", "{changed}");
    assert_reset(&mut client);
    let deadline = Instant::now() + LIMIT;
    while controlled.command("upstreams")["upstreams"].as_array().unwrap().len() > 1 {
        assert!(Instant::now() < deadline, "it has no connection any more");
    }
    assert!(controlled.command(&format!("drain {}", controlled.name(0)))["error"].is_string());
    assert_eq!(ends(&controlled.proxy.finish()), ["drained"]);
}

/// An operator sees what a reload of the configuration does not change.
#[test]
fn a_weight_of_the_operator_outlasts_a_reload_that_says_so() {
    let controlled = Controlled::start(|_| {});
    let of_first = |answer: &Value, key: &str| answer["upstreams"][0][key].clone();
    let name = controlled.name(0);
    controlled.command(&format!("weight {name} 7"));
    controlled.command(&format!("drain {name} 10min"));
    let upstreams = controlled.command("upstreams");
    assert_eq!(of_first(&upstreams, "weight"), 7);
    assert_eq!(of_first(&upstreams, "configured_weight"), 1);
    let left = of_first(&upstreams, "closing_in_ms").as_u64().unwrap();
    assert!((1..=600_000).contains(&left), "{left}");
    let mut next = controlled.proxy.config.clone();
    next.groups[0].upstreams[0].weight = 3;
    let caveats = controlled.proxy.handle.reload(&next).unwrap();
    let expected = format!("/{name} default\" puts the 3 of the configuration in force");
    assert!(caveats.iter().any(|caveat| caveat.contains(&expected)), "{caveats:?}");
    let upstreams = controlled.command("upstreams");
    assert_eq!(of_first(&upstreams, "weight"), 7);
    assert_eq!(of_first(&upstreams, "configured_weight"), 3);
    controlled.command(&format!("weight {name} default"));
    controlled.command(&format!("enable {name}"));
    let upstreams = controlled.command("upstreams");
    assert_eq!(of_first(&upstreams, "weight"), 3);
    assert!(of_first(&upstreams, "configured_weight").is_null());
    assert!(of_first(&upstreams, "closing_in_ms").is_null());
    assert_eq!(controlled.proxy.handle.reload(&next).unwrap(), Vec::<String>::new());
    controlled.proxy.finish();
}

/// What an operator wants of an upstream that was removed does not hold for one that is back.
#[test]
fn an_upstream_that_is_back_is_as_new() {
    const DRAIN_TIME: Duration = Duration::from_millis(500);
    let controlled = Controlled::start(|_| {});
    let (mut client, mut server) = controlled.pair(0);
    let with = controlled.proxy.config.clone();
    let mut without = with.clone();
    without.groups[0].upstreams.remove(0);
    controlled.proxy.handle.reload(&without).unwrap();
    let answer = controlled.command(&format!("weight {} 7", controlled.name(0)));
    let error = answer["error"].as_str().unwrap();
    assert!(error.contains("was removed from the configuration"), "{error}");
    let drain = format!("drain {} {}ms", controlled.name(0), DRAIN_TIME.as_millis());
    controlled.command(&drain);
    controlled.proxy.handle.reload(&with).unwrap();
    // Loops look for connections to close once a second.
    std::thread::sleep(DRAIN_TIME + Duration::from_millis(2500));
    assert_open(&mut client, &mut server);
    let upstreams = controlled.command("upstreams");
    let first = &upstreams["upstreams"][0];
    assert_eq!((&first["administration"], &first["weight"]), (&"enabled".into(), &1.into()));
    // That of one that has stayed holds.
    controlled.command(&drain);
    controlled.proxy.handle.reload(&with).unwrap();
    assert_reset(&mut client);
    drop(server);
    assert_eq!(ends(&controlled.proxy.finish()), ["drained"]);
}

#[test]
fn a_disabled_upstream_loses_its_connections() {
    let controlled = Controlled::start(|_| {});
    let (mut first, mut first_server) = controlled.pair(0);
    let (mut second, mut second_server) = controlled.pair(1);
    controlled.command(&format!("disable {}", controlled.name(0)));
    assert_reset(&mut first);
    assert_reset(&mut first_server);
    assert_open(&mut second, &mut second_server);
    // With both disabled there is no upstream, also not as a last resort.
    controlled.command(&format!("disable {}", controlled.name(1)));
    assert_reset(&mut second);
    assert!(controlled.proxy.turns_away());
    let mut ends: Vec<_> =
        controlled.proxy.finish().iter().map(|line| line["end"].to_string()).collect();
    ends.sort_unstable();
    assert_eq!(ends, ["\"drained\"", "\"drained\"", "\"unreachable\""]);
}

#[test]
fn connections_are_listed_and_closed_one_by_one_or_many() {
    let controlled = Controlled::start(|_| {});
    let mut pairs: Vec<_> = (0..6).map(|index| controlled.pair(index % 2)).collect();
    pairs[2].1.write_all(&[7; 1000]).unwrap();
    pairs[2].0.read_exact(&mut [0; 1000]).unwrap();
    let listed = controlled.command("connections");
    let listed = listed["connections"].as_array().unwrap();
    assert_eq!(listed.len(), 6);
    let address = pairs[2].0.local_addr().unwrap().to_string();
    let third = listed.iter().find(|one| one["client"] == *address).unwrap();
    assert_eq!(third["phase"], "forwarding");
    assert_eq!(third["upstream"], *controlled.name(0));
    let bytes = |direction: &Value| {
        let field = |name: &str| direction[name].as_u64().unwrap();
        field("spliced_bytes") + field("copied_bytes")
    };
    assert_eq!((bytes(&third["to_upstream"]), bytes(&third["to_client"])), (5, 1000));
    assert!(third["client_tcp"]["rtt_us"].as_u64() > Some(0), "{third}");
    // One.
    assert_eq!(controlled.command(&format!("kill {}", third["id"]))["killed"], 1);
    assert_reset(&mut pairs[2].0);
    assert!(controlled.command(&format!("kill {}", third["id"]))["error"].is_string());
    // Those of an upstream.
    let name = controlled.name(1);
    assert_eq!(controlled.command(&format!("kill upstream {name}"))["killed"], 3);
    for index in [1, 3, 5] {
        assert_reset(&mut pairs[index].0);
    }
    let (client, server) = &mut pairs[0];
    assert_open(client, server);
    // Those of a network.
    let network = client.local_addr().unwrap().ip();
    assert_eq!(controlled.command("kill client 192.0.2.0/24")["killed"], 0);
    assert_eq!(controlled.command(&format!("kill client {network}"))["killed"], 2);
    assert_reset(client);
    assert!(controlled.command("nonsense")["error"].as_str().unwrap().contains("known are"));
    assert_eq!(ends(&controlled.proxy.finish()), ["killed"; 6]);
}

#[test]
fn commands_are_answered_while_the_proxy_ends() {
    let controlled = Controlled::start(|_| {});
    let (mut client, _server) = controlled.pair(0);
    controlled.proxy.handle.drain();
    // One of the loops does not have a connection and ends.
    let listed = controlled.command("connections");
    assert_eq!(listed["connections"].as_array().map(Vec::len), Some(1), "{listed}");
    std::thread::sleep(Duration::from_millis(100));
    let network = client.local_addr().unwrap().ip();
    assert_eq!(controlled.command(&format!("kill client {network}"))["killed"], 1);
    assert_reset(&mut client);
    assert_eq!(ends(&controlled.proxy.finish()), ["killed"]);
}

#[test]
fn connections_to_an_upstream_that_a_reload_removes_are_kept_or_closed() {
    for policy in [DownPolicy::Keep, DownPolicy::CloseAfter(Duration::ZERO)] {
        let controlled = Controlled::start(|config| config.down_policy = policy);
        let (mut client, server) = controlled.pair(0);
        let mut kept = controlled.pair(1);
        let mut config = controlled.proxy.config.clone();
        config.groups = vec![GroupConfig::new("servers", [upstream(&controlled.listeners[1])])];
        controlled.proxy.handle.reload(&config).unwrap();
        if policy == DownPolicy::Keep {
            // The upstream is gone, and its connections still refer to it.
            exchange_bulk(&client, &server);
        } else {
            assert_reset(&mut client);
        }
        assert_open(&mut kept.0, &mut kept.1);
        drop((client, server, kept));
        let log = controlled.proxy.finish();
        if policy == DownPolicy::Keep {
            assert_bulk_is_spliced(log.iter().find(|line| line["id"] == 1).unwrap());
        }
    }
}

#[test]
fn connections_to_an_upstream_whose_check_fails_are_closed_by_option() {
    let controlled = Controlled::start(|config| {
        config.down_policy = DownPolicy::CloseAfter(Duration::from_millis(500));
        config.groups[0].check = Some(CheckConfig::new(Duration::from_millis(100)));
    });
    let (mut client, server) = controlled.pair(0);
    // It answers no check any more, and the established connection stays.
    let Controlled { proxy, listeners: [first, second], path, _folder } = controlled;
    drop(first);
    let started = Instant::now();
    assert_reset(&mut client);
    assert!(started.elapsed() >= Duration::from_millis(500) && started.elapsed() < LIMIT);
    let status = send_command(&path, "upstreams").unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["upstreams"][0]["is_up"], false);
    drop((server, second));
    assert_eq!(ends(&proxy.finish()), ["upstream-down"]);
}

/// If all upstreams are down, an upstream is tried as the last resort. Connections that are
/// established then stay, including the connection of a client that was there before.
#[test]
fn connections_of_the_last_resort_stay() {
    let lab = lab();
    let listener = listen(&lab);
    let address = listener.local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        config.reporting.control = Some(control.clone());
        set_example_route(config);
        config.down_policy = DownPolicy::CloseAfter(Duration::ZERO);
        let mut check = CheckConfig::new(Duration::from_millis(100));
        // It stays down.
        check.rise = NonZeroU32::MAX;
        config.groups[0].check = Some(check);
    });
    let exchange = |client: &mut TcpStream, listener: &TcpListener| {
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // A check may come before.
        loop {
            let mut server = accept(listener);
            if server.read_exact(&mut [0; 18]).is_ok() {
                return server;
            }
        }
    };
    let mut early = proxy.connect();
    let server = exchange(&mut early, &listener);
    let mut waiting = proxy.connect();
    wait_for(&control, |answer| answer["connections"].as_array().map(Vec::len) == Some(2));
    drop(listener);
    assert_reset(&mut early);
    let listener = proxy.lab.receiver.run(|| TcpListener::bind(address)).unwrap().unwrap();
    let mut waiting_server = exchange(&mut waiting, &listener);
    // Closings are carried out once a second.
    std::thread::sleep(Duration::from_millis(2500));
    assert_open(&mut waiting, &mut waiting_server);
    drop((server, waiting, waiting_server));
    assert_eq!(ends(&proxy.finish()), ["upstream-down", "complete"]);
}

/// An upstream that is up again keeps its connections, and so does one that is down by default.
#[test]
fn connections_to_an_upstream_whose_check_fails_for_a_moment_stay() {
    const CLOSE_AFTER: Duration = Duration::from_secs(3);
    for down_policy in [DownPolicy::CloseAfter(CLOSE_AFTER), DownPolicy::Keep] {
        let controlled = Controlled::start(|config| {
            config.down_policy = down_policy;
            config.groups[0].check = Some(CheckConfig::new(Duration::from_millis(100)));
        });
        let (mut client, mut server) = controlled.pair(0);
        let Controlled { proxy, listeners: [first, second], path, _folder } = controlled;
        let address = first.local_addr().unwrap();
        drop(first);
        let is_up = |expected| move |answer: &Value| answer["upstreams"][0]["is_up"] == expected;
        let status = wait_for_answer(&path, "upstreams", is_up(false));
        let is_closing = status["upstreams"][0]["closing_in_ms"].is_u64();
        assert_eq!(is_closing, down_policy != DownPolicy::Keep, "{status}");
        if is_closing {
            let listen = || TcpListener::bind(address).unwrap();
            let _first = proxy.lab.receiver.run(listen).unwrap();
            wait_for_answer(&path, "upstreams", is_up(true));
            std::thread::sleep(CLOSE_AFTER + Duration::from_secs(1));
            assert_open(&mut client, &mut server);
        } else {
            std::thread::sleep(Duration::from_secs(2));
            assert_open(&mut client, &mut server);
        }
        drop((client, server, second));
        assert_eq!(ends(&proxy.finish()), ["complete"]);
    }
}
