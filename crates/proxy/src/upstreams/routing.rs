//! Routing: which clients may connect, and to which group of upstreams.

use crate::config::{AccessRules, Config, Route, RouteCondition, ServerNamePattern};
use crate::error::Error;
use crate::greeting::Greeting;
use crate::header::HeaderVersion;
use crate::upstreams::group::UpstreamGroup;
use crate::upstreams::retired::RetiredUpstreams;
use crate::upstreams::upstream::Upstream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The groups of upstreams, the routes to them, and the rules of access.
#[derive(Debug)]
pub struct RoutingTable {
    access: AccessRules,
    groups: Vec<Arc<UpstreamGroup>>,
    listeners: Vec<ListenerRoutes>,
    retired: Arc<RetiredUpstreams>,
}

/// The routing table in force, which a reload replaces.
#[derive(Debug)]
pub struct CurrentTable {
    in_force: Mutex<InForce>,
    /// Notified when a handover succeeds or fails.
    is_decided: Condvar,
    generation: AtomicU64,
}

#[derive(Debug)]
struct InForce {
    table: Arc<RoutingTable>,
    /// Whether the table in force may not be replaced.
    is_frozen: bool,
    /// Whether the table may not be replaced because another process took over.
    is_given: bool,
}

impl CurrentTable {
    /// Puts a table in force.
    pub fn new(table: RoutingTable) -> Self {
        table.open_queues();
        let in_force = InForce { table: Arc::new(table), is_frozen: false, is_given: false };
        let (is_decided, generation) = (Condvar::new(), AtomicU64::new(0));
        Self { in_force: Mutex::new(in_force), is_decided, generation }
    }

    /// The table in force.
    pub fn get(&self) -> Arc<RoutingTable> {
        Arc::clone(&self.lock().table)
    }

    /// Keeps the table in force, because another process is about to receive the connections.
    pub fn freeze(&self) {
        self.lock().is_frozen = true;
    }

    /// Records that another process took over. The table stays frozen as long as that process runs.
    pub fn give(&self) {
        self.lock().is_given = true;
        self.is_decided.notify_all();
    }

    /// Allows the table to be replaced again.
    pub fn release(&self) {
        let mut in_force = self.lock();
        (in_force.is_frozen, in_force.is_given) = (false, false);
        self.is_decided.notify_all();
    }

    /// Waits until the table may be replaced or another process has taken over, at most for a time.
    pub fn wait_until_decided(&self, time_max: Duration) {
        let is_open = |in_force: &mut InForce| in_force.is_frozen && !in_force.is_given;
        // The replacement finds out how it stands.
        drop(self.is_decided.wait_timeout_while(self.lock(), time_max, is_open));
    }

    /// Replaces the table, unless the table is frozen. Connections with a route keep the route.
    ///
    /// False if connections of another process arrived, after the new table was created, for an
    /// upstream of the new table. Then the caller has to create the table again.
    pub fn replace(&self, table: &Arc<RoutingTable>) -> Result<bool, Error> {
        let mut in_force = self.lock();
        if in_force.is_frozen {
            return Err(Error::HandedOver);
        }
        if table.lacks_retired(&in_force.table) {
            return Ok(false);
        }
        for group in in_force.table.groups() {
            for upstream in group.upstreams().iter().filter(|upstream| !table.has(upstream)) {
                table.retired.add(upstream);
            }
        }
        in_force.table = Arc::clone(table);
        drop(in_force);
        self.generation.fetch_add(1, Ordering::Release);
        table.open_queues();
        Ok(true)
    }

    /// The upstream with a name, for connections of another process. If the group neither has nor
    /// had the upstream, `create` creates it, and the upstream is retired.
    pub fn find_or_retire(
        &self,
        group: &str,
        name: &str,
        create: impl FnOnce() -> Option<Arc<Upstream>>,
    ) -> Option<Arc<Upstream>> {
        // The lock is held, so that the table in force does not change here.
        let in_force = self.lock();
        let of_group = in_force.table.groups().iter().find(|one| one.name() == group);
        let mut upstreams = of_group.into_iter().flat_map(|group| group.upstreams());
        let known = upstreams.find(|upstream| upstream.name() == name).cloned();
        known.or_else(|| in_force.table.retired.find_or_add(group, name, create))
    }

    fn lock(&self) -> MutexGuard<'_, InForce> {
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of replacements. A reader that knows the number does not need the lock.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}

/// The routes of one listener, in the order in which they are tried.
#[derive(Debug)]
struct ListenerRoutes {
    routes: Vec<(RouteCondition, Arc<UpstreamGroup>)>,
    default: Option<Arc<UpstreamGroup>>,
}

impl RoutingTable {
    /// Creates the table of a configuration. Upstreams that `previous` has in a group of the same
    /// name keep their state.
    pub fn new(config: &Config, previous: Option<&Self>) -> Result<Self, Error> {
        if config.groups.is_empty() {
            return Err(Error::NoUpstream);
        }
        let retired = previous.map(|previous| Arc::clone(&previous.retired)).unwrap_or_default();
        let mut groups: Vec<Arc<UpstreamGroup>> = Vec::new();
        for group in &config.groups {
            if group.upstreams.is_empty() {
                return Err(Error::EmptyGroup(group.name.clone()));
            }
            if groups.iter().any(|other| other.name() == group.name) {
                return Err(Error::DuplicateGroup(group.name.clone()));
            }
            for (index, upstream) in group.upstreams.iter().enumerate() {
                if group.upstreams[..index].iter().any(|one| one.address == upstream.address) {
                    let (group, upstream) = (group.name.clone(), upstream.address.to_string());
                    return Err(Error::DuplicateUpstream { group, upstream });
                }
            }
            let groups_before = previous.map_or(&[][..], Self::groups);
            let before = groups_before.iter().find(|before| before.name() == group.name);
            let retired = retired.of_group(&group.name);
            groups.push(Arc::new(UpstreamGroup::new(group, before.map(Arc::as_ref), &retired)));
        }
        let find = |name: &String| {
            let found = groups.iter().find(|group| group.name() == name);
            found.cloned().ok_or_else(|| Error::UnknownGroup(name.clone()))
        };
        let mut listeners = Vec::new();
        for listener in &config.listeners {
            if listener.group.is_none() && listener.routes.is_empty() {
                return Err(Error::NoRoute(listener.address.clone()));
            }
            let route = |route: &Route| Ok((route.condition.clone(), find(&route.group)?));
            listeners.push(ListenerRoutes {
                routes: listener.routes.iter().map(route).collect::<Result<_, Error>>()?,
                default: listener.group.as_ref().map(find).transpose()?,
            });
        }
        Ok(Self { access: config.access.clone(), groups, listeners, retired })
    }

    /// Lets the clients that wait have the slots of these groups.
    fn open_queues(&self) {
        for group in &self.groups {
            group.queue().set_group(group);
        }
    }

    /// Whether an upstream that is new in this table was retired after the table was created.
    fn lacks_retired(&self, in_force: &Self) -> bool {
        self.groups.iter().any(|group| {
            let retired = self.retired.of_group(group.name());
            let is_missed = |upstream: &&Arc<Upstream>| {
                retired
                    .iter()
                    .any(|one| one.address() == upstream.address() && !Arc::ptr_eq(one, upstream))
            };
            let mut new = group.upstreams().iter().filter(|upstream| !in_force.has(upstream));
            new.any(|upstream| is_missed(&upstream))
        })
    }

    /// All upstreams that may have connections, each once.
    pub fn open_upstreams(&self) -> Vec<Arc<Upstream>> {
        self.upstreams().cloned().chain(self.removed_upstreams()).collect()
    }

    /// The upstreams that left the configuration and still have connections.
    pub fn removed_upstreams(&self) -> Vec<Arc<Upstream>> {
        let mut removed = self.retired.all();
        removed.retain(|upstream| !self.has(upstream) && upstream.counters().open() > 0);
        removed
    }

    /// The rules of access.
    pub fn access(&self) -> &AccessRules {
        &self.access
    }

    /// All groups.
    pub fn groups(&self) -> &[Arc<UpstreamGroup>] {
        &self.groups
    }

    /// The upstreams of all groups.
    pub fn upstreams(&self) -> impl Iterator<Item = &Arc<Upstream>> {
        self.groups.iter().flat_map(|group| group.upstreams())
    }

    /// The configured weights that are not in force ([`UpstreamGroup::weight_caveats`]).
    pub fn weight_caveats(&self) -> impl Iterator<Item = String> {
        self.groups.iter().flat_map(|group| group.weight_caveats())
    }

    /// Whether this very upstream is in one of the groups.
    pub fn has(&self, upstream: &Arc<Upstream>) -> bool {
        self.upstreams().any(|other| Arc::ptr_eq(other, upstream))
    }

    /// Whether upstreams receive a header of this version to which a listener's clients may be
    /// connected.
    pub fn sends_header(&self, listener: usize, version: HeaderVersion) -> bool {
        let Some(listener) = self.listeners.get(listener) else { return false };
        let routed = listener.routes.iter().map(|(_, group)| group);
        let mut groups = listener.default.iter().chain(routed);
        groups.any(|group| group.send_header() == Some(version))
    }

    /// Whether the route of a connection depends on its greeting.
    pub fn needs_greeting(&self, listener: usize) -> bool {
        self.listeners.get(listener).is_some_and(|listener| !listener.routes.is_empty())
    }

    /// The group of a connection; `None` if no route fits.
    pub fn group(&self, listener: usize, greeting: &Greeting) -> Option<&Arc<UpstreamGroup>> {
        let listener = self.listeners.get(listener)?;
        let route = listener.routes.iter().find(|(condition, _)| condition.admits(greeting));
        route.map(|(_, group)| group).or(listener.default.as_ref())
    }
}

impl RouteCondition {
    /// Whether a connection with this greeting takes the route.
    fn admits(&self, greeting: &Greeting) -> bool {
        let Greeting::Tls { server_name, protocols } = greeting else {
            return self.is_tls == Some(false);
        };
        let has_name = |pattern: &ServerNamePattern| {
            server_name.as_ref().is_some_and(|name| pattern.admits(name))
        };
        let has_protocol = |wanted: &String| protocols.iter().any(|one| one == wanted.as_bytes());
        self.is_tls != Some(false)
            && self.has_server_name.is_none_or(|wanted| wanted == server_name.is_some())
            && (self.server_names.is_empty() || self.server_names.iter().any(has_name))
            && (self.protocols.is_empty() || self.protocols.iter().any(has_protocol))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CheckConfig, GroupConfig, ListenerConfig};

    fn tls(server_name: Option<&str>, protocols: &[&str]) -> Greeting {
        Greeting::Tls {
            server_name: server_name.map(Into::into),
            protocols: protocols.iter().map(|one| one.as_bytes().to_vec()).collect(),
        }
    }

    fn route(group: &str, condition: impl FnOnce(&mut RouteCondition)) -> Route {
        let mut route = Route::new(RouteCondition::default(), group);
        condition(&mut route.condition);
        route
    }

    fn config(routes: Vec<Route>, default: Option<&str>) -> Config {
        let groups = ["acme", "db", "names", "none", "plain", "rest"];
        let group = |name: &str| GroupConfig::new(name, ["10.0.0.1:1".parse().unwrap()]);
        let mut config = Config::new(groups.map(group));
        let mut listener = ListenerConfig::new("127.0.0.1:0".parse().unwrap(), default);
        listener.routes = routes;
        config.listeners = vec![listener];
        config
    }

    #[test]
    fn the_first_route_that_fits_is_taken() {
        let names = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let routes = vec![
            route("acme", |condition| condition.protocols = vec!["acme-tls/1".into()]),
            route("db", |condition| condition.server_names = names(&["DB.example.com"])),
            route("names", |condition| condition.server_names = names(&["*.example.com", "x"])),
            route("none", |condition| condition.has_server_name = Some(false)),
            route("plain", |condition| condition.is_tls = Some(false)),
        ];
        for (greeting, with_rest, without) in [
            (tls(Some("db.example.com"), &["h2", "acme-tls/1"]), "acme", Some("acme")),
            (tls(Some("db.example.com"), &["h2"]), "db", Some("db")),
            (tls(Some("a.b.example.com"), &[]), "names", Some("names")),
            (tls(Some("x"), &[]), "names", Some("names")),
            (tls(Some("example.com"), &[]), "rest", None),
            (tls(Some("badexample.com"), &[]), "rest", None),
            (tls(None, &["h2"]), "none", Some("none")),
            (Greeting::Other, "plain", Some("plain")),
        ] {
            for (default, expected) in [(Some("rest"), Some(with_rest)), (None, without)] {
                let table = RoutingTable::new(&config(routes.clone(), default), None).unwrap();
                assert!(table.needs_greeting(0));
                let group = table.group(0, &greeting).map(|group| group.name());
                assert_eq!(group, expected, "{greeting:?}");
            }
        }
    }

    #[test]
    fn a_table_that_cannot_work_is_refused() {
        let is_refused = |config: &Config, expected: &str| {
            let error = RoutingTable::new(config, None).unwrap_err();
            assert!(error.is_bad_input() && error.to_string().contains(expected), "{error}");
        };
        is_refused(&config(vec![], Some("nowhere")), "nowhere");
        is_refused(&config(vec![route("nowhere", |_| {})], None), "nowhere");
        is_refused(&config(vec![], None), "127.0.0.1:0");
        let mut twice = config(vec![], Some("db"));
        twice.groups.push(twice.groups[1].clone());
        is_refused(&twice, "db");
        let mut repeated = config(vec![], Some("db"));
        repeated.groups[1].upstreams.push("10.0.0.1:1 weight=2".parse().unwrap());
        is_refused(&repeated, "10.0.0.1:1");
        twice.groups.clear();
        is_refused(&twice, "no upstream");
        twice.groups = vec![GroupConfig::new("empty", [])];
        is_refused(&twice, "empty");
    }

    #[test]
    fn an_upstream_keeps_its_state_when_the_table_is_replaced() {
        let mut config = config(vec![], Some("db"));
        let before = RoutingTable::new(&config, None).unwrap();
        while !before.groups()[1].upstreams()[0].is_down() {
            let check = CheckConfig::new(Duration::from_secs(1));
            before.groups()[1].upstreams()[0]
                .record_check(Err(std::io::Error::other("refused")), check);
        }
        config.groups.remove(0);
        config.groups[0].upstreams.insert(0, "10.0.0.2:1".parse().unwrap());
        let current = CurrentTable::new(before);
        let generation = current.generation();
        let after = RoutingTable::new(&config, Some(&current.get())).unwrap();
        assert!(current.replace(&Arc::new(after)).unwrap());
        assert_ne!(current.generation(), generation);
        let table = current.get();
        let group = table.group(0, &Greeting::Other).unwrap();
        let is_down: Vec<_> = group.upstreams().iter().map(|upstream| upstream.is_down()).collect();
        assert_eq!(is_down, [false, true]);
        // An upstream that is removed and comes back keeps its connections.
        let removed = Arc::clone(&group.upstreams()[1]);
        config.groups[0].upstreams.truncate(1);
        let without = Arc::new(RoutingTable::new(&config, Some(&table)).unwrap());
        current.freeze();
        assert!(matches!(current.replace(&without), Err(Error::HandedOver)));
        current.release();
        assert!(current.replace(&without).unwrap());
        assert!(!without.has(&removed));
        let is_open = || {
            let open = without.open_upstreams();
            open.iter().any(|upstream| Arc::ptr_eq(upstream, &removed))
        };
        assert!(!is_open());
        assert!(removed.counters().try_add_open(None) && is_open());
        config.groups[0].upstreams.push("10.0.0.1:1".parse().unwrap());
        let with = RoutingTable::new(&config, Some(&without)).unwrap();
        assert!(with.has(&removed));
        assert!(!table.groups()[1].upstreams()[0].is_down(), "another group's has its own state");
    }

    #[test]
    fn a_table_is_created_again_if_connections_come_to_an_upstream_that_is_new_in_it() {
        let mut config = config(vec![], Some("db"));
        let current = CurrentTable::new(RoutingTable::new(&config, None).unwrap());
        let create = |name: &str| Some(Arc::new(Upstream::new("db", name.parse().unwrap())));
        let find = |name: &str| current.find_or_retire("db", name, || create(name)).unwrap();
        assert!(Arc::ptr_eq(&find("10.0.0.1:1"), &current.get().groups()[1].upstreams()[0]));
        config.groups[1].upstreams.push("10.0.0.2:1".parse().unwrap());
        let early = Arc::new(RoutingTable::new(&config, Some(&current.get())).unwrap());
        let handed = find("10.0.0.2:1");
        assert!(!current.replace(&early).unwrap() && !current.get().has(&handed));
        let later = Arc::new(RoutingTable::new(&config, Some(&current.get())).unwrap());
        assert!(current.replace(&later).unwrap() && current.get().has(&handed));
        assert!(Arc::ptr_eq(&find("10.0.0.2:1"), &handed));
    }
}
