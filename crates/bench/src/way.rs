//! What a row sends by: one path, taken by hand, or the library's own choice.

use haul::plan::{Condition, SourceKind};
use haul::{Choice, Counts, Error, Options, Path, Plan, SendPath, Sender, Settings, Source};
use std::fmt;
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::sync::Arc;

/// A path, or the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// This path and no other.
    Path(Path),
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

impl Way {
    /// Every path, then the choice; without the one that takes a plan.
    pub fn all() -> Vec<Self> {
        Path::ALL.into_iter().map(Self::Path).chain([Self::Auto]).collect()
    }

    /// Its name, the same in every report and flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::Path(path) => path.name(),
            Self::Auto => AUTO,
            Self::Planned => PLANNED,
        }
    }

    /// The path that is put to the proof for it: for the choice, what the built-in plan takes.
    pub(crate) fn proved_path(self, is_memory: bool) -> Path {
        let source = if is_memory { SourceKind::Memory } else { SourceKind::File };
        match self {
            Self::Path(path) => path,
            Self::Auto | Self::Planned => Plan::builtin()
                .choose(Condition { source, offloads: true }, u64::MAX, |_| true)
                .unwrap_or(Path::ReadWrite),
        }
    }

    /// Sets it up for `stream`.
    pub(crate) fn open(
        self,
        stream: &TcpStream,
        options: &Options,
        plan: Option<&Plan>,
    ) -> Result<Opened, Error> {
        let choice = match (self, plan) {
            (Self::Path(path), _) => return Ok(Opened::Path(path, path.open(stream.as_fd(), options)?)),
            (Self::Planned, Some(plan)) => Choice::Plan(Arc::new(plan.clone())),
            (Self::Planned, None) => return Err(Error::Unsuited("there is no plan to choose by")),
            (Self::Auto, _) => Choice::Builtin,
        };
        let own = stream.try_clone().map_err(|source| Error::Failed { call: "fcntl F_DUPFD", source })?;
        Ok(Opened::Chosen(Box::new(Sender::with(own, Settings { choice, ..Settings::default() })?)))
    }
}

impl From<Path> for Way {
    fn from(path: Path) -> Self {
        Self::Path(path)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A name that nothing has.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("unknown path {0:?}; the paths are {names}", names = Way::all().into_iter().map(Way::name).collect::<Vec<_>>().join(", "))]
pub struct UnknownWay(String);

impl FromStr for Way {
    type Err = UnknownWay;

    fn from_str(text: &str) -> Result<Self, UnknownWay> {
        Self::all()
            .into_iter()
            .chain([Self::Planned])
            .find(|way| way.name() == text)
            .ok_or_else(|| UnknownWay(text.into()))
    }
}

/// A way that is set up: one path, or a whole [`Sender`] that chooses. Rows differ in nothing else.
pub(crate) enum Opened {
    Path(Path, Box<dyn SendPath>),
    Chosen(Box<Sender<TcpStream>>),
}

impl Opened {
    /// As [`SendPath::send`].
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        source: Source<'_>,
        range: Range<u64>,
    ) -> Result<u64, Error> {
        match self {
            Self::Path(_, path) => path.send(socket, source, range),
            Self::Chosen(sender) => sender.send_file(source, range),
        }
    }

    /// As [`SendPath::settle`].
    pub(crate) fn settle(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Error> {
        match self {
            Self::Path(_, path) => path.settle(socket),
            Self::Chosen(_) => Ok(0),
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        let sender = match self {
            Self::Path(_, path) => return path.counts(),
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
    pub(crate) fn taken(&self) -> Option<Path> {
        match self {
            Self::Path(path, _) => Some(*path),
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
        for way in Way::all() {
            assert_eq!(way.name().parse(), Ok(way));
        }
        let error = "sendfil".parse::<Way>().unwrap_err().to_string();
        assert!(error.contains("sendfil") && error.contains("auto"), "{error}");
    }
}
