//! Every byte of both streams arrives, once and in order, by the expected method.

use crate::common::{Proxy, accept, lab, listen, pattern, start_proxy, upstream};
use haul_lab::{Lab, Settings};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

fn read_all(mut from: &TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    from.read_to_end(&mut received).unwrap();
    received
}

fn write_all_and_end(mut to: &TcpStream, bytes: &[u8]) {
    to.write_all(bytes).unwrap();
    to.shutdown(Shutdown::Write).unwrap();
}

#[test]
fn bulk_data_is_spliced_in_both_directions() {
    splice_bulk_data(lab(), 64 << 20);
}

/// Each packet is a segment of 1448 bytes, so that a pipe of 256 KiB is full at 91 KiB.
#[test]
fn bulk_data_of_single_segments_is_spliced() {
    let lab = Lab::open(&Settings::default().with_mtu(1500)).unwrap();
    lab.set_segmentation_both(false).unwrap();
    splice_bulk_data(lab, 16 << 20);
}

/// As on a network with a round trip of 20 ms.
#[test]
fn over_a_long_path_bulk_data_is_spliced_and_small_messages_are_copied() {
    for has_segmentation in [true, false] {
        let mtu = if has_segmentation { 9000 } else { 1500 };
        let far_lab = || {
            let lab = Lab::open(&Settings::default().with_mtu(mtu)).unwrap();
            lab.set_segmentation_both(has_segmentation).unwrap();
            delay(&lab, "10ms").then_some(lab)
        };
        let Some(lab) = far_lab() else { return };
        // The first bytes arrive in small pieces, which are copied.
        splice_bulk_data(lab, 64 << 20);
        let Some(lab) = far_lab() else { return };
        copy_small_messages(lab, 20);
    }
}

/// Delays all packets of both hosts; false where the kernel cannot (`sch_netem`).
fn delay(lab: &Lab, time: &str) -> bool {
    [&lab.sender, &lab.receiver].into_iter().all(|host| {
        let mut tc = Command::new("tc");
        tc.args(["qdisc", "replace", "dev", host.device(), "root", "netem", "delay", time]);
        // More than the default of 1000 packets are under way.
        tc.args(["limit", "100000"]);
        let output = host.run(|| tc.output()).unwrap().unwrap();
        if !output.status.success() {
            eprintln!("SKIPPED: no long path: {}", String::from_utf8_lossy(&output.stderr));
        }
        output.status.success()
    })
}

/// Sends so many bytes in both directions at a time, which are spliced but for one percent.
fn splice_bulk_data(lab: Lab, len: usize) {
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [upstream(&listener)], |_| {});
    let client = proxy.connect();
    let server = accept(&listener);
    thread::scope(|scope| {
        scope.spawn(|| write_all_and_end(&client, &pattern(1, len)));
        scope.spawn(|| write_all_and_end(&server, &pattern(2, len)));
        scope.spawn(|| assert!(read_all(&client) == pattern(2, len)));
        scope.spawn(|| assert!(read_all(&server) == pattern(1, len)));
    });
    let log = proxy.finish();
    assert_eq!(log.len(), 1);
    assert_eq!(log[0]["end"], "complete", "{log:?}");
    for direction in ["to_upstream", "to_client"] {
        let bytes = |method: &str| log[0][direction][method].as_u64().unwrap();
        let (spliced, copied) = (bytes("spliced_bytes"), bytes("copied_bytes"));
        assert_eq!(spliced + copied, len as u64);
        assert!(spliced * 100 >= len as u64 * 99, "{log:?}");
    }
    let line = &log[0];
    let number = |field: &str| line[field].as_f64().unwrap();
    assert!(number("splice_us") > 0.0 && number("splice_us") <= number("loop_us"), "{line}");
    assert!(number("connect_ms") <= number("first_byte_ms"), "{line}");
    assert!(number("first_byte_ms") <= number("duration_ms"), "{line}");
    for peer in ["client_tcp", "upstream_tcp"] {
        assert!(line[peer]["rtt_us"].as_u64().unwrap() > 0, "{line}");
        assert!(line[peer]["retransmitted_segments"].is_u64(), "{line}");
    }
}

#[test]
fn small_messages_are_copied_and_arrive_one_by_one() {
    copy_small_messages(lab(), 1000);
}

fn copy_small_messages(lab: Lab, count: u32) {
    let listener = listen(&lab);
    let proxy = Proxy::start(lab, [upstream(&listener)], |_| {});
    let mut client = proxy.connect();
    let mut server = accept(&listener);
    for number in 0..count {
        let mut received = [0; 100];
        client.write_all(&[number as u8; 100]).unwrap();
        server.read_exact(&mut received).unwrap();
        assert_eq!(received, [number as u8; 100]);
        server.write_all(&[!number as u8; 100]).unwrap();
        client.read_exact(&mut received).unwrap();
        assert_eq!(received, [!number as u8; 100]);
    }
    drop((client, server));
    let log = proxy.finish();
    assert_eq!(log[0]["to_upstream"]["copied_bytes"], 100 * count, "{log:?}");
    assert_eq!(log[0]["to_client"]["copied_bytes"], 100 * count, "{log:?}");
    assert!(log[0]["copy_us"].as_u64().unwrap() > 0 && log[0]["splice_us"] == 0, "{log:?}");
}

/// The response of a server that waits for the end of the request is not lost.
#[test]
fn a_half_closed_connection_delivers_the_response() {
    const STREAMS: [(usize, usize); 4] = [(1, 1), (0, 5), (100_000, 3_000_000), (3_000_000, 10)];
    let (proxy, listener) = start_proxy(|_| {});
    for (request, response) in STREAMS {
        let client = proxy.connect();
        // The client has ended its stream before the upstream is connected.
        let sending = thread::spawn({
            let client = client.try_clone().unwrap();
            move || write_all_and_end(&client, &pattern(1, request))
        });
        let server = accept(&listener);
        assert!(read_all(&server) == pattern(1, request));
        write_all_and_end(&server, &pattern(2, response));
        assert!(read_all(&client) == pattern(2, response));
        sending.join().unwrap();
    }
    let log = proxy.finish();
    assert_eq!(log.len(), STREAMS.len());
    for (line, (request, response)) in log.iter().zip(STREAMS) {
        assert_eq!(line["end"], "complete", "{line}");
        for (direction, len) in [("to_upstream", request), ("to_client", response)] {
            let bytes = |method: &str| line[direction][method].as_u64().unwrap();
            assert_eq!(bytes("spliced_bytes") + bytes("copied_bytes"), len as u64, "{line}");
            assert!(len < 1_000_000 || bytes("spliced_bytes") > len as u64 / 2, "{line}");
            assert!(len > 10 || bytes("spliced_bytes") == 0, "{line}");
        }
    }
}

/// Events are edge-triggered: none may be missed while one side stalls.
#[test]
fn a_reader_that_stalls_receives_every_byte() {
    const LEN: usize = 24 << 20;
    let (proxy, listener) = start_proxy(|_| {});
    let mut client = proxy.connect();
    let server = accept(&listener);
    let sending = thread::spawn(move || write_all_and_end(&server, &pattern(3, LEN)));
    let mut received = Vec::new();
    let mut buffer = vec![0; 100_000];
    for turn in 0.. {
        if turn % 40 == 0 {
            thread::sleep(Duration::from_millis(30));
        }
        match client.read(&mut buffer).unwrap() {
            0 => break,
            count => received.extend_from_slice(&buffer[..count]),
        }
    }
    sending.join().unwrap();
    assert!(received == pattern(3, LEN));
    client.shutdown(Shutdown::Write).unwrap();
    let log = proxy.finish();
    assert_eq!(log[0]["end"], "complete");
    assert!(log[0]["to_client"]["spliced_bytes"].as_u64().unwrap() > LEN as u64 / 2, "{log:?}");
}

/// An urgent byte ends a read early; what follows it is read without another event.
#[test]
fn bytes_after_an_urgent_one_arrive() {
    let (proxy, listener) = start_proxy(|_| {});
    for _ in 0..50 {
        let client = proxy.connect();
        let server = accept(&listener);
        (&client).write_all(b"before").unwrap();
        rustix::net::send(&client, b"!", rustix::net::SendFlags::OOB).unwrap();
        write_all_and_end(&client, b"after");
        let received = read_all(&server);
        let without_urgent: Vec<_> = received.into_iter().filter(|&byte| byte != b'!').collect();
        assert_eq!(without_urgent, b"beforeafter");
    }
    for line in proxy.finish() {
        assert_eq!(line["end"], "complete", "{line}");
        assert_eq!(line["to_upstream"]["spliced_bytes"], 0, "{line}");
    }
}
