//! `haul serve`: runs a file server from its options, and handles signals.

mod control;
mod options;

use crate::daemon::config_file::ConfigFile;
use crate::daemon::messages::{MessageFormat, MessageWriter};
use crate::daemon::options::Flags;
use crate::daemon::readiness;
use crate::daemon::signals::{self, EarlySignals};
use crate::limits;
use crate::output::Failure;
use clap::{Args, Subcommand};
use control::ControlArguments;
use haul_serve::{Address, Config, ListenAddress, Server};
use options::Options;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing::{error, info, warn};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub struct ServeArguments {
    #[command(subcommand)]
    pub command: Option<ServeCommand>,
    #[command(flatten)]
    pub options: Flags<Options>,
    /// Read options from this TOML file, whose keys are the names of the flags; flags take
    /// precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check whether everything that the options ask for is possible, then exit; no file is
    /// created, and addresses in use are warned of
    #[arg(long)]
    pub check: bool,
}

#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    /// Reload a running server, or show its state (a directory of this name is ./control)
    Control(ControlArguments),
}

pub fn run(arguments: ServeArguments) -> Result<ExitCode, Failure> {
    let ServeArguments { command, options: flags, config, check } = arguments;
    if let Some(ServeCommand::Control(arguments)) = command {
        return control::run(&arguments);
    }
    // Until the configuration file is read, only the command line sets the message format.
    let mut format = flags.options.message_format.unwrap_or_default();
    let mut messages = None;
    let merged = match &config {
        Some(path) => read(path, &flags),
        None => Ok(flags.options),
    };
    let result = merged.and_then(|options: Options| {
        format = options.message_format.unwrap_or_default();
        let mut server_config = options.into_config()?;
        server_config.config_file.clone_from(&config);
        server_config.version = haul_version::FULL.into();
        server_config.checks_only = check;
        serve(&server_config, format, &mut messages)
    });
    let Err(failure) = &result else { return result };
    if format == MessageFormat::Text || check {
        return result;
    }
    // A reader of JSON cannot parse plain text, so the error is JSON too, unless the thread that
    // writes messages cannot be started.
    match messages.map_or_else(|| MessageWriter::start(format), Ok) {
        Ok(_messages) => {
            error!("{failure}");
            Ok(failure.exit_code())
        }
        Err(_) => result,
    }
}

/// The options of a file and of the command line.
fn read(path: &Path, flags: &Flags<Options>) -> Result<Options, Failure> {
    let mut options = ConfigFile::read(path)?.parse()?;
    flags.replace_in(&mut options)?;
    Ok(options)
}

/// Serves until a signal ends the service.
///
/// The thread that writes messages starts after `Server::new`, which drops privileges and access to
/// files for the calling thread and for the threads that start later.
fn serve(
    config: &Config,
    format: MessageFormat,
    messages: &mut Option<MessageWriter>,
) -> Result<ExitCode, Failure> {
    limits::raise_descriptor_limit();
    let failed = |error: haul_serve::Error| {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed(error) }
    };
    let early = EarlySignals::catch().map_err(Failure::failed)?;
    let server = Server::new(config).map_err(failed)?;
    let places = server.addresses().iter().map(display_url).collect::<Vec<_>>().join(", ");
    if config.checks_only {
        println!("{} can be served at {places}", config.root.display());
        if server.clamps_window() {
            println!("the congestion window of near peers is clamped");
        }
        for caveat in server.caveats() {
            println!("warning: {caveat}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    *messages = Some(MessageWriter::start(format).map_err(Failure::failed)?);
    let handle = server.handle();
    let reopen = server.handle();
    let (drained, cut_off) = (server.handle(), server.handle());
    // The library reports the result.
    let reload = move || drop(handle.reload());
    let reopen_log = move || drop(reopen.reload());
    let awaited = || "what is open".to_owned();
    let (drain, cut_off) = (move || drained.drain(), move || cut_off.cut_off());
    signals::handle(early, reload, reopen_log, awaited, drain, cut_off).map_err(Failure::failed)?;
    let loops = server.workers();
    let plural = if loops == 1 { "" } else { "s" };
    let metrics = server
        .metrics_address()
        .map_or(String::new(), |address| format!(", metrics at http://{address}/metrics"));
    let folder = config.root.display();
    info!(
        %folder,
        %places,
        loops,
        "serving {folder} at {places} with {loops} loop{plural}{metrics}"
    );
    for caveat in server.caveats() {
        warn!("{caveat}");
    }
    warn_of_missing_index(config);
    readiness::notify_ready(false);
    server.run().map_err(failed)?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}

/// Warns if `/` cannot be answered.
fn warn_of_missing_index(config: &Config) {
    let content = &config.content;
    if !content.listing
        && !content.index.iter().any(|name| config.root.join(name).exists())
        && content.fallback.is_none()
    {
        warn!(
            "the directory has no {}, so / is answered with 404; --listing lists directories",
            content.index.join(" or ")
        );
    }
}

/// Formats an address as a URL for a browser.
fn display_url(ListenAddress { address, is_tls }: &ListenAddress) -> String {
    match address {
        Address::Tcp(address) => {
            let scheme = if *is_tls { "https" } else { "http" };
            if address.ip().is_unspecified() {
                format!("{scheme}://localhost:{}/ and every other address", address.port())
            } else {
                format!("{scheme}://{address}/")
            }
        }
        other => other.to_string(),
    }
}
