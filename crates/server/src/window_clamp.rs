//! Clamps the congestion window of connections to peers that are microseconds away, so that more is
//! queued than in flight (Linux 5.7).
//!
//! Without loss the window grows until it holds the whole send buffer. Every packet then leaves
//! from a system call, and each interrupts the CPU of a peer on the same machine. While the window
//! is full and more is queued, the kernel sends from its own interrupt at each acknowledgement:
//! several packets for one interrupt, 0.68 to 0.83 of the CPU time for each byte
//! (docs/measurements/file-server-tuning.md).
//!
//! No socket option limits the window, so this is a BPF program of the process's control group,
//! which needs `CAP_BPF` and `CAP_NET_ADMIN` while it is attached. It concerns only the named
//! ports, and connections with a round trip of up to a millisecond. The limit is what 100 Gbit/s
//! need during the shortest round trip: it can slow down one connection that is faster than 100
//! Gbit/s, or whose usual round trip is much longer than its shortest.

use haul_sys::bpf::{self, Instruction};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Connections with a longer round trip are left alone.
const RTT_US_MAX: i32 = 1000;
/// 100 Gbit/s.
const BYTES_PER_US: i32 = 12_500;
/// The window is never smaller. At MTU 9000, 1 MiB saves less than half as much.
const WINDOW_BYTES_MIN: i32 = 256 << 10;
/// Ports in the program, so that it stays short.
const PORTS_MAX: usize = 64;

/// The program, attached while this lives.
#[derive(Debug)]
pub struct WindowClamp {
    _link: OwnedFd,
}

/// The connections whose window is clamped.
#[derive(Debug, Clone, Default)]
pub struct ClampedPorts {
    /// Connections that are accepted at these ports.
    pub accepted: Vec<u16>,
    /// Connections that are made to these ports.
    pub connected: Vec<u16>,
}

impl WindowClamp {
    /// Loads the program and attaches it to this process's control group.
    ///
    /// `PermissionDenied` without the capabilities, as for an ordinary user and in most containers.
    /// `NotFound` if there is no control group of version 2, `InvalidInput` for no or too many
    /// ports.
    pub fn attach(ports: &ClampedPorts) -> io::Result<Self> {
        let count = ports.accepted.len() + ports.connected.len();
        if !(1..=PORTS_MAX).contains(&count) {
            let message = format!("{count} ports: 1 to {PORTS_MAX} are possible");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let program = bpf::load_sock_ops(&program(ports))?;
        let cgroup = File::open(own_cgroup()?)?;
        Ok(Self { _link: bpf::attach_to_cgroup(program, cgroup)? })
    }

    /// Attaches the program if it is `wanted`; `None` stands for "where it is allowed".
    ///
    /// Also returns the consequence, as one line, if it is wanted and not possible.
    pub fn attach_if(wanted: Option<bool>, ports: &ClampedPorts) -> (Option<Self>, Option<String>) {
        if wanted == Some(false) {
            return (None, None);
        }
        match Self::attach(ports) {
            Ok(clamp) => (Some(clamp), None),
            Err(_) if wanted.is_none() => (None, None),
            Err(error) => {
                (None, Some(format!("the congestion window of near peers is not clamped: {error}")))
            }
        }
    }
}

/// The directory of this process's control group of version 2.
fn own_cgroup() -> io::Result<PathBuf> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "no control group of version 2");
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).ok_or_else(missing)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    // "36 35 98:0 / /sys/fs/cgroup rw,noatime shared:1 - cgroup2 cgroup2 rw"
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).ok_or_else(missing)?;
    let point = mount.split(' ').nth(4).ok_or_else(missing)?;
    Ok(PathBuf::from(point).join(group))
}

/// Fields of `struct bpf_sock_ops` (uapi/linux/bpf.h), by their offsets.
mod field {
    pub const OP: i16 = 0;
    pub const REMOTE_PORT: i16 = 64;
    pub const LOCAL_PORT: i16 = 68;
    pub const RTT_MIN: i16 = 92;
    pub const SND_SSTHRESH: i16 = 96;
    pub const MSS_CACHE: i16 = 112;
}

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
const MULTIPLY_CONSTANT: u8 = 0x27;
const DIVIDE: u8 = 0x3F;
const JUMP: u8 = 0x05;
/// Of the lower 32 bits.
const JUMP_IF_EQUAL: u8 = 0x16;
const JUMP_IF_GREATER: u8 = 0x25;
const JUMP_IF_GREATER_OR_EQUAL: u8 = 0x3D;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// A place in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Accepted,
    Near,
    Clamp,
    Store,
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

/// The program: at the beginning of a connection it asks for an event at each new round-trip time,
/// and at each of them it lowers the clamp to what the shortest one needs.
///
/// The clamp also sets the threshold of slow start, so it is set only while it is below that: after
/// a loss the threshold is the congestion control's.
fn program(ports: &ClampedPorts) -> Vec<Instruction> {
    let mut code = Assembler::default();
    code.push(MOVE, CONTEXT, 1, 0, 0);
    code.load(2, field::OP);
    code.jump(JUMP_IF_EQUAL, 2, 0, BPF_SOCK_OPS_RTT_CB, Label::Clamp);
    code.jump(JUMP_IF_EQUAL, 2, 0, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, Label::Accepted);
    code.push(JUMP_IF_EQUAL, 2, 0, 1, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB);
    code.jump(JUMP, 0, 0, 0, Label::End);
    code.load(2, field::REMOTE_PORT);
    for &port in &ports.connected {
        code.jump(JUMP_IF_EQUAL, 2, 0, remote_port(port), Label::Near);
    }
    code.jump(JUMP, 0, 0, 0, Label::End);
    code.label(Label::Accepted);
    code.load(2, field::LOCAL_PORT);
    for &port in &ports.accepted {
        code.jump(JUMP_IF_EQUAL, 2, 0, i32::from(port), Label::Near);
    }
    code.jump(JUMP, 0, 0, 0, Label::End);
    code.label(Label::Near);
    code.load(3, field::RTT_MIN);
    code.jump(JUMP_IF_GREATER, 3, 0, RTT_US_MAX, Label::End);
    code.push(MOVE, 1, CONTEXT, 0, 0);
    code.set(2, BPF_SOCK_OPS_RTT_CB_FLAG);
    code.push(CALL, 0, 0, 0, BPF_FUNC_SOCK_OPS_CB_FLAGS_SET);
    code.label(Label::Clamp);
    code.load(3, field::RTT_MIN);
    code.jump(JUMP_IF_GREATER, 3, 0, RTT_US_MAX, Label::End);
    code.push(MULTIPLY_CONSTANT, 3, 0, 0, BYTES_PER_US);
    code.jump(JUMP_IF_GREATER, 3, 0, WINDOW_BYTES_MIN, Label::Store);
    code.set(3, WINDOW_BYTES_MIN);
    code.label(Label::Store);
    code.load(4, field::MSS_CACHE);
    code.jump(JUMP_IF_EQUAL, 4, 0, 0, Label::End);
    code.push(DIVIDE, 3, 4, 0, 0);
    code.load(5, field::SND_SSTHRESH);
    code.jump(JUMP_IF_GREATER_OR_EQUAL, 3, 5, 0, Label::End);
    code.push(STORE_U32, FRAME, 3, -4, 0);
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
    use std::net::{TcpListener, TcpStream};

    /// A connection, after some bytes in both directions; the accepted socket first.
    fn exchange(listener: &TcpListener) -> [TcpInfo; 2] {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        for _ in 0..10 {
            client.write_all(&[1; 100]).unwrap();
            server.read_exact(&mut [0; 100]).unwrap();
            server.write_all(&[2; 10_000]).unwrap();
            client.read_exact(&mut [0; 10_000]).unwrap();
        }
        [server, client].map(|socket| tcp_info(socket).unwrap())
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
        assert_eq!(clamped(&connected), [false, true]);
        assert_eq!(clamped(&other), [false, false]);
        drop(clamp);
        assert_eq!(clamped(&accepting), [false, false]);
    }

    #[test]
    fn a_refusal_is_reported_only_if_the_clamp_was_asked_for() {
        let none = ClampedPorts::default();
        assert!(matches!(WindowClamp::attach_if(None, &none), (None, None)));
        assert!(matches!(WindowClamp::attach_if(Some(false), &none), (None, None)));
        let (clamp, caveat) = WindowClamp::attach_if(Some(true), &none);
        assert!(clamp.is_none() && caveat.unwrap().contains("0 ports"));
    }
}
