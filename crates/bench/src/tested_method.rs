//! What a row sends by: one path, taken by hand, or the library's own choice.

use haul::plan::{Condition, SourceKind};
use haul::{
    BoundMethod, Counts, Error, MethodChoice, MethodOptions, Plan, SendMethod, SendSettings,
    Sender, Source,
};
use std::fmt;
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::sync::Arc;

/// A path, or the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TestedMethod {
    /// This path and no other.
    Method(SendMethod),
    /// What [`haul::Sender::send_file`] takes, in calls of the size it takes: it is given the whole of what is
    /// to be sent, and the row's chunk does not bind it.
    Auto,
    /// The same by a plan of this machine instead of the built-in one.
    Planned,
}

/// The name of the choice in reports and flags.
pub const AUTO: &str = "auto";
/// The name of the choice by a plan that was given.
pub const PLANNED: &str = "planned";

impl TestedMethod {
    /// Every path, then the choice; without the one that takes a plan.
    pub fn all() -> Vec<Self> {
        SendMethod::ALL.into_iter().map(Self::Method).chain([Self::Auto]).collect()
    }

    /// Its name, the same in every report and flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Method(path) => path.name(),
            Self::Auto => AUTO,
            Self::Planned => PLANNED,
        }
    }

    /// The path that is put to the proof for it: for the choice, what the built-in plan takes.
    pub(crate) fn proved_path(self, is_memory: bool) -> SendMethod {
        let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
        match self {
            Self::Method(path) => path,
            Self::Auto | Self::Planned => Plan::builtin()
                .choose(Condition { source, offloads: true }, u64::MAX, |_| true)
                .unwrap_or(SendMethod::ReadWrite),
        }
    }

    /// Sets it up for `stream`.
    pub(crate) fn open(
        self,
        stream: &TcpStream,
        options: &MethodOptions,
        plan: Option<&Plan>,
    ) -> Result<Opened, Error> {
        let choice = match (self, plan) {
            (Self::Method(path), _) => {
                return Ok(Opened::Method(path, path.open(stream.as_fd(), options)?));
            }
            (Self::Planned, Some(plan)) => MethodChoice::Plan(Arc::new(plan.clone())),
            (Self::Planned, None) => return Err(Error::Unsuited("there is no plan to choose by")),
            (Self::Auto, _) => MethodChoice::Builtin,
        };
        let own =
            stream.try_clone().map_err(|source| Error::Failed { call: "fcntl F_DUPFD", source })?;
        Ok(Opened::Chosen(Box::new(Sender::with(
            own,
            SendSettings { choice, ..SendSettings::default() },
        )?)))
    }
}

impl From<SendMethod> for TestedMethod {
    fn from(path: SendMethod) -> Self {
        Self::Method(path)
    }
}

impl fmt::Display for TestedMethod {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that nothing has.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown path {0:?}; the paths are {names}", names = TestedMethod::all().into_iter().map(TestedMethod::name).collect::<Vec<_>>().join(", "))]
pub struct UnknownTestedMethod(String);

impl FromStr for TestedMethod {
    type Err = UnknownTestedMethod;

    fn from_str(text: &str) -> Result<Self, UnknownTestedMethod> {
        Self::all()
            .into_iter()
            .chain([Self::Planned])
            .find(|way| way.name() == text)
            .ok_or_else(|| UnknownTestedMethod(text.into()))
    }
}

/// A way that is set up: one path, or a whole [`Sender`] that chooses. Rows differ in nothing else.
pub(crate) enum Opened {
    Method(SendMethod, Box<dyn BoundMethod>),
    Chosen(Box<Sender<TcpStream>>),
}

impl Opened {
    /// As [`BoundMethod::send`].
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        match self {
            Self::Method(_, path) => path.send(socket, source, range),
            Self::Chosen(sender) => sender.send_file(source, range),
        }
    }

    /// As [`BoundMethod::settle`].
    pub(crate) fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        match self {
            Self::Method(_, path) => path.settle(socket),
            Self::Chosen(_) => Ok(0),
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        let sender = match self {
            Self::Method(_, path) => return path.counts(),
            Self::Chosen(sender) => sender,
        };
        let mut sum = Counts::default();
        for (_, counts) in sender.report().files {
            sum.bytes += counts.bytes;
            sum.calls += counts.calls;
            sum.zero_copied_bytes += counts.zero_copied_bytes;
            sum.copied_bytes += counts.copied_bytes;
        }
        sum
    }

    /// The path that most bytes went by.
    pub(crate) fn taken(&self) -> Option<SendMethod> {
        match self {
            Self::Method(path, _) => Some(*path),
            Self::Chosen(sender) => {
                let most = sender.report().files.into_iter().max_by_key(|(_, counts)| counts.bytes);
                most.map(|(path, _)| path)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for way in TestedMethod::all() {
            assert_eq!(way.name().parse(), Ok(way));
        }
        let error = "sendfil".parse::<TestedMethod>().unwrap_err().to_string();
        assert!(error.contains("sendfil") && error.contains("auto"), "{error}");
    }
}
