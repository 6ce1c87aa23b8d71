//! Other programs beside haul.

mod bare;
mod clients;
mod crowd;
mod packets;
mod serve;
mod servers;

use clap::Args;
use serve::{Plan, TRIALS};
use servers::Kind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What to ask of whom.
#[derive(Debug, Args)]
pub struct ServeArguments {
    /// Measure each this often
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Everybody's congestion control, one that a namespace may set (net.ipv4.tcp_allowed_congestion_control)
    #[arg(long, default_value = "reno")]
    congestion: String,
    /// Trials, separated by commas [default: all]: 256MiB, 1MiB, 64KiB, 4KiB, 4KiB-logged, 4KiB-10000, https-1MiB, idle-10000, slow-10000
    #[arg(long, value_delimiter = ',')]
    trials: Vec<String>,
    /// Servers beside haul, separated by commas [default: all of nginx, lighttpd, caddy, apache]; bare is about the least that a program can do
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Options with which haul serve is measured once more, such as '--path splice'; may be given again
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    variant: Vec<String>,
}

/// What the barest server serves, and where.
#[derive(Debug, Args)]
pub struct BareArguments {
    root: PathBuf,
    listen: SocketAddr,
}

/// Is the barest server, until it is killed.
pub fn bare(arguments: &BareArguments) -> Result<(), String> {
    let BareArguments { root, listen } = arguments;
    bare::serve(root, *listen).map_err(|error| format!("{listen}: {error}"))
}

/// Builds haul as it is shipped and measures the servers in turn.
pub fn serve(arguments: &ServeArguments) -> Result<(), String> {
    let ServeArguments { rounds, congestion, trials, against, variant } = arguments;
    if let Some(unknown) =
        trials.iter().find(|name| TRIALS.iter().all(|trial| trial.name != **name))
    {
        return Err(format!("there is no trial {unknown}"));
    }
    let peers = [Kind::Nginx, Kind::Lighttpd, Kind::Caddy, Kind::Apache];
    let known = [&peers[..], &[Kind::Bare]].concat();
    if let Some(unknown) =
        against.iter().find(|name| known.iter().all(|kind| kind.name() != **name))
    {
        return Err(format!("there is no server {unknown}"));
    }
    let is_wanted =
        |wanted: &[String], name: &str| wanted.is_empty() || wanted.iter().any(|one| one == name);
    let mut kinds = vec![Kind::Haul];
    if against.is_empty() {
        kinds.extend(peers);
    } else {
        kinds.extend(known.into_iter().filter(|kind| is_wanted(against, kind.name())));
    }
    for kind in &kinds {
        if let Some(package) = kind.is_missing() {
            return Err(format!(
                "{package} is missing: ci/install installs it (Debian: apt-get install {package})"
            ));
        }
    }
    let plan = Plan {
        trials: TRIALS.into_iter().filter(|trial| is_wanted(trials, trial.name)).collect(),
        kinds,
        rounds: *rounds,
        congestion: congestion.clone(),
        haul: build()?,
        variants: variant.clone(),
    };
    serve::run(&plan)
}

/// The released command.
fn build() -> Result<PathBuf, String> {
    let built = Command::new(env!("CARGO"))
        .args(["build", "--release", "--locked", "-p", "haul-cli"])
        .status();
    match built {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(format!("cargo build: {status}")),
        Err(error) => return Err(format!("cargo build: {error}")),
    }
    // This program lies in target/debug or target/release.
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let target =
        own.parent().and_then(Path::parent).ok_or("this program lies in no target folder")?;
    Ok(target.join("release/haul"))
}
