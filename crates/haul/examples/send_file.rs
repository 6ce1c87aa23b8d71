//! Sends a file to a host by the cheapest path, and says which one that was.
//!
//!     cargo run -p haul --example send_file -- FILE HOST:PORT

use haul::Sender;
use std::error::Error;
use std::fs::File;
use std::net::TcpStream;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(address)) = (arguments.next(), arguments.next()) else {
        return Err("usage: send_file FILE HOST:PORT".into());
    };
    let file = File::open(&path)?;
    let len = file.metadata()?.len();
    let mut sender = Sender::new(TcpStream::connect(address)?)?;
    sender.send_file_all(&file, 0..len)?;
    let report = sender.report();
    for (path, counts) in &report.files {
        println!("{path}: {} bytes in {} calls", counts.bytes, counts.calls);
    }
    for demotion in &report.demotions {
        println!("{demotion}");
    }
    Ok(())
}
