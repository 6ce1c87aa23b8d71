//! `haul serve`: runs a file server from its options, and handles signals.

mod messages;
mod options;

use crate::output::Failure;
use clap::Args;
use haul_serve::{Address, Handle, Server};
use messages::{MessageFormat, MessageWriter};
use options::Options;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing::{error, info, warn};

/// Maximum size of the configuration file, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

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
    let result = merge_config_file(options, config.as_deref()).and_then(|options| {
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

/// Adds the options of the configuration file to those of the command line, which take precedence.
fn merge_config_file(options: Options, file: Option<&Path>) -> Result<Options, Failure> {
    let Some(path) = file else { return Ok(options) };
    let invalid = |problem: String| Failure::bad_input(format!("{}: {problem}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| invalid(error.to_string()))?;
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(|error| invalid(error.to_string()))?;
    Ok(options.or(Options::parse(&text).map_err(invalid)?))
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
    let config = options.into_config()?;
    raise_descriptor_limit();
    let failed = |error: haul_serve::Error| {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed(error) }
    };
    let server = match Server::new(&config) {
        // Everything else is checked before, so an address in use does not fail the check: the
        // configuration of a running service can be checked.
        Err(haul_serve::Error::Listen { address, source })
            if check && source.kind() == ErrorKind::AddrInUse && address != Address::Systemd =>
        {
            println!(
                "{} can be served; another process listens on {address} now",
                config.root.display()
            );
            return Ok(ExitCode::SUCCESS);
        }
        Err(haul_serve::Error::Listen { address: Address::Systemd, .. }) if check => {
            println!(
                "{} can be served, on the sockets that systemd will pass",
                config.root.display()
            );
            return Ok(ExitCode::SUCCESS);
        }
        server => server.map_err(failed)?,
    };
    let places = server.addresses().iter().map(display_url).collect::<Vec<_>>().join(", ");
    if check {
        println!("{} can be served at {places}", config.root.display());
        for caveat in server.caveats() {
            println!("{caveat}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    *messages = Some(MessageWriter::start(format).map_err(Failure::failed)?);
    handle_signals(server.handle()).map_err(Failure::failed)?;
    let loops = server.workers();
    let plural = if loops == 1 { "" } else { "s" };
    let metrics = server
        .metrics_address()
        .map_or(String::new(), |address| format!(", metrics at http://{address}/metrics"));
    let folder = config.root.display();
    info!(%folder, %places, loops, "serving {folder} at {places} with {loops} loop{plural}{metrics}");
    for caveat in server.caveats() {
        warn!("{caveat}");
    }
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
    // Without systemd there is no receiver of the notification.
    let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
    server.run().map_err(failed)?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}

/// Formats an address as a URL for a browser.
fn display_url((address, is_tls): &(Address, bool)) -> String {
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

/// Starts the threads that handle signals.
///
/// * SIGTERM, SIGINT and SIGQUIT drain the service: it finishes open requests, then ends. A second
///   one ends the process at once.
/// * SIGHUP and SIGUSR1 reload the certificate and the passwords, and reopen the log.
///
/// SIGQUIT and SIGUSR1 are nginx's signals for this. Unhandled, they would kill the process.
fn handle_signals(handle: Handle) -> std::io::Result<()> {
    let (mut end_rx, end_tx) = UnixStream::pair()?;
    let (mut reload_rx, reload_tx) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT, SIGQUIT] {
        signal_hook::low_level::pipe::register(signal, end_tx.try_clone()?)?;
    }
    for signal in [SIGHUP, SIGUSR1] {
        signal_hook::low_level::pipe::register(signal, reload_tx.try_clone()?)?;
    }
    let reload_handle = handle.clone();
    let spawn = |work: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name("haul-signals".into()).spawn(work)
    };
    spawn(Box::new(move || {
        while reload_rx.read_exact(&mut [0]).is_ok() {
            match reload_handle.reload() {
                Ok(()) => info!("reloaded"),
                Err(errors) => {
                    for error in errors {
                        error!(%error, "not reloaded: {error}");
                    }
                }
            }
        }
    }))?;
    spawn(Box::new(move || {
        if end_rx.read_exact(&mut [0]).is_ok() {
            info!("finishing open requests, then ending; another signal ends at once");
            let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]);
            handle.drain();
        }
        if end_rx.read_exact(&mut [0]).is_ok() {
            std::process::exit(1);
        }
    }))?;
    Ok(())
}

/// Raises the limit on open file descriptors to its maximum: each connection and each open file
/// takes one.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, the service stays within the present limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
