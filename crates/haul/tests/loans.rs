//! Loans over real sockets: bytes arrive in order, and buffers are returned upon completion only.

use haul::{
    BufferPool, Error, LendError, LoanLimits, LoanOutcome, MethodChoice, Returned, SendMethod,
    SendSettings, Sender,
};
use haul_lab_sys::seccomp;
use haul_sys::sendmsg::{self, SendOptions};
use haul_sys::{error_queue, sockopt};
use haul_testing::{receive_all, tcp_pair, tcp_pair_over, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Time until all completions must have arrived.
const TIMEOUT: Duration = Duration::from_secs(120);

fn connected_datagrams() -> (UdpSocket, UdpSocket) {
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    from.connect(to.local_addr().unwrap()).unwrap();
    to.set_read_timeout(Some(TIMEOUT)).unwrap();
    (from, to)
}

/// Reads from `to` until the socket has accepted all of the latest loan; returns the bytes read.
fn read_until_accepted(sender: &mut Sender<TcpStream>, to: &mut TcpStream) -> usize {
    let (mut buffer, mut count) = (vec![0; 64 << 10], 0);
    // All that was sent may have been read, and its acknowledgement be still to come.
    to.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    while sender.unsent_bytes() > 0 {
        count += to.read(&mut buffer).unwrap_or(0);
        let _ = sender.flush();
    }
    to.set_read_timeout(None).unwrap();
    count
}

/// Returns the bytes of a loan, which differ between loans and between positions.
fn bytes_of(loan: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 251 + i + 31 * loan) as u8).collect()
}

/// Waits until no send is in flight and returns all reclaimed buffers.
fn reclaim_all<S: AsFd + Send + 'static>(sender: &mut Sender<S>) -> Vec<Returned> {
    assert_eq!(sender.wait_for_completions(TIMEOUT).unwrap(), 0);
    sender.reclaim().unwrap().collect()
}

#[test]
fn loans_arrive_and_are_returned_over_ipv4_and_ipv6() {
    for address in
        [SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), SocketAddr::from((Ipv6Addr::LOCALHOST, 0))]
    {
        let (from, to) = tcp_pair_over(address);
        let received = receive_all(to);
        let mut sender = Sender::new(from).unwrap();
        let mut expected: Vec<u8> = Vec::new();
        let mut returned = Vec::new();
        for (loan, len) in [1, 4095, 4096, 100_000, 3 << 20, 5000].into_iter().enumerate() {
            let bytes = bytes_of(loan, len);
            expected.extend(&bytes);
            sender.lend(bytes).unwrap();
            returned.extend(sender.reclaim().unwrap());
        }
        returned.extend(reclaim_all(&mut sender));
        returned.sort_by_key(|loan| loan.id);
        let lens: Vec<usize> = returned.iter().map(|loan| loan.buffer.len()).collect();
        assert_eq!(lens, [1, 4095, 4096, 100_000, 3 << 20, 5000]);
        // On loopback the kernel copies lent buffers and reports it.
        let is_copied = |loan: &Returned| {
            loan.outcome == LoanOutcome::Copied && loan.sent_bytes == loan.buffer.len()
        };
        assert!(returned.iter().all(is_copied));
        let report = sender.report();
        assert_eq!((report.loans.bytes, report.outstanding_loans), (expected.len() as u64, 0));
        assert!(report.fallbacks.iter().any(|f| f.reason.contains("copied")), "{report:?}");
        drop(sender);
        assert!(received.join().unwrap() == expected, "{address}");
    }
}

#[test]
fn bytes_of_all_calls_arrive_in_the_order_of_the_calls() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let mut sender = Sender::new(from).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes_of(9, 50_000)).unwrap();
    let mut expected: Vec<u8> = Vec::new();
    for loan in 0..20 {
        let lent = bytes_of(loan, 30_000);
        expected.extend(&lent);
        sender.lend(lent).unwrap();
        sender.send_all(b"between").unwrap();
        expected.extend(b"between");
        sender.send_file_all(&file, 100..50_000).unwrap();
        expected.extend(&bytes_of(9, 50_000)[100..]);
        let parts = [IoSlice::new(b"one"), IoSlice::new(b""), IoSlice::new(b"two")];
        assert_eq!(sender.send_vectored(&parts).unwrap(), 6);
        expected.extend(b"onetwo");
        sender.reclaim().unwrap().for_each(drop);
    }
    drop(sender);
    assert!(received.join().unwrap() == expected);
}

#[test]
fn a_non_blocking_socket_accepts_a_loan_in_parts_and_limits_loans_in_flight() {
    let (from, to) = tcp_pair();
    from.set_nonblocking(true).unwrap();
    let settings = SendSettings::default()
        .with_limits(LoanLimits::default().with_loans_max(8).with_bytes_max(64 << 20));
    let mut sender = Sender::with_settings(Arc::new(from), settings).unwrap();
    let mut expected: Vec<u8> = Vec::new();
    let mut lent = 0;
    // The peer does not read: the send buffer fills up within a loan, and the next one is refused.
    let refused = loop {
        let bytes = bytes_of(lent, 8 << 20);
        match sender.lend(bytes) {
            Ok(_) => expected.extend(bytes_of(lent, 8 << 20)),
            Err(error) => break error,
        }
        lent += 1;
    };
    assert!(matches!(refused.error, Error::WouldBlock), "{refused}");
    assert!(*refused.buffer == bytes_of(lent, 8 << 20));
    assert!((1..=8).contains(&lent), "{lent}");
    assert!(matches!(sender.send(b"x"), Err(Error::WouldBlock)));
    let received = receive_all(to);
    let deadline = Instant::now() + TIMEOUT;
    while let Err(error) = sender.flush() {
        assert!(matches!(error, Error::WouldBlock) && Instant::now() < deadline, "{error}");
        thread::sleep(Duration::from_micros(200));
    }
    let returned = reclaim_all(&mut sender);
    assert_eq!(returned.len(), lent);
    drop(sender);
    assert!(received.join().unwrap() == expected);
}

#[test]
fn a_blocking_socket_waits_for_completions_at_the_limit() {
    let (from, to) = tcp_pair();
    let pool = BufferPool::new(64 << 10, 100).unwrap();
    let settings = SendSettings::default()
        .with_limits(LoanLimits::default().with_loans_max(3).with_bytes_max(1 << 20));
    let mut sender = Sender::with_settings(from, settings).unwrap();
    let received = receive_all(to);
    for loan in 0..100 {
        let mut buffer = pool.take().unwrap();
        buffer.extend_from_slice(&bytes_of(loan, 64 << 10)).unwrap();
        sender.lend(buffer).unwrap();
        // The limit does not count returned buffers that the caller has not reclaimed.
        assert!(pool.in_use() <= 3 + 100, "{}", pool.in_use());
        sender.reclaim().unwrap().for_each(drop);
        assert!(pool.in_use() <= 3, "{} buffers are in use", pool.in_use());
    }
    drop(sender);
    let expected: Vec<u8> = (0..100).flat_map(|loan| bytes_of(loan, 64 << 10)).collect();
    assert!(received.join().unwrap() == expected);
    wait_until("all buffers are back in the pool", || pool.in_use() == 0);
}

#[test]
fn loans_of_a_dropped_sender_are_kept_until_the_peer_has_read_them() {
    let (from, mut to) = tcp_pair();
    let pool = BufferPool::new(1 << 20, 64).unwrap();
    from.set_nonblocking(true).unwrap();
    let mut sender = Sender::new(from).unwrap();
    while let Ok(mut buffer) = pool.take() {
        buffer.resize(buffer.capacity()).unwrap();
        buffer.fill(7);
        if sender.lend(buffer).is_err() {
            break;
        }
    }
    let read = read_until_accepted(&mut sender, &mut to);
    sender.reclaim().unwrap().for_each(drop);
    let expected = sender.report().loans.bytes as usize - read;
    assert!(pool.in_use() > 0 && sender.report().outstanding_loans == pool.in_use());
    let socket = sender.socket().try_clone().unwrap();
    drop(sender);
    // The timeout closes the connection to a peer that never reads.
    assert_eq!(rustix::net::sockopt::tcp_user_timeout(&socket).unwrap(), 120_000);
    drop(socket);
    // The peer has read nothing: the kernel still needs the pages.
    let in_flight = pool.in_use();
    thread::sleep(Duration::from_millis(50));
    assert_eq!(pool.in_use(), in_flight);
    let received = receive_all(to);
    wait_until("all buffers are returned", || pool.in_use() == 0);
    // The socket is closed after the last completion, which ends the stream.
    let received = received.join().unwrap();
    assert_eq!(received.len(), expected);
    assert!(received.iter().all(|&byte| byte == 7));
}

#[test]
fn a_reset_returns_every_buffer_and_later_calls_fail() {
    let (from, to) = tcp_pair();
    let pool = BufferPool::new(1 << 20, 64).unwrap();
    from.set_nonblocking(true).unwrap();
    let mut sender = Sender::new(from).unwrap();
    while let Ok(mut buffer) = pool.take() {
        buffer.resize(buffer.capacity()).unwrap();
        if sender.lend(buffer).is_err() {
            break;
        }
    }
    // Closing with unread data resets the connection.
    drop(to);
    let deadline = Instant::now() + TIMEOUT;
    let error = loop {
        match sender.lend(vec![1; 10_000]) {
            Ok(_) => {}
            Err(error) if matches!(error.error, Error::WouldBlock) => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => break error,
        }
        assert!(Instant::now() < deadline);
    };
    assert_eq!(error.buffer.len(), 10_000);
    assert!(matches!(error.error, Error::Failed { .. }), "{error}");
    for loan in reclaim_all(&mut sender) {
        assert!(loan.sent_bytes <= loan.buffer.len());
    }
    assert_eq!((pool.in_use(), sender.report().outstanding_loans), (0, 0));
}

#[test]
fn a_loan_is_sent_as_one_datagram_or_as_segments() {
    let (from, to) = connected_datagrams();
    let mut sender = Sender::new(from).unwrap();
    let whole = bytes_of(1, 9000);
    sender.lend(whole.clone()).unwrap();
    let mut datagram = vec![0; 65_536];
    assert_eq!(to.recv(&mut datagram).unwrap(), 9000);
    assert!(datagram[..9000] == whole);
    // More segments than one call can send: 64, then the rest.
    let many = bytes_of(2, 100 * 1000 + 17);
    let id = sender.lend_segments(many.clone(), 1000).unwrap();
    for segment in many.chunks(1000) {
        let len = to.recv(&mut datagram).unwrap();
        assert!(datagram[..len] == *segment);
    }
    let returned = reclaim_all(&mut sender);
    assert_eq!(returned.last().unwrap().id, id);
    // A loan too large for a datagram is refused, and the sender still works.
    let error = sender.lend(vec![0; 70_000]).unwrap_err();
    assert_eq!(error.buffer.len(), 70_000);
    sender.lend(vec![3; 10]).unwrap();
    assert_eq!(to.recv(&mut datagram).unwrap(), 10);
    let file = tempfile::tempfile().unwrap();
    assert!(matches!(sender.send_file(&file, 0..1), Err(Error::WrongSocket { .. })));
}

/// The kernel refuses UDP segmentation offload on a socket without checksums, as it does on some
/// routes and devices. The segments are then sent one by one.
#[test]
fn segments_are_sent_without_segmentation_offload() {
    let (from, to) = connected_datagrams();
    haul_lab_sys::udp::disable_checksums(&from).unwrap();
    let mut sender = Sender::new(from).unwrap();
    let mut datagram = vec![0; 65_536];
    for loan in 0..4 {
        let lent = bytes_of(loan, 70_017);
        sender.lend_segments(lent.clone(), 1000).unwrap();
        for segment in lent.chunks(1000) {
            let len = to.recv(&mut datagram).unwrap();
            assert!(datagram[..len] == *segment);
        }
    }
    let returned = reclaim_all(&mut sender);
    assert_eq!(returned.len(), 4);
    assert!(returned.iter().all(|loan| loan.sent_bytes == 70_017), "{returned:?}");
}

/// On a datagram socket `MSG_MORE` would make one message of two.
#[test]
fn a_datagram_is_sent_at_once_although_more_follows() {
    let (from, to) = connected_datagrams();
    let mut sender = Sender::new(from).unwrap();
    for message in [&b"one"[..], b"two"] {
        assert_eq!(sender.send_more(&[IoSlice::new(message)]).unwrap(), 3);
        let mut datagram = [0; 16];
        assert_eq!(to.recv(&mut datagram).unwrap(), 3);
        assert_eq!(&datagram[..3], message);
    }
}

/// The rest of a loan is sent without waiting for room, so that the timeout holds also on a
/// blocking socket.
#[test]
fn a_wait_for_completions_ends_although_the_peer_reads_nothing() {
    const LOAN_BYTES: usize = 16 << 20;
    let (from, to) = tcp_pair();
    from.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut sender = Sender::new(from).unwrap();
    sender.lend(bytes_of(0, LOAN_BYTES)).unwrap();
    assert!(sender.unsent_bytes() > 0, "the buffers of the sockets took the whole loan");
    sender.socket().set_write_timeout(None).unwrap();
    assert!(sender.wait_for_completions(Duration::from_millis(50)).unwrap() > 0);
    let received = receive_all(to);
    assert_eq!(sender.wait_for_completions(TIMEOUT).unwrap(), 0);
    drop(sender);
    assert!(received.join().unwrap() == bytes_of(0, LOAN_BYTES));
}

#[test]
fn a_unix_stream_copies_loans_and_reports_the_reason() {
    let (from, to) = UnixStream::pair().unwrap();
    let received = receive_all(to);
    let mut sender = Sender::new(from).unwrap();
    sender.lend(bytes_of(0, 300_000)).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes_of(1, 100_000)).unwrap();
    sender.send_file_all(&file, 0..100_000).unwrap();
    assert_eq!(sender.reclaim().unwrap().next().unwrap().outcome, LoanOutcome::Copied);
    assert!(sender.report().fallbacks[0].reason.contains("completion"), "{:?}", sender.report());
    drop(sender);
    assert!(received.join().unwrap() == [bytes_of(0, 300_000), bytes_of(1, 100_000)].concat());
}

#[test]
fn invalid_loans_are_returned_in_the_error_and_the_sender_still_works() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let settings = SendSettings::default()
        .with_limits(LoanLimits::default().with_loans_max(4).with_bytes_max(10_000));
    let mut sender = Sender::with_settings(from, settings).unwrap();
    let empty = sender.lend(Vec::new()).unwrap_err();
    assert!(matches!(empty.error, Error::LoanEmpty), "{empty}");
    let large = sender.lend(vec![0; 10_001]).unwrap_err();
    assert!(
        matches!(large.error, Error::LoanTooLarge { bytes: 10_001, bytes_max: 10_000, .. }),
        "{large}"
    );
    assert_eq!(large.buffer.len(), 10_001);
    assert!(matches!(
        sender.lend_segments(vec![1], 0).unwrap_err().error,
        Error::WrongSocket { .. }
    ));
    // Unaligned, shared and static memory can be lent like whole pages.
    let shared: Arc<[u8]> = bytes_of(1, 5000).into();
    sender.lend(Arc::clone(&shared)).unwrap();
    sender.lend(&b"static"[..]).unwrap();
    let mut returned = reclaim_all(&mut sender);
    returned.sort_by_key(|loan| loan.id);
    assert!(
        format!("{:?}", returned[0].buffer).starts_with("Shared")
            && returned[1].buffer[..] == b"static"[..]
    );
    drop(sender);
    assert!(received.join().unwrap() == [&shared[..], b"static"].concat());
}

#[test]
fn a_descriptor_that_is_no_socket_is_refused() {
    let error = Sender::new(tempfile::tempfile().unwrap()).err().unwrap();
    assert!(matches!(error, Error::NotASocket), "{error}");
}

/// Other code has sent with `MSG_ZEROCOPY` and has read its completions. The kernel's counter goes
/// on from there, whether `SO_ZEROCOPY` was cleared meanwhile or not.
#[test]
fn loans_of_a_socket_that_was_used_before_come_back() {
    for clears_option in [true, false] {
        let (from, to) = tcp_pair();
        let received = receive_all(to);
        sockopt::set_zerocopy(&from, true).unwrap();
        let zerocopy = SendOptions { zerocopy: true, ..Default::default() };
        for _ in 0..3 {
            assert_eq!(
                sendmsg::send(&from, &[IoSlice::new(&[9; 10_000])], zerocopy).unwrap(),
                10_000
            );
        }
        let mut completed = 0;
        while completed < 3 {
            if let Some(completion) = error_queue::next_completion(&from).unwrap() {
                completed = completion.last + 1;
            }
        }
        sockopt::set_zerocopy(&from, !clears_option).unwrap();
        wait_until("the peer has acknowledged all bytes", || {
            sockopt::bytes_to_send(&from).unwrap() == 0
        });
        let mut sender = Sender::new(from).unwrap();
        for loan in 0..8 {
            sender.lend(bytes_of(loan, 100_000)).unwrap();
        }
        assert_eq!(reclaim_all(&mut sender).len(), 8, "cleared: {clears_option}");
        assert!(sender.report().loans.copied_bytes > 0);
        // The completions of another sender on the same socket.
        let from = sender.into_inner().unwrap();
        wait_until("the peer has acknowledged all bytes", || {
            sockopt::bytes_to_send(&from).unwrap() == 0
        });
        let mut sender = Sender::new(from).unwrap();
        for loan in 8..12 {
            sender.lend(bytes_of(loan, 100_000)).unwrap();
        }
        assert_eq!(reclaim_all(&mut sender).len(), 4, "cleared: {clears_option}");
        assert!(sender.report().fallbacks.is_empty(), "{:?}", sender.report());
        drop(sender);
        assert_eq!(received.join().unwrap().len(), 30_000 + 12 * 100_000);
    }
}

/// Other code may have sent with `MSG_ZEROCOPY` and then cleared the option. Its completions, which
/// are still to come, would be taken for completions of the first loan.
#[test]
fn loans_are_copied_while_bytes_of_other_code_are_in_the_socket() {
    let (from, to) = tcp_pair();
    let options = SendOptions { zerocopy: true, ..SendOptions::default() };
    sockopt::set_zerocopy(&from, true).unwrap();
    let bytes = vec![1; 100_000];
    assert_eq!(sendmsg::send(&from, &[IoSlice::new(&bytes)], options).unwrap(), 100_000);
    sockopt::set_zerocopy(&from, false).unwrap();
    let mut sender = Sender::new(from).unwrap();
    sender.lend(vec![2; 100_000]).unwrap();
    assert!(!sender.wants().completion, "the loan was copied");
    assert_eq!(sender.reclaim().unwrap().next().unwrap().outcome, LoanOutcome::Copied);
    assert!(sender.report().fallbacks[0].reason.contains("other code"), "{sender:?}");
    let received = receive_all(to);
    wait_until("the peer has acknowledged all bytes", || {
        sockopt::bytes_to_send(&sender).unwrap() == 0
    });
    sender.lend(vec![3; 100_000]).unwrap();
    assert!(sender.wants().completion, "the loan was lent");
    assert_eq!(reclaim_all(&mut sender).len(), 1);
    drop(sender);
    assert_eq!(received.join().unwrap().len(), 300_000);
}

/// A server sends a head before each body.
#[test]
fn the_senders_own_bytes_in_the_socket_do_not_prevent_loans() {
    let (from, to) = tcp_pair();
    sockopt::set_zerocopy(&from, true).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[2; 10_000]).unwrap();
    let mut sender = Sender::new(from).unwrap();
    sender.send_all(&[1; 10_000]).unwrap();
    sender.send_file_all(&file, 0..10_000).unwrap();
    sender.lend(vec![3; 100_000]).unwrap();
    assert!(sender.wants().completion && sender.report().fallbacks.is_empty(), "{sender:?}");
    let received = receive_all(to);
    assert_eq!(reclaim_all(&mut sender).len(), 1);
    drop(sender);
    assert_eq!(received.join().unwrap().len(), 120_000);
}

#[test]
fn a_call_sends_at_most_1024_parts() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let mut sender = Sender::new(from).unwrap();
    let parts = vec![IoSlice::new(b"ab"); 1500];
    assert_eq!(sender.send_vectored(&parts).unwrap(), 2048);
    assert_eq!(sender.write_vectored(&parts).unwrap(), 2048);
    drop(sender);
    assert_eq!(received.join().unwrap().len(), 4096);
}

/// The loan limit gives `LoanLimit`, not `WouldBlock`: waiting for `POLLOUT` would not help.
#[test]
fn the_loan_limit_and_a_full_send_buffer_give_different_errors() {
    let (from, to) = tcp_pair();
    from.set_nonblocking(true).unwrap();
    let limits = LoanLimits::default().with_loans_max(2).with_bytes_max(1 << 20);
    let settings = SendSettings::default().with_limits(limits).with_zerocopy_bytes_min(0);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    sender.lend(vec![1; 100]).unwrap();
    sender.lend(vec![2; 100]).unwrap();
    // On loopback completions arrive at once, so the third loan is accepted. The returned buffers
    // wait in the sender.
    sender.lend(vec![3; 100]).unwrap();
    assert!(sender.has_returned_buffers());
    assert_eq!(reclaim_all(&mut sender).len(), 3);
    // With a full send buffer a loan is sent in part, and the next one is refused.
    let error = loop {
        match sender.lend(vec![4; 1 << 20]) {
            Ok(_) => sender.reclaim().unwrap().for_each(drop),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.error, Error::WouldBlock | Error::LoanLimit), "{error}");
    let unsent = sender.unsent_bytes();
    assert!(
        matches!(error.error, Error::LoanLimit) || unsent > 0,
        "{error} with {unsent} unsent bytes"
    );
    // `wait_for_completions` counts the unsent part of a loan, and sends it once the socket accepts
    // it.
    assert!(sender.wait_for_completions(Duration::from_millis(20)).unwrap() > 0);
    let mut sender = sender.into_inner().unwrap_err();
    let received = receive_all(to);
    assert_eq!(sender.wait_for_completions(TIMEOUT).unwrap(), 0);
    sender.reclaim().unwrap().for_each(drop);
    let bytes = sender.report().loans.bytes;
    // Without loans in flight the sender gives the socket back.
    drop(sender.into_inner().unwrap());
    assert_eq!(received.join().unwrap().len() as u64, bytes);
}

#[test]
fn invalid_arguments_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(
        Sender::new(listener),
        Err(Error::WrongSocket { found: "a listening one", .. })
    ));
    let (from, _to) = tcp_pair();
    let floor = SendSettings::default().with_choice(MethodChoice::Method(SendMethod::Floor));
    let error = Sender::with_settings(from.try_clone().unwrap(), floor).unwrap_err();
    assert!(error.to_string().contains("other bytes"), "{error}");
    let mut sender = Sender::new(from).unwrap();
    let file = tempfile::tempfile().unwrap();
    let (start, end) = (10, 5);
    assert!(matches!(sender.send_file(&file, start..end), Err(Error::InvalidInput(_))));
    let error = sender.send_file_all(&file, start..end).unwrap_err();
    assert!(matches!(error.error, Error::InvalidInput(_)), "{error}");
    assert!(matches!(sender.send_file(&file, 5..10), Err(Error::Ended { at: 5, .. })));
}

/// If a loan was sent in part, every next call sends the rest of it first.
#[test]
fn the_rest_of_a_loan_is_sent_before_anything_else() {
    for next in 0..3 {
        let (from, to) = tcp_pair();
        from.set_nonblocking(true).unwrap();
        let mut sender = Sender::new(from).unwrap();
        let lent = bytes_of(1, 16 << 20);
        sender.lend(lent.clone()).unwrap();
        assert!(sender.unsent_bytes() > 0, "the socket accepted the whole loan");
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"after").unwrap();
        let send = |sender: &mut Sender<TcpStream>| match next {
            0 => sender.send(b"after").map(|_| ()),
            1 => sender.send_file(&file, 0..5).map(|_| ()),
            _ => sender.lend(b"after").map(|_| ()).map_err(Error::from),
        };
        assert!(matches!(send(&mut sender), Err(Error::WouldBlock)));
        let received = receive_all(to);
        let deadline = Instant::now() + TIMEOUT;
        while let Err(error) = send(&mut sender) {
            assert!(matches!(error, Error::WouldBlock | Error::LoanLimit), "{error}");
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_micros(200));
            sender.reclaim().unwrap().for_each(drop);
        }
        drop(sender);
        assert!(received.join().unwrap() == [&lent[..], b"after"].concat(), "{next}");
    }
}

#[test]
fn the_method_zerocopy_is_not_used_after_loans() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let settings = SendSettings::default().with_choice(MethodChoice::Method(SendMethod::Zerocopy));
    let mut sender = Sender::with_settings(from, settings).unwrap();
    for _ in 0..3 {
        sender.lend(vec![1; 1 << 20]).unwrap();
    }
    assert_eq!(sender.wait_for_completions(TIMEOUT).unwrap(), 0);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![2; 100_000]).unwrap();
    sender.send_file_all(&file, 0..100_000).unwrap();
    // A timeout beyond the range of the clock means no timeout.
    assert_eq!(sender.wait_for_completions(Duration::MAX).unwrap(), 0);
    assert!(
        sender.report().files.iter().all(|(method, _)| *method != SendMethod::Zerocopy),
        "{sender:?}"
    );
    drop(sender);
    assert_eq!(received.join().unwrap().len(), (3 << 20) + 100_000);
}

#[test]
fn loans_are_copied_after_the_method_zerocopy_was_used() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let settings = SendSettings::default().with_choice(MethodChoice::Method(SendMethod::Zerocopy));
    let mut sender = Sender::with_settings(from, settings).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![2; 100_000]).unwrap();
    sender.send_file_all(&file, 0..100_000).unwrap();
    sender.lend(vec![1; 100_000]).unwrap();
    assert_eq!(sender.reclaim().unwrap().next().unwrap().outcome, LoanOutcome::Copied);
    assert!(sender.report().fallbacks[0].reason.contains("belong to the method"), "{sender:?}");
    assert_eq!(sender.wait_for_completions(TIMEOUT).unwrap(), 0);
    drop(sender);
    assert_eq!(received.join().unwrap().len(), 200_000);
}

#[test]
fn a_failed_datagram_does_not_affect_other_loans() {
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    from.connect(to.local_addr().unwrap()).unwrap();
    to.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut sender = Sender::new(from).unwrap();
    // The loan is too large for a datagram, so both the zero-copy send and the plain send fail.
    let refused = sender.lend(vec![1; 70_000]).unwrap_err();
    assert_eq!(refused.buffer.len(), 70_000);
    let mut datagram = vec![0; 70_000];
    for loan in 0..20 {
        sender.lend(bytes_of(loan, 9000)).unwrap();
        assert_eq!(to.recv(&mut datagram).unwrap(), 9000);
        assert!(datagram[..9000] == bytes_of(loan, 9000));
    }
    assert_eq!(reclaim_all(&mut sender).len(), 20);
    let (one, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let refused = Sender::new(one).unwrap().lend_segments(vec![1; 3000], 1000).unwrap_err();
    assert!(matches!(refused.error, Error::WrongSocket { .. }), "{refused}");
    let none = SendSettings::default()
        .with_limits(LoanLimits::default().with_loans_max(0).with_bytes_max(1));
    assert!(matches!(Sender::with_settings(tcp_pair().0, none), Err(Error::InvalidInput(_))));
}

/// A filter may make `setsockopt` succeed without an effect. The kernel then ignores
/// `MSG_ZEROCOPY` and reports no completion.
#[test]
fn loans_are_copied_where_so_zerocopy_cannot_be_set() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    // The filter stays with its thread.
    let lending = thread::spawn(move || {
        let option = [(1, libc::SOL_SOCKET), (2, libc::SO_ZEROCOPY)];
        seccomp::refuse(libc::SYS_setsockopt, &option, 0).unwrap();
        let mut sender = Sender::new(from).unwrap();
        sender.lend(bytes_of(1, 100_000)).unwrap();
        assert_eq!(sender.reclaim().unwrap().next().unwrap().outcome, LoanOutcome::Copied);
        assert!(sender.report().fallbacks[0].reason.contains("no effect"), "{sender:?}");
    });
    lending.join().unwrap();
    assert!(received.join().unwrap() == bytes_of(1, 100_000));
}

/// Loans that cannot pay are copied before the call returns: they wait for no completion.
#[test]
fn a_loan_of_less_than_10_kib_is_copied_at_once() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let mut sender = Sender::new(from).unwrap();
    sender.lend(vec![1; (10 << 10) - 1]).unwrap();
    assert!(sender.has_returned_buffers() && !sender.wants().completion);
    sender.reclaim().unwrap().for_each(drop);
    sender.lend(vec![1; 10 << 10]).unwrap();
    assert!(!sender.has_returned_buffers() && sender.wants().completion);
    assert_eq!(reclaim_all(&mut sender).len(), 1);
    drop(sender);
    assert_eq!(received.join().unwrap().len(), (20 << 10) - 1);
}

/// The error of a plain send is not reported as one of a zero-copy send, which the kernel may
/// refuse for other reasons.
#[test]
fn the_error_of_a_copied_loan_names_the_plain_send() {
    let (from, to) = UnixStream::pair().unwrap();
    drop(to);
    let refused = Sender::new(from).unwrap().lend(vec![1; 100_000]).unwrap_err();
    assert!(refused.error.to_string().starts_with("send: "), "{refused}");
}

/// Waits until the socket has an error or a completion. Completions come with the same event.
fn wait_for_error(sender: &Sender<UdpSocket>) {
    let mut events = [PollFd::new(sender, PollFlags::empty())];
    let limit = Timespec { tv_sec: 120, tv_nsec: 0 };
    assert_eq!(poll(&mut events, Some(&limit)).unwrap(), 1, "no error arrived");
}

/// A message to a closed port makes a later call fail, which the kernel reports once.
#[test]
fn a_loan_reports_that_the_peer_was_closed_and_later_loans_are_sent() {
    let (from, to) = connected_datagrams();
    let address = to.local_addr().unwrap();
    let settings = SendSettings::default().with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    sender.lend(bytes_of(0, 20_000)).unwrap();
    assert_eq!(to.recv(&mut vec![0; 30_000]).unwrap(), 20_000);
    assert_eq!(reclaim_all(&mut sender).len(), 1);
    drop(to);
    let refused = Errno::CONNREFUSED.raw_os_error();
    for _ in 0..3 {
        sender.send_all(b"refused").unwrap();
        wait_for_error(&sender);
        let LendError { error, buffer, .. } = sender.lend(bytes_of(1, 20_000)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(refused), "{error}");
        assert_eq!(buffer.len(), 20_000);
        // Nothing is pending now, so this loan is sent, and refused by the peer.
        sender.lend(bytes_of(1, 20_000)).unwrap();
        wait_for_error(&sender);
        let error = sender.send_all(b"x").unwrap_err();
        assert_eq!(error.error.raw_os_error(), Some(refused), "{error}");
    }
    let to = UdpSocket::bind(address).unwrap();
    to.set_read_timeout(Some(TIMEOUT)).unwrap();
    reclaim_all(&mut sender);
    for loan in 1..4 {
        sender.lend(bytes_of(loan, 20_000)).unwrap();
        let mut datagram = vec![0; 30_000];
        assert_eq!(to.recv(&mut datagram).unwrap(), 20_000);
        assert!(datagram[..20_000] == bytes_of(loan, 20_000));
        assert_eq!(reclaim_all(&mut sender).len(), 1);
    }
    assert!(sender.report().fallbacks.is_empty(), "{:?}", sender.report());
}
