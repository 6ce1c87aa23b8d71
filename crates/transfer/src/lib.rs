//! Copies files and trees between hosts: the protocol of `haul push` and `haul pull`, and both of
//! its ends.
//!
//! One end is the source, which walks the tree and sends it ([`send`]). The other end is the
//! destination, which creates the copy ([`receive`]). Either end may be the one that the user
//! started. The ends speak over any two byte streams, such as the pipes of `ssh`.
//!
//! * The walk streams, so neither end holds a list of all files.
//! * The destination answers a batch of entries with the files that it requests. A copy that is up
//!   to date costs no data, and no file waits for its own answer.
//! * A frame holds many small files. Large files travel in chunks with offsets, so a chunk may be
//!   sent through any stream, and may be sent again.
//! * Every file and every chunk has a checksum (CRC-64/NVMe).
//! * A name appears only when its file is whole.
//! * The destination does not trust the names of the source: every name is one component below a
//!   folder that was opened without following links.

#![forbid(unsafe_code)]

mod attributes;
mod destination;
mod destination_folders;
mod error;
mod frame;
mod handshake;
mod message;
mod open_destination;
mod options;
mod partial_file;
mod remote;
mod source;
mod summary;
mod walk;

pub use destination::{AcceptedNames, receive};
pub use error::Error;
pub use handshake::{Request, Role, accept, ask};
pub use options::{Options, Preserve};
pub use remote::{RemoteEnd, RemotePath, RemoteShell, enlarge_pipe};
pub use source::send;
pub use summary::{FileError, Summary};
pub use walk::name_of;
