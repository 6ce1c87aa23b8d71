//! Requests to rtnetlink, made in the calling thread's network namespace.

use crate::error::LabError;
use netlink_packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

/// Creates a veth device `name` in this namespace and its peer, of the same name, in
/// `peer_namespace`.
pub(crate) fn add_veth(name: &str, mtu: u32, peer_namespace: &OwnedFd) -> Result<(), LabError> {
    let device_message = |more: Vec<LinkAttribute>| {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(name.into()), LinkAttribute::Mtu(mtu)];
        message.attributes.extend(more);
        message
    };
    let peer = device_message(vec![LinkAttribute::NetNsFd(peer_namespace.as_raw_fd())]);
    let link = device_message(vec![LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
    ])]);
    request(RouteNetlinkMessage::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
        .map_err(LabError::step("creating a veth pair"))
}

/// Creates a device that accepts packets and drops them: `dummy`, or `ifb` if the kernel lacks
/// `dummy`.
///
/// An `ifb` device drops every packet that was not redirected to it.
pub(crate) fn add_sink(name: &str, mtu: u32) -> Result<(), LabError> {
    let create = |kind| {
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]),
        ];
        request(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    };
    create(InfoKind::Dummy)
        .or_else(|_| create(InfoKind::Ifb))
        .map_err(LabError::step("creating a device that drops packets (neither dummy nor ifb)"))
}

/// Assigns `device` an address in a /24 network.
pub(crate) fn add_address(device: &str, address: IpAddr) -> Result<(), LabError> {
    let mut message = AddressMessage::default();
    message.header.family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.header.prefix_len = 24;
    message.header.index = index_of(device)?;
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    request(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
        .map_err(LabError::step(format!("assigning address {address} to {device}")))
}

/// Sets `device` up.
pub(crate) fn set_up(device: &str) -> Result<(), LabError> {
    let mut message = LinkMessage::default();
    message.header.index = index_of(device)?;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    request(RouteNetlinkMessage::SetLink(message), 0)
        .map_err(LabError::step(format!("setting {device} up")))
}

/// Sets the MTU of `device` and the packets that it queues to send.
pub(crate) fn set_mtu_and_queue(
    device: &str,
    mtu: u32,
    queue_packets: u32,
) -> Result<(), LabError> {
    let mut message = LinkMessage::default();
    message.header.index = index_of(device)?;
    message.attributes = vec![LinkAttribute::Mtu(mtu), LinkAttribute::TxQueueLen(queue_packets)];
    request(RouteNetlinkMessage::SetLink(message), 0)
        .map_err(LabError::step(format!("setting the MTU and the queue of {device}")))
}

/// Allows IPv4 packets of up to `bytes` to be sent and merged on `device` (BIG TCP, Linux 6.3).
pub(crate) fn set_segment_bytes(device: &str, bytes: u32) -> Result<(), LabError> {
    let mut message = LinkMessage::default();
    message.header.index = index_of(device)?;
    message.attributes =
        vec![LinkAttribute::GsoIpv4MaxSize(bytes), LinkAttribute::GroIpv4MaxSize(bytes)];
    request(RouteNetlinkMessage::SetLink(message), 0)
        .map_err(LabError::step(format!("allowing segments of {bytes} bytes on {device}")))
}

/// Installs a queueing discipline at the root of `device`, replacing the existing one.
pub(crate) fn replace_qdisc(
    device: &str,
    kind: &str,
    options: Vec<DefaultNla>,
) -> Result<(), LabError> {
    let mut message = root_qdisc(device)?;
    message.attributes = vec![
        TcAttribute::Kind(kind.into()),
        TcAttribute::Options(options.into_iter().map(TcOption::Other).collect()),
    ];
    request(RouteNetlinkMessage::NewQueueDiscipline(message), NLM_F_CREATE | NLM_F_REPLACE)
        .map_err(LabError::step(format!("installing {kind} on {device}")))
}

/// Removes the root queueing discipline of `device`; not an error if there is none.
pub(crate) fn remove_qdisc(device: &str) -> Result<(), LabError> {
    match request(RouteNetlinkMessage::DelQueueDiscipline(root_qdisc(device)?), 0) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(LabError::step(format!("removing the rate limit of {device}"))(error))
        }
        _ => Ok(()),
    }
}

fn root_qdisc(device: &str) -> Result<TcMessage, LabError> {
    let mut message = TcMessage::with_index(index_of(device)? as i32);
    message.header.parent = TcHandle::ROOT;
    Ok(message)
}

fn index_of(device: &str) -> Result<u32, LabError> {
    rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)
        .and_then(|socket| rustix::net::netdevice::name_to_index(&socket, device))
        .map_err(|errno| LabError::step(format!("looking up device {device}"))(errno.into()))
}

/// Sends one request and waits for the kernel's acknowledgement.
fn request(message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let (response, _) = socket.recv_from_full()?;
    let response = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&response)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
    match response.payload {
        NetlinkPayload::Error(error) => match error.code {
            None => Ok(()),
            Some(_) => Err(error.to_io()),
        },
        other => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("unexpected reply {other:?}")))
        }
    }
}
