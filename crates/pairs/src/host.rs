//! The part of each host: it carries out the orders of rank 0.

use crate::measure::{Receiver, cpu_s, send};
use crate::message::{HostFacts, MESSAGE_BYTES_MAX, Order, Received, Reply};
use haul_fleet::wire;
use std::io::{self, Read, Write};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The time in which the CPU time of other programs is measured.
const BUSY_TIME: Duration = Duration::from_millis(300);
/// The most letters of the reason of a failure.
const REASON_LETTERS_MAX: usize = 1000;

/// Carries out the orders of rank 0, until rank 0 ends the stream.
pub fn serve(mut from: impl Read, mut to: impl Write) -> io::Result<()> {
    wire::write(&mut to, &Reply::Host(facts()))?;
    to.flush()?;
    let mut receiving: Option<JoinHandle<io::Result<Received>>> = None;
    loop {
        let order = match wire::read(&mut from, MESSAGE_BYTES_MAX) {
            Ok(order) => order,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let reply = carry_out(order, &mut receiving).unwrap_or_else(|error| {
            Reply::Failed(error.to_string().chars().take(REASON_LETTERS_MAX).collect())
        });
        wire::write(&mut to, &reply)?;
        to.flush()?;
    }
}

fn carry_out(
    order: Order,
    receiving: &mut Option<JoinHandle<io::Result<Received>>>,
) -> io::Result<Reply> {
    match order {
        Order::Listen(secret) => {
            let receiver = Receiver::listen(secret)?;
            let port = receiver.port()?;
            *receiving = Some(thread::spawn(move || receiver.receive()));
            Ok(Reply::Listening(port))
        }
        Order::Send { addresses, port, secret, milliseconds } => {
            let time = Duration::from_millis(milliseconds.into());
            send(&addresses, port, &secret, time).map(Reply::Sent)
        }
        Order::Collect => {
            let receiving = receiving.take().ok_or(io::ErrorKind::NotConnected)?;
            let received = receiving.join().map_err(|_| io::Error::other("a thread failed"))?;
            received.map(Reply::Received)
        }
    }
}

fn facts() -> HostFacts {
    let congestion = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
    let before = cpu_s();
    thread::sleep(BUSY_TIME);
    HostFacts {
        congestion: congestion.unwrap_or_default().trim().to_owned(),
        busy_before: (cpu_s() - before) / BUSY_TIME.as_secs_f64() / cpus,
    }
}
