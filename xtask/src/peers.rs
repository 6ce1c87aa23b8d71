//! `cargo xtask peers`: comparisons of other programs with haul.

mod attack;
mod bare;
mod clients;
mod crowd;
mod packets;
mod proxies;
mod proxy;
mod serve;
mod servers;
mod slowhttptest;
mod transfer;
mod trial;

use clap::Args;
use proxies::ProxyKind;
use proxy::ProxyPlan;
use serve::{ComparisonPlan, TRIALS};
use servers::{ServerKind, Starter};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use transfer::{COPIERS, TransferPlan, TransferTrial};

/// Options of the lab in which programs are compared.
#[derive(Debug, Clone, Args)]
pub struct LabArguments {
    /// Number of measurements of each program
    #[arg(long, default_value_t = 7)]
    pub rounds: usize,
    /// Congestion control of both hosts; a network namespace must be allowed to set it
    /// (net.ipv4.tcp_allowed_congestion_control)
    #[arg(long, default_value = "reno")]
    pub congestion: String,
    /// MTU of the link between the hosts, in bytes
    #[arg(long, default_value_t = 9000)]
    pub mtu: u32,
    /// Send packets of one segment each, as they arrive from a network without GRO
    #[arg(long)]
    pub no_segmentation: bool,
    /// Time that a packet takes in each direction, in ms: half the round trip. The link is then a
    /// program on the clients' CPU, and needs access to /dev/net/tun
    #[arg(long, value_parser = clap::value_parser!(u64).range(..=10_000))]
    pub delay_ms: Option<u64>,
    /// Measure this haul, as a user who cannot build it does [default: build it]
    #[arg(long, value_name = "PROGRAM")]
    pub haul: Option<PathBuf>,
}

/// Options of `cargo xtask peers serve`.
#[derive(Debug, Args)]
pub struct ServeArguments {
    #[command(flatten)]
    lab: LabArguments,
    /// Trials, separated by commas [default: all]: 256MiB, 256MiB-64 (connections), 256MiB-new
    /// (published a second ago), 1MiB, 64KiB, 4KiB, 4KiB-logged, 4KiB-10000, https-1MiB,
    /// idle-10000, slow-10000, and attacks by 6,000 clients on 1,000 places: half-heads, unread,
    /// stalled-uploads, silent-tls; with -shared from the address of the usual clients; and
    /// slowhttptest with 8,000 connections: slow-heads, slow-bodies, slow-ranges, slow-reads
    #[arg(long, value_delimiter = ',')]
    trials: Vec<String>,
    /// Servers to compare with haul, separated by commas [default: all of nginx, lighttpd, caddy,
    /// apache]; nginx-copying and apache-default copy; bare is a minimal server, a lower bound of
    /// the cost; with +run or +watch, as in apache-default+run, haul run starts the server
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Leave haul serve out, and compare with the first server of --against
    #[arg(long, requires = "against")]
    without_haul: bool,
    /// Options of an additional haul serve to measure, such as '--path splice'; may be repeated
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    variant: Vec<String>,
    /// Parameters of the directive listen of an additional nginx, such as sndbuf=4m; may be
    /// repeated
    #[arg(long, value_name = "PARAMETERS")]
    nginx_listen: Vec<String>,
    /// Also measure this other build of haul, such as the one before a change
    #[arg(long, value_name = "PROGRAM")]
    other: Option<PathBuf>,
}

/// Options of `cargo xtask peers proxy`.
#[derive(Debug, Args)]
pub struct ProxyArguments {
    #[command(flatten)]
    lab: LabArguments,
    /// Trials, separated by commas [default: all]: 256MiB, 256MiB-64 (connections), 256MiB-stalled
    /// (beside 2,000 connections that do not read), 1MiB, 64KiB, 16KiB, 4KiB, 1KiB, 100B-100
    /// (connections), mixed (100 bytes, every tenth of 1 MiB), new-connections, idle-9500
    #[arg(long, value_delimiter = ',')]
    trials: Vec<String>,
    /// Proxies to compare with haul, separated by commas [default: all]: haproxy-splice, haproxy,
    /// nginx, socat, redir, rinetd, socket-proxyd (systemd's)
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Options of an additional haul proxy to measure, such as '--path copy'; may be repeated
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    variant: Vec<String>,
    /// Directive of the section global of an additional HAProxy that splices, such as
    /// 'tune.rcvbuf.server 131072'; may be repeated
    #[arg(long, value_name = "DIRECTIVE")]
    haproxy_global: Vec<String>,
    /// Also measure this other build of haul, such as the one before a change
    #[arg(long, value_name = "PROGRAM")]
    other: Option<PathBuf>,
}

/// Options of `cargo xtask peers transfer`, which needs root for sshd.
#[derive(Debug, Args)]
pub struct TransferArguments {
    #[command(flatten)]
    lab: LabArguments,
    /// Trials, separated by commas [default: all]: 2GiB, 20000-files
    #[arg(long, value_delimiter = ',')]
    trials: Vec<String>,
    /// Ways to copy, separated by commas [default: all]: haul, haul-plain, haul-ssh, rsync-daemon,
    /// rsync-ssh, rsync-ssh-gcm, tar-ssh
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Rate of the link in Mbit/s
    #[arg(long, value_name = "MBIT")]
    rate_mbit: Option<u64>,
    /// Loss of packets, such as 0.01%
    #[arg(long)]
    loss: Option<haul_lab::Loss>,
}

/// Arguments of `cargo xtask peers bare`: the folder to serve and the address to listen at.
#[derive(Debug, Args)]
pub struct BareArguments {
    root: PathBuf,
    listen: SocketAddr,
}

/// Runs the minimal server until the process is killed.
pub fn bare(arguments: &BareArguments) -> Result<(), String> {
    let BareArguments { root, listen } = arguments;
    bare::serve(root, *listen).map_err(|error| format!("{listen}: {error}"))
}

/// Builds haul in release mode and measures the servers in interleaved rounds.
pub fn serve(arguments: &ServeArguments) -> Result<(), String> {
    let ServeArguments { lab, trials, against, without_haul, variant, nginx_listen, other } =
        arguments;
    if let Some(unknown) =
        trials.iter().find(|name| TRIALS.iter().all(|trial| trial.name != **name))
    {
        return Err(format!("unknown trial {unknown}: see --help for the list"));
    }
    let is_selected = |name: &str| trials.is_empty() || trials.iter().any(|other| other == name);
    let peers = [ServerKind::Nginx, ServerKind::Lighttpd, ServerKind::Caddy, ServerKind::Apache];
    let mut servers = match without_haul {
        true => Vec::new(),
        false => vec![(ServerKind::Haul, Starter::Direct)],
    };
    if against.is_empty() {
        servers.extend(peers.map(|kind| (kind, Starter::Direct)));
    }
    for name in against {
        servers.push(
            peer(name).ok_or_else(|| format!("unknown server {name}: see --help for the list"))?,
        );
    }
    if other.is_some() {
        servers.push((ServerKind::OtherHaul, Starter::Direct));
    }
    for (kind, _) in &servers {
        if let Some(package) = kind.missing_package() {
            return Err(missing(package));
        }
    }
    let plan = ComparisonPlan {
        trials: TRIALS.into_iter().filter(|trial| is_selected(trial.name)).collect(),
        servers,
        lab: lab.clone(),
        haul: lab.haul.clone().map_or_else(build, Ok)?,
        other_haul: other.clone(),
        variants: variant.clone(),
        nginx_listen: nginx_listen.clone(),
    };
    serve::run(&plan)
}

/// The server with a name of `--against`, and how to start the server.
fn peer(name: &str) -> Option<(ServerKind, Starter)> {
    let kinds = [
        ServerKind::Nginx,
        ServerKind::NginxCopying,
        ServerKind::Lighttpd,
        ServerKind::Caddy,
        ServerKind::Apache,
        ServerKind::ApacheDefault,
        ServerKind::Bare,
    ];
    kinds.into_iter().find_map(|kind| {
        let suffix = name.strip_prefix(kind.name())?;
        let starter = Starter::ALL.into_iter().find(|starter| starter.suffix() == suffix)?;
        Some((kind, starter))
    })
}

/// Builds haul in release mode and measures copies in interleaved rounds.
pub fn transfer(arguments: &TransferArguments) -> Result<(), String> {
    let TransferArguments { lab, trials, against, rate_mbit, loss } = arguments;
    let unknown = |name: &str| format!("unknown {name}: see --help for the list");
    let known = TransferTrial::ALL.map(TransferTrial::name);
    if let Some(name) = trials.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(unknown(name));
    }
    if let Some(name) = against.iter().find(|name| COPIERS.iter().all(|one| one.name != **name)) {
        return Err(unknown(name));
    }
    let is_selected = |selected: &[String], name: &str| {
        selected.is_empty() || selected.iter().any(|other| other == name)
    };
    let trials = TransferTrial::ALL.into_iter().filter(|one| is_selected(trials, one.name()));
    let copiers = COPIERS.into_iter().filter(|one| is_selected(against, one.name));
    transfer::run(&TransferPlan {
        trials: trials.collect(),
        copiers: copiers.collect(),
        lab: lab.clone(),
        rate: rate_mbit.map(|mbit| mbit * 1_000_000),
        loss: *loss,
        haul: lab.haul.clone().map_or_else(build, Ok)?,
    })
}

/// Builds haul in release mode and measures the proxies in interleaved rounds.
pub fn proxy(arguments: &ProxyArguments) -> Result<(), String> {
    let ProxyArguments { lab, trials, against, variant, haproxy_global, other } = arguments;
    let unknown =
        |kind: &str, name: &str| format!("unknown {kind} {name}: see --help for the list");
    if let Some(name) =
        trials.iter().find(|name| proxy::TRIALS.iter().all(|one| one.name != **name))
    {
        return Err(unknown("trial", name));
    }
    let others = &ProxyKind::ALL[1..];
    if let Some(name) = against.iter().find(|name| others.iter().all(|kind| kind.name() != **name))
    {
        return Err(unknown("proxy", name));
    }
    let is_selected = |selected: &[String], name: &str| {
        selected.is_empty() || selected.iter().any(|other| other == name)
    };
    let others = others.iter().filter(|kind| is_selected(against, kind.name()));
    let kinds: Vec<_> = [ProxyKind::Haul].iter().chain(others).copied().collect();
    // Each proxy forwards to an nginx.
    let tuned = haproxy_global.iter().map(|_| &ProxyKind::HaproxySplice);
    let packages = kinds.iter().chain(tuned).map(|kind| kind.missing_package());
    if let Some(package) = packages.chain([ServerKind::Nginx.missing_package()]).flatten().next() {
        return Err(missing(package));
    }
    let trials = proxy::TRIALS.into_iter().filter(|trial| is_selected(trials, trial.name));
    proxy::run(&ProxyPlan {
        trials: trials.collect(),
        kinds,
        lab: lab.clone(),
        haul: lab.haul.clone().map_or_else(build, Ok)?,
        other_haul: other.clone(),
        variants: variant.clone(),
        haproxy_global: haproxy_global.clone(),
    })
}

fn missing(package: &str) -> String {
    format!("{package} is missing: ci/install installs it (Debian: apt-get install {package})")
}

/// Builds the `haul` command in release mode and returns its path.
fn build() -> Result<PathBuf, String> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--locked", "-p", "haul-cli"])
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(format!("cargo build: {status}")),
        Err(error) => return Err(format!("cargo build: {error}")),
    }
    // This program is in target/debug or target/release.
    let executable = std::env::current_exe().map_err(|error| error.to_string())?;
    let target =
        executable.parent().and_then(Path::parent).ok_or("xtask is not in a target folder")?;
    Ok(target.join("release/haul"))
}
