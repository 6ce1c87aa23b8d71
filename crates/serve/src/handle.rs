//! [`Handle`]: control over a running service.

use crate::config::Config;
use crate::counters::Counters;
use crate::error::Error;
use crate::files::service::Service;
use crate::handler::FileHandler;
use crate::jobs::FileJob;
use crate::log::AccessLog;
use crate::metrics::ServeMetrics;
use crate::secrets::{Secrets, SharedSecrets};
use crate::status::{FileVersion, ServiceReload, reloaded_text};
use crate::upload_file::Removals;
use haul_server::Control;
use haul_server::event_loop::{EventLoop, LoopSettings};
use haul_server::ktls::KtlsSupport;
use haul_server::listener::Listener;
use haul_server::log_writer::{LogBuffer, LogWriter};
use haul_server::metrics::{MetricsServer, Registry};
use haul_server::offload::Offload;
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use tracing::{error, info, warn};

/// Control over a running service, from any thread.
#[derive(Debug, Clone)]
pub struct Handle {
    control: Arc<Control>,
    config: Arc<Config>,
    secrets: Arc<SharedSecrets>,
    /// Locked during a reload, because two reloads at a time could put the older files in force.
    reload_turn: Arc<Mutex<()>>,
    latest_reload: Arc<Mutex<Option<ServiceReload>>>,
    /// The configuration file when the service started.
    config_file: Option<Arc<FileVersion>>,
    log: Option<Arc<LogWriter>>,
    counters: Vec<Arc<Counters>>,
    removals: Removals,
}

impl Handle {
    /// Control over a service that will have so many event loops ([`Handle::event_loop`]).
    pub(crate) fn new(
        config: &Config,
        loops: usize,
        secrets: Secrets,
        log: Option<Arc<LogWriter>>,
        removals: Removals,
        config_file: Option<FileVersion>,
    ) -> Result<Self, Error> {
        Ok(Self {
            control: Control::new(loops)?,
            config: Arc::new(config.clone()),
            secrets: Arc::new(SharedSecrets::new(secrets)),
            reload_turn: Arc::default(),
            latest_reload: Arc::default(),
            config_file: config_file.map(Arc::new),
            log,
            counters: Vec::new(),
            removals,
        })
    }

    /// Stops accepting; the service ends once open responses are sent.
    pub fn drain(&self) {
        self.control.drain();
    }

    /// Stops accepting, and cuts off the responses and uploads that are open.
    pub fn cut_off(&self) {
        self.control.cut_off();
    }

    /// Reads the certificate and the passwords again and opens the access log by its name again.
    /// The certificate applies to new connections, the passwords to new requests. What cannot be
    /// read stays in force, and its error is returned, while the other files are in force. Messages
    /// report the result.
    pub fn reload(&self) -> Result<(), Vec<Error>> {
        self.reload_with_status().1
    }

    /// Like [`Handle::reload`], with the result for the control socket.
    pub(crate) fn reload_with_status(&self) -> (ServiceReload, Result<(), Vec<Error>>) {
        let _turn = self.reload_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut names, mut errors) = (Vec::new(), Vec::new());
        let mut add = |name: &str, path: &Path, result: Result<(), Error>| match result {
            Ok(()) => names.push(format!("the {name} {}", path.display())),
            Err(error) => errors.push(error),
        };
        let mut reloaded = self.secrets.get();
        if let Some(tls) = &self.config.tls {
            add("certificate", &tls.certificate, reloaded.reload_tls(tls, &self.config.root));
        }
        if let Some(auth) = &self.config.basic_auth {
            add("passwords", &auth.file, reloaded.reload_passwords(auth, &self.config.root));
        }
        self.secrets.set(reloaded);
        if let Some(log) = &self.log
            && let Some(path) = log.path()
        {
            add("access log", path, log.reopen().map_err(Error::from));
        }
        self.control.wake();
        let warning = self.config_file.as_ref().and_then(|version| version.change());
        if let Some(warning) = &warning {
            warn!("{warning}");
        }
        for error in &errors {
            error!(%error, "not reloaded: {error}");
        }
        if !names.is_empty() || errors.is_empty() {
            info!("reloaded: {}; other options need a restart", reloaded_text(&names));
        }
        let latest = ServiceReload::new(SystemTime::now(), names, &errors, warning);
        let kept = Some(latest.clone());
        *self.latest_reload.lock().unwrap_or_else(PoisonError::into_inner) = kept;
        (latest, if errors.is_empty() { Ok(()) } else { Err(errors) })
    }

    /// The latest reload; `None` before the first.
    pub(crate) fn latest_reload(&self) -> Option<ServiceReload> {
        self.latest_reload.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The configuration, with limits that the process can keep.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The control of the event loops.
    pub(crate) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Writes what is left of the log, and ends its thread.
    pub(crate) fn end_log(&self) {
        if let Some(log) = &self.log {
            log.end();
        }
    }

    /// The counters, one for each event loop.
    pub fn counters(&self) -> &[Arc<Counters>] {
        &self.counters
    }

    /// Makes the next of `loops` event loops.
    pub(crate) fn event_loop(
        &mut self,
        listeners: Vec<Listener>,
        loops: usize,
        service: &Arc<Service>,
        ktls: KtlsSupport,
        offload: &Offload<FileJob>,
        settings: LoopSettings,
    ) -> Result<EventLoop<FileHandler>, Error> {
        let index = self.counters.len();
        let buffer = self.log.as_ref().map_or_else(LogBuffer::default, |log| log.buffer());
        let format = self.config.access_log.as_ref().map(|log| log.format).unwrap_or_default();
        let log = AccessLog::new(format, buffer);
        let (service, secrets) = (Arc::clone(service), Arc::clone(&self.secrets));
        let removals = self.removals.clone();
        let handler = FileHandler::new(&self.config, loops, service, secrets, ktls, log, removals);
        self.counters.push(Arc::clone(&handler.accounting.counters));
        Ok(EventLoop::new(index, listeners, offload, &self.control, settings, handler)?)
    }

    /// Starts the server of the metrics of a service that started at a time.
    pub(crate) fn serve_metrics(
        &self,
        listener: TcpListener,
        started: SystemTime,
    ) -> Result<MetricsServer, Error> {
        let unwritten = self.log.as_ref().map(|log| Arc::clone(log.unwritten()));
        let mut registry = Registry::default();
        registry.register_process(&self.config.version, started);
        registry.register(ServeMetrics { loops: self.counters.clone(), unwritten });
        Ok(MetricsServer::start(listener, registry)?)
    }
}
