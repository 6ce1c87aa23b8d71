//! Lends buffers of a pool to the kernel, filling one while it sends the others.
//!
//!     cargo run -p haul --example lend -- HOST:PORT < FILE

use haul::{Outcome, Pool, Sender};
use std::error::Error;
use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: lend HOST:PORT < FILE")?;
    let mut input = std::io::stdin().lock();
    let mut sender = Sender::new(TcpStream::connect(address)?)?;
    // One more than may be out, so that there is always one to fill.
    let pool = Pool::new(256 << 10, 65)?;
    let mut copied = 0;
    loop {
        let mut buffer = pool.take()?;
        let len = input.read(&mut buffer)?;
        if len == 0 {
            break;
        }
        buffer.set_len(len);
        // From here on nobody can touch it.
        sender.lend(buffer)?;
        for back in sender.reclaim()? {
            copied += usize::from(back.outcome == Outcome::Copied);
        }
    }
    sender.settle(Duration::from_secs(10))?;
    copied += sender.reclaim()?.filter(|back| back.outcome == Outcome::Copied).count();
    println!("loans that were copied after all: {copied}");
    for demotion in sender.report().demotions {
        println!("{demotion}");
    }
    Ok(())
}
