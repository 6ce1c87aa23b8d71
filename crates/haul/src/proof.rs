//! Probes a send method, and tests whether it copies.
//!
//! The test needs no counter and trusts no report. It sends some bytes and waits until the peer's
//! socket holds them all. *Then* it overwrites the source, and only then receives. Bytes that
//! arrive changed were the source's own pages; bytes that arrive unchanged were copied on the way.
//! The test cannot detect a copy that is made while receiving.

use crate::error::Error;
use crate::method::{MethodOptions, SendMethod};
use crate::source::{Memory, Source, SourceError};
use std::fmt;
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

/// The number of bytes that are sent: sixteen pages, which fit any socket's buffers.
const PROOF_BYTES: usize = 16 * 4096;
/// The longest wait until the bytes reach the peer's socket. On one machine it takes under a
/// millisecond.
const ARRIVAL_MAX: Duration = Duration::from_secs(2);

const BEFORE: u8 = 0xA5;
const AFTER: u8 = 0x5A;

/// The result of a test of whether a method copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyProof {
    /// Bytes that arrived as they were when they were sent: copied.
    pub copied_bytes: usize,
    /// Bytes that arrived as they were overwritten after they were sent: not copied.
    pub zero_copied_bytes: usize,
}

impl CopyProof {
    /// The share of the bytes that was copied, in percent.
    pub fn copied_percent(&self) -> f64 {
        let bytes = self.copied_bytes + self.zero_copied_bytes;
        100.0 * self.copied_bytes as f64 / bytes.max(1) as f64
    }
}

/// Why a probe or a test does not have a result.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProofError {
    /// The method did not send.
    Send(Error),
    /// The scratch source could not be created.
    Source(SourceError),
    /// The connection failed.
    Connection {
        /// The step that failed.
        step: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The bytes did not reach the peer's socket in time.
    Timeout {
        /// The number of bytes that did.
        arrived: u64,
    },
    /// A byte arrived that was never sent.
    Corrupt {
        /// The position of the byte.
        at: usize,
        /// The value of the byte.
        byte: u8,
    },
}

impl fmt::Display for ProofError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Send(error) => error.fmt(formatter),
            Self::Source(error) => write!(formatter, "creating the scratch source: {error}"),
            Self::Connection { step, error } => write!(formatter, "{step}: {error}"),
            Self::Timeout { arrived } => write!(
                formatter,
                "only {arrived} of {PROOF_BYTES} bytes reached the peer's socket within \
                 {ARRIVAL_MAX:?}"
            ),
            Self::Corrupt { at, byte } => write!(
                formatter,
                "byte {at} arrived as {byte:#04x}, which was never sent: the method corrupts data"
            ),
        }
    }
}

impl std::error::Error for ProofError {}

impl From<Error> for ProofError {
    fn from(error: Error) -> Self {
        Self::Send(error)
    }
}

impl From<SourceError> for ProofError {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

/// Probes `method` between two sockets on loopback. `zerocopy` copies on loopback, as on veth; a
/// network device may not.
pub fn probe(method: SendMethod) -> Result<CopyProof, ProofError> {
    let failed = |step| move |error| ProofError::Connection { step, error };
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed("listening on loopback"))?;
    let address = listener.local_addr().map_err(failed("listening on loopback"))?;
    let from = TcpStream::connect(address).map_err(failed("connecting on loopback"))?;
    let (to, _) = listener.accept().map_err(failed("accepting on loopback"))?;
    prove(method, &from, &to)
}

/// Sends by `method` from one end of a connection to the other, and measures how much of it was
/// copied.
///
/// Both ends must be on this machine, blocking, and unused. A method that reads into a buffer is
/// reported as copying.
pub fn prove(
    method: SendMethod,
    from: &TcpStream,
    to: &TcpStream,
) -> Result<CopyProof, ProofError> {
    let mut attached = method.attach(from.as_fd(), &MethodOptions::default())?;
    prove_by(to, |memory, range| {
        let source =
            if method.takes_memory() { Source::from(memory) } else { Source::from(memory.file()) };
        Ok(attached.send(from.as_fd(), source, range)?)
    })
}

/// Like [`prove`], for a method that this library does not have. `send` sends the beginning of a
/// range of the memory to the other end of `to`, and returns the number of bytes.
pub fn prove_by(
    to: &TcpStream,
    mut send: impl FnMut(&Memory, Range<u64>) -> Result<u64, ProofError>,
) -> Result<CopyProof, ProofError> {
    let failed = |step| move |error| ProofError::Connection { step, error };
    let memory = Memory::new(io::repeat(BEFORE), PROOF_BYTES)?;
    let mut sent = 0;
    while sent < memory.len() {
        sent += send(&memory, sent..memory.len())?;
    }
    let deadline = Instant::now() + ARRIVAL_MAX;
    loop {
        let arrived =
            haul_sys::sockopt::bytes_to_read(to).map_err(failed("reading the receive queue"))?;
        if arrived >= PROOF_BYTES as u64 {
            break;
        }
        if Instant::now() >= deadline {
            return Err(ProofError::Timeout { arrived });
        }
        thread::sleep(Duration::from_micros(100));
    }
    memory
        .file()
        .write_all_at(&vec![AFTER; PROOF_BYTES], 0)
        .map_err(failed("overwriting the scratch source"))?;
    let mut received = vec![0; PROOF_BYTES];
    (&mut &*to).read_exact(&mut received).map_err(failed("receiving"))?;
    let mut proved = CopyProof { copied_bytes: 0, zero_copied_bytes: 0 };
    for (at, &byte) in received.iter().enumerate() {
        match byte {
            BEFORE => proved.copied_bytes += 1,
            AFTER => proved.zero_copied_bytes += 1,
            byte => return Err(ProofError::Corrupt { at, byte }),
        }
    }
    Ok(proved)
}
