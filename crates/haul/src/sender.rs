//! A socket and the path it is sent through, stepping down where it must.

use crate::error::PathError;
use crate::path::{Counts, Options, Path, SendPath};
use crate::source::Source;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Bytes that a path may promise not to copy and copy after all before it is given up.
const COPIED_BYTES_BEFORE_DEMOTION: u64 = 1 << 20;
/// How often a wait for the kernel's word looks again. A wait is the end of a transfer, not its rhythm.
const SETTLE_INTERVAL: Duration = Duration::from_millis(1);

/// Sends through the best path that the kernel allows for this socket.
pub struct Sender<S: AsFd> {
    socket: S,
    options: Options,
    path: Path,
    current: Box<dyn SendPath>,
    /// Paths that were stepped down from: the kernel may still hold pages that they lent.
    retired: Vec<(Path, Box<dyn SendPath>)>,
    demotions: Vec<Demotion>,
}

/// A step down from one path to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demotion {
    /// The path that was given up.
    pub from: Path,
    /// The one taken instead.
    pub to: Path,
    /// Why, in words.
    pub reason: String,
}

/// What a sender has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// What each path that was used has done, in the order of their use.
    pub paths: Vec<(Path, Counts)>,
    /// Every step down, in order.
    pub demotions: Vec<Demotion>,
}

impl<S: AsFd> Sender<S> {
    /// Sends through `sendfile`, or what it steps down to: the cheapest path for files on every kernel
    /// measured so far (docs/findings.md).
    pub fn new(socket: S) -> Result<Self, PathError> {
        Self::with_path(socket, Path::Sendfile, Options::default())
    }

    /// Sends through `path`, or what it steps down to.
    pub fn with_path(socket: S, path: Path, options: Options) -> Result<Self, PathError> {
        let mut demotions = Vec::new();
        let (path, current) = open_or_step_down(path, socket.as_fd(), &options, &mut demotions)?;
        Ok(Self { socket, options, path, current, retired: Vec::new(), demotions })
    }

    /// The path in use.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Sends the beginning of `range`; returns the bytes the socket took, 0 only for an empty range.
    ///
    /// A path that the kernel refuses, or that copies although it should not, is stepped down from, and the
    /// same bytes go through the next one. Only errors that no path could avoid come back.
    pub fn send(&mut self, source: &Source, range: Range<u64>) -> Result<u64, PathError> {
        if range.is_empty() {
            return Ok(0);
        }
        loop {
            match self.current.send(self.socket.as_fd(), source, range.clone()) {
                Err(error @ (PathError::Refused { .. } | PathError::Unsuited(_))) => {
                    self.step_down(error)?;
                }
                Err(error) => return Err(error),
                Ok(sent) => {
                    self.give_up_copying_path();
                    return Ok(sent);
                }
            }
        }
    }

    /// Sends the whole `range`. For blocking sockets: on another, [`PathError::WouldBlock`] does not say how
    /// far it came.
    pub fn send_all(&mut self, source: &Source, mut range: Range<u64>) -> Result<(), PathError> {
        while !range.is_empty() {
            range.start += self.send(source, range.clone())?;
        }
        Ok(())
    }

    /// Waits until the kernel holds none of the pages it was lent, at most `timeout`; returns how many sends
    /// it still holds.
    pub fn settle(&mut self, timeout: Duration) -> Result<usize, PathError> {
        let deadline = Instant::now() + timeout;
        loop {
            let mut held = self.current.settle(self.socket.as_fd())?;
            for (_, path) in &mut self.retired {
                held += path.settle(self.socket.as_fd())?;
            }
            if held == 0 || Instant::now() >= deadline {
                return Ok(held);
            }
            std::thread::sleep(SETTLE_INTERVAL);
        }
    }

    /// What has been done so far, path by path.
    pub fn report(&self) -> Report {
        let retired = self.retired.iter().map(|(path, sender)| (*path, sender.counts()));
        Report {
            paths: retired.chain([(self.path, self.current.counts())]).collect(),
            demotions: self.demotions.clone(),
        }
    }

    /// The socket.
    pub fn socket(&self) -> &S {
        &self.socket
    }

    fn step_down(&mut self, reason: PathError) -> Result<(), PathError> {
        let Some(next) = self.path.steps_down_to() else { return Err(reason) };
        let mut demotions = vec![Demotion { from: self.path, to: next, reason: reason.to_string() }];
        let (path, current) = open_or_step_down(next, self.socket.as_fd(), &self.options, &mut demotions)?;
        self.demotions.extend(demotions);
        self.retired.push((self.path, std::mem::replace(&mut self.current, current)));
        self.path = path;
        Ok(())
    }

    /// A path that only copies is given up for a cheaper one. If none can be opened it goes on, dearer but
    /// sound.
    fn give_up_copying_path(&mut self) {
        let counts = self.current.counts();
        if counts.copied_bytes >= COPIED_BYTES_BEFORE_DEMOTION && counts.zero_copied_bytes == 0 {
            let _ =
                self.step_down(PathError::Unsuited("the kernel copied all that was to go without a copy"));
        }
    }
}

fn open_or_step_down(
    mut path: Path,
    socket: BorrowedFd<'_>,
    options: &Options,
    demotions: &mut Vec<Demotion>,
) -> Result<(Path, Box<dyn SendPath>), PathError> {
    loop {
        match (path.open(socket, options), path.steps_down_to()) {
            (Err(reason @ PathError::Refused { .. }), Some(next)) => {
                demotions.push(Demotion { from: path, to: next, reason: reason.to_string() });
                path = next;
            }
            (opened, _) => return Ok((path, opened?)),
        }
    }
}
