//! The process that takes datagrams, one a call, until the window is over and nobody sends any more.

use super::{Message, Outcome, Tally, failed, say};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How often a taker that gets nothing looks whether the window is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// How to take.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Taking {
    /// For how long to poll the device before waiting for an interrupt, in microseconds; 0 for not at all.
    pub busy_poll_us: u32,
}

impl Taking {
    /// Takes what comes to a port of `host`.
    pub(super) fn run(&self, host: IpAddr, tally: &Tally) -> Result<Outcome, Message> {
        let at = |error| failed(&format!("listening on {host}"), error);
        let socket = UdpSocket::bind((host, 0)).map_err(at)?;
        socket.set_read_timeout(Some(LOOK_INTERVAL)).map_err(at)?;
        super::poll_busily(&socket, self.busy_poll_us)?;
        say(&Message::Listening { address: socket.local_addr().map_err(at)? })
            .map_err(|error| failed("reporting", error))?;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match socket.recv(&mut buffer) {
                Ok(count) => {
                    tally.bytes.fetch_add(count as u64, Relaxed);
                    tally.messages.fetch_add(1, Relaxed);
                }
                // Whoever still sends to a port that nobody has is refused.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && tally.is_over() => {
                    return tally.outcome();
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(failed("recv", error)),
            }
            tally.calls.fetch_add(1, Relaxed);
        }
    }
}
