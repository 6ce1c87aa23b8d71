//! Lends a buffer that is sent as many datagrams: one call, segmented by the device or the kernel.
//!
//!     cargo run -p haul --example datagrams -- HOST:PORT

#![forbid(unsafe_code)]

use haul::{BufferPool, Sender};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::Duration;

/// The payload of an Ethernet packet after the headers of IPv6 and UDP.
const SEGMENT_BYTES: u16 = 1452;

fn main() {
    let Some(address) = std::env::args().nth(1) else {
        eprintln!("usage: datagrams HOST:PORT");
        std::process::exit(2);
    };
    if let Err(error) = send(&address) {
        eprintln!("sending datagrams to {address}: {error}");
        std::process::exit(1);
    }
}

fn send(address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let peer = address.to_socket_addrs()?.next().ok_or("the name has no address")?;
    let unspecified = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(unspecified.parse::<SocketAddr>()?)?;
    socket.connect(peer)?;
    let mut sender = Sender::new(socket)?;
    let mut buffer = BufferPool::new(40 * usize::from(SEGMENT_BYTES), 1)?.take()?;
    buffer.resize(buffer.capacity())?;
    for (number, segment) in buffer.chunks_mut(SEGMENT_BYTES.into()).enumerate() {
        segment.fill(number as u8);
    }
    sender.lend_segments(buffer, SEGMENT_BYTES)?;
    let in_flight = sender.wait_for_completions(Duration::from_secs(1))?;
    for returned in sender.reclaim()? {
        println!(
            "{} bytes sent, {:?}; UDP does not report whether they arrived",
            returned.sent_bytes, returned.outcome
        );
    }
    println!("sends in flight: {in_flight}");
    Ok(())
}
