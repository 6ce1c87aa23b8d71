//! Lends buffers of a pool to the kernel, and fills one while the kernel sends the others.
//!
//!     cargo run -p haul --example lend -- HOST:PORT < FILE

#![forbid(unsafe_code)]

use haul::{BufferPool, LoanOutcome, Sender};
use std::net::TcpStream;
use std::time::Duration;

fn main() {
    let Some(address) = std::env::args().nth(1) else {
        eprintln!("usage: lend HOST:PORT < FILE");
        std::process::exit(2);
    };
    if let Err(error) = lend(&address) {
        eprintln!("lending to {address}: {error}");
        std::process::exit(1);
    }
}

fn lend(address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut sender = Sender::new(TcpStream::connect(address)?)?;
    // One more than the limit on loans, so that there is always one to fill.
    let pool = BufferPool::new(256 << 10, 65)?;
    let mut copied = 0;
    loop {
        let mut buffer = pool.take()?;
        if buffer.read_from(std::io::stdin())? == 0 {
            break;
        }
        // From here on the program cannot access the buffer.
        sender.lend(buffer)?;
        copied +=
            sender.reclaim()?.filter(|returned| returned.outcome == LoanOutcome::Copied).count();
    }
    let in_flight = sender.wait_for_completions(Duration::from_secs(10))?;
    copied += sender.reclaim()?.filter(|returned| returned.outcome == LoanOutcome::Copied).count();
    println!("loans that were copied: {copied}; sends in flight: {in_flight}");
    for fallback in sender.report().fallbacks {
        println!("{fallback}");
    }
    Ok(())
}
