//! A transfer, as either end runs it.

use crate::destination::{self, AcceptedPaths};
use crate::direct::{DirectRequest, DirectStreams};
use crate::error::Error;
use crate::options::Options;
use crate::progress::Progress;
use crate::setup::Setup;
use crate::source;
use crate::summary::Summary;
use std::fmt;
use std::io::{Read, Write};

/// A transfer between this end and the end at the other side of two byte streams.
pub struct Session<R, W> {
    from: R,
    to: W,
    setup: Setup,
}

impl<R, W> fmt::Debug for Session<R, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { options, direct, .. } = &self.setup;
        let mut debug = f.debug_struct("Session");
        debug.field("options", options).field("direct", direct).finish_non_exhaustive()
    }
}

impl<R: Read + Send, W: Write + Send> Session<R, W> {
    /// A transfer through these streams.
    pub fn new(from: R, to: W, options: Options) -> Self {
        let (on_file, abort) = (Box::new(|_: &[u8]| {}), Box::new(|| {}));
        Self {
            from,
            to,
            setup: Setup {
                options,
                direct: None,
                chain: None,
                on_file,
                progress: Progress::default(),
                abort,
            },
        }
    }

    /// Sends and receives the content of files through direct streams, as soon as there are any.
    #[must_use]
    pub fn with_direct(mut self, direct: Option<DirectStreams>) -> Self {
        self.setup.direct = direct;
        self
    }

    /// Makes a destination one host of a chain, with the connections that the source asked for.
    #[must_use]
    pub fn with_chain(mut self, chain: Option<DirectRequest>) -> Self {
        self.setup.chain = chain;
        self
    }

    /// Sets where this session records how far it is.
    #[must_use]
    pub fn with_progress(mut self, progress: Progress) -> Self {
        self.setup.progress = progress;
        self
    }

    /// Sets what is called with the path of each file that is sent or received, or that a dry
    /// run would send. The path begins below the root of the transfer.
    #[must_use]
    pub fn with_on_file(mut self, on_file: impl Fn(&[u8]) + Send + Sync + 'static) -> Self {
        self.setup.on_file = Box::new(on_file);
        self
    }

    /// Sets what ends the byte streams. It is called when a direct stream failed, because a thread
    /// may wait for the byte streams then.
    #[must_use]
    pub fn with_abort(mut self, abort: impl FnOnce() + Send + 'static) -> Self {
        self.setup.abort = Box::new(abort);
        self
    }

    /// Sends these sources to the destination at the other end.
    pub fn send(self, sources: &[Vec<u8>]) -> Result<Summary, Error> {
        let progress = self.setup.progress.clone();
        let sent = source::send(self.from, self.to, sources, self.setup);
        progress.end();
        sent
    }

    /// Receives a copy from the source at the other end, into the destination that the user named.
    pub fn receive(self, destination: &[u8], accepted: &AcceptedPaths) -> Result<Summary, Error> {
        let progress = self.setup.progress.clone();
        let received = destination::receive(self.from, self.to, destination, accepted, self.setup);
        progress.end();
        received
    }
}
