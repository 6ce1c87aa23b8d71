//! The host's end of the guest's connections: checks that lent bytes arrive unchanged.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

/// First byte of a connection: the host reads at once.
pub(super) const READ_NOW: u8 = b'R';
/// First byte of a connection: the host reads after [`RELEASE`] has arrived on another connection.
pub(super) const READ_LATER: u8 = b'L';
/// First byte of a connection that carries no data: releases one connection of [`READ_LATER`].
pub(super) const RELEASE: u8 = b'G';

/// Returns the byte of the test stream at `position`.
pub(super) fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Starts serving in the calling thread's network namespace and returns the port, which is the same
/// for TCP and UDP.
pub(super) fn serve() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let port = listener.local_addr()?.port();
    // The namespace is new, so the port is free for UDP too.
    let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    thread::spawn(move || {
        // The socket is never read. It stays open because the host would otherwise answer with an
        // ICMP error (port unreachable), which would fail the guest's next send.
        let _datagrams = datagrams;
        for connection in listener.incoming().flatten() {
            let gate = Arc::clone(&gate);
            thread::spawn(move || {
                // If a connection fails, the guest reports it.
                let _ = handle_connection(connection, &gate);
            });
        }
    });
    Ok(port)
}

/// Reads the stream to its end and replies with the number of bytes before the first that differs
/// from the test stream (a little-endian `u64`).
fn handle_connection(mut connection: TcpStream, gate: &(Mutex<bool>, Condvar)) -> io::Result<()> {
    let mut command = [0];
    connection.read_exact(&mut command)?;
    let (is_released, release) = gate;
    let lock = || is_released.lock().unwrap_or_else(PoisonError::into_inner);
    if command == [RELEASE] {
        *lock() = true;
        release.notify_all();
        return Ok(());
    }
    if command == [READ_LATER] {
        let mut is_released = lock();
        while !*is_released {
            is_released = release.wait(is_released).unwrap_or_else(PoisonError::into_inner);
        }
        // The next connection waits for a separate release.
        *is_released = false;
    }
    let (mut position, mut is_intact) = (0u64, true);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = connection.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        for &byte in &buffer[..count] {
            is_intact = is_intact && byte == byte_at(position);
            position += u64::from(is_intact);
        }
    }
    connection.write_all(&position.to_le_bytes())
}
