//! Requests to the kernel's routing netlink, made in the calling thread's network namespace.

use crate::LabError;
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

/// Makes a veth device `name` here and its peer, of the same name, in `peer_namespace`.
pub(crate) fn add_veth(name: &str, mtu: u32, peer_namespace: &OwnedFd) -> Result<(), LabError> {
    let end = |more: Vec<LinkAttribute>| {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(name.into()), LinkAttribute::Mtu(mtu)];
        message.attributes.extend(more);
        message
    };
    let peer = end(vec![LinkAttribute::NetNsFd(peer_namespace.as_raw_fd())]);
    let link = end(vec![LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
    ])]);
    request(RouteNetlinkMessage::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
        .map_err(LabError::step("making a veth pair"))
}

/// Makes a device that takes packets and drops them: `dummy`, or `ifb` where the kernel has none, which drops whatever was
/// not redirected to it.
pub(crate) fn add_sink(name: &str, mtu: u32) -> Result<(), LabError> {
    let make = |kind| {
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(name.into()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]),
        ];
        request(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    };
    make(InfoKind::Dummy)
        .or_else(|_| make(InfoKind::Ifb))
        .map_err(LabError::step("making a device that drops packets (neither dummy nor ifb)"))
}

/// Gives `device` an address whose network is a /24.
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
        .map_err(LabError::step(format!("giving {device} the address {address}")))
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

/// Lets IPv4 packets of up to so much be made and be put together on `device` (BIG TCP, Linux 6.3).
pub(crate) fn set_segment_bytes(device: &str, bytes: u32) -> Result<(), LabError> {
    let mut message = LinkMessage::default();
    message.header.index = index_of(device)?;
    message.attributes =
        vec![LinkAttribute::GsoIpv4MaxSize(bytes), LinkAttribute::GroIpv4MaxSize(bytes)];
    request(RouteNetlinkMessage::SetLink(message), 0)
        .map_err(LabError::step(format!("letting {device} have segments of {bytes} bytes")))
}

/// Puts a queueing discipline at the root of `device`, in place of what is there.
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
        .map_err(LabError::step(format!("putting {kind} on {device}")))
}

/// Takes the root queueing discipline of `device` away; not an error when there is none.
pub(crate) fn remove_qdisc(device: &str) -> Result<(), LabError> {
    match request(RouteNetlinkMessage::DelQueueDiscipline(root_qdisc(device)?), 0) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(LabError::step(format!("freeing {device} of its rate"))(error))
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

/// Sends one request and waits for the kernel's verdict.
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
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
    match answer.payload {
        NetlinkPayload::Error(error) => match error.code {
            None => Ok(()),
            Some(_) => Err(error.to_io()),
        },
        other => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("unexpected answer {other:?}")))
        }
    }
}
