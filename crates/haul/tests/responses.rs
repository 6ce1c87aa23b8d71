//! Responses: head, file and tail in order, resumed wherever the socket stopped.

use haul::{Error, Memory, Response, Sender};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (from, listener.accept().unwrap().0)
}

fn bytes(random: &mut fastrand::Rng, len: usize) -> Vec<u8> {
    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
}

#[test]
fn a_response_arrives_in_order_however_often_the_socket_stops() {
    let mut random = fastrand::Rng::with_seed(15);
    let (from, to) = connection();
    from.set_nonblocking(true).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&from, 8 << 10).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    let content = bytes(&mut random, 1 << 20);
    file.write_all(&content).unwrap();
    let memory = Memory::new(&content[..], content.len()).unwrap();
    let received = thread::spawn(move || {
        let mut received = Vec::new();
        (&to).read_to_end(&mut received).unwrap();
        received
    });
    let mut sender = Sender::new(from).unwrap();
    let (mut expected, mut stops) = (Vec::new(), 0);
    for number in 0..40 {
        let sizes = [0, 1, 300, 70_000];
        let head = bytes(&mut random, sizes[number % 4]);
        let tail = bytes(&mut random, sizes[number / 4 % 4]);
        let start = random.usize(..content.len());
        let end = if number % 5 == 0 { start } else { random.usize(start..content.len()) };
        let range = start as u64..end as u64;
        let response = if number % 2 == 0 {
            Response::new(&head, &file, range).with_tail(&tail)
        } else {
            Response::new(&head, &memory, range).with_tail(&tail)
        };
        expected.extend([&head[..], &content[start..end], &tail[..]].concat());
        let mut position = 0;
        while let Err(error) = sender.send_response(&response, &mut position) {
            assert!(matches!(error, Error::WouldBlock), "{error}");
            assert!(sender.wants().write);
            stops += 1;
            thread::sleep(Duration::from_micros(200));
        }
        assert_eq!(position, response.total_bytes());
        sender.send_response(&response, &mut u64::MAX.clone()).unwrap();
    }
    drop(sender);
    assert!(received.join().unwrap() == expected);
    assert!(stops > 100, "the socket stopped only {stops} times");
}

/// Without a bound a fast peer would keep an event loop in one call.
#[test]
fn a_response_can_be_sent_in_bounded_parts() {
    const CALL_BYTES_MAX: u64 = 1 << 20;
    let (from, to) = connection();
    let content = vec![7; 16 << 20];
    let memory = Memory::new(&content[..], content.len()).unwrap();
    let received = thread::spawn(move || std::io::copy(&mut &to, &mut std::io::sink()).unwrap());
    let mut sender = Sender::new(from).unwrap();
    let response = Response::new(b"head", &memory, 0..content.len() as u64).with_tail(b"tail");
    let (mut position, mut parts) = (0, 0);
    while position < response.total_bytes() {
        let end = position + (2 << 20);
        sender.send_response_until(&response, &mut position, end).unwrap();
        assert!(position >= end.min(response.total_bytes()) && position < end + CALL_BYTES_MAX);
        parts += 1;
    }
    assert!(parts > 4);
    drop(sender);
    assert_eq!(received.join().unwrap(), (16 << 20) + 8);
}

/// Nagle's algorithm would hold the tail back until the peer has acknowledged the end of the file.
#[test]
fn a_small_response_with_a_tail_is_one_segment() {
    let (from, mut to) = connection();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[b'f'; 100]).unwrap();
    let mut sender = Sender::new(from).unwrap();
    for _ in 0..20 {
        let response = Response::new(b"head", &file, 0..100).with_tail(b"tail");
        sender.send_response(&response, &mut 0).unwrap();
        let mut received = [0; 200];
        assert_eq!(to.read(&mut received).unwrap(), 108, "the first segment has all of it");
    }
}

#[test]
fn a_truncated_file_is_reported_with_what_was_sent() {
    let (from, mut to) = connection();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1000).unwrap();
    let mut sender = Sender::new(from).unwrap();
    let mut position = 0;
    let response = Response::new(b"head", &file, 0..1500).with_tail(b"tail");
    let error = sender.send_response(&response, &mut position).unwrap_err();
    assert!(matches!(error, Error::Ended { at: 1000, .. }), "{error}");
    assert_eq!(position, 1004);
    let is_corked = rustix::net::sockopt::tcp_cork(sender.socket()).unwrap();
    assert!(!is_corked, "later bytes would wait for a tail that does not come");
    let mut received = vec![0; 1004];
    to.read_exact(&mut received).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "the range under test")]
    let error = sender.send_response(&Response::new(b"", &file, 9..2), &mut 0).unwrap_err();
    assert!(matches!(error, Error::InvalidInput(_)), "{error}");
}

/// The head would wait in the socket and be the beginning of the next message.
#[test]
fn a_response_is_not_begun_on_a_datagram_socket() {
    let to = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let from = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    from.connect(to.local_addr().unwrap()).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(100).unwrap();
    let mut sender = Sender::new(from).unwrap();
    let error = sender.send_response(&Response::new(b"head", &file, 0..100), &mut 0).unwrap_err();
    assert!(matches!(error, Error::WrongSocket { .. }), "{error}");
    sender.send(b"message").unwrap();
    let mut received = [0; 100];
    assert_eq!(to.recv(&mut received).unwrap(), 7);
}

/// A header that is sent by itself leaves the rest of the response to Nagle's algorithm, which
/// waits for the acknowledgement that the peer delays.
#[test]
fn a_header_that_more_follows_shares_its_segment() {
    let (client, server) = connection();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 500]).unwrap();
    let mut sender = Sender::new(server).unwrap();
    let segments = || haul_sys::tcp_info::tcp_info(&client).unwrap().segments_in;
    let mut least = u32::MAX;
    // On a busy machine the header may leave alone after 200 ms, or an acknowledgement arrive.
    for _ in 0..20 {
        let before = segments();
        sender.send_more_all(b"header").unwrap();
        sender.send_file_all(&file, 0..500).unwrap();
        (&client).read_exact(&mut [0; 506]).unwrap();
        least = least.min(segments() - before);
        (&client).write_all(b"next").unwrap();
    }
    assert_eq!(least, 1, "segments of a response");
}
