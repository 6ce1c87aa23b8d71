//! Resolution of the upstreams' names: at once, and again when the addresses are no longer valid.

mod schedule;

use crate::upstreams::routing::{CurrentTable, RoutingTable};
use haul_server::resolve;
use schedule::{Change, Next, Outcome, Schedule};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The number of threads. A name whose servers do not answer occupies a thread for half a minute,
/// so this number of such names delays the other names.
const THREADS: usize = 4;

/// The threads that resolve names. Only these threads may read the resolver's files. The threads
/// end when this value is dropped.
#[derive(Debug)]
pub struct Resolver(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Arc<CurrentTable>,
    state: Mutex<State>,
    /// There is a request, another table is in force, or the threads are to end.
    is_changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Names that are resolved before all names that are due.
    requests: VecDeque<Request>,
    schedule: Schedule,
    has_ended: bool,
}

/// Resolve a name once.
#[derive(Debug)]
struct Request {
    host: String,
    answer: Sender<(String, io::Result<Vec<SocketAddr>>)>,
}

/// What a thread does next.
enum Work {
    Answer(Request),
    Renew(String),
    End,
}

impl Resolver {
    /// Starts the threads. They resolve each name of the table in force again when its TTL expires,
    /// and after `interval` at the latest.
    pub fn start(table: &Arc<CurrentTable>, interval: Duration) -> io::Result<Self> {
        let (requests, schedule) = (VecDeque::new(), Schedule::new(interval));
        let resolver = Self(Arc::new(Shared {
            table: Arc::clone(table),
            state: Mutex::new(State { requests, schedule, has_ended: false }),
            is_changed: Condvar::new(),
        }));
        for _ in 0..THREADS {
            let shared = Arc::clone(&resolver.0);
            thread::Builder::new().name("haul-resolve".into()).spawn(move || shared.run())?;
        }
        Ok(resolver)
    }

    /// Resolves the names of a table, which may not be in force yet, and waits for the results.
    /// Returns the names that could not be resolved, with the reason. These names keep their
    /// addresses.
    pub fn resolve(&self, table: &RoutingTable) -> Vec<String> {
        let (tx, rx) = mpsc::channel();
        let request = |host: &str| Request { host: host.into(), answer: tx.clone() };
        self.0.lock().requests.extend(hosts(table).into_iter().map(request));
        self.0.is_changed.notify_all();
        // The answers end with the last request.
        drop(tx);
        let answers: HashMap<_, _> = rx.into_iter().collect();
        let mut problems = Vec::new();
        for upstream in table.upstreams() {
            match upstream.host().and_then(|host| answers.get(host)) {
                None => {}
                Some(Ok(addresses)) => upstream.set_addresses(addresses),
                Some(Err(error)) => problems.push(format!("{}: {error}", upstream.name())),
            }
        }
        problems
    }

    /// Another table is in force.
    pub fn table_changed(&self) {
        let _state = self.0.lock();
        self.0.is_changed.notify_all();
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.is_changed.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        loop {
            match self.next_work() {
                Work::Answer(Request { host, answer }) => {
                    let addresses = resolve::addresses(&host, 0);
                    // The caller may have given up.
                    let _ = answer.send((host, addresses));
                }
                Work::Renew(host) => self.renew(&host),
                Work::End => return,
            }
        }
    }

    /// Waits for something to do.
    fn next_work(&self) -> Work {
        let mut state = self.lock();
        loop {
            if state.has_ended {
                return Work::End;
            }
            if let Some(request) = state.requests.pop_front() {
                return Work::Answer(request);
            }
            let now = Instant::now();
            state.schedule.set_names(&hosts(&self.table.get()), now);
            state = match state.schedule.next(now) {
                Next::Resolve(host) => return Work::Renew(host),
                Next::At(due) => {
                    let waited = self.is_changed.wait_timeout(state, due - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Next::Nothing => {
                    self.is_changed.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// Resolves a name of the table in force again.
    fn renew(&self, host: &str) {
        let time_to_live = resolve::time_to_live(host);
        let asked = Instant::now();
        let addresses = resolve::addresses(host, 0);
        let outcome = match &addresses {
            Ok(addresses) => {
                let table = self.table.get();
                for upstream in table.upstreams().filter(|one| one.host() == Some(host)) {
                    upstream.set_addresses(addresses);
                }
                Outcome::Resolved(time_to_live.map(|time| time.saturating_sub(asked.elapsed())))
            }
            Err(_) => Outcome::Failed,
        };
        let change = self.lock().schedule.record(host, outcome, Instant::now());
        // Another thread may wait for a longer time, or without a limit.
        self.is_changed.notify_one();
        match (change, addresses) {
            (Change::Failed, Err(error)) => {
                warn!("a name could not be resolved: {host}: {error}");
            }
            (Change::Recovered, Ok(_)) => info!("a name is resolved again: {host}"),
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host names of the upstreams.
fn hosts(table: &RoutingTable) -> HashSet<&str> {
    table.upstreams().filter_map(|upstream| upstream.host()).collect()
}

/// A sentence about each name that could not be resolved.
pub fn unresolved_caveats(problems: Vec<String>) -> Vec<String> {
    let caveat =
        |problem| format!("an upstream gets no connection until its name is resolved: {problem}");
    problems.into_iter().map(caveat).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, GroupConfig};
    use crate::upstreams::upstream::Upstream;
    use haul_server::connect::PeerAddress;

    #[test]
    fn names_are_resolved_and_keep_their_addresses_when_they_cannot_be() {
        let upstreams = ["localhost:80", "localhost:81", "no-such-host.invalid:80", "[::1]:1"];
        let upstreams: Vec<_> = upstreams.iter().map(|text| text.parse().unwrap()).collect();
        let config = Config::new([GroupConfig::new("a", upstreams)]);
        let table = RoutingTable::new(&config, None).unwrap();
        let in_force = Arc::new(CurrentTable::new(RoutingTable::new(&config, None).unwrap()));
        let resolver = Resolver::start(&in_force, Duration::from_secs(9)).unwrap();
        for _ in 0..2 {
            let problems = resolver.resolve(&table);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].starts_with("no-such-host.invalid:80: "), "{problems:?}");
            assert_eq!(table.upstreams().filter_map(port).collect::<Vec<_>>(), [80, 81, 1]);
        }
        // The names of the table in force are resolved without a request.
        while in_force.get().upstreams().filter_map(port).count() < 3 {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The port of an upstream's addresses.
    fn port(upstream: &Arc<Upstream>) -> Option<u16> {
        match upstream.addresses().first()? {
            PeerAddress::Tcp(address) => Some(address.port()),
            PeerAddress::Unix(_) => None,
        }
    }
}
