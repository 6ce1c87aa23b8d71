//! TCP keep-alive: finds peers that are gone without a reset.
//!
//! Clients' sockets inherit it from their listener. An upstream's socket is set to it by four
//! system calls, which a connection of a few seconds does without.

use crate::config::Limits;
use haul_server::event_loop::Context;
use haul_server::listener::KeepAlive;
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

/// The second of the clock in which an upstream's socket gets it: within ten seconds, or at once if
/// it has a shorter time, or a limit of unacknowledged bytes.
pub fn due_at(limits: &Limits, connection_id: u64, context: &Context<'_>) -> u32 {
    let KeepAlive { time, unacknowledged, .. } = keep_alive(limits);
    if time < Duration::from_secs(SPREAD_SECONDS + 2) || unacknowledged.is_some() {
        return context.now_seconds();
    }
    context.deadline(1 + (connection_id % SPREAD_SECONDS) as u32)
}
