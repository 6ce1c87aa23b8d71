//! TCP keep-alive: finds peers that are gone without a reset.
//!
//! Clients' sockets inherit it from their listener. An upstream's socket is set to it by four
//! system calls, which a connection of a few seconds does without. Connections of another process
//! come by the thousand: theirs is set later, too, and until then they have that of the other
//! process.

use crate::config::Limits;
use haul_server::event_loop::{Context, NEVER};
use haul_server::listener::KeepAlive;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The seconds over which connections that began in the same one are spread: a turn of the event
/// loop that sets thousands of sockets would delay the other connections.
const SPREAD_SECONDS: u64 = 8;

/// The keep-alive of both connections.
pub fn keep_alive(limits: &Limits) -> KeepAlive {
    KeepAlive {
        time: limits.keepalive_time,
        interval: Duration::from_secs(10),
        probes: 6,
        unacknowledged: limits.unacknowledged_timeout,
    }
}

/// When the sockets of a connection get their keep-alive.
#[derive(Debug, Clone, Copy)]
pub struct DueKeepAlive {
    at: u32,
    includes_client: bool,
}

impl DueKeepAlive {
    /// That of a client that has inherited it.
    pub const OF_UPSTREAM: Self = Self { at: NEVER, includes_client: false };
    /// That of a client that has inherited it in another process.
    pub const OF_BOTH: Self = Self { at: NEVER, includes_client: true };

    /// Whether the client's socket gets it, too.
    pub fn includes_client(self) -> bool {
        self.includes_client
    }

    /// The second of the clock in which the sockets get it.
    pub fn at(self) -> u32 {
        self.at
    }

    /// Lets the sockets get it within ten seconds, or at once if it has a shorter time, or a limit
    /// of unacknowledged bytes.
    pub fn begin(&mut self, limits: &Limits, connection_id: u64, context: &Context<'_>) {
        let KeepAlive { time, unacknowledged, .. } = keep_alive(limits);
        let is_short = time < Duration::from_secs(SPREAD_SECONDS + 2) || unacknowledged.is_some();
        self.at = if is_short {
            context.now_seconds()
        } else {
            context.deadline(1 + (connection_id % SPREAD_SECONDS) as u32)
        };
    }

    /// Sets it if it is due. A Unix socket has none.
    pub fn set(
        &mut self,
        (client, upstream): (&OwnedFd, &OwnedFd),
        limits: &Limits,
        context: &Context<'_>,
    ) {
        if context.now_seconds() < self.at {
            return;
        }
        self.at = NEVER;
        let _ = keep_alive(limits).apply_to(upstream);
        if self.includes_client {
            let _ = keep_alive(limits).apply_to(client);
        }
    }
}
