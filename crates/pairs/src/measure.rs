//! One measurement, as both hosts of a pair make it.
//!
//! The sending host connects, shows the secret, sends 20 single bytes that come back, and then
//! sends until the time is over. The receiving host discards what arrives, and confirms the number
//! of bytes at the end, so that no byte in a buffer counts as sent.

use crate::message::{Received, Secret, Sent};
use haul_sys::sockopt;
use haul_sys::tcp_info::tcp_info;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// The bytes of a write.
const WRITE_BYTES: usize = 256 << 10;
/// The bytes that are discarded at a time.
const DISCARD_BYTES: usize = 1 << 20;
/// The round trips that are measured.
const ROUND_TRIPS: usize = 20;
/// The time for a connection and for each round trip.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The time that the last bytes may take.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(20);
/// The interval at which a connection is looked for.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);

/// A host that waits for the other host of a pair.
#[derive(Debug)]
pub struct Receiver {
    listener: TcpListener,
    secret: Secret,
}

impl Receiver {
    /// Listens at a port that the kernel chooses.
    pub fn listen(secret: Secret) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, secret })
    }

    /// The port.
    pub fn port(&self) -> io::Result<u16> {
        self.listener.local_addr().map(|address| address.port())
    }

    /// Receives from the host that knows the secret. Other connections are closed.
    pub fn receive(self) -> io::Result<Received> {
        let deadline = Instant::now() + TIMEOUT;
        let mut stream = loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Ok(stream) = self.recognize(stream) {
                        break stream;
                    }
                }
                Err(_) if Instant::now() > deadline => return Err(io::ErrorKind::TimedOut.into()),
                Err(_) => thread::sleep(ACCEPT_INTERVAL),
            }
        };
        let mut byte = [0];
        for _ in 0..ROUND_TRIPS {
            stream.read_exact(&mut byte)?;
            stream.write_all(&byte)?;
        }
        stream.set_read_timeout(Some(DRAIN_TIMEOUT))?;
        let (cpu_before, mut bytes) = (cpu_s(), 0_u64);
        loop {
            match sockopt::discard(&stream, DISCARD_BYTES)? {
                0 => break,
                count => bytes += count as u64,
            }
        }
        let cpu_s = cpu_s() - cpu_before;
        stream.write_all(&bytes.to_le_bytes())?;
        Ok(Received { cpu_s })
    }

    fn recognize(&self, mut stream: TcpStream) -> io::Result<TcpStream> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut secret = Secret::default();
        stream.read_exact(&mut secret)?;
        if secret == self.secret { Ok(stream) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }
}

/// Sends to a host that listens, for a time.
pub fn send(addresses: &[IpAddr], port: u16, secret: &Secret, time: Duration) -> io::Result<Sent> {
    let mut stream = connect(addresses, port)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(DRAIN_TIMEOUT))?;
    stream.write_all(secret)?;
    let mut round_trips = Vec::new();
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        round_trips.push(begun.elapsed().as_secs_f64());
    }
    round_trips.sort_by(f64::total_cmp);
    stream.set_read_timeout(Some(DRAIN_TIMEOUT))?;
    let buffer = vec![7; WRITE_BYTES];
    let (cpu_before, begun) = (cpu_s(), Instant::now());
    while begun.elapsed() < time {
        stream.write_all(&buffer)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut bytes = [0; size_of::<u64>()];
    stream.read_exact(&mut bytes)?;
    Ok(Sent {
        bytes: u64::from_le_bytes(bytes),
        seconds: begun.elapsed().as_secs_f64(),
        round_trip_s: round_trips[ROUND_TRIPS / 2],
        mtu: sockopt::path_mtu(&stream).unwrap_or(0),
        cpu_s: cpu_s() - cpu_before,
        retransmitted_segments: tcp_info(&stream).map_or(0, |info| info.retransmitted_segments),
    })
}

fn connect(addresses: &[IpAddr], port: u16) -> io::Result<TcpStream> {
    let mut failure = io::Error::other("the host has no address");
    for &address in addresses {
        let address = SocketAddr::new(address, port);
        match TcpStream::connect_timeout(&address, TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(failure)
}

/// The CPU time of the whole host so far, interrupts included, in seconds (/proc/stat).
pub fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = |column: &str| column.parse::<u64>().unwrap_or(0);
    let columns: Vec<_> =
        text.lines().next().unwrap_or_default().split_ascii_whitespace().collect();
    // user, nice, system, (idle, iowait,) irq, softirq
    let busy: u64 =
        [1, 2, 3, 6, 7].iter().filter_map(|&at| columns.get(at)).map(|one| ticks(one)).sum();
    busy as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_confirmed() {
        let receiver = Receiver::listen([1; 32]).unwrap();
        let port = receiver.port().unwrap();
        let received = thread::spawn(move || receiver.receive());
        let localhost = [IpAddr::V4(Ipv4Addr::LOCALHOST)];
        let time = Duration::from_millis(50);
        // Another host does not take the place of the sending host.
        send(&localhost, port, &[2; 32], time).unwrap_err();
        let sent = send(&localhost, port, &[1; 32], time).unwrap();
        assert!(sent.bytes > 0 && sent.bytes.is_multiple_of(WRITE_BYTES as u64), "{sent:?}");
        assert!(sent.seconds >= 0.05 && sent.round_trip_s > 0.0 && sent.mtu > 1000, "{sent:?}");
        received.join().unwrap().unwrap();
    }
}
