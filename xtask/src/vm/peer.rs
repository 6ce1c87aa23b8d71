//! The host's end of the guest's connections: reads what was lent and says whether all of it arrived as it was.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

/// What a connection begins with.
pub(super) const READ_NOW: u8 = b'R';
/// Reads only after somebody has said [`GO`] on a connection of his own.
pub(super) const READ_LATER: u8 = b'L';
pub(super) const GO: u8 = b'G';

/// The stream's byte at a position.
pub(super) fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Serves on the calling thread's network namespace from now on; returns the port, of TCP and of UDP.
pub(super) fn serve() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let port = listener.local_addr()?.port();
    // The namespace is new: the port is free there too.
    let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    thread::spawn(move || {
        // Nobody reads them. What counts is that the guest is not told that nobody is there, which would fail its next send.
        let _datagrams = datagrams;
        for connection in listener.incoming().flatten() {
            let gate = Arc::clone(&gate);
            thread::spawn(move || {
                // A connection that fails is the guest's to report.
                let _ = answer(connection, &gate);
            });
        }
    });
    Ok(port)
}

/// Reads to the end, then answers with how many bytes came as they should, before the first that did not.
fn answer(mut connection: TcpStream, gate: &(Mutex<bool>, Condvar)) -> io::Result<()> {
    let mut command = [0];
    connection.read_exact(&mut command)?;
    let (is_open, opened) = gate;
    let lock = || is_open.lock().unwrap_or_else(PoisonError::into_inner);
    if command == [GO] {
        *lock() = true;
        opened.notify_all();
        return Ok(());
    }
    if command == [READ_LATER] {
        let mut gate = lock();
        while !*gate {
            gate = opened.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        // For the next who waits.
        *gate = false;
    }
    let (mut position, mut is_right) = (0u64, true);
    let mut some = vec![0; 256 << 10];
    loop {
        let count = connection.read(&mut some)?;
        if count == 0 {
            break;
        }
        for &byte in &some[..count] {
            is_right = is_right && byte == byte_at(position);
            position += u64::from(is_right);
        }
    }
    connection.write_all(&position.to_le_bytes())
}
