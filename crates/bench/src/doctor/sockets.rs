//! Socket diagnostics (`NETLINK_SOCK_DIAG`, Linux 3.3): TCP connections of this network namespace
//! that an earlier congestion control left paced.

use crate::counters::Counters;
use haul::pacing::{default_congestion, is_pacing};
use haul_sys::tcp_info::TcpInfo;
use haul_units::MIB;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::thread;
use std::time::{Duration, Instant};

// Constants of <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const NLMSG_DONE: u16 = 3;
const NLMSG_ERROR: u16 = 2;
const NETLINK_HEADER_BYTES: usize = 16;
const INET_DIAG_INFO: u16 = 2;
const INET_DIAG_CONG: u16 = 4;
/// Size of `struct inet_diag_msg`: 4 bytes, the socket's identity of 48 bytes, and 20 bytes.
const MESSAGE_BYTES: usize = 72;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// Mask of connection states: `TCP_ESTABLISHED`.
const ESTABLISHED: u32 = 1 << 1;

/// Time between the two readings of the connections.
const WINDOW: Duration = Duration::from_millis(250);
/// Minimum bytes that a connection must send in that time to be examined.
const BUSY_BYTES: u64 = 1 << 20;
/// Timer interrupts per MiB, beyond the tick, that only pacing causes: see [`haul::pacing`].
const PACED_TIMERS_PER_MIB_MIN: f64 = 1.0;
/// The fastest tick with which kernels are built (`CONFIG_HZ`).
const TICKS_PER_SECOND_MAX: f64 = 1000.0;

/// The state of a connection at one time.
#[derive(Debug, PartialEq)]
struct Connection {
    /// The kernel's number of the socket, which is constant for its lifetime.
    cookie: u64,
    name: String,
    congestion: String,
    info: TcpInfo,
}

/// Connections that an earlier congestion control may have left paced, and the timer interrupts
/// that indicate it.
#[derive(Debug, Default)]
pub(super) struct LeftoverPacing {
    /// Busy connections whose congestion control does not pace although the default does: the
    /// addresses and the congestion control of each.
    pub connections: Vec<String>,
    /// Timer interrupts of all CPUs per MiB sent, beyond the fastest tick of each.
    pub timers_per_mib: f64,
}

impl LeftoverPacing {
    /// Whether these connections are paced. In that case each group of packets has its own timer.
    pub fn is_paced(&self) -> bool {
        !self.connections.is_empty() && self.timers_per_mib >= PACED_TIMERS_PER_MIB_MIN
    }
}

/// Watches all connections for [`WINDOW`]. The result is empty if connections that pace for other
/// reasons sent more than a quarter as much, because their timers cannot be separated.
pub(super) fn find_leftover_pacing() -> io::Result<LeftoverPacing> {
    if !default_congestion().is_some_and(|name| is_pacing(&name)) {
        return Ok(LeftoverPacing::default());
    }
    let dump_all = || -> io::Result<Vec<Connection>> {
        Ok(connections(AF_INET)?.into_iter().chain(connections(AF_INET6)?).collect())
    };
    let cpus = haul_lab::allowed_cpus()?;
    let timers = || Counters::read(&cpus);
    let (start, timers_before, before) = (Instant::now(), timers(), dump_all()?);
    thread::sleep(WINDOW);
    let (after, timers_after) = (dump_all()?, timers());
    let ticks = TICKS_PER_SECOND_MAX * start.elapsed().as_secs_f64();
    let (mut suspected_bytes, mut other_bytes, mut names) = (0, 0, Vec::new());
    for connection in &after {
        let Some(earlier) = before.iter().find(|other| other.cookie == connection.cookie) else {
            continue;
        };
        let sent = connection.info.sent_bytes.saturating_sub(earlier.info.sent_bytes);
        let has_rate = connection.info.pacing_rate_bytes_per_second_max != u64::MAX;
        if has_rate || is_pacing(&connection.congestion) {
            other_bytes += sent;
        } else if sent >= BUSY_BYTES {
            suspected_bytes += sent;
            names.push(format!("{} ({})", connection.name, connection.congestion));
        }
    }
    if other_bytes * 4 > suspected_bytes || suspected_bytes == 0 {
        return Ok(LeftoverPacing::default());
    }
    names.sort();
    let excess = |(after, before): (&Counters, &Counters)| {
        (after.since(before).timer_interrupts as f64 - ticks).max(0.0)
    };
    let timers: f64 = timers_after.iter().zip(&timers_before).map(excess).sum();
    let timers_per_mib = timers / (suspected_bytes as f64 / MIB);
    Ok(LeftoverPacing { connections: names, timers_per_mib })
}

fn connections(family: u8) -> io::Result<Vec<Connection>> {
    let socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.send_to(&request(family), &SocketAddr::new(0, 0), 0)?;
    let mut connections = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        match parse(&bytes, &mut connections) {
            DumpState::More => {}
            DumpState::Done => return Ok(connections),
            DumpState::Failed(errno) => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// A dump request for all established TCP connections: `struct nlmsghdr`, followed by
/// `struct inet_diag_req_v2`.
fn request(family: u8) -> Vec<u8> {
    const REQUEST_BYTES: usize = 56;
    let extensions = [INET_DIAG_INFO, INET_DIAG_CONG];
    let extensions = extensions.iter().fold(0u8, |bits, extension| bits | 1 << (extension - 1));
    let mut bytes = Vec::new();
    bytes.extend(((NETLINK_HEADER_BYTES + REQUEST_BYTES) as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family, IPPROTO_TCP, extensions, 0]);
    bytes.extend(ESTABLISHED.to_ne_bytes());
    bytes.resize(NETLINK_HEADER_BYTES + REQUEST_BYTES, 0);
    bytes
}

/// State of a dump after one datagram.
#[derive(Debug, PartialEq, Eq)]
enum DumpState {
    More,
    Done,
    Failed(i32),
}

/// Parses the messages of one datagram; truncated messages are left out.
fn parse(mut bytes: &[u8], connections: &mut Vec<Connection>) -> DumpState {
    while let Some(header) = bytes.get(..NETLINK_HEADER_BYTES) {
        let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let Some(body) = bytes.get(NETLINK_HEADER_BYTES..len) else { return DumpState::Done };
        match kind {
            NLMSG_DONE => return DumpState::Done,
            NLMSG_ERROR => {
                let errno = body.first_chunk::<4>().map_or(0, |errno| i32::from_ne_bytes(*errno));
                return DumpState::Failed(-errno);
            }
            SOCK_DIAG_BY_FAMILY => connections.extend(connection(body)),
            _ => {}
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    DumpState::More
}

/// Parses a `struct inet_diag_msg` and the attributes after it.
fn connection(body: &[u8]) -> Option<Connection> {
    let message = body.get(..MESSAGE_BYTES)?;
    // struct inet_diag_sockid: ports in network order, addresses of 16 bytes, interface, cookie.
    let port = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    let address = |at: usize| -> IpAddr {
        let bytes = message[at..at + 16].first_chunk::<16>().copied().unwrap_or_default();
        if message[0] == AF_INET {
            Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into()
        } else {
            Ipv6Addr::from(bytes).to_canonical()
        }
    };
    let name = format!(
        "{} to {}",
        std::net::SocketAddr::new(address(8), port(4)),
        std::net::SocketAddr::new(address(24), port(6))
    );
    let cookie = u64::from_ne_bytes(*message[44..52].first_chunk()?);
    let mut connection =
        Connection { cookie, name, congestion: String::new(), info: TcpInfo::default() };
    let mut attributes = body.get(MESSAGE_BYTES..)?;
    while let Some(header) = attributes.first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let Some(value) = attributes.get(4..len) else { break };
        match u16::from_ne_bytes([header[2], header[3]]) {
            INET_DIAG_INFO => connection.info = TcpInfo::from_bytes(value),
            INET_DIAG_CONG => {
                connection.congestion =
                    String::from_utf8_lossy(value).trim_end_matches('\0').into();
            }
            _ => {}
        }
        attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_lab::{Lab, Settings};
    use proptest::prelude::*;

    /// In a separate network namespace: a dump waits for each socket that it lists.
    #[test]
    fn socket_diagnostics_list_a_connection_with_its_state() {
        let lab = match Lab::veth(&Settings::default()) {
            Ok(lab) => lab,
            Err(error) => return eprintln!("SKIPPED: socket diagnostics are not tested: {error}"),
        };
        let (client, _server) = lab.connect().unwrap();
        let name = format!("{} to {}", client.local_addr().unwrap(), client.peer_addr().unwrap());
        let all = match lab.sender.run(|| connections(AF_INET)).unwrap() {
            Ok(all) => all,
            Err(error) => return eprintln!("SKIPPED: no socket diagnostics here: {error}"),
        };
        let found = all.iter().find(|connection| connection.name == name).expect(&name);
        let own = haul_sys::tcp_info::tcp_info(&client).unwrap();
        assert_eq!(found.info.segment_bytes, own.segment_bytes);
        assert_eq!(found.congestion, rustix::net::sockopt::tcp_congestion(&client).unwrap());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            parse(&bytes, &mut Vec::new());
            let _ = connection(&bytes);
        }
    }
}
