//! Clients that have no upstream yet, while a second proxy takes over.

use crate::common::{LIMIT, accept, lab, listen, pattern, upstream};
use crate::greeting::{assert_reset, hello, set_example_route};
use crate::queue::{client, has_none, limited};
use crate::upgrade::{Successor, Upgradable, bytes, read_log, wait_for};
use haul_proxy::{GroupConfig, HeaderVersion, ListenerConfig, Route, RouteCondition};
use haul_server::command_socket::send_command;
use rustix::net::sockopt::set_socket_linger;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Waits until the connections are in these phases, and returns them.
fn wait_for_phases(control: &Path, phases: &[&str]) -> Vec<Value> {
    let connections = |answer: &Value| answer["connections"].as_array().unwrap().clone();
    let are_there = |answer: &Value| {
        let connections = connections(answer);
        connections.iter().map(|one| one["phase"].as_str().unwrap()).eq(phases.iter().copied())
    };
    connections(&wait_for(control, are_there))
}

/// The header of the PROXY protocol that comes first.
fn read_header(server: &mut TcpStream) -> String {
    let mut header = Vec::new();
    while !header.ends_with(b"\r\n") {
        let mut byte = [0];
        server.read_exact(&mut byte).unwrap();
        header.extend(byte);
    }
    String::from_utf8(header).unwrap()
}

#[test]
fn a_greeting_that_two_processes_receive_is_routed() {
    let upgradable = Upgradable::start(|config| {
        set_example_route(config);
        config.limits.greeting_timeout = 2 * LIMIT;
        config.groups[0].send_header = Some(HeaderVersion::V1);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let hello = hello("www.example.com", &["h2"]);
    let (first, second) = hello.split_at(hello.len() / 2);
    let mut begun = proxy.connect();
    begun.write_all(first).unwrap();
    wait_for_phases(&control, &["greeting"]);
    let silent = proxy.connect();
    let before = wait_for_phases(&control, &["greeting"; 2]);
    // What has arrived is in the process, and not in the socket.
    thread::sleep(Duration::from_millis(50));

    let successor = Successor::start(&proxy.lab, &proxy.config);
    let (_, _lab, log_folder) = proxy.join();
    let after = wait_for_phases(&control, &["greeting"; 2]);
    for (before, after) in before.iter().zip(&after) {
        assert_eq!([&before["id"], &before["client"]], [&after["id"], &after["client"]]);
    }
    send_command(&control, &format!("kill {}", after[1]["id"])).unwrap();
    assert_reset(&silent);
    begun.write_all(second).unwrap();
    let mut server = accept(&listener);
    let port = begun.local_addr().unwrap().port().to_string();
    assert!(read_header(&mut server).contains(&port));
    let mut received = vec![0; hello.len()];
    server.read_exact(&mut received).unwrap();
    assert_eq!(received, hello);
    drop((begun, server));
    successor.finish();
    let log = read_log(&log_folder.path().join("log"));
    let line = |end: &str| log.iter().find(|line| line["end"] == end).unwrap();
    assert!(log.len() == 2 && line("killed")["id"] == after[1]["id"]);
    assert_eq!(line("complete")["server_name"], "www.example.com");
}

#[test]
fn a_silent_client_is_connected_by_the_other_process_after_the_time_limit() {
    let upgradable = Upgradable::start(|config| {
        set_example_route(config);
        config.limits.greeting_timeout = Duration::from_secs(2);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let mut silent = proxy.connect();
    wait_for_phases(&control, &["greeting"]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    let (.., _log_folder) = proxy.join();
    let mut server = accept(&listener);
    server.write_all(b"first").unwrap();
    silent.read_exact(&mut [0; 5]).unwrap();
    drop((silent, server));
    successor.finish();
}

/// The listener decides about the route, and another configuration may lack it.
#[test]
fn a_greeting_keeps_the_routes_of_its_listener() {
    for has_listener in [true, false] {
        let lab = lab();
        let other = listen(&lab);
        let upgradable = Upgradable::start_in(lab, |config| {
            config.limits.greeting_timeout = 2 * LIMIT;
            let path = config.control.as_ref().unwrap().with_file_name("listen");
            let address = format!("unix:{}", path.display()).parse().unwrap();
            let mut local = ListenerConfig::new(address, None);
            let mut condition = RouteCondition::default();
            condition.has_server_name = Some(true);
            local.routes = vec![Route::new(condition, "others")];
            config.listeners.push(local);
            config.groups.push(GroupConfig::new("others", [upstream(&other)]));
            set_example_route(config);
        });
        let Upgradable { proxy, listener: _listener, control, folder } = upgradable;
        let hello = hello("www.example.com", &["h2"]);
        let mut client = UnixStream::connect(folder.path().join("listen")).unwrap();
        client.write_all(&hello[..9]).unwrap();
        wait_for_phases(&control, &["greeting"]);
        let mut next = proxy.config.clone();
        next.listeners.truncate(if has_listener { 2 } else { 1 });
        let successor = Successor::start(&proxy.lab, &next);
        let (.., log_folder) = proxy.join();
        // A Unix socket has no reset, and the client may be closed already.
        let _ = client.write_all(&hello[9..]);
        client.set_read_timeout(Some(LIMIT)).unwrap();
        if has_listener {
            accept(&other).read_exact(&mut vec![0; hello.len()]).unwrap();
        } else {
            let _ = client.read(&mut [0]);
        }
        drop(client);
        successor.finish();
        let log = read_log(&log_folder.path().join("log"));
        let end = if has_listener { "complete" } else { "no-route" };
        assert_eq!((log.len(), &log[0]["end"]), (1, &end.into()), "{log:?}");
    }
}

/// Another configuration may have no route by greeting.
#[test]
fn a_client_whose_greeting_is_not_needed_any_more_is_connected() {
    let upgradable = Upgradable::start(|config| {
        set_example_route(config);
        config.limits.greeting_timeout = 2 * LIMIT;
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let mut next = proxy.config.clone();
    next.listeners[0].routes.clear();
    let mut client = proxy.connect();
    client.write_all(&[22]).unwrap();
    wait_for_phases(&control, &["greeting"]);
    thread::sleep(Duration::from_millis(50));
    let successor = Successor::start(&proxy.lab, &next);
    let (.., _log_folder) = proxy.join();
    let mut server = accept(&listener);
    server.read_exact(&mut [0]).unwrap();
    drop((client, server));
    successor.finish();
}

/// The kernel drops what connects while the server has accepted nothing.
#[test]
fn a_connection_that_is_being_established_is_handed_over() {
    let upgradable = Upgradable::start(|config| {
        config.limits.connect_timeout = 2 * LIMIT;
        config.groups[0].send_header = Some(HeaderVersion::V1);
        let listed = &mut config.groups[0].upstreams;
        listed[0].connections_max = std::num::NonZeroUsize::new(1);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    rustix::net::listen(&listener, 0).unwrap();
    let server_address = listener.local_addr().unwrap();
    let other = proxy.lab.sender.run(|| TcpStream::connect(server_address)).unwrap().unwrap();
    let first = client(&proxy, 1);
    let before = wait_for_phases(&control, &["connecting"]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    let (address, lab, log_folder) = proxy.join();
    let after = wait_for_phases(&control, &["connecting"]);
    assert_eq!(
        [&before[0]["id"], &before[0]["upstream"]],
        [&after[0]["id"], &after[0]["upstream"]]
    );
    // Its slot is its own.
    let second = lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    wait_for_phases(&control, &["connecting", "queued"]);
    drop((accept(&listener), other));
    let mut server = accept(&listener);
    let port = first.local_addr().unwrap().port().to_string();
    assert!(read_header(&mut server).contains(&port));
    server.read_exact(&mut [0]).unwrap();
    assert!(has_none(&listener));
    drop((first, server));
    let mut server = accept(&listener);
    read_header(&mut server);
    drop((server, second));
    successor.finish();
    let log = read_log(&log_folder.path().join("log"));
    assert!(log.iter().all(|line| line["end"] == "complete"), "{log:?}");
    assert_eq!(log[0]["connect_attempts"], 1);
}

/// An upstream that expects a header gets it also from a process that lacks its group.
#[test]
fn a_connection_that_is_being_established_keeps_the_header_of_its_group() {
    let upgradable = Upgradable::start(|config| {
        config.limits.connect_timeout = 2 * LIMIT;
        config.groups[0].send_header = Some(HeaderVersion::V1);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    rustix::net::listen(&listener, 0).unwrap();
    let server_address = listener.local_addr().unwrap();
    let other = proxy.lab.sender.run(|| TcpStream::connect(server_address)).unwrap().unwrap();
    let client = client(&proxy, 1);
    wait_for_phases(&control, &["connecting"]);
    let mut next = proxy.config.clone();
    next.groups = vec![GroupConfig::new("others", next.groups[0].upstreams.clone())];
    next.listeners[0].group = Some("others".into());
    let successor = Successor::start(&proxy.lab, &next);
    let (.., _log_folder) = proxy.join();
    wait_for_phases(&control, &["connecting"]);
    drop((accept(&listener), other));
    let mut server = accept(&listener);
    let port = client.local_addr().unwrap().port().to_string();
    assert!(read_header(&mut server).contains(&port));
    drop((client, server));
    successor.finish();
}

/// What one process has tried in vain, the other one leaves out.
#[test]
fn an_upstream_that_has_refused_is_not_tried_again() {
    let lab = lab();
    // Its listener is closed at once.
    let refusing = upstream(&listen(&lab));
    let silent = listen(&lab);
    rustix::net::listen(&silent, 0).unwrap();
    let address = silent.local_addr().unwrap();
    let _filling = lab.sender.run(|| TcpStream::connect(address)).unwrap().unwrap();
    let upgradable = Upgradable::start_in(lab, |config| {
        config.limits.connect_timeout = Duration::from_secs(2);
        config.limits.connect_attempts_max = 3;
        config.workers = Some(1);
        config.groups[0].upstreams.splice(0..0, [refusing, upstream(&silent)]);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let mut client = client(&proxy, 1);
    wait_for_phases(&control, &["connecting"]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    let (.., log_folder) = proxy.join();
    let mut server = accept(&listener);
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    drop((client, server));
    successor.finish();
    let log = read_log(&log_folder.path().join("log"));
    assert_eq!(log[0]["connect_attempts"], 3, "{log:?}");
    assert!(log[0]["connect_error"].as_str().unwrap().contains("timed out"), "{log:?}");
}

/// A server that is restarted is found by the process that has taken over.
#[test]
fn a_client_whose_upstreams_have_failed_is_handed_over() {
    let upgradable = Upgradable::start(|config| config.limits.connect_attempts_max = 10);
    let server_address = upgradable.listener.local_addr().unwrap();
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    drop(listener);
    let mut client = client(&proxy, 1);
    wait_for_phases(&control, &["connecting"]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    let (_, lab, _log_folder) = proxy.join();
    wait_for_phases(&control, &["connecting"]);
    let listener = lab.receiver.run(|| TcpListener::bind(server_address)).unwrap().unwrap();
    let mut server = accept(&listener);
    server.read_exact(&mut [0]).unwrap();
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    drop((client, server));
    successor.finish();
}

/// Connections that end in the old process free their slots in the new one: those of failed clients
/// are kept until the upstream has what they have sent.
#[test]
fn connections_that_end_in_the_old_process_free_their_slots_in_the_new_one() {
    let upgradable = Upgradable::start(|config| config.limits.queue_timeout = LIMIT);
    let Upgradable { mut proxy, listener, control, folder: _folder } = upgradable;
    proxy.config.groups[0].upstreams = vec![limited(&listener, 2)];
    proxy.handle.reload(&proxy.config).unwrap();
    let mut servers = Vec::new();
    for _ in 0..2 {
        let mut failed = proxy.connect();
        servers.push(accept(&listener));
        // More than the upstream's socket takes, and less than that and the proxy's.
        failed.write_all(&pattern(1, 600 << 10)).unwrap();
        wait_for(&control, |answer| {
            let moved = |one: &Value| bytes(&one["to_upstream"]) == 600 << 10;
            answer["connections"].as_array().unwrap().last().is_some_and(moved)
        });
        set_socket_linger(&failed, Some(Duration::ZERO)).unwrap();
    }
    wait_for_phases(&control, &["delivering"; 2]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    let mut waiting = client(&proxy, 1);
    wait_for_phases(&control, &["queued"]);
    // One of the two ends, and the other one keeps the old process.
    let mut other = servers.pop().unwrap();
    let mut received = Vec::new();
    let error = servers.pop().unwrap().read_to_end(&mut received).unwrap_err();
    assert_eq!((error.kind(), received.len()), (ErrorKind::ConnectionReset, 600 << 10));
    let (mut server, name) = crate::queue::next(&listener);
    assert_eq!(name, 1);
    server.write_all(b"x").unwrap();
    waiting.read_exact(&mut [0]).unwrap();
    other.set_nonblocking(true).unwrap();
    other.read_exact(&mut [0]).unwrap();
    drop(other);
    let (.., _log_folder) = proxy.join();
    drop((waiting, server));
    successor.finish();
}
