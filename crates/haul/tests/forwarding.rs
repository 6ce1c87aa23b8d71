//! Forwarding between real sockets: both ways at once, with half-close, by copying and by splicing.

use haul::{Error, ForwardMethod, ForwardPool, ForwardReport, ForwardSettings, Forwarder, Step};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// What a forwarder came to.
type Forwarded = (Result<(), Error>, ForwardReport);

/// A client and a server with a forwarder between them, on a thread of its own.
fn joined() -> (TcpStream, TcpStream, JoinHandle<Forwarded>) {
    let ((client, from), (to, server)) = (pair(), pair());
    let forwarding = thread::spawn(move || {
        let mut forwarder = Forwarder::new(from, to).unwrap();
        (forwarder.forward(), forwarder.report())
    });
    (client, server, forwarding)
}

fn send_all(to: &TcpStream, bytes: Vec<u8>) -> JoinHandle<()> {
    let mut to = to.try_clone().unwrap();
    thread::spawn(move || {
        to.write_all(&bytes).unwrap();
        to.shutdown(Shutdown::Write).unwrap();
    })
}

fn receive_all(from: &TcpStream) -> JoinHandle<Vec<u8>> {
    let mut from = from.try_clone().unwrap();
    thread::spawn(move || {
        let mut received: Vec<u8> = Vec::new();
        from.read_to_end(&mut received).unwrap();
        received
    })
}

#[test]
fn bulk_goes_both_ways_at_once_and_is_spliced() {
    let (client, server, forwarding) = joined();
    let (there, back) = (pattern(1, 24 << 20), pattern(2, 9_999_999));
    let sending = [send_all(&client, there.clone()), send_all(&server, back.clone())];
    let (at_server, at_client) = (receive_all(&server), receive_all(&client));
    assert!(at_server.join().unwrap() == there);
    assert!(at_client.join().unwrap() == back);
    for sending in sending {
        sending.join().unwrap();
    }
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    for (direction, bytes) in [(&report.there, there.len()), (&report.back, back.len())] {
        assert_eq!(direction.spliced.bytes + direction.copied.bytes, bytes as u64);
        assert!(direction.spliced.bytes > 0, "{direction:?}");
    }
}

#[test]
fn one_side_may_end_long_before_the_other() {
    let (client, mut server, forwarding) = joined();
    send_all(&client, b"request".to_vec()).join().unwrap();
    let mut request = Vec::new();
    server.read_to_end(&mut request).unwrap();
    assert_eq!(request, b"request");
    // The client's half is closed all the way through; the answer still comes.
    let answer = pattern(3, 5 << 20);
    let received = receive_all(&client);
    server.write_all(&answer).unwrap();
    drop(server);
    assert!(received.join().unwrap() == answer);
    forwarding.join().unwrap().0.unwrap();
}

#[test]
fn small_messages_are_copied() {
    let (mut client, mut server, forwarding) = joined();
    client.set_nodelay(true).unwrap();
    for round in 0..300u32 {
        let mut message = [0; 4];
        client.write_all(&round.to_le_bytes()).unwrap();
        server.read_exact(&mut message).unwrap();
        server.write_all(&message).unwrap();
        client.read_exact(&mut message).unwrap();
        assert_eq!(u32::from_le_bytes(message), round);
    }
    drop((client, server));
    let (forwarded, report) = forwarding.join().unwrap();
    forwarded.unwrap();
    assert_eq!((report.there.spliced.calls, report.there.changes), (0, 0), "{report:?}");
    assert_eq!((report.there.copied.bytes, report.back.copied.bytes), (1200, 1200));
}

#[test]
fn a_direction_changes_its_way_with_what_comes() {
    let (mut client, mut server, forwarding) = joined();
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
    // To splicing and back, twice.
    assert!(report.there.changes >= 4, "{report:?}");
}

/// By the one way whatever comes, through pipes and buffers of an odd size.
#[test]
fn a_way_that_is_asked_for_is_kept() {
    for (way, is_spliced) in [(ForwardMethod::Copy, false), (ForwardMethod::Splice, true)] {
        let ((client, from), (to, server)) = (pair(), pair());
        let settings =
            ForwardSettings { way, pipe_bytes: 20_000, buffer_bytes: 777, ..Default::default() };
        let pool = ForwardPool::with(settings).unwrap();
        let forwarding = thread::spawn(move || {
            let mut forwarder = Forwarder::with_pool(from, to, pool).unwrap();
            (forwarder.forward(), forwarder.report())
        });
        let bytes = pattern(3, 3_000_001);
        let sending = [send_all(&client, bytes.clone()), send_all(&server, b"small".to_vec())];
        let (at_server, at_client) = (receive_all(&server), receive_all(&client));
        assert!(at_server.join().unwrap() == bytes, "{way:?}");
        assert_eq!(at_client.join().unwrap(), b"small");
        for sending in sending {
            sending.join().unwrap();
        }
        let (result, report) = forwarding.join().unwrap();
        result.unwrap();
        assert_eq!(report.there.changes + report.back.changes, 0);
        let (spliced, copied) = (report.there.spliced.bytes, report.there.copied.bytes);
        // What stands between a socket that was empty a moment ago and its end may still be copied.
        assert!(if is_spliced { spliced > copied } else { spliced == 0 }, "{way:?}: {report:?}");
    }
    let none = ForwardSettings { buffer_bytes: 0, ..Default::default() };
    assert!(matches!(ForwardPool::with(none), Err(Error::Unsuited(_))));
}

fn send_in_thread(to: &TcpStream, bytes: &[u8], meanwhile: impl FnOnce()) {
    thread::scope(|scope| {
        scope.spawn(|| (&mut &*to).write_all(bytes).unwrap());
        meanwhile();
    });
}

#[test]
fn a_sink_that_reads_slowly_loses_nothing() {
    let (client, server, forwarding) = joined();
    let bytes = pattern(5, 12 << 20);
    let sending = send_all(&client, bytes.clone());
    let received = thread::spawn(move || {
        let (mut server, mut received, mut some) = (server, Vec::<u8>::new(), vec![0; 100_001]);
        loop {
            match server.read(&mut some).unwrap() {
                0 => break received,
                count => received.extend(&some[..count]),
            }
            thread::sleep(Duration::from_micros(500));
        }
    });
    assert!(received.join().unwrap() == bytes);
    sending.join().unwrap();
    drop(client);
    forwarding.join().unwrap().0.unwrap();
}

#[test]
fn a_reset_ends_it_with_an_error_and_no_pipe_goes_back_full() {
    let ((client, from), (to, server)) = (pair(), pair());
    let pool = ForwardPool::new(4).unwrap();
    let forwarding = thread::spawn({
        let pool = pool.clone();
        move || Forwarder::with_pool(from, to, pool).unwrap().forward()
    });
    // Fills everything on the way, then closes with unread data, which resets.
    let mut bulk = client.try_clone().unwrap();
    let sending = thread::spawn(move || while bulk.write_all(&[1; 10_000]).is_ok() {});
    thread::sleep(Duration::from_millis(50));
    drop(server);
    let error = forwarding.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    sending.join().unwrap();
    // The next connection through the same pool sees nothing of it. (An empty pipe may lie there: where the reset came while
    // copied bytes were held, there was none in it.)
    let ((client, from), (to, server)) = (pair(), pair());
    let sending = [send_all(&client, pattern(6, 3 << 20)), send_all(&server, Vec::new())];
    let received = receive_all(&server);
    Forwarder::with_pool(from, to, pool.clone()).unwrap().forward().unwrap();
    assert!(received.join().unwrap() == pattern(6, 3 << 20));
    for sending in sending {
        sending.join().unwrap();
    }
    assert_eq!(pool.idle_pipes(), 1);
}

#[test]
fn unix_and_tcp_sockets_are_joined_step_by_step() {
    let ((client, from), (to, mut server)) = (UnixStream::pair().unwrap(), pair());
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    let blocking = forwarder.step().unwrap_err();
    assert!(matches!(blocking, Error::Unsuited(_)), "{blocking}");
    from.set_nonblocking(true).unwrap();
    to.set_nonblocking(true).unwrap();
    let Step::Wait { from: client_side, to: server_side } = forwarder.step().unwrap() else {
        panic!()
    };
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
            Step::Again => {}
            Step::Wait { .. } => thread::sleep(Duration::from_micros(100)),
        }
    }
    sending.join().unwrap().unwrap();
    assert!(received.join().unwrap() == bytes);
    assert_eq!(
        forwarder.report().there.spliced.bytes + forwarder.report().there.copied.bytes,
        2 << 20
    );
}

#[test]
fn what_cannot_be_joined_says_so() {
    let (one, _other) = pair();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    assert!(matches!(Forwarder::new(&one, &datagrams), Err(Error::WrongSocket { .. })));
    assert!(matches!(Forwarder::new(&one, tempfile::tempfile().unwrap()), Err(Error::NotASocket)));
}

#[test]
fn an_urgent_byte_neither_ends_nor_stalls_a_direction() {
    let (mut client, mut server, forwarding) = joined();
    // Bulk first, so that the direction splices.
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

/// A server that refuses an upload answers and hangs up: the answer is delivered although the upload fails.
#[test]
fn an_answer_that_is_there_is_delivered_before_the_error_ends_it() {
    let ((mut client, from), (to, mut server)) = (pair(), pair());
    client.write_all(&vec![1; 50_000]).unwrap();
    server.write_all(b"413 too large").unwrap();
    // Closing with unread data resets, so that the upload has nowhere to go.
    to.peek(&mut [0]).unwrap();
    (&to).write_all(b"unread").unwrap();
    drop(server);
    let error = Forwarder::new(&from, &to).unwrap().forward().unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    let mut answer = [0; 13];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"413 too large");
}

/// A sink that takes nothing while small pieces are copied: what it did not take is kept, in order.
///
/// It is a Unix socket because that stays full until its reader reads. A TCP socket that refused a write takes more
/// when the acknowledgement of what is on its way comes, up to 40 ms later.
#[test]
fn copied_bytes_wait_for_a_full_sink() {
    let ((client, from), (to, server)) = (pair(), UnixStream::pair().unwrap());
    to.set_nonblocking(true).unwrap();
    from.set_nonblocking(true).unwrap();
    // Fill the sink to the brim.
    let mut filled = 0;
    while let Ok(count) = (&to).write(&[0; 10_000]) {
        filled += count;
    }
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    (&client).write_all(b"small pieces").unwrap();
    from.peek(&mut [0; 12]).unwrap();
    let Step::Wait { to: sink, from: source } = forwarder.step().unwrap() else { panic!() };
    assert!(sink.write && !source.read, "it must wait for the sink, and take no more meanwhile");
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

/// The sockets have the modes they had, also where both are one.
#[test]
fn modes_are_given_back() {
    let (one, other) = pair();
    drop(one);
    let again = other.try_clone().unwrap();
    let _ = Forwarder::new(&other, &again).unwrap().forward();
    let flags = rustix::fs::fcntl_getfl(&other).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
}
