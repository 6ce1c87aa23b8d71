//! The lab: two hosts and the link between them.

use crate::cpus::CpuPair;
use crate::delay_line::DelayLine;
use crate::error::{LabError, MTU_MAX, MTU_MIN};
use crate::host::{self, Host};
use crate::impair::{self, Loss};
use crate::link::{self, Offloads};
use crate::netlink;
use crate::steer;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// Time limit for connecting the two hosts.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Options of a lab.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// CPUs of the hosts; `None` lets [`CpuPair::choose`] select them.
    pub cpus: Option<CpuPair>,
    /// The least time that a packet takes from one host to the other: half the round trip. With one
    /// the hosts are joined by TUN devices, which needs access to `/dev/net/tun`.
    pub delay: Option<Duration>,
}

impl Default for Settings {
    /// MTU 9000, as on data-centre links, and no delay.
    fn default() -> Self {
        Self { mtu: 9000, cpus: None, delay: None }
    }
}

impl Settings {
    /// Sets the link's MTU in bytes.
    #[must_use]
    pub fn with_mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// Sets the CPUs of the hosts.
    #[must_use]
    pub fn with_cpus(mut self, cpus: Option<CpuPair>) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the time that a packet takes from one host to the other.
    #[must_use]
    pub fn with_delay(mut self, delay: Option<Duration>) -> Self {
        self.delay = delay;
        self
    }
}

/// How the two hosts are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Two namespaces and a veth pair.
    Veth,
    /// Two namespaces, a TUN device in each, and a delay between them.
    DelayLine,
    /// The loopback device of the namespace that the process runs in.
    Loopback,
}

/// Two hosts and the link between them.
#[derive(Debug)]
pub struct Lab {
    /// The sending host.
    pub sender: Host,
    /// The receiving host.
    pub receiver: Host,
    kind: Kind,
    mtu: u32,
    caveats: Vec<String>,
    _delay_line: Option<DelayLine>,
}

impl Lab {
    /// Creates two hosts joined by a veth pair, or by a link with a delay.
    pub fn veth(settings: &Settings) -> Result<Self, LabError> {
        if !(MTU_MIN..=MTU_MAX).contains(&settings.mtu) {
            return Err(LabError::Mtu(settings.mtu));
        }
        let cpus = match settings.cpus {
            Some(cpus) => cpus,
            None => CpuPair::choose()?,
        };
        let sender = Host::in_new_namespace(cpus.sender, IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1)))?;
        let receiver =
            Host::in_new_namespace(cpus.receiver, IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2)))?;
        let mut caveats = Vec::new();
        let delay_line = if let Some(delay) = settings.delay {
            caveats.push(
                "packets are delayed by threads of the receiving host's CPU, which count as its \
                 cost"
                    .into(),
            );
            Some(DelayLine::join(&sender, &receiver, settings.mtu, delay)?)
        } else {
            link::join(&sender, &receiver, settings.mtu)?;
            None
        };
        if cpus.share_a_core() {
            caveats.push(format!(
                "CPUs {} and {} are threads of one core: each host's work slows the other's down",
                cpus.sender, cpus.receiver
            ));
        }
        for host in [&sender, &receiver] {
            if let Err(error) = host.run(|| steer::check_or_steer(host.device(), host.cpu()))? {
                caveats.push(format!(
                    "packets received by {} are not steered to CPU {} ({error}): the other host's \
                     CPU processes them, which counts as the other host's cost",
                    host.address(),
                    host.cpu()
                ));
            }
        }
        let kind = if delay_line.is_some() { Kind::DelayLine } else { Kind::Veth };
        let mtu = settings.mtu;
        Ok(Self { sender, receiver, kind, mtu, caveats, _delay_line: delay_line })
    }

    /// Creates a lab without a veth pair: both hosts use the loopback device of the caller's
    /// network namespace. Each has a CPU of its own if there are two.
    pub fn loopback() -> Result<Self, LabError> {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let (cpus, mut caveats) = match CpuPair::choose() {
            Ok(cpus) => (cpus, Vec::new()),
            Err(LabError::OneCpu { cpu }) => (
                CpuPair { sender: cpu, receiver: cpu },
                vec![format!(
                    "both hosts share CPU {cpu}: the sender's figures include the receiver's work"
                )],
            ),
            Err(error) => return Err(error),
        };
        caveats.push(
            "on loopback the sender's CPU also does the receiver's packet work, and offloads \
             cannot be switched"
                .into(),
        );
        Ok(Self {
            sender: Host::on_loopback(cpus.sender, address),
            receiver: Host::on_loopback(cpus.receiver, address),
            kind: Kind::Loopback,
            mtu: haul_lab_sys::interface::mtu("lo")
                .map_err(LabError::step("reading the MTU of lo"))?,
            caveats,
            _delay_line: None,
        })
    }

    /// Creates a veth lab, or falls back to loopback with the reason among its [`Lab::caveats`].
    ///
    /// An invalid setting (such as an impossible MTU) is an error and does not cause a fallback. A
    /// delay that cannot be set does not, either.
    pub fn open(settings: &Settings) -> Result<Self, LabError> {
        match Self::veth(settings) {
            Err(
                reason @ (LabError::NoNamespaces { .. }
                | LabError::OneCpu { .. }
                | LabError::Step { .. }),
            ) if settings.delay.is_none() => {
                let mut lab = Self::loopback()?;
                lab.caveats.insert(
                    0,
                    format!(
                        "no two hosts here, measuring on loopback, whose MTU is {}: {reason}",
                        lab.mtu
                    ),
                );
                Ok(lab)
            }
            result => result,
        }
    }

    /// Connects the sending host to the receiving host over TCP; returns the connecting and the
    /// accepted end.
    pub fn connect(&self) -> Result<(TcpStream, TcpStream), LabError> {
        let address = self.receiver.address();
        let listener = self
            .receiver
            .run(|| TcpListener::bind((address, 0)))?
            .map_err(LabError::step("listening"))?;
        let listen_address = listener.local_addr().map_err(LabError::step("listening"))?;
        let connected = self
            .sender
            .run(|| TcpStream::connect_timeout(&listen_address, CONNECT_MAX))?
            .map_err(LabError::step("connecting"))?;
        let (accepted, _) = listener.accept().map_err(LabError::step("accepting"))?;
        Ok((connected, accepted))
    }

    /// Adds a device to the sending host that accepts packets as a network card does and drops
    /// them.
    ///
    /// Returns an address behind it. Data sent there is not copied on the way, as it is on a veth
    /// to deliver it to the other host.
    pub fn add_sink(&self) -> Result<IpAddr, LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("a device that drops packets"));
        }
        let address = |last| IpAddr::V4(Ipv4Addr::new(10, 78, 0, last));
        self.sender.run(|| {
            netlink::add_sink("haulsink", self.mtu)?;
            netlink::add_address("haulsink", address(1))?;
            netlink::set_up("haulsink")
        })??;
        Ok(address(2))
    }

    /// Sets the default congestion control for later sockets of both hosts.
    ///
    /// The kernel refuses an algorithm that is not in the machine's
    /// `net.ipv4.tcp_allowed_congestion_control`.
    pub fn set_default_congestion(&self, name: &str) -> Result<(), LabError> {
        [&self.sender, &self.receiver]
            .into_iter()
            .try_for_each(|host| host.set_sysctl("net.ipv4.tcp_congestion_control", name))
    }

    /// How the hosts are joined.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The link's MTU in bytes.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// The hosts' CPUs.
    pub fn cpus(&self) -> CpuPair {
        CpuPair { sender: self.sender.cpu(), receiver: self.receiver.cpu() }
    }

    /// Differences of this lab from two machines, one sentence each.
    pub fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// Switches the sending device's offloads and verifies them. Existing connections keep the old
    /// state.
    pub fn set_offloads(&self, wanted: Offloads) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("offloads"));
        }
        self.sender.run(|| link::set_offloads(self.sender.device(), wanted))?
    }

    /// Switches TCP segmentation offload of both devices, as [`Lab::set_segmentation`] does of one.
    pub fn set_segmentation_both(&self, on: bool) -> Result<(), LabError> {
        self.set_segmentation(on)?;
        self.receiver.run(|| link::set_segmentation(self.receiver.device(), on))?
    }

    /// Switches TCP segmentation offload of the sending device.
    ///
    /// Without it the stack splits packets itself, and a veth's peer receives them one by one, as
    /// from a physical link.
    pub fn set_segmentation(&self, on: bool) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("segmentation"));
        }
        self.sender.run(|| link::set_segmentation(self.sender.device(), on))?
    }

    /// Allows IPv4 packets above 64 KiB, up to `bytes`, on both devices (BIG TCP, Linux 6.3).
    pub fn set_segment_bytes(&self, bytes: u32) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("the size of segments"));
        }
        for host in [&self.sender, &self.receiver] {
            host.run(|| netlink::set_segment_bytes(host.device(), bytes))??;
        }
        Ok(())
    }

    /// Limits the sending device to `bits_per_second` with a token bucket filter; `None` removes
    /// the limit.
    ///
    /// A program that owns its sockets should pace them instead (`SO_MAX_PACING_RATE`), because the
    /// token bucket costs CPU time of the sending host.
    pub fn set_rate(&self, bits_per_second: Option<u64>) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("a link rate"));
        }
        self.sender.run(|| impair::set_rate(self.sender.device(), self.mtu, bits_per_second))?
    }

    /// Drops a share of the packets that arrive at the receiver. Needs the `nft` program (Debian:
    /// nftables).
    pub fn set_loss(&self, loss: Loss) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("loss"));
        }
        self.receiver.run(|| impair::set_loss(loss))?
    }
}

/// Moves an ordinary user's process to a new user namespace in which it is root, as a lab requires.
///
/// Call this before the process starts a second thread. Does nothing if the process may create
/// network namespaces already. Files keep their owners: the namespace's root is the calling user
/// outside.
pub fn enter_user_namespace() -> Result<(), LabError> {
    if host::can_create_namespaces() {
        return Ok(());
    }
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    haul_lab_sys::namespace::unshare_user().map_err(host::namespace_error)?;
    // An unprivileged user may write a group map only after setgroups is denied (Linux 3.19).
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("0 {user} 1")),
        ("gid_map", format!("0 {group} 1")),
    ] {
        let file = format!("/proc/self/{file}");
        fs::write(file, text).map_err(host::namespace_error)?;
    }
    Ok(())
}
