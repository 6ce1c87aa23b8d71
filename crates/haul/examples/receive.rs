//! Receives a connection's bytes, mapped where that pays, and sums them.
//!
//!     cargo run -p haul --example receive -- PORT

use haul::Receiver;
use std::error::Error;
use std::net::TcpListener;

fn main() -> Result<(), Box<dyn Error>> {
    let port: u16 = std::env::args().nth(1).ok_or("usage: receive PORT")?.parse()?;
    let (socket, peer) = TcpListener::bind(("0.0.0.0", port))?.accept()?;
    let mut receiver = Receiver::new(socket)?;
    let mut sum = 0u64;
    while let Some(chunk) = receiver.receive()? {
        // The pages are the network stack's own; they are gone with the next call.
        sum += chunk.bytes().iter().map(|&byte| u64::from(byte)).sum::<u64>();
    }
    let report = receiver.report();
    println!("{peer}: sum {sum}; mapped {} bytes, read {}", report.mapped.bytes, report.read.bytes);
    for demotion in &report.demotions {
        println!("{demotion}");
    }
    Ok(())
}
