//! `read+send`: as `read+write`, but with the socket's own call.
//!
//! `send` goes straight to the protocol where `write` first passes the file layer, and takes `MSG_NOSIGNAL`.
//! The copies are the same. Memory needs no read and is sent as it is.

use super::buffered::ThroughBuffer;
use super::{Copying, Entry, SendMethod};
use haul_sys::region::SendMode;

pub(super) const ENTRY: Entry = Entry {
    name: "read+send",
    copying: Copying::Always,
    fallback: Some(SendMethod::ReadWrite),
    open: |_, options| {
        ThroughBuffer::open(options, "send", |memory, socket, range| {
            memory.send(socket, range, SendMode::Copy)
        })
    },
};
