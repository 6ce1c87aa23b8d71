//! `haul serve`.

mod messages;
mod options;

use crate::output::Failure;
use clap::Args;
use haul_serve::{Address, Handle, Server};
use messages::{MessageFormat, Messages};
use options::Options;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing::{error, info, warn};

/// The largest file of options.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, Args)]
pub struct ServeArguments {
    #[command(flatten)]
    pub options: Options,
    /// Options from this file, TOML with the names of the flags; flags come first
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Say whether everything that was asked for is possible, and serve nothing
    #[arg(long)]
    pub check: bool,
}

pub fn run(arguments: ServeArguments) -> Result<ExitCode, Failure> {
    let ServeArguments { options, config, check } = arguments;
    // Until the file is read the command line says how to speak.
    let mut format = options.message_format.unwrap_or_default();
    let mut messages = None;
    let result = with_file(options, config.as_deref()).and_then(|options| {
        format = options.message_format.unwrap_or_default();
        serve(options, check, format, &mut messages)
    });
    let Err(failure) = &result else { return result };
    if format == MessageFormat::Text || check {
        return result;
    }
    // Whoever takes JSON takes nothing else, unless there is no thread to write it.
    match messages.map_or_else(|| Messages::start(format), Ok) {
        Ok(_messages) => {
            error!("{failure}");
            Ok(failure.exit_code())
        }
        Err(_) => result,
    }
}

/// The options, and those of a file that they do not name.
fn with_file(options: Options, file: Option<&Path>) -> Result<Options, Failure> {
    let Some(path) = file else { return Ok(options) };
    let wrong = |problem: String| Failure::bad_input(format!("{}: {problem}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| wrong(error.to_string()))?;
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(|error| wrong(error.to_string()))?;
    Ok(options.or(Options::parse(&text).map_err(wrong)?))
}

/// Serves until it is told to end. Messages begin once files and privileges are given up, which holds for threads begun after it.
fn serve(
    options: Options,
    check: bool,
    format: MessageFormat,
    messages: &mut Option<Messages>,
) -> Result<ExitCode, Failure> {
    let config = options.into_config()?;
    raise_descriptor_limit();
    let failed = |error: haul_serve::Error| {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed(error) }
    };
    let server = match Server::new(&config) {
        // Everything else is looked at before: a running service's file can be checked while it runs.
        Err(haul_serve::Error::Listen { address, source })
            if check && source.kind() == ErrorKind::AddrInUse && address != Address::Systemd =>
        {
            println!("{} can be served; somebody listens at {address} now", config.root.display());
            return Ok(ExitCode::SUCCESS);
        }
        Err(haul_serve::Error::Listen { address: Address::Systemd, .. }) if check => {
            println!(
                "{} can be served, at the sockets that systemd will hand over",
                config.root.display()
            );
            return Ok(ExitCode::SUCCESS);
        }
        server => server.map_err(failed)?,
    };
    let places = server.addresses().iter().map(address).collect::<Vec<_>>().join(", ");
    if check {
        println!("{} can be served at {places}", config.root.display());
        for caveat in server.caveats() {
            println!("{caveat}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    *messages = Some(Messages::start(format).map_err(Failure::failed)?);
    obey_signals(server.handle()).map_err(Failure::failed)?;
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
            "there is no {} there, so / answers 404; --listing lists folders",
            content.index.join(" or ")
        );
    }
    // Without systemd there is nobody to tell.
    let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
    server.run().map_err(failed)?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}

/// An address as a browser takes it.
fn address((address, is_tls): &(Address, bool)) -> String {
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

/// SIGTERM and SIGINT end the service once what is under way has ended, and a second one at once; SIGHUP has it read its
/// certificate and open its log again. So do nginx's signals for that, SIGQUIT and SIGUSR1, which would kill it otherwise.
fn obey_signals(handle: Handle) -> std::io::Result<()> {
    let (mut ends, end_teller) = UnixStream::pair()?;
    let (mut reloads, reload_teller) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT, SIGQUIT] {
        signal_hook::low_level::pipe::register(signal, end_teller.try_clone()?)?;
    }
    for signal in [SIGHUP, SIGUSR1] {
        signal_hook::low_level::pipe::register(signal, reload_teller.try_clone()?)?;
    }
    let reloading = handle.clone();
    let spawn = |work: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name("haul-signals".into()).spawn(work)
    };
    spawn(Box::new(move || {
        while reloads.read_exact(&mut [0]).is_ok() {
            match reloading.reload() {
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
        if ends.read_exact(&mut [0]).is_ok() {
            info!("ending when what is under way has ended; once more ends at once");
            let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]);
            handle.drain();
        }
        if ends.read_exact(&mut [0]).is_ok() {
            std::process::exit(1);
        }
    }))?;
    Ok(())
}

/// Each connection and each open file is a descriptor: as many as this process may ask for.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Refused, it stays as it was, and the service takes what there is.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
