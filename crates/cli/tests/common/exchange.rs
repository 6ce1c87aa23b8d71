//! An exchange between a client and its server.

use std::io::{Read, Write};
use std::net::TcpStream;

/// Sends a byte in each direction.
pub fn exchange(client: &TcpStream, server: &TcpStream) {
    for (mut from, mut to) in [(client, server), (server, client)] {
        from.write_all(b"x").unwrap();
        to.read_exact(&mut [0]).unwrap();
    }
}
