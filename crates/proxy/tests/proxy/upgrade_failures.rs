//! A process that takes over, and is slow, hangs or fails.

use crate::common::{LIMIT, accept};
use crate::greeting::assert_reset;
use crate::upgrade::{Upgradable, agree, agree_without_answer, receive_text, wait_for};
use haul_proxy::Server;
use haul_server::command_socket::send_command;
use haul_server::fd_channel::{FdChannel, FdMessage};
use haul_testing::exchange;
use serde_json::Value;
use std::cell::RefCell;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

/// The most connections on their way at first: 32, and one more for each event loop.
pub const ON_WAY_MAX: usize = 34;

/// Connects clients, each with its upstream's end.
pub fn connect(upgradable: &Upgradable, count: usize) -> Vec<(TcpStream, TcpStream)> {
    let connect = |_| (upgradable.proxy.connect(), accept(&upgradable.listener));
    (0..count).map(connect).collect()
}

/// Receives the next connection, with its sockets.
fn receive_connection(channel: &FdChannel) -> FdMessage {
    loop {
        let message = channel.receive().unwrap().unwrap();
        if message.bytes.starts_with(b"{\"connection\"") {
            return message;
        }
    }
}

/// Sends a byte through each connection, and waits until so many have arrived.
fn wait_until_forwarded(pairs: &mut [(TcpStream, TcpStream)], count: usize) {
    for (client, server) in &mut *pairs {
        client.write_all(b"x").unwrap();
        server.set_nonblocking(true).unwrap();
    }
    let deadline = Instant::now() + LIMIT;
    let mut arrived = 0;
    while arrived < count {
        assert!(Instant::now() < deadline, "{arrived} instead of {count} are forwarded");
        let has_arrived =
            |(_, server): &&(_, TcpStream)| matches!((&*server).read(&mut [0]), Ok(1));
        arrived += pairs.iter().filter(has_arrived).count();
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a proxy accepts a client again.
fn wait_until_accepted(upgradable: &Upgradable) -> (TcpStream, TcpStream) {
    let client = upgradable.proxy.connect();
    let server = accept(&upgradable.listener);
    exchange(&client, &server);
    (client, server)
}

/// A new process that ends after it was agreed: what was not sent goes on in the old one, which
/// accepts clients again, and can be taken over by another process.
#[test]
fn connections_that_a_failing_process_has_not_taken_go_on() {
    const CONNECTIONS: usize = 300;
    let upgradable = Upgradable::start(|config| config.limits.timeouts.drain = Duration::ZERO);
    let mut pairs = connect(&upgradable, CONNECTIONS);
    let channel = agree(&upgradable.control);
    while !receive_text(&channel).contains("connection") {}
    drop(channel);
    // Those on their way are reset.
    let is_open = |(client, server): &mut (TcpStream, TcpStream)| {
        let read = client.write_all(b"more").and_then(|()| server.read_exact(&mut [0; 4]));
        let kind = read.err().map(|error| error.kind());
        assert_ne!(kind, Some(ErrorKind::UnexpectedEof), "it does not look like an end");
        kind.is_none()
    };
    let open = pairs.iter_mut().map(is_open).filter(|is_open| *is_open).count();
    let kept = CONNECTIONS - ON_WAY_MAX..CONNECTIONS;
    assert!(kept.contains(&open), "{open} of {CONNECTIONS} go on");
    let (client, server) = wait_until_accepted(&upgradable);
    let successor = upgradable.upgrade();
    let Upgradable { proxy, .. } = upgradable;
    let (_, _lab, _folder) = proxy.join();
    exchange(&client, &server);
    drop((client, server, pairs));
    successor.finish();
}

/// The same if all connections are on their way.
#[test]
fn a_process_that_fails_at_once_takes_nothing_with_it_but_what_was_on_its_way() {
    let upgradable = Upgradable::start(|config| config.limits.timeouts.drain = Duration::ZERO);
    let pairs = connect(&upgradable, 5);
    let channel = agree(&upgradable.control);
    for _ in 0..5 {
        receive_connection(&channel);
    }
    thread::sleep(Duration::from_millis(100));
    drop(channel);
    for (client, _) in &pairs {
        assert_reset(client);
    }
    drop(wait_until_accepted(&upgradable));
    upgradable.proxy.finish();
}

/// No connection is on its way before the new process says that it runs.
#[test]
fn a_process_that_fails_before_it_runs_takes_nothing_with_it() {
    for connections in [0, 5] {
        let upgradable = Upgradable::start(|config| config.limits.timeouts.drain = Duration::ZERO);
        let pairs = connect(&upgradable, connections);
        let channel = agree_without_answer(&upgradable.control);
        thread::sleep(Duration::from_millis(100));
        drop(channel);
        for (mut client, mut server) in pairs {
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
        }
        drop(wait_until_accepted(&upgradable));
        upgradable.proxy.finish();
    }
}

/// From a process that hands over in another way, the new one takes nothing.
#[test]
fn a_handover_of_another_version_is_refused() {
    let upgradable = Upgradable::start(|_| {});
    let path = upgradable.folder.path().join("other");
    let control = UnixListener::bind(&path).unwrap();
    let mut config = upgradable.proxy.config.clone();
    (config.reporting.control, config.process.upgrades) = (Some(path), true);
    let starting = thread::spawn(move || Server::new(&config).unwrap_err().to_string());
    control.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + LIMIT;
    let new_process = loop {
        match control.accept() {
            Ok((stream, _)) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "no process asks: {error}"),
        }
        thread::sleep(Duration::from_millis(1));
    };
    new_process.set_nonblocking(false).unwrap();
    new_process.set_read_timeout(Some(LIMIT)).unwrap();
    let mut command = BufReader::new(new_process);
    command.read_line(&mut String::new()).unwrap();
    let (channel, other_end) = FdChannel::pair().unwrap();
    other_end.send_through(command.get_ref()).unwrap();
    channel.send(b"{\"version\":1000000}", &[]).unwrap();
    let error = starting.join().unwrap();
    assert!(error.contains("it hands over by version 1000000, and this one by "), "{error}");
    assert!(channel.wait_for_end(Some(LIMIT)).unwrap());
    upgradable.proxy.finish();
}

/// A new process that is slow: few connections wait for it, and the others continue in the old
/// process.
#[test]
fn few_connections_are_on_their_way_to_another_process() {
    const CONNECTIONS: usize = 100;
    let upgradable = Upgradable::start(|_| {});
    let mut pairs = connect(&upgradable, CONNECTIONS);
    let channel = agree(&upgradable.control);
    let adopt = |count| {
        // The old process ends with the last connection.
        let _ = channel.send(format!("{{\"adopted\":{count}}}").as_bytes(), &[]);
    };
    let first = ON_WAY_MAX - 2;
    let mut received: Vec<_> = (0..first).map(|_| receive_connection(&channel)).collect();
    wait_until_forwarded(&mut pairs, CONNECTIONS - ON_WAY_MAX);
    // Once they are adopted, the next ones come.
    adopt(first);
    for _ in first..CONNECTIONS {
        received.push(receive_connection(&channel));
        adopt(1);
    }
    upgradable.proxy.join();
}

/// The drain timeout is for connections that stay: a handover may take longer.
#[test]
fn connections_that_are_to_be_handed_over_outlast_the_drain_timeout() {
    const CONNECTIONS: usize = 100;
    let upgradable = Upgradable::start(|config| config.limits.timeouts.drain = Duration::ZERO);
    let mut pairs = connect(&upgradable, CONNECTIONS);
    let successor = upgradable.upgrade();
    let Upgradable { proxy, .. } = upgradable;
    let (_, _lab, _folder) = proxy.join();
    for (client, server) in &mut pairs {
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
    }
    drop(pairs);
    successor.finish();
}

/// A new process that hangs: the old one keeps what it has not sent, beyond the drain timeout, and
/// ends with the last of it.
#[test]
fn connections_that_a_hanging_process_does_not_adopt_stay() {
    const CONNECTIONS: usize = 100;
    let upgradable = Upgradable::start(|config| config.limits.timeouts.drain = Duration::ZERO);
    let mut pairs = connect(&upgradable, CONNECTIONS);
    let channel = agree(&upgradable.control);
    // The old process ends its messages after a time.
    let mut on_way = Vec::new();
    let deadline = Instant::now() + LIMIT;
    while let Some(message) = channel.receive().unwrap() {
        assert!(Instant::now() < deadline, "it still hands over");
        if message.bytes.starts_with(b"{\"connection\"") {
            on_way.push(message);
        }
    }
    assert!((1..=ON_WAY_MAX).contains(&on_way.len()), "{} are on their way", on_way.len());
    wait_until_forwarded(&mut pairs, CONNECTIONS - on_way.len());
    drop(pairs);
    upgradable.proxy.join();
    drop(channel);
}

/// A new process that fails and does not end: the old one keeps what it has not sent, and takes
/// commands once it is alone with the socket.
#[test]
fn the_control_socket_belongs_to_one_process() {
    const CONNECTIONS: usize = 300;
    let upgradable = Upgradable::start(|_| {});
    let pairs = connect(&upgradable, CONNECTIONS);
    let has = |answer: &Value, count| answer["connections"].as_array().unwrap().len() == count;
    wait_for(&upgradable.control, |answer| has(answer, CONNECTIONS));
    let channel = agree(&upgradable.control);
    // The old process has closed the first one when it sends the second.
    for _ in 0..2 {
        while !receive_text(&channel).starts_with("{\"connection\"") {}
    }
    channel.refuse().unwrap();
    let is_reset = |mut client: &TcpStream| {
        client.set_nonblocking(true).unwrap();
        client.read(&mut [0]).unwrap_err().kind() == ErrorKind::ConnectionReset
    };
    // A socket reports a reset once. The old process may not have closed the latest one yet.
    let lost = RefCell::new([false; CONNECTIONS]);
    let count_lost = || {
        let mut lost = lost.borrow_mut();
        for (lost, (client, _)) in lost.iter_mut().zip(&pairs).filter(|(lost, _)| !**lost) {
            *lost = is_reset(client);
        }
        lost.iter().filter(|lost| **lost).count()
    };
    let deadline = Instant::now() + LIMIT;
    while count_lost() == 0 {
        assert!(Instant::now() < deadline, "those in the channel are reset");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(count_lost() < CONNECTIONS);
    let mut operator = UnixStream::connect(&upgradable.control).unwrap();
    operator.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    writeln!(operator, "connections").unwrap();
    let read = operator.read(&mut [0]);
    assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock, "that process has not ended");
    drop(channel);
    operator.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(operator.read(&mut [0]).unwrap(), 1);
    wait_for(&upgradable.control, |answer| has(answer, CONNECTIONS - count_lost()));
    let left = CONNECTIONS - count_lost();
    let killed = send_command(&upgradable.control, "kill client 10.0.0.0/8").unwrap();
    assert_eq!(killed.trim(), format!("{{\"killed\":{left}}}"));
    drop(wait_until_accepted(&upgradable));
    upgradable.proxy.finish();
}
