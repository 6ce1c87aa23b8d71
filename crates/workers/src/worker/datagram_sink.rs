//! The worker that receives datagrams, one per call, until the window is over and the sender has
//! stopped.

use super::{Message, Outcome, WorkCounters, failed, send_message};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Receive timeout, after which the worker checks whether the window is over.
const READ_TIMEOUT: Duration = Duration::from_millis(20);

/// Parameters of a task that receives datagrams.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DatagramSinkTask {
    /// Time to poll the device before waiting for an interrupt, in microseconds; 0 disables busy
    /// polling.
    pub busy_poll_us: u32,
}

impl DatagramSinkTask {
    /// Receives datagrams on a free port of `host`.
    pub fn run(&self, host: IpAddr, counters: &WorkCounters) -> Result<Outcome, Message> {
        let listen_error = |error| failed(&format!("listening on {host}"), error);
        let socket = UdpSocket::bind((host, 0)).map_err(listen_error)?;
        socket.set_read_timeout(Some(READ_TIMEOUT)).map_err(listen_error)?;
        super::set_busy_poll(&socket, self.busy_poll_us)?;
        send_message(&Message::Listening { address: socket.local_addr().map_err(listen_error)? })
            .map_err(|error| failed("reporting", error))?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match socket.recv(&mut buffer) {
                Ok(count) => {
                    counters.bytes.fetch_add(count as u64, Relaxed);
                    counters.messages.fetch_add(1, Relaxed);
                }
                // The socket stays open until the sender has stopped: a datagram to a closed port
                // is refused.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && counters.is_over() => {
                    return counters.outcome();
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(failed("recv", error)),
            }
            counters.calls.fetch_add(1, Relaxed);
        }
    }
}
