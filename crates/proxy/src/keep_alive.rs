//! TCP keep-alive: finds peers that are gone without a reset.
//!
//! A client's socket inherits its keep-alive from the listener. An upstream's socket needs four
//! system calls, which a connection of a few seconds does without. An upgrade adopts thousands of
//! connections at once, so their keep-alive settings are updated over the next ten seconds.

use crate::config::Limits;
use haul_server::event_loop::{Context, NEVER};
use haul_server::listener::KeepAlive;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The seconds over which connections that began in the same second are spread. A turn of the event
/// loop that sets thousands of sockets would delay the other connections.
const SPREAD_SECONDS: u64 = 8;

/// The keep-alive of both connections.
pub fn keep_alive(limits: &Limits) -> KeepAlive {
    KeepAlive {
        time: limits.timeouts.keepalive,
        interval: Duration::from_secs(10),
        probes: 6,
        unacknowledged: limits.timeouts.unacknowledged,
    }
}

/// When the sockets of a connection get their keep-alive.
#[derive(Debug, Clone, Copy)]
pub struct KeepAliveSchedule {
    at: u32,
    includes_client: bool,
}

impl KeepAliveSchedule {
    /// The client's socket inherited the keep-alive from the listener.
    pub const UPSTREAM_ONLY: Self = Self { at: NEVER, includes_client: false };
    /// The client's socket inherited the keep-alive of another process.
    pub const BOTH_SOCKETS: Self = Self { at: NEVER, includes_client: true };

    /// Whether the keep-alive of the client's socket is also set.
    pub fn includes_client(self) -> bool {
        self.includes_client
    }

    /// The second of the clock in which the keep-alive is set.
    pub fn at(self) -> u32 {
        self.at
    }

    /// Schedules the keep-alive within ten seconds, or at once if its time is shorter or
    /// unacknowledged bytes have a limit.
    pub fn schedule(&mut self, limits: &Limits, connection_id: u64, context: &Context<'_>) {
        let KeepAlive { time, unacknowledged, .. } = keep_alive(limits);
        let is_short = time < Duration::from_secs(SPREAD_SECONDS + 2) || unacknowledged.is_some();
        self.at = if is_short {
            context.now_seconds()
        } else {
            context.deadline(1 + (connection_id % SPREAD_SECONDS) as u32)
        };
    }

    /// Enables TCP keep-alive if it is due. No effect on Unix sockets.
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
