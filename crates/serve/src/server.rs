//! The file service as a whole: listening sockets, event loops, metrics, and how to stop it.

use crate::config::{Config, Limits, Tls};
use crate::control::Controller;
use crate::error::Error;
use crate::files::service::Service;
use crate::handle::Handle;
use crate::handler::FileHandler;
use crate::jobs::{self, FileJob};
use crate::opened::Opened;
use crate::secrets::Secrets;
use crate::upload_file::UploadRemover;
use haul::{MethodChoice, SendMethod};
use haul_fs::Symlinks;
use haul_server::command_socket::CommandSocket;
use haul_server::event_loop::EventLoop;
use haul_server::ktls::KtlsSupport;
use haul_server::listener::{ListenAddress, Listeners};
use haul_server::log_writer::LogWriter;
use haul_server::metrics::MetricsServer;
use haul_server::offload::Offload;
use haul_server::sandbox::{self, AccessRights, PortRights};
use haul_server::window_clamp::{ClampedPorts, WindowClamp};
use haul_server::{Control, privileges, runtime, start_check};
use rustix::fs::{Access, AtFlags};
use rustix::thread::CapabilitySet;
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};
use tracing::info;

/// The send methods that a server can use. The others need a ring or pinned buffers for each
/// connection, and wait for something else than room in the socket.
const METHODS: [SendMethod; 6] = [
    SendMethod::ReadWrite,
    SendMethod::ReadSend,
    SendMethod::MmapSend,
    SendMethod::Sendfile,
    SendMethod::Splice,
    SendMethod::Vmsplice,
];

/// Descriptors of an upload in addition to its socket: the temporary file and its directory.
const UPLOAD_DESCRIPTORS: usize = 2;

/// A file service that listens, and serves once it runs.
#[derive(Debug)]
pub struct Server {
    listeners: Listeners,
    loops: Vec<EventLoop<FileHandler>>,
    offload: Offload<FileJob>,
    remover: Option<UploadRemover>,
    metrics: Option<MetricsServer>,
    control_socket: Option<CommandSocket>,
    started: (SystemTime, Instant),
    caveats: Vec<String>,
    handle: Handle,
    service: Arc<Service>,
    window_clamp: Option<WindowClamp>,
}

impl Server {
    /// Opens the root and the log, listens, drops privileges and starts threads. Connections wait
    /// until [`Server::run`].
    pub fn new(config: &Config) -> Result<Self, Error> {
        let started = (SystemTime::now(), Instant::now());
        let loops = runtime::loop_count(config.workers)?;
        if let MethodChoice::Method(method) = config.choice
            && !METHODS.contains(&method)
        {
            return Err(Error::Method(method));
        }
        let wanted = config;
        let config = &fit_descriptors(wanted, runtime::descriptors_available());
        let service = Arc::new(Service::new(config)?);
        let secrets = Secrets::load(config)?;
        let opened = Opened::open(config, loops)?;
        // The probe connects, so it comes before the sandbox.
        let ktls = match &config.tls {
            Some(tls) if tls.in_kernel => KtlsSupport::probe(),
            _ => Ok(KtlsSupport::default()),
        };
        let used_caveats = opened.caveats();
        let Opened { log_file, mut listeners, metrics_listener, control_socket, .. } = opened;
        let ports =
            ClampedPorts { accepted: listeners.own_ports().to_vec(), ..ClampedPorts::default() };
        let (window_clamp, refusal) = WindowClamp::attach_if(config.window_clamp, &ports);
        let mut caveats = restrict(config, &service, ktls.as_ref().err())?;
        caveats.extend(refusal);
        caveats.extend(used_caveats);
        caveats.extend(descriptor_caveat(&wanted.limits, &config.limits));
        // From here on there are threads.
        let log = log_file.map(LogWriter::start).transpose()?.map(Arc::new);
        let offload =
            Offload::start(&jobs::pools(secrets.passwords.is_some(), config.content.listing))
                .map_err(haul_server::Error::at("starting a thread"))?;
        let remover = config.put_bytes_max.map(|_| UploadRemover::start()).transpose();
        let remover = remover.map_err(haul_server::Error::at("starting a thread"))?;
        let removals = remover.as_ref().map(UploadRemover::removals).unwrap_or_default();
        let mut handle = Handle::new(config, loops, secrets, log, removals, opened.config_file)?;
        let settings = FileHandler::loop_settings(&config.limits, loops)
            .with_trusted_proxies(Arc::new(config.trusted_proxies.clone()));
        let mut event_loops = Vec::new();
        for listeners in listeners.take() {
            let ktls = *ktls.as_ref().unwrap_or(&KtlsSupport::default());
            let settings = settings.clone();
            let next = handle.event_loop(listeners, loops, &service, ktls, &offload, settings);
            event_loops.push(next?);
        }
        let metrics = metrics_listener
            .map(|listener| handle.serve_metrics(listener, started.0))
            .transpose()?;
        let loops = event_loops;
        Ok(Self {
            listeners,
            loops,
            offload,
            remover,
            metrics,
            control_socket,
            started,
            caveats,
            handle,
            service,
            window_clamp,
        })
    }

    /// The addresses that it listens on. A port that was 0 is the one that the kernel chose.
    pub fn addresses(&self) -> &[ListenAddress] {
        self.listeners.addresses()
    }

    /// The address of the metrics endpoint.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(MetricsServer::address)
    }

    /// Requested features that are not available, each with its consequence.
    pub fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// Whether the congestion window of near clients is clamped.
    pub fn clamps_window(&self) -> bool {
        self.window_clamp.is_some()
    }

    /// The number of event loops.
    pub fn workers(&self) -> usize {
        self.loops.len()
    }

    /// Control over the service while it runs.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until [`Handle::drain`], and then until open responses are sent or the drain timeout
    /// is over.
    pub fn run(self) -> Result<(), Error> {
        let addresses = self.addresses().iter().map(|listen| listen.address.to_string()).collect();
        let controller = Controller::new(self.handle(), self.started, addresses);
        let Self { loops, listeners, offload, remover, metrics, handle, service, .. } = self;
        let serve = |socket: CommandSocket| {
            socket.serve("haul-control", move |line, _client| controller.answer(line))
        };
        let control_server = self.control_socket.map(serve).transpose()?;
        if service.put_bytes_max.is_some() {
            start_cleanup(service, Arc::clone(handle.control()));
        }
        let result = runtime::run("haul-serve", loops, handle.control());
        // The threads of the jobs also have uploads.
        drop(offload);
        drop((remover, metrics, listeners, control_server));
        handle.end_log();
        Ok(result?)
    }
}

/// Removes on a separate thread the temporary files of uploads that an earlier process has left.
/// Without a thread they stay.
fn start_cleanup(service: Arc<Service>, control: Arc<Control>) {
    let clean_up = move || {
        let removed = haul_fs::remove_abandoned_files(&service.root(), || control.is_draining());
        if removed > 0 {
            info!(removed, "temporary files of interrupted uploads that were removed: {removed}");
        }
    };
    let _ = std::thread::Builder::new().name("haul-cleanup".into()).spawn(clean_up);
}

/// Limits that so many descriptors suffice for, also if every connection has an upload. The pipe
/// of an upload that has more to receive is not counted: without one, its body is copied.
fn fit_descriptors(config: &Config, available: usize) -> Config {
    let mut config = config.clone();
    let per_connection = if config.put_bytes_max.is_some() { 1 + UPLOAD_DESCRIPTORS } else { 1 };
    let limits = &mut config.limits;
    limits.cached_files_max = limits.cached_files_max.min(available / 4);
    limits.waiting_max = limits.waiting_max.min(available / 8);
    let for_connections = available - limits.cached_files_max - limits.waiting_max;
    limits.connections_max = limits.connections_max.min(for_connections / per_connection).max(1);
    config
}

/// What a start reports if descriptors are missing for connections that were asked for, or for any
/// large number.
fn descriptor_caveat(wanted: &Limits, fitted: &Limits) -> Option<String> {
    const MANY: usize = 1000;
    let (wanted_max, fitted_max) = (wanted.connections_max, fitted.connections_max);
    let is_asked_for = wanted_max != Limits::default().connections_max;
    (fitted_max < wanted_max && (is_asked_for || fitted_max < MANY)).then(|| {
        format!(
            "at most {fitted_max} connections at a time instead of {wanted_max}: this process may \
             have no more descriptors (ulimit -Hn; LimitNOFILE of systemd)"
        )
    })
}

/// Switches to the configured user and sets up the sandbox. Returns the caveats of the start so
/// far.
fn restrict(
    config: &Config,
    service: &Service,
    ktls_error: Option<&io::Error>,
) -> Result<Vec<String>, Error> {
    if let Some(user) = &config.user {
        // With it, a file of another user is sent without a copy at once (`files/opener.rs`).
        privileges::switch_user(user, CapabilitySet::LEASE)?;
    }
    // The present user must be able to read the files.
    let path = || config.root.clone();
    service.root().check().map_err(|error| Error::Root { path: path(), error })?;
    let mut caveats: Vec<_> = unreadable(config)
        .into_iter()
        .chain(readable_by_root_alone(config))
        .chain(unwritable_log(config))
        .chain(service.root().caveat())
        .collect();
    if config.put_bytes_max.is_some() && !is_writable(&config.root) {
        caveats.push(format!(
            "{} cannot be written by this user: uploads to it are answered with 403",
            config.root.display()
        ));
    }
    if let Some(error) = ktls_error {
        caveats.push(format!(
            "the kernel has no kTLS, so files pass through the program: {error} (modprobe tls, if \
             it has that module)"
        ));
    }
    if config.basic_auth.is_some()
        && let Some(address) = config.listen.iter().find(|address| address.is_public())
    {
        caveats.push(format!("passwords travel to {address} unencrypted: use TLS"));
    }
    if config.confine {
        if config.content.symlinks == Symlinks::Anywhere {
            caveats.push("links may lead anywhere, so every file stays in reach".into());
        } else {
            caveats.extend(sandbox::restrict(&sandbox_paths(config), PortRights::default())?);
            caveats.extend(directory_of_releases(config).map(|path| {
                let (root, path) = (config.root.display(), path.display());
                format!("{root} leads through a symbolic link, so the process can also read {path}")
            }));
        }
    }
    Ok(caveats)
}

/// Whether the present user may create files in a directory.
fn is_writable(directory: &Path) -> bool {
    let access = Access::WRITE_OK | Access::EXEC_OK;
    rustix::fs::accessat(rustix::fs::CWD, directory, access, AtFlags::EACCESS).is_ok()
}

/// The paths that the service needs after its start.
fn sandbox_paths(config: &Config) -> Vec<(PathBuf, AccessRights)> {
    let root =
        if config.put_bytes_max.is_some() { AccessRights::ReadWrite } else { AccessRights::Read };
    let mut paths = vec![(config.root.clone(), root)];
    paths.extend(directory_of_releases(config).map(|path| (path, AccessRights::Read)));
    paths.extend(reloaded_files(config).map(|path| (path.clone(), AccessRights::ReadAgain)));
    let log = config.access_log.as_ref().and_then(|log| log.path.clone());
    paths.extend(log.map(|path| (path, AccessRights::Append)));
    paths.extend(config.control.iter().map(|path| (path.clone(), AccessRights::Remove)));
    paths.extend(config.unix_sockets().map(|path| (path.clone(), AccessRights::Remove)));
    paths
}

/// The directory with the target of the last symbolic link in the served directory's path: a
/// deployment points the link at another target there. `None` if files may be put, because nothing
/// outside the served directory may be written to.
fn directory_of_releases(config: &Config) -> Option<PathBuf> {
    // Without a slash at the end, which would follow the link.
    let path: PathBuf = config.root.components().collect();
    let link = path.ancestors().find(|ancestor| ancestor.is_symlink());
    let link = link.filter(|_| config.put_bytes_max.is_none())?;
    let target = link.canonicalize().ok()?;
    target.parent().filter(|parent| parent.parent().is_some()).map(Path::to_owned)
}

/// Files that a reload reads again.
fn reloaded_files(config: &Config) -> impl Iterator<Item = &PathBuf> {
    let tls = config.tls.iter().flat_map(|Tls { certificate, key, .. }| [certificate, key]);
    tls.chain(config.basic_auth.iter().map(|auth| &auth.file))
}

/// A caveat if a reload will fail because the present user cannot read a file: reported at the
/// start rather than when the certificate has expired.
fn unreadable(config: &Config) -> Option<String> {
    let unreadable = reloaded_files(config).filter(|path| File::open(path).is_err());
    let names: Vec<_> = unreadable.map(|path| path.display().to_string()).collect();
    let names = names.join(" and ");
    (!names.is_empty())
        .then(|| format!("the service's user cannot read {names}, so a reload will fail"))
}

/// A warning if the current user cannot create the log again after a rotation that left no file.
fn unwritable_log(config: &Config) -> Option<String> {
    let path = config.access_log.as_ref()?.path.as_ref()?;
    if path.exists() && !path.is_file() {
        // A pipe or a device is not rotated.
        return None;
    }
    // The log is open, but the service opened the log before it switched to this user.
    let error = start_check::check_creation(path).err()?;
    Some(format!(
        "this user cannot create files in the directory of {} ({}): after a rotation without a new \
         file, a reload will fail",
        path.display(),
        io::Error::from(error)
    ))
}

/// A caveat of a check by root if the service could not start as another user, such as one of
/// systemd's `DynamicUser`.
fn readable_by_root_alone(config: &Config) -> Option<String> {
    if !config.checks_only || !rustix::process::geteuid().is_root() {
        return None;
    }
    let is_roots = |path: &&PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.uid() == 0 && file.mode() & 0o044 == 0)
    };
    let names: Vec<_> =
        reloaded_files(config).filter(is_roots).map(|path| path.display().to_string()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "only root can read {}: if the service runs as another user, check as that user",
            names.join(" and ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_suffice_for_every_connection_and_its_upload() {
        const AVAILABLE: usize = 20_000;
        let mut config = Config::new("/");
        for (put_bytes_max, each) in [(None, 1), (Some(1 << 20), 3)] {
            config.put_bytes_max = put_bytes_max;
            let limits = fit_descriptors(&config, AVAILABLE).limits;
            let used = limits.cached_files_max + limits.waiting_max + each * limits.connections_max;
            assert!((AVAILABLE - 3..=AVAILABLE).contains(&used), "{used}");
        }
        assert_eq!(fit_descriptors(&config, 2).limits.connections_max, 1);
    }
}
