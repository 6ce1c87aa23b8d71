//! The TCP connections of this network namespace, as the kernel lists them (sock_diag(7)), also
//! those that no process has any more.

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable, Nla as _,
};
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP, TCP_LISTEN};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{
    ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags,
};
use netlink_packet_sock_diag::{SockDiagDestroy, SockDiagMessage};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::LazyLock;
use std::thread;

/// Length of the buffer for one part of the kernel's answer, as the kernel's longest part.
const PART_BYTES: usize = 64 << 10;
/// Number of the attribute of `<linux/inet_diag.h>` with the protocol above TCP (Linux 5.4).
const INET_DIAG_ULP_INFO: u16 = 19;

/// A TCP connection.
#[derive(Debug, Clone)]
pub struct Connection {
    /// Number of the socket (`SO_COOKIE`).
    cookie: u64,
    id: SocketId,
    family: u8,
    /// Bytes that the program gave to the socket.
    pub given_bytes: u64,
    /// Bytes that the peer acknowledged. May include one for the beginning of the stream.
    pub acknowledged_bytes: u64,
    /// Bytes that the peer did not acknowledge.
    pub unacknowledged_bytes: u32,
    /// Bytes that arrived and that no program read.
    pub unread_bytes: u32,
    /// Bytes that arrived.
    received_bytes: u64,
    /// Bytes that a program read, at least. 0 if the connection was not in the last list.
    read_bytes_min: u64,
    /// Whether a protocol above TCP takes the bytes from the connection (MPTCP, TLS), so that bytes
    /// are unread that `unread_bytes` does not have.
    has_upper_protocol: bool,
}

/// TCP connections.
#[derive(Debug, Default)]
pub struct Connections {
    /// Connections of this network namespace.
    by_cookie: HashMap<u64, Connection>,
    /// Connections of other network namespaces, which containers on this host have.
    elsewhere: Vec<Connection>,
}

/// The unread bytes at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtPeer {
    /// The other end is on this host, and some bytes are not read.
    Unread,
    /// The other end is on this host, and everything is read.
    Read,
    /// The other end is not on this host, or not visible.
    NotVisible,
}

impl Connections {
    /// Asks the kernel.
    pub fn read() -> io::Result<Self> {
        let mut connections = Self::default();
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        for family in [AF_INET, AF_INET6] {
            request(&socket, SockDiagMessage::InetRequest(all(family)), NLM_F_DUMP)?;
            connections.receive(&mut socket)?;
        }
        Ok(connections)
    }

    /// A connection by the number of its socket (`SO_COOKIE`). `None` if the connection is over.
    pub fn get(&self, cookie: u64) -> Option<&Connection> {
        self.by_cookie.get(&cookie)
    }

    /// Asks the kernel for the connections of other network namespaces also: of the processes that
    /// this process may look at. Needs `CAP_SYS_ADMIN`.
    pub fn add_other_namespaces(&mut self) {
        for namespace in other_namespaces() {
            let read = move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                Self::read()
            };
            // The thread ends, and with it its change of the namespace.
            let found = thread::spawn(read).join();
            if let Ok(Ok(found)) = found {
                self.elsewhere.extend(found.by_cookie.into_values());
            }
        }
    }

    /// The bytes that arrived at each socket.
    pub fn received(&self) -> HashMap<u64, u64> {
        self.all().map(|connection| (connection.cookie, connection.received_bytes)).collect()
    }

    /// Computes what was read, by the bytes that had arrived in the last list. Bytes can arrive
    /// between the kernel's two counts of one list, so the counts of one list would give too many.
    pub fn compute_read_bytes(&mut self, received_before: &HashMap<u64, u64>) {
        for connection in self.by_cookie.values_mut().chain(&mut self.elsewhere) {
            let received = received_before.get(&connection.cookie).copied().unwrap_or(0);
            connection.read_bytes_min = received.saturating_sub(connection.unread_bytes.into());
        }
    }

    fn all(&self) -> impl Iterator<Item = &Connection> {
        self.by_cookie.values().chain(&self.elsewhere)
    }

    /// What is unread at the other end of a connection, of the first `goal` bytes of the stream, or
    /// of all.
    ///
    /// The ports are of the sending and of the receiving end. A rule of the firewall can change the
    /// addresses, and the port to which a program connects (`redirect`, `dnat`). So the other end
    /// is every connection with the port of the receiving end. If no connection has this port, and
    /// the sending end has a port for programs that connect, the other end is every connection to
    /// the port of the sending end.
    pub fn at_peer(&self, local_port: u16, peer_port: u16, goal: Option<u64>) -> AtPeer {
        let has_port = |connection: &&Connection| connection.id.source_port == peer_port;
        let leads_here = |connection: &&Connection| {
            connection.id.destination_port == local_port && connecting_ports().contains(&local_port)
        };
        let mut peers: Vec<&Connection> = self.all().filter(has_port).collect();
        if peers.is_empty() {
            peers.extend(self.all().filter(leads_here));
        }
        if peers.is_empty() {
            return AtPeer::NotVisible;
        }
        let has_unread = |peer: &Connection| {
            let needs_more = goal.is_none_or(|bytes| peer.read_bytes_min < bytes);
            peer.has_upper_protocol || (peer.unread_bytes > 0 && needs_more)
        };
        if peers.into_iter().any(has_unread) { AtPeer::Unread } else { AtPeer::Read }
    }

    fn receive(&mut self, socket: &mut Socket) -> io::Result<()> {
        let mut part = Vec::with_capacity(PART_BYTES);
        loop {
            part.clear();
            socket.recv(&mut part, 0)?;
            let mut rest = &part[..];
            while !rest.is_empty() {
                let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                match message.payload {
                    NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(found)) => {
                        self.add(&found);
                    }
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    _ => {}
                }
                let length = (message.header.length as usize).next_multiple_of(4).max(4);
                rest = rest.get(length..).unwrap_or_default();
            }
        }
    }

    fn add(&mut self, found: &InetResponse) {
        let info = found.nlas.iter().find_map(|nla| match nla {
            Nla::TcpInfo(info) => Some(info),
            _ => None,
        });
        let Some(info) = info else { return };
        let given =
            info.bytes_sent.saturating_sub(info.bytes_retrans) + u64::from(info.notsent_bytes);
        // A retransmission that failed counts as retransmitted and not as sent. The other sum may
        // have one byte more, for the beginning of the stream.
        let queued = u64::from(found.header.send_queue);
        let cookie = u64::from_le_bytes(found.header.socket_id.cookie);
        let connection = Connection {
            cookie,
            id: found.header.socket_id.clone(),
            family: found.header.family,
            given_bytes: given.max((info.bytes_acked + queued).saturating_sub(1)),
            acknowledged_bytes: info.bytes_acked,
            unacknowledged_bytes: found.header.send_queue,
            unread_bytes: found.header.recv_queue,
            received_bytes: info.bytes_received,
            read_bytes_min: 0,
            has_upper_protocol: found.nlas.iter().any(|nla| nla.kind() == INET_DIAG_ULP_INFO),
        };
        self.by_cookie.insert(cookie, connection);
    }
}

impl Connection {
    /// Resets the connection: nothing of it is sent again. Needs `CAP_NET_ADMIN` and
    /// `CONFIG_INET_DIAG_DESTROY`.
    pub fn reset(&self) -> io::Result<()> {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        let this = InetRequest { socket_id: self.id.clone(), ..all(self.family) };
        request(&socket, SockDiagDestroy::new(SockDiagMessage::InetRequest(this)), NLM_F_ACK)?;
        let mut answer = Vec::with_capacity(PART_BYTES);
        socket.recv(&mut answer, 0)?;
        let answer = NetlinkMessage::<SockDiagMessage>::deserialize(&answer)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        match answer.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
            _ => Ok(()),
        }
    }
}

/// The ports from which the kernel chooses for programs that connect.
fn connecting_ports() -> RangeInclusive<u16> {
    /// The kernel's default.
    const DEFAULT: RangeInclusive<u16> = 32_768..=60_999;
    static PORTS: LazyLock<RangeInclusive<u16>> = LazyLock::new(|| {
        let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let mut numbers = text.split_whitespace().map_while(|word| word.parse().ok());
        numbers.next().zip(numbers.next()).map_or(DEFAULT, |(first, last)| first..=last)
    });
    PORTS.clone()
}

/// The network namespaces of all processes but this one's, each once.
fn other_namespaces() -> Vec<OwnedFd> {
    let inode = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
    let mut known: HashSet<u64> = inode(Path::new("/proc/self/ns/net")).into_iter().collect();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let paths = processes.map(|process| process.path().join("ns/net"));
    paths
        .filter(|path| inode(path).is_some_and(|inode| known.insert(inode)))
        .filter_map(|path| fs::File::open(path).ok().map(OwnedFd::from))
        .collect()
}

/// A request for all connections of a family, without listening sockets.
fn all(family: u8) -> InetRequest {
    InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::all().difference(StateFlags::from_bits_retain(1 << TCP_LISTEN)),
        socket_id: if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() },
    }
}

fn request<M>(socket: &Socket, message: M, flags: u16) -> io::Result<()>
where
    M: NetlinkSerializable + Into<NetlinkPayload<M>>,
{
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    let mut message = NetlinkMessage::new(header, message.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    /// The connection whose local port is `port`.
    fn with_port(port: u16) -> Option<Connection> {
        let all = Connections::read().unwrap();
        all.by_cookie.into_values().find(|connection| connection.id.source_port == port)
    }

    #[test]
    fn a_connection_is_found_after_its_socket_was_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut accepted, address) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let mut given = 0;
        // Until the peer's buffer is full.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Ok(sent) = accepted.write(&[0; 1 << 14]) {
            given += sent as u64;
            assert!(Instant::now() < deadline);
        }
        let port = accepted.local_addr().unwrap().port();
        let before = with_port(port).unwrap();
        assert_eq!(before.given_bytes, given);
        assert!(before.unacknowledged_bytes > 0);
        let all = Connections::read().unwrap();
        assert_eq!(all.at_peer(port, address.port(), None), AtPeer::Unread);
        // Half of the bytes is read, and nothing more is needed.
        let (mut peer, half) = (peer, given / 2);
        peer.read_exact(&mut vec![0; half as usize]).unwrap();
        // Until the bytes that the read made room for arrived: before, the two lists may differ.
        let all = loop {
            let received = Connections::read().unwrap().received();
            let mut all = Connections::read().unwrap();
            assert_eq!(all.at_peer(port, address.port(), Some(half)), AtPeer::Unread, "one list");
            all.compute_read_bytes(&received);
            if all.at_peer(port, address.port(), Some(half)) == AtPeer::Read {
                break all;
            }
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(all.at_peer(port, address.port(), Some(half + 1)), AtPeer::Unread);
        drop(accepted);
        assert!(with_port(port).unwrap().unacknowledged_bytes > 0);
        let mut received = Vec::new();
        peer.read_to_end(&mut received).unwrap();
        assert_eq!(received.len() as u64 + half, given);
    }

    #[test]
    fn a_reset_connection_is_over() {
        let listener = TcpListener::bind("[::1]:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let port = accepted.local_addr().unwrap().port();
        let peer_port = peer.local_addr().unwrap().port();
        let Some(connection) = with_port(peer_port) else { panic!("no port {peer_port}") };
        match connection.reset() {
            Ok(()) => assert!(peer.read(&mut [0; 1]).is_err(), "{port}"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(1), "{error}");
                eprintln!("SKIPPED: this user may not reset connections");
            }
        }
    }
}
