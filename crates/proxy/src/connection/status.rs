//! An open connection as the control socket lists it.

use super::{Connection, State, local_address};
use crate::record::connection::{ConnectionBytes, TcpStatistics, Traffic};
use crate::record::status::ConnectionStatus;

impl Connection {
    /// The present state of the connection.
    pub fn status(&self) -> ConnectionStatus {
        let (bytes, tcp, source) = match &self.state {
            State::Forwarding(forwarder) => {
                let (client, upstream) = forwarder.sockets();
                let bytes = self.account.client_bytes(&forwarder.report());
                (bytes, [client, upstream].map(TcpStatistics::of), local_address(upstream))
            }
            State::Delivering(delivery) => {
                let bytes = self.account.client_bytes(&delivery.record.report);
                (bytes, delivery.record.tcp, None)
            }
            _ => <(ConnectionBytes, _, _)>::default(),
        };
        let record = &self.account.record;
        let mut parties = record.parties(self.group_name(), self.upstream_name()).into_owned();
        parties.source = parties.source.or(source);
        ConnectionStatus {
            id: record.id,
            parties,
            phase: self.state.phase(),
            age_ms: self.account.accepted_at.elapsed().as_micros() as f64 / 1e3,
            loop_time: record.loop_time,
            traffic: Traffic::new(bytes, tcp),
        }
    }
}
