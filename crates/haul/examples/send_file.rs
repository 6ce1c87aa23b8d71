//! Sends a file to a host by the cheapest method, and prints which one that was.
//!
//!     cargo run -p haul --example send_file -- FILE HOST:PORT

#![forbid(unsafe_code)]

use haul::Sender;
use std::fs::File;
use std::net::TcpStream;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(address)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: send_file FILE HOST:PORT");
        std::process::exit(2);
    };
    if let Err(error) = send(&path, &address) {
        eprintln!("sending {path} to {address}: {error}");
        std::process::exit(1);
    }
}

fn send(path: &str, address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let file = File::open(path)?;
    // Refuses what is not a regular file, such as a FIFO or a directory. A file whose content the
    // kernel generates, as in /proc, has length 0.
    let len = haul::file_len(&file)?;
    let mut sender = Sender::new(TcpStream::connect(address)?)?;
    sender.send_file_all(&file, 0..len)?;
    let report = sender.report();
    for (method, counts) in &report.files {
        println!("{method}: {} bytes in {} calls", counts.bytes, counts.calls);
    }
    for fallback in &report.fallbacks {
        println!("{fallback}");
    }
    Ok(())
}
