//! `read+send`: like `read+write`, but with `send` instead of `write`.
//!
//! `send` calls the protocol directly, where `write` first passes the file layer; it also takes
//! `MSG_NOSIGNAL`. The copies are the same. Memory needs no read and is sent directly.

use super::buffered::BufferedMethod;
use super::{Copying, Entry, SendMethod};
use crate::call::Call;
use haul_sys::region::SendMode;

pub(super) const ENTRY: Entry = Entry {
    name: "read+send",
    copying: Copying::Always,
    fallback: Some(SendMethod::ReadWrite),
    attach: |_, options| {
        BufferedMethod::attach(options, Call::Send, |memory, socket, range| {
            memory.send(socket, range, SendMode::Copy)
        })
    },
};
