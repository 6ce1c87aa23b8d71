//! The file service's part of a turn: what the event loop calls for each event.

use crate::connection::{Connection, ConnectionAction};
use crate::handler::FileHandler;
use crate::jobs::{FileJob, FileReply};
use haul_server::ConnectionCounters;
use haul_server::admission::eviction::Activity;
use haul_server::clock::Clock;
use haul_server::event_loop::{
    Context, Handler, Handover, Interest, Prepared, Readiness, Side, Tail,
};
use haul_server::listener::Accepted;
use std::io;
use tracing::warn;

impl Handler for FileHandler {
    type Connection = Connection;
    type Job = FileJob;

    fn begin_turn(&mut self, clock: &Clock) {
        self.clock.set(clock);
        self.epoch.advance();
    }

    fn counters(&self) -> &ConnectionCounters {
        &self.accounting.counters.connections
    }

    fn accept(&mut self, accepted: Accepted, context: &Context<'_>) -> io::Result<Connection> {
        let connection = Connection::new(accepted, self)?;
        context.register(connection.stream(), Side::Client, Interest::BOTH)?;
        Ok(connection)
    }

    fn receive(&mut self, connection: &mut Connection, event: Readiness) {
        if event.is_readable {
            connection.set_readable(event.tail != Tail::None);
            connection.receive_early(self);
        }
    }

    fn prepare(&mut self, connection: &mut Connection) -> Prepared<FileJob> {
        match connection.prepare(self) {
            Some(next) => Prepared::Act(next),
            None if connection.has_small_response() => Prepared::Small,
            None => Prepared::Large,
        }
    }

    fn drive(&mut self, connection: &mut Connection, _: &Context<'_>) -> ConnectionAction {
        connection.drive(self)
    }

    fn flush(&mut self, connection: &mut Connection) {
        connection.flush(self);
    }

    fn set_holding(&mut self, on: bool) {
        self.holds = on;
    }

    fn on_job_done(&mut self, connection: &mut Connection, reply: FileReply) {
        connection.complete(reply);
    }

    fn is_offloaded(&self, connection: &Connection) -> bool {
        connection.is_offloaded()
    }

    fn activity(&self, connection: &Connection) -> Activity {
        connection.activity()
    }

    fn expire(&mut self, connection: &mut Connection, _: &Context<'_>) -> ConnectionAction {
        let is_idle = self.activity(connection) == Activity::Idle;
        self.counters().timed_out.add(u64::from(!is_idle));
        connection.expire(self)
    }

    fn close(&mut self, connection: Connection) {
        connection.close(self);
    }

    fn evict(&mut self, mut connection: Connection) {
        connection.discard_unsent();
        connection.close(self);
    }

    fn on_wake(&mut self) {
        // An offload thread may just have replaced a file that a client has asked for since.
        self.epoch.advance();
    }

    fn begin_drain(&mut self) {
        self.drain_began_at_seconds = Some(self.clock.seconds());
    }

    fn free_caches(&mut self) {
        self.cache.clear();
    }

    fn every_second(&mut self, now_seconds: u32) {
        self.cache.expire(now_seconds);
        let accounting = &mut self.accounting;
        let dropped = accounting.log.flush();
        accounting.counters.log_dropped.add(dropped);
        if dropped > 0 && accounting.dropped_lines.allow(now_seconds) {
            warn!(
                dropped,
                "lines of the access log that were dropped, because they are not written fast \
                 enough: {dropped}"
            );
        }
    }

    fn on_end(&mut self) {
        // The count may be read after the end.
        self.accounting.counters.log_dropped.add(self.accounting.log.flush());
    }
}

impl Handover for FileHandler {}
