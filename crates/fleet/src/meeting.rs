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
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, atomic::AtomicUsize, atomic::Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The time for all ranks to come. Names of pods appear late.
const MEET_TIME_MAX: Duration = Duration::from_secs(60);
/// The time for a connection, and for the messages of a rank.
const RANK_TIME_MAX: Duration = Duration::from_secs(10);
/// The interval of attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The interval at which the end of the time is noticed.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(20);
/// Connections of strangers that are examined at a time.
const STRANGERS_MAX: usize = 64;
/// The most bytes of the announcement of one rank, with its proof.
const HELLO_BYTES_MAX: u32 = 8192;
/// The most bytes of all announcements.
const LIST_BYTES_MAX: u32 = 64 << 20;

type Nonce = [u8; 32];

/// What a rank sends.
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

/// What the listening rank answers.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    All { announcements: Vec<Announcement>, proof: Vec<u8> },
    Refused(String),
}

impl Hello {
    /// Reads the message of a rank, and refuses a message of another fleet.
    pub fn check(
        bytes: &[u8],
        fleet: &Fleet,
        nonce: &[u8; 32],
        vouch: &Vouch,
    ) -> Result<Self, String> {
        let hello: Self = postcard::from_bytes(bytes).map_err(|_| {
            "a rank sent what this version of haul does not read: start the same haul everywhere"
        })?;
        if hello.job != fleet.job {
            return Err(format!("it belongs to {:?}, and not to {:?}", hello.job, fleet.job));
        }
        if hello.size != fleet.size || hello.rank >= fleet.size {
            let (rank, size) = (hello.rank, hello.size);
            return Err(format!("it is rank {rank} of {size}, and not of {}", fleet.size));
        }
        if hello.proof.len() > PROOF_BYTES_MAX {
            return Err("its proof is too long".into());
        }
        vouch.check(&hello.hash(nonce), &hello.proof)?;
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

/// Exchanges announcements at this address.
pub fn exchange(
    fleet: &Fleet,
    (host, port): (&str, u16),
    own: &Announcement,
    vouch: &Vouch,
) -> Result<Vec<Announcement>, Error> {
    if fleet.listens {
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
            .map_err(|error| Error::Listen { port, error })?;
        return listen(&listener, fleet, own, vouch, MEET_TIME_MAX);
    }
    let failed = |problem: String| Error::Meet { host: host.to_owned(), port, problem };
    let deadline = Instant::now() + MEET_TIME_MAX;
    loop {
        match connect(host, port) {
            Ok(stream) => return ask(stream, fleet, own, vouch).map_err(failed),
            Err(error) if Instant::now() > deadline => return Err(failed(error.to_string())),
            Err(_) => thread::sleep(RETRY_INTERVAL),
        }
    }
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
fn ask(
    mut stream: TcpStream,
    fleet: &Fleet,
    own: &Announcement,
    vouch: &Vouch,
) -> Result<Vec<Announcement>, String> {
    let text = |error: io::Error| error.to_string();
    stream.set_read_timeout(Some(RANK_TIME_MAX)).map_err(text)?;
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
    hello.proof = vouch.prove(&hello.hash(&theirs)).map_err(|error| error.to_string())?;
    write(&mut stream, &hello).map_err(text)?;
    // All ranks must come before the answer.
    stream.set_read_timeout(Some(MEET_TIME_MAX + RANK_TIME_MAX)).map_err(text)?;
    match read(&mut stream, LIST_BYTES_MAX).map_err(text)? {
        Answer::Refused(reason) => Err(reason),
        Answer::All { announcements, proof } => {
            if announcements.len() != fleet.size as usize {
                return Err("it sent the announcements of another number of ranks".into());
            }
            let hash = hash(b"haul fleet meeting", &hello.nonce, &announcements);
            vouch.check(&hash, &proof)?;
            Ok(announcements)
        }
    }
}

/// A rank that waits for the answer.
struct Waiting {
    hello: Hello,
    stream: TcpStream,
}

/// The part of the rank that listens.
fn listen(
    listener: &TcpListener,
    fleet: &Fleet,
    own: &Announcement,
    vouch: &Vouch,
    time: Duration,
) -> Result<Vec<Announcement>, Error> {
    let failed = |error: io::Error| Error::Listen { port: 0, error };
    listener.set_nonblocking(true).map_err(failed)?;
    let deadline = Instant::now() + time;
    let mut waiting: Vec<Option<Waiting>> = (0..fleet.size).map(|_| None).collect();
    let (came_tx, came) = mpsc::channel();
    let unknown = Arc::new(AtomicUsize::new(0));
    let is_missing = |waiting: &[Option<Waiting>]| {
        let own = fleet.rank as usize;
        waiting.iter().enumerate().position(|(rank, found)| rank != own && found.is_none())
    };
    while let Some(missing) = is_missing(&waiting) {
        if Instant::now() > deadline {
            let came = waiting.iter().flatten().count() + 1;
            return Err(Error::Absent { missing: missing as u32, came, size: fleet.size });
        }
        if let Ok((stream, _)) = listener.accept()
            && unknown.load(Relaxed) < fleet.size as usize + STRANGERS_MAX
        {
            unknown.fetch_add(1, Relaxed);
            let (fleet, vouch, came_tx) = (fleet.clone(), vouch.clone(), came_tx.clone());
            let unknown = Arc::clone(&unknown);
            thread::spawn(move || {
                if let Some(came) = hear(stream, &fleet, &vouch) {
                    let _ = came_tx.send(came);
                }
                unknown.fetch_sub(1, Relaxed);
            });
            continue;
        }
        match came.recv_timeout(ACCEPT_INTERVAL) {
            Ok(Waiting { hello, mut stream }) => {
                let place = &mut waiting[hello.rank as usize];
                if place.is_some() || hello.rank == fleet.rank {
                    let reason =
                        format!("there are two ranks {}: two fleets meet here", hello.rank);
                    let _ = write(&mut stream, &Answer::Refused(reason));
                } else {
                    *place = Some(Waiting { hello, stream });
                }
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
    for Waiting { hello, mut stream } in waiting.into_iter().flatten() {
        let hash = hash(b"haul fleet meeting", &hello.nonce, &announcements);
        let proof = vouch.prove(&hash)?;
        // A rank that is gone is found out when it is needed.
        let _ = write(&mut stream, &Answer::All { announcements: announcements.clone(), proof });
    }
    Ok(announcements)
}

/// Takes the message of a rank. `None` for a stranger, who gets the reason.
fn hear(mut stream: TcpStream, fleet: &Fleet, vouch: &Vouch) -> Option<Waiting> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(RANK_TIME_MAX)).ok()?;
    stream.set_write_timeout(Some(RANK_TIME_MAX)).ok()?;
    let nonce = random().ok()?;
    stream.write_all(&nonce).ok()?;
    let bytes = read_bytes(&mut stream, HELLO_BYTES_MAX).ok()?;
    match Hello::check(&bytes, fleet, &nonce, vouch) {
        Ok(hello) => Some(Waiting { hello, stream }),
        Err(reason) => {
            let _ = write(&mut stream, &Answer::Refused(reason));
            None
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

    #[test]
    fn ranks_meet_and_strangers_do_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                listen(&listener, &fleet(0, 3), &own(0), &vouch(TOKEN), Duration::from_secs(60))
            });
            let join = move |fleet: Fleet, token: &str| {
                ask(TcpStream::connect(address).unwrap(), &fleet, &own(fleet.rank), &vouch(token))
            };
            let silent: Vec<_> = (0..5).map(|_| TcpStream::connect(address).unwrap()).collect();
            for (fleet, token, part) in [
                (fleet(1, 3), "another token of the test", "another HAUL_TOKEN"),
                (fleet(1, 4), TOKEN, "rank 1 of 4, and not of 3"),
                (fleet(3, 3), TOKEN, "rank 3 of 3"),
                (Fleet { job: "other".into(), ..fleet(1, 3) }, TOKEN, "it belongs to \"other\""),
                (fleet(0, 3), TOKEN, "two ranks 0"),
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
        });
    }

    #[test]
    fn a_missing_rank_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let time = Duration::from_millis(50);
        let error = listen(&listener, &fleet(0, 2), &own(0), &vouch(TOKEN), time).unwrap_err();
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
        let error = ask(stream, &fleet(1, 2), &own(1), &vouch(TOKEN)).unwrap_err();
        assert!(error.contains("another HAUL_TOKEN"), "{error}");
        answered.join().unwrap();
    }
}
