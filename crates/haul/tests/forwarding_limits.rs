//! Forwarders of one direction, with first bytes, with limits, without descriptors, driven by
//! events, taken apart.

use haul::{
    Error, ForwardMethod, ForwardPool, ForwardReport, ForwardSettings, Forwarder, Readiness, Step,
};
use haul_lab_sys::seccomp;
use haul_testing::tcp_pair;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const READABLE: Readiness = Readiness { read: true, write: false };
const NOTHING: Readiness = Readiness { read: false, write: false };

/// The client's socket, the forwarder's two, and the server's.
fn chain() -> (TcpStream, TcpStream, TcpStream, TcpStream) {
    let ((client, from), (to, server)) = (tcp_pair(), tcp_pair());
    for socket in [&from, &to] {
        socket.set_nonblocking(true).unwrap();
        socket.set_nodelay(true).unwrap();
    }
    (client, from, to, server)
}

/// Waits until so many bytes can be received. On a busy machine a packet arrives late.
fn wait_for_bytes(socket: &TcpStream, bytes: u64) {
    let limit = Instant::now() + Duration::from_secs(60);
    while rustix::io::ioctl_fionread(socket).unwrap() < bytes {
        assert!(Instant::now() < limit, "{bytes} bytes do not arrive");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the end of the stream can be received.
fn wait_for_end(socket: &TcpStream) {
    let mut events = [PollFd::new(socket, PollFlags::RDHUP)];
    let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut events, Some(&limit)).unwrap(), 1, "no end arrives");
}

fn read_all(mut from: &TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    from.read_to_end(&mut received).unwrap();
    received
}

fn pool(settings: ForwardSettings) -> ForwardPool {
    ForwardPool::with_settings(settings).unwrap()
}

/// A sink whose peer has a small window. The overhead of small packets fills the send buffer.
#[test]
fn a_peer_that_does_not_read_costs_little_memory() {
    /// HAProxy's buffer and its state of a connection.
    const MEMORY_BYTES_MAX: usize = 20 << 10;
    for method in [ForwardMethod::Adaptive, ForwardMethod::Splice] {
        let (mut client, from) = tcp_pair();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        set_socket_recv_buffer_size(&listener, 2304).unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _server = listener.accept().unwrap().0;
        for socket in [&from, &to] {
            socket.set_nonblocking(true).unwrap();
        }
        let settings = ForwardSettings::default().with_method(method).with_held_pipes_max(0);
        let mut forwarder = Forwarder::one_way_with_pool(from, to, pool(settings)).unwrap();
        let sending = thread::spawn(move || {
            // The write fails when the test drops the forwarder.
            let _ = client.write_all(&vec![7; 8 << 20]);
        });
        let limit = Instant::now() + Duration::from_secs(60);
        let is_stalled = |step| matches!(step, Step::Wait { b, .. } if b.write);
        let mut stalled_since = None;
        // The server's kernel takes bytes for a moment after the first stall.
        while stalled_since.is_none_or(|since: Instant| since.elapsed().as_millis() < 300) {
            assert!(Instant::now() < limit, "the sink accepts without end");
            if is_stalled(forwarder.step().unwrap()) {
                stalled_since.get_or_insert_with(Instant::now);
            }
            thread::sleep(Duration::from_millis(1));
        }
        let moved = forwarder.report().a_to_b;
        assert!(moved.spliced.bytes > 0, "{moved:?}");
        let parts = forwarder.into_parts().unwrap();
        let held = parts.a_to_b.len();
        assert!(held <= MEMORY_BYTES_MAX, "{method:?}: {held} bytes in memory");
        drop(parts);
        sending.join().unwrap();
    }
}

#[test]
fn one_way_forwards_one_direction_and_leaves_the_other() {
    let (mut client, from, to, mut server) = chain();
    client.write_all(b"to the server").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    server.write_all(b"to nobody").unwrap();
    Forwarder::one_way(&from, &to).unwrap().forward().unwrap();
    assert_eq!(read_all(&server), b"to the server");
    // The other direction was neither read nor ended.
    let mut unread = [0; 9];
    to.set_nonblocking(false).unwrap();
    (&to).read_exact(&mut unread).unwrap();
    assert_eq!(&unread, b"to nobody");
    (&from).write_all(b"still open").unwrap();
    let mut received = [0; 10];
    client.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"still open");
}

#[test]
fn first_bytes_precede_those_that_are_received() {
    let (mut client, from, to, mut server) = chain();
    client.write_all(b" and body").unwrap();
    server.write_all(b" and answer").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let forwarder = Forwarder::new(&from, &to).unwrap();
    let forwarder = forwarder.with_first_bytes_to_b(b"he").unwrap();
    let forwarder = forwarder.with_first_bytes_to_a(b"greeting").unwrap();
    let mut forwarder = forwarder.with_first_bytes_to_b(b"ad").unwrap();
    forwarder.forward().unwrap();
    assert_eq!(read_all(&server), b"head and body");
    assert_eq!(read_all(&client), b"greeting and answer");
    assert_eq!(forwarder.report().a_to_b.copied.bytes, 13);
    let late = forwarder.with_first_bytes_to_b(b"late").unwrap_err();
    assert!(matches!(late, Error::InvalidInput(_)), "{late}");
    let (_client, from, to, _server) = chain();
    let one_way = Forwarder::one_way(&from, &to).unwrap();
    let wrong_way = one_way.with_first_bytes_to_a(b"wrong way").unwrap_err();
    assert!(matches!(wrong_way, Error::InvalidInput(_)), "{wrong_way}");
}

/// The socket that is only sent to reports its failure although nothing is to be sent.
#[test]
fn a_reset_of_the_sink_ends_a_silent_direction() {
    // One direction from the start, and one that is left when the other stream has ended.
    for is_one_way in [true, false] {
        let (client, from, to, mut server) = chain();
        let mut forwarder = if is_one_way {
            Forwarder::one_way(&from, &to).unwrap()
        } else {
            server.shutdown(Shutdown::Write).unwrap();
            Forwarder::new(&from, &to).unwrap()
        };
        thread::scope(|scope| {
            let forwarding = scope.spawn(|| forwarder.forward());
            // Closing with unread data resets the connection.
            (&client).write_all(b"unread").unwrap();
            server.set_nonblocking(false).unwrap();
            assert_eq!(server.peek(&mut [0; 10]).unwrap(), 6);
            if is_one_way {
                server.write_all(b"is not received").unwrap();
            }
            drop(server);
            let error = forwarding.join().unwrap().unwrap_err();
            assert!(matches!(error.raw_os_error(), Some(32 | 104)), "{is_one_way} {error}");
        });
        drop(client);
    }
}

/// The kernel reports the reason of a lost connection only once, to the call that copies the
/// message.
#[test]
fn a_message_for_a_reset_sink_gives_the_error_of_the_reset() {
    let (client, from, to, server) = chain();
    let mut forwarder = Forwarder::one_way(&from, &to).unwrap();
    // Closing with unread data resets the connection.
    (&to).write_all(b"unread").unwrap();
    server.set_nonblocking(false).unwrap();
    assert_eq!(server.peek(&mut [0; 10]).unwrap(), 6);
    drop(server);
    let mut hang_up = [PollFd::new(&to, PollFlags::empty())];
    assert_eq!(rustix::event::poll(&mut hang_up, None), Ok(1));
    (&client).write_all(b"message").unwrap();
    from.set_nonblocking(false).unwrap();
    assert_eq!(from.peek(&mut [0; 10]).unwrap(), 7);
    from.set_nonblocking(true).unwrap();
    let error = forwarder.step().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET), "{error}");
}

/// A small message takes one call to receive and one to send, and an idle direction none.
#[test]
fn a_small_message_takes_two_calls_if_the_readiness_is_known() {
    let (mut client, from, to, mut server) = chain();
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    for number in 0..100u8 {
        client.write_all(&[number; 100]).unwrap();
        let step = forwarder.step_ready(READABLE, NOTHING).unwrap();
        assert_eq!(step, Step::Wait { a: READABLE, b: READABLE });
        let mut received = [0; 100];
        server.read_exact(&mut received).unwrap();
        assert_eq!(received, [number; 100]);
    }
    let report = forwarder.report();
    assert_eq!((report.a_to_b.copied.calls, report.b_to_a.copied.calls), (200, 0));
    // The end of a stream is found by the next step.
    client.shutdown(Shutdown::Write).unwrap();
    forwarder.step_ready(READABLE, NOTHING).unwrap();
    assert_eq!(read_all(&server), b"");
    server.shutdown(Shutdown::Write).unwrap();
    assert_eq!(forwarder.step_ready(NOTHING, READABLE).unwrap(), Step::Done);
}

#[test]
fn a_prepared_message_is_sent_by_the_next_step() {
    let (mut client, from, to, mut server) = chain();
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
    let has_arrived = |server: &TcpStream| {
        server.set_nonblocking(true).unwrap();
        let has_arrived = server.peek(&mut [0]).is_ok();
        server.set_nonblocking(false).unwrap();
        has_arrived
    };
    let before = forwarder.report().a_to_b.copied;
    client.write_all(&[1; 100]).unwrap();
    wait_for_bytes(&from, 100);
    assert!(forwarder.prepare(READABLE, NOTHING));
    assert!(!has_arrived(&server));
    let step = forwarder.step_ready(READABLE, NOTHING).unwrap();
    assert_eq!(step, Step::Wait { a: READABLE, b: READABLE });
    server.read_exact(&mut [0; 100]).unwrap();
    let after = forwarder.report().a_to_b.copied;
    assert_eq!((after.calls - before.calls, after.bytes - before.bytes), (2, 100));
    // Bytes that arrive after a message was prepared are received as well.
    client.write_all(&[1; 100]).unwrap();
    wait_for_bytes(&from, 100);
    assert!(forwarder.prepare(READABLE, NOTHING));
    client.write_all(&[1; 200]).unwrap();
    wait_for_bytes(&from, 200);
    forwarder.prepare(READABLE, NOTHING);
    forwarder.step_ready(READABLE, NOTHING).unwrap();
    server.read_exact(&mut [0; 300]).unwrap();
    // A larger message does not wait for the step.
    client.write_all(&[2; 5000]).unwrap();
    wait_for_bytes(&from, 5000);
    assert!(!forwarder.prepare(READABLE, NOTHING));
    server.peek(&mut [0]).unwrap();
    forwarder.step_ready(READABLE, NOTHING).unwrap();
    server.read_exact(&mut [0; 5000]).unwrap();
    // Nothing has arrived, and then the end.
    assert!(!forwarder.prepare(READABLE, READABLE));
    forwarder.step_ready(READABLE, READABLE).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    wait_for_end(&from);
    assert!(!forwarder.prepare(READABLE, NOTHING));
    forwarder.step_ready(READABLE, NOTHING).unwrap();
    assert_eq!(read_all(&server), b"");
    // What is prepared is not lost when the forwarder is taken apart.
    server.write_all(&[3; 100]).unwrap();
    wait_for_bytes(&to, 100);
    assert!(forwarder.prepare(NOTHING, READABLE));
    let parts = forwarder.into_parts().unwrap();
    assert_eq!((parts.a_to_b.len(), parts.b_to_a), (0, vec![3; 100]));
}

/// The end of a connection that was reset looks like the end of its stream to the other direction.
#[test]
fn a_failure_of_one_direction_while_preparing_is_no_end_of_the_other() {
    let (client, from, to, server) = chain();
    let mut forwarder = Forwarder::new(&from, &to).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
    // The client resets the connection, and the server has sent something for it.
    (&server).write_all(&[2; 8000]).unwrap();
    let mut arrived = [PollFd::new(&to, PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut arrived, None), Ok(1));
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let mut hang_up = [PollFd::new(&from, PollFlags::empty())];
    assert_eq!(rustix::event::poll(&mut hang_up, None), Ok(1));
    assert!(!forwarder.prepare(NOTHING, READABLE));
    let error = forwarder.step_ready(READABLE, READABLE).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET), "{error}");
    let parts = forwarder.into_parts().unwrap();
    assert!(!parts.a_has_ended, "the stream was cut off");
    drop(server);
}

#[test]
fn a_connection_whose_messages_are_sent_while_preparing_is_not_idle() {
    let (mut client, from, to, mut server) = chain();
    let limit = Duration::from_secs(1);
    let settings = ForwardSettings::default().with_idle_timeout(Some(limit));
    let mut forwarder = Forwarder::with_pool(&from, &to, pool(settings)).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
    let started = Instant::now();
    while started.elapsed() < 2 * limit {
        client.write_all(&[1; 8000]).unwrap();
        assert!(!forwarder.prepare(READABLE, NOTHING));
        forwarder.step_ready(READABLE, NOTHING).unwrap();
        server.read_exact(&mut [0; 8000]).unwrap();
        thread::sleep(limit / 10);
    }
}

/// The kernel reports a failure only once.
#[test]
fn a_failure_while_preparing_is_returned_by_the_next_step() {
    for resets_sink in [false, true] {
        let (client, from, to, server) = chain();
        let mut forwarder = Forwarder::new(&from, &to).unwrap();
        assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
        let (resetting, failed) = if resets_sink { (&server, &to) } else { (&client, &from) };
        (&client).write_all(&[1; 8000]).unwrap();
        rustix::net::sockopt::set_socket_linger(resetting, Some(Duration::ZERO)).unwrap();
        let kept = if resets_sink {
            drop(server);
            Some(client)
        } else {
            drop(client);
            None
        };
        let mut hang_up = [PollFd::new(failed, PollFlags::empty())];
        assert_eq!(rustix::event::poll(&mut hang_up, None), Ok(1));
        assert!(!forwarder.prepare(READABLE, READABLE));
        let error = loop {
            match forwarder.step_ready(READABLE, READABLE) {
                Ok(step) => assert!(matches!(step, Step::Wait { .. } | Step::Yield), "{step:?}"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.raw_os_error(), Some(libc::ECONNRESET), "{resets_sink}: {error}");
        drop(kept);
    }
}

/// The last bytes and the end of the stream are one packet.
#[test]
fn an_end_that_has_arrived_leaves_with_the_bytes_before_it() {
    for (is_known, is_prepared) in [(false, false), (true, false), (true, true)] {
        let (mut client, from, to, server) = chain();
        let mut forwarder = Forwarder::new(&from, &to).unwrap();
        assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
        let packets = || haul_sys::tcp_info::tcp_info(&server).unwrap().segments_in;
        let before = packets();
        client.write_all(&[1; 100]).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut end = [PollFd::new(&from, PollFlags::RDHUP)];
        assert_eq!(rustix::event::poll(&mut end, None), Ok(1));
        forwarder.set_peer_has_ended(is_known, false);
        assert_eq!(is_prepared && forwarder.prepare(READABLE, NOTHING), is_prepared);
        // Without knowing, the first step trusts the short read.
        for _ in 0..if is_known { 1 } else { 2 } {
            forwarder.step_ready(READABLE, NOTHING).unwrap();
        }
        assert_eq!(read_all(&server), [1; 100]);
        assert_eq!(packets() - before, if is_known { 1 } else { 2 });
        drop(client);
    }
}

#[test]
fn two_silent_peers_are_given_up_after_the_idle_limit() {
    let (client, from, to, mut server) = chain();
    let limit = Duration::from_secs(1);
    let settings = ForwardSettings::default().with_idle_timeout(Some(limit));
    let mut forwarder = Forwarder::with_pool(&from, &to, pool(settings)).unwrap();
    // The limit counts from the beginning of the call.
    thread::sleep(limit);
    let started = Instant::now();
    let talking = thread::spawn(move || {
        for _ in 0..8 {
            server.write_all(b"still here").unwrap();
            thread::sleep(Duration::from_millis(50));
        }
        server
    });
    let error = forwarder.forward().unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error}");
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::TimedOut);
    // Eight messages 50 ms apart, then the limit: it counts from the last byte, not the first.
    assert_eq!(forwarder.report().b_to_a.copied.bytes, 8 * 10);
    assert!(started.elapsed() >= limit + Duration::from_millis(300));
    // A caller that goes on has all of the time again.
    let again = Instant::now();
    assert!(matches!(forwarder.forward(), Err(Error::TimedOut(_))));
    assert!(again.elapsed() >= limit);
    from.set_nonblocking(true).unwrap();
    to.set_nonblocking(true).unwrap();
    assert!(matches!(forwarder.step(), Ok(Step::Wait { .. })));
    drop((talking.join().unwrap(), client));
}

#[test]
fn a_half_closed_connection_has_a_limit_of_its_own() {
    let (client, from, to, server) = chain();
    let limit = Duration::from_millis(50);
    let settings = ForwardSettings::default().with_half_closed_timeout(Some(limit));
    let mut forwarder = Forwarder::with_pool(&from, &to, pool(settings)).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
    assert_eq!(forwarder.deadline(), None, "both streams are open");
    // The limit counts from the end of the stream, however long nothing has moved before.
    thread::sleep(limit * 2);
    client.shutdown(Shutdown::Write).unwrap();
    let ended = Instant::now();
    let error = forwarder.forward().unwrap_err();
    assert!(matches!(error, Error::TimedOut(_)), "{error}");
    assert!(ended.elapsed() >= limit);
    assert!(forwarder.deadline().is_some());
    assert_eq!(read_all(&server), b"", "the end of the stream was forwarded before");
}

/// A caller that polls has a deadline in the future, however long the steps ended with `Yield`.
#[test]
fn a_busy_connection_has_its_deadline_ahead() {
    let (client, from, to, server) = chain();
    let limit = Duration::from_millis(100);
    let settings = ForwardSettings::default().with_idle_timeout(Some(limit));
    let mut forwarder = Forwarder::with_pool(&from, &to, pool(settings)).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| while (&client).write_all(&[7; 16 << 10]).is_ok() && !stop.load(Relaxed) {});
        scope.spawn(|| io::copy(&mut &server, &mut io::sink()));
        let end = Instant::now() + limit * 5;
        while Instant::now() < end {
            let before = Instant::now();
            if forwarder.step().unwrap() == Step::Yield {
                assert!(forwarder.deadline().unwrap() >= before + limit);
            }
        }
        stop.store(true, Relaxed);
        client.shutdown(Shutdown::Both).unwrap();
        to.shutdown(Shutdown::Both).unwrap();
    });
}

/// Writes until a socket does not have room, and gets none by an acknowledgement that is late.
fn fill(mut to: &TcpStream) {
    haul_sys::sockopt::set_buffers(to, 64 << 10).unwrap();
    loop {
        let mut accepted = 0;
        while let Ok(count) = to.write(&[0; 8 << 10]) {
            accepted += count;
        }
        if accepted == 0 {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Everything is spliced, and no pipe may hold bytes between steps.
fn without_held_pipes() -> ForwardSettings {
    ForwardSettings::default().with_method(ForwardMethod::Splice).with_held_pipes_max(0)
}

/// A sink without room accepts no bytes, and none are taken from the source; its end is.
#[test]
fn the_end_of_a_stream_is_seen_although_the_sink_has_no_room() {
    let (client, from, to, server) = chain();
    fill(&to);
    let settings = without_held_pipes();
    let mut forwarder = Forwarder::one_way_with_pool(&from, &to, pool(settings)).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { a: READABLE, .. }));
    (&client).write_all(b"unsent").unwrap();
    from.set_nonblocking(false).unwrap();
    assert_eq!(from.peek(&mut [0; 10]).unwrap(), 6);
    from.set_nonblocking(true).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { a: NOTHING, b } if b.write));
    assert_eq!(from.peek(&mut [0; 10]).unwrap(), 6, "they stay in the source");
    let (mut discarded, mut received) = (vec![0; 1 << 20], 0);
    client.shutdown(Shutdown::Write).unwrap();
    server.set_nonblocking(true).unwrap();
    while forwarder.step().unwrap() != Step::Done {
        received += (&server).read(&mut discarded).unwrap_or(0);
    }
    assert!(received > 0);
    // Another one, whose stream ends while the sink is full.
    let (client, from, to, _server) = chain();
    fill(&to);
    let mut forwarder = Forwarder::one_way_with_pool(&from, &to, pool(settings)).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while forwarder.step().unwrap() != Step::Done {
        assert!(Instant::now() < deadline, "the end is not seen");
    }
}

/// What a peer has sent before its reset is not lost, although the other peer does not read.
#[test]
fn what_a_failed_side_has_sent_is_received_although_the_sink_is_full() {
    let (client, from, to, server) = chain();
    // The client does not read.
    fill(&from);
    let settings = without_held_pipes();
    let mut forwarder = Forwarder::with_pool(from, to, pool(settings)).unwrap();
    (&server).write_all(b"response").unwrap();
    let waits = forwarder.step().unwrap();
    assert!(matches!(waits, Step::Wait { a, .. } if a.write), "{waits:?}");
    // It closes with unread bytes, which is a reset; sending to it fails then.
    (&client).write_all(b"request").unwrap();
    while forwarder.step().unwrap() == Step::Yield {}
    drop(server);
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        (&client).write_all(b"more").unwrap();
        let (nothing, readable) = (NOTHING, READABLE);
        if forwarder.step_ready(readable, nothing).is_err() {
            break;
        }
        assert!(Instant::now() < deadline, "the reset is not noticed");
        thread::sleep(Duration::from_millis(1));
    }
    let parts = forwarder.into_parts().unwrap();
    assert_eq!(parts.b_to_a, b"response");
}

/// A shared pool may have a limit for half-closed connections; one direction is not one of them.
#[test]
fn one_way_is_not_half_closed() {
    let (_client, from, to, _server) = chain();
    let settings = ForwardSettings::default().with_half_closed_timeout(Some(Duration::ZERO));
    let mut forwarder = Forwarder::one_way_with_pool(&from, &to, pool(settings)).unwrap();
    assert!(matches!(forwarder.step().unwrap(), Step::Wait { .. }));
    assert_eq!(forwarder.deadline(), None);
    let parts = forwarder.into_parts().unwrap();
    assert!(!parts.a_has_ended && !parts.b_has_ended);
}

/// Ends the threads of a test that send until then, also if the test fails.
struct ShutDownOnDrop<'a>([&'a TcpStream; 2]);

impl Drop for ShutDownOnDrop<'_> {
    fn drop(&mut self) {
        for socket in self.0 {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Length of the sequence that [`send_until`] repeats: no divisor of a buffer's.
const SEQUENCE: usize = 251;

/// Sends 0, 1, 2, …, 250, 0, … until `is_over`, and the end of the stream. Returns the number of
/// bytes.
fn send_until(mut to: &TcpStream, is_over: &AtomicBool) -> io::Result<usize> {
    let bytes: Vec<u8> = (0..SEQUENCE * 400).map(|at| (at % SEQUENCE) as u8).collect();
    let mut sent = 0;
    while !is_over.load(Relaxed) {
        to.write_all(&bytes)?;
        sent += bytes.len();
    }
    to.shutdown(Shutdown::Write)?;
    Ok(sent)
}

/// Receives what [`send_until`] sends, to the end, and slower. Returns the number of bytes.
fn receive_sequence(mut from: &TcpStream) -> usize {
    let (mut received, mut piece) = (0, vec![0; 1 << 16]);
    loop {
        let count = from.read(&mut piece).unwrap();
        let is_next = |(at, &byte): (usize, &u8)| usize::from(byte) == (received + at) % SEQUENCE;
        assert!(piece[..count].iter().enumerate().all(is_next), "other bytes after {received}");
        if count == 0 {
            return received;
        }
        received += count;
        thread::sleep(Duration::from_micros(300));
    }
}

/// A lack of descriptors passes; the connection is then spliced like any other, and the stream is
/// the same.
#[test]
fn splicing_begins_again_after_a_lack_of_descriptors() {
    /// More than the sockets to the server have room for, so that the sink refuses bytes.
    const ENOUGH: u64 = 16 << 20;
    let is_refused = |step| matches!(step, Step::Wait { b, .. } if b.write);
    for method in [ForwardMethod::Adaptive, ForwardMethod::Splice] {
        let (client, from, to, server) = chain();
        set_socket_recv_buffer_size(&server, 256 << 10).unwrap();
        set_socket_send_buffer_size(&to, 256 << 10).unwrap();
        let settings = ForwardSettings::default().with_method(method);
        let mut forwarder = Forwarder::one_way_with_pool(&from, &to, pool(settings)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let _shut_down = ShutDownOnDrop([&client, &to]);
            let sending = scope.spawn(|| send_until(&client, &is_over));
            let receiving = scope.spawn(|| receive_sequence(&server));
            // The filter stays with its thread.
            let without_descriptors = scope.spawn(|| {
                seccomp::refuse(libc::SYS_pipe2, &[], libc::EMFILE).unwrap();
                let is_enough = |report: &ForwardReport| {
                    !report.a_to_b.fallbacks.is_empty() && report.a_to_b.copied.bytes >= ENOUGH
                };
                let mut was_refused = false;
                while !is_enough(&forwarder.report()) && Instant::now() < deadline {
                    was_refused |= is_refused(forwarder.step().unwrap());
                }
                assert!(was_refused, "{method:?}: the sink had room for everything");
                forwarder
            });
            let mut forwarder = without_descriptors.join().unwrap();
            let report = forwarder.report();
            assert_eq!((report.a_to_b.spliced.bytes, report.a_to_b.fallbacks.len()), (0, 1));
            let mut was_refused = false;
            while forwarder.report().a_to_b.spliced.bytes < ENOUGH && Instant::now() < deadline {
                was_refused |= is_refused(forwarder.step().unwrap());
            }
            assert!(was_refused, "{method:?}: the sink had room for everything");
            is_over.store(true, Relaxed);
            while forwarder.step().unwrap() != Step::Done {
                assert!(Instant::now() < deadline, "the stream does not end");
            }
            let report = forwarder.report();
            assert!(report.a_to_b.spliced.bytes >= ENOUGH, "{method:?}: {report:?}");
            // A method that was asked for stays.
            let is_adaptive = method == ForwardMethod::Adaptive;
            assert_eq!(report.a_to_b.changes > 0, is_adaptive, "{report:?}");
            let sent = sending.join().unwrap().unwrap();
            assert_eq!(receiving.join().unwrap(), sent);
            assert_eq!(report.a_to_b.spliced.bytes + report.a_to_b.copied.bytes, sent as u64);
        });
    }
}

/// A read from a Unix socket ends where descriptors were sent, although more bytes have arrived.
#[test]
fn bytes_behind_a_descriptor_that_a_unix_socket_passes_are_forwarded() {
    for method in [ForwardMethod::Adaptive, ForwardMethod::Copy, ForwardMethod::Splice] {
        let ((client, from), (to, mut server)) = (UnixStream::pair().unwrap(), tcp_pair());
        from.set_nonblocking(true).unwrap();
        to.set_nonblocking(true).unwrap();
        let settings = ForwardSettings::default().with_method(method);
        let mut forwarder = Forwarder::with_pool(&from, &to, pool(settings)).unwrap();
        for message in [b"one", b"two"] {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [client.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            let bytes = [IoSlice::new(message)];
            rustix::net::sendmsg(&client, &bytes, &mut control, SendFlags::empty()).unwrap();
        }
        forwarder.step_ready(READABLE, NOTHING).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut received = [0; 6];
        server.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"onetwo", "{method:?}");
        let report = forwarder.report().a_to_b;
        let is_spliced = method == ForwardMethod::Splice;
        let expected = if is_spliced { (6, 0) } else { (0, 6) };
        assert_eq!((report.spliced.bytes, report.copied.bytes), expected, "{method:?}");
    }
}

/// Neither the bytes in the pipe nor those in the buffer are lost.
#[test]
fn a_forwarder_can_be_taken_apart_and_continued_with_no_byte_lost() {
    for method in [ForwardMethod::Copy, ForwardMethod::Splice] {
        let (client, from, to, server) = chain();
        let settings = ForwardSettings::default().with_method(method);
        let bytes: Vec<u8> = (0..20_000_000u32).map(|number| (number / 7) as u8).collect();
        let sending = thread::spawn({
            let bytes = bytes.clone();
            move || {
                (&client).write_all(&bytes).unwrap();
                client.shutdown(Shutdown::Write).unwrap();
                client
            }
        });
        let mut forwarder = Forwarder::with_pool(from, to, pool(settings)).unwrap();
        // The server does not read yet: the forwarder is left with bytes that it cannot send.
        while !matches!(forwarder.step().unwrap(), Step::Wait { b, .. } if b.write) {
            thread::yield_now();
        }
        let parts = forwarder.into_parts().unwrap();
        // A pipe takes only what the sink has room for.
        assert!(method == ForwardMethod::Splice || !parts.a_to_b.is_empty());
        assert!(parts.b_to_a.is_empty(), "{method:?}");
        assert!(!parts.a_has_ended && !parts.b_has_ended);
        let received = thread::spawn(move || {
            let received = read_all(&server);
            server.shutdown(Shutdown::Both).unwrap();
            received
        });
        let continued = Forwarder::with_pool(parts.a, parts.b, pool(settings)).unwrap();
        continued.with_first_bytes_to_b(&parts.a_to_b).unwrap().forward().unwrap();
        assert!(received.join().unwrap() == bytes, "{method:?}");
        drop(sending.join().unwrap());
    }
}
