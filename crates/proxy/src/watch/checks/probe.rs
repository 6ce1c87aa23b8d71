//! One active check of an upstream. A check connects as a client does, and then shuts the
//! connection down.

use crate::config::CheckConfig;
use crate::upstreams::upstream::Upstream;
use haul_server::connect::{self, ConnectOptions, PeerAddress};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A check that takes longer fails.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// The time after which the next address is tried if an address does not answer, as for a
/// client (RFC 8305 section 5).
const NEXT_ADDRESS_AFTER: Duration = Duration::from_secs(1);
/// The time that upstreams have to end their connections before the next checks.
const ENDING_TIME: Duration = Duration::from_millis(100);
/// The most bytes that an upstream may send before it ends the connection of a check.
const GREETING_BYTES_MAX: usize = 64 << 10;

/// A check without a result so far.
#[derive(Debug)]
pub struct Probe<'u> {
    upstream: &'u Arc<Upstream>,
    config: CheckConfig,
    /// The header that a connected upstream expects.
    header: Vec<u8>,
    addresses: std::vec::IntoIter<PeerAddress>,
    /// The attempts at addresses that did not answer yet.
    attempts: Vec<(PeerAddress, OwnedFd)>,
    /// Why the latest address failed.
    error: Option<io::Error>,
}

/// The connection of a check that succeeded. It is read until the upstream ends it, because the
/// close of a socket with unread bytes resets the connection.
#[derive(Debug)]
pub struct Ending {
    socket: OwnedFd,
    deadline: Instant,
    /// The bytes that the upstream may still send.
    bytes_left: usize,
}

impl<'u> Probe<'u> {
    /// Starts to connect to an upstream.
    pub fn start(upstream: &'u Arc<Upstream>, config: CheckConfig, header: Vec<u8>) -> Self {
        let addresses = upstream.addresses_in_turn().into_iter();
        let mut probe =
            Self { upstream, config, header, addresses, attempts: Vec::new(), error: None };
        probe.start_next();
        probe
    }

    /// Starts an attempt at the next address that does not fail at once.
    fn start_next(&mut self) {
        for address in self.addresses.by_ref() {
            match connect::start(&address, ConnectOptions::default()) {
                Ok(socket) => return self.attempts.push((address, socket)),
                Err(error) => self.error = Some(error),
            }
        }
    }

    /// The result of the check; `None` so far.
    fn advance(&mut self, is_over: bool) -> Option<io::Result<Ending>> {
        for (address, socket) in std::mem::take(&mut self.attempts) {
            match connect::finish(&socket) {
                Ok(()) => {
                    self.upstream.prefer_address(&address);
                    return Some(Ok(self.end(socket)));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.attempts.push((address, socket));
                }
                Err(error) => self.error = Some(error),
            }
        }
        if self.attempts.is_empty() {
            self.start_next();
        }
        if !self.attempts.is_empty() && !is_over {
            return None;
        }
        self.upstream.skip_candidates(&self.upstream.candidates());
        Some(Err(match self.error.take() {
            _ if !self.attempts.is_empty() => io::ErrorKind::TimedOut.into(),
            Some(error) => error,
            None => io::Error::other("its name is not resolved"),
        }))
    }

    /// Ends the connection to an upstream that is up.
    fn end(&self, socket: OwnedFd) -> Ending {
        // A new socket has room for the header. If the upstream fails now, it was up a moment ago.
        let _ = rustix::net::send(&socket, &self.header, SendFlags::NOSIGNAL);
        let _ = rustix::net::shutdown(&socket, Shutdown::Write);
        // An upstream that does not end connections has about one connection for each check.
        let deadline = Instant::now() + self.config.interval.min(CHECK_TIMEOUT);
        Ending { socket, deadline, bytes_left: GREETING_BYTES_MAX }
    }
}

impl Ending {
    /// Whether the connection is over. Reads what the upstream sent.
    fn is_over(&mut self) -> bool {
        let mut buffer = [0; 4096];
        while self.bytes_left > 0 && Instant::now() < self.deadline {
            match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, count)) if count > 0 => {
                    self.bytes_left = self.bytes_left.saturating_sub(count);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Ok(_) | Err(_) => return true,
            }
        }
        true
    }
}

/// Closes the connections that are over.
pub fn close_ended(endings: &mut Vec<Ending>) {
    endings.retain_mut(|ending| !ending.is_over());
}

/// Runs checks in parallel, and reports each result at once. Adds the connections that upstreams
/// did not end within [`ENDING_TIME`] to `endings`.
pub fn run(
    mut probes: Vec<Probe<'_>>,
    endings: &mut Vec<Ending>,
    mut on_result: impl FnMut(&Arc<Upstream>, CheckConfig, io::Result<()>),
) {
    let began = Instant::now();
    let (mut is_next_due, mut wait_until) = (false, NEXT_ADDRESS_AFTER);
    loop {
        let elapsed = began.elapsed();
        if !is_next_due && !probes.is_empty() && elapsed >= NEXT_ADDRESS_AFTER {
            is_next_due = true;
            wait_until = CHECK_TIMEOUT;
            probes.iter_mut().for_each(Probe::start_next);
        }
        let had_probes = !probes.is_empty();
        probes.retain_mut(|probe| {
            let Some(result) = probe.advance(elapsed >= CHECK_TIMEOUT) else { return true };
            let result = result.map(|ending| endings.push(ending));
            on_result(probe.upstream, probe.config, result);
            false
        });
        close_ended(endings);
        if probes.is_empty() {
            if had_probes {
                wait_until = began.elapsed() + ENDING_TIME;
            }
            if endings.is_empty() || began.elapsed() >= wait_until {
                return;
            }
        }
        wait(&probes, endings, wait_until.saturating_sub(began.elapsed()));
    }
}

fn wait(probes: &[Probe<'_>], endings: &[Ending], limit: Duration) {
    let attempts = probes.iter().flat_map(|probe| &probe.attempts);
    let attempts = attempts.map(|(_, socket)| PollFd::new(socket, PollFlags::OUT));
    let endings = endings.iter().map(|ending| PollFd::new(&ending.socket, PollFlags::IN));
    let mut sockets: Vec<_> = attempts.chain(endings).collect();
    let limit = Timespec::try_from(limit).ok();
    // Only a lack of memory lets the call fail, and then the sockets are asked again at once.
    let _ = poll(&mut sockets, limit.as_ref());
}
