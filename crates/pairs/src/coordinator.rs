//! The part of rank 0: it orders the measurements and makes the report.

use crate::findings::{SLOW_SHARE, median};
use crate::message::{HostFacts, MESSAGE_BYTES_MAX, Order, Received, Reply, Secret, Sent};
use crate::report::{Findings, HostRow, PairRow, PairsReport};
use crate::rounds::rounds;
use haul_fleet::{Announcement, wire};
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time in which slow pairs are measured again.
const AGAIN_TIME_MAX: Duration = Duration::from_secs(20);
/// The CPU time of a host is reported if other programs used less than this share before.
const BUSY_MAX: f64 = 0.05;

/// A host, with the streams between rank 0 and the host.
pub struct Member {
    /// What the host announced.
    pub announcement: Announcement,
    /// The stream from the host; `None` if the host did not connect.
    pub streams: Option<Streams>,
}

/// The streams from and to a host.
pub type Streams = (Box<dyn Read + Send>, Box<dyn Write + Send>);

/// A host while it is measured.
struct Host {
    addresses: Vec<IpAddr>,
    control: Mutex<Control>,
}

/// The streams to a host, or the reason why they ended.
struct Control {
    streams: Option<Streams>,
    problem: String,
}

impl Control {
    /// Sends an order and waits for the reply.
    fn ask(&mut self, order: &Order) -> Result<Reply, String> {
        let Some((from, to)) = &mut self.streams else { return Err(self.problem.clone()) };
        let sent = wire::write(to, order).and_then(|()| to.flush());
        let reply = sent.and_then(|()| read(from));
        self.end_if(reply)
    }

    /// Takes the first message of the host.
    fn facts(&mut self) -> Option<HostFacts> {
        let (from, _) = self.streams.as_mut()?;
        let reply = read(from);
        match self.end_if(reply) {
            Ok(Reply::Host(facts)) => Some(facts),
            _ => None,
        }
    }

    /// Gives the host up after a failure of the streams.
    fn end_if(&mut self, reply: io::Result<Reply>) -> Result<Reply, String> {
        reply.map_err(|error| {
            self.streams = None;
            self.problem = format!("its connection ended early ({error})");
            self.problem.clone()
        })
    }
}

fn read<M: DeserializeOwned>(from: &mut impl Read) -> io::Result<M> {
    wire::read(from, MESSAGE_BYTES_MAX)
}

/// Measures all pairs, each for this time in each direction. `progress` is called with the number
/// of the round and the number of rounds.
pub fn measure_all(
    members: Vec<Member>,
    time: Duration,
    mut progress: impl FnMut(usize, usize),
) -> PairsReport {
    let announcements: Vec<_> = members.iter().map(|one| one.announcement.clone()).collect();
    let host = |member: Member| Host {
        addresses: member.announcement.addresses,
        control: Mutex::new(Control {
            streams: member.streams,
            problem: "it did not connect to rank 0".to_owned(),
        }),
    };
    let hosts: Vec<_> = members.into_iter().map(host).collect();
    let facts: Vec<_> = hosts.iter().map(|host| host.lock().facts()).collect();
    let rounds = rounds(hosts.len());
    let mut measured = Vec::new();
    for (number, round) in rounds.iter().enumerate() {
        progress(number + 1, rounds.len());
        thread::scope(|scope| {
            let both = |&(one, other): &(usize, usize)| {
                let hosts = &hosts;
                scope.spawn(move || {
                    [(one, other), (other, one)].map(|pair| (pair, measure(hosts, pair, time)))
                })
            };
            let pairs: Vec<_> = round.iter().map(both).collect();
            // A panic shows in the scope.
            measured.extend(pairs.into_iter().filter_map(|pair| pair.join().ok()).flatten());
        });
    }
    measure_slow_again(&hosts, &mut measured, time);
    report(&announcements, &facts, measured, time)
}

/// What was measured of a pair.
struct Measured {
    result: Result<(Sent, Received), String>,
    was_alone: bool,
}

impl Measured {
    fn bytes_per_s(&self) -> Option<f64> {
        self.result.as_ref().ok().map(|(sent, _)| sent.bytes as f64 / sent.seconds.max(1e-6))
    }
}

impl Host {
    fn lock(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures one pair in one direction.
fn measure(hosts: &[Host], (from, to): (usize, usize), time: Duration) -> Measured {
    let result = try_measure(hosts, (from, to), time);
    Measured { result, was_alone: false }
}

fn try_measure(
    hosts: &[Host],
    (from, to): (usize, usize),
    time: Duration,
) -> Result<(Sent, Received), String> {
    let mut secret = Secret::default();
    // Up to 256 bytes are always filled (getrandom(2)).
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| io::Error::from(errno).to_string())?;
    let (mut sender, mut receiver) = (hosts[from].lock(), hosts[to].lock());
    let wrong = || "an unexpected reply".to_owned();
    let port = match receiver.ask(&Order::Listen(secret))? {
        Reply::Listening(port) => port,
        Reply::Failed(reason) => return Err(reason),
        _ => return Err(wrong()),
    };
    let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let addresses = hosts[to].addresses.clone();
    let sent = sender.ask(&Order::Send { addresses, port, secret, milliseconds });
    // Also after a failure, so that the receiving host is ready for the next order.
    let received = receiver.ask(&Order::Collect);
    match (sent?, received?) {
        (Reply::Sent(sent), Reply::Received(received)) => Ok((sent, received)),
        (Reply::Failed(reason), _) | (_, Reply::Failed(reason)) => Err(reason),
        _ => Err(wrong()),
    }
}

/// Measures slow pairs again, while no other pair is measured: other pairs may be the reason.
fn measure_slow_again(hosts: &[Host], measured: &mut [((usize, usize), Measured)], time: Duration) {
    let rates = measured.iter().filter_map(|(_, one)| one.bytes_per_s());
    let Some(median) = median(rates) else { return };
    let deadline = Instant::now() + AGAIN_TIME_MAX;
    for (pair, before) in measured {
        let is_slow = before.bytes_per_s().is_none_or(|rate| rate < 1.5 * SLOW_SHARE * median);
        if is_slow && Instant::now() < deadline {
            let again = Measured { was_alone: true, ..measure(hosts, *pair, time) };
            if again.bytes_per_s() > before.bytes_per_s() {
                *before = again;
            }
        }
    }
}

fn report(
    announcements: &[Announcement],
    facts: &[Option<HostFacts>],
    measured: Vec<((usize, usize), Measured)>,
    time: Duration,
) -> PairsReport {
    let hosts: Vec<_> = announcements
        .iter()
        .enumerate()
        .map(|(at, own)| {
            let boot = |other: &&Announcement| other.boot_id == own.boot_id;
            let sent = measured.iter().filter(|((from, _), _)| *from == at);
            let mtus = sent.filter_map(|(_, one)| one.result.as_ref().ok());
            let fact = facts[at].clone().unwrap_or_default();
            HostRow {
                name: own.host_name.clone(),
                mtu: mtus.map(|(sent, _)| sent.mtu).filter(|&mtu| mtu > 0).max(),
                congestion: Some(fact.congestion).filter(|name| !name.is_empty()),
                busy_before: fact.busy_before,
                shares_machine: announcements.iter().filter(boot).count() > 1,
            }
        })
        .collect();
    let mut pairs: Vec<_> =
        measured.into_iter().map(|(pair, measured)| pair_row(&hosts, pair, measured)).collect();
    pairs.sort_by_key(|pair| (pair.from, pair.to));
    let findings = Findings::of(&hosts, &pairs);
    let version = haul_version::VERSION.to_owned();
    let now = jiff::Timestamp::now();
    let measured_at = now.round(jiff::Unit::Second).unwrap_or(now).to_string();
    PairsReport { version, measured_at, hosts, pairs, findings, seconds_each: time.as_secs_f64() }
}

fn pair_row(hosts: &[HostRow], (from, to): (usize, usize), measured: Measured) -> PairRow {
    let (bytes_per_s, was_measured_alone) = (measured.bytes_per_s(), measured.was_alone);
    let (sent, received) = match measured.result {
        Ok(both) => both,
        Err(problem) => {
            let problem = Some(problem);
            return PairRow { from, to, was_measured_alone, problem, ..PairRow::default() };
        }
    };
    let mib = sent.bytes as f64 / f64::from(1 << 20);
    let cpu = |host: usize, seconds: f64| {
        let HostRow { shares_machine, busy_before, .. } = hosts[host];
        let is_known = !shares_machine && busy_before < BUSY_MAX && mib > 0.0;
        is_known.then(|| seconds * 1e6 / mib)
    };
    PairRow {
        from,
        to,
        bytes_per_s,
        round_trip_us: Some(sent.round_trip_s * 1e6),
        cpu_us_per_mib_from: cpu(from, sent.cpu_s),
        cpu_us_per_mib_to: cpu(to, received.cpu_s),
        retransmitted_segments: sent.retransmitted_segments,
        was_measured_alone,
        problem: None,
    }
}
