//! `read+write`: the method that always works, and the baseline of the others.
//!
//! It makes two copies: from the page cache into the buffer, and from the buffer into the socket.
//! Memory needs no read and costs one copy, in a plain `write`. There is nothing to probe: the
//! method needs only a file and a socket.

use super::buffered::BufferedMethod;
use super::{Copying, Entry};
use crate::call::Call;
use haul_sys::region::MappedRegion;

pub(super) const ENTRY: Entry = Entry {
    name: "read+write",
    copying: Copying::Always,
    fallback: None,
    attach: |_, options| {
        BufferedMethod::attach(options, Call::Write, |memory, socket, range| {
            MappedRegion::write(memory, socket, range)
        })
    },
};
