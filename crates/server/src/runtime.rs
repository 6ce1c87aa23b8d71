//! Runs the event loops of a service on threads, and drains them.

use crate::address::Address;
use crate::control::Control;
use crate::error::Error;
use crate::event_loop::{EventLoop, Handover, LoopSettings};
use crate::listener::{ListenAddress, ListenSettings, Listeners};
use crate::metrics::{self, MetricsServer, Registry};
use crate::offload::{Offload, PoolSettings};
use rustix::process::{Resource, getrlimit};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// More event loops than the largest host has CPUs.
const LOOPS_MAX: usize = 4096;
/// Descriptors for loops, listeners, logs and opening files, apart from connections and caches.
const DESCRIPTORS_RESERVED: usize = 128;

/// A service whose sockets are open and whose event loops do not run yet.
///
/// Between [`Service::open`] and [`Service::run`] the service can drop privileges and enter its
/// sandbox, because threads do not run yet and everything is open.
#[derive(Debug)]
pub struct Service {
    name: &'static str,
    listeners: Listeners,
    used_addresses: Vec<Address>,
    metrics: Option<TcpListener>,
    control: Arc<Control>,
    loops: usize,
}

impl Service {
    /// Opens the sockets of a service with so many event loops ([`loop_count`]).
    pub fn open(
        name: &'static str,
        listen: &ListenSettings,
        metrics: Option<SocketAddr>,
        loops: usize,
    ) -> Result<Self, Error> {
        listen.check_distinct(metrics.map(Address::Tcp))?;
        let listeners = Listeners::open(listen, loops)?;
        let inherited = listen.inherited_metrics.as_ref().map(|listener| listener.try_clone());
        let inherited = inherited.transpose().map_err(Error::at("taking over a socket"))?;
        let mut used_addresses = listeners.used_addresses().to_vec();
        let metrics = match (metrics, inherited) {
            (None, _) => None,
            (Some(address), Some(listener)) if listener.local_addr().ok() == Some(address) => {
                Some(listener)
            }
            (Some(address), _) => match metrics::listen(address) {
                Err(error) if listen.leaves_out_used && error.is_address_in_use() => {
                    used_addresses.push(Address::Tcp(address));
                    None
                }
                opened => Some(opened?),
            },
        };
        Ok(Self { name, listeners, used_addresses, metrics, control: Control::new(loops)?, loops })
    }

    /// The addresses that are left out, because another process listens there.
    pub fn used_addresses(&self) -> &[Address] {
        &self.used_addresses
    }

    /// The addresses that the service listens on. A configured port 0 is replaced by the port that
    /// the kernel chose.
    pub fn addresses(&self) -> &[ListenAddress] {
        self.listeners.addresses()
    }

    /// The address of the metrics endpoint, with the port that the kernel chose.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref()?.local_addr().ok()
    }

    /// The listening sockets with the places of their addresses in the settings, as long as event
    /// loops have them.
    pub fn sockets(&self) -> Vec<(usize, Weak<OwnedFd>)> {
        self.listeners.sockets()
    }

    /// A second descriptor of the listening socket of the metrics.
    pub fn metrics_listener(&self) -> Option<TcpListener> {
        self.metrics.as_ref()?.try_clone().ok()
    }

    /// The TCP ports of the listening sockets that this process made.
    pub fn own_ports(&self) -> &[u16] {
        self.listeners.own_ports()
    }

    /// Control over the service while it runs.
    pub fn control(&self) -> Arc<Control> {
        Arc::clone(&self.control)
    }

    /// Runs the service until it is drained. `pools` are the pools of the handlers' jobs. Each
    /// event loop has a handler.
    pub fn run<H>(
        self,
        pools: &[PoolSettings],
        settings: &LoopSettings,
        registry: Registry,
        handlers: impl IntoIterator<Item = H>,
    ) -> Result<(), Error>
    where
        H: Handover + Send + 'static,
        H::Connection: Send,
    {
        self.run_after(pools, settings, registry, handlers, || Ok(()))
    }

    /// Like [`Service::run`]. `start` is called when everything is made, before connections are
    /// accepted; an error of it ends the service.
    pub fn run_after<H, E: From<Error>>(
        mut self,
        pools: &[PoolSettings],
        settings: &LoopSettings,
        registry: Registry,
        handlers: impl IntoIterator<Item = H>,
        start: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E>
    where
        H: Handover + Send + 'static,
        H::Connection: Send,
    {
        let offload = Offload::start(pools).map_err(Error::at("starting a thread"))?;
        let mut loops = Vec::with_capacity(self.loops);
        let listeners = self.listeners.take().into_iter().enumerate();
        for ((index, listeners), handler) in listeners.zip(handlers) {
            let control = &self.control;
            let settings = settings.clone();
            loops.push(EventLoop::new(index, listeners, &offload, control, settings, handler)?);
        }
        let metrics = self.metrics.map(|listener| MetricsServer::start(listener, registry));
        let _metrics = metrics.transpose()?;
        start()?;
        self.listeners.own_files();
        let result = run(self.name, loops, &self.control);
        self.listeners.leave_files(|path| self.control.keeps(&Address::Unix(path.to_owned())));
        Ok(result?)
    }
}

/// The number of event loops: `wanted`, or one for each CPU that this process may use.
pub fn loop_count(wanted: Option<usize>) -> Result<usize, Error> {
    let cpus = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let loops = wanted.unwrap_or_else(cpus);
    if (1..=LOOPS_MAX).contains(&loops) {
        Ok(loops)
    } else {
        Err(Error::Loops { loops, loops_max: LOOPS_MAX })
    }
}

/// Descriptors that connections and caches may use (`RLIMIT_NOFILE` less a reserve), at least two.
pub fn descriptors_available() -> usize {
    let allowed = getrlimit(Resource::Nofile).current;
    (allowed.unwrap_or(u64::MAX) as usize).saturating_sub(DESCRIPTORS_RESERVED).max(2)
}

/// Runs event loops until they are drained, each on a thread `NAME-0`, `NAME-1`, ….
///
/// If a loop ends for any reason, the other loops drain, because half a service is useless.
pub fn run<H>(name: &str, loops: Vec<EventLoop<H>>, control: &Arc<Control>) -> Result<(), Error>
where
    H: Handover + Send + 'static,
    H::Connection: Send,
{
    let mut threads = Vec::new();
    for event_loop in loops {
        let control = Arc::clone(control);
        let thread = std::thread::Builder::new().name(format!("{name}-{}", threads.len()));
        let thread = thread.spawn(move || {
            let _drained = DrainOnDrop(control);
            event_loop.run()
        });
        threads.push(thread.map_err(Error::at("starting a thread"))?);
    }
    let mut result = Ok(());
    for thread in threads {
        let ended = thread.join().unwrap_or_else(|_| Err(io::Error::other("a loop has panicked")));
        result = result.and(ended.map_err(Error::at("waiting for events")));
    }
    result
}

/// Drains the service when it is dropped.
struct DrainOnDrop(Arc<Control>);

impl Drop for DrainOnDrop {
    fn drop(&mut self) {
        self.0.drain();
    }
}
