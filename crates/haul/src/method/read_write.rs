//! `read+write`: the way that always works, and the one the others are compared with.
//!
//! Two copies: from the page cache into the buffer, from the buffer into the socket. Memory needs no read and
//! costs one copy; it is then a plain `write`. Nothing to try: it needs a file and a socket.

use super::buffered::ThroughBuffer;
use super::{Copying, Entry};
use haul_sys::region::Region;

pub(super) const ENTRY: Entry = Entry {
    name: "read+write",
    copying: Copying::Always,
    fallback: None,
    open: |_, options| {
        ThroughBuffer::open(options, "write", |memory, socket, range| {
            Region::write(memory, socket, range)
        })
    },
};
