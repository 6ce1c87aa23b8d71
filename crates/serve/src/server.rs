//! A file service as a whole: its listening sockets, its loops, and the way to stop it.

use crate::config::{Address, Config};
use crate::confine;
use crate::counters::Counters;
use crate::error::Error;
use crate::event_loop::context::Context;
use crate::event_loop::helper::{Helpers, Inbox};
use crate::event_loop::kernel_tls::Supported;
use crate::event_loop::listen::Listeners;
use crate::event_loop::wake::Wake;
use crate::event_loop::worker::{Orders, Worker};
use crate::files::service::Service;
use crate::log::{self, Log, Writer};
use crate::metrics::{self, Metrics};
use crate::secrets::Secrets;
use haul::{MethodChoice, SendMethod};
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Threads that wait for the disk: as many requests as a disk may work on at a time.
const HELPERS: usize = 8;

/// More loops than the largest machine has CPUs.
const WORKERS_MAX: usize = 4096;
/// The paths that a server can take. The others need a ring or pinned buffers for each connection, and wait for something else than
/// room in the socket.
const PATHS: [SendMethod; 6] = [
    SendMethod::ReadWrite,
    SendMethod::ReadSend,
    SendMethod::MmapSend,
    SendMethod::Sendfile,
    SendMethod::Splice,
    SendMethod::Vmsplice,
];
/// Descriptors for everything but connections and cached files: loops, listening sockets, logs, files being opened.
const DESCRIPTORS_RESERVED: usize = 128;

/// A file service that listens, and serves once it is told to run.
#[derive(Debug)]
pub struct Server {
    listeners: Listeners,
    workers: Vec<Worker>,
    helpers: Helpers,
    metrics: Option<Metrics>,
    caveats: Vec<String>,
    handle: Handle,
}

/// The way to a service that runs on other threads.
#[derive(Debug, Clone)]
pub struct Handle {
    orders: Arc<Orders>,
    config: Arc<Config>,
    log: Option<Arc<Writer>>,
    wakes: Vec<Arc<Wake>>,
    counters: Vec<Arc<Counters>>,
}

impl Server {
    /// Opens the folder and the log, listens, gives up what is not needed from then on, and starts threads. Connections wait
    /// until [`Server::run`].
    pub fn new(config: &Config) -> Result<Self, Error> {
        let workers = config
            .workers
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get));
        if !(1..=WORKERS_MAX).contains(&workers) {
            return Err(Error::Workers { workers, workers_max: WORKERS_MAX });
        }
        if let MethodChoice::Method(path) = config.choice
            && !PATHS.contains(&path)
        {
            return Err(Error::Method(path));
        }
        let config = &within_descriptor_limit(config);
        let service = Arc::new(Service::new(config)?);
        let secrets = Secrets::load(config)?;
        let mut log_file = config.access_log.as_ref().map(log::open).transpose()?;
        let listeners = Listeners::open(config, workers)?;
        // Before connections to anywhere are given up.
        let kernel_tls = match &config.tls {
            Some(tls) if tls.in_kernel => Supported::probe(),
            _ => Ok(Supported::default()),
        };
        let metrics_listener = config.metrics.map(metrics::listen).transpose()?;
        if let Some(user) = &config.user {
            confine::become_user(user)?;
        }
        // Whoever this is now must be able to read what is served.
        service.root.check().map_err(|source| Error::Root { path: config.root.clone(), source })?;
        let mut caveats: Vec<_> =
            confine::unreadable(config).into_iter().chain(service.root.caveat()).collect();
        if let Err(error) = &kernel_tls {
            caveats.push(format!(
                "the kernel does not encrypt, so files pass through the program: {error} (modprobe tls, where it has that module)"
            ));
        }
        if config.basic_auth.is_some()
            && let Some(address) = config.listen.iter().find(|address| address.is_public())
        {
            caveats.push(format!(
                "passwords travel to {address} for everybody on the way to read: use TLS"
            ));
        }
        if config.confine {
            caveats.extend(confine::give_up_files(config)?);
        }
        // From here on there are threads.
        let log = config.access_log.as_ref().zip(log_file.take());
        let log = log.map(|(log, file)| Writer::start(log, file)).transpose()?;
        let failed = |step| move |source: io::Error| Error::Failed { step, source };
        let helpers = Helpers::start(&service, HELPERS, secrets.passwords.is_some())
            .map_err(failed("starting a thread"))?;
        let log = log.map(Arc::new);
        let mut handle = Handle {
            orders: Arc::new(Orders {
                drain: AtomicBool::new(false),
                secrets: Mutex::new(secrets.clone()),
            }),
            config: Arc::new(config.clone()),
            log: log.clone(),
            wakes: Vec::new(),
            counters: Vec::new(),
        };
        let kernel_tls = kernel_tls.unwrap_or_default();
        let mut loops = Vec::new();
        for listeners in &listeners.by_worker {
            let wake = Arc::new(Wake::new().map_err(failed("making an event loop"))?);
            let inbox = Inbox::new(Arc::clone(&wake));
            let lines = log.as_deref().map_or_else(Log::off, Writer::log);
            let context = Context::new(
                config,
                workers,
                Arc::clone(&service),
                secrets.clone(),
                kernel_tls,
                lines,
            );
            handle.wakes.push(Arc::clone(&wake));
            handle.counters.push(Arc::clone(&context.counters));
            let asker = helpers.asker(&inbox);
            let orders = Arc::clone(&handle.orders);
            let connections_max = config.limits.connections_max.div_ceil(workers);
            let worker = Worker::new(
                listeners.clone(),
                wake,
                inbox,
                asker,
                orders,
                context,
                connections_max,
            );
            loops.push(worker.map_err(failed("making an event loop"))?);
        }
        let counters = handle.counters.clone();
        let unwritten = log.as_ref().map(|log| Arc::clone(log.unwritten()));
        let metrics = metrics_listener
            .map(|listener| Metrics::start(listener, counters, unwritten))
            .transpose()?;
        let mut listeners = listeners;
        // The loops have them, and let go of them when they drain.
        listeners.by_worker.clear();
        Ok(Self { listeners, workers: loops, helpers, metrics, caveats, handle })
    }

    /// Where it listens, and whether for TLS; a port that was 0 has become one.
    pub fn addresses(&self) -> &[(Address, bool)] {
        &self.listeners.addresses
    }

    /// Where it answers `/metrics`.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Metrics::address)
    }

    /// What was asked for and could not be had, and what that means.
    pub fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// How many event loops it has.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// The way to it while it runs.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until [`Handle::drain`], and then until what is under way has ended or its time is over.
    pub fn run(self) -> Result<(), Error> {
        let Self { workers, listeners, helpers, metrics, handle, .. } = self;
        let failed = |step| move |source: io::Error| Error::Failed { step, source };
        let mut threads = Vec::new();
        for worker in workers {
            let handle = handle.clone();
            let name = format!("haul-serve-{}", threads.len());
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                // Half a server is none: however this loop ends, the others end too.
                let _others = DrainedAtEnd(handle);
                worker.run()
            });
            threads.push(thread.map_err(failed("starting a thread"))?);
        }
        let mut result = Ok(());
        for thread in threads {
            let ended =
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a loop has panicked")));
            result = result.and(ended.map_err(failed("waiting for events")));
        }
        drop((helpers, metrics, listeners));
        if let Some(log) = &handle.log {
            log.end();
        }
        result
    }
}

/// Has a service end when it is dropped.
struct DrainedAtEnd(Handle);

impl Drop for DrainedAtEnd {
    fn drop(&mut self) {
        self.0.drain();
    }
}

/// Connections and cached files within what this process may open.
fn within_descriptor_limit(config: &Config) -> Config {
    let mut config = config.clone();
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let left = (allowed.unwrap_or(u64::MAX) as usize).saturating_sub(DESCRIPTORS_RESERVED).max(2);
    let limits = &mut config.limits;
    limits.cached_files_max = limits.cached_files_max.min(left / 4);
    limits.connections_max = limits.connections_max.min(left - limits.cached_files_max).max(1);
    config
}

impl Handle {
    /// Has the service accept nobody any more, finish what is under way, and end.
    pub fn drain(&self) {
        self.orders.drain.store(true, Relaxed);
        for wake in &self.wakes {
            wake.wake();
        }
    }

    /// Reads the certificate again, for connections that begin from now on, and the passwords, for requests from now on, and opens
    /// the access log again by its name. What cannot be read stays as it was, and is told; the rest holds.
    pub fn reload(&self) -> Result<(), Vec<Error>> {
        let mut wrong = Vec::new();
        if let Some(log) = &self.log {
            wrong.extend(log.reopen().err());
        }
        // Loops look there: nothing is read while it is locked.
        let secrets = || self.orders.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fresh = secrets().clone();
        wrong.extend(fresh.load_again(&self.config));
        *secrets() = fresh;
        for wake in &self.wakes {
            wake.wake();
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// What each loop has done so far.
    pub fn counters(&self) -> &[Arc<Counters>] {
        &self.counters
    }
}
