//! Features, limits and settings that affect the cost of methods, or whether they work.

use super::{DeviceFacts, Finding, Verdict, sockets};
use crate::congestion::paces;
use crate::profile;
use crate::verdict::Safety;
use haul_lab::LabError;
use haul_soak::exclusive::MeasurementLock;
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// IPv4 and TCP headers with timestamps, which Linux uses by default.
const HEADERS_BYTES: u32 = 52;
const PAGE_BYTES: u32 = 4096;
/// The kernel's own default since 6.9. Each zero-copy send in flight takes about a hundred bytes of
/// it.
const OPTMEM_BYTES: u64 = 128 * 1024;
/// Locked memory that a server with a few hundred lent buffers needs.
const MEMLOCK_BYTES: u64 = 64 << 20;
/// The smallest `fs.pipe-max-size` that passes the check: with smaller pipes, `splice` moves less
/// for each call.
const PIPE_BYTES_MIN: u64 = 1 << 20;

/// The privileges of the diagnosis.
pub(super) struct Privileges {
    /// Root of the host, not of a namespace.
    is_root: bool,
    /// Whether a lab can be created.
    lab: Result<(), LabError>,
    /// Whether the CPUs can be sampled while a command runs, outside of the lab's user namespace.
    samples_command: io::Result<()>,
    /// Whether the CPUs can be sampled in the lab's user namespace.
    samples_lab: bool,
}

impl Privileges {
    /// Enters a user namespace, in which a lab can be created, if the process is unprivileged. This
    /// cannot be undone.
    pub fn acquire() -> Self {
        let is_root = rustix::process::geteuid().is_root();
        let samples_command = profile::check_permission();
        let lab = haul_lab::enter_user_namespace();
        Self { is_root, lab, samples_command, samples_lab: profile::check_permission().is_ok() }
    }
}

pub(super) fn examine(device: &DeviceFacts, privileges: &Privileges) -> Vec<Finding> {
    let mut findings: Vec<Finding> = check_peer(device).into_iter().collect();
    findings.push(with_safety(check_offloads(device), Safety::Risky));
    findings.extend(check_mtu(device).map(|finding| with_safety(finding, Safety::Risky)));
    findings.extend([
        with_safety(check_congestion(), Safety::LanOnly),
        with_safety(check_pacing(), Safety::LanOnly),
        check_optmem(),
        check_memlock(privileges),
        check_pipe(),
        with_safety(check_io_uring(), Safety::Risky),
    ]);
    findings.extend(check_other_measurements());
    findings.extend([
        check_mapped_receive(),
        check_kernel_tls(),
        check_steering(),
        with_safety(check_namespaces(privileges), Safety::Risky),
        check_profile(privileges),
    ]);
    findings
}

fn sysctl(name: &str) -> Option<String> {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn good(name: &'static str, value: impl Into<String>, why: impl Into<String>) -> Finding {
    Finding {
        name,
        value: value.into(),
        verdict: Verdict::Good,
        why: why.into(),
        fix: None,
        safety: None,
    }
}

fn bad(
    name: &'static str,
    value: impl Into<String>,
    verdict: Verdict,
    why: impl Into<String>,
    fix: impl Into<String>,
) -> Finding {
    Finding {
        name,
        value: value.into(),
        verdict,
        why: why.into(),
        fix: Some(fix.into()),
        safety: Some(Safety::SafeAnywhere),
    }
}

/// The finding with the class of its fix.
fn with_safety(finding: Finding, safety: Safety) -> Finding {
    Finding { safety: finding.fix.is_some().then_some(safety), ..finding }
}

fn check_peer(device: &DeviceFacts) -> Option<Finding> {
    let name = "peer";
    if device.answered? {
        return Some(good(name, "answers", "it is reachable"));
    }
    if let Some(refusal) = &device.refusal {
        return Some(bad(
            name,
            format!("port 9 was rejected: {refusal}"),
            Verdict::Note,
            "a firewall rejects the port, or no host has the address; other findings are about the \
             route to it",
            "check that the host is up, and for haul bench --to that its ports are open",
        ));
    }
    Some(bad(
        name,
        "no answer on port 9 in 4 s",
        Verdict::Missing,
        "it is down, or a firewall drops packets to it; other findings are about the route to it",
        "check that it is up",
    ))
}

/// A finding if another haul measures on this machine.
fn check_other_measurements() -> Option<Finding> {
    let holder = MeasurementLock::holder().ok()??;
    let process = holder.process.map_or("of another container".into(), |id| id.to_string());
    Some(bad(
        "measurements",
        format!("process {process} measures: {}", holder.command),
        Verdict::Note,
        "its meter keeps every CPU busy at idle priority; another measurement waits for its end",
        "wait until it ends",
    ))
}

fn check_offloads(device: &DeviceFacts) -> Finding {
    let state_of = |name: &str, state: Option<bool>| {
        format!("{name} {}", state.map_or("?", |on| if on { "on" } else { "off" }))
    };
    let value = [
        state_of("sg", device.scatter_gather),
        state_of("tx", device.transmit_checksum),
        state_of("tso", device.segmentation),
    ]
    .join(", ");
    if [device.scatter_gather, device.transmit_checksum, device.segmentation].contains(&Some(false))
    {
        let fix = format!("ethtool -K {} tx on sg on tso on", device.name);
        bad(
            "offloads",
            value,
            Verdict::Costly,
            "sendfile and splice copy, and each packet is processed separately",
            fix,
        )
    } else {
        good(
            "offloads",
            value,
            format!("{} has scatter-gather, checksum and segmentation offload", device.name),
        )
    }
}

/// No finding on loopback, whose packets are never sent over a wire.
fn check_mtu(device: &DeviceFacts) -> Option<Finding> {
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
        Verdict::Note,
        "payloads are not whole pages, which mapped receive needs (other methods are unaffected)",
        format!(
            "an MTU of {wanted} on {}, but only if its network card, the peer and every switch \
             between support it: otherwise the host loses its connection",
            device.name
        ),
    ))
}

fn check_congestion() -> Finding {
    let name = sysctl("net.ipv4.tcp_congestion_control").unwrap_or_default();
    if paces(&name) {
        bad(
            "congestion control",
            name,
            Verdict::Costly,
            "bbr paces every connection with timers, which costs CPU if the network is not the \
             limit; a socket that is set to another algorithm after connect stays paced",
            "sysctl -w net.ipv4.tcp_congestion_control=cubic, or TCP_CONGESTION before connect or \
             listen on sockets that stay in the data centre",
        )
    } else {
        good("congestion control", name, "does not pace connections")
    }
}

/// Connections of this machine that an earlier congestion control left paced.
fn check_pacing() -> Finding {
    /// Maximum number of connections that are named.
    const NAMED_MAX: usize = 3;
    let name = "leftover pacing";
    match sockets::find_leftover_pacing() {
        Ok(leftover) if leftover.is_paced() => {
            let connections = &leftover.connections;
            let named = connections.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
            let more = connections.len().checked_sub(NAMED_MAX).filter(|&more| more > 0);
            let more = more.map_or(String::new(), |more| format!(" and {more} more"));
            bad(
                name,
                format!("{named}{more}"),
                Verdict::Costly,
                format!(
                    "their congestion control does not pace, the default does, and there are {:.0} \
                     timer interrupts per MiB sent: pacing was set up at the handshake and stayed. \
                     sendfile then costs up to nine times as much",
                    leftover.timers_per_mib
                ),
                "in the program that opens them: TCP_CONGESTION before connect or listen; or \
                 sysctl -w net.ipv4.tcp_congestion_control=cubic",
            )
        }
        Ok(_) => good(
            name,
            "none seen",
            "no busy connection shows timer interrupts of an earlier congestion control",
        ),
        Err(error) => {
            good(name, "unknown", format!("the kernel has no socket diagnostics here: {error}"))
        }
    }
}

fn check_optmem() -> Finding {
    let value = sysctl("net.core.optmem_max").unwrap_or_default();
    match value.parse::<u64>() {
        Ok(bytes) if bytes < OPTMEM_BYTES => bad(
            "net.core.optmem_max",
            value,
            Verdict::Costly,
            "few zero-copy sends can be in flight at once; the rest fall back to copying (ENOBUFS)",
            format!("sysctl -w net.core.optmem_max={OPTMEM_BYTES}"),
        ),
        _ => good("net.core.optmem_max", value, "enough for the completions of zero-copy sends"),
    }
}

fn check_memlock(privileges: &Privileges) -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let value = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes / 1024));
    match limit {
        Some(bytes) if bytes < MEMLOCK_BYTES && !privileges.is_root => bad(
            "locked memory (ulimit -l)",
            value,
            Verdict::Costly,
            "limits the memory that zero-copy sends and io_uring's registered buffers may pin; \
             beyond it sends copy and buffers stay unregistered",
            format!("ulimit -l {}, or LimitMEMLOCK= in the service's unit", MEMLOCK_BYTES / 1024),
        ),
        _ => good("locked memory (ulimit -l)", value, "no limit that matters for this user"),
    }
}

fn check_pipe() -> Finding {
    let value = sysctl("fs.pipe-max-size").unwrap_or_default();
    match value.parse::<u64>() {
        Ok(bytes) if bytes < PIPE_BYTES_MIN => bad(
            "fs.pipe-max-size",
            value,
            Verdict::Costly,
            "splice moves less per call than it could",
            format!("sysctl -w fs.pipe-max-size={PIPE_BYTES_MIN}"),
        ),
        _ => good("fs.pipe-max-size", value, "splice can have a pipe of 1 MiB"),
    }
}

fn check_io_uring() -> Finding {
    let value = sysctl("kernel.io_uring_disabled");
    let (name, fix) = ("io_uring", "sysctl -w kernel.io_uring_disabled=0");
    match (haul_sys::uring::Ring::new(), value.as_deref()) {
        (Ok(_), _) => good(name, "available", "a ring can be created"),
        (Err(error), Some("1" | "2")) => bad(
            name,
            format!("refused: {error}"),
            Verdict::Missing,
            "kernel.io_uring_disabled forbids it",
            fix,
        ),
        (Err(error), _) => bad(
            name,
            format!("refused: {error}"),
            Verdict::Missing,
            "the kernel is too old, or a seccomp filter blocks it",
            "a kernel from 5.6 on, and io_uring in the container's seccomp profile",
        ),
    }
}

/// Both ends of a connection on loopback, on which features are tried.
fn loopback_connection() -> Option<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let client = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    Some((client, listener.accept().ok()?.0))
}

fn check_mapped_receive() -> Finding {
    let name = "mapped receive";
    let has = loopback_connection()
        .and_then(|(client, _server)| haul_sys::sockopt::has_zerocopy_receive(&client).ok());
    match has {
        Some(true) => good(
            name,
            "available",
            "the kernel supports TCP_ZEROCOPY_RECEIVE; whether pages can be mapped depends on the \
             MTU and the driver",
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

fn check_kernel_tls() -> Finding {
    let name = "kernel TLS";
    let installed = loopback_connection()
        .map(|(client, _server)| haul_sys::sockopt::set_upper_layer_protocol(&client, "tls"));
    match installed {
        Some(Ok(())) => good(name, "available", "TCP_ULP tls can be set on a connection"),
        Some(Err(error)) => bad(
            name,
            match error.kind() {
                io::ErrorKind::NotFound => "the module tls is not loaded".into(),
                _ => format!("refused: {error}"),
            },
            Verdict::Missing,
            "encrypted files cannot be sent with sendfile: TLS encrypts in user space instead",
            "modprobe tls (a kernel with CONFIG_TLS)",
        ),
        None => bad(
            name,
            "untried",
            Verdict::Missing,
            "no connection on loopback could be opened",
            "ip link set lo up",
        ),
    }
}

fn check_steering() -> Finding {
    let name = "packet steering";
    match sysctl("net.core.rps_default_mask") {
        Some(_) => {
            good(name, "available", "each host of the lab can process its packets on its own CPU")
        }
        None => bad(
            name,
            "no rps_default_mask",
            Verdict::Costly,
            "in an ordinary user's lab the sending host's CPU does the receiver's packet work",
            "a kernel from 6.3 on with CONFIG_RPS, or run haul bench as root",
        ),
    }
}

fn check_profile(privileges: &Privileges) -> Finding {
    let name = "profile";
    match &privileges.samples_command {
        Ok(()) if !privileges.samples_lab => with_safety(
            bad(
                name,
                "of a command only",
                Verdict::Note,
                "haul bench profile -- COMMAND works; without a command, the lab's user namespace \
                 takes the capability away",
                profile::SAMPLING_FIX,
            ),
            Safety::Risky,
        ),
        Ok(()) => good(name, "available", "haul bench profile can sample the CPUs"),
        Err(reason) => with_safety(
            bad(
                name,
                "refused",
                Verdict::Missing,
                format!("haul bench leaves the profile out: {reason}"),
                profile::SAMPLING_FIX,
            ),
            Safety::Risky,
        ),
    }
}

fn check_namespaces(privileges: &Privileges) -> Finding {
    let name = "namespaces";
    let reason = match &privileges.lab {
        Ok(()) => {
            haul_lab::Lab::veth(&haul_lab::Settings::default()).err().map(|error| error.to_string())
        }
        Err(error) => Some(error.to_string()),
    };
    match reason {
        None => good(name, "available", "haul bench can create its two hosts"),
        Some(reason) => bad(
            name,
            "refused",
            Verdict::Missing,
            format!("haul bench measures on loopback instead: {reason}"),
            haul_lab::namespace_fix(),
        ),
    }
}
