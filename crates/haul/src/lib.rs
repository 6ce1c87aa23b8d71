//! Sends, receives and forwards bytes over TCP by the cheapest method that the kernel offers, and
//! reports which method it used.
//!
//! Linux has a dozen ways to send a file or memory through a socket, and a few to receive from one.
//! The cheapest depends on the kernel, the network device and the size. Several copy silently
//! although they promise not to. Three types choose the cheapest method that a socket allows:
//!
//! * [`Sender`]: bytes, files ([`Sender::send_file`]) and loans ([`Sender::lend`]). A loan is
//!   memory lent to the kernel until its completion arrives.
//! * [`Receiver`]: mapped pages or plain reads ([`Receiver::receive`]), into files, or discarded.
//! * [`Forwarder`]: joins two sockets.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let socket = std::net::TcpStream::connect("192.0.2.1:80")?;
//! let file = std::fs::File::open("video.mp4")?;
//! let mut sender = haul::Sender::new(socket)?;
//! sender.send_file_all(&file, 0..haul::file_len(&file)?)?;
//! println!("{:#?}", sender.report());
//! # Ok(())
//! # }
//! ```
//!
//! # Which call to use
//!
//! | you have | use | what happens |
//! |---|---|---|
//! | a file | [`Sender::send_file`] | sent without a copy |
//! | a file with a head or a tail | [`Sender::send_response`] | one message, resumed where it stopped |
//! | memory that is written once | [`Memory`] with [`Sender::send_file`] | sent without a copy |
//! | memory that is reused | [`BufferPool`], [`Sender::lend`] | sent without a copy, then returned |
//! | several buffers | [`Sender::lend_vectored`] | the same, by as few calls as possible |
//! | a few bytes | [`Sender::send`], [`Sender::send_vectored`] | copied: cheapest for few bytes |
//! | a header before something else | [`Sender::send_more_all`] | copied, shares a packet |
//! | many datagrams | [`Sender::lend_segments`] | one call, segmented by the device |
//! | a stream to process | [`Receiver::receive`] | mapped where that is cheaper, else read |
//! | a stream to store | [`Receiver::receive_into_file`] | spliced into the page cache |
//! | two sockets | [`Forwarder`] | spliced, or copied where messages are small |
//!
//! # Fallbacks
//!
//! A method is probed by using it. The library falls back from a method that the kernel, a
//! container or the socket refuses, that copies although it should not, or that costs more. The
//! last fallback is plain reads and writes, so nothing fails because a fast method is missing.
//! Every fallback is in the report with its reason ([`Fallback`]), so that a program can check it.
//!
//! # Blocking and non-blocking sockets
//!
//! Every call works on blocking and non-blocking sockets, except [`Forwarder::step`], which needs
//! non-blocking ones. It moves as many bytes as it can, and [`Error::WouldBlock`] means that none
//! were moved. A call that moves all bytes reports its progress instead ([`SendAllError`], the
//! position of [`Sender::send_response`]). There is no runtime; any type with a descriptor works.
//! Files, [`Receiver`] and [`Forwarder`] need stream sockets, loans also work on UDP.
//!
//! [`Sender::wants`] returns the events to wait for. The kernel always reports `POLLERR`, both for
//! completions and for a failed connection: call [`Sender::on_error_event`], which tells them
//! apart. The example `serve` (`examples/serve.rs`) is such a loop. One that takes `EPOLLERR` for
//! the end of a connection (tokio; `is_write_closed` of mio) does not work with loans; docs/faq.md
//! shows how tokio sends files. Edge-triggered polling works with [`Sender`] and [`Receiver`] if
//! the program calls them until they return [`Error::WouldBlock`]; for a [`Forwarder`], see
//! [`Forwarder::step`].
//!
//! A file that is not in memory makes every call wait for the disk, on a non-blocking socket too:
//! [`Source::is_resident`], [`Source::prefetch`].
//!
//! `SIGPIPE` must be ignored, as Rust programs do from the start: `sendfile`, `splice` and `write`
//! have no flag that suppresses it.
//!
//! # Features
//!
//! None is on by default.
//!
//! * `bytes`: [`Buffer`] from `bytes::Bytes`.
//! * `plan-file`: `Plan::load` and `Plan::save`, for the files that `haul plan` makes.
//! * `tracing`: every fallback is an event of the target `haul`.
//! * `checksum`: the module `checksum`, the Internet checksum (RFC 1071), and copying with it.
//!   Needs Rust 1.89.
//! * `schemars`: JSON Schemas of the plan's types.
//!
//! # Using one method
//!
//! Each [`SendMethod`] can be probed ([`probe`]), tested for whether it copies ([`prove`]), and
//! used by itself ([`SendMethod::attach`]). The cheapest one is computed from a [`Plan`], a cost
//! model that is measured by `haul bench` and made by `haul plan`.
//!
//! TLS: this crate makes no handshake. [`Sender`] and [`Receiver`] work over a socket whose
//! records the kernel encrypts and decrypts (kTLS), and so does a [`Forwarder`] that receives from
//! one. Install the keys first: a receiver asks once whether the socket is a plain TCP socket.
//!
//! The alert with which a peer closes its stream (`close_notify`) is the end of the stream, and
//! stays in the socket. An end without it looks the same, and may be a truncation: after a
//! [`Receiver`] has returned the end, receive the alert. None is sent, so a forwarder whose sink
//! is a kTLS socket ends that stream like a truncated one. Before any other record that is not
//! application data a call fails with `EIO`; the record stays in the socket, too.

#![forbid(unsafe_code)]

mod buffer;
mod call;
mod claim;
mod completion;
mod error;
mod error_code;
mod fallback;
mod forwarder;
mod lending;
mod loan;
mod method;
pub mod pacing;
mod pipe;
mod pipe_pool;
pub mod plan;
mod pool;
mod proof;
mod receiver;
mod residency;
mod response;
mod selector;
mod sender;
mod settings;
mod socket;
mod source;

pub use buffer::Buffer;
pub use call::Call;
pub use error::{Error, SendAllError};
pub use error_code::ErrorCode;
pub use fallback::Fallback;
pub use forwarder::{
    DirectionReport, ForwardMethod, ForwardParts, ForwardPartsError, ForwardPool, ForwardReport,
    ForwardSettings, ForwardSide, Forwarder, Readiness, Step,
};
#[cfg(feature = "checksum")]
pub use haul_checksum as checksum;
pub use lending::{abandoned_bytes, set_abandoned_bytes_max};
pub use loan::{LendError, LoanId, LoanLimits, LoanOutcome, Returned};
pub use method::{AttachedMethod, Copying, Counts, MethodOptions, SendMethod, UnknownMethod};
pub use plan::Plan;
pub use pool::{BufferPool, PooledBuffer};
pub use proof::{CopyProof, ProofError, probe, prove, prove_by};
pub use receiver::{Chunk, Mapping, ReceiveReport, ReceiveSettings, Receiver};
pub use residency::PREFETCH_AWAITED_BYTES;
pub use response::Response;
pub use sender::{SendReport, Sender, Wants};
pub use settings::{MethodChoice, SendSettings};
pub use source::{Memory, Source, SourceError, file_len};

/// Compiles the examples of the README and the guide.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../README.md")]
    struct Readme;

    // An example of it reads a plan file.
    #[cfg(feature = "plan-file")]
    #[doc = include_str!("../../../docs/guide.md")]
    struct Guide;
}
