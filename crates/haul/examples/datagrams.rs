//! Lends a buffer to be sent as many datagrams: one call, cut by the device or the kernel.
//!
//!     cargo run -p haul --example datagrams -- HOST:PORT

use haul::{Pool, Sender};
use std::error::Error;
use std::net::UdpSocket;
use std::time::Duration;

/// What an Ethernet packet carries after the headers of IPv4 and UDP.
const SEGMENT_BYTES: u16 = 1472;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: datagrams HOST:PORT")?;
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(address)?;
    let mut sender = Sender::new(socket)?;
    let pool = Pool::new(64 << 10, 8)?;
    let mut buffer = pool.take()?;
    buffer.set_len(40 * usize::from(SEGMENT_BYTES));
    for (number, segment) in buffer.chunks_mut(SEGMENT_BYTES.into()).enumerate() {
        segment.fill(number as u8);
    }
    sender.lend_segments(buffer, SEGMENT_BYTES)?;
    sender.settle(Duration::from_secs(1))?;
    for back in sender.reclaim()? {
        println!("{} bytes sent, {:?}", back.sent_bytes, back.outcome);
    }
    Ok(())
}
