//! A non-blocking server that lends: sends 256 MiB to one client, however slowly it reads, with at
//! most 2 MiB of buffers.
//!
//!     cargo run -p haul --example serve -- PORT

#![forbid(unsafe_code)]

use haul::{BufferPool, Error, Sender, Wants};
use rustix::event::{PollFd, PollFlags, poll};
use std::net::{TcpListener, TcpStream};

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
    while loans_left > 0 || sender.wants() != Wants::default() {
        // Dropped buffers return to the pool. Done before every wait, because some return without a
        // completion.
        sender.reclaim()?.for_each(drop);
        let result = if loans_left > 0 { lend(&mut sender, &pool) } else { sender.flush() };
        match result {
            Ok(()) if loans_left > 0 => {
                loans_left -= 1;
                continue;
            }
            Ok(()) | Err(Error::WouldBlock | Error::LoanLimit | Error::PoolEmpty { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let wants = sender.wants();
        if wants == Wants::default() {
            continue;
        }
        // A completion raises POLLERR, which is reported whatever events are requested.
        let events = if wants.write { PollFlags::OUT } else { PollFlags::empty() };
        let mut descriptors = [PollFd::new(&sender, events)];
        poll(&mut descriptors, None)?;
        if descriptors[0].revents().contains(PollFlags::ERR) {
            sender.on_error_event()?;
        }
    }
    println!("{:#?}", sender.report());
    Ok(())
}

/// Lends a buffer of zeros.
fn lend(sender: &mut Sender<TcpStream>, pool: &BufferPool) -> Result<(), Error> {
    let mut buffer = pool.take()?;
    buffer.resize(buffer.capacity())?;
    sender.lend(buffer)?;
    Ok(())
}
