//! Clamps the congestion window of connections to peers that are microseconds away, so that more is
//! queued than in flight (Linux 5.7).
//!
//! Without loss the window grows until it holds the whole send buffer. Every packet then leaves
//! from a system call, and each interrupts the CPU of a peer on the same machine. While the window
//! is full and more is queued, the kernel sends from its own interrupt at each acknowledgement:
//! several packets for one interrupt, 0.61 to 0.98 of the CPU time for each byte of a file server
//! (docs/measurements/file-servers.md).
//!
//! No socket option limits the window, so this is a BPF program of the process's control group,
//! which needs `CAP_BPF` and `CAP_NET_ADMIN` while it is attached (Linux 5.7: `CAP_SYS_ADMIN`). It
//! concerns connections with a round trip of up to a millisecond. The limit is what 100 Gbit/s need
//! during the shortest round trip, in whole packets: it can slow down one connection that is faster
//! than 80 Gbit/s.
//! If the usual round trip grows beyond 8 ms, as behind a firewall that answers handshakes
//! for its clients, the clamp is lifted for good.
//!
//! Where the interface takes one segment at a time, each segment is a separate packet anyway, and
//! the clamp costs more than it saves (docs/measurements/file-servers.md). Connections from and to
//! the addresses that such interfaces have when the program is attached are left alone.
//!
//! The kernel selects connections by their control group and ports, so the clamp also holds for
//! other programs of this group, or of a group below, that use these ports. The clamp replaces a
//! window that the route limits (`ip route … cwnd`). While this BPF program is attached, another
//! BPF program can be attached to the group only with `BPF_F_ALLOW_MULTI`.

use haul_sys::bpf::{self, Instruction};
use haul_sys::interface;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

/// Connections with a longer shortest round trip are left alone.
const RTT_US_MAX: i32 = 1000;
/// Connections whose usual round trip is longer are not clamped: 4 MiB, a full send buffer that is
/// all in flight, take 3 ms at 10 Gbit/s.
const SMOOTHED_RTT_US_MAX: i32 = 4000;
/// The clamp of connections whose usual round trip is longer is lifted: five packets in 8 ms are
/// 326 Mbit/s.
const LIFT_US: i32 = 8000;
/// 100 Gbit/s, before it is rounded down to whole packets.
const BYTES_PER_US: i32 = 12_500;
/// The kernel's largest packet: `GSO_LEGACY_MAX_SIZE` less `MAX_TCP_HEADER + 1` (sk_setup_caps in
/// net/core/sock.c). With BIG TCP its packets are larger than assumed here.
const PACKET_BYTES: i32 = 65_536 - 321;
/// The window is never set to less, and always to whole packets: a packet of the rest would cost as
/// much as a full one. Five were the cheapest (docs/measurements/file-server-tuning.md).
const PACKETS_MIN: i32 = 5;
/// Ports in the program, so that it stays short.
const PORTS_MAX: usize = 64;
/// Addresses in the program. The connections of further ones are clamped.
const ADDRESSES_MAX: usize = 64;

/// The program, attached while this lives.
#[derive(Debug)]
pub struct WindowClamp {
    _link: OwnedFd,
}

/// The connections whose window is clamped.
#[derive(Debug, Clone, Default)]
pub struct ClampedPorts {
    /// Connections that are accepted at these ports, by sockets of this process. A socket of
    /// systemd belongs to the control group of its unit.
    pub accepted: Vec<u16>,
    /// Connections that are made to these ports.
    pub connected: Vec<u16>,
}

impl WindowClamp {
    /// Loads the BPF program and attaches it to the control group (cgroup v2) of this process.
    ///
    /// Fails with `PermissionDenied` without the capabilities, as for an ordinary user and in most
    /// containers; with `NotFound` without a cgroup v2; and with `InvalidInput` if `ports` has no
    /// port or too many ports.
    pub fn attach(ports: &ClampedPorts) -> io::Result<Self> {
        // Where they cannot be listed, all connections are clamped.
        let left_alone = interface::addresses_without_segmentation_offload().unwrap_or_default();
        Self::attach_except(ports, &left_alone)
    }

    /// Attaches the program, which leaves connections from and to these local addresses alone.
    fn attach_except(ports: &ClampedPorts, left_alone: &[IpAddr]) -> io::Result<Self> {
        let count = ports.accepted.len() + ports.connected.len();
        if !(1..=PORTS_MAX).contains(&count) {
            let message = format!(
                "{count} ports: 1 to {PORTS_MAX} are possible, without those of systemd's sockets"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let left_alone = &left_alone[..left_alone.len().min(ADDRESSES_MAX)];
        let program = bpf::load_sock_ops(&program(ports, left_alone))?;
        let cgroup = File::open(own_cgroup()?)?;
        Ok(Self { _link: bpf::attach_to_cgroup(program, cgroup)? })
    }

    /// Attaches the program if the operator wants the clamp. Returns the consequence, as one line,
    /// if the kernel refuses the program.
    pub fn attach_if(is_wanted: bool, ports: &ClampedPorts) -> (Option<Self>, Option<String>) {
        if !is_wanted {
            return (None, None);
        }
        match Self::attach(ports) {
            Ok(clamp) => (Some(clamp), None),
            Err(error) => {
                (None, Some(format!("the congestion window of near peers is not clamped: {error}")))
            }
        }
    }
}

/// The directory of this process's control group of version 2.
fn own_cgroup() -> io::Result<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let missing = "no control group of version 2 is mounted that holds this process";
    cgroup_path(&groups, &mounts).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, missing))
}

/// The path of a process's control group, from the files `cgroup` and `mountinfo` of the process.
///
/// A container may have another part of the hierarchy mounted than the one that its own group is
/// named in; then there is none.
fn cgroup_path(groups: &str, mounts: &str) -> Option<PathBuf> {
    let group = Path::new(groups.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().filter(|line| line.contains(" - cgroup2 ")).find_map(|mount| {
        // "36 35 98:0 / /sys/fs/cgroup rw,noatime shared:1 - cgroup2 cgroup2 rw"
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let below = group.strip_prefix(root).ok()?;
        let is_above = |part| part == Component::ParentDir;
        (!group.components().any(is_above)).then(|| Path::new(point).join(below))
    })
}

/// Fields of `struct bpf_sock_ops` (uapi/linux/bpf.h), by their offsets.
mod field {
    pub const OP: i16 = 0;
    pub const LOCAL_IPV4: i16 = 28;
    /// Four numbers.
    pub const LOCAL_IPV6: i16 = 48;
    pub const REMOTE_PORT: i16 = 64;
    pub const LOCAL_PORT: i16 = 68;
    pub const SRTT_US: i16 = 80;
    pub const CB_FLAGS: i16 = 84;
    pub const RTT_MIN: i16 = 92;
    pub const SND_SSTHRESH: i16 = 96;
    pub const MSS_CACHE: i16 = 112;
}

/// `TCP_INFINITE_SSTHRESH` (include/net/tcp.h): no loss, no clamp.
const INFINITE_SSTHRESH: i32 = 0x7FFF_FFFF;

// Operations and flags of the same header.
const BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB: i32 = 4;
const BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB: i32 = 5;
const BPF_SOCK_OPS_RTT_CB: i32 = 12;
const BPF_SOCK_OPS_RTT_CB_FLAG: i32 = 1 << 3;
const TCP_BPF_SNDCWND_CLAMP: i32 = 1002;
const SOL_TCP: i32 = 6;
/// Numbers of helper functions.
const BPF_FUNC_SETSOCKOPT: i32 = 49;
const BPF_FUNC_SOCK_OPS_CB_FLAGS_SET: i32 = 59;

// Operation codes (Documentation/bpf/standardization/instruction-set.rst).
const LOAD_U32: u8 = 0x61;
const STORE_U32: u8 = 0x63;
const MOVE: u8 = 0xBF;
const MOVE_CONSTANT: u8 = 0xB7;
const ADD_CONSTANT: u8 = 0x07;
const OR_CONSTANT: u8 = 0x47;
const AND_CONSTANT: u8 = 0x57;
const SHIFT_RIGHT_CONSTANT: u8 = 0x77;
const MULTIPLY_CONSTANT: u8 = 0x27;
const MULTIPLY: u8 = 0x2F;
const DIVIDE_CONSTANT: u8 = 0x37;
const DIVIDE: u8 = 0x3F;
const JUMP: u8 = 0x05;
/// Of the lower 32 bits.
const JUMP_IF_EQUAL: u8 = 0x16;
const JUMP_IF_NOT_EQUAL: u8 = 0x56;
const JUMP_IF_GREATER: u8 = 0x25;
const JUMP_IF_GREATER_OR_EQUAL: u8 = 0x3D;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// A place in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Named,
    Begin,
    /// After the comparison with the left address of this index.
    Compared(usize),
    Measured,
    Packets,
    Segments,
    Lift,
    Set,
    End,
}

/// A program under construction.
#[derive(Debug, Default)]
struct Assembler {
    instructions: Vec<Instruction>,
    /// Jumps whose offset is not known yet.
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

impl Assembler {
    fn push(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        let registers = to | from << 4;
        self.instructions.push(Instruction { code, registers, offset, immediate });
    }

    fn load(&mut self, to: u8, field: i16) {
        self.push(LOAD_U32, to, CONTEXT, field, 0);
    }

    fn set(&mut self, to: u8, constant: i32) {
        self.push(MOVE_CONSTANT, to, 0, 0, constant);
    }

    fn jump(&mut self, code: u8, register: u8, other: u8, constant: i32, label: Label) {
        self.jumps.push((self.instructions.len(), label));
        self.push(code, register, other, 0, constant);
    }

    /// Ends the program if the connection's local address is one of these. Uses register 4.
    fn end_if_local(&mut self, addresses: &[IpAddr]) {
        for (index, address) in addresses.iter().enumerate() {
            let different = Label::Compared(index);
            // The fields are in network byte order.
            match address.to_canonical() {
                IpAddr::V4(address) => {
                    self.jump_unless(field::LOCAL_IPV4, address.octets(), different);
                }
                IpAddr::V6(address) => {
                    let words = address.octets();
                    for (offset, word) in (0..).step_by(4).zip(words.as_chunks().0) {
                        self.jump_unless(field::LOCAL_IPV6 + offset, *word, different);
                    }
                }
            }
            self.jump(JUMP, 0, 0, 0, Label::End);
            self.label(different);
        }
    }

    fn jump_unless(&mut self, field: i16, word: [u8; 4], label: Label) {
        self.load(4, field);
        self.jump(JUMP_IF_NOT_EQUAL, 4, 0, i32::from_ne_bytes(word), label);
    }

    /// Sets the events of the connection, whose flags are in register 2. Flags that another program
    /// has set stay.
    fn set_events(&mut self) {
        self.push(MOVE, 1, CONTEXT, 0, 0);
        self.push(CALL, 0, 0, 0, BPF_FUNC_SOCK_OPS_CB_FLAGS_SET);
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.instructions.len()));
    }

    fn finish(mut self) -> Vec<Instruction> {
        for (at, label) in self.jumps {
            let target = self.labels.iter().find(|(other, _)| *other == label);
            if let Some((_, target)) = target {
                self.instructions[at].offset = (target - at - 1) as i16;
            }
        }
        self.instructions
    }
}

/// The register that keeps the context during calls.
const CONTEXT: u8 = 6;
/// The frame pointer.
const FRAME: u8 = 10;

/// The program: at the beginning of a connection, unless its local address is one of `left_alone`,
/// it asks for an event at each new round-trip time. At each of them it lowers the clamp to what
/// the shortest one needs, or lifts it for good.
///
/// The clamp also sets the threshold of slow start, so it is set only while it is below that: after
/// a loss the threshold is the congestion control's. To lift it starts slow start once more. A
/// clamped connection that was silent for five minutes, for which the kernel remembers the shortest
/// round trip, is not lifted any more if all others are longer than a millisecond.
fn program(ports: &ClampedPorts, left_alone: &[IpAddr]) -> Vec<Instruction> {
    let mut code = Assembler::default();
    code.push(MOVE, CONTEXT, 1, 0, 0);
    code.load(2, field::LOCAL_PORT);
    for &port in &ports.accepted {
        code.jump(JUMP_IF_EQUAL, 2, 0, i32::from(port), Label::Named);
    }
    code.load(2, field::REMOTE_PORT);
    for &port in &ports.connected {
        code.jump(JUMP_IF_EQUAL, 2, 0, remote_port(port), Label::Named);
    }
    code.jump(JUMP, 0, 0, 0, Label::End);
    code.label(Label::Named);
    code.load(3, field::OP);
    code.load(2, field::CB_FLAGS);
    code.jump(JUMP_IF_EQUAL, 3, 0, BPF_SOCK_OPS_RTT_CB, Label::Measured);
    code.jump(JUMP_IF_EQUAL, 3, 0, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, Label::Begin);
    code.jump(JUMP_IF_EQUAL, 3, 0, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, Label::Begin);
    code.jump(JUMP, 0, 0, 0, Label::End);
    code.label(Label::Begin);
    code.end_if_local(left_alone);
    code.push(OR_CONSTANT, 2, 0, 0, BPF_SOCK_OPS_RTT_CB_FLAG);
    code.set_events();
    code.jump(JUMP, 0, 0, 0, Label::End);
    code.label(Label::Measured);
    code.load(3, field::RTT_MIN);
    code.jump(JUMP_IF_GREATER, 3, 0, RTT_US_MAX, Label::End);
    code.load(4, field::SRTT_US);
    // The field is in eighths.
    code.push(SHIFT_RIGHT_CONSTANT, 4, 0, 0, 3);
    code.load(5, field::SND_SSTHRESH);
    code.jump(JUMP_IF_GREATER, 4, 0, LIFT_US, Label::Lift);
    code.jump(JUMP_IF_GREATER, 4, 0, SMOOTHED_RTT_US_MAX, Label::End);
    code.push(MULTIPLY_CONSTANT, 3, 0, 0, BYTES_PER_US);
    code.push(DIVIDE_CONSTANT, 3, 0, 0, PACKET_BYTES);
    code.jump(JUMP_IF_GREATER, 3, 0, PACKETS_MIN, Label::Packets);
    code.set(3, PACKETS_MIN);
    code.label(Label::Packets);
    code.load(4, field::MSS_CACHE);
    code.jump(JUMP_IF_EQUAL, 4, 0, 0, Label::End);
    code.set(1, PACKET_BYTES);
    code.push(DIVIDE, 1, 4, 0, 0);
    code.jump(JUMP_IF_GREATER, 1, 0, 0, Label::Segments);
    // A segment of loopback may be longer.
    code.set(1, 1);
    code.label(Label::Segments);
    code.push(MULTIPLY, 3, 1, 0, 0);
    code.jump(JUMP_IF_GREATER_OR_EQUAL, 3, 5, 0, Label::End);
    code.push(STORE_U32, FRAME, 3, -4, 0);
    code.jump(JUMP, 0, 0, 0, Label::Set);
    code.label(Label::Lift);
    // Neither clamped nor lost.
    code.jump(JUMP_IF_EQUAL, 5, 0, INFINITE_SSTHRESH, Label::End);
    code.push(AND_CONSTANT, 2, 0, 0, !BPF_SOCK_OPS_RTT_CB_FLAG);
    code.set_events();
    code.set(3, INFINITE_SSTHRESH);
    code.push(STORE_U32, FRAME, 3, -4, 0);
    code.label(Label::Set);
    code.push(MOVE, 1, CONTEXT, 0, 0);
    code.set(2, SOL_TCP);
    code.set(3, TCP_BPF_SNDCWND_CLAMP);
    code.push(MOVE, 4, FRAME, 0, 0);
    code.push(ADD_CONSTANT, 4, 0, 0, -4);
    code.set(5, 4);
    code.push(CALL, 0, 0, 0, BPF_FUNC_SETSOCKOPT);
    code.label(Label::End);
    code.set(0, 1);
    code.push(EXIT, 0, 0, 0, 0);
    code.finish()
}

/// A port as the field of the remote port has it: in network byte order, in the upper half of the
/// number on little-endian processors.
fn remote_port(port: u16) -> i32 {
    if cfg!(target_endian = "little") {
        (u32::from(port.to_be()) << 16) as i32
    } else {
        i32::from(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_sys::tcp_info::{INFINITE_SSTHRESH, TcpInfo, tcp_info};
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use haul_lab::{Lab, Settings};
    use std::time::{Duration, Instant};

    /// A connection, after some bytes in both directions; the accepted socket first.
    fn exchange(listener: &TcpListener) -> [TcpInfo; 2] {
        exchange_with(listener, listener.local_addr().unwrap())
    }

    /// The same at an address of a listener for all of them.
    fn exchange_with(listener: &TcpListener, address: SocketAddr) -> [TcpInfo; 2] {
        let mut client = TcpStream::connect(address).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        for _ in 0..10 {
            client.write_all(&[1; 100]).unwrap();
            server.read_exact(&mut [0; 100]).unwrap();
            server.write_all(&[2; 10_000]).unwrap();
            client.read_exact(&mut [0; 10_000]).unwrap();
        }
        [server, client].map(|socket| tcp_info(socket).unwrap())
    }

    /// Two hosts, and a listener on the sending one.
    fn lab() -> (Lab, TcpListener) {
        let lab = Lab::veth(&Settings::default()).unwrap();
        lab.set_default_congestion("reno").unwrap();
        let listener = lab.sender.run(|| TcpListener::bind((lab.sender.address(), 0)));
        (lab, listener.unwrap().unwrap())
    }

    fn is_clamped(info: TcpInfo) -> bool {
        let window_bytes =
            u64::from(info.slow_start_threshold_segments) * u64::from(info.segment_bytes);
        let longest = u64::from(RTT_US_MAX as u32) * u64::from(BYTES_PER_US as u32);
        let is_clamped = info.slow_start_threshold_segments != INFINITE_SSTHRESH;
        assert!(!is_clamped || window_bytes <= longest, "{info:?}");
        is_clamped
    }

    #[test]
    fn the_window_is_clamped_for_the_named_ports_while_the_program_is_attached() {
        let [accepting, connected, other] =
            [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        // As on a network: a packet holds many segments.
        haul_sys::sockopt::set_max_segment(&accepting, 1460).unwrap();
        let port = |listener: &TcpListener| vec![listener.local_addr().unwrap().port()];
        let ports = ClampedPorts { accepted: port(&accepting), connected: port(&connected) };
        let clamp = match WindowClamp::attach(&ports) {
            Ok(clamp) => clamp,
            Err(error) => return eprintln!("SKIPPED: no window is clamped here: {error}"),
        };
        // On a busy machine the handshake of one connection may take longer than a millisecond.
        let clamped = |listener: &TcpListener| {
            let pairs: Vec<_> = (0..20).map(|_| exchange(listener).map(is_clamped)).collect();
            [0, 1].map(|side| pairs.iter().any(|pair| pair[side]))
        };
        assert_eq!(clamped(&accepting), [true, false]);
        let of_accepted: Vec<_> = (0..20).map(|_| exchange(&accepting)[0]).collect();
        let has_whole_packets = |info: &TcpInfo| {
            let segments_per_packet = (PACKET_BYTES as u32 / info.segment_bytes).max(1);
            info.slow_start_threshold_segments.is_multiple_of(segments_per_packet)
        };
        let mut clamped_ones = of_accepted.iter().filter(|info| is_clamped(**info));
        assert!(clamped_ones.all(has_whole_packets), "{of_accepted:?}");
        assert_eq!(clamped(&connected), [false, true]);
        assert_eq!(clamped(&other), [false, false]);
        drop(clamp);
        assert_eq!(clamped(&accepting), [false, false]);
    }

    #[test]
    fn connections_of_addresses_without_segmentation_offload_are_left_alone() {
        let listeners = ["127.0.0.1:0", "[::1]:0", "[::]:0"].map(TcpListener::bind);
        let [Ok(one), Ok(two), Ok(both)] = listeners else {
            return eprintln!("SKIPPED: no IPv6 here: {listeners:?}");
        };
        let listeners = [one, two, both];
        for listener in &listeners {
            haul_sys::sockopt::set_max_segment(listener, 1440).unwrap();
        }
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let accepted = listeners.iter().map(port).collect();
        let ports = ClampedPorts { accepted, connected: Vec::new() };
        let address = |index: usize| match index {
            // An IPv4 address of a socket for both versions.
            2 => ([127, 0, 0, 1], port(&listeners[2])).into(),
            _ => listeners[index].local_addr().unwrap(),
        };
        // On a busy machine the handshake of one connection may take longer than a millisecond.
        let clamped = || {
            [0, 1, 2].map(|index| {
                let pair = || exchange_with(&listeners[index], address(index));
                (0..20).any(|_| is_clamped(pair()[0]))
            })
        };
        for (left_alone, expected) in [
            (["127.0.0.2", "::2"], [true, true, true]),
            (["127.0.0.1", "::2"], [false, true, false]),
            (["127.0.0.2", "::1"], [true, false, true]),
            (["::1:0:0:1", "127.0.0.1"], [false, true, false]),
        ] {
            let addresses = left_alone.map(|address| address.parse().unwrap());
            let _clamp = match WindowClamp::attach_except(&ports, &addresses) {
                Ok(clamp) => clamp,
                Err(error) => return eprintln!("SKIPPED: no window is clamped here: {error}"),
            };
            assert_eq!(clamped(), expected, "{left_alone:?}");
        }
    }

    #[test]
    fn the_window_is_clamped_only_where_packets_hold_many_segments() {
        let (lab, listener) = lab();
        let address = listener.local_addr().unwrap();
        let ports = ClampedPorts { accepted: vec![address.port()], connected: Vec::new() };
        for has_segmentation in [true, false] {
            lab.set_segmentation_both(has_segmentation).unwrap();
            let _clamp = match lab.sender.run(|| WindowClamp::attach(&ports)).unwrap() {
                Ok(clamp) => clamp,
                Err(error) => return eprintln!("SKIPPED: no window is clamped here: {error}"),
            };
            let pair = || lab.receiver.run(|| exchange_with(&listener, address)).unwrap();
            let is_any_clamped = (0..20).any(|_| is_clamped(pair()[0]));
            assert_eq!(is_any_clamped, has_segmentation);
        }
    }

    /// As behind a firewall that answers handshakes itself.
    #[test]
    fn the_clamp_is_lifted_when_the_path_turns_out_to_be_long() {
        let (lab, listener) = lab();
        let address = listener.local_addr().unwrap();
        let ports = ClampedPorts { accepted: vec![address.port()], connected: Vec::new() };
        let _clamp = match WindowClamp::attach(&ports) {
            Ok(clamp) => clamp,
            Err(error) => return eprintln!("SKIPPED: no window is clamped here: {error}"),
        };
        let connect = || lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let (mut server, client) = loop {
            let (mut client, mut server) = (connect(), listener.accept().unwrap().0);
            server.write_all(&[1; 10_000]).unwrap();
            client.read_exact(&mut [0; 10_000]).unwrap();
            server.write_all(&[1; 10_000]).unwrap();
            client.read_exact(&mut [0; 10_000]).unwrap();
            if is_clamped(tcp_info(&server).unwrap()) {
                break (server, client);
            }
            assert!(Instant::now() < deadline, "no connection is clamped");
        };
        // The full window now takes 100 ms.
        lab.set_rate(Some(20_000_000)).unwrap();
        let reader = std::thread::spawn(move || io::copy(&mut &client, &mut io::sink()));
        server.set_nonblocking(true).unwrap();
        while is_clamped(tcp_info(&server).unwrap()) {
            assert!(Instant::now() < deadline, "the clamp is not lifted");
            // The queue may be full.
            let _ = server.write(&[1; 10_000]);
            std::thread::sleep(Duration::from_micros(100));
        }
        drop(server);
        reader.join().unwrap().unwrap();
    }

    #[test]
    fn the_control_group_is_found_only_below_what_is_mounted() {
        let mount = |root: &str| {
            format!(
                "22 1 254:1 / / rw - ext4 /dev/root rw\n\
                 36 35 0:30 {root} /sys/fs/cgroup rw,noatime shared:1 - cgroup2 cgroup2 rw\n"
            )
        };
        let path = |group: &str, root: &str| {
            cgroup_path(&format!("1:name=systemd:/\n0::{group}\n"), &mount(root))
        };
        for (group, root, expected) in [
            ("/", "/", Some("/sys/fs/cgroup/")),
            ("/system.slice/haul", "/", Some("/sys/fs/cgroup/system.slice/haul")),
            ("/docker/1/a", "/docker/1", Some("/sys/fs/cgroup/a")),
            ("/docker/1", "/docker/2", None),
            ("/", "/../..", None),
            ("/../other", "/", None),
        ] {
            assert_eq!(path(group, root), expected.map(PathBuf::from), "{group} {root}");
        }
        assert_eq!(cgroup_path("1:name=systemd:/\n", &mount("/")), None);
    }

    #[test]
    fn a_refusal_is_reported_only_if_the_clamp_was_asked_for() {
        let none = ClampedPorts::default();
        assert!(matches!(WindowClamp::attach_if(false, &none), (None, None)));
        let (clamp, caveat) = WindowClamp::attach_if(true, &none);
        assert!(clamp.is_none() && caveat.unwrap().contains("0 ports"));
    }
}
