//! Connections over loopback, also such whose bytes the kernel encrypts and decrypts (kTLS).

use haul_sys::ktls::{self, Direction, Keys, Version};
use haul_sys::sockopt::set_upper_layer_protocol;
use haul_testing::tcp_pair;
use std::net::TcpStream;

/// Returns both ends of a connection with fixed keys; `None` if the kernel has no
/// TLS. The bytes of the first one are encrypted, and those that the second one receives decrypted.
pub fn encrypted_pair(version: Version) -> Option<(TcpStream, TcpStream)> {
    let (from, to) = tcp_pair();
    for socket in [&from, &to] {
        if let Err(error) = set_upper_layer_protocol(socket, "tls") {
            eprintln!("SKIPPED: kTLS is not tested, this kernel has none: {error}");
            return None;
        }
    }
    let keys = Keys::Aes128Gcm(&[1; 16], &[2; 12]);
    ktls::install(&from, Direction::Transmit, version, keys, 0).unwrap();
    ktls::install(&to, Direction::Receive, version, keys, 0).unwrap();
    Some((from, to))
}
