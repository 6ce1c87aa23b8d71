//! Receives messages, each preceded by its length in eight bytes, and sums their bytes. Pages are
//! mapped where that is cheaper.
//!
//!     cargo run -p haul --example receive -- PORT

#![forbid(unsafe_code)]

use haul::Receiver;
use std::io::{ErrorKind, Read};
use std::net::TcpListener;

fn main() {
    let Some(port) = std::env::args().nth(1).and_then(|port| port.parse().ok()) else {
        eprintln!("usage: receive PORT");
        std::process::exit(2);
    };
    if let Err(error) = receive(port) {
        eprintln!("receiving on port {port}: {error}");
        std::process::exit(1);
    }
}

fn receive(port: u16) -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("listening on {}", listener.local_addr()?);
    let mut receiver = Receiver::new(listener.accept()?.0)?;
    let mut header = [0; 8];
    loop {
        match receiver.read_exact(&mut header) {
            Err(end) if end.kind() == ErrorKind::UnexpectedEof => break,
            read => read?,
        }
        let (len, mut left, mut sum) =
            (u64::from_le_bytes(header), u64::from_le_bytes(header), 0u64);
        // So many bytes are certain to come: the socket may become readable only for larger pieces.
        receiver.expect(left);
        while left > 0 {
            let limit = usize::try_from(left).unwrap_or(usize::MAX);
            let chunk =
                receiver.receive_up_to(limit)?.ok_or("the stream ended within a message")?;
            sum += chunk.iter().map(|&byte| u64::from(byte)).sum::<u64>();
            left -= chunk.len() as u64;
        }
        println!("a message of {len} bytes, their sum {sum}");
    }
    println!("{:#?}", receiver.report());
    Ok(())
}
