//! `haul proxy`: runs a layer-4 proxy from its options, and handles signals.

mod control;
mod options;
mod routes;

use crate::daemon::messages::{MessageFormat, MessageWriter};
use crate::daemon::options::read_file;
use crate::daemon::{readiness, signals};
use crate::limits;
use crate::output::Failure;
use clap::{Args, Subcommand};
use control::ControlArguments;
use haul_proxy::{Config, Handle, Server};
use options::Options;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing::{error, info, warn};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct ProxyArguments {
    #[command(subcommand)]
    pub command: Option<ProxyCommand>,
    #[command(flatten)]
    pub options: Options,
    /// Read options from this TOML file, whose keys are the names of the flags; flags take
    /// precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check whether everything that the options ask for is possible, then exit; with --upgrade,
    /// beside the running proxy
    #[arg(long)]
    pub check: bool,
    /// Take over from the proxy that runs with the same --control: its listening sockets and its
    /// connections, none of which is cut; it ends then
    #[arg(long)]
    pub upgrade: bool,
}

#[derive(Debug, Subcommand)]
pub enum ProxyCommand {
    /// List the connections and upstreams of a running proxy, drain, disable, or close them
    Control(ControlArguments),
}

pub fn run(arguments: ProxyArguments) -> Result<ExitCode, Failure> {
    let ProxyArguments { command, options: flags, config: file, check, upgrade } = arguments;
    if let Some(ProxyCommand::Control(arguments)) = command {
        return control::run(&arguments);
    }
    let options = read(&flags, file.as_deref())?;
    let format = options.message_format.unwrap_or_default();
    let mut config = options.into_config()?;
    config.config_file.clone_from(&file);
    config.upgrades = upgrade;
    let reload = move |handle: &Handle| reload(handle, &flags, file.as_deref(), format);
    proxy(&config, check, format, reload)
}

/// The options of the command line, which take precedence, and those of the file.
fn read(flags: &Options, file: Option<&Path>) -> Result<Options, Failure> {
    let flags = flags.clone();
    file.map_or(Ok(flags.clone()), |path| Ok(flags.or(read_file(path)?)))
}

/// Opens the log again, and puts what has changed in the file in force.
fn reload(handle: &Handle, flags: &Options, file: Option<&Path>, format: MessageFormat) {
    match handle.reopen_log() {
        Ok(true) => info!("the log was opened again"),
        Ok(false) => {}
        Err(error) => error!(%error, "the log was not opened again: {error}"),
    }
    if file.is_none() {
        return;
    }
    let reloaded = read(flags, file).and_then(|options| {
        let has_other_format = options.message_format.unwrap_or_default() != format;
        let mut config = options.into_config()?;
        config.config_file = file.map(Path::to_owned);
        let mut caveats = handle.reload(&config).map_err(Failure::failed)?;
        if has_other_format {
            caveats.push("the change of message-format needs --upgrade or a restart".into());
        }
        Ok(caveats)
    });
    match reloaded {
        Ok(caveats) => {
            info!("the configuration was reloaded");
            for caveat in caveats {
                warn!("{caveat}");
            }
        }
        Err(error) => {
            error!(%error, "the configuration was not reloaded, the old one is in force: {error}");
        }
    }
}

/// Whether another process has an address.
fn is_in_use(error: &haul_proxy::Error) -> bool {
    use haul_serve::ServerError::Listen;
    matches!(error, haul_proxy::Error::Server(Listen { error, .. })
        if error.kind() == ErrorKind::AddrInUse)
}

/// Forwards until a signal ends the service.
///
/// The thread that writes messages starts after `Server::new` has dropped privileges and access to
/// files: that applies to the calling thread and to threads that it starts afterwards.
fn proxy(
    config: &Config,
    check: bool,
    format: MessageFormat,
    reload: impl Fn(&Handle) + Send + 'static,
) -> Result<ExitCode, Failure> {
    limits::raise_descriptor_limit();
    let failed = |error: haul_proxy::Error| {
        let advice = if is_in_use(&error) && !config.upgrades && config.control.is_some() {
            " (beside a running haul proxy: --upgrade)"
        } else {
            ""
        };
        let message = format!("{error}{advice}");
        if error.is_bad_input() { Failure::bad_input(message) } else { Failure::failed(message) }
    };
    let server = Server::new(config).map_err(failed)?;
    let list = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(", ");
    let places = list(&mut server.addresses().iter().map(|listen| listen.address.to_string()));
    let unrouted: Vec<&str> = config.unrouted_groups().map(|group| group.name.as_str()).collect();
    let routed = config.groups.iter().filter(|group| !unrouted.contains(&group.name.as_str()));
    let routed = routed.flat_map(|group| &group.upstreams);
    let upstreams = list(&mut routed.map(|upstream| upstream.address.to_string()));
    if check {
        println!("clients at {places} can be connected to {upstreams}");
        if server.clamps_window() {
            println!("the congestion window of near peers is clamped");
        }
        for caveat in server.caveats() {
            println!("{caveat}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let _messages = MessageWriter::start(format).map_err(Failure::failed)?;
    let handle = server.handle();
    let (drained, cut_off) = (server.handle(), server.handle());
    let drain = move || drained.drain();
    signals::handle(move || reload(&handle), drain, move || cut_off.cut_off())
        .map_err(Failure::failed)?;
    let loops = server.workers();
    let plural = if loops == 1 { "" } else { "s" };
    let metrics = server
        .metrics_address()
        .map_or(String::new(), |address| format!(", metrics at http://{address}/metrics"));
    info!(
        %places,
        %upstreams,
        loops,
        "connecting clients at {places} to {upstreams} with {loops} loop{plural}{metrics}"
    );
    for caveat in server.caveats() {
        warn!("{caveat}");
    }
    let takes_over = config.upgrades;
    server.run_after(|| readiness::notify_ready(takes_over)).map_err(failed)?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}
