//! A non-blocking server that lends: sends 256 MiB to one client, however slowly it reads, with at
//! most 2 MiB of buffers.
//!
//!     cargo run -p haul --example serve -- PORT

use haul::{BufferPool, Error, Sender};
use rustix::event::{PollFd, PollFlags, poll};
use std::net::TcpListener;

fn main() {
    let Some(port) = std::env::args().nth(1).and_then(|port| port.parse().ok()) else {
        eprintln!("usage: serve PORT");
        std::process::exit(2);
    };
    if let Err(error) = serve(port) {
        eprintln!("serving on port {port}: {error}");
        std::process::exit(1);
    }
}

fn serve(port: u16) -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("listening on {}", listener.local_addr()?);
    let socket = listener.accept()?.0;
    socket.set_nonblocking(true)?;
    let mut sender = Sender::new(socket)?;
    let pool = BufferPool::new(64 << 10, 32)?;
    let mut loans_left = 4096;
    while loans_left > 0 || sender.unsent_bytes() > 0 {
        // Dropped buffers return to the pool. Done before every wait, because some return without a
        // completion.
        sender.reclaim()?.for_each(drop);
        let result = match pool.take() {
            Ok(buffer) if loans_left > 0 => {
                sender.lend(buffer).map(|_| loans_left -= 1).map_err(Error::from)
            }
            Ok(_) => sender.flush(),
            Err(empty) => sender.flush().and(Err(empty)),
        };
        let events = match result {
            Ok(()) => continue,
            Err(Error::WouldBlock) => PollFlags::OUT,
            // A completion raises POLLERR, which is always reported.
            Err(Error::LoanLimit | Error::PoolEmpty { .. }) => PollFlags::empty(),
            Err(error) => return Err(error.into()),
        };
        poll(&mut [PollFd::new(&sender, events)], None)?;
    }
    println!("{:#?}", sender.report());
    Ok(())
}
