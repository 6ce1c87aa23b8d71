//! Forwarding between two sockets.

use haul::{ForwardPool, ForwardSettings};
use haul_testing::{pattern, receive_all, tcp_pair};
use haul_tokio::forward;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Sends the bytes and the end of the stream on a new thread.
fn send(socket: &TcpStream, bytes: Vec<u8>) -> JoinHandle<()> {
    let mut socket = socket.try_clone().unwrap();
    thread::spawn(move || {
        socket.write_all(&bytes).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
    })
}

#[tokio::test]
async fn both_directions_arrive_and_large_pieces_are_spliced() {
    let pool = ForwardPool::with_settings(ForwardSettings::default()).unwrap();
    let (request, response) = (pattern(1, 3_000_000), pattern(2, 9_000_000));
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let ((client, a), (b, server)) = (tcp_pair(), tcp_pair());
        let forwarding = tokio::spawn(forward(a, b, pool.clone()));
        let sending = [send(&client, request.clone()), send(&server, response.clone())];
        tasks.push((forwarding, sending, receive_all(client), receive_all(server)));
    }
    for (forwarding, sending, at_client, at_server) in tasks {
        let report = forwarding.await.unwrap().unwrap();
        for thread in sending {
            thread.join().unwrap();
        }
        assert!(at_server.join().unwrap() == request);
        assert!(at_client.join().unwrap() == response);
        let moved =
            [&report.a_to_b, &report.b_to_a].map(|one| one.spliced.bytes + one.copied.bytes);
        assert_eq!(moved, [3_000_000, 9_000_000]);
        assert!(report.b_to_a.spliced.bytes > 4_500_000, "{report:?}");
    }
}

#[tokio::test]
async fn a_dropped_future_and_a_limit_reset_both_connections() {
    let is_reset = |mut socket: TcpStream| {
        let error = socket.read(&mut [0]).err();
        error.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
    };
    let pool = ForwardPool::with_settings(ForwardSettings::default()).unwrap();
    let ((mut client, a), (b, mut server)) = (tcp_pair(), tcp_pair());
    let forwarding = tokio::spawn(forward(a, b, pool));
    client.write_all(b"x").unwrap();
    let server = tokio::task::spawn_blocking(move || {
        server.read_exact(&mut [0]).unwrap();
        server
    });
    let server = server.await.unwrap();
    forwarding.abort();
    assert!(forwarding.await.unwrap_err().is_cancelled());
    assert!(is_reset(client) && is_reset(server));
    let limited = ForwardSettings::default().with_idle_timeout(Some(Duration::from_millis(50)));
    let pool = ForwardPool::with_settings(limited).unwrap();
    let ((client, a), (b, server)) = (tcp_pair(), tcp_pair());
    let error = forward(a, b, pool).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(is_reset(client) && is_reset(server));
}

/// A client that ended its stream and then resets the connection, while its server is silent.
#[tokio::test]
async fn the_failure_of_a_side_that_is_not_waited_for_is_noticed() {
    let pool = ForwardPool::with_settings(ForwardSettings::default()).unwrap();
    let ((client, a), (b, mut server)) = (tcp_pair(), tcp_pair());
    let forwarding = tokio::spawn(forward(a, b, pool));
    client.shutdown(Shutdown::Write).unwrap();
    let server = tokio::task::spawn_blocking(move || {
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
        server
    });
    let server = server.await.unwrap();
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let error = tokio::time::timeout(Duration::from_secs(120), forwarding).await.unwrap();
    assert!(error.unwrap().is_err());
    drop(server);
}
