//! `auto`: the library's own choice, piece by piece.
//!
//! Not a way of its own: it takes the path that the built-in plan ([`crate::Plan`]) says is the cheapest for
//! a piece of this size, and the next one where the kernel refuses, as a [`crate::Sender`] does. It copies
//! where the path it takes copies.

use super::{Copying, Counts, Entry, Path, SendPath};
use crate::error::Error;
use crate::files::{Choice, Files};
use crate::source::Source;
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub(super) const ENTRY: Entry = Entry {
    name: "auto",
    copying: Copying::Pages,
    steps_down_to: Some(Path::ReadWrite),
    open: |_, options| Ok(Box::new(Files::new(Choice::Builtin, options.clone()))),
};

impl SendPath for Files {
    fn send(&mut self, socket: BorrowedFd<'_>, source: Source<'_>, range: Range<u64>) -> Result<u64, Error> {
        Self::send(self, socket, source, &range)
    }

    fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        Self::settle(self, socket)
    }

    fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for (_, counts) in Self::counts(self) {
            sum.bytes += counts.bytes;
            sum.calls += counts.calls;
            sum.zero_copied_bytes += counts.zero_copied_bytes;
            sum.copied_bytes += counts.copied_bytes;
        }
        sum
    }
}
