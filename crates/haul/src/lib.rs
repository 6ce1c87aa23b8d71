//! Moves bytes over TCP by the cheapest way the kernel offers, and says which way that was.
//!
//! Linux has a dozen ways to put a file or a piece of memory into a socket, and a few to get one out. Which is
//! cheapest depends on the kernel, the network device and the size, and several copy silently where they promise
//! not to. Three types take the cheapest one that a socket allows:
//!
//! * [`Sender`]: bytes, files ([`Sender::send_file`]) and loans ([`Sender::lend`]);
//! * [`Receiver`]: mapped pages or plain reads ([`Receiver::receive`]), into files, or thrown away;
//! * [`Forwarder`]: two sockets joined.
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
//! # What to use when
//!
//! | you have | use | what happens |
//! |---|---|---|
//! | a file | [`Sender::send_file`] | its pages travel |
//! | memory that is written once | [`Memory`] with [`Sender::send_file`] | its pages travel |
//! | memory that is used again | [`Pool`] with [`Sender::lend`] | its pages travel, and come back |
//! | a few bytes | [`Sender::send`], [`Sender::send_vectored`] | copied, which is cheapest for few |
//! | many datagrams | [`Sender::lend_segments`] | one call, cut by the device |
//! | a stream to look at | [`Receiver::receive`] | mapped where that pays, else read |
//! | a stream to keep | [`Receiver::receive_into_file`] | into the page cache, not through the program |
//! | two sockets | [`Forwarder`] | spliced, or copied where messages are small |
//!
//! # Nothing fails because a fast way is missing
//!
//! Each way is tried by using it. What the kernel, a container or the socket refuses, what turns out to copy and what
//! turns out dearer is stepped down from, to plain reads and writes in the end. Every step down is in the report
//! with its reason ([`Fallback`]): what a program cannot see it cannot trust.
//!
//! # Blocking or not
//!
//! Everything works on blocking and non-blocking sockets: a call moves what it can, and [`Error::WouldBlock`] means
//! that nothing was moved. There is no runtime; anything with a descriptor will do. A program that polls and lends
//! has three things to wait for: `POLLOUT` while the socket is full, `POLLERR` while too much is lent
//! ([`Error::LoansOut`]) or no buffer is left, and nothing at all where [`Sender::reclaim`] hands buffers out already; the
//! example `serve` does it in twenty lines. An event loop that takes `EPOLLERR` for the end of a connection does not
//! get along with loans.
//!
//! `SIGPIPE` must be ignored, as Rust programs do from the start: `sendfile`, `splice` and `write` have no flag
//! against it.
//!
//! # The ways themselves
//!
//! Each way of sending is a [`SendMethod`]: it can be tried ([`probe`]), put to the proof of whether it copies ([`prove`]),
//! and used as it is ([`SendMethod::open`]). Which one is cheapest is arithmetic over a [`Plan`], measured by `haul bench`
//! and made by `haul plan`.
//!
//! What the library cannot do yet: TLS.

#![forbid(unsafe_code)]

mod buffer;
mod completion;
mod error;
mod fallback;
mod forwarder;
mod lending;
mod loan;
mod method;
pub mod pacing;
mod pipe;
pub mod plan;
mod proof;
mod receiver;
mod selector;
mod sender;
mod settings;
mod socket;
mod source;

pub use buffer::{Buffer, Pool, PooledBuffer};
pub use error::Error;
pub use fallback::Fallback;
pub use forwarder::{
    DirectionReport, ForwardMethod, ForwardPool, ForwardReport, ForwardSettings, Forwarder,
    Readiness, Step,
};
pub use haul_checksum as checksum;
pub use loan::{LendError, Limits, LoanId, Outcome, Returned};
pub use method::{BoundMethod, Copying, Counts, MethodOptions, SendMethod, UnknownMethod};
pub use plan::Plan;
pub use proof::{ProofError, Proved, probe, prove};
pub use receiver::{Chunk, Mapping, ReceiveReport, ReceiveSettings, Receiver};
pub use sender::{SendReport, Sender};
pub use settings::{MethodChoice, SendSettings};
pub use source::{Memory, Source, SourceError, file_len};

/// What the README and the guide show compiles.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../README.md")]
    struct Readme;

    #[doc = include_str!("../../../docs/guide.md")]
    struct Guide;
}
