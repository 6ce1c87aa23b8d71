//! What the tests of several crates share. Every function panics if it fails, as a test does.
//!
//! This crate depends on the standard library only, so that the lowest crates can use it in their
//! tests.

#![forbid(unsafe_code)]
#![expect(clippy::missing_panics_doc, reason = "every function panics if it fails")]

pub mod programs;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The longest wait for another thread, program or packet. It ends a test that would never end, and
/// is far above every wait on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(120);
/// The pause between two looks at a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Waits until another thread, a program or the kernel meets a condition. Panics with the
/// description of the condition after [`LIMIT`].
#[track_caller]
pub fn wait_until(condition: &str, mut is_met: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_met() {
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {condition}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Both ends of a TCP connection over IPv4 loopback: the connecting one first.
pub fn tcp_pair() -> (TcpStream, TcpStream) {
    tcp_pair_over((Ipv4Addr::LOCALHOST, 0).into())
}

/// Both ends of a TCP connection over a local address. The port of the address may be 0.
pub fn tcp_pair_over(address: SocketAddr) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(address).unwrap();
    let connecting = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let own_address = connecting.local_addr().unwrap();
    loop {
        // Any process of this machine can connect to the listener.
        let (accepted, peer) = listener.accept().unwrap();
        if peer == own_address {
            return (connecting, accepted);
        }
    }
}

/// Bytes that depend on their position and on `seed`, so that lost, repeated and swapped pieces are
/// noticed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let byte = |position: u64| {
        ((position + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56).to_le_bytes()[0]
    };
    (0..len as u64).map(byte).collect()
}

/// Reads a stream to its end on a new thread, which returns the bytes.
pub fn receive_all(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut received = Vec::new();
        from.read_to_end(&mut received).unwrap();
        received
    })
}

/// Sends a byte from the client to the server, and another byte back.
pub fn exchange(client: &TcpStream, server: &TcpStream) {
    for (mut from, mut to, byte) in [(client, server, b"?"), (server, client, b"!")] {
        from.write_all(byte).unwrap();
        let mut received = [0];
        to.read_exact(&mut received).unwrap();
        assert_eq!(&received, byte);
    }
}
