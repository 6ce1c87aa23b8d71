//! Active checks: a thread connects to each upstream again and again.

mod probe;

use crate::config::{CheckConfig, DownPolicy};
use crate::header::header_without_client;
use crate::upstreams::closing::{ClosingReason, Closings};
use crate::upstreams::group::UpstreamGroup;
use crate::upstreams::routing::{CurrentTable, RoutingTable};
use crate::upstreams::upstream::CheckOutcome;
use probe::{Ending, Probe};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// The interval in which connections of checks are read that the upstreams did not end.
const ENDING_INTERVAL: Duration = Duration::from_millis(250);

/// The actions after a change of an upstream's state.
#[derive(Debug, Clone)]
pub struct OnChange {
    pub closings: Arc<Closings>,
    pub down_policy: DownPolicy,
}

/// The thread that checks. It ends when this value is dropped. While an upstream does not answer,
/// for up to two seconds, other checks wait.
#[derive(Debug)]
pub struct Checks {
    changes: Sender<Change>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Another table is in force.
    Table,
    /// Nothing is checked any more.
    Stop,
}

impl Checks {
    /// Checks the upstreams of the table in force, each group in its interval.
    pub fn start(table: Arc<CurrentTable>, on_change: OnChange) -> io::Result<Self> {
        let (changes, changed) = mpsc::channel();
        std::thread::Builder::new().name("haul-check".into()).spawn(move || {
            let (mut schedule, mut endings) = (Schedule::default(), Vec::new());
            loop {
                let current = table.get();
                let now = Instant::now();
                let next_at = schedule.follow(&current, now);
                let ended_at = (!endings.is_empty()).then(|| now + ENDING_INTERVAL);
                let result = match next_at.into_iter().chain(ended_at).min() {
                    Some(wake_at) => changed.recv_timeout(wake_at.saturating_duration_since(now)),
                    None => changed.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                match result {
                    Ok(Change::Table) => forget(&table.get(), &on_change),
                    Ok(Change::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        probe::close_ended(&mut endings);
                        let due = schedule.take_due(&current, Instant::now());
                        check(&due, &mut endings, || table.get(), &on_change);
                    }
                }
            }
        })?;
        Ok(Self { changes })
    }

    /// Another table is in force.
    pub fn table_changed(&self) {
        // The thread may have been stopped.
        let _ = self.changes.send(Change::Table);
    }

    /// Checks nothing any more.
    pub fn stop(&self) {
        let _ = self.changes.send(Change::Stop);
    }
}

/// When the groups are checked next, by their names.
#[derive(Debug, Default)]
struct Schedule(HashMap<String, Instant>);

impl Schedule {
    /// Takes the groups from a table. Returns the time of the next check.
    fn follow(&mut self, table: &RoutingTable, now: Instant) -> Option<Instant> {
        let mut next = HashMap::new();
        for group in table.groups() {
            let Some(config) = group.check() else { continue };
            // A reload may have shortened the interval.
            let at_most = now + config.interval;
            let at = self.0.get(group.name()).map_or(at_most, |at| at_most.min(*at));
            next.insert(group.name().to_owned(), at);
        }
        self.0 = next;
        self.0.values().min().copied()
    }

    /// The groups that are due, which are due again after their interval.
    fn take_due<'t>(
        &mut self,
        table: &'t RoutingTable,
        now: Instant,
    ) -> Vec<(&'t UpstreamGroup, CheckConfig)> {
        let mut due = Vec::new();
        for group in table.groups() {
            let Some(config) = group.check() else { continue };
            if let Some(at) = self.0.get_mut(group.name()).filter(|at| **at <= now) {
                *at = now + config.interval;
                due.push((group.as_ref(), config));
            }
        }
        due
    }
}

/// Forgets the results of groups that are not checked any more, because nothing would change them.
fn forget(table: &RoutingTable, on_change: &OnChange) {
    let unchecked = table.groups().iter().filter(|group| group.check().is_none());
    for upstream in unchecked.flat_map(|group| group.upstreams()) {
        upstream.forget_checks();
        on_change.closings.cancel(upstream, ClosingReason::Down);
    }
}

/// Connects to all upstreams of these groups at the same time. An upstream that expects a header
/// gets a header without a client, because it would count a missing header as an error. `in_force`
/// is the table in force. If a reload removed an upstream or its check in the meantime, the result
/// does not change the upstream's connections.
fn check(
    groups: &[(&UpstreamGroup, CheckConfig)],
    endings: &mut Vec<Ending>,
    in_force: impl Fn() -> Arc<RoutingTable>,
    on_change: &OnChange,
) {
    let probes = groups.iter().flat_map(|(group, config)| {
        let header: Vec<u8> = group.send_header().map(header_without_client).unwrap_or_default();
        let upstreams = group.upstreams().iter();
        upstreams.map(move |upstream| Probe::start(upstream, *config, header.clone()))
    });
    let probes: Vec<_> = probes.collect();
    if probes.is_empty() {
        return;
    }
    probe::run(probes, endings, |upstream, config, result| {
        let outcome = upstream.record_check(result, config);
        let table = in_force();
        let mut checked = table.groups().iter().filter(|group| group.check().is_some());
        if !checked.any(|group| group.upstreams().iter().any(|one| Arc::ptr_eq(one, upstream))) {
            return;
        }
        match outcome {
            CheckOutcome::Same => {}
            CheckOutcome::Up => on_change.closings.cancel(upstream, ClosingReason::Down),
            CheckOutcome::Down => on_change.closings.apply(on_change.down_policy, upstream),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, GroupConfig};
    use haul_server::connect::PeerAddress;
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::num::NonZeroU32;

    fn group(name: &str, upstreams: &[&str], interval_ms: u64) -> GroupConfig {
        let upstreams: Vec<_> = upstreams.iter().map(|text| text.parse().unwrap()).collect();
        let mut group = GroupConfig::new(name, upstreams);
        group.check = Some(CheckConfig::new(Duration::from_millis(interval_ms)));
        group
    }

    #[test]
    fn an_upstream_is_down_after_three_failed_checks_and_up_after_two_good_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let config = Config::new([group("a", &[&address.to_string()], 1000)]);
        let table = Arc::new(RoutingTable::new(&config, None).unwrap());
        let on_change = OnChange {
            closings: Arc::default(),
            down_policy: DownPolicy::CloseAfter(Duration::ZERO),
        };
        let (group, upstream) = (&table.groups()[0], table.upstreams().next().unwrap());
        let check_by = |config: CheckConfig| {
            check(&[(group, config)], &mut Vec::new(), || Arc::clone(&table), &on_change);
            upstream.is_down()
        };
        let check = || check_by(group.check().unwrap());
        assert_eq!([check(), check()], [false; 2]);
        assert_eq!(upstream.check_error(), None);
        drop(listener);
        assert_eq!([check(), check(), check()], [false, false, true]);
        assert!(upstream.check_error().unwrap().contains("refused"));
        (0..3).for_each(|_| upstream.record_failure(0, &io::ErrorKind::ConnectionRefused.into()));
        assert!(upstream.is_ejected(0));
        let listener = TcpListener::bind(address).unwrap();
        assert_eq!([check(), check()], [true, false]);
        assert!(!upstream.is_ejected(0), "its connections failed while it was down");
        drop(listener);
        let mut once = group.check().unwrap();
        (once.fall, once.rise) = (NonZeroU32::MIN, NonZeroU32::MIN);
        assert!(check_by(once));
        let _listener = TcpListener::bind(address).unwrap();
        assert!(!check_by(once));
    }

    #[test]
    fn an_upstream_of_which_one_address_accepts_is_up() {
        let reached = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = reached.local_addr().unwrap().port();
        let config = Config::new([group("a", &[&format!("app.test:{port}")], 1000)]);
        let table = Arc::new(RoutingTable::new(&config, None).unwrap());
        let (group, upstream) = (&table.groups()[0], table.upstreams().next().unwrap());
        // Only the last address has a listener.
        let addresses = [9, 8, 7, 1].map(|last| SocketAddr::from(([127, 0, 0, last], 0)));
        upstream.set_addresses(&addresses);
        let on_change = OnChange { closings: Arc::default(), down_policy: DownPolicy::Keep };
        let groups = [(&**group, group.check().unwrap())];
        for _ in 0..4 {
            check(&groups, &mut Vec::new(), || Arc::clone(&table), &on_change);
            assert_eq!(upstream.check_error(), None);
        }
        let reached = PeerAddress::Tcp(reached.local_addr().unwrap());
        assert_eq!(upstream.candidates()[0], reached, "clients try it");
        upstream.set_addresses(&addresses[..2]);
        check(&groups, &mut Vec::new(), || Arc::clone(&table), &on_change);
        assert!(upstream.check_error().unwrap().contains("refused"));
    }

    /// A server that speaks first, such as sshd, logs an error if the connection is reset.
    #[test]
    fn a_check_does_not_reset_the_connection_to_a_server_that_speaks_first() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let config =
            Config::new([group("a", &[&listener.local_addr().unwrap().to_string()], 1000)]);
        let table = Arc::new(RoutingTable::new(&config, None).unwrap());
        let on_change = OnChange { closings: Arc::default(), down_policy: DownPolicy::Keep };
        let server = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            let end = client.read(&mut [0; 8]);
            client.write_all(b"220 ready\r\n").unwrap();
            // A reset in answer to these bytes would be pending soon.
            std::thread::sleep(Duration::from_millis(50));
            (end, client.take_error().unwrap().map(|error| error.kind()))
        });
        let (group, mut endings) = (&table.groups()[0], Vec::new());
        let groups = [(&**group, group.check().unwrap())];
        check(&groups, &mut endings, || Arc::clone(&table), &on_change);
        let (end, error) = server.join().unwrap();
        assert_eq!((end.unwrap(), error), (0, None));
        while !endings.is_empty() {
            probe::close_ended(&mut endings);
        }
    }

    #[test]
    fn each_group_is_checked_in_its_interval() {
        let mut config = Config::new([group("a", &["h:1"], 100), group("b", &["h:1"], 250)]);
        config.groups.push(GroupConfig::new("unchecked", ["h:1".parse().unwrap()]));
        let table = RoutingTable::new(&config, None).unwrap();
        let (start, mut schedule) = (Instant::now(), Schedule::default());
        let after = |ms: u64| start + Duration::from_millis(ms);
        let take_due = |schedule: &mut Schedule, table: &RoutingTable, at: Instant| {
            let due = schedule.take_due(table, at);
            due.iter().map(|(group, _)| group.name().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(schedule.follow(&table, start), Some(after(100)));
        assert_eq!(take_due(&mut schedule, &table, after(99)), [""; 0]);
        for (at, expected) in [(100, &["a"][..]), (200, &["a"]), (250, &["b"]), (500, &["a", "b"])]
        {
            assert_eq!(take_due(&mut schedule, &table, after(at)), expected, "{at}");
        }
        // After a reload.
        config.groups[1].check = Some(CheckConfig::new(Duration::from_millis(10)));
        config.groups[0].check = None;
        let table = RoutingTable::new(&config, Some(&table)).unwrap();
        assert_eq!(schedule.follow(&table, after(510)), Some(after(520)));
        assert_eq!(take_due(&mut schedule, &table, after(600)), ["b"]);
    }
}
