//! The exchange of announcements at one address, under launchers that do not exchange them.
//!
//! One rank listens, and all others connect to it. The listening rank sends a random number. Each
//! rank answers with its announcement and a proof of the hash of both. When all ranks came, the
//! listening rank sends all announcements, with a proof that includes the random number of the
//! receiver. So a message that was recorded is of no use in another exchange.
//!
//! The announcements are public: they hold addresses and public keys.

use crate::announcement::Announcement;
use crate::environment::Fleet;
use crate::error::Error;
use crate::vouch::{PROOF_BYTES_MAX, Vouch};
use crate::wire::{read, read_bytes, write};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, atomic::AtomicUsize, atomic::Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The time for all ranks to come. Names of pods appear late.
const MEET_TIME_MAX: Duration = Duration::from_secs(60);
/// The time for a connection, and for the messages of a rank.
const RANK_TIME_MAX: Duration = Duration::from_secs(10);
/// The interval of attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The interval at which the ranks are named that did not come.
const NOTICE_INTERVAL: Duration = Duration::from_secs(5);
/// The most refused ranks that are named. Any program can connect.
const REFUSED_NAMED_MAX: usize = 5;
/// The interval at which the end of the time is noticed.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(20);
/// Connections of strangers that are examined at a time.
const STRANGERS_MAX: usize = 64;
/// The most bytes of the announcement of one rank, with its proof.
const HELLO_BYTES_MAX: u32 = 8192;
/// The most bytes of all announcements.
const LIST_BYTES_MAX: u32 = 64 << 20;

/// The most letters of the reason of a refusal.
const REASON_LETTERS_MAX: usize = 500;

type Nonce = [u8; 32];

/// The request of a rank to join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Which start of which job the rank belongs to.
    job: String,
    rank: u32,
    size: u32,
    nonce: Nonce,
    announcement: Announcement,
    proof: Vec<u8>,
}

/// The answer of the listening rank.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    All { announcements: Vec<Announcement>, proof: Vec<u8> },
    Refused(String),
}

impl Hello {
    /// Reads the message of a rank, and refuses a message of another fleet. A stranger learns
    /// nothing of the fleet.
    pub fn check(
        bytes: &[u8],
        fleet: &Fleet,
        nonce: &[u8; 32],
        vouch: &Vouch,
    ) -> Result<Self, String> {
        let hello: Self = postcard::from_bytes(bytes).map_err(
            |_| "the ranks run different versions of haul: start the same haul everywhere",
        )?;
        if hello.proof.len() > PROOF_BYTES_MAX {
            return Err("the proof of the rank is too long".into());
        }
        vouch.check(&hello.hash(nonce), &hello.proof)?;
        let Self { rank, size, ref job, .. } = hello;
        if *job != fleet.job {
            return Err(format!("rank {rank} belongs to {job:?}, and rank 0 to {:?}", fleet.job));
        }
        if size != fleet.size || rank >= fleet.size {
            return Err(format!("rank {rank} is one of {size} ranks, and not of {}", fleet.size));
        }
        Ok(hello)
    }

    /// The hash that the rank proves, for the random number of the listening rank.
    fn hash(&self, nonce: &Nonce) -> blake3::Hash {
        let own = Self { proof: Vec::new(), ..self.clone() };
        hash(b"haul fleet rank", nonce, &own)
    }
}

fn hash(role: &[u8], nonce: &Nonce, message: &impl Serialize) -> blake3::Hash {
    // A message of this process is always encoded.
    let bytes = postcard::to_stdvec(message).unwrap_or_default();
    blake3::hash(&[role, nonce, &bytes].concat())
}

/// Why a rank cannot join.
enum JoinError {
    /// The listening rank refused, for this reason.
    Refused(String),
    /// The connection failed, so another attempt may succeed.
    Failed(String),
}

/// Exchanges announcements at this address.
pub fn exchange(
    fleet: &Fleet,
    (host, port): (&str, u16),
    own: &Announcement,
    vouch: &Vouch,
    notice: &dyn Fn(&str),
) -> Result<Vec<Announcement>, Error> {
    if fleet.listens {
        let listener = match vouch {
            // Without a secret, the ranks must be on this host.
            Vouch::Nothing if is_loopback(host) => TcpListener::bind((host, port)),
            _ => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))),
        };
        let listener = listener.map_err(|error| Error::Listen { port, error })?;
        return listen(&listener, fleet, own, vouch, (MEET_TIME_MAX, notice));
    }
    let failed = |problem: String| Error::Meet { host: host.to_owned(), port, problem };
    let deadline = Instant::now() + MEET_TIME_MAX;
    loop {
        let connected = connect(host, port).map_err(|error| JoinError::Failed(error.to_string()));
        match connected.and_then(|stream| join(stream, fleet, own, vouch)) {
            Ok(all) => return Ok(all),
            Err(JoinError::Refused(reason)) => return Err(failed(reason)),
            Err(JoinError::Failed(reason)) if Instant::now() > deadline => {
                return Err(failed(reason));
            }
            Err(JoinError::Failed(_)) => thread::sleep(RETRY_INTERVAL),
        }
    }
}

/// Whether a host is this host by its name.
pub fn is_loopback(host: &str) -> bool {
    let address = host.parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failure = io::Error::other("the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, RANK_TIME_MAX) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// The part of a rank that connects.
fn join(
    stream: TcpStream,
    fleet: &Fleet,
    own: &Announcement,
    vouch: &Vouch,
) -> Result<Vec<Announcement>, JoinError> {
    let text = |error: io::Error| JoinError::Failed(error.to_string());
    let mut stream = TimedStream::new(stream, RANK_TIME_MAX).map_err(text)?;
    let mut theirs = Nonce::default();
    stream.read_exact(&mut theirs).map_err(text)?;
    let mut hello = Hello {
        job: fleet.job.clone(),
        rank: fleet.rank,
        size: fleet.size,
        nonce: random().map_err(text)?,
        announcement: own.clone(),
        proof: Vec::new(),
    };
    let proof = vouch.prove(&hello.hash(&theirs));
    hello.proof = proof.map_err(|error| JoinError::Refused(error.to_string()))?;
    write(&mut stream, &hello).map_err(text)?;
    // All ranks must come before the answer.
    stream.deadline = Instant::now() + MEET_TIME_MAX + RANK_TIME_MAX;
    match read(&mut stream, LIST_BYTES_MAX).map_err(text)? {
        Answer::Refused(reason) => {
            Err(JoinError::Refused(reason.chars().take(REASON_LETTERS_MAX).collect()))
        }
        Answer::All { announcements, proof } => {
            if announcements.len() != fleet.size as usize {
                let reason = "the listening rank sent the announcements of another number of ranks";
                return Err(JoinError::Refused(reason.into()));
            }
            let hash = answer_hash(&list_hash(&announcements), &hello.nonce);
            vouch.check(&hash, &proof).map_err(JoinError::Refused)?;
            Ok(announcements)
        }
    }
}

/// The hash of all announcements.
fn list_hash(announcements: &[Announcement]) -> blake3::Hash {
    hash(b"haul fleet list", &Nonce::default(), &announcements)
}

/// The hash that the listening rank proves, for the random number of the receiver.
fn answer_hash(list: &blake3::Hash, nonce: &Nonce) -> blake3::Hash {
    hash(b"haul fleet answer", nonce, list.as_bytes())
}

/// A connection whose reads end at a time, however slowly bytes arrive.
struct TimedStream {
    stream: TcpStream,
    deadline: Instant,
}

impl TimedStream {
    fn new(stream: TcpStream, time: Duration) -> io::Result<Self> {
        stream.set_write_timeout(Some(time))?;
        Ok(Self { stream, deadline: Instant::now() + time })
    }
}

impl Read for TimedStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A rank that waits for the answer.
struct Waiting {
    hello: Hello,
    stream: TimedStream,
}

/// The part of the rank that listens.
fn listen(
    listener: &TcpListener,
    fleet: &Fleet,
    own: &Announcement,
    vouch: &Vouch,
    (time, notice): (Duration, &dyn Fn(&str)),
) -> Result<Vec<Announcement>, Error> {
    let port = listener.local_addr().map_or(0, |address| address.port());
    let failed = |error: io::Error| Error::Listen { port, error };
    listener.set_nonblocking(true).map_err(failed)?;
    let deadline = Instant::now() + time;
    let mut waiting: Vec<Option<Waiting>> = (0..fleet.size).map(|_| None).collect();
    let (came_tx, came) = mpsc::channel();
    let examined = Arc::new(AtomicUsize::new(0));
    let (mut noticed, mut refused) = (Instant::now(), 0);
    let is_missing = |waiting: &[Option<Waiting>]| {
        let own = fleet.rank as usize;
        waiting.iter().enumerate().position(|(rank, found)| rank != own && found.is_none())
    };
    while let Some(missing) = is_missing(&waiting) {
        if noticed.elapsed() > NOTICE_INTERVAL {
            noticed = Instant::now();
            let came = waiting.iter().flatten().count() + 1;
            notice(&format!("waits for rank {missing}: {came} of {} ranks came", fleet.size));
        }
        if Instant::now() > deadline {
            let came = waiting.iter().flatten().count() + 1;
            let absent = Error::Absent { missing: missing as u32, came, size: fleet.size };
            refuse(waiting.into_iter().flatten(), &absent.to_string());
            return Err(absent);
        }
        // A failure, such as of a process without free descriptors, waits below.
        if let Ok((stream, _)) = listener.accept()
            && examined.load(Relaxed) < fleet.size as usize + STRANGERS_MAX
        {
            examine(stream, (fleet, vouch), &examined, &came_tx);
            continue;
        }
        match came.recv_timeout(ACCEPT_INTERVAL) {
            Ok(Err(refusal)) => {
                refused += 1;
                if refused <= REFUSED_NAMED_MAX {
                    notice(&refusal);
                }
            }
            Ok(Ok(joined)) => {
                let rank = joined.hello.rank;
                let place = &mut waiting[rank as usize];
                if place.is_none() && rank != fleet.rank {
                    *place = Some(joined);
                    continue;
                }
                // The other rank may already be one of the other fleet, so all ranks fail.
                let twice = Error::Twice { rank };
                let all = waiting.into_iter().flatten().chain([joined]);
                refuse(all, &twice.to_string());
                return Err(twice);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
    let announcements: Vec<_> = waiting
        .iter()
        .map(|rank| {
            rank.as_ref().map_or_else(|| own.clone(), |rank| rank.hello.announcement.clone())
        })
        .collect();
    answer(waiting.into_iter().flatten(), &announcements, vouch);
    Ok(announcements)
}

/// Takes the message of a rank on a new thread. `examined` counts these threads.
fn examine(
    stream: TcpStream,
    (fleet, vouch): (&Fleet, &Vouch),
    examined: &Arc<AtomicUsize>,
    came_tx: &Sender<Result<Waiting, String>>,
) {
    examined.fetch_add(1, Relaxed);
    let (fleet, vouch, came_tx) = (fleet.clone(), vouch.clone(), came_tx.clone());
    let count = Arc::clone(examined);
    let accept = move || {
        if let Some(came) = accept_rank(stream, &fleet, &vouch) {
            let _ = came_tx.send(came);
        }
        count.fetch_sub(1, Relaxed);
    };
    if thread::Builder::new().name("haul-accept".into()).spawn(accept).is_err() {
        examined.fetch_sub(1, Relaxed);
    }
}

/// Sends all announcements to the ranks that wait.
fn answer(waiting: impl Iterator<Item = Waiting>, announcements: &[Announcement], vouch: &Vouch) {
    let list = list_hash(announcements);
    for Waiting { hello, mut stream } in waiting {
        // A rank that does not get the answer is found out when it does not connect.
        if let Ok(proof) = vouch.prove(&answer_hash(&list, &hello.nonce)) {
            let answer = Answer::All { announcements: announcements.to_vec(), proof };
            let _ = write(&mut stream, &answer);
        }
    }
}

/// Sends the reason of a failure to the ranks that wait.
fn refuse(waiting: impl Iterator<Item = Waiting>, reason: &str) {
    for Waiting { mut stream, .. } in waiting {
        let _ = write(&mut stream, &Answer::Refused(reason.to_owned()));
    }
}

/// Takes the message of a rank. For a rank that is refused and gets the reason, the reason. `None`
/// for a stranger.
fn accept_rank(stream: TcpStream, fleet: &Fleet, vouch: &Vouch) -> Option<Result<Waiting, String>> {
    let address = stream.peer_addr().ok()?.ip().to_canonical();
    stream.set_nonblocking(false).ok()?;
    let mut stream = TimedStream::new(stream, RANK_TIME_MAX).ok()?;
    let nonce = random().ok()?;
    stream.write_all(&nonce).ok()?;
    let bytes = read_bytes(&mut stream, HELLO_BYTES_MAX).ok()?;
    match Hello::check(&bytes, fleet, &nonce, vouch) {
        Ok(hello) => Some(Ok(Waiting { hello, stream })),
        Err(reason) => {
            let refusal = format!("refused a rank at {address}: {reason}");
            let _ = write(&mut stream, &Answer::Refused(reason));
            Some(Err(refusal))
        }
    }
}

fn random() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    // Up to 256 bytes are always filled (getrandom(2)).
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Rendezvous;
    use crate::launcher::Launcher;

    fn fleet(rank: u32, size: u32) -> Fleet {
        Fleet {
            launcher: Launcher::Haul,
            rank,
            size,
            local_rank: None,
            hosts: None,
            job: "job".to_owned(),
            rendezvous: Rendezvous::Unknown,
            has_pmix: false,
            listens: rank == 0,
            token: None,
            is_in_slurm: false,
        }
    }

    fn own(rank: u32) -> Announcement {
        Announcement::new(rank as u16, vec![rank as u8])
    }

    fn vouch(token: &str) -> Vouch {
        Vouch::by_token(token).unwrap()
    }

    const TOKEN: &str = "a token of the test";

    fn reason(error: JoinError) -> String {
        match error {
            JoinError::Refused(reason) | JoinError::Failed(reason) => reason,
        }
    }

    #[test]
    fn ranks_meet_and_strangers_do_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (refused_tx, refused) = mpsc::channel();
        let notice = move |text: &str| drop(refused_tx.send(text.to_owned()));
        thread::scope(|scope| {
            let zero = scope.spawn(move || {
                listen(
                    &listener,
                    &fleet(0, 3),
                    &own(0),
                    &vouch(TOKEN),
                    (Duration::from_secs(60), &notice),
                )
            });
            let join = move |fleet: Fleet, token: &str| {
                let stream = TcpStream::connect(address).unwrap();
                join(stream, &fleet, &own(fleet.rank), &vouch(token)).map_err(reason)
            };
            let silent: Vec<_> = (0..5).map(|_| TcpStream::connect(address).unwrap()).collect();
            for (fleet, token, part) in [
                (fleet(1, 3), "another token of the test", "another HAUL_TOKEN"),
                (fleet(1, 4), TOKEN, "rank 1 is one of 4 ranks, and not of 3"),
                (fleet(3, 3), TOKEN, "rank 3 is one of 3 ranks"),
                (
                    Fleet { job: "other".into(), ..fleet(1, 3) },
                    TOKEN,
                    "rank 1 belongs to \"other\"",
                ),
            ] {
                let error = join(fleet, token).unwrap_err();
                assert!(error.contains(part), "{error}");
            }
            let one = scope.spawn(move || join(fleet(1, 3), TOKEN));
            let two = scope.spawn(move || join(fleet(2, 3), TOKEN));
            let expected: Vec<_> = (0..3).map(own).collect();
            assert_eq!(zero.join().unwrap().unwrap(), expected);
            assert_eq!(one.join().unwrap().unwrap(), expected);
            assert_eq!(two.join().unwrap().unwrap(), expected);
            drop(silent);
            let first = refused.recv().unwrap();
            assert!(first.starts_with("refused a rank at 127.0.0.1: "), "{first}");
        });
    }

    /// Two fleets at one address: no rank goes on, because some ranks may be of the other fleet.
    #[test]
    fn a_second_rank_of_a_number_ends_the_meeting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let time = Duration::from_secs(60);
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                listen(&listener, &fleet(0, 3), &own(0), &vouch(TOKEN), (time, &|_: &str| {}))
            });
            let one = || {
                let stream = TcpStream::connect(address).unwrap();
                join(stream, &fleet(1, 3), &own(1), &vouch(TOKEN)).map_err(reason)
            };
            for joined in [scope.spawn(one), scope.spawn(one)] {
                let error = joined.join().unwrap().unwrap_err();
                assert!(error.contains("two ranks 1"), "{error}");
            }
            assert!(zero.join().unwrap().unwrap_err().to_string().contains("two ranks 1"));
        });
    }

    #[test]
    fn a_missing_rank_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let time = Duration::from_millis(50);
        let error = listen(&listener, &fleet(0, 2), &own(0), &vouch(TOKEN), (time, &|_: &str| {}))
            .unwrap_err();
        assert!(error.to_string().contains("rank 1 did not come"), "{error}");
    }

    /// Another process listens in the place of the rank.
    #[test]
    fn a_false_meeting_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answered = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[1; 32]).unwrap();
            read_bytes(&mut stream, HELLO_BYTES_MAX).unwrap();
            let announcements = vec![own(0), own(1)];
            write(&mut stream, &Answer::All { announcements, proof: vec![0; 32] }).unwrap();
        });
        let stream = TcpStream::connect(address).unwrap();
        let error = join(stream, &fleet(1, 2), &own(1), &vouch(TOKEN)).map_err(reason).unwrap_err();
        assert!(error.contains("another HAUL_TOKEN"), "{error}");
        answered.join().unwrap();
    }
}
