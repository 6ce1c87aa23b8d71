//! Clients that do not have a upstream yet, while a second proxy takes over.

use crate::common::{LIMIT, accept, pattern};
use crate::greeting::{hello, set_example_route};
use crate::queue::{client, has_none, limited};
use crate::upgrade::{Successor, Upgradable, bytes, read_log, wait_for};
use haul_proxy::HeaderVersion;
use haul_server::command_socket::send_command;
use rustix::net::sockopt::set_socket_linger;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
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

/// The old process receives the rest of the greeting, after its drain timeout, and hands the
/// established connection over.
#[test]
fn a_client_whose_greeting_is_incomplete_follows_once_it_is_connected() {
    let upgradable = Upgradable::start(|config| {
        set_example_route(config);
        config.limits.timeouts.drain = Duration::from_millis(100);
        config.limits.timeouts.greeting = 2 * LIMIT;
        config.groups[0].send_header = Some(HeaderVersion::V1);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let hello = hello("www.example.com", &["h2"]);
    let (first, second) = hello.split_at(hello.len() / 2);
    let mut begun = proxy.connect();
    begun.write_all(first).unwrap();
    let before = wait_for_phases(&control, &["greeting"]);

    let successor = Successor::start(&proxy.lab, &proxy.config);
    wait_for_phases(&control, &[]);
    thread::sleep(Duration::from_millis(1500));
    begun.write_all(second).unwrap();
    let mut server = accept(&listener);
    let port = begun.local_addr().unwrap().port().to_string();
    assert!(read_header(&mut server).contains(&port));
    let mut received = vec![0; hello.len()];
    server.read_exact(&mut received).unwrap();
    assert_eq!(received, hello);
    let (_, _lab, log_folder) = proxy.join();
    let after = wait_for_phases(&control, &["forwarding"]);
    assert_eq!([&before[0]["id"], &before[0]["client"]], [&after[0]["id"], &after[0]["client"]]);
    drop((begun, server));
    successor.finish();
    let log = read_log(&log_folder.path().join("log"));
    assert_eq!((log.len(), &log[0]["end"]), (1, &"complete".into()), "{log:?}");
    assert_eq!(log[0]["server_name"], "www.example.com");
}

#[test]
fn a_silent_client_follows_after_the_time_limit_of_the_greeting() {
    let upgradable = Upgradable::start(|config| {
        set_example_route(config);
        config.limits.timeouts.greeting = Duration::from_secs(2);
    });
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let mut silent = proxy.connect();
    wait_for_phases(&control, &["greeting"]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    let mut server = accept(&listener);
    let (.., _log_folder) = proxy.join();
    server.write_all(b"first").unwrap();
    silent.read_exact(&mut [0; 5]).unwrap();
    drop((silent, server));
    successor.finish();
}

/// The kernel drops what connects while the server has accepted nothing.
#[test]
fn a_connection_that_is_being_established_follows_with_its_slot() {
    let upgradable = Upgradable::start(|config| {
        config.limits.timeouts.connect = 2 * LIMIT;
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
    wait_for_phases(&control, &[]);
    // The new process counts the slot of the first client, which the old process still connects.
    let second = proxy.connect();
    wait_for_phases(&control, &["queued"]);
    drop((accept(&listener), other));
    let mut server = accept(&listener);
    let port = first.local_addr().unwrap().port().to_string();
    assert!(read_header(&mut server).contains(&port));
    server.read_exact(&mut [0]).unwrap();
    let (.., log_folder) = proxy.join();
    let after = wait_for_phases(&control, &["forwarding", "queued"]);
    assert_eq!(
        [&before[0]["id"], &before[0]["upstream"]],
        [&after[0]["id"], &after[0]["upstream"]]
    );
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

/// The old process does not know that an operator drained the upstream in the new one.
#[test]
fn a_connection_to_an_upstream_that_was_drained_in_the_meantime_ends() {
    let upgradable = Upgradable::start(|config| config.limits.timeouts.connect = 2 * LIMIT);
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    rustix::net::listen(&listener, 0).unwrap();
    let server_address = listener.local_addr().unwrap();
    let other = proxy.lab.sender.run(|| TcpStream::connect(server_address)).unwrap().unwrap();
    let mut first = client(&proxy, 1);
    wait_for_phases(&control, &["connecting"]);
    let successor = Successor::start(&proxy.lab, &proxy.config);
    wait_for_phases(&control, &[]);
    let answer = send_command(&control, &format!("drain {server_address} 1s")).unwrap();
    assert!(answer.contains("changed"), "{answer}");
    thread::sleep(Duration::from_millis(1500));
    drop((accept(&listener), other));
    let server = accept(&listener);
    let (.., log_folder) = proxy.join();
    assert_eq!(first.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    drop((first, server));
    successor.finish();
    let log = read_log(&log_folder.path().join("log"));
    assert_eq!((log.len(), &log[0]["end"]), (1, &"drained".into()), "{log:?}");
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

/// Connections that end in the old process free their slots in the new process. The connections of
/// failed clients are kept until the upstream has the clients' bytes.
#[test]
fn connections_that_end_in_the_old_process_free_their_slots_in_the_new_one() {
    let upgradable = Upgradable::start(|config| config.limits.timeouts.queue = LIMIT);
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
