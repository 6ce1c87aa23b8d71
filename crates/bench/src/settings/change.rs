//! The settings: how each is changed in a lab, by which command on a machine, and what that risks.

use crate::congestion::paces;
use crate::quantity::Size;
use haul_lab::{CpuPair, Kind, Lab, LabError, Offloads, Reception, Settings};
use std::fmt;
use std::fs;
use std::str::FromStr;

/// What a link comes with.
const MTU: u32 = 1500;
/// What links of data centres have.
const MTU_LARGE: u32 = 9000;
/// Three times what a packet of IPv4 can say of its own length.
const SEGMENT_BYTES: u32 = 192 << 10;
const BUSY_POLL_US: u32 = 50;
/// Long enough for several packets to arrive at any rate that costs a CPU much, and short beside what people notice.
const READ_PAUSE_US: u32 = 500;
const SYSCTLS: &str = "/proc/sys/net/ipv4";

/// What can be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Name {
    /// How fast a socket may send.
    Congestion,
    /// The largest packet of the link.
    Mtu,
    /// The largest packet inside the kernel.
    BigTcp,
    /// How much a socket holds that was not acknowledged.
    SendBuffer,
    /// How much a socket holds that was not read.
    ReceiveBuffer,
    /// How much of it may be not sent yet.
    NotsentLowat,
    /// Both buffers of every socket, fixed.
    SocketBuffers,
    /// From how much on a receiver is woken.
    Rcvlowat,
    /// How long a receiver waits before it reads again.
    ReadPause,
    /// What the device does for the stack when it sends.
    Offloads,
    /// Putting packets together on arrival.
    Gro,
    /// Polling the device instead of waiting.
    BusyPoll,
}

impl Name {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Congestion,
        Self::Mtu,
        Self::BigTcp,
        Self::SendBuffer,
        Self::ReceiveBuffer,
        Self::NotsentLowat,
        Self::SocketBuffers,
        Self::Rcvlowat,
        Self::ReadPause,
        Self::Offloads,
        Self::Gro,
        Self::BusyPoll,
    ];
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Congestion => "congestion",
            Self::Mtu => "mtu",
            Self::BigTcp => "big-tcp",
            Self::SendBuffer => "send-buffer",
            Self::ReceiveBuffer => "receive-buffer",
            Self::NotsentLowat => "notsent-lowat",
            Self::SocketBuffers => "socket-buffers",
            Self::Rcvlowat => "rcvlowat",
            Self::ReadPause => "read-pause",
            Self::Offloads => "offloads",
            Self::Gro => "gro",
            Self::BusyPoll => "busy-poll",
        })
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|name| name.to_string() == text);
        let names = || Self::ALL.map(|name| name.to_string()).join(", ");
        found.ok_or_else(|| format!("unknown setting {text:?}; the settings are {}", names()))
    }
}

/// One setting and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Congestion(String),
    Mtu(u32),
    BigTcp(u32),
    /// The most that `tcp_wmem` lets a socket's buffer grow to.
    SendBuffer(Size),
    /// The same of `tcp_rmem`.
    ReceiveBuffer(Size),
    NotsentLowat(Size),
    SocketBuffers(Size),
    Rcvlowat(Size),
    ReadPause(u32),
    /// The stack cuts segments, and a veth's peer gets them one by one, as from a wire.
    NoSegmentation,
    /// The stack cuts, copies and sums.
    NoOffloads,
    Gro,
    BusyPoll(u32),
}

/// The changes of every row that the named settings make: each change, after those that it takes first.
pub(super) fn rows(names: &[Name], basis: &Tuning) -> Vec<Vec<Change>> {
    let available = fs::read_to_string(format!("{SYSCTLS}/tcp_available_congestion_control"));
    let available = available.unwrap_or_default();
    let others = available.split_whitespace().filter(|name| *name != basis.congestion);
    let single = [
        Change::Mtu(MTU_LARGE),
        Change::BigTcp(SEGMENT_BYTES),
        Change::SendBuffer(Size(256 << 10)),
        Change::SendBuffer(Size(1 << 20)),
        Change::SendBuffer(Size(16 << 20)),
        Change::ReceiveBuffer(Size(256 << 10)),
        Change::ReceiveBuffer(Size(1 << 20)),
        Change::NotsentLowat(Size(16 << 10)),
        Change::NotsentLowat(Size(128 << 10)),
        Change::SocketBuffers(Size(4 << 20)),
        Change::Rcvlowat(Size(64 << 10)),
        Change::Rcvlowat(Size(256 << 10)),
        Change::ReadPause(READ_PAUSE_US),
        Change::NoOffloads,
        Change::NoSegmentation,
    ];
    let single =
        others.map(|name| Change::Congestion(name.into())).chain(single).map(|change| vec![change]);
    // A veth polls only with GRO, and puts together only what came in pieces.
    let in_pieces = [
        vec![Change::NoSegmentation, Change::Gro],
        vec![Change::NoSegmentation, Change::Gro, Change::BusyPoll(BUSY_POLL_US)],
    ];
    let all: Vec<Vec<Change>> = single.chain(in_pieces).collect();
    let is_named =
        |changes: &[Change]| changes.last().is_some_and(|last| names.contains(&last.name()));
    // A row is needed also where a named one is compared with it.
    let is_wanted =
        |changes: &[Change]| all.iter().any(|other| is_named(other) && other.starts_with(changes));
    all.iter().filter(|changes| is_wanted(changes)).cloned().collect()
}

impl Change {
    pub(super) fn name(&self) -> Name {
        match self {
            Self::Congestion(_) => Name::Congestion,
            Self::Mtu(_) => Name::Mtu,
            Self::BigTcp(_) => Name::BigTcp,
            Self::SendBuffer(_) => Name::SendBuffer,
            Self::ReceiveBuffer(_) => Name::ReceiveBuffer,
            Self::NotsentLowat(_) => Name::NotsentLowat,
            Self::SocketBuffers(_) => Name::SocketBuffers,
            Self::Rcvlowat(_) => Name::Rcvlowat,
            Self::ReadPause(_) => Name::ReadPause,
            Self::NoSegmentation | Self::NoOffloads => Name::Offloads,
            Self::Gro => Name::Gro,
            Self::BusyPoll(_) => Name::BusyPoll,
        }
    }

    /// What sets it on a machine whose device has this name.
    pub(super) fn command(&self, device: &str) -> String {
        if let Some((name, value)) = self.sysctl() {
            let quote = if value.contains(' ') { "'" } else { "" };
            return format!("sysctl -w {name}={quote}{value}{quote}");
        }
        match self {
            Self::Congestion(name) => format!("sysctl -w net.ipv4.tcp_congestion_control={name}"),
            Self::Mtu(mtu) => format!("ip link set dev {device} mtu {mtu}"),
            Self::BigTcp(bytes) => {
                format!(
                    "ip link set dev {device} gso_ipv4_max_size {bytes} gro_ipv4_max_size {bytes}"
                )
            }
            Self::Rcvlowat(bytes) => {
                format!("in the receiving program: setsockopt(SO_RCVLOWAT, {})", bytes.0)
            }
            Self::SocketBuffers(bytes) => format!(
                "in both programs, before connect and listen: setsockopt(SO_SNDBUF, {0}) and SO_RCVBUF; sysctl -w \
                 net.core.wmem_max={0} net.core.rmem_max={0}",
                bytes.0
            ),
            Self::ReadPause(us) => {
                format!(
                    "in the receiving program: once a read has emptied the socket, wait {us} µs before the next"
                )
            }
            Self::NoSegmentation => format!("ethtool -K {device} tso off gso off"),
            Self::NoOffloads => format!("ethtool -K {device} tx off sg off tso off"),
            Self::Gro => format!("ethtool -K {device} gro on"),
            Self::BusyPoll(us) => format!("sysctl -w net.core.busy_read={us}"),
            Self::SendBuffer(_) | Self::ReceiveBuffer(_) | Self::NotsentLowat(_) => String::new(),
        }
    }

    /// Name and value, where it is a sysctl of each network namespace.
    fn sysctl(&self) -> Option<(&'static str, String)> {
        // A namespace that is made starts with the machine's own values.
        let memory = |name: &str, most: Size| {
            with_most(&fs::read_to_string(format!("{SYSCTLS}/{name}")).unwrap_or_default(), most)
        };
        match self {
            Self::SendBuffer(most) => Some(("net.ipv4.tcp_wmem", memory("tcp_wmem", *most))),
            Self::ReceiveBuffer(most) => Some(("net.ipv4.tcp_rmem", memory("tcp_rmem", *most))),
            Self::NotsentLowat(bytes) => Some(("net.ipv4.tcp_notsent_lowat", bytes.0.to_string())),
            _ => None,
        }
    }

    /// What may go wrong.
    pub(super) fn risk(&self) -> &'static str {
        match self {
            Self::Congestion(name) if paces(name) => {
                "timers pace every send, which costs CPU; beside flows that yield to loss it may take more than its share"
            }
            Self::Congestion(_) => "over long or lossy paths it is slower than bbr",
            Self::Mtu(_) => {
                "every host and switch of the segment must take it; where ICMP is filtered, connections to others hang"
            }
            Self::BigTcp(_) => {
                "the device must allow it (tso_max_size), and what reads packets (captures, tunnels, filters) must know lengths over 64 KiB; Linux 6.3"
            }
            Self::SendBuffer(_) => {
                "smaller: a path whose rate times delay exceeds about half of it is not filled; larger: memory, and data that waits longer"
            }
            Self::ReceiveBuffer(_) => {
                "smaller: a path whose rate times delay exceeds about half of it is not filled"
            }
            Self::NotsentLowat(_) => {
                "the program is woken more often, and one that is late leaves the link idle"
            }
            Self::SocketBuffers(_) => {
                "each connection may hold that much memory, and data waits longer in it"
            }
            Self::ReadPause(_) => "what arrives meanwhile waits as long",
            Self::Rcvlowat(_) => {
                "the end of a message below the mark does not wake the program; lower it before the last piece"
            }
            Self::NoSegmentation | Self::NoOffloads => "none but the CPU it costs",
            Self::Gro => "a router or bridge passes on larger packets than came",
            Self::BusyPoll(_) => {
                "the CPU is busy all the while a program waits: it buys latency, not load"
            }
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match self {
            Self::Congestion(value) => write!(formatter, "{name} {value}"),
            Self::Mtu(value) => write!(formatter, "{name} {value}"),
            Self::BigTcp(value) => write!(formatter, "{name} {}", Size((*value).into())),
            Self::SendBuffer(value)
            | Self::ReceiveBuffer(value)
            | Self::NotsentLowat(value)
            | Self::SocketBuffers(value)
            | Self::Rcvlowat(value) => write!(formatter, "{name} {value}"),
            Self::NoSegmentation => formatter.write_str("segmentation off"),
            Self::NoOffloads => formatter.write_str("offloads off"),
            Self::Gro => formatter.write_str("gro on"),
            Self::ReadPause(us) | Self::BusyPoll(us) => write!(formatter, "{name} {us}us"),
        }
    }
}

/// How both hosts of a lab are set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tuning {
    pub congestion: String,
    pub low_water_bytes: usize,
    pub busy_poll_us: u32,
    pub read_pause_us: u32,
    pub buffer_bytes: Option<usize>,
    mtu: u32,
    segment_bytes: Option<u32>,
    /// Name and value of each sysctl that is not as it was.
    sysctls: Vec<(&'static str, String)>,
    offloads: Offloads,
    segments: bool,
    gro: bool,
}

impl Tuning {
    /// As a host comes; with a congestion control instead of its own if one is named.
    pub(super) fn as_it_is(congestion: Option<String>) -> Self {
        let own = || {
            let name = fs::read_to_string(format!("{SYSCTLS}/tcp_congestion_control"));
            name.map_or_else(|_| "cubic".into(), |name| name.trim().to_owned())
        };
        Self {
            congestion: congestion.unwrap_or_else(own),
            low_water_bytes: 1,
            busy_poll_us: 0,
            read_pause_us: 0,
            buffer_bytes: None,
            mtu: MTU,
            segment_bytes: None,
            sysctls: Vec::new(),
            offloads: Offloads::On,
            segments: true,
            gro: false,
        }
    }

    /// What it is in words.
    pub(super) fn words(&self) -> String {
        let most = |name: &str| {
            let text = fs::read_to_string(format!("{SYSCTLS}/{name}")).unwrap_or_default();
            text.split_whitespace().last().and_then(|most| most.parse().ok()).map_or(Size(0), Size)
        };
        format!(
            "congestion control {}, MTU {}, send buffer to {}, receive buffer to {}",
            self.congestion,
            self.mtu,
            most("tcp_wmem"),
            most("tcp_rmem")
        )
    }

    pub(super) fn with(&self, changes: &[Change]) -> Self {
        let mut tuning = self.clone();
        for change in changes {
            tuning.change(change);
        }
        tuning
    }

    fn change(&mut self, change: &Change) {
        self.sysctls.extend(change.sysctl());
        match change {
            Change::Congestion(name) => self.congestion.clone_from(name),
            Change::Mtu(mtu) => self.mtu = *mtu,
            Change::BigTcp(bytes) => self.segment_bytes = Some(*bytes),
            Change::SendBuffer(_) | Change::ReceiveBuffer(_) | Change::NotsentLowat(_) => {}
            Change::SocketBuffers(bytes) => self.buffer_bytes = Some(bytes.0 as usize),
            Change::ReadPause(us) => self.read_pause_us = *us,
            Change::Rcvlowat(bytes) => self.low_water_bytes = bytes.0 as usize,
            Change::NoSegmentation => self.segments = false,
            Change::NoOffloads => self.offloads = Offloads::Off,
            Change::Gro => self.gro = true,
            Change::BusyPoll(us) => self.busy_poll_us = *us,
        }
    }

    /// Makes two hosts that are set so.
    pub(super) fn open(&self, cpus: Option<CpuPair>) -> Result<Lab, LabError> {
        let lab = Lab::open(&Settings { mtu: self.mtu, cpus })?;
        if lab.kind() == Kind::Loopback && self.mtu != MTU {
            return Err(LabError::Loopback("the MTU"));
        }
        for host in [&lab.sender, &lab.receiver] {
            for (name, value) in &self.sysctls {
                host.set_sysctl(name, value)?;
            }
        }
        if let Some(bytes) = self.segment_bytes {
            lab.set_segment_bytes(bytes)?;
        }
        if self.offloads == Offloads::Off {
            lab.set_offloads(self.offloads)?;
        }
        if !self.segments {
            lab.set_segmentation(false)?;
        }
        if self.gro {
            lab.receiver.set_reception(Reception { gro: true, ..Reception::default() })?;
        }
        Ok(lab)
    }
}

/// The three numbers of a `tcp_wmem` or `tcp_rmem` with another most; the others are never above it.
fn with_most(now: &str, most: Size) -> String {
    let mut numbers = now.split_whitespace().map(|number| number.parse().unwrap_or(u64::MAX));
    let mut next = || numbers.next().unwrap_or(u64::MAX).min(most.0);
    format!("{} {} {}", next(), next(), most.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_of_a_buffer_changes_and_nothing_is_above_it() {
        assert_eq!(with_most("4096\t131072\t33554432\n", Size(1 << 20)), "4096 131072 1048576");
        assert_eq!(with_most("4096\t131072\t33554432\n", Size(1 << 16)), "4096 65536 65536");
        assert_eq!(with_most("", Size(1 << 16)), "65536 65536 65536");
    }

    #[test]
    fn a_row_brings_the_one_it_is_compared_with() {
        let basis = Tuning::as_it_is(Some("reno".into()));
        let rows = rows(&[Name::BusyPoll], &basis);
        assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(rows.windows(2).all(|pair| pair[1].starts_with(&pair[0])));
    }

    /// What is set stands in the lab, on both its hosts, and nothing else does.
    #[test]
    fn what_is_changed_is_set_in_the_lab() {
        let changes = [
            Change::Mtu(9000),
            Change::SendBuffer(Size(256 << 10)),
            Change::ReceiveBuffer(Size(1 << 20)),
            Change::NotsentLowat(Size(16 << 10)),
            Change::NoSegmentation,
        ];
        let basis = Tuning::as_it_is(Some("reno".into()));
        let (plain, set) = match (basis.open(None), basis.with(&changes).open(None)) {
            (Ok(plain), Ok(set)) if plain.kind() == Kind::Veth => (plain, set),
            (plain, set) => {
                return eprintln!(
                    "SKIPPED: there is no lab to set: {:?} {:?}",
                    plain.err(),
                    set.err()
                );
            }
        };
        let read = |host: &haul_lab::Host, name: &str| {
            host.run(|| fs::read_to_string(format!("{SYSCTLS}/{name}")).unwrap_or_default())
                .unwrap()
        };
        for host in [&set.sender, &set.receiver] {
            assert_eq!(
                host.run(|| haul_sys::interface::mtu(host.device()).unwrap()).unwrap(),
                9000
            );
            assert!(
                read(host, "tcp_wmem").trim().ends_with("\t262144"),
                "{}",
                read(host, "tcp_wmem")
            );
            assert!(
                read(host, "tcp_rmem").trim().ends_with("\t1048576"),
                "{}",
                read(host, "tcp_rmem")
            );
            assert_eq!(read(host, "tcp_notsent_lowat").trim(), "16384");
        }
        let segments = |lab: &Lab| {
            let offload = haul_sys::ethtool::Offload::TcpSegmentation;
            lab.sender
                .run(|| haul_sys::ethtool::offload(lab.sender.device(), offload).unwrap())
                .unwrap()
        };
        assert!(segments(&plain) && !segments(&set));
        assert_ne!(read(&plain.sender, "tcp_wmem"), read(&set.sender, "tcp_wmem"));
        assert_eq!(basis.with(&[Change::Congestion("cubic".into())]).congestion, "cubic");
        let polled = basis.with(&[Change::BusyPoll(50), Change::Rcvlowat(Size(64 << 10))]);
        assert_eq!((polled.busy_poll_us, polled.low_water_bytes), (50, 64 << 10));
    }

    #[test]
    fn every_setting_has_a_row() {
        let basis = Tuning::as_it_is(Some("none".into()));
        for name in Name::ALL {
            let rows = rows(&[name], &basis);
            assert!(
                rows.iter().any(|row| row.last().is_some_and(|last| last.name() == name)),
                "{name}"
            );
            assert_eq!(name.to_string().parse(), Ok(name));
        }
    }
}
