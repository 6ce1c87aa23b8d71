//! A transfer, as either end runs it.

use crate::destination::{self, AcceptedNames};
use crate::direct::DirectStreams;
use crate::error::Error;
use crate::options::Options;
use crate::source;
use crate::summary::Summary;
use std::fmt;
use std::io::{Read, Write};

/// A transfer between this end and the end at the other side of two byte streams.
pub struct Session<R, W> {
    from: R,
    to: W,
    options: Options,
    direct: Option<DirectStreams>,
    abort: Box<dyn FnOnce() + Send>,
}

impl<R, W> fmt::Debug for Session<R, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Session");
        debug.field("options", &self.options).field("direct", &self.direct).finish_non_exhaustive()
    }
}

impl<R: Read + Send, W: Write + Send> Session<R, W> {
    /// A transfer through these streams.
    pub fn new(from: R, to: W, options: Options) -> Self {
        Self { from, to, options, direct: None, abort: Box::new(|| {}) }
    }

    /// Sends and receives the content of files through direct streams, as soon as there are any.
    #[must_use]
    pub fn with_direct(mut self, direct: Option<DirectStreams>) -> Self {
        self.direct = direct;
        self
    }

    /// Sets what ends the byte streams. It is called when a direct stream failed, because a thread
    /// may wait for the byte streams then.
    #[must_use]
    pub fn with_abort(mut self, abort: impl FnOnce() + Send + 'static) -> Self {
        self.abort = Box::new(abort);
        self
    }

    /// Sends these sources to the destination at the other end.
    pub fn send(self, sources: &[Vec<u8>]) -> Result<Summary, Error> {
        let Self { from, to, options, direct, abort } = self;
        source::send(from, to, sources, options, direct.as_ref(), abort)
    }

    /// Receives a copy from the source at the other end, into the destination that the user named.
    pub fn receive(self, destination: &[u8], names: AcceptedNames<'_>) -> Result<Summary, Error> {
        let Self { from, to, options, direct, abort } = self;
        destination::receive(from, to, destination, names, options, direct.as_ref(), abort)
    }
}
