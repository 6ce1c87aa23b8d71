//! The path that files take through a socket, stepping down where it must.

use crate::demotion::Demotion;
use crate::error::Error;
use crate::path::{Counts, Options, Path, SendPath};
use crate::source::Source;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Bytes that a path may promise not to copy and copy after all before it is given up.
const COPIED_BYTES_BEFORE_DEMOTION: u64 = 1 << 20;

/// The path in use for one socket, and those it was before.
pub(crate) struct Files {
    options: Options,
    path: Path,
    /// `None` until something is sent.
    current: Option<Box<dyn SendPath>>,
    /// Paths that were stepped down from: the kernel may still hold pages that they lent.
    retired: Vec<(Path, Box<dyn SendPath>)>,
    demotions: Vec<Demotion>,
}

impl Files {
    pub fn new(path: Path, options: Options) -> Self {
        Self { options, path, current: None, retired: Vec::new(), demotions: Vec::new() }
    }

    pub fn path(&self) -> Path {
        self.path
    }

    /// Opens the path, or the next one that the kernel allows.
    pub fn open(&mut self, socket: BorrowedFd<'_>) -> Result<&mut Box<dyn SendPath>, Error> {
        let opened = match self.current.take() {
            Some(current) => current,
            None => loop {
                match (self.path.open(socket, &self.options), self.path.steps_down_to()) {
                    (Err(reason @ Error::Refused { .. }), Some(next)) => self.demote(next, &reason),
                    (opened, _) => break opened?,
                }
            },
        };
        Ok(self.current.insert(opened))
    }

    /// Sends the beginning of `range`, which must not be empty; returns the bytes the socket took.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: &Range<u64>,
    ) -> Result<u64, Error> {
        loop {
            match self.open(socket)?.send(socket, source, range.clone()) {
                Err(reason) if reason.is_refusal() => {
                    let Some(next) = self.path.steps_down_to() else { return Err(reason) };
                    self.retire();
                    self.demote(next, &reason);
                }
                Err(error) => return Err(error),
                Ok(sent) => {
                    self.give_up_copying_path();
                    return Ok(sent);
                }
            }
        }
    }

    /// Goes on with the path after `MSG_ZEROCOPY`, whose notices belong to the sender's loans.
    pub fn leave_notices(&mut self) {
        if self.path == Path::Zerocopy && self.current.is_none() {
            let reason = Error::Unsuited("the socket's zero-copy notices belong to the loans");
            self.demote(Path::ReadSend, &reason);
        }
    }

    /// Whether the path's own sends are in the socket's count of zero-copy sends.
    pub fn owns_notices(&self) -> bool {
        let used = self.retired.iter().map(|(path, _)| *path);
        used.chain(self.current.is_some().then_some(self.path)).any(|path| path == Path::Zerocopy)
    }

    /// Takes the kernel's word on pages it was lent; returns how many sends it still holds.
    pub fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        let mut held = 0;
        for path in self.retired.iter_mut().map(|(_, path)| path).chain(&mut self.current) {
            held += path.settle(socket)?;
        }
        Ok(held)
    }

    /// What each path that was used has done, in the order of their use.
    pub fn counts(&self) -> Vec<(Path, Counts)> {
        let retired = self.retired.iter().map(|(path, sender)| (*path, sender.counts()));
        let current = self.current.iter().map(|current| (self.path, current.counts()));
        retired.chain(current).collect()
    }

    pub fn demotions(&self) -> &[Demotion] {
        &self.demotions
    }

    fn retire(&mut self) {
        self.retired.extend(self.current.take().map(|current| (self.path, current)));
    }

    fn demote(&mut self, next: Path, reason: &Error) {
        self.demotions.push(Demotion { from: self.path.name(), to: next.name(), reason: reason.to_string() });
        self.path = next;
    }

    /// A path that only copies is given up for a cheaper one.
    fn give_up_copying_path(&mut self) {
        let Some(Counts { copied_bytes, zero_copied_bytes, .. }) =
            self.current.as_ref().map(|path| path.counts())
        else {
            return;
        };
        if copied_bytes >= COPIED_BYTES_BEFORE_DEMOTION
            && zero_copied_bytes == 0
            && let Some(next) = self.path.steps_down_to()
        {
            self.retire();
            self.demote(next, &Error::Unsuited("the kernel copied all that was to go without a copy"));
        }
    }
}
