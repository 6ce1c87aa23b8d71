//! Each feature, limit and setting that decides what paths cost, or whether they work.

use super::{DeviceFacts, Finding, Verdict, sockets};
use crate::congestion::paces;
use haul_lab::LabError;
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// IPv4 and TCP headers with timestamps, which Linux uses by default.
const HEADERS_BYTES: u32 = 52;
const PAGE_BYTES: u32 = 4096;
/// The kernel's own default since 6.9. Each zero-copy send that is out takes about a hundred bytes of it.
const OPTMEM_BYTES: u64 = 128 * 1024;
/// What a server with a few hundred lent buffers needs.
const MEMLOCK_BYTES: u64 = 64 << 20;
/// A pipe for `splice` that holds a large chunk.
const PIPE_BYTES: u64 = 1 << 20;

/// Who asks.
pub(super) struct User {
    /// Root of the host, not of a namespace.
    is_root: bool,
    /// Whether a lab can be made.
    lab: Result<(), LabError>,
}

impl User {
    /// Gives an ordinary user's process its user namespace, which it cannot take back.
    pub fn become_lab_user() -> Self {
        let is_root = rustix::process::geteuid().is_root();
        Self { is_root, lab: haul_lab::become_lab_user() }
    }
}

pub(super) fn examine(device: &DeviceFacts, user: &User) -> Vec<Finding> {
    let mut findings: Vec<Finding> = peer(device).into_iter().collect();
    findings.push(offloads(device));
    findings.extend(mtu(device));
    findings.extend([congestion(), pacing(), optmem(), memlock(user), pipe(), io_uring()]);
    findings.extend([mapped_receive(), kernel_tls(), steering(), namespaces(user)]);
    findings
}

fn sysctl(name: &str) -> Option<String> {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn good(name: &'static str, value: impl Into<String>, why: impl Into<String>) -> Finding {
    Finding { name, value: value.into(), verdict: Verdict::Good, why: why.into(), mend: None }
}

fn bad(
    name: &'static str,
    value: impl Into<String>,
    verdict: Verdict,
    why: impl Into<String>,
    mend: impl Into<String>,
) -> Finding {
    Finding { name, value: value.into(), verdict, why: why.into(), mend: Some(mend.into()) }
}

fn peer(device: &DeviceFacts) -> Option<Finding> {
    let name = "peer";
    if device.answered? {
        return Some(good(name, "answers", "it can be reached"));
    }
    Some(bad(
        name,
        "no answer on port 9 in 4 s",
        Verdict::Missing,
        "it is down, or a firewall drops what is sent to it; the rest is about the way there",
        "see whether it is up",
    ))
}

fn offloads(device: &DeviceFacts) -> Finding {
    let word = |name: &str, state: Option<bool>| {
        format!("{name} {}", state.map_or("?", |on| if on { "on" } else { "off" }))
    };
    let value = [
        word("sg", device.scatter_gather),
        word("tx", device.transmit_checksum),
        word("tso", device.segmentation),
    ]
    .join(", ");
    if [device.scatter_gather, device.transmit_checksum, device.segmentation].contains(&Some(false))
    {
        let mend = format!("ethtool -K {} tx on sg on tso on", device.name);
        bad(
            "offloads",
            value,
            Verdict::Costly,
            "sendfile and splice copy, and every packet costs apart",
            mend,
        )
    } else {
        good("offloads", value, format!("{} gathers, checksums and cuts segments", device.name))
    }
}

/// Nothing to say of loopback, whose packets never were pages on a wire.
fn mtu(device: &DeviceFacts) -> Option<Finding> {
    let mtu = device.mtu.filter(|_| device.name != "lo")?;
    let payload = mtu.saturating_sub(HEADERS_BYTES);
    if payload >= PAGE_BYTES && payload.is_multiple_of(PAGE_BYTES) {
        let why = "payloads are whole pages: they can be mapped when received";
        return Some(good("MTU", mtu.to_string(), why));
    }
    let wanted = (payload / PAGE_BYTES).max(1) * PAGE_BYTES + HEADERS_BYTES;
    Some(bad(
        "MTU",
        mtu.to_string(),
        Verdict::Costly,
        "payloads are not whole pages: mapped receive cannot map them (other paths do not mind)",
        format!(
            "an MTU of {wanted} on {}, but only where its network card, the peer and every switch between carry \
             that: elsewhere it cuts the host off",
            device.name
        ),
    ))
}

fn congestion() -> Finding {
    let name = sysctl("net.ipv4.tcp_congestion_control").unwrap_or_default();
    if paces(&name) {
        bad(
            "congestion control",
            name,
            Verdict::Costly,
            "bbr paces every connection with timers, which costs CPU where the network is not the limit; a socket that is given \
             another algorithm after connect stays paced",
            "sysctl net.ipv4.tcp_congestion_control=cubic, or TCP_CONGESTION before connect or listen on sockets that stay in \
             the data centre",
        )
    } else {
        good("congestion control", name, "does not pace by itself")
    }
}

/// Connections of this machine that an earlier congestion control has left paced.
fn pacing() -> Finding {
    /// So many are named.
    const NAMED: usize = 3;
    let name = "leftover pacing";
    match sockets::leftover_pacing() {
        Ok(leftover) if leftover.is_shown() => {
            let connections = &leftover.connections;
            let named = connections.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
            let more = connections.len().checked_sub(NAMED).filter(|&more| more > 0);
            let more = more.map_or(String::new(), |more| format!(" and {more} more"));
            bad(
                name,
                format!("{named}{more}"),
                Verdict::Costly,
                format!(
                    "their congestion control does not pace, the default does, and there are {:.0} timer interrupts for each MiB \
                     sent: pacing was set up at the handshake and stayed. sendfile then costs up to nine times as much",
                    leftover.timers_per_mib
                ),
                "in the program that opens them: TCP_CONGESTION before connect or listen; or sysctl \
                 net.ipv4.tcp_congestion_control=cubic",
            )
        }
        Ok(_) => good(
            name,
            "none seen",
            "no busy connection shows the timers of an earlier congestion control",
        ),
        Err(error) => {
            good(name, "unknown", format!("the kernel has no socket diagnostics here: {error}"))
        }
    }
}

fn optmem() -> Finding {
    let value = sysctl("net.core.optmem_max").unwrap_or_default();
    match value.parse::<u64>() {
        Ok(bytes) if bytes < OPTMEM_BYTES => bad(
            "net.core.optmem_max",
            value,
            Verdict::Costly,
            "few zero-copy sends can be out at once; the rest fall back to copying (ENOBUFS)",
            format!("sysctl net.core.optmem_max={OPTMEM_BYTES}"),
        ),
        _ => good("net.core.optmem_max", value, "room for the notices of zero-copy sends"),
    }
}

fn memlock(user: &User) -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let value = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes / 1024));
    match limit {
        Some(bytes) if bytes < MEMLOCK_BYTES && !user.is_root => bad(
            "locked memory (ulimit -l)",
            value,
            Verdict::Costly,
            "bounds what zero-copy sends and io_uring's registered buffers may pin; the rest is copied or unregistered",
            format!("ulimit -l {}, or LimitMEMLOCK= in the service's unit", MEMLOCK_BYTES / 1024),
        ),
        _ => good("locked memory (ulimit -l)", value, "no bound that matters for this user"),
    }
}

fn pipe() -> Finding {
    let value = sysctl("fs.pipe-max-size").unwrap_or_default();
    match value.parse::<u64>() {
        Ok(bytes) if bytes < PIPE_BYTES => bad(
            "fs.pipe-max-size",
            value,
            Verdict::Costly,
            "splice moves less per call than it could",
            format!("sysctl fs.pipe-max-size={PIPE_BYTES}"),
        ),
        _ => good("fs.pipe-max-size", value, "splice can have a pipe of 1 MiB"),
    }
}

fn io_uring() -> Finding {
    let value = sysctl("kernel.io_uring_disabled");
    let (name, mend) = ("io_uring", "sysctl kernel.io_uring_disabled=0");
    match (haul_sys::uring::Ring::new(), value.as_deref()) {
        (Ok(_), _) => good(name, "available", "a ring could be made"),
        (Err(error), Some("1" | "2")) => bad(
            name,
            format!("refused: {error}"),
            Verdict::Missing,
            "kernel.io_uring_disabled forbids it",
            mend,
        ),
        (Err(error), _) => bad(
            name,
            format!("refused: {error}"),
            Verdict::Missing,
            "the kernel is too old, or a seccomp filter hides it",
            "a kernel from 5.6 on, and io_uring in the container's seccomp profile",
        ),
    }
}

/// Two ends of a connection on loopback, to try features on.
fn pair() -> Option<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let one = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    Some((one, listener.accept().ok()?.0))
}

fn mapped_receive() -> Finding {
    let name = "mapped receive";
    let has = pair().and_then(|(one, _other)| haul_sys::sockopt::has_zerocopy_receive(&one).ok());
    match has {
        Some(true) => good(
            name,
            "available",
            "the kernel knows TCP_ZEROCOPY_RECEIVE; whether pages can be mapped is up to MTU and driver",
        ),
        _ => bad(
            name,
            "missing",
            Verdict::Missing,
            "the kernel has no TCP_ZEROCOPY_RECEIVE",
            "a kernel from 4.18 on, with CONFIG_MMU",
        ),
    }
}

fn kernel_tls() -> Finding {
    let name = "kernel TLS";
    let installed =
        pair().map(|(one, _other)| haul_sys::sockopt::set_upper_layer_protocol(&one, "tls"));
    match installed {
        Some(Ok(())) => good(name, "available", "TCP_ULP tls could be installed on a connection"),
        Some(Err(error)) => bad(
            name,
            format!("refused: {error}"),
            Verdict::Missing,
            "encrypted files cannot go by sendfile: TLS works in user space instead",
            "modprobe tls (a kernel with CONFIG_TLS)",
        ),
        None => bad(
            name,
            "untried",
            Verdict::Missing,
            "no connection on loopback could be made",
            "ip link set lo up",
        ),
    }
}

fn steering() -> Finding {
    let name = "packet steering";
    match sysctl("net.core.rps_default_mask") {
        Some(_) => {
            good(name, "available", "each host of the lab can have its packets on its own CPU")
        }
        None => bad(
            name,
            "no rps_default_mask",
            Verdict::Costly,
            "an ordinary user's lab counts the receiver's packet work where the sender runs",
            "a kernel from 6.3 on with CONFIG_RPS, or run haul bench as root",
        ),
    }
}

fn namespaces(user: &User) -> Finding {
    let name = "namespaces";
    let reason = match &user.lab {
        Ok(()) => {
            haul_lab::Lab::veth(&haul_lab::Settings::default()).err().map(|error| error.to_string())
        }
        Err(error) => Some(error.to_string()),
    };
    match reason {
        None => good(name, "available", "haul bench can make its two hosts"),
        Some(reason) => bad(
            name,
            "refused",
            Verdict::Missing,
            format!("haul bench measures on loopback instead: {reason}"),
            "run as root, or sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1",
        ),
    }
}
