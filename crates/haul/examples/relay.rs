//! Relays each connection to another host: bulk is spliced, small messages are copied.
//!
//!     cargo run -p haul --example relay -- PORT HOST:PORT

use haul::{ForwardPool, Forwarder};
use std::error::Error;
use std::net::{TcpListener, TcpStream};
use std::thread;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(port), Some(to)) = (arguments.next(), arguments.next()) else {
        return Err("usage: relay PORT HOST:PORT".into());
    };
    let pool = ForwardPool::new(32)?;
    for client in TcpListener::bind(("0.0.0.0", port.parse()?))?.incoming() {
        let (client, to, pool) = (client?, to.clone(), pool.clone());
        thread::spawn(move || match relay(&client, &to, pool) {
            Ok(words) => println!("{words}"),
            Err(error) => eprintln!("{error}"),
        });
    }
    Ok(())
}

fn relay(client: &TcpStream, to: &str, pool: ForwardPool) -> Result<String, Box<dyn Error>> {
    let server = TcpStream::connect(to)?;
    let mut forwarder = Forwarder::with_pool(client, &server, pool)?;
    forwarder.forward()?;
    let report = forwarder.report();
    let ways = [&report.there, &report.back]
        .map(|way| format!("{} bytes spliced, {} copied", way.spliced.bytes, way.copied.bytes));
    Ok(format!("there {}; back {}", ways[0], ways[1]))
}
