//! `haul proxy`: runs a layer-4 proxy from its options, and handles signals.

mod control;
mod options;
mod routes;
mod summary;

use crate::daemon::background::BackgroundOptions;
use crate::daemon::config_file::ConfigFile;
use crate::daemon::messages::{MessageFormat, MessageWriter};
use crate::daemon::options::Flags;
use crate::daemon::readiness;
use crate::daemon::signals::{self, EarlySignals};
use crate::limits;
use crate::output::Failure;
use clap::{Args, Subcommand};
use control::ControlArguments;
use haul_proxy::{Address, Config, Handle, Server};
use options::Options;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing::{error, info, warn};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct ProxyArguments {
    #[command(subcommand)]
    pub command: Option<ProxyCommand>,
    #[command(flatten)]
    pub options: Flags<Options>,
    /// Read options from this TOML file, whose keys are the names of the flags; flags take
    /// precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check whether everything that the options ask for is possible, then exit; an address in use
    /// is a warning, and with --upgrade it must belong to the running proxy
    #[arg(long)]
    pub check: bool,
    /// Take over from the proxy that runs with the same --control: its listening sockets and its
    /// connections, none of which is cut; it ends then
    #[arg(long)]
    pub upgrade: bool,
    #[command(flatten)]
    pub background: BackgroundOptions,
}

#[derive(Debug, Subcommand)]
pub enum ProxyCommand {
    /// Show and change a running proxy: its state, connections and upstreams, reload
    Control(ControlArguments),
}

pub fn run(arguments: ProxyArguments) -> Result<ExitCode, Failure> {
    let ProxyArguments { command, options: flags, config: file, check, upgrade, background } =
        arguments;
    if let Some(ProxyCommand::Control(arguments)) = command {
        return control::run(&arguments);
    }
    let (mut config, format) = read(&flags, file.as_deref())?;
    let takes_from_systemd =
        config.listeners.iter().any(|listener| listener.address == Address::Systemd);
    if background.is_asked_for() && takes_from_systemd && !upgrade {
        let problem = "systemd passes its sockets to the process that it starts, and not to one in \
                       the background: leave out --background";
        return Err(Failure::bad_input(problem));
    }
    // A check ends by itself.
    let writes_to_stdout =
        config.reporting.access_log.as_ref().is_some_and(|path| path.as_os_str().is_empty());
    if !check && let Some(started) = background.start(writes_to_stdout) {
        return started;
    }
    (config.process.upgrades, config.process.checks_only) = (upgrade, check);
    let read_again = move || {
        let (config, other_format) = read(&flags, file.as_deref())?;
        let caveat = "the change of message-format needs --upgrade or a restart";
        let caveats = (other_format != format).then(|| caveat.to_owned());
        Ok((config, caveats.into_iter().collect()))
    };
    proxy(&config, format, background, read_again)
}

/// The configuration from the options of the command line, which take precedence, and of the file;
/// and the format of messages.
fn read(flags: &Flags<Options>, file: Option<&Path>) -> Result<(Config, MessageFormat), Failure> {
    let options = match file {
        Some(path) => {
            let file = ConfigFile::read(path)?;
            let mut options: Options = file.parse()?;
            flags.replace_in(&mut options)?;
            Options { file: Some(file), ..options }
        }
        None => flags.options.clone(),
    };
    let format = options.message_format.unwrap_or_default();
    let mut config = options.into_config().map_err(|failure| match file {
        Some(path) => failure.in_file(path),
        None => failure,
    })?;
    config.process.config_file = file.map(Path::to_owned);
    config.process.version = haul_version::FULL.into();
    Ok((config, format))
}

/// Opens the log again by its name.
fn reopen_log(handle: &Handle) {
    match handle.reopen_log() {
        Ok(true) => info!("the log was opened again"),
        Ok(false) => {}
        Err(error) => error!(%error, "the log was not opened again: {error}"),
    }
}

/// Starts the threads that handle signals.
fn handle_signals(early: EarlySignals, server: &Server, config: &Config) -> io::Result<()> {
    let (handle, has_file) = (server.handle(), config.process.config_file.is_some());
    let reload = move || {
        reopen_log(&handle);
        if has_file {
            // The library logs the result.
            let _ = handle.reload_from_source();
        }
    };
    let (awaited, drain_timeout) = (server.handle(), config.limits.timeouts.drain.as_secs());
    let awaited = move || {
        let count = awaited.connections();
        let plural = if count == 1 { "" } else { "s" };
        format!("{count} connection{plural}, at most {drain_timeout} s")
    };
    let (log, drained, cut_off) = (server.handle(), server.handle(), server.handle());
    let (drain, cut_off) = (move || drained.drain(), move || cut_off.cut_off());
    signals::handle(early, reload, move || reopen_log(&log), awaited, drain, cut_off)
}

/// Whether another process has an address.
fn is_in_use(error: &haul_proxy::Error) -> bool {
    matches!(error, haul_proxy::Error::Server(error) if error.is_address_in_use())
}

/// Forwards until a signal ends the service.
///
/// The thread that writes messages starts after `Server::new`, which drops privileges and access to
/// files for the calling thread and for the threads that start later.
fn proxy(
    config: &Config,
    format: MessageFormat,
    background: BackgroundOptions,
    read_again: impl Fn() -> Result<(Config, Vec<String>), Failure> + Send + Sync + 'static,
) -> Result<ExitCode, Failure> {
    limits::raise_descriptor_limit();
    let failed = |error: haul_proxy::Error| {
        let advice = if is_in_use(&error)
            && !config.process.upgrades
            && config.reporting.control.is_some()
        {
            " (beside a running haul proxy: --upgrade)"
        } else {
            ""
        };
        let message = format!("{error}{advice}");
        if error.is_bad_input() { Failure::bad_input(message) } else { Failure::failed(message) }
    };
    let early = EarlySignals::catch().map_err(Failure::failed)?;
    let server = Server::new(config).map_err(failed)?;
    let summary = summary::lines(config, server.addresses());
    if config.process.checks_only {
        let clamp = "the congestion window of near peers is clamped".to_owned();
        let clamp = server.clamps_window().then_some(clamp);
        let warnings = server.caveats().iter().map(|caveat| format!("warning: {caveat}"));
        for line in summary.into_iter().chain(clamp).chain(warnings) {
            println!("{line}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let _messages = MessageWriter::start(format).map_err(Failure::failed)?;
    if config.process.config_file.is_some() {
        server.set_config_source(move || read_again().map_err(|failure| failure.to_string()));
    }
    handle_signals(early, &server, config).map_err(Failure::failed)?;
    let loops = server.workers();
    let plural = if loops == 1 { "" } else { "s" };
    let metrics = server
        .metrics_address()
        .map_or(String::new(), |address| format!(", metrics at http://{address}/metrics"));
    for line in summary {
        info!("{line}");
    }
    for caveat in server.caveats() {
        warn!("{caveat}");
    }
    let places: Vec<_> = server.addresses().iter().map(|one| one.address.to_string()).collect();
    let places = places.join(", ");
    let takes_over = config.process.upgrades;
    let on_start = || {
        info!(%places, loops, "accepting clients with {loops} loop{plural}{metrics}");
        readiness::notify_ready(takes_over);
        background.report_ready();
    };
    let ended = server.handle();
    let result = server.run_after(on_start).map_err(failed);
    if let Some(successor) = ended.successor() {
        readiness::notify_successor(successor.get());
    }
    result?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}
