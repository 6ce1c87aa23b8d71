//! A chain of hosts that receive the same content: each host stores the content and passes it on,
//! so the source sends one copy.
//!
//! The source has a control stream to every host (ssh, or TLS in a job), as in a transfer to one
//! host: the source lists the files, and each host answers which files it requests. Only the
//! content goes from host to host. The source decides which host follows which. If a host fails,
//! the host before connects to the host behind, and goes on with the first frame that the host
//! behind lacks.

mod frame_queue;
mod link;

pub use frame_queue::{Body, Frame, FrameQueue, OpenFile};
pub use link::Link;
