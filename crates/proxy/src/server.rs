//! The proxy as a whole: listening sockets, event loops, checks, metrics, and how to stop it.

use crate::config::source::SourceChoice;
use crate::config::{Config, Limits, ListenerConfig};
use crate::error::Error;
use crate::handler::{ProxyHandler, loop_settings};
use crate::handover::{
    CLOSE_INTERVAL, CLOSE_TIME_MAX, ClientRoom, HandoverSource, HandoverTarget, InheritedSockets,
    Parts, SOURCE_ENDED,
};
use crate::keep_alive::keep_alive;
use crate::loop_state::{self, LoopState, Shared};
use crate::mailbox::Mailboxes;
use crate::operate::control::Controller;
use crate::operate::metrics::ProxyMetrics;
use crate::operate::process::Process;
use crate::operate::reload::{Reloader, table_caveats};
use crate::record::counters::LoopCounters;
use crate::upstreams::routing::{CurrentTable, RoutingTable};
use crate::watch::checks::{Checks, OnChange};
use crate::watch::resolver::{self, Resolver};
use haul_server::admission::Admission;
use haul_server::admission::placement::Placement;
use haul_server::command_socket::CommandSocket;
use haul_server::connect::{self, Source};
use haul_server::event_loop::LoopSettings;
use haul_server::listener::{ListenAddress, ListenSettings};
use haul_server::log_writer::{LogBuffer, LogFile, LogWriter};
use haul_server::metrics::Registry;
use haul_server::runtime::{self, Service};
use haul_server::sandbox::{self, AccessRights, PortRights};
use haul_server::unix_address::abstract_name;
use haul_server::window_clamp::{ClampedPorts, WindowClamp};
use haul_server::{Address, Control, privileges};
use rustix::fs::Access;
use rustix::thread::CapabilitySet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Instant, SystemTime};

/// Descriptors of a connection: two sockets. A second attempt to connect and the descriptors of the
/// log and of checks are in the reserve.
const DESCRIPTORS_PER_CONNECTION: usize = 2;

/// A proxy that listens, and forwards once it runs.
#[derive(Debug)]
pub struct Server {
    config: Config,
    service: Service,
    loops: Loops,
    shared: Shared,
    reloader: Arc<Reloader>,
    control_socket: Option<CommandSocket>,
    /// The handover from the old process, which begins once this process runs.
    target: Option<HandoverTarget>,
    log: Option<Arc<LogWriter>>,
    caveats: Vec<String>,
    window_clamp: Option<WindowClamp>,
    /// When the proxy was created, by the system's clock and by the monotonic clock.
    started: (SystemTime, Instant),
}

/// The event loops.
#[derive(Debug)]
struct Loops {
    settings: LoopSettings,
    handlers: Vec<ProxyHandler>,
    counters: Vec<Arc<LoopCounters>>,
    mailboxes: Arc<Mailboxes>,
}

/// Control over a running proxy, from any thread.
#[derive(Debug, Clone)]
pub struct Handle {
    control: Arc<Control>,
    log: Option<Arc<LogWriter>>,
    reloader: Arc<Reloader>,
    placement: Arc<Placement>,
}

/// The files and sockets that a proxy opens while it has all privileges.
struct Opened {
    service: Service,
    log_file: Option<LogFile>,
    control_socket: Option<CommandSocket>,
    window_clamp: Option<WindowClamp>,
    caveats: Vec<String>,
}

impl Opened {
    /// Opens everything, at once if the running proxy still runs.
    fn open_after(
        config: &Config,
        loops: usize,
        inherited: Option<&InheritedSockets>,
        still_runs: bool,
    ) -> Result<Self, Error> {
        if config.process.upgrades && !still_runs {
            wait_for_addresses(config, loops, inherited);
        }
        Self::open(config, loops, inherited)
    }

    /// Opens everything, with the sockets that the running proxy sent.
    fn open(
        config: &Config,
        loops: usize,
        inherited: Option<&InheritedSockets>,
    ) -> Result<Self, Error> {
        let log_file = match config.reporting.access_log {
            Some(_) if config.process.checks_only => {
                LogFile::check(log_path(config))?;
                None
            }
            Some(_) => Some(LogFile::open(log_path(config))?),
            None => None,
        };
        log_file.as_ref().map_or(Ok(()), |log| log.give_to(config.process.user.as_deref()))?;
        let listen: Vec<_> = config.listeners.iter().map(without_tls).collect();
        // In an upgrade, an address in use belongs to a program other than the running proxy.
        let leaves_out_used = config.process.checks_only && !config.process.upgrades;
        let congestion = config.sockets.congestion.as_deref();
        let mut listen = ListenSettings::new(listen)
            .with_congestion(congestion)
            .with_shared(true)
            .with_used_left_out(leaves_out_used)
            .with_only_checks(config.process.checks_only);
        // A check changes nothing about the sockets of the running proxy.
        if !config.process.checks_only {
            let keep_alive = keep_alive(&config.limits);
            listen =
                listen.with_keep_alive(keep_alive).with_socket_mode(config.sockets.socket_mode);
        }
        let (mut control, mut inherited_caveats) = (None, Vec::new());
        if let Some(inherited) = inherited {
            let addresses: Vec<_> = config.listeners.iter().map(|one| &one.address).collect();
            inherited_caveats.extend(inherited.given_up(&addresses));
            inherited_caveats.extend(inherited.kept_congestion(&addresses, congestion));
            listen = listen.with_inherited(inherited.listeners.clone(), inherited.metrics.clone());
            let listener = inherited.control.as_ref().map(OwnedFd::try_clone).transpose();
            control = listener.map_err(haul_server::Error::at("copying the control socket"))?;
        }
        let service = Service::open("haul-proxy", &listen, config.reporting.metrics, loops)?;
        let mut used_addresses = service.used_addresses().to_vec();
        let control_socket = match (&config.reporting.control, control) {
            (Some(path), Some(listener)) => Some(CommandSocket::inherit(path, listener)?),
            (Some(path), None) if config.process.checks_only => {
                match CommandSocket::check(path) {
                    Err(error) if leaves_out_used && error.is_address_in_use() => {
                        used_addresses.push(Address::Unix(path.clone()));
                    }
                    checked => checked?,
                }
                None
            }
            (Some(path), None) => Some(CommandSocket::open(path)?),
            (None, _) => None,
        };
        let ports = ClampedPorts {
            accepted: service.own_ports().to_vec(),
            connected: config.upstream_ports(),
        };
        let (window_clamp, refusal) = WindowClamp::attach_if(config.sockets.window_clamp, &ports);
        let used: Vec<_> = used_addresses.iter().map(ToString::to_string).collect();
        let used = (!used.is_empty()).then(|| {
            format!(
                "another process listens at {}: beside a running haul proxy that is as it should \
                 be (--upgrade), otherwise the start will fail",
                used.join(", ")
            )
        });
        let caveats = inherited_caveats.into_iter().chain(refusal).chain(used).collect();
        Ok(Self { service, log_file, control_socket, window_clamp, caveats })
    }
}

/// Gives up the files and ports that the process does not need, unless the operator keeps them.
fn confine(config: &Config, upstream_ports: &[u16]) -> Result<Vec<String>, Error> {
    if !config.process.confine {
        return Ok(Vec::new());
    }
    let binds_free_port = config.sockets.source != SourceChoice::Host;
    let ports = PortRights { connect: upstream_ports, binds_free_port, binds_all: false };
    Ok(sandbox::restrict(&sandbox_paths(config), ports)?.into_iter().collect())
}

/// Waits until the addresses of a killed process are free. The kernel closes the sockets of such a
/// process one after the other, so an address may be in use for a moment longer than the control
/// socket. The addresses are only checked, because a client that connects to a listening socket of
/// a failed attempt would be lost.
fn wait_for_addresses(config: &Config, loops: usize, inherited: Option<&InheritedSockets>) {
    let mut check = config.clone();
    check.process.checks_only = true;
    let deadline = Instant::now() + CLOSE_TIME_MAX;
    while let Err(Error::Server(error)) = Opened::open(&check, loops, inherited)
        && error.is_address_in_use()
        && Instant::now() < deadline
    {
        thread::sleep(CLOSE_INTERVAL);
    }
}

/// Fewer connections surprise an operator, even without a limit in the configuration.
const CONNECTIONS_EXPECTED: usize = 1000;

/// The number of clients that the limit of open files allows.
fn client_room(loops: usize) -> ClientRoom {
    let available = runtime::descriptors_available();
    // Without descriptors for pipes, bytes are copied.
    let of_pipes = (loops * loop_state::PIPES_MAX * 2).min(available / 2);
    ClientRoom(((available - of_pipes) / DESCRIPTORS_PER_CONNECTION).max(1))
}

/// Lowers the limit of connections to the number that the limit of open files allows. Returns the
/// consequence.
fn fit_descriptors(limits: &mut Limits, ClientRoom(most): ClientRoom) -> Option<String> {
    let wanted = limits.connections_max.max(1);
    limits.connections_max = wanted.min(most);
    // The default is the highest number.
    let is_asked_for = wanted != Limits::default().connections_max;
    let is_lowered = wanted > most && (is_asked_for || most < CONNECTIONS_EXPECTED);
    is_lowered.then(|| {
        format!("max-connections is {most}: the limit of open files (ulimit -Hn) allows no more")
    })
}

/// Switches to the user of the configuration.
fn drop_privileges(config: &Config) -> Result<(), Error> {
    if let Some(user) = &config.process.user {
        let kept = match config.sockets.source {
            SourceChoice::Client => CapabilitySet::NET_ADMIN,
            _ => CapabilitySet::empty(),
        };
        privileges::switch_user(user, kept)?;
    }
    check_sources(&config.sockets.source)?;
    if let Some(name) = &config.sockets.congestion {
        // This user creates the sockets to upstreams, and may lack root's permissions.
        connect::check_congestion(name)
            .map_err(|error| haul_server::Error::Congestion { name: name.clone(), error })?;
    }
    Ok(())
}

/// Files that the user of the configuration cannot open again later, each with its consequence.
fn access_caveats(config: &Config) -> Vec<String> {
    let Some(user) = &config.process.user else { return Vec::new() };
    let file = config.process.config_file.as_deref().and_then(|path| {
        let error = std::fs::File::open(path).err()?;
        let path = path.display();
        Some(format!("{user} cannot read {path} ({error}): a reload will fail"))
    });
    let log = log_path(config).and_then(|path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or_else(|| Path::new("."));
        let error = rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK).err()?;
        let (path, folder) = (path.display(), folder.display());
        Some(format!(
            "{user} cannot create files in {folder} ({}): if a rotation of {path} creates no new \
             file that this user can write to, the old one is written to",
            io::Error::from(error)
        ))
    });
    file.into_iter().chain(log).collect()
}

/// Whether the present user may connect from the addresses of the configuration.
fn check_sources(choice: &SourceChoice) -> Result<(), Error> {
    let sources = match choice {
        SourceChoice::Host => Vec::new(),
        SourceChoice::Addresses(addresses) => {
            let source = |&address: &IpAddr| Source { address, is_foreign: false };
            addresses.iter().map(source).collect()
        }
        SourceChoice::Client => {
            vec![Source { address: Ipv4Addr::LOCALHOST.into(), is_foreign: true }]
        }
    };
    for address in sources {
        connect::check_source(address).map_err(|error| Error::Source { address, error })?;
    }
    Ok(())
}

/// The other process, what it sent, and a caveat if it ended.
type TakenOver = (Option<HandoverTarget>, Option<InheritedSockets>, Vec<String>);

/// Asks the running proxy for its sockets, if that is wanted. If the running proxy ends, this
/// process starts without a handover.
fn take_over(config: &Config, room: ClientRoom) -> Result<TakenOver, Error> {
    if !config.process.upgrades {
        return Ok((None, None, Vec::new()));
    }
    let path = config.reporting.control.as_ref().ok_or(Error::UpgradeWithoutControl)?;
    let failed = |error| Error::TakeOver { path: path.clone(), error };
    match HandoverTarget::connect(path, room) {
        Ok((Some(target), inherited)) => Ok((Some(target), Some(inherited), Vec::new())),
        Ok((None, inherited)) => Ok((None, Some(inherited), vec![SOURCE_ENDED.into()])),
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
            Ok((None, None, vec![SOURCE_ENDED.into()]))
        }
        Err(error) => Err(failed(error)),
    }
}

impl Server {
    /// Resolves names, opens the log, listens, drops privileges and starts threads. Connections
    /// wait until [`Server::run`].
    ///
    /// A name that cannot be resolved is a caveat, and is resolved again later: a proxy may start
    /// before the network is complete.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let started = (SystemTime::now(), Instant::now());
        let table = Arc::new(CurrentTable::new(RoutingTable::new(config, None)?));
        let loops = runtime::loop_count(config.process.workers)?;
        let (as_given, mut config) = (config.clone(), config.clone());
        let room = client_room(loops);
        let (target, inherited, mut caveats) = take_over(&config, room)?;
        caveats.extend(fit_descriptors(&mut config.limits, room));
        let opened = Opened::open_after(&config, loops, inherited.as_ref(), target.is_some())?;
        let Opened { service, log_file, control_socket, window_clamp, caveats: opened } = opened;
        drop_privileges(&config)?;
        caveats.extend(opened.into_iter().chain(access_caveats(&config)));
        caveats.extend(config.caveats());
        // The resolver reads files that depend on the host, so its threads start before the
        // sandbox, which holds for the threads that start later.
        let resolver = Resolver::start(&table, config.resolve_interval)
            .map_err(haul_server::Error::at("starting the threads that resolve names"))?;
        caveats.extend(resolver::unresolved_caveats(resolver.resolve(&table.get())));
        let shared = Shared::new(Arc::clone(&table), &config.limits, service.control().wakers());
        let upstreams = inherited.iter().flat_map(|inherited| &inherited.upstreams);
        shared.apply_all(upstreams, config.down_policy);
        caveats.extend(table_caveats(&table.get(), &config.listeners));
        let on_change =
            OnChange { closings: Arc::clone(&shared.closings), down_policy: config.down_policy };
        let checks = Checks::start(Arc::clone(&table), on_change.clone())
            .map_err(haul_server::Error::at("starting the thread that checks upstreams"))?;
        let upstream_ports = config.upstream_ports();
        caveats.extend(confine(&config, &upstream_ports)?);
        let permitted_ports = config.process.confine.then_some(upstream_ports);
        let reloader = Reloader::new(
            as_given,
            Arc::clone(&table),
            resolver,
            on_change,
            checks,
            permitted_ports,
        );
        let log = log_file.map(LogWriter::start).transpose()?.map(Arc::new);
        let mailboxes = Mailboxes::new(service.control());
        let counters = LoopCounters::of_loops(loops, config.listeners.len());
        let handler = |(index, counters): (usize, &Arc<LoopCounters>)| {
            let buffer = log.as_ref().map_or_else(LogBuffer::default, |log| log.buffer());
            let state = LoopState::new(&config, shared.clone(), Arc::clone(counters), buffer)?;
            Ok(ProxyHandler::new(index, state, Arc::clone(&mailboxes)))
        };
        let handlers = counters.iter().enumerate().map(handler).collect::<Result<_, _>>();
        let handlers = handlers.map_err(Error::Pool)?;
        let admission = Admission::Placement(Arc::clone(&shared.placement));
        let settings = loop_settings(&config).with_admission(admission);
        Ok(Self {
            config,
            service,
            loops: Loops { settings, handlers, counters, mailboxes },
            shared,
            reloader: Arc::new(reloader),
            control_socket,
            target,
            log,
            caveats,
            window_clamp,
            started,
        })
    }

    /// The addresses that the proxy listens on. A configured port 0 is replaced by the port that
    /// the kernel chose.
    pub fn addresses(&self) -> &[ListenAddress] {
        self.service.addresses()
    }

    /// The address of the metrics endpoint.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.service.metrics_address()
    }

    /// The settings that are not as they were asked for, each with its consequence.
    pub fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// Whether the congestion window of near peers is clamped.
    pub fn clamps_window(&self) -> bool {
        self.window_clamp.is_some()
    }

    /// The number of event loops.
    pub fn workers(&self) -> usize {
        self.loops.handlers.len()
    }

    /// Sets how [`Handle::reload_from_source`] and the control socket's `reload` read the
    /// configuration again. `read` returns the configuration with remarks for the operator, or the
    /// problem. Only the first call counts.
    pub fn set_config_source(
        &self,
        read: impl Fn() -> Result<(Config, Vec<String>), String> + Send + Sync + 'static,
    ) {
        self.reloader.set_source(Box::new(read));
    }

    /// Control over the proxy while it runs.
    pub fn handle(&self) -> Handle {
        let (log, reloader) = (self.log.clone(), Arc::clone(&self.reloader));
        let placement = Arc::clone(&self.shared.placement);
        Handle { control: self.service.control(), log, reloader, placement }
    }

    /// Forwards until [`Handle::drain`], and then until the open connections ended or the drain
    /// timeout is over. If another process takes over, forwards until it has all connections.
    pub fn run(self) -> Result<(), Error> {
        self.run_after(|| {})
    }

    /// Like [`Server::run`]. `on_start` is called once nothing can fail any more: connections are
    /// accepted, and the process that this one takes over from, if any, has agreed.
    pub fn run_after(self, on_start: impl FnOnce()) -> Result<(), Error> {
        if self.config.process.checks_only {
            return Err(Error::ChecksOnly);
        }
        let source = Arc::new(self.source());
        let Self { config, service, loops, shared, .. } = self;
        let Loops { settings, handlers, counters, mailboxes } = loops;
        let mut registry = Registry::default();
        let (reloader, predecessor) = (self.reloader, Arc::clone(&shared.has_predecessor));
        let control = service.control();
        let process = Process::new(
            &config,
            self.started,
            counters,
            reloader,
            Arc::clone(&predecessor),
            Arc::clone(&control),
        );
        let process = Arc::new(process);
        let (table, process_at_end) = (Arc::clone(&shared.table), Arc::clone(&process));
        registry.register_process(&config.process.version, self.started.0);
        let closings = Arc::clone(&shared.closings);
        registry.register(ProxyMetrics { process: Arc::clone(&process), table, closings });
        let mut commands = None;
        let start = || {
            if let (Some(target), Some(path)) = (self.target, &config.reporting.control) {
                let listeners = config.listeners.iter().map(|one| one.address.to_string());
                let mailboxes = Arc::clone(&mailboxes);
                let control = Arc::clone(&control);
                let listeners = listeners.collect();
                let files = socket_files(&config);
                let started = target.start(shared.clone(), mailboxes, control, listeners, &files);
                let path = path.clone();
                started.map_err(|error| Error::TakeOver { path, error })?;
            }
            let controller = Controller::new(&shared, mailboxes, Arc::clone(&source), process);
            let serve = |socket: CommandSocket| {
                socket.serve("haul-control", move |line, client| controller.answer(line, client))
            };
            commands = self.control_socket.map(serve).transpose()?;
            if let Some(commands) = &commands {
                source.set_commands(commands.pause());
            }
            on_start();
            Ok(())
        };
        let result = service.run_after(&[], &settings, registry, handlers, start);
        process_at_end.reloader.stop_checks();
        source.finish();
        match commands {
            // The control socket also belongs to another process.
            Some(commands) if source.has_handed_over() || predecessor.load(Ordering::SeqCst) => {
                commands.leave();
            }
            commands => drop(commands),
        }
        drop(self.window_clamp);
        if let Some(log) = &self.log {
            log.end();
        }
        result
    }

    fn source(&self) -> HandoverSource {
        let address = |index: usize| {
            let listener = self.config.listeners.get(index);
            listener.map_or_else(String::new, |listener| listener.address.to_string())
        };
        let sockets = self.service.sockets().into_iter();
        HandoverSource::new(Parts {
            sockets: sockets.map(|(index, socket)| (address(index), socket)).collect(),
            metrics: self.service.metrics_listener(),
            control_socket: self.control_socket.as_ref().and_then(|one| one.listener().ok()),
            closings: Arc::clone(&self.shared.closings),
            table: Arc::clone(&self.shared.table),
            placement: Arc::clone(&self.shared.placement),
            next_id: Arc::clone(&self.shared.next_id),
            mailboxes: Arc::clone(&self.loops.mailboxes),
            control: self.service.control(),
            commands: OnceLock::new(),
            is_busy: AtomicBool::new(false),
            has_predecessor: Arc::clone(&self.shared.has_predecessor),
        })
    }
}

impl Handle {
    /// Stops accepting. The proxy ends once its connections ended.
    pub fn drain(&self) {
        self.control.drain();
    }

    /// Like [`Handle::drain`], and resets the connections that are open.
    pub fn cut_off(&self) {
        self.control.cut_off();
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.placement.open()
    }

    /// The process that took over ([`crate::ProcessConfig::upgrades`]).
    pub fn successor(&self) -> Option<NonZeroU32> {
        self.control.successor()
    }

    /// Opens the log again by its name, after a rotation; false without a log.
    pub fn reopen_log(&self) -> Result<bool, Error> {
        self.log.as_ref().map_or(Ok(()), |log| log.reopen())?;
        Ok(self.log.is_some())
    }

    /// Puts the groups, routes and rules of access of another configuration in force, whole or not
    /// at all. Returns the settings that are not as they were asked for, each with its consequence.
    ///
    /// Blocks until names are resolved. Connections continue, even to upstreams that left the
    /// configuration. New connections take the new routes. Upstreams that stay in their group keep
    /// their state. The addresses to listen on cannot be changed, and if the process is confined,
    /// the ports of upstreams cannot be changed.
    pub fn reload(&self, config: &Config) -> Result<Vec<String>, Error> {
        self.reloader.reload(config)
    }

    /// Like [`Handle::reload`], with the configuration that is read again
    /// ([`Server::set_config_source`]).
    pub fn reload_from_source(&self) -> Result<Vec<String>, Error> {
        self.reloader.reload_from_source()
    }
}

fn without_tls(listener: &ListenerConfig) -> ListenAddress {
    ListenAddress { address: listener.address.clone(), is_tls: false }
}

/// The path of the log; `None` without a log, and for standard output.
fn log_path(config: &Config) -> Option<&Path> {
    config.reporting.access_log.as_deref().filter(|path| !path.as_os_str().is_empty())
}

/// The paths that the proxy needs after its start.
fn sandbox_paths(config: &Config) -> Vec<(PathBuf, AccessRights)> {
    let log = log_path(config).map(|path| (path.to_owned(), AccessRights::Append));
    let sockets = socket_files(config).into_iter().map(|path| (path, AccessRights::Remove));
    let file = config.process.config_file.clone().map(|path| (path, AccessRights::ReadAgain));
    log.into_iter().chain(sockets).chain(file).collect()
}

/// The files of the Unix sockets at which the proxy listens, also for commands.
fn socket_files(config: &Config) -> Vec<PathBuf> {
    let of_listener = |listener: &ListenerConfig| match &listener.address {
        Address::Unix(path) if abstract_name(path).is_none() => Some(path.clone()),
        _ => None,
    };
    config
        .listeners
        .iter()
        .filter_map(of_listener)
        .chain(config.reporting.control.clone())
        .collect()
}
