//! Forwarding of what the kernel decrypts (kTLS), up to a record that is not application data:
//! `splice` refuses it with `EINVAL`, and `recv` with `EIO`.

mod sockets;

use haul::{Error, ForwardMethod, ForwardPool, ForwardReport, ForwardSettings, ForwardSide};
use haul::{Forwarder, Receiver};
use haul_sys::ktls::{ContentType, Version, receive, send_record};
use haul_testing::tcp_pair;
use sockets::encrypted_pair;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

/// More than the buffers of the sockets hold.
const LEN: usize = 12 << 20;
/// Alerts: level, and description.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];
const INTERNAL_ERROR: [u8; 2] = [2, 80];
/// The beginning of a message of the handshake with which a server offers to resume the session
/// (RFC 8446 section 4.6.1). The kernel does not look at it.
const NEW_SESSION_TICKET: [u8; 5] = [4, 0, 0, 1, 0];

fn stream(seed: u64) -> Vec<u8> {
    (0..LEN as u64).map(|i| ((i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

/// Sends application data, and then another record, and keeps the connection open.
fn send_then(mut socket: &TcpStream, bytes: &[u8], (content_type, record): (ContentType, &[u8])) {
    socket.write_all(bytes).unwrap();
    // Without blocking: the socket may be full.
    while let Err(error) = send_record(socket, content_type, record) {
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn pool(method: ForwardMethod) -> ForwardPool {
    ForwardPool::with_settings(ForwardSettings::default().with_method(method)).unwrap()
}

/// What left by each way, to the second socket.
fn assert_path(report: &ForwardReport, method: ForwardMethod) {
    let direction = &report.a_to_b;
    assert_eq!(direction.spliced.bytes + direction.copied.bytes, LEN as u64, "{direction:?}");
    let copied_max = match method {
        ForwardMethod::Copy => LEN as u64,
        ForwardMethod::Splice => 0,
        // The first two buffers.
        _ => 1 << 20,
    };
    assert!(direction.copied.bytes <= copied_max, "{direction:?}");
    assert_eq!(direction.spliced.bytes == 0, method == ForwardMethod::Copy, "{direction:?}");
}

const METHODS: [ForwardMethod; 3] =
    [ForwardMethod::Adaptive, ForwardMethod::Copy, ForwardMethod::Splice];

/// The end of the stream is forwarded although the peer leaves its connection open, and the
/// response still arrives.
#[test]
fn the_alert_that_closes_a_stream_is_its_end() {
    for (version, method) in
        [Version::V1_2, Version::V1_3].into_iter().flat_map(|v| METHODS.map(|m| (v, m)))
    {
        let Some((client, from)) = encrypted_pair(version) else { return };
        let (to, mut server) = tcp_pair();
        let forwarding = thread::spawn(move || {
            let mut forwarder = Forwarder::with_pool(from, to, pool(method)).unwrap();
            (forwarder.forward(), forwarder.report())
        });
        thread::scope(|scope| {
            scope.spawn(|| send_then(&client, &stream(1), (ContentType::Alert, &CLOSE_NOTIFY)));
            let mut received = Vec::new();
            server.read_to_end(&mut received).unwrap();
            assert!(received == stream(1), "{version:?} {method:?}");
        });
        server.write_all(b"response").unwrap();
        drop(server);
        let mut response = Vec::new();
        (&client).read_to_end(&mut response).unwrap();
        assert_eq!(response, b"response");
        let (forwarded, report) = forwarding.join().unwrap();
        forwarded.unwrap();
        assert_path(&report, method);
        assert!(report.a_to_b.fallbacks.is_empty(), "{report:?}");
    }
}

/// Everything before the record is delivered, nothing looks like the end of the stream, and the
/// record stays for the program, which continues with what follows it.
#[test]
fn another_record_is_an_error_and_stays_in_the_socket() {
    for method in METHODS {
        for record in [
            (ContentType::Handshake, &NEW_SESSION_TICKET[..]),
            (ContentType::Alert, &INTERNAL_ERROR),
        ] {
            let Some((client, from)) = encrypted_pair(Version::V1_3) else { return };
            let (to, mut server) = tcp_pair();
            let forwarding = thread::spawn(move || {
                let mut forwarder = Forwarder::with_pool(from, to, pool(method)).unwrap();
                let error = forwarder.forward().unwrap_err();
                assert!(matches!(error, Error::Failed { .. }), "{error}");
                assert!(error.to_string().contains("not application data"), "{error}");
                assert_eq!(forwarder.failed_side(), Some(ForwardSide::A));
                assert_path(&forwarder.report(), method);
                assert!(forwarder.report().a_to_b.fallbacks.is_empty());
                let parts = forwarder.into_parts().unwrap();
                assert!(parts.a_to_b.is_empty() && !parts.a_has_ended, "{parts:?}");
                let mut buffer = Vec::with_capacity(100);
                let (content_type, _) = receive(&parts.a, &mut buffer).unwrap();
                assert_eq!((content_type, &buffer[..]), record);
                Forwarder::with_pool(parts.a, parts.b, pool(method)).unwrap().forward().unwrap();
            });
            thread::scope(|scope| {
                scope.spawn(|| {
                    send_then(&client, &stream(2), record);
                    send_then(&client, b"the rest", (ContentType::Alert, &CLOSE_NOTIFY));
                });
                let mut received = Vec::new();
                server.read_to_end(&mut received).unwrap();
                assert!(received[..LEN] == stream(2), "{method:?}");
                assert_eq!(&received[LEN..], b"the rest");
            });
            drop(server);
            forwarding.join().unwrap();
        }
    }
}

#[test]
fn a_receiver_ends_at_the_alert_that_closes_the_stream() {
    for version in [Version::V1_2, Version::V1_3] {
        for into_file in [false, true] {
            let Some((client, from)) = encrypted_pair(version) else { return };
            thread::scope(|scope| {
                scope.spawn(|| send_then(&client, &stream(3), (ContentType::Alert, &CLOSE_NOTIFY)));
                let mut receiver = Receiver::new(from).unwrap();
                let mut received = Vec::new();
                if into_file {
                    let mut file = tempfile::tempfile().unwrap();
                    let mut len = 0;
                    while let count @ 1.. =
                        receiver.receive_into_file(&file, len..u64::MAX).unwrap()
                    {
                        len += count;
                    }
                    std::io::Seek::rewind(&mut file).unwrap();
                    file.read_to_end(&mut received).unwrap();
                } else {
                    receiver.read_to_end(&mut received).unwrap();
                }
                assert!(received == stream(3), "{version:?}, into a file: {into_file}");
                assert!(receiver.report().fallbacks.is_empty(), "{:?}", receiver.report());
            });
        }
    }
}
