//! Copies files and trees between hosts: the protocol of `haul push` and `haul pull`, and both of
//! its ends.
//!
//! One end is the source, which walks the tree and sends it ([`Session::send`]). The other end is
//! the destination, which creates the copy ([`Session::receive`]). Either end may be the one that
//! the user started. The ends speak over any two byte streams, such as the pipes of `ssh`, and send
//! the content of files through direct TCP connections where the network allows them.
//!
//! * The walk streams, so neither end holds a list of all files.
//! * The destination answers a batch of entries with the files that it requests. A copy that is up
//!   to date costs no data, and no file waits for its own answer.
//! * A frame holds many small files. Large files travel in chunks with offsets, so a chunk may be
//!   sent through any stream, and may be sent again.
//! * Of a file that changed, the blocks that differ can be found by their hashes ([`Delta`]).
//! * Every file and every chunk has a checksum (CRC-64/NVMe).
//! * A name appears only when its file is whole.
//! * The destination does not trust the names of the source: every name is one component below a
//!   folder that was opened without following links.

#![forbid(unsafe_code)]

mod attributes;
mod block;
mod bring;
mod chain;
mod checksum;
mod destination;
mod direct;
mod error;
mod filter;
mod frame;
mod handshake;
mod message;
mod options;
mod progress;
mod read_ahead;
mod remote;
mod restriction;
mod session;
mod setup;
mod source;
mod summary;
mod times;

pub use bring::{OwnProgram, SPEAKS};
pub use destination::AcceptedPaths;
pub use direct::{
    ControlListener, ControlReader, ControlStreams, DataFrom, DirectAnswer, DirectOffer,
    DirectReport, DirectRequest, DirectSettings, DirectStreams, Notice, RankKey, STREAMS_MAX,
    SshConnection, StreamCount, answer, connect_to_rank_0,
};
pub use error::Error;
pub use filter::{Filter, Rule};
pub use handshake::{Request, Response, Role, VERSION, accept, ask, respond};
pub use options::{
    Deletion, DeletionMode, Delta, Durable, EARLIER_COPIES_MAX, Options, Preserve, Replacement,
    Selection, Verify,
};
pub use progress::{Progress, ProgressSnapshot};
pub use remote::{RemoteEnd, RemotePath, RemoteProgram, RemoteShell, enlarge_pipe};
pub use restriction::Restriction;
pub use session::Session;
pub use source::{Host, HostEnd, HostResult, kept_names, send_to_all};
pub use summary::{FileError, Summary};
pub use times::{Times, cpu_of};
