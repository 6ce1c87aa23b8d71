//! Lends buffers of a pool to the kernel, filling one while it sends the others.
//!
//!     cargo run -p haul --example lend -- HOST:PORT < FILE

use haul::{Outcome, Pool, Sender};
use std::io::Read;
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
    // One more than may be out, so that there is always one to fill.
    let pool = Pool::new(256 << 10, 65)?;
    let mut copied = 0;
    loop {
        let mut buffer = pool.take()?;
        let len = std::io::stdin().read(&mut buffer)?;
        if len == 0 {
            break;
        }
        buffer.set_len(len);
        // From here on nobody can touch it.
        sender.lend(buffer)?;
        copied += sender.reclaim()?.filter(|back| back.outcome == Outcome::Copied).count();
    }
    let held = sender.settle(Duration::from_secs(10))?;
    copied += sender.reclaim()?.filter(|back| back.outcome == Outcome::Copied).count();
    println!("loans that were copied after all: {copied}; sends still out: {held}");
    for fallback in sender.report().fallbacks {
        println!("{fallback}");
    }
    Ok(())
}
