//! A socket whose bytes wait for the other side does not have events, and nothing is lost by that.

use crate::common::{accept, start_proxy};
use crate::ends::{fill, read_rest};
use haul_testing::wait_until;
use rustix::net::SendFlags;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::time::Duration;
use std::{fs, thread};

const EPOLLIN: u32 = 1;
/// The bytes of a large transfer.
const UPLOAD_LEN: usize = 8 << 20;

/// The open files of this process. Some may be closed by now.
fn descriptors() -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// The socket of this process whose peer has this address: the proxy's.
fn socket_of_peer(peer: SocketAddr) -> RawFd {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let is_it = |&descriptor: &RawFd| {
        let socket = pidfd_getfd(&this, descriptor, PidfdGetfdFlags::empty());
        let name = socket.and_then(|socket| rustix::net::getpeername(&socket)).ok();
        name.and_then(|name| SocketAddr::try_from(name?).ok()) == Some(peer)
    };
    descriptors().into_iter().find(is_it).unwrap()
}

/// The events for which epoll has a socket registered; `None` if it is not.
fn registered_events(socket: RawFd) -> Option<u32> {
    let prefix = format!("tfd:{socket:>9} events:");
    descriptors().into_iter().find_map(|descriptor| {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).ok()?;
        let events = info.lines().find_map(|line| line.strip_prefix(&prefix))?;
        u32::from_str_radix(events.split_whitespace().next()?, 16).ok()
    })
}

#[test]
fn a_socket_whose_bytes_wait_has_no_events_of_bytes() {
    let (proxy, listener) = start_proxy(|_| {});
    let client = proxy.connect();
    let mut server = accept(&listener);
    let socket = socket_of_peer(client.local_addr().unwrap());
    let is_readable = |events: u32| events & EPOLLIN != 0;
    wait_until("registered", || registered_events(socket).is_some_and(is_readable));
    upload(&client, &mut server);
    let len = fill(&client);
    // A pause begins with a step that moves bytes, and may end at once.
    let mut received = 0;
    wait_until("paused", || {
        received += server.read(&mut [0; 10_000]).unwrap();
        registered_events(socket).is_none()
    });
    // Its failure must not go unnoticed.
    wait_until("registered for its failure", || {
        registered_events(socket).is_some_and(|events| !is_readable(events))
    });
    let reading = thread::spawn(move || read_rest(&server));
    wait_until("registered again", || registered_events(socket).is_some_and(is_readable));
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(reading.join().unwrap(), (len - received, true));
    drop(client);
    assert_spliced(&proxy.finish(), len);
}

/// The end of the stream arrives in the pause, and then a reset: all was sent before.
#[test]
fn a_stream_that_ends_in_a_pause_is_complete() {
    // The proxy would find the failure as it sends a response. It sends a large one at once, and a
    // larger one by several calls: the first causes the reset of a client that has read all.
    for (response_len, reads_all) in [(0, false), (10, false), (10_000, false), (200_000, true)] {
        let (proxy, listener) = start_proxy(|_| {});
        let mut client = proxy.connect();
        let mut server = accept(&listener);
        // The close of a client that does not read it is a reset.
        server.write_all(&[7; 1000]).unwrap();
        if reads_all {
            client.read_exact(&mut [0; 1000]).unwrap();
        }
        upload(&client, &mut server);
        let len = fill(&client);
        client.shutdown(Shutdown::Write).unwrap();
        let received = read_until_sent(&mut server, &client);
        drop(client);
        server.write_all(&vec![7; response_len]).unwrap();
        let rest = read_rest(&server);
        assert_eq!(rest, (len - received, true), "response of {response_len} bytes");
        assert!(rest.0 > 0, "nothing waited in the proxy");
        drop(server);
        // The ends of both sides may reach the proxy at once.
        let log = proxy.finish();
        assert!(
            ["client-failed", "complete"].contains(&log[0]["end"].as_str().unwrap()),
            "{log:?}"
        );
        // What is left after a failure is copied.
        assert_spliced(&log, 0);
    }
}

/// Checks that the upload, and of what followed so many bytes, were spliced but for one percent.
fn assert_spliced(log: &[Value], more: usize) {
    let spliced = log[0]["to_upstream"]["spliced_bytes"].as_u64().unwrap() as usize;
    assert!(spliced >= (UPLOAD_LEN + more) / 100 * 99, "{log:?}");
}

/// A receive ends before an urgent byte, and there are others behind it.
#[test]
fn bytes_behind_an_urgent_one_arrive_after_a_reset() {
    let (proxy, listener) = start_proxy(|_| {});
    let client = proxy.connect();
    let mut server = accept(&listener);
    server.write_all(&[7; 1000]).unwrap();
    upload(&client, &mut server);
    let len = fill(&client);
    let mut received = read_until_sent(&mut server, &client);
    rustix::net::send(&client, b"!", SendFlags::OOB).unwrap();
    (&client).write_all(&[7; 100]).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    received += read_until_sent(&mut server, &client);
    drop(client);
    // The proxy finds the failure before it sends this.
    server.write_all(b"response").unwrap();
    let mut rest = Vec::new();
    server.read_to_end(&mut rest).unwrap();
    // The urgent byte may also arrive.
    rest.retain(|&byte| byte == 7);
    assert_eq!(rest.len(), len + 100 - received);
    drop(server);
    // What is left after the failure is copied.
    assert_spliced(&proxy.finish(), 0);
}

/// Forwards so much that it is a large transfer.
fn upload(mut client: &TcpStream, server: &mut TcpStream) {
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(&vec![7; UPLOAD_LEN]).unwrap());
        server.read_exact(&mut vec![0; UPLOAD_LEN]).unwrap();
    });
}

/// Reads no more than is needed for all bytes of `peer` to arrive at the proxy, and the end of its
/// stream.
fn read_until_sent(socket: &mut TcpStream, peer: &TcpStream) -> usize {
    let mut received = 0;
    while haul_sys::sockopt::bytes_to_send(peer).unwrap() > 0 {
        received += socket.read(&mut [0; 10_000]).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    received
}
