//! The route of a connection: from the client's greeting to a group of upstreams, and the header
//! that the upstream is sent first.

use super::account::Account;
use super::{Connection, State, local_address};
use crate::greeting::Greeting;
use crate::header::{self, FieldSources, HeaderVersion};
use crate::loop_state::LoopState;
use crate::record::log::End;
use crate::upstreams::group::UpstreamGroup;
use haul_server::event_loop::Action;
use haul_server::listener::NamedBy;
use haul_server::offload::NoJob;
use haul_server::proxy_protocol::FieldType;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Where a connection goes, and the bytes that go before the client's other bytes.
#[derive(Debug)]
pub(super) struct Route {
    /// The listener's place in the configuration.
    pub listener: usize,
    /// The group of upstreams, once the route is known.
    pub group: Option<Arc<UpstreamGroup>>,
    /// The bytes of the greeting, until the upstream is sent the greeting.
    pub greeting: Vec<u8>,
    /// The parts of the header, until the upstream is sent the header.
    pub header: Option<Box<HeaderParts>>,
}

/// The parts of a header of the PROXY protocol, apart from the client's address.
#[derive(Debug, Default)]
pub(super) struct HeaderParts {
    /// From the header of a proxy in front.
    pub named_by: NamedBy,
    pub greeting: Greeting,
}

impl Connection {
    /// Receives the client's greeting; `None` once the state changed.
    pub(super) fn receive_greeting(&mut self, shared: &mut LoopState) -> Option<Action<NoJob>> {
        let State::Greeting { client, reader, deadline, .. } = &mut self.state else { return None };
        let deadline = *deadline;
        if !self.client.events.is_readable {
            return Some(Action::WaitUntil(deadline));
        }
        match reader.receive(&*client) {
            Ok(Some(greeting)) => {
                self.choose_route(&greeting, shared);
                None
            }
            Ok(None) => {
                self.client.events.is_readable = false;
                Some(Action::WaitUntil(deadline))
            }
            Err(_) => Some(self.finish(End::ClientFailed, shared)),
        }
    }

    /// Chooses the group by the client's greeting.
    pub(super) fn choose_route(&mut self, greeting: &Greeting, shared: &mut LoopState) {
        let Some(reader) = self.state.route() else { return };
        self.route.greeting = reader.into_received();
        self.route.group = shared.routes().group(self.route.listener, greeting).cloned();
        if let Greeting::Tls { server_name, .. } = greeting {
            self.account.record.server_name.clone_from(server_name);
        }
        if let Some(header) = &mut self.route.header {
            header.greeting = greeting.clone();
        }
    }
}

impl Route {
    /// The header that names the client to the upstream; empty if the group does not send a header.
    pub fn make_header(
        &mut self,
        client: &OwnedFd,
        account: &mut Account,
        shared: &LoopState,
    ) -> Vec<u8> {
        let parts = self.header.take().map(|parts| *parts).unwrap_or_default();
        let HeaderParts { named_by, greeting } = parts;
        let version = self.group.as_ref().and_then(|group| group.send_header());
        let Some(version) = version else { return Vec::new() };
        let record = &mut account.record;
        let unique_id = shared.unique_id(record.id);
        let sources =
            FieldSources { received: &named_by.fields, greeting: &greeting, unique_id: &unique_id };
        let fields = sources.fields(shared.header_fields());
        // Version 1 does not have fields.
        let sent_id = fields.get(FieldType::UNIQUE_ID).filter(|_| version == HeaderVersion::V2);
        record.unique_id = sent_id.map(|id| String::from_utf8_lossy(id).into_owned());
        let destination =
            named_by.destination.or_else(|| client_destination(client, &record.listener));
        header::header(version, record.client, destination, &fields)
    }
}

/// The address that the client connected to. A socket whose connection failed lost its port, and
/// then the port is the listener's.
fn client_destination(client: &OwnedFd, listener: &str) -> Option<SocketAddr> {
    let mut address = local_address(client)?;
    if address.port() == 0
        && let Ok(listener) = listener.parse::<SocketAddr>()
    {
        address.set_port(listener.port());
    }
    Some(address)
}
