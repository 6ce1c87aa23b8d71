//! The paths that files take through a socket: chosen by plan or by hand, stepping down where they must.

use crate::error::Error;
use crate::fallback::Fallback;
use crate::method::{BoundMethod, Counts, SendMethod};
use crate::plan::{Condition, Plan, SourceKind, call_bytes};
use crate::settings::{MethodChoice, SendSettings};
use crate::source::Source;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Bytes that a path may promise not to copy and copy after all before it is given up.
const COPIED_BYTES_BEFORE_FALLBACK: u64 = 1 << 20;

/// The paths of one socket.
pub(crate) struct MethodSelector {
    settings: Arc<SendSettings>,
    /// Paths that were used, in the order of their first use. Those that were given up stay: the kernel may
    /// still hold pages that they lent.
    opened: Vec<(SendMethod, Box<dyn BoundMethod>)>,
    given_up: Vec<SendMethod>,
    fallbacks: Vec<Fallback>,
    latest: Option<SendMethod>,
}

impl MethodSelector {
    pub fn new(settings: Arc<SendSettings>) -> Self {
        Self {
            settings,
            opened: Vec::new(),
            given_up: Vec::new(),
            fallbacks: Vec::new(),
            latest: None,
        }
    }

    /// Sends the beginning of `range`, which must not be empty; returns the bytes the socket took.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: &Range<u64>,
    ) -> Result<u64, Error> {
        loop {
            let path = self.pick(source, range);
            let sent =
                self.opened(path, socket).and_then(|path| path.send(socket, source, range.clone()));
            match sent {
                Err(reason) if reason.is_refusal() => self.give_up(path, reason, source, range)?,
                Err(error) => return Err(error),
                Ok(sent) => {
                    self.latest = Some(path);
                    if self.only_copies(path) {
                        let reason = "the kernel copied all that was to go without a copy";
                        self.give_up(path, Error::Unsuited(reason), source, range)?;
                    }
                    return Ok(sent);
                }
            }
        }
    }

    /// The path that this piece would take.
    pub fn pick(&self, source: Source<'_>, range: &Range<u64>) -> SendMethod {
        let is_allowed = |path: SendMethod| !self.given_up.contains(&path);
        let planned = |plan: &Plan| {
            let source =
                if source.as_memory().is_some() { SourceKind::Memory } else { SourceKind::File };
            let condition = Condition { source, offloads: true };
            plan.choose(condition, range.end - range.start, is_allowed)
                .unwrap_or(SendMethod::ReadWrite)
        };
        match &self.settings.choice {
            MethodChoice::Builtin => planned(Plan::builtin()),
            MethodChoice::Plan(plan) => planned(plan),
            MethodChoice::Method(first) => {
                std::iter::successors(Some(*first), |path| path.fallback())
                    .find(|&path| is_allowed(path))
                    .unwrap_or(SendMethod::ReadWrite)
            }
        }
    }

    /// Leaves `MSG_ZEROCOPY` alone, whose notices belong to the sender's loans.
    pub fn leave_completions(&mut self) {
        if !self.given_up.contains(&SendMethod::Zerocopy) {
            self.given_up.push(SendMethod::Zerocopy);
        }
    }

    /// Whether a path's own sends are in the socket's count of zero-copy sends.
    pub fn owns_completions(&self) -> bool {
        self.opened.iter().any(|(path, _)| *path == SendMethod::Zerocopy)
    }

    /// The path that bytes last took.
    pub fn latest(&self) -> Option<SendMethod> {
        self.latest
    }

    /// What each path that was used has done, in the order of their first use.
    pub fn counts(&self) -> Vec<(SendMethod, Counts)> {
        self.opened.iter().map(|(path, sender)| (*path, sender.counts())).collect()
    }

    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// Takes the kernel's word on pages it was lent; returns how many sends it still holds.
    pub fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        self.opened.iter_mut().map(|(_, sender)| sender.settle(socket)).sum()
    }

    fn opened(
        &mut self,
        path: SendMethod,
        socket: BorrowedFd<'_>,
    ) -> Result<&mut Box<dyn BoundMethod>, Error> {
        let known = self.opened.iter().position(|(other, _)| *other == path);
        let index = known.unwrap_or(self.opened.len());
        if known.is_none() {
            let mut options = self.settings.options.clone();
            if !matches!(self.settings.choice, MethodChoice::Method(_)) {
                options.chunk_bytes = call_bytes(path);
            }
            self.opened.push((path, path.open(socket, &options)?));
        }
        Ok(&mut self.opened[index].1)
    }

    /// Never takes this path again. The path that always works has nothing to step down to: its error stands.
    fn give_up(
        &mut self,
        path: SendMethod,
        reason: Error,
        source: Source<'_>,
        range: &Range<u64>,
    ) -> Result<(), Error> {
        if path == SendMethod::ReadWrite {
            return Err(reason);
        }
        self.given_up.push(path);
        let to = self.pick(source, range).name();
        self.fallbacks.push(Fallback { from: path.name(), to, reason: reason.to_string() });
        Ok(())
    }

    fn only_copies(&self, path: SendMethod) -> bool {
        let counts =
            self.opened.iter().find(|(other, _)| *other == path).map(|(_, sender)| sender.counts());
        counts.is_some_and(|counts| {
            counts.copied_bytes >= COPIED_BYTES_BEFORE_FALLBACK && counts.zero_copied_bytes == 0
        })
    }
}
