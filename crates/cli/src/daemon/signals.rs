//! Signals of a service: reload, drain, end.

use crate::daemon::readiness;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use tracing::info;

/// SIGHUP and SIGUSR1, which do not end the process any more. Made before the process can be
/// reached, because a hook of logrotate or a certificate may send them while the process starts.
pub struct EarlySignals {
    reload_rx: UnixStream,
    reopen_rx: UnixStream,
}

impl EarlySignals {
    /// Catches the signals. [`handle`] acts on those that come before it.
    pub fn catch() -> io::Result<Self> {
        Ok(Self { reload_rx: pipe_of(&[SIGHUP])?, reopen_rx: pipe_of(&[SIGUSR1])? })
    }
}

/// Starts the threads that handle signals.
///
/// * SIGTERM, SIGINT and SIGQUIT call `drain`. The message before it has what `awaited` returns,
///   such as `2 connections`. A second one calls `cut_off`, and a third one ends the process at
///   once.
/// * SIGHUP calls `reload`, and SIGUSR1 calls `reopen_log`.
///
/// SIGQUIT and SIGUSR1 are nginx's signals for this. Unhandled, they would kill the process.
pub fn handle(
    early: EarlySignals,
    reload: impl Fn() + Send + 'static,
    reopen_log: impl Fn() + Send + 'static,
    awaited: impl FnOnce() -> String + Send + 'static,
    drain: impl FnOnce() + Send + 'static,
    cut_off: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut end_rx = pipe_of(&[SIGTERM, SIGINT, SIGQUIT])?;
    let EarlySignals { mut reload_rx, mut reopen_rx } = early;
    let thread = || std::thread::Builder::new().name("haul-signals".into());
    thread().spawn(move || {
        while reload_rx.read_exact(&mut [0]).is_ok() {
            reload();
        }
    })?;
    thread().spawn(move || {
        while reopen_rx.read_exact(&mut [0]).is_ok() {
            reopen_log();
        }
    })?;
    thread().spawn(move || {
        if end_rx.read_exact(&mut [0]).is_ok() {
            readiness::notify_stopping();
            // Before the drain: the process may end while this thread writes.
            info!("ending, waiting for {}; another signal ends at once", awaited());
            drain();
        }
        if end_rx.read_exact(&mut [0]).is_ok() {
            info!("another signal: cutting off what is open");
            cut_off();
        }
        if end_rx.read_exact(&mut [0]).is_ok() {
            std::process::exit(1);
        }
    })?;
    Ok(())
}

/// A pipe that receives one byte for each of these signals.
pub fn pipe_of(signals: &[i32]) -> io::Result<UnixStream> {
    let (rx, tx) = UnixStream::pair()?;
    for &signal in signals {
        signal_hook::low_level::pipe::register(signal, tx.try_clone()?)?;
    }
    Ok(rx)
}
