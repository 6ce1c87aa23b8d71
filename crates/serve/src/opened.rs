//! What a file service opens while it has all of its privileges. A check of the configuration
//! creates no file.

use crate::config::Config;
use crate::error::Error;
use crate::status::FileVersion;
use haul_server::Address;
use haul_server::command_socket::CommandSocket;
use haul_server::listener::{ListenAddress, ListenSettings, Listeners};
use haul_server::log_writer::LogFile;
use haul_server::metrics;
use std::net::TcpListener;

/// The log and the sockets of a service.
pub struct Opened {
    /// The log; `None` without a log, and in a check.
    pub log_file: Option<LogFile>,
    /// The sockets of clients.
    pub listeners: Listeners,
    /// The socket of the metrics.
    pub metrics_listener: Option<TcpListener>,
    /// The control socket; `None` without a control socket, and in a check.
    pub control_socket: Option<CommandSocket>,
    /// The configuration file, whose changes a reload reports.
    pub config_file: Option<FileVersion>,
    /// The addresses at which another process listens, which only a check leaves out.
    used_addresses: Vec<Address>,
}

impl Opened {
    /// Opens the log and the sockets of so many event loops.
    pub fn open(config: &Config, loops: usize) -> Result<Self, Error> {
        let log_file = open_log(config)?;
        let listen = listen_settings(config);
        let control = config.control.iter().cloned().map(Address::Unix);
        let metrics = config.metrics.map(Address::Tcp);
        listen.check_distinct(metrics.into_iter().chain(control))?;
        let listeners = Listeners::open(&listen, loops)?;
        let mut used_addresses = listeners.used_addresses().to_vec();
        let metrics_listener = open_metrics(config, &mut used_addresses)?;
        let control_socket = open_control(config, &mut used_addresses)?;
        let config_file = config.config_file.as_deref().and_then(FileVersion::of);
        Ok(Self {
            log_file,
            listeners,
            metrics_listener,
            control_socket,
            config_file,
            used_addresses,
        })
    }

    /// A caveat for each address at which another process listens.
    pub fn caveats(&self) -> Vec<String> {
        let caveat = |address| {
            format!(
                "another process listens on {address}. If that process is not the service itself, \
                 a start will fail"
            )
        };
        self.used_addresses.iter().map(caveat).collect()
    }
}

fn open_log(config: &Config) -> Result<Option<LogFile>, Error> {
    let Some(log) = &config.access_log else { return Ok(None) };
    if config.checks_only {
        LogFile::check(log.path.as_deref())?;
        return Ok(None);
    }
    let file = LogFile::open(log.path.as_deref())?;
    file.give_to(config.user.as_deref())?;
    Ok(Some(file))
}

/// Opens the socket of the metrics. A check puts an address that is in use into `used_addresses`.
fn open_metrics(
    config: &Config,
    used_addresses: &mut Vec<Address>,
) -> Result<Option<TcpListener>, Error> {
    let Some(address) = config.metrics else { return Ok(None) };
    match metrics::listen(address) {
        Err(error) if config.checks_only && error.is_address_in_use() => {
            used_addresses.push(Address::Tcp(address));
            Ok(None)
        }
        opened => Ok(Some(opened?)),
    }
}

/// Opens the control socket, as [`open_metrics`] opens its socket.
fn open_control(
    config: &Config,
    used_addresses: &mut Vec<Address>,
) -> Result<Option<CommandSocket>, Error> {
    let Some(path) = &config.control else { return Ok(None) };
    if !config.checks_only {
        return Ok(Some(CommandSocket::open(path)?));
    }
    match CommandSocket::check(path) {
        Err(error) if error.is_address_in_use() => used_addresses.push(Address::Unix(path.clone())),
        checked => checked?,
    }
    Ok(None)
}

fn listen_settings(config: &Config) -> ListenSettings {
    let plain = config.listen.iter().map(|address| (address, false));
    let tls = config.tls.iter().flat_map(|tls| &tls.listen).map(|address| (address, true));
    let listen =
        |(address, is_tls): (&Address, bool)| ListenAddress { address: address.clone(), is_tls };
    let addresses: Vec<_> = plain.chain(tls).map(listen).collect();
    ListenSettings::new(addresses)
        .with_congestion(config.congestion.as_deref())
        .with_socket_mode(config.socket_mode)
        .with_used_left_out(config.checks_only)
        .with_only_checks(config.checks_only)
}
