//! Two hosts on one machine, for measuring what network work costs each of them.
//!
//! A [`Lab`] is two network namespaces joined by a veth pair. Each [`Host`] has one CPU to itself: its
//! threads are pinned there, and receive packet steering sends the packets that arrive for it there too. So
//! one CPU's load is the sending machine's and the other's the receiving machine's, as with two machines.
//!
//! Nothing is left behind: the namespaces have no name, only file descriptors of this process hold them, and
//! a namespace takes its devices with it. That holds for `kill -9` as well. Programs that were started on a
//! host are killed with this process; programs that those started are their affair, and hold the namespace
//! until they end.
//!
//! What a lab cannot show: a veth pair has no interrupts of its own, no DMA and no wire; `MSG_ZEROCOPY`
//! copies on it; and the two CPUs share a last-level cache and memory.
//!
//! Root needs nothing else. An ordinary user first calls [`become_lab_user`], before the process has a second
//! thread. Where namespaces are forbidden or there is one CPU, [`Lab::open`] falls back to loopback and
//! [`Lab::caveats`] says what that costs.

#![forbid(unsafe_code)]

mod cpus;
mod distance;
mod host;
mod impair;
mod link;
mod netlink;
mod receive;
mod setting;
mod steer;

pub use cpus::{CpuPair, allowed_cpus};
pub use host::{Host, Running};
pub use impair::{Loss, ParseLossError};
pub use link::Offloads;
pub use receive::Reception;
pub use setting::HostSetting;

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// The smallest MTU that carries IPv4 (RFC 791 requires every link to take 576-byte datagrams).
pub const MTU_MIN: u32 = 576;
/// The largest MTU of a veth device (`ETH_MAX_MTU`).
pub const MTU_MAX: u32 = 65_535;

/// How long connecting the two hosts may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Why a lab cannot be made or changed.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The kernel does not let this user make namespaces.
    #[error("namespaces are refused here ({source}): {advice}")]
    NoNamespaces {
        /// What the kernel said.
        source: io::Error,
        /// What to change.
        advice: &'static str,
    },
    /// The process may run on one CPU only.
    #[error(
        "only CPU {cpu} is allowed to this process: give it two (taskset, cpuset) for separate hosts"
    )]
    OneCpu {
        /// The CPU.
        cpu: usize,
    },
    /// An MTU that a veth device cannot have.
    #[error("MTU {0} is outside {MTU_MIN} to {MTU_MAX}")]
    Mtu(u32),
    /// A step of building or changing the lab failed.
    #[error("{step}: {source}")]
    Step {
        /// What was being done.
        step: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A setting that only a veth lab has.
    #[error("{0} cannot be set on loopback: it needs two hosts in namespaces")]
    Loopback(&'static str),
    /// A device kept an offload that it was told to change.
    #[error("device {device} keeps offload {offload} {state}")]
    Offload {
        /// The device.
        device: String,
        /// The offload's ethtool name.
        offload: &'static str,
        /// `on` or `off`.
        state: &'static str,
    },
    /// A setting of the whole machine that cannot be changed.
    #[error("host setting {name} cannot be changed: {source} (run as root, outside a container)")]
    Setting {
        /// Its name, as `sysctl` takes it.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A program that the lab calls is missing or failed.
    #[error("{program} {problem}")]
    Program {
        /// The program.
        program: &'static str,
        /// What is wrong and what to do.
        problem: String,
    },
}

impl LabError {
    fn step(step: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Step { step: step.into(), source }
    }
}

/// What to build.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The link's MTU in bytes.
    pub mtu: u32,
    /// The hosts' CPUs; chosen by [`CpuPair::choose`] when `None`.
    pub cpus: Option<CpuPair>,
}

impl Default for Settings {
    /// MTU 9000, as data-centre links have.
    fn default() -> Self {
        Self { mtu: 9000, cpus: None }
    }
}

/// How the two hosts are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Two namespaces and a veth pair.
    Veth,
    /// The loopback device of the namespace that the process runs in.
    Loopback,
}

/// Two hosts and what joins them.
#[derive(Debug)]
pub struct Lab {
    /// The host that sends.
    pub sender: Host,
    /// The host that receives.
    pub receiver: Host,
    kind: Kind,
    mtu: u32,
    caveats: Vec<String>,
}

impl Lab {
    /// Makes two hosts joined by a veth pair, or says why it cannot.
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
        link::join(&sender, &receiver, settings.mtu)?;
        let mut caveats = Vec::new();
        if cpus.share_a_core() {
            caveats.push(format!(
                "CPUs {} and {} are threads of one core: each host's work slows the other's down",
                cpus.sender, cpus.receiver
            ));
        }
        for host in [&sender, &receiver] {
            if let Err(error) = host.run(|| steer::check_or_steer(host.device(), host.cpu()))? {
                caveats.push(format!(
                    "packets of {} are not steered to CPU {} ({error}): its work is counted where the sender runs",
                    host.address(),
                    host.cpu()
                ));
            }
        }
        Ok(Self { sender, receiver, kind: Kind::Veth, mtu: settings.mtu, caveats })
    }

    /// Both hosts on the loopback device, on two CPUs where there are two.
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
            "on loopback the sender's CPU also does the receiver's packet work, and offloads cannot be switched".into(),
        );
        Ok(Self {
            sender: Host::here(cpus.sender, address),
            receiver: Host::here(cpus.receiver, address),
            kind: Kind::Loopback,
            mtu: haul_sys::interface::mtu("lo")
                .map_err(LabError::step("asking for the MTU of lo"))?,
            caveats,
        })
    }

    /// A veth lab where possible, else loopback with the reason among its [`Lab::caveats`].
    ///
    /// A setting that is wrong in itself (an impossible MTU) is an error, not a reason to fall back.
    pub fn open(settings: &Settings) -> Result<Self, LabError> {
        match Self::veth(settings) {
            Err(
                reason @ (LabError::NoNamespaces { .. }
                | LabError::OneCpu { .. }
                | LabError::Step { .. }),
            ) => {
                let mut lab = Self::loopback()?;
                lab.caveats
                    .insert(0, format!("no two hosts here, measuring on loopback: {reason}"));
                Ok(lab)
            }
            made => made,
        }
    }

    /// A TCP connection from the sending host to the receiving one: the end that connected, and the accepted
    /// one.
    pub fn connect(&self) -> Result<(TcpStream, TcpStream), LabError> {
        let address = self.receiver.address();
        let listener = self
            .receiver
            .run(|| TcpListener::bind((address, 0)))?
            .map_err(LabError::step("listening"))?;
        let to = listener.local_addr().map_err(LabError::step("listening"))?;
        let from = self
            .sender
            .run(|| TcpStream::connect_timeout(&to, CONNECT_MAX))?
            .map_err(LabError::step("connecting"))?;
        let (accepted, _) = listener.accept().map_err(LabError::step("accepting"))?;
        Ok((from, accepted))
    }

    /// Gives the sending host a second device, which takes packets as a network card does and drops them; returns an
    /// address behind it. What is sent there is not copied on the way, as it is for the other host's sake on a veth.
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

    /// Sets the default congestion control of both hosts, with which later sockets begin. The kernel lets a namespace choose
    /// among `net.ipv4.tcp_allowed_congestion_control` of the machine and refuses the others.
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

    /// What is not as it would be with two machines, one sentence each.
    pub fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// Switches the sending device's offloads and reads them back. Connections made before keep what they
    /// had.
    pub fn set_offloads(&self, wanted: Offloads) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("offloads"));
        }
        self.sender.run(|| link::set_offloads(self.sender.device(), wanted))?
    }

    /// Switches TCP segmentation by the sending device: without it the stack cuts packets itself, and a veth's peer
    /// receives them one by one as from a wire.
    pub fn set_segmentation(&self, on: bool) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("segmentation"));
        }
        self.sender.run(|| link::set_segmentation(self.sender.device(), on))?
    }

    /// Lets both devices have IPv4 packets beyond 64 KiB, up to `bytes`, before they are cut (BIG TCP, Linux 6.3).
    pub fn set_segment_bytes(&self, bytes: u32) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("the size of segments"));
        }
        for host in [&self.sender, &self.receiver] {
            host.run(|| netlink::set_segment_bytes(host.device(), bytes))??;
        }
        Ok(())
    }

    /// Holds the sending device at `bits_per_second` with a token bucket, or sets it free with `None`.
    ///
    /// A program that owns its sockets should rather pace those (`SO_MAX_PACING_RATE`): the token bucket
    /// costs the sending host some CPU of its own.
    pub fn set_rate(&self, bits_per_second: Option<u64>) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("a link rate"));
        }
        self.sender.run(|| impair::set_rate(self.sender.device(), self.mtu, bits_per_second))?
    }

    /// Drops a share of the packets that arrive at the receiver. Needs the `nft` program (Debian: nftables).
    pub fn set_loss(&self, loss: Loss) -> Result<(), LabError> {
        if self.kind == Kind::Loopback {
            return Err(LabError::Loopback("loss"));
        }
        self.receiver.run(|| impair::set_loss(loss))?
    }
}

/// Gives an ordinary user's process what a lab needs: a user namespace in which it is root.
///
/// Must be called before the process starts a second thread. Does nothing for a process that may make
/// network namespaces already. Files keep their owners: the namespace's root is the calling user outside.
pub fn become_lab_user() -> Result<(), LabError> {
    if host::can_make_namespaces() {
        return Ok(());
    }
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    haul_sys::namespace::unshare_user().map_err(host::no_namespaces)?;
    // The kernel takes a group map from an unprivileged user only once setgroups is denied (Linux 3.19).
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("0 {user} 1")),
        ("gid_map", format!("0 {group} 1")),
    ] {
        fs::write(format!("/proc/self/{file}"), text).map_err(host::no_namespaces)?;
    }
    Ok(())
}
