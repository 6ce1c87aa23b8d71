//! How connections end: by a reset, by a limit, by a drain.

use crate::bulk::{assert_bulk_is_spliced, exchange_bulk};
use crate::common::{LIMIT, Proxy, accept, lab, listen, start_proxy, upstream};
use crate::upgrade::bytes;
use haul_proxy::ListenerConfig;
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::net::sockopt::set_socket_linger;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

fn reset(socket: TcpStream) {
    set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    drop(socket);
}

/// Reads until the connection ends; true if it was reset.
fn is_reset(mut socket: &TcpStream) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
                return true;
            }
        }
    }
}

/// A stream that was cut off never looks like one that has ended.
#[test]
fn a_reset_of_one_side_resets_the_other() {
    for client_resets in [true, false] {
        let (proxy, listener) = start_proxy(|_| {});
        let mut client = proxy.connect();
        let mut server = accept(&listener);
        client.write_all(b"request").unwrap();
        server.read_exact(&mut [0; 7]).unwrap();
        server.write_all(b"begin").unwrap();
        client.read_exact(&mut [0; 5]).unwrap();
        let (resetting, other) = if client_resets { (client, server) } else { (server, client) };
        reset(resetting);
        assert!(is_reset(&other), "client_resets: {client_resets}");
        let log = proxy.finish();
        let end = if client_resets { "client-failed" } else { "upstream-failed" };
        assert_eq!(log[0]["end"], end, "{log:?}");
    }
}

/// The upstream is connected in the same moment in which the client's reset arrives. What the
/// client sent before is delivered, and the stream ends by a reset.
#[test]
fn a_client_that_is_reset_at_once_does_not_look_like_one_that_ended() {
    const CLIENTS: usize = 40;
    for sent in [&b"0123456789abcdef"[..], b""] {
        let (proxy, listener) = start_proxy(|_| {});
        for _ in 0..CLIENTS {
            let mut client = proxy.connect();
            client.write_all(sent).unwrap();
            reset(client);
        }
        // The upstream's queue has each connection that reached it.
        let log = proxy.finish();
        assert!(log.iter().all(|line| line["end"] == "client-failed"), "{log:?}");
        listener.set_nonblocking(true).unwrap();
        let (mut reached, mut whole) = (0, 0);
        while let Ok((mut server, _)) = listener.accept() {
            server.set_nonblocking(false).unwrap();
            let mut received = Vec::new();
            let end = server.read_to_end(&mut received);
            let kind = end.map_err(|error| error.kind());
            assert_eq!(kind, Err(ErrorKind::ConnectionReset), "after {} bytes", received.len());
            assert!(received.is_empty() || received == sent, "{received:?}");
            reached += 1;
            whole += usize::from(received == sent);
        }
        println!("{sent:?}: {reached} of {CLIENTS} reached the upstream, {whole} whole");
        assert!(sent.is_empty() || whole > 0, "nothing was delivered, so nothing was tested");
    }
}

/// Telnet's commands are urgent bytes. The proxy keeps their place in the stream.
#[test]
fn an_urgent_byte_stays_in_its_place_in_both_directions() {
    let (proxy, listener) = start_proxy(|_| {});
    let client = proxy.connect();
    let server = accept(&listener);
    for (mut from, mut to) in [(&client, &server), (&server, &client)] {
        rustix::net::sockopt::set_socket_oobinline(to, true).unwrap();
        from.write_all(b"abc").unwrap();
        rustix::net::send(from, b"?", SendFlags::OOB).unwrap();
        from.write_all(b"def").unwrap();
        let mut received = [0; 7];
        to.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"abc?def");
    }
    drop((client, server));
    proxy.finish();
}

/// Sends until nothing has room, and returns the number of bytes.
pub fn fill(socket: impl AsFd) -> usize {
    let (mut sent, mut refused) = (0, 0);
    while refused < 10 {
        match rustix::net::send(&socket, &[7; 10_000], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => {
                sent += count;
                refused = 0;
            }
            Err(errno) => {
                assert_eq!(errno, Errno::AGAIN);
                refused += 1;
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
    sent
}

/// Like [`fill`]. Returns the number of bytes that have arrived at the peer's host: a reset
/// discards the others.
fn fill_peer(socket: &TcpStream) -> usize {
    let sent = fill(socket);
    sent - haul_sys::sockopt::bytes_to_send(socket).unwrap() as usize
}

/// Reads all that arrives; true if the stream has ended, and was not reset.
pub fn read_rest(mut socket: &TcpStream) -> (usize, bool) {
    let (mut received, mut buffer) = (0, vec![0; 1 << 20]);
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return (received, true),
            Ok(count) => {
                assert!(buffer[..count].iter().all(|&byte| byte == 7));
                received += count;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
                return (received, false);
            }
        }
    }
}

/// There is more than the upstream takes: the proxy does not even receive all of it, and notices
/// the failure all the same.
#[test]
fn a_failed_client_of_a_stalled_upstream_is_given_up() {
    let (proxy, listener) = start_proxy(|_| {});
    let client = proxy.connect();
    let server = accept(&listener);
    fill(&client);
    reset(client);
    let deadline = Instant::now() + 3 * LIMIT;
    while rustix::net::getpeername(&server).is_ok() {
        assert!(Instant::now() < deadline, "the connection to the upstream is kept");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(proxy.finish()[0]["end"], "client-failed");
}

/// The kernel reports a reset only once, to the call that sends, and then the end of the stream.
#[test]
fn a_reset_during_an_upload_is_no_end_of_the_response() {
    for _ in 0..5 {
        let (proxy, listener) = start_proxy(|_| {});
        let client = proxy.connect();
        let mut server = accept(&listener);
        // The server does not read: the proxy has bytes to send when the reset arrives.
        fill(&client);
        server.write_all(b"begin").unwrap();
        reset(server);
        assert!(is_reset(&client), "the response looks complete");
        drop(client);
        assert_eq!(proxy.finish()[0]["end"], "upstream-failed");
    }
}

/// A server that refuses an upload answers, and closes the connection with unread data: a reset.
/// The client reads nothing until then: part of the response waits in the proxy's socket.
#[test]
fn a_response_before_a_reset_is_delivered() {
    // With another request the proxy finds the failure as it sends, and does not have room for the
    // response.
    for has_other_request in [false, true] {
        let (proxy, listener) = start_proxy(|_| {});
        let mut client = proxy.connect();
        let mut server = accept(&listener);
        client.write_all(&vec![7; 100_000]).unwrap();
        server.read_exact(&mut [0; 10]).unwrap();
        let arrived = fill_peer(&server);
        drop(server);
        if has_other_request {
            client.write_all(b"request").unwrap();
        }
        thread::sleep(Duration::from_millis(100));
        let (received, has_ended) = read_rest(&client);
        assert!(received >= arrived && !has_ended, "{received} of {arrived}");
        let log = proxy.finish();
        assert_eq!(log[0]["end"], "upstream-failed");
        assert_eq!(bytes(&log[0]["to_client"]), received as u64);
    }
}

/// An upload goes on like a response, when the server sends to a client that is gone.
#[test]
fn an_upload_before_a_reset_is_delivered() {
    let (proxy, listener) = start_proxy(|_| {});
    let client = proxy.connect();
    let mut server = accept(&listener);
    let arrived = fill_peer(&client);
    server.write_all(&[7; 1000]).unwrap();
    thread::sleep(Duration::from_millis(100));
    // What it has not read makes the close a reset.
    drop(client);
    let _ = server.write_all(b"response");
    thread::sleep(Duration::from_millis(100));
    let (received, has_ended) = read_rest(&server);
    assert!(received >= arrived && !has_ended, "{received} of {arrived}");
    let log = proxy.finish();
    assert_eq!(log[0]["end"], "client-failed");
    assert_eq!(bytes(&log[0]["to_upstream"]), received as u64);
}

/// A Unix socket whose peer has closed still has the peer's name.
#[test]
fn an_upload_of_a_unix_client_that_has_closed_is_delivered() {
    let lab = lab();
    let listener = listen(&lab);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("listen");
    let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
        let address = format!("unix:{}", path.display()).parse().unwrap();
        config.listeners.push(ListenerConfig::new(address, Some("servers")));
    });
    let client = UnixStream::connect(&path).unwrap();
    let mut server = accept(&listener);
    let len = fill(&client);
    drop(client);
    server.write_all(b"response").unwrap();
    thread::sleep(Duration::from_millis(100));
    assert_eq!(read_rest(&server), (len, true));
    let log = proxy.finish();
    assert_eq!(log[0]["end"], "client-failed");
    assert_eq!(bytes(&log[0]["to_upstream"]), len as u64);
}

/// All of the response is in the proxy's socket, which also has an upload that is not read. A close
/// would discard both.
#[test]
fn a_complete_response_is_delivered_beside_an_upload() {
    const LEN: usize = 1_500_000;
    let (proxy, listener) = start_proxy(|_| {});
    let client = proxy.connect();
    let mut server = accept(&listener);
    fill(&client);
    server.write_all(&vec![7; LEN]).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let deadline = Instant::now() + LIMIT;
    while haul_sys::sockopt::bytes_to_send(&server).unwrap() > 0 {
        assert!(Instant::now() < deadline, "the proxy does not take the response");
        thread::sleep(Duration::from_millis(1));
    }
    // The proxy notices the end before the reset.
    thread::sleep(Duration::from_millis(500));
    // The upload that it has not read makes the close a reset.
    drop(server);
    thread::sleep(Duration::from_millis(100));
    assert_eq!(read_rest(&client), (LEN, true));
    drop(client);
    assert_eq!(proxy.finish()[0]["end"], "upstream-failed");
}

/// A response that has ended is complete, whatever becomes of the connection to the server.
#[test]
fn a_complete_response_is_delivered_after_a_reset() {
    // The server resets the connection because of an upload that it has not read, which the proxy
    // has not read either; or its kernel does because of a byte that arrives late.
    for has_upload in [true, false] {
        let (proxy, listener) = start_proxy(|_| {});
        let mut client = proxy.connect();
        let server = accept(&listener);
        if has_upload {
            fill(&client);
        }
        let len = fill(&server);
        server.shutdown(Shutdown::Write).unwrap();
        // The client reads no more than is needed for the rest to arrive, and its end: the proxy's
        // socket is full of it.
        let mut received = 0;
        while haul_sys::sockopt::bytes_to_send(&server).unwrap() > 0 {
            received += client.read(&mut [0; 10_000]).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        // The proxy notices the end before the reset.
        thread::sleep(Duration::from_millis(500));
        drop(server);
        thread::sleep(Duration::from_millis(100));
        if !has_upload {
            client.write_all(b"!").unwrap();
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(read_rest(&client), (len - received, true), "has_upload: {has_upload}");
        drop(client);
        proxy.finish();
    }
}

#[test]
fn silent_connections_end_at_the_limits() {
    let limit = Some(Duration::from_secs(1));
    for is_half_closed in [false, true] {
        let (proxy, listener) = start_proxy(|config| {
            config.limits.timeouts.idle = limit.filter(|_| !is_half_closed);
            config.limits.timeouts.half_closed = limit.filter(|_| is_half_closed);
        });
        let client = proxy.connect();
        let mut server = accept(&listener);
        let started = Instant::now();
        exchange_bulk(&client, &server);
        if is_half_closed {
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(server.read(&mut [0]).unwrap(), 0);
        }
        // One whose stream has ended does not report the reset to a reader.
        assert!(is_reset(&client) && (is_half_closed || is_reset(&server)));
        assert!(started.elapsed() >= Duration::from_millis(900));
        let log = proxy.finish();
        assert_eq!(log[0]["end"], "idle");
        assert_bulk_is_spliced(&log[0]);
    }
}

#[test]
fn a_busy_connection_ends_with_its_lifetime() {
    let (proxy, listener) = start_proxy(|config| {
        config.limits.timeouts.lifetime = Some(Duration::from_secs(1));
    });
    let client = proxy.connect();
    let mut server = accept(&listener);
    let started = Instant::now();
    let content = vec![1; 100_000];
    let sender =
        thread::spawn(
            move || {
                while started.elapsed() < LIMIT && server.write_all(&content).is_ok() {}
            },
        );
    let (mut received, mut piece, expected) = (0, vec![0; 1 << 20], vec![1; 1 << 20]);
    let error = loop {
        match (&client).read(&mut piece) {
            Ok(count) => {
                assert_ne!(count, 0, "it was cut off, and has ended");
                assert!(piece[..count] == expected[..count], "the bytes have changed");
                received += count as u64;
            }
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(started.elapsed() >= Duration::from_millis(900));
    sender.join().unwrap();
    let log = proxy.finish();
    assert_eq!(log[0]["end"], "lifetime");
    // The bytes that a reset discards were also forwarded.
    let forwarded = bytes(&log[0]["to_client"]);
    assert!(forwarded >= received, "{log:?}");
    assert!(log[0]["to_client"]["spliced_bytes"].as_u64().unwrap() >= forwarded / 2, "{log:?}");
}

/// The lifetime does not end a client that is being connected: the next upstream is still tried. It
/// ends the connection at once then. The kernel drops what connects while the server accepts
/// nothing.
#[test]
fn a_client_that_is_being_connected_outlives_the_lifetime() {
    let lab = lab();
    let (silent, listener) = (listen(&lab), listen(&lab));
    rustix::net::listen(&silent, 0).unwrap();
    let silent_address = silent.local_addr().unwrap();
    let _other = lab.sender.run(|| TcpStream::connect(silent_address)).unwrap().unwrap();
    let mut upstreams = [upstream(&silent), upstream(&listener)];
    upstreams[1].is_backup = true;
    let proxy = Proxy::start(lab, upstreams, |config| {
        config.limits.timeouts.lifetime = Some(Duration::from_secs(1));
        config.limits.timeouts.connect = Duration::from_secs(2);
    });
    assert!(is_reset(&proxy.connect()));
    let log = proxy.finish();
    assert_eq!((&log[0]["end"], &log[0]["connect_attempts"]), (&"lifetime".into(), &2.into()));
}

#[test]
fn a_drain_lets_established_connections_end() {
    let (proxy, listener) = start_proxy(|_| {});
    let mut client = proxy.connect();
    let mut server = accept(&listener);
    client.write_all(b"request").unwrap();
    server.read_exact(&mut [0; 7]).unwrap();
    proxy.handle.drain();
    let (lab, address) = (&proxy.lab, proxy.address);
    let refused = || lab.receiver.run(|| TcpStream::connect(address)).unwrap().is_err();
    let deadline = Instant::now() + LIMIT;
    listener.set_nonblocking(true).unwrap();
    while !refused() {
        assert!(Instant::now() < deadline, "the proxy accepts connections");
        // The connections that were accepted before the drain also end.
        std::iter::from_fn(|| listener.accept().ok()).for_each(drop);
    }
    std::iter::from_fn(|| listener.accept().ok()).for_each(drop);
    server.write_all(b"response").unwrap();
    drop(server);
    let mut response = String::new();
    client.read_to_string(&mut response).unwrap();
    assert_eq!(response, "response");
    drop(client);
    assert!(proxy.finish().iter().any(|line| line["end"] == "complete"));
}

#[test]
fn a_drain_cuts_off_what_is_open_at_its_end() {
    let (proxy, listener) = start_proxy(|config| {
        config.limits.timeouts.drain = Duration::from_secs(1);
    });
    let client = proxy.connect();
    let server = accept(&listener);
    let log = proxy.finish();
    assert_eq!(log[0]["end"], "cut-off", "{log:?}");
    assert!(is_reset(&client) && is_reset(&server));
}

/// A peer that acknowledges nothing for as long as it may has failed.
#[test]
fn a_client_that_does_not_acknowledge_fails() {
    silence_one_side(true);
}

#[test]
fn an_upstream_that_does_not_acknowledge_fails() {
    silence_one_side(false);
}

fn silence_one_side(is_client: bool) {
    let (proxy, listener) = start_proxy(|config| {
        config.limits.timeouts.unacknowledged = Some(Duration::from_secs(2));
    });
    if !proxy.is_alone() {
        return;
    }
    if Command::new("nft").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no peer is silent, nft (nftables) is missing");
        return;
    }
    let mut client = proxy.connect();
    let mut server = accept(&listener);
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
    server.write_all(b"y").unwrap();
    client.read_exact(&mut [0]).unwrap();
    // Nothing arrives at the other host any more, where both are.
    proxy.lab.set_loss("100%".parse().unwrap()).unwrap();
    let mut sending = if is_client { &server } else { &client };
    sending.write_all(b"lost").unwrap();
    let ends = || proxy.lab.sender.run(established).unwrap();
    let deadline = Instant::now() + LIMIT;
    while ends() > 1 {
        assert!(Instant::now() < deadline, "it is still connected");
        thread::sleep(Duration::from_millis(50));
    }
    proxy.lab.set_loss("0".parse().unwrap()).unwrap();
    drop((client, server));
    let expected = if is_client { "client-failed" } else { "upstream-failed" };
    assert_eq!(proxy.finish()[0]["end"], expected);
}

/// The established connections of the calling thread's host.
fn established() -> usize {
    let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    text.lines().filter(|line| line.split_whitespace().nth(3) == Some("01")).count()
}
