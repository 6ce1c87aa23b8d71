//! Forwarding between real sockets: in both directions at once, with half-close, by copying and by
//! splicing.

use haul::{
    Error, ForwardMethod, ForwardPool, ForwardReport, ForwardSettings, ForwardSide, Forwarder, Step,
};
use haul_testing::{pattern, receive_all, tcp_pair};
use rustix::event::{PollFd, PollFlags};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Like [`tcp_pair`], with packets of 1400 bytes at most in both directions.
fn pair_of_small_packets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    haul_sys::sockopt::set_max_segment(&listener, 1400).unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (connected, listener.accept().unwrap().0)
}

/// Result and report of a forwarder.
type ForwardOutcome = (Result<(), Error>, ForwardReport);

/// Returns a client and a server, and the thread of a forwarder that connects them.
fn forwarded_pair() -> (TcpStream, TcpStream, JoinHandle<ForwardOutcome>) {
    let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
    let forwarding = thread::spawn(move || {
        let mut forwarder = Forwarder::new(from, to).unwrap();
        (forwarder.forward(), forwarder.report())
    });
    (client, server, forwarding)
}

/// Sends `bytes` and then the end of the stream, on a new thread.
fn send_all(to: &TcpStream, bytes: Vec<u8>) -> JoinHandle<()> {
    let mut to = to.try_clone().unwrap();
    thread::spawn(move || {
        to.write_all(&bytes).unwrap();
        to.shutdown(Shutdown::Write).unwrap();
    })
}

#[test]
fn bulk_data_is_spliced_in_both_directions_at_once() {
    let (client, server, forwarding) = forwarded_pair();
    let (to_server, to_client) = (pattern(1, 24 << 20), pattern(2, 9_999_999));
    let sending = [send_all(&client, to_server.clone()), send_all(&server, to_client.clone())];
    let (at_server, at_client) =
        (receive_all(server.try_clone().unwrap()), receive_all(client.try_clone().unwrap()));
    assert!(at_server.join().unwrap() == to_server);
    assert!(at_client.join().unwrap() == to_client);
    for sending in sending {
        sending.join().unwrap();
    }
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    for (direction, bytes) in [(&report.a_to_b, to_server.len()), (&report.b_to_a, to_client.len())]
    {
        assert_eq!(direction.spliced.bytes + direction.copied.bytes, bytes as u64);
        assert!(direction.spliced.bytes > 0, "{direction:?}");
    }
}

#[test]
fn one_side_may_close_its_half_long_before_the_other() {
    let (client, mut server, forwarding) = forwarded_pair();
    send_all(&client, b"request".to_vec()).join().unwrap();
    let mut request = Vec::new();
    server.read_to_end(&mut request).unwrap();
    assert_eq!(request, b"request");
    // The client's half is closed up to the server; the response still arrives.
    let response = pattern(3, 5 << 20);
    let received = receive_all(client.try_clone().unwrap());
    server.write_all(&response).unwrap();
    drop(server);
    assert!(received.join().unwrap() == response);
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    assert_eq!(report.a_to_b.copied.bytes, 7);
    assert!(report.b_to_a.spliced.bytes > 4 << 20, "{report:?}");
}

/// Sends messages of four bytes back and forth, one at a time.
fn exchange_small_messages(mut client: TcpStream, mut server: TcpStream, count: u32) {
    client.set_nodelay(true).unwrap();
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    }
    for round in 0..count {
        let mut message = [0; 4];
        client.write_all(&round.to_le_bytes()).unwrap();
        server.read_exact(&mut message).unwrap();
        server.write_all(&message).unwrap();
        client.read_exact(&mut message).unwrap();
        assert_eq!(u32::from_le_bytes(message), round);
    }
}

#[test]
fn small_messages_are_copied() {
    let (client, server, forwarding) = forwarded_pair();
    exchange_small_messages(client, server, 300);
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    assert_eq!((report.a_to_b.spliced.calls, report.a_to_b.changes), (0, 0), "{report:?}");
    assert_eq!((report.a_to_b.copied.bytes, report.b_to_a.copied.bytes), (1200, 1200));
}

/// The kernel holds a small message back for 200 ms if more was announced (`SPLICE_F_MORE`,
/// `MSG_MORE`).
#[test]
fn no_small_message_is_held_back() {
    const COUNT: u32 = 300;
    for method in [ForwardMethod::Copy, ForwardMethod::Splice] {
        let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
        let settings = ForwardSettings::default().with_method(method);
        let pool = ForwardPool::with_settings(settings).unwrap();
        let forwarding = thread::spawn(move || {
            let mut forwarder = Forwarder::with_pool(from, to, pool).unwrap();
            (forwarder.forward(), forwarder.report())
        });
        let started = Instant::now();
        exchange_small_messages(client, server, COUNT);
        // Those of one direction alone would take 60 s.
        assert!(started.elapsed() < Duration::from_secs(20), "{method:?}: messages are held back");
        let (forwarded, report) = forwarding.join().unwrap();
        forwarded.unwrap();
        for direction in [report.a_to_b, report.b_to_a] {
            let moved = [direction.copied.bytes, direction.spliced.bytes];
            let expected = u64::from(4 * COUNT);
            let is_spliced = method == ForwardMethod::Splice;
            assert_eq!(moved, if is_spliced { [0, expected] } else { [expected, 0] });
        }
    }
}

#[test]
fn a_direction_changes_its_method_with_the_message_size() {
    let (mut client, mut server, forwarding) = forwarded_pair();
    client.set_nodelay(true).unwrap();
    let mut bulk = vec![0; 4 << 20];
    for _ in 0..2 {
        send_in_thread(&client, &pattern(4, bulk.len()), || server.read_exact(&mut bulk).unwrap());
        assert!(bulk == pattern(4, bulk.len()));
        for round in 0..20u8 {
            let mut message = [0];
            client.write_all(&[round]).unwrap();
            server.read_exact(&mut message).unwrap();
            assert_eq!(message, [round]);
        }
    }
    drop((client, server));
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    // The direction changes to splicing and back, twice.
    assert!(report.a_to_b.changes >= 4, "{report:?}");
}

/// A bulk transfer goes on by single packets after a loss, and is still spliced. Messages of other
/// lengths are copied.
#[test]
fn single_full_packets_after_bulk_data_are_spliced() {
    for is_full in [true, false] {
        let ((mut client, from), (to, mut server)) = (pair_of_small_packets(), tcp_pair());
        client.set_nodelay(true).unwrap();
        let packet_bytes = haul_sys::sockopt::max_segment(&client).unwrap() as usize;
        assert!(packet_bytes <= 1400, "{packet_bytes}");
        let forwarding = thread::spawn(move || {
            let mut forwarder = Forwarder::new(from, to).unwrap();
            (forwarder.forward(), forwarder.report())
        });
        let mut bulk = vec![0; 4 << 20];
        send_in_thread(&client, &pattern(4, bulk.len()), || server.read_exact(&mut bulk).unwrap());
        let mut message = vec![0; if is_full { packet_bytes } else { packet_bytes - 1 }];
        // The last fill of the bulk may also be small.
        for _ in 0..8 {
            client.write_all(&message).unwrap();
            server.read_exact(&mut message).unwrap();
        }
        drop((client, server));
        let (forwarded, report) = forwarding.join().unwrap();
        forwarded.unwrap();
        // It has copied at first.
        let is_splicing = report.a_to_b.changes % 2 == 1;
        assert_eq!(is_splicing, is_full, "{report:?}");
    }
}

/// Bytes that arrive just after a splice that found nothing are also spliced.
#[test]
fn a_splicing_forwarder_copies_nothing() {
    let ((mut client, from), (to, server)) = (tcp_pair(), tcp_pair());
    client.set_nodelay(true).unwrap();
    for socket in [&from, &to] {
        socket.set_nonblocking(true).unwrap();
    }
    let received = receive_all(server.try_clone().unwrap());
    let sending = thread::spawn(move || {
        for _ in 0..20_000 {
            client.write_all(&[7; 100]).unwrap();
        }
        drop(client);
    });
    let settings = ForwardSettings::default().with_method(ForwardMethod::Splice);
    let pool = ForwardPool::with_settings(settings).unwrap();
    let mut forwarder = Forwarder::one_way_with_pool(from, to, pool).unwrap();
    // Without a pause, so that many bytes arrive during a turn.
    while forwarder.step().unwrap() != Step::Done {}
    sending.join().unwrap();
    assert_eq!(received.join().unwrap().len(), 2_000_000);
    let report = forwarder.report().a_to_b;
    assert_eq!((report.spliced.bytes, report.copied.bytes), (2_000_000, 0), "{report:?}");
}

/// A fixed method is used for all message sizes, also with pipes and buffers of unusual sizes.
#[test]
fn a_fixed_method_is_kept() {
    for (method, is_spliced) in [(ForwardMethod::Copy, false), (ForwardMethod::Splice, true)] {
        let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
        let settings = ForwardSettings::default()
            .with_method(method)
            .with_pipe_bytes(20_000)
            .with_buffer_bytes(777);
        let pool = ForwardPool::with_settings(settings).unwrap();
        let forwarding = thread::spawn(move || {
            let mut forwarder = Forwarder::with_pool(from, to, pool).unwrap();
            (forwarder.forward(), forwarder.report())
        });
        let bytes = pattern(3, 3_000_001);
        let sending = [send_all(&client, bytes.clone()), send_all(&server, b"small".to_vec())];
        let (at_server, at_client) =
            (receive_all(server.try_clone().unwrap()), receive_all(client.try_clone().unwrap()));
        assert!(at_server.join().unwrap() == bytes, "{method:?}");
        assert_eq!(at_client.join().unwrap(), b"small");
        for sending in sending {
            sending.join().unwrap();
        }
        let (result, report) = forwarding.join().unwrap();
        result.unwrap();
        assert_eq!(report.a_to_b.changes + report.b_to_a.changes, 0);
        let (spliced, copied) = (report.a_to_b.spliced.bytes, report.a_to_b.copied.bytes);
        // What a sink refuses at the beginning is copied out of the pipe.
        assert!(if is_spliced { spliced > copied } else { spliced == 0 }, "{method:?}: {report:?}");
    }
    let none = ForwardSettings::default().with_buffer_bytes(0);
    assert!(matches!(ForwardPool::with_settings(none), Err(Error::InvalidInput(_))));
}

/// Sends `bytes` on another thread while this one runs `meanwhile`.
fn send_in_thread(to: &TcpStream, bytes: &[u8], meanwhile: impl FnOnce()) {
    thread::scope(|scope| {
        scope.spawn(|| (&mut &*to).write_all(bytes).unwrap());
        meanwhile();
    });
}

#[test]
fn a_slow_sink_loses_no_bytes() {
    let (client, server, forwarding) = forwarded_pair();
    let bytes = pattern(5, 12 << 20);
    let sending = send_all(&client, bytes.clone());
    let received = thread::spawn(move || {
        let (mut server, mut received, mut buffer) = (server, Vec::<u8>::new(), vec![0; 100_001]);
        loop {
            match server.read(&mut buffer).unwrap() {
                0 => break received,
                count => received.extend(&buffer[..count]),
            }
            thread::sleep(Duration::from_micros(500));
        }
    });
    assert!(received.join().unwrap() == bytes);
    sending.join().unwrap();
    drop(client);
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    assert!(report.a_to_b.spliced.bytes > 6 << 20, "{report:?}");
}

#[test]
fn a_reset_gives_an_error_and_no_filled_pipe_returns_to_the_pool() {
    let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
    let pool = ForwardPool::new(4).unwrap();
    let forwarding = thread::spawn({
        let pool = pool.clone();
        move || Forwarder::with_pool(from, to, pool).unwrap().forward()
    });
    // Fill all buffers in between, then close with unread data, which resets the connection.
    let mut bulk = client.try_clone().unwrap();
    let sending = thread::spawn(move || while bulk.write_all(&[1; 10_000]).is_ok() {});
    thread::sleep(Duration::from_millis(50));
    drop(server);
    let error = forwarding.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    sending.join().unwrap();
    // The next connection with the same pool receives none of those bytes. (The pool may contain an
    // empty pipe, if the reset arrived while the forwarder held copied bytes.)
    let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
    let sending = [send_all(&client, pattern(6, 3 << 20)), send_all(&server, Vec::new())];
    let received = receive_all(server.try_clone().unwrap());
    Forwarder::with_pool(from, to, pool.clone()).unwrap().forward().unwrap();
    assert!(received.join().unwrap() == pattern(6, 3 << 20));
    for sending in sending {
        sending.join().unwrap();
    }
    assert_eq!(pool.idle_pipes(), 1);
}

#[test]
fn unix_and_tcp_sockets_are_forwarded_step_by_step() {
    let ((client, from), (to, mut server)) = (UnixStream::pair().unwrap(), tcp_pair());
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    let blocking = forwarder.step().unwrap_err();
    assert!(matches!(blocking, Error::InvalidInput(_)), "{blocking}");
    from.set_nonblocking(true).unwrap();
    to.set_nonblocking(true).unwrap();
    let Step::Wait { a: client_side, b: server_side } = forwarder.step().unwrap() else { panic!() };
    assert!(client_side.read && server_side.read && !client_side.write && !server_side.write);
    let bytes = pattern(7, 2 << 20);
    let sending = thread::spawn({
        let bytes = bytes.clone();
        move || (&client).write_all(&bytes)
    });
    let received = thread::spawn(move || {
        let mut received: Vec<u8> = Vec::new();
        server.read_to_end(&mut received).unwrap();
        received
    });
    loop {
        match forwarder.step().unwrap() {
            Step::Done => break,
            Step::Yield => {}
            Step::Wait { .. } => thread::sleep(Duration::from_micros(100)),
        }
    }
    sending.join().unwrap().unwrap();
    assert!(received.join().unwrap() == bytes);
    assert_eq!(
        forwarder.report().a_to_b.spliced.bytes + forwarder.report().a_to_b.copied.bytes,
        2 << 20
    );
}

#[test]
fn unsupported_descriptors_are_refused() {
    let (tcp, _peer) = tcp_pair();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    assert!(matches!(Forwarder::new(&tcp, &datagrams), Err(Error::WrongSocket { .. })));
    assert!(matches!(Forwarder::new(&tcp, tempfile::tempfile().unwrap()), Err(Error::NotASocket)));
}

#[test]
fn an_urgent_byte_neither_ends_nor_stalls_a_direction() {
    let (mut client, mut server, forwarding) = forwarded_pair();
    // Bulk data first, so that the direction splices.
    let mut bulk = vec![0; 2 << 20];
    send_in_thread(&client, &pattern(8, bulk.len()), || server.read_exact(&mut bulk).unwrap());
    rustix::net::send(&client, b"!", rustix::net::SendFlags::OOB).unwrap();
    client.write_all(b"hello").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    server.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"hello");
    drop((client, server));
    forwarding.join().unwrap().0.unwrap();
}

/// A server that refuses an upload sends a response and closes the connection. The response is
/// delivered although the upload fails.
#[test]
fn a_response_that_has_arrived_is_delivered_before_the_error() {
    let ((mut client, from), (to, mut server)) = (tcp_pair(), tcp_pair());
    client.write_all(&vec![1; 50_000]).unwrap();
    server.write_all(b"413 too large").unwrap();
    // Closing with unread data resets the connection, so that the upload fails.
    to.peek(&mut [0]).unwrap();
    (&to).write_all(b"unread").unwrap();
    drop(server);
    let error = Forwarder::new(&from, &to).unwrap().forward().unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    let mut response = [0; 13];
    client.read_exact(&mut response).unwrap();
    assert_eq!(&response, b"413 too large");
}

fn reset(socket: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    drop(socket);
}

/// Forwards until one side has failed, and returns it.
fn failed_side(from: TcpStream, to: TcpStream) -> Option<ForwardSide> {
    let mut forwarder = Forwarder::new(from, to).unwrap();
    assert_eq!(forwarder.failed_side(), None);
    forwarder.forward().unwrap_err();
    forwarder.failed_side()
}

#[test]
fn the_side_that_was_reset_is_the_failed_one() {
    for has_data in [false, true] {
        for failed in [ForwardSide::A, ForwardSide::B] {
            let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
            let (failing, other) = match failed {
                ForwardSide::A => (client, server),
                ForwardSide::B => (server, client),
            };
            if has_data {
                (&other).write_all(&pattern(8, 50_000)).unwrap();
            }
            reset(failing);
            assert_eq!(failed_side(from, to), Some(failed), "has_data: {has_data}");
        }
    }
    // Nothing is received from the second side.
    let ((_client, from), (to, server)) = (tcp_pair(), tcp_pair());
    let mut forwarder = Forwarder::one_way(from, to).unwrap();
    reset(server);
    forwarder.forward().unwrap_err();
    assert_eq!(forwarder.failed_side(), Some(ForwardSide::B));
}

/// A socket whose two streams ended in order does not have a peer any more, like one that was
/// reset.
#[test]
fn a_side_that_has_ended_in_order_is_not_the_failed_one() {
    for failed in [ForwardSide::A, ForwardSide::B] {
        let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
        let (mut ending, ended, failing, failing_peer) = match failed {
            ForwardSide::A => (server, &to, client, &from),
            ForwardSide::B => (client, &from, server, &to),
        };
        for socket in [&from, &to] {
            socket.set_nonblocking(true).unwrap();
        }
        failing.shutdown(Shutdown::Write).unwrap();
        rustix::event::poll(&mut [PollFd::new(failing_peer, PollFlags::RDHUP)], None).unwrap();
        let mut forwarder = Forwarder::new(&from, &to).unwrap();
        forwarder.step().unwrap();
        assert_eq!(ending.read(&mut [0]).unwrap(), 0);
        ending.write_all(&pattern(9, 100)).unwrap();
        drop(ending);
        while ended.peer_addr().is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
        reset(failing);
        forwarder.forward().unwrap_err();
        assert_eq!(forwarder.failed_side(), Some(failed));
    }
}

/// If the sink accepts no bytes, the forwarder keeps the copied bytes, in order.
///
/// The sink is a Unix socket, because that stays full until its peer reads. A full TCP socket
/// accepts more once the bytes in flight are acknowledged, up to 40 ms later.
#[test]
fn copied_bytes_are_kept_while_the_sink_is_full() {
    let ((client, from), (to, server)) = (tcp_pair(), UnixStream::pair().unwrap());
    to.set_nonblocking(true).unwrap();
    from.set_nonblocking(true).unwrap();
    // Fill the sink completely.
    let mut filled = 0;
    while let Ok(count) = (&to).write(&[0; 10_000]) {
        filled += count;
    }
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    (&client).write_all(b"small pieces").unwrap();
    from.peek(&mut [0; 12]).unwrap();
    let Step::Wait { b: sink, a: source } = forwarder.step().unwrap() else { panic!() };
    assert!(sink.write && !source.read, "it must wait for the sink and read no more");
    client.shutdown(Shutdown::Write).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let receiving = thread::spawn(move || {
        let mut received = Vec::new();
        (&server).read_to_end(&mut received).unwrap();
        received
    });
    while forwarder.step().unwrap() != Step::Done {
        thread::sleep(Duration::from_micros(200));
    }
    let received = receiving.join().unwrap();
    assert_eq!((received.len(), &received[filled..]), (filled + 12, &b"small pieces"[..]));
}

/// `forward` restores the sockets' blocking modes, also if both descriptors are one socket.
#[test]
fn blocking_modes_are_restored() {
    let (peer, socket) = tcp_pair();
    drop(peer);
    let duplicate = socket.try_clone().unwrap();
    let _ = Forwarder::new(&socket, &duplicate).unwrap().forward();
    let flags = rustix::fs::fcntl_getfl(&socket).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
}

/// A forked child has the same pipes as its parent. Bytes that one of them puts into a pipe of the
/// pool must not reach the other's connections.
#[test]
fn a_forked_child_does_not_use_the_idle_pipes_of_its_parent() {
    const BYTES: usize = 8 << 20;
    let pool =
        ForwardPool::with_settings(ForwardSettings::default().with_method(ForwardMethod::Splice))
            .unwrap();
    // Leaves two idle pipes.
    assert!(forward_bytes(&pool, 7, 1 << 20));
    assert!(pool.idle_pipes() > 0);
    // The child runs at the same time as the thread of the parent, which begins after the fork.
    let (mut has_forked, mut forked) = UnixStream::pair().unwrap();
    let parent = {
        let pool = pool.clone();
        thread::spawn(move || {
            forked.read_exact(&mut [0]).unwrap();
            (0..8).all(|_| forward_bytes(&pool, 1, BYTES))
        })
    };
    let code = haul_lab_sys::child::in_forked_child(|| {
        has_forked.write_all(b"!").unwrap();
        i32::from(!(0..8).all(|_| forward_bytes(&pool, 2, BYTES)))
    });
    assert_eq!(code.unwrap(), Some(0), "the child received other bytes than it sent");
    assert!(parent.join().unwrap(), "the parent received other bytes than it sent");
}

/// Forwards bytes of one value through a new pair of connections; whether they arrive unchanged.
fn forward_bytes(pool: &ForwardPool, value: u8, len: usize) -> bool {
    let (mut client, client_side) = tcp_pair();
    let (server_side, mut server) = tcp_pair();
    let mut forwarder = Forwarder::with_pool(client_side, server_side, pool.clone()).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            client.write_all(&vec![value; len]).unwrap();
            drop(client);
        });
        let received = scope.spawn(move || {
            let mut bytes = Vec::new();
            server.read_to_end(&mut bytes).unwrap();
            bytes
        });
        forwarder.forward().unwrap();
        let bytes = received.join().unwrap();
        bytes.len() == len && bytes.iter().all(|&byte| byte == value)
    })
}

/// A peer would take a stream that ends in order for a whole one.
#[test]
fn an_aborted_forwarder_resets_the_peer_whose_stream_is_incomplete() {
    let ((client, from), (to, mut server)) = (tcp_pair(), tcp_pair());
    let forwarding = thread::spawn(move || {
        let mut forwarder = Forwarder::new(&from, &to).unwrap();
        let result = forwarder.forward();
        forwarder.abort();
        result
    });
    (&client).write_all(b"the beginning of").unwrap();
    server.read_exact(&mut [0; 16]).unwrap();
    // Without a time to linger, closing resets the connection.
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let failed = forwarding.join().unwrap().unwrap_err();
    assert_eq!(failed.kind(), std::io::ErrorKind::ConnectionReset, "{failed}");
    let error = server.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}
