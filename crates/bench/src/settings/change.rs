//! The settings: how a lab applies each one, the command for a machine, and the risk.

use crate::congestion::paces;
use crate::verdict::Safety;
use haul_lab::{CpuPair, Kind, Lab, LabError, Offloads, Reception, Settings};
use haul_units::Size;
use std::fmt;
use std::fs;
use std::str::FromStr;

/// The default MTU of a link.
pub(super) const MTU_DEFAULT: u32 = 1500;
/// The usual MTU of data centre links.
const MTU_LARGE: u32 = 9000;
/// Three times the largest packet length that an IPv4 header can hold.
const BIG_TCP_BYTES: u32 = 192 << 10;
const BUSY_POLL_US: u32 = 50;
/// A pause in which several packets arrive at any rate that loads a CPU noticeably, yet too short
/// for people to notice.
const READ_PAUSE_US: u32 = 500;
const IPV4_SYSCTLS: &str = "/proc/sys/net/ipv4";

/// The settings that the experiment can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Name {
    /// The congestion control.
    Congestion,
    /// The MTU: the largest packet of the link.
    Mtu,
    /// BIG TCP: the largest packet inside the kernel.
    BigTcp,
    /// The send buffer's maximum (`tcp_wmem`): sent bytes that are not acknowledged yet.
    SendBuffer,
    /// The receive buffer's maximum (`tcp_rmem`): received bytes that are not read yet.
    ReceiveBuffer,
    /// The bytes of the send buffer that may be unsent (`tcp_notsent_lowat`).
    NotsentLowat,
    /// Fixed sizes of both buffers of every socket (`SO_SNDBUF`, `SO_RCVBUF`).
    SocketBuffers,
    /// The received bytes that wake a receiver (`SO_RCVLOWAT`).
    Rcvlowat,
    /// The time that a receiver waits before it reads again.
    ReadPause,
    /// The work that the device does for the stack when it sends: checksums, scatter-gather,
    /// segmentation.
    Offloads,
    /// Merging of received packets (GRO).
    Gro,
    /// Busy polling: polls the device instead of waiting for an interrupt.
    BusyPoll,
}

impl Name {
    /// All settings.
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

/// A setting with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    Congestion(String),
    Mtu(u32),
    BigTcp(u32),
    /// The maximum in `tcp_wmem`.
    SendBuffer(Size),
    /// The maximum in `tcp_rmem`.
    ReceiveBuffer(Size),
    NotsentLowat(Size),
    SocketBuffers(Size),
    Rcvlowat(Size),
    ReadPause(u32),
    /// Segmentation offload off: the stack segments, and a veth's peer receives segments one by
    /// one, as from a wire.
    NoSegmentation,
    /// All sending offloads off: the stack segments, copies and computes checksums.
    NoOffloads,
    Gro,
    BusyPoll(u32),
}

/// The changes of every row that the given settings need. Each row's last change follows the
/// changes that it requires.
///
/// With `verdict_only`, only changes that can be a verdict's, each with its most usual value.
pub(super) fn rows(names: &[Name], basis: &Tuning, verdict_only: bool) -> Vec<Vec<Change>> {
    let available = fs::read_to_string(format!("{IPV4_SYSCTLS}/tcp_available_congestion_control"));
    let available = available.unwrap_or_default();
    let others = available.split_whitespace().filter(|name| *name != basis.congestion);
    let single = [
        Change::Mtu(MTU_LARGE),
        Change::BigTcp(BIG_TCP_BYTES),
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
    // A veth polls only with GRO, and merges only packets that arrive segmented.
    let segmented = [
        vec![Change::NoSegmentation, Change::Gro],
        vec![Change::NoSegmentation, Change::Gro, Change::BusyPoll(BUSY_POLL_US)],
    ];
    let all: Vec<Vec<Change>> = single.chain(segmented).collect();
    let is_named =
        |changes: &[Change]| changes.last().is_some_and(|last| names.contains(&last.name()));
    // A row is also needed if a requested row is compared with it.
    let is_wanted =
        |changes: &[Change]| all.iter().any(|other| is_named(other) && other.starts_with(changes));
    let is_usual = |changes: &[Change]| {
        let unusual = [
            Change::SendBuffer(Size(256 << 10)),
            Change::SendBuffer(Size(16 << 20)),
            Change::ReceiveBuffer(Size(256 << 10)),
            Change::NotsentLowat(Size(16 << 10)),
        ];
        changes.iter().all(|change| change.safety() != Safety::Risky && !unusual.contains(change))
    };
    all.iter()
        .filter(|changes| is_wanted(changes) && (!verdict_only || is_usual(changes)))
        .cloned()
        .collect()
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

    /// The command that applies the change on a machine with this network device.
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
                "in both programs, before connect and listen: setsockopt(SO_SNDBUF, {0}) and \
                 SO_RCVBUF; where they are lower: sysctl -w net.core.wmem_max={0} \
                 net.core.rmem_max={0}",
                bytes.0
            ),
            Self::ReadPause(us) => {
                format!(
                    "in the receiving program: after a read has emptied the socket, wait {us} µs \
                     before the next one"
                )
            }
            Self::NoSegmentation => format!("ethtool -K {device} tso off gso off"),
            Self::NoOffloads => format!("ethtool -K {device} tx off sg off tso off"),
            Self::Gro => format!("ethtool -K {device} gro on"),
            Self::BusyPoll(us) => format!("sysctl -w net.core.busy_read={us}"),
            Self::SendBuffer(_) | Self::ReceiveBuffer(_) | Self::NotsentLowat(_) => String::new(),
        }
    }

    /// The name and the value of the sysctl, if the change is a sysctl of a network namespace.
    fn sysctl(&self) -> Option<(&'static str, String)> {
        // A new namespace starts with the machine's values.
        let memory = |name: &str, max: Size| {
            let current = fs::read_to_string(format!("{IPV4_SYSCTLS}/{name}"));
            with_max(&current.unwrap_or_default(), max)
        };
        match self {
            Self::SendBuffer(max) => Some(("net.ipv4.tcp_wmem", memory("tcp_wmem", *max))),
            Self::ReceiveBuffer(max) => Some(("net.ipv4.tcp_rmem", memory("tcp_rmem", *max))),
            Self::NotsentLowat(bytes) => Some(("net.ipv4.tcp_notsent_lowat", bytes.0.to_string())),
            _ => None,
        }
    }

    /// The order among changes that may save as much: first those without a risk, then the default
    /// congestion control of Linux.
    pub(super) fn preference(&self) -> (Safety, bool) {
        (self.safety(), *self != Self::Congestion("cubic".into()))
    }

    /// Where the change can be made without harm.
    pub(super) fn safety(&self) -> Safety {
        match self {
            // A limit that suits a short path does not fill a long one.
            Self::Congestion(_)
            | Self::SendBuffer(_)
            | Self::ReceiveBuffer(_)
            | Self::NotsentLowat(_)
            | Self::SocketBuffers(_) => Safety::LanOnly,
            Self::Gro => Safety::SafeAnywhere,
            // These cut off hosts, delay data, cost CPU time, or break programs that read packets.
            Self::Mtu(_)
            | Self::BusyPoll(_)
            | Self::BigTcp(_)
            | Self::Rcvlowat(_)
            | Self::ReadPause(_)
            | Self::NoSegmentation
            | Self::NoOffloads => Safety::Risky,
        }
    }

    /// The risk of the change.
    pub(super) fn risk(&self) -> &'static str {
        match self {
            Self::Congestion(name) if paces(name) => {
                "timers pace every send, which costs CPU time; beside loss-based flows it may take \
                 more than its share"
            }
            Self::Congestion(_) => "over long or lossy paths it is slower than bbr",
            Self::Mtu(_) => {
                "every host and switch of the segment must support it; where ICMP is filtered, \
                 connections to others hang"
            }
            Self::BigTcp(_) => {
                "the device must allow it (tso_max_size), and programs that read packets \
                 (captures, tunnels, filters) must support lengths over 64 KiB; Linux 6.3"
            }
            Self::SendBuffer(_) => {
                "smaller: a path with a bandwidth-delay product above about half of it is not \
                 filled; larger: more memory, and data waits longer"
            }
            Self::ReceiveBuffer(_) => {
                "smaller: a path with a bandwidth-delay product above about half of it is not \
                 filled"
            }
            Self::NotsentLowat(_) => {
                "the program is woken more often, and if it is late the link is idle"
            }
            Self::SocketBuffers(_) => {
                "each connection may hold that much memory, and data waits longer in it"
            }
            Self::ReadPause(_) => "data that arrives in the pause waits until its end",
            Self::Rcvlowat(_) => {
                "the end of a message that is shorter than this does not wake the program; lower \
                 it before the last piece"
            }
            Self::NoSegmentation | Self::NoOffloads => "none except its CPU cost",
            Self::Gro => "a router or bridge forwards larger packets than it received",
            Self::BusyPoll(_) => {
                "the CPU is busy while a program waits: it lowers the latency, not the load"
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

/// The settings of a lab's two hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tuning {
    pub congestion: String,
    pub low_water_bytes: usize,
    pub busy_poll_us: u32,
    pub read_pause_us: u32,
    pub buffer_bytes: Option<usize>,
    mtu: u32,
    segment_bytes: Option<u32>,
    /// Name and value of each changed sysctl.
    sysctls: Vec<(&'static str, String)>,
    offloads: Offloads,
    segments: bool,
    gro: bool,
}

impl Tuning {
    /// The host's defaults, with this congestion control if it is given.
    pub(super) fn host_default(congestion: Option<String>) -> Self {
        let own = || {
            let name = fs::read_to_string(format!("{IPV4_SYSCTLS}/tcp_congestion_control"));
            name.map_or_else(|_| "cubic".into(), |name| name.trim().to_owned())
        };
        Self {
            congestion: congestion.unwrap_or_else(own),
            low_water_bytes: 1,
            busy_poll_us: 0,
            read_pause_us: 0,
            buffer_bytes: None,
            mtu: MTU_DEFAULT,
            segment_bytes: None,
            sysctls: Vec::new(),
            offloads: Offloads::On,
            segments: true,
            gro: false,
        }
    }

    /// The settings in words.
    pub(super) fn description(&self) -> String {
        let max = |name: &str| {
            let text = fs::read_to_string(format!("{IPV4_SYSCTLS}/{name}")).unwrap_or_default();
            text.split_whitespace().last().and_then(|max| max.parse().ok()).map_or(Size(0), Size)
        };
        format!(
            "congestion control {}, MTU {}, send buffer to {}, receive buffer to {}",
            self.congestion,
            self.mtu,
            max("tcp_wmem"),
            max("tcp_rmem")
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

    /// Creates a lab whose hosts have these settings.
    pub(super) fn open(&self, cpus: Option<CpuPair>) -> Result<Lab, LabError> {
        let lab = Lab::open(&Settings::default().with_mtu(self.mtu).with_cpus(cpus))?;
        if lab.kind() == Kind::Loopback && self.mtu != MTU_DEFAULT {
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

/// The three numbers of `tcp_wmem` or `tcp_rmem` with another maximum. The first two are lowered to
/// it if they exceed it.
fn with_max(current: &str, max: Size) -> String {
    let mut numbers = current.split_whitespace().map(|number| number.parse().unwrap_or(u64::MAX));
    let mut next = || numbers.next().unwrap_or(u64::MAX).min(max.0);
    format!("{} {} {}", next(), next(), max.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maximum_changes_and_bounds_the_other_sizes() {
        assert_eq!(with_max("4096\t131072\t33554432\n", Size(1 << 20)), "4096 131072 1048576");
        assert_eq!(with_max("4096\t131072\t33554432\n", Size(1 << 16)), "4096 65536 65536");
        assert_eq!(with_max("", Size(1 << 16)), "65536 65536 65536");
    }

    #[test]
    fn a_row_includes_the_rows_it_is_compared_with() {
        let basis = Tuning::host_default(Some("reno".into()));
        let rows = rows(&[Name::BusyPoll], &basis, false);
        assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(rows.windows(2).all(|pair| pair[1].starts_with(&pair[0])));
    }

    /// Every change reaches both hosts of the lab, and an unchanged lab keeps its values.
    #[test]
    fn changes_are_applied_to_the_lab() {
        let changes = [
            Change::Mtu(9000),
            Change::SendBuffer(Size(256 << 10)),
            Change::ReceiveBuffer(Size(1 << 20)),
            Change::NotsentLowat(Size(16 << 10)),
            Change::NoSegmentation,
        ];
        let basis = Tuning::host_default(Some("reno".into()));
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
            host.run(|| fs::read_to_string(format!("{IPV4_SYSCTLS}/{name}")).unwrap_or_default())
                .unwrap()
        };
        for host in [&set.sender, &set.receiver] {
            assert_eq!(
                host.run(|| haul_lab_sys::interface::mtu(host.device()).unwrap()).unwrap(),
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
            let offload = haul_lab_sys::ethtool::Offload::TcpSegmentation;
            lab.sender
                .run(|| haul_lab_sys::ethtool::offload(lab.sender.device(), offload).unwrap())
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
        let basis = Tuning::host_default(Some("none".into()));
        for name in Name::ALL {
            let rows = rows(&[name], &basis, false);
            assert!(
                rows.iter().any(|row| row.last().is_some_and(|last| last.name() == name)),
                "{name}"
            );
            assert_eq!(name.to_string().parse(), Ok(name));
        }
    }
}
