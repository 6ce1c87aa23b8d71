//! Sends bytes over TCP by the cheapest way the kernel offers, and says which way that was.
//!
//! Linux has a dozen ways to put a file or a piece of memory into a socket. Which is cheapest depends on the
//! kernel, the network device and the size, and several copy silently where they promise not to. Here each
//! way is a [`Path`]: it can be tried ([`probe`]), put to the proof ([`prove`]), used as it is
//! ([`Path::open`]), or used through a [`Sender`], which steps down to the next best path when the kernel
//! refuses one and never fails for that.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let socket = std::net::TcpStream::connect("192.0.2.1:80")?;
//! let file = std::fs::File::open("video.mp4")?;
//! let mut sender = haul::Sender::new(socket)?;
//! sender.send_file_all(&file, 0..file.metadata()?.len())?;
//! println!("{:?}", sender.report());
//! # Ok(())
//! # }
//! ```
//!
//! Everything works on any stream socket, blocking or not: a call takes what the socket takes, and
//! [`Error::WouldBlock`] means nothing was taken. `SIGPIPE` must be ignored, as Rust programs do from the
//! start: `sendfile`, `splice` and `write` have no flag against it.
//!
//! What the library cannot do yet: lend buffers, receive, forward, TLS.

#![forbid(unsafe_code)]

mod book;
mod buffer;
mod demotion;
mod error;
mod files;
mod forwarder;
mod lending;
mod path;
mod pipe;
pub mod plan;
mod proof;
mod receiver;
mod sender;
mod source;

pub use buffer::{Buffer, Pool, PooledBuffer};
pub use demotion::Demotion;
pub use error::Error;
pub use files::Choice;
pub use forwarder::{DirectionReport, ForwardPool, ForwardReport, Forwarder, Readiness, Step};
pub use lending::{LendError, Limits, LoanId, Outcome, Returned};
pub use path::{Copying, Counts, Options, Path, SendPath, UnknownPath};
pub use plan::Plan;
pub use proof::{ProofError, Proved, probe, prove};
pub use receiver::{Chunk, Mapping, ReceiveReport, ReceiveSettings, Receiver};
pub use sender::{Report, Sender, Settings};
pub use source::{Memory, Source, SourceError, file_len};
