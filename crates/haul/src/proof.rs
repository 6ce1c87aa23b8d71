//! Trying a path, and the proof of whether it copied.
//!
//! The proof needs no counter and no promise: send some bytes, wait until the peer's socket holds them all,
//! *then* write others over the source, and only then receive. Bytes that arrive changed were the source's
//! own pages; bytes that arrive as they were had been copied on the way. What it cannot see: a copy made
//! while receiving.

use crate::error::Error;
use crate::method::{MethodOptions, SendMethod};
use crate::source::{Memory, Source, SourceError};
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

/// What is sent: eight pages, which fit any socket's buffers.
const PROOF_BYTES: usize = 8 * 4096;
/// How long the bytes may take to the peer's socket. On one machine it is under a millisecond.
const ARRIVAL_MAX: Duration = Duration::from_secs(2);

const BEFORE: u8 = 0xA5;
const AFTER: u8 = 0x5A;

/// What the proof found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proved {
    /// Bytes that arrived as they were when they were sent: copied.
    pub copied_bytes: usize,
    /// Bytes that arrived as they were written after they were sent: never copied.
    pub shared_bytes: usize,
}

impl Proved {
    /// The share that was copied, in percent.
    pub fn copied_percent(&self) -> f64 {
        100.0 * self.copied_bytes as f64 / (self.copied_bytes + self.shared_bytes).max(1) as f64
    }
}

/// Why there is no proof.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The path did not send.
    #[error(transparent)]
    SendMethod(#[from] Error),
    /// The scratch source could not be made.
    #[error("making the scratch source: {0}")]
    Source(#[from] SourceError),
    /// The connection failed.
    #[error("{step}: {source}")]
    Connection {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The bytes did not reach the peer's socket in time.
    #[error(
        "only {arrived} of {PROOF_BYTES} bytes reached the peer's socket within {ARRIVAL_MAX:?}"
    )]
    Late {
        /// How many did.
        arrived: u64,
    },
    /// A byte arrived that was never sent.
    #[error("byte {at} arrived as {byte:#04x}, which was never sent: the path corrupts data")]
    Corrupt {
        /// Where.
        at: usize,
        /// What.
        byte: u8,
    },
}

/// Tries `path` between two sockets on loopback. On loopback, as on veth, `zerocopy` copies; a network device
/// may not.
pub fn probe(path: SendMethod) -> Result<Proved, ProofError> {
    let failed = |step| move |source| ProofError::Connection { step, source };
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed("listening on loopback"))?;
    let address = listener.local_addr().map_err(failed("listening on loopback"))?;
    let from = TcpStream::connect(address).map_err(failed("connecting on loopback"))?;
    let (to, _) = listener.accept().map_err(failed("accepting on loopback"))?;
    prove(path, &from, &to)
}

/// Sends through `path` from one end of a connection to the other and finds out how much of it was copied.
///
/// Both ends must be on this machine, blocking, and unused. For a path that reads into a buffer the answer is
/// that it copies.
pub fn prove(path: SendMethod, from: &TcpStream, to: &TcpStream) -> Result<Proved, ProofError> {
    let failed = |step| move |source| ProofError::Connection { step, source };
    let memory = Memory::new(io::repeat(BEFORE), PROOF_BYTES)?;
    let source =
        if path.takes_memory() { Source::from(&memory) } else { Source::from(memory.file()) };
    let mut sender = path.open(from.as_fd(), &MethodOptions::default())?;
    let mut sent = 0;
    while sent < memory.len() {
        sent += sender.send(from.as_fd(), source, sent..memory.len())?;
    }
    let deadline = Instant::now() + ARRIVAL_MAX;
    loop {
        let arrived =
            haul_sys::sockopt::bytes_to_read(to).map_err(failed("asking for what arrived"))?;
        if arrived >= PROOF_BYTES as u64 {
            break;
        }
        if Instant::now() >= deadline {
            return Err(ProofError::Late { arrived });
        }
        thread::sleep(Duration::from_micros(100));
    }
    memory
        .file()
        .write_all_at(&vec![AFTER; PROOF_BYTES], 0)
        .map_err(failed("writing over the scratch source"))?;
    let mut received = vec![0; PROOF_BYTES];
    (&mut &*to).read_exact(&mut received).map_err(failed("receiving"))?;
    let mut proved = Proved { copied_bytes: 0, shared_bytes: 0 };
    for (at, &byte) in received.iter().enumerate() {
        match byte {
            BEFORE => proved.copied_bytes += 1,
            AFTER => proved.shared_bytes += 1,
            byte => return Err(ProofError::Corrupt { at, byte }),
        }
    }
    Ok(proved)
}
