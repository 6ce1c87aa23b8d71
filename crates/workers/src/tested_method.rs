//! The send method of a row: a single one, the library's choice among them, or a method that only
//! the comparison has.

use crate::one_copy::{OneCopyMethod, OneCopySender};
use crate::ring_method::{RingMethod, RingSender, RingSource};
use crate::workload::Piece;
use haul::plan::{Condition, SourceKind};
use haul::{
    AttachedMethod, CopyProof, Copying, Counts, Error, MethodChoice, MethodOptions, Plan,
    ProofError, SendMethod, SendSettings, Sender,
};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::sync::Arc;

/// A single send method, or the library's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TestedMethod {
    /// This method only.
    Method(SendMethod),
    /// The choice of [`haul::Sender::send_file`], including the size of its calls: it gets the
    /// whole source at once, and the row's chunk size does not apply.
    Auto,
    /// The same choice, by a plan of this machine instead of the built-in one.
    Planned,
    /// A method that makes one copy, which the library does not have.
    OneCopy(OneCopyMethod),
    /// A method that uses io_uring, which the library does not have.
    Ring(RingMethod),
}

/// The name of [`TestedMethod::Auto`] in reports and flags.
pub const AUTO: &str = "auto";
/// The name of [`TestedMethod::Planned`] in reports and flags.
pub const PLANNED: &str = "planned";

impl TestedMethod {
    /// Every single method of the library and every method that uses io_uring, then
    /// [`Self::Auto`]. [`Self::Planned`] is left out, because it needs a plan. The methods that
    /// make one copy are left out, because they are compared only on request.
    pub fn all() -> Vec<Self> {
        let (floor, methods): (Vec<_>, Vec<_>) =
            SendMethod::ALL.iter().partition(|&&method| method == SendMethod::Floor);
        let rings = RingMethod::ALL.map(Self::Ring);
        let methods = methods.into_iter().map(Self::Method).chain(rings);
        methods.chain(floor.into_iter().map(Self::Method)).chain([Self::Auto]).collect()
    }

    /// The name in reports and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Method(method) => method.name(),
            Self::Auto => AUTO,
            Self::Planned => PLANNED,
            Self::OneCopy(method) => method.name(),
            Self::Ring(method) => method.name(),
        }
    }

    /// The method that is proved for this one: for a choice, the one that the built-in plan
    /// chooses.
    #[must_use]
    pub fn method_to_prove(self, is_memory: bool) -> Self {
        let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
        match self {
            Self::Method(_) | Self::OneCopy(_) | Self::Ring(_) => self,
            Self::Auto | Self::Planned => Plan::builtin()
                .choose(Condition::new(source, true), u64::MAX, |_| true)
                .unwrap_or(SendMethod::ReadWrite)
                .into(),
        }
    }

    /// When the method copies.
    pub fn copying(self, is_memory: bool) -> Copying {
        match self.method_to_prove(is_memory) {
            Self::Method(method) => method.copying(),
            Self::Ring(RingMethod::Zerocopy) => Copying::ReportedByKernel,
            _ => Copying::Always,
        }
    }

    /// Proves whether the method copies between the two ends of a connection. A choice of methods
    /// cannot be proved.
    pub fn prove(self, from: &TcpStream, to: &TcpStream) -> Result<CopyProof, ProofError> {
        let failed = |error| ProofError::Connection { step: "sending", error };
        match self {
            Self::Method(method) => haul::prove(method, from, to),
            Self::OneCopy(method) => {
                let mut sender = OneCopySender::new(method, usize::MAX);
                haul::prove_by(to, |memory, range| {
                    sender.send(from.as_fd(), memory.file(), &range).map_err(failed)
                })
            }
            Self::Ring(method) => {
                let chunk_bytes = MethodOptions::default().chunk_bytes;
                let mut sender =
                    RingSender::new(method, from.as_fd(), chunk_bytes).map_err(|error| {
                        ProofError::Connection { step: "setting the method up", error }
                    })?;
                haul::prove_by(to, |memory, range| {
                    let file = memory.file();
                    let source = if method.takes_memory() {
                        RingSource::Memory(file)
                    } else {
                        RingSource::File(file)
                    };
                    sender.send(from.as_fd(), source, &range).map_err(failed)
                })
            }
            Self::Auto | Self::Planned => {
                Err(Error::InvalidInput("a choice of methods is not proved").into())
            }
        }
    }

    /// Proves whether the method copies over loopback. `MSG_ZEROCOPY` copies over loopback, as
    /// between any two hosts of one machine. A network device may not copy.
    pub fn probe(self) -> Result<CopyProof, ProofError> {
        let failed = |step| move |error| ProofError::Connection { step, error };
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed("listening on loopback"))?;
        let address = listener.local_addr().map_err(failed("listening on loopback"))?;
        let from = TcpStream::connect(address).map_err(failed("connecting on loopback"))?;
        let (to, _) = listener.accept().map_err(failed("accepting on loopback"))?;
        self.prove(&from, &to)
    }

    /// Sets the method up for `stream`.
    pub fn attach(
        self,
        stream: &Arc<TcpStream>,
        options: &MethodOptions,
        plan: Option<&Plan>,
    ) -> Result<AttachedTestedMethod, TestedMethodError> {
        let choice = match (self, plan) {
            (Self::OneCopy(method), _) => {
                let sender = OneCopySender::new(method, options.chunk_bytes);
                return Ok(AttachedTestedMethod::OneCopy(sender));
            }
            (Self::Ring(method), _) => {
                let sender = RingSender::new(method, stream.as_fd(), options.chunk_bytes)?;
                return Ok(AttachedTestedMethod::Ring(Box::new(sender)));
            }
            (Self::Method(method), _) => {
                return Ok(AttachedTestedMethod::Method(
                    method,
                    method.attach(stream.as_fd(), options)?,
                ));
            }
            (Self::Planned, Some(plan)) => MethodChoice::Plan(Arc::new(plan.clone())),
            (Self::Planned, None) => {
                return Err(Error::InvalidInput("there is no plan to choose by").into());
            }
            (Self::Auto, _) => MethodChoice::Builtin,
        };
        let settings = SendSettings::default().with_choice(choice);
        let sender = Sender::with_settings(Arc::clone(stream), settings)?;
        Ok(AttachedTestedMethod::Chosen(Box::new(sender)))
    }
}

impl From<SendMethod> for TestedMethod {
    fn from(method: SendMethod) -> Self {
        Self::Method(method)
    }
}

impl fmt::Display for TestedMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// The error for a name that belongs to no send method.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "unknown path {0:?}; the paths are {names}",
    names =
        TestedMethod::all().into_iter().map(TestedMethod::name).collect::<Vec<_>>().join(", ")
)]
pub struct UnknownTestedMethod(String);

impl FromStr for TestedMethod {
    type Err = UnknownTestedMethod;

    fn from_str(text: &str) -> Result<Self, UnknownTestedMethod> {
        Self::all()
            .into_iter()
            .chain([Self::Planned])
            .chain(OneCopyMethod::ALL.map(Self::OneCopy))
            .find(|method| method.name() == text)
            .ok_or_else(|| UnknownTestedMethod(text.into()))
    }
}

/// A method that is set up for a socket: a single one, or a [`Sender`] that chooses. Rows differ in
/// nothing else.
pub enum AttachedTestedMethod {
    /// This send method.
    Method(SendMethod, Box<dyn AttachedMethod>),
    /// The library, which chooses.
    Chosen(Box<Sender<Arc<TcpStream>>>),
    /// A method that makes one copy.
    OneCopy(OneCopySender),
    /// A method that uses io_uring.
    Ring(Box<RingSender>),
}

/// Why a tested method did not send.
#[derive(Debug, thiserror::Error)]
pub enum TestedMethodError {
    /// The error of the library.
    #[error(transparent)]
    Library(#[from] Error),
    /// The error of a method that only the comparison has. [`io::ErrorKind::Unsupported`] if the
    /// method is not available here.
    #[error(transparent)]
    Comparison(#[from] io::Error),
}

impl AttachedTestedMethod {
    /// Sends like [`AttachedMethod::send`].
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        piece: &Piece,
        range: Range<u64>,
    ) -> Result<u64, TestedMethodError> {
        match self {
            Self::Method(_, attached) => Ok(attached.send(socket, piece.source(), range)?),
            Self::Chosen(sender) => Ok(sender.send_file(piece.source(), range)?),
            Self::OneCopy(sender) => Ok(sender.send(socket, piece.file(), &range)?),
            Self::Ring(sender) => {
                let source = match piece {
                    Piece::Memory(memory) => RingSource::Memory(memory.file()),
                    Piece::File(..) => RingSource::File(piece.file()),
                };
                Ok(sender.send(socket, source, &range)?)
            }
        }
    }

    /// Processes completions like [`AttachedMethod::process_completions`].
    pub fn process_completions(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        match self {
            Self::Method(_, attached) => attached.process_completions(socket),
            Self::Ring(sender) => Ok(sender.process_completions()),
            Self::Chosen(_) | Self::OneCopy(_) => Ok(0),
        }
    }

    /// Counters of the bytes and calls so far.
    pub fn counts(&self) -> Counts {
        let sender = match self {
            Self::Method(_, attached) => return attached.counts(),
            Self::OneCopy(sender) => return sender.counts(),
            Self::Ring(sender) => return sender.counts(),
            Self::Chosen(sender) => sender,
        };
        let mut sum = Counts::default();
        for (_, counts) in sender.report().files {
            sum.bytes += counts.bytes;
            sum.calls += counts.calls;
            sum.zero_copied_bytes += counts.zero_copied_bytes;
            sum.copied_bytes += counts.copied_bytes;
        }
        sum
    }

    /// The method that sent most of the bytes.
    pub fn taken(&self) -> Option<SendMethod> {
        match self {
            Self::Method(method, _) => Some(*method),
            Self::OneCopy(_) | Self::Ring(_) => None,
            Self::Chosen(sender) => {
                let most = sender.report().files.into_iter().max_by_key(|(_, counts)| counts.bytes);
                most.map(|(method, _)| method)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loopback copies everything, so the proof finds no page that was sent by reference.
    #[test]
    fn the_proof_finds_the_copies_of_every_ring() {
        for method in RingMethod::ALL.map(TestedMethod::Ring) {
            match method.probe() {
                Ok(proof) => assert_eq!(proof.zero_copied_bytes, 0, "{method}"),
                Err(error) => eprintln!("SKIPPED: {method}: {error}"),
            }
        }
    }

    #[test]
    fn names_parse_back() {
        let one_copy = OneCopyMethod::ALL.map(TestedMethod::OneCopy);
        for method in TestedMethod::all().into_iter().chain(one_copy) {
            assert_eq!(method.name().parse(), Ok(method));
        }
        let error = "sendfil".parse::<TestedMethod>().unwrap_err().to_string();
        assert!(error.contains("sendfil") && error.contains("auto"), "{error}");
    }
}
