//! `haul serve`: runs a file server from its options, and handles signals.

mod options;

use crate::daemon::config_file::ConfigFile;
use crate::daemon::messages::{MessageFormat, MessageWriter};
use crate::daemon::{readiness, signals};
use crate::limits;
use crate::output::Failure;
use clap::Args;
use haul_serve::{Address, Config, Handle, ListenAddress, Server, ServerError};
use options::Options;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use tracing::{error, info, warn};

#[derive(Debug, Args)]
pub struct ServeArguments {
    #[command(flatten)]
    pub options: Options,
    /// Read options from this TOML file, whose keys are the names of the flags; flags take
    /// precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check whether everything that the options ask for is possible, then exit
    #[arg(long)]
    pub check: bool,
}

pub fn run(arguments: ServeArguments) -> Result<ExitCode, Failure> {
    let ServeArguments { options, config, check } = arguments;
    // Until the configuration file is read, only the command line sets the message format.
    let mut format = options.message_format.unwrap_or_default();
    let mut messages = None;
    // Those of the command line take precedence.
    let merged = match &config {
        Some(path) => {
            ConfigFile::read(path).and_then(|file| file.parse()).map(|file| options.or(file))
        }
        None => Ok(options),
    };
    let result = merged.and_then(|options: Options| {
        format = options.message_format.unwrap_or_default();
        serve(options, check, format, &mut messages)
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

/// Serves until a signal ends the service.
///
/// The thread that writes messages starts after `Server::new` has dropped privileges and access to
/// files: that applies to the calling thread and to threads that it starts afterwards.
fn serve(
    options: Options,
    check: bool,
    format: MessageFormat,
    messages: &mut Option<MessageWriter>,
) -> Result<ExitCode, Failure> {
    let mut config = options.into_config()?;
    config.version = haul_version::FULL.into();
    limits::raise_descriptor_limit();
    let failed = |error: haul_serve::Error| {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed(error) }
    };
    let server = match Server::new(&config) {
        Err(haul_serve::Error::Server(error)) if check && is_in_use(&error, &config) => {
            return Ok(ExitCode::SUCCESS);
        }
        server => server.map_err(failed)?,
    };
    let places = server.addresses().iter().map(display_url).collect::<Vec<_>>().join(", ");
    if check {
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
    let reloaded = reloaded_message(&config);
    let turn = Mutex::new(());
    let reload = Arc::new(move || reload(&handle, &turn, &reloaded));
    let reopen_log = Arc::clone(&reload);
    let handle = server.handle();
    let cut_off = server.handle();
    let awaited = || "what is open".to_owned();
    let (drain, cut_off) = (move || handle.drain(), move || cut_off.cut_off());
    signals::handle(move || reload(), move || reopen_log(), awaited, drain, cut_off)
        .map_err(Failure::failed)?;
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
    warn_of_missing_index(&config);
    readiness::notify_ready(false);
    server.run().map_err(failed)?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}

/// Whether the start failed only because its addresses are in use, or come from systemd; then this
/// is printed. The configuration of a running service can be checked so: everything else is checked
/// before the addresses.
fn is_in_use(error: &ServerError, config: &Config) -> bool {
    let root = config.root.display();
    match error {
        ServerError::Listen { address: Address::Systemd, .. } => {
            println!("{root} can be served, on the sockets that systemd will pass");
        }
        ServerError::Listen { address, error } if error.kind() == ErrorKind::AddrInUse => {
            println!("{root} can be served; another process listens on {address} now");
        }
        _ => return false,
    }
    true
}

/// Reads the secrets and opens the log again. Two signals at a time would put the older of two
/// files in force.
fn reload(handle: &Handle, turn: &Mutex<()>, message: &str) {
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    match handle.reload() {
        Ok(()) => info!("{message}"),
        Err(errors) => {
            for error in errors {
                error!(%error, "not reloaded: {error}");
            }
        }
    }
}

/// What a reload reports.
fn reloaded_message(config: &Config) -> String {
    let read_again = [
        config.tls.as_ref().map(|_| "the certificate"),
        config.basic_auth.as_ref().map(|_| "the passwords"),
        config.access_log.as_ref().and_then(|log| log.path.as_ref()).map(|_| "the access log"),
    ];
    let names: Vec<_> = read_again.into_iter().flatten().collect();
    let names = if names.is_empty() { "nothing".into() } else { names.join(", ") };
    format!("reloaded: {names}; other options need a restart")
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
