//! Relays each connection to another host: bulk data is spliced, small messages are copied.
//!
//!     cargo run -p haul --example relay -- PORT HOST:PORT

#![forbid(unsafe_code)]

use haul::{ForwardPool, Forwarder};
use std::net::{TcpListener, TcpStream};
use std::thread;

type Failure = Box<dyn std::error::Error>;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let port = arguments.next().and_then(|port| port.parse().ok());
    let (Some(port), Some(to)) = (port, arguments.next()) else {
        eprintln!("usage: relay PORT HOST:PORT");
        std::process::exit(2);
    };
    if let Err(error) = serve(port, &to) {
        eprintln!("relaying from port {port}: {error}");
        std::process::exit(1);
    }
}

fn serve(port: u16, to: &str) -> Result<(), Failure> {
    let pool = ForwardPool::new(32)?;
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("relaying {} to {to}", listener.local_addr()?);
    for client in listener.incoming() {
        let (client, to, pool) = (client?, to.to_owned(), pool.clone());
        thread::spawn(move || match relay(&client, &to, pool) {
            Ok(summary) => println!("{summary}"),
            Err(error) => eprintln!("relaying to {to}: {error}"),
        });
    }
    Ok(())
}

fn relay(client: &TcpStream, to: &str, pool: ForwardPool) -> Result<String, Failure> {
    let server = TcpStream::connect(to)?;
    let mut forwarder = Forwarder::with_pool(client, &server, pool)?;
    if let Err(error) = forwarder.forward() {
        // Otherwise a peer would take a truncated stream for a whole one.
        forwarder.abort();
        return Err(error.into());
    }
    let report = forwarder.report();
    let directions = [&report.a_to_b, &report.b_to_a]
        .map(|report| (report.spliced.bytes, report.copied.bytes))
        .map(|(spliced, copied)| format!("{spliced} bytes spliced, {copied} copied"));
    Ok(format!("from the client {}; to the client {}", directions[0], directions[1]))
}
