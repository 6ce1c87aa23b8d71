//! Sends to several hosts at a time, which pass the content on from host to host.
//!
//! Every host gets the lists through its own control stream (ssh, or TLS in a job). The content
//! goes to the first host of the chain. A file is sent if one host requests the file.

mod broadcast;
mod chain_writer;
mod comparisons;
mod list_writer;
mod members;
mod moves;
mod rate;
mod slowness;
mod state;

use crate::chain::{FrameQueue, Link};
use crate::direct::{DirectAnswer, DirectRequest, Notice};
use crate::error::Error;
use crate::frame::FrameReader;
use crate::message::{ToDestination, ToSource};
use crate::options::Options;
use crate::progress::{Progress, REPORT_INTERVAL};
use crate::setup::OnFile;
use crate::source::SourceSession;
use crate::source::content::{ContentSender, ContentSettings};
use crate::source::jobs::{Jobs, StreamKind};
use crate::source::pace::Pace;
use crate::summary::Summary;
use broadcast::{Broadcast, Messages};
use chain_writer::ChainWriter;
use list_writer::ListWriter;
use members::Members;
use std::fmt;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// The interval at which the hosts are examined.
const EXAMINE_INTERVAL: Duration = Duration::from_millis(100);
/// The time for hosts that have the copy to end.
const END_TIME_MAX: Duration = Duration::from_secs(5);
/// The interval at which it is noticed that all hosts ended.
const END_INTERVAL: Duration = Duration::from_millis(20);

/// A host that is ready to receive.
pub struct Host<R, W> {
    /// The host as the user named it.
    pub name: String,
    /// Whether this is the host of the source, which the network does not reach.
    pub is_local: bool,
    /// The control stream from the host.
    pub from: R,
    /// The control stream to the host.
    pub to: W,
    /// What the host answered about connections; `None` in a dry run.
    pub answer: Option<DirectAnswer>,
    /// Ends both streams.
    pub abort: Box<dyn FnOnce() + Send>,
}

impl<R, W> fmt::Debug for Host<R, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How the transfer to a host ended.
#[derive(Debug)]
pub struct HostResult {
    /// The host as the user named it.
    pub name: String,
    /// The end.
    pub end: HostEnd,
}

/// How the transfer to a host ended.
#[derive(Debug)]
pub enum HostEnd {
    /// The host has the copy, but for the errors in the summary.
    Complete(Box<Summary>),
    /// The host failed, for this reason.
    Failed(String),
    /// The host was much slower than the others, so that they went on without the host.
    Slow(String),
}

/// Sends these sources to all hosts. The content goes through connections of this request; `None`
/// in a dry run.
///
/// The failure of a host does not end the transfer to the others. Fails if the sources cannot be
/// sent to any host.
pub fn send_to_all<R: Read + Send, W: Write + Send>(
    hosts: Vec<Host<R, W>>,
    request: Option<&DirectRequest>,
    sources: &[Vec<u8>],
    options: Options,
    progress: &Progress,
    on_file: OnFile,
    notice: Notice,
) -> Result<Vec<HostResult>, Error> {
    let (jobs, pace) = (Jobs::default(), Pace::new(options.rate_max));
    let settings = ContentSettings::new(&options, pace, on_file, progress.clone())?;
    let (queue, sent) = (FrameQueue::new(true), AtomicU64::new(0));
    let link = request.map(|request| Link::new(request.clone()));
    let (broadcast, streams) = Broadcast::new(hosts.len());
    let chain = link.as_ref().map(|link| (link, &queue));
    let members = Members::new(&hosts, &jobs, progress, &broadcast, chain, notice);
    let open = AtomicUsize::new(hosts.len());
    let result = thread::scope(|scope| {
        for (number, (host, messages)) in hosts.into_iter().zip(streams).enumerate() {
            start_host(scope, host, messages, (&members, number), &open);
        }
        members.order_all();
        scope.spawn(|| {
            while progress.wait(REPORT_INTERVAL) {
                // The message fits into a frame.
                let _ = broadcast.send(&ToDestination::Times(progress.own_times()));
            }
        });
        scope.spawn(|| {
            while progress.wait(EXAMINE_INTERVAL) {
                members.examine();
            }
        });
        if let Some(link) = &link {
            scope.spawn(|| link.run(&queue));
            jobs.begin_direct();
            jobs.set_working_max(1);
            scope.spawn(|| {
                let (kind, to) = (StreamKind::Direct, ChainWriter::new(&queue));
                ContentSender::new(&jobs, kind, &settings, to, &sent, u64::MAX).run();
            });
        }
        let lists = ListWriter { broadcast: &broadcast, members: &members };
        let session = SourceSession::new(lists, &jobs, sources, options, &settings);
        let result = session.run();
        jobs.end();
        progress.end();
        if let Some(link) = &link {
            link.close(&queue);
        }
        members.end();
        broadcast.close();
        // A host that has the copy ends by itself, unless its connection is cut.
        let deadline = Instant::now() + if result.is_ok() { END_TIME_MAX } else { Duration::ZERO };
        while open.load(Relaxed) > 0 && Instant::now() < deadline {
            thread::sleep(END_INTERVAL);
        }
        members.abort();
        result
    });
    let results = members.into_results();
    match result {
        // The hosts name the reasons.
        Err(Error::Connection(_)) | Ok(_) => Ok(results),
        Err(error) => Err(error),
    }
}

/// Starts the threads that write and read the streams of a host.
fn start_host<'s, R: Read + Send + 's, W: Write + Send + 's>(
    scope: &'s Scope<'s, '_>,
    host: Host<R, W>,
    messages: Messages,
    (members, number): (&'s Members<'_>, usize),
    open: &'s AtomicUsize,
) {
    let Host { from, to, abort, .. } = host;
    members.set_abort(number, abort);
    scope.spawn(move || {
        if let Err(error) = broadcast::write(&messages, to) {
            members.fail(number, &error);
        }
    });
    scope.spawn(move || {
        take_answers(from, members, number);
        open.fetch_sub(1, Relaxed);
    });
}

/// Takes the answers of a host, up to the end of its stream.
fn take_answers(from: impl Read, members: &Members<'_>, number: usize) {
    let mut frames = FrameReader::new(from);
    let error = loop {
        match frames.next::<ToSource>() {
            Ok(Some((answer, _))) => members.take(number, answer),
            Ok(None) => break Error::Connection(std::io::ErrorKind::UnexpectedEof.into()),
            Err(error) => break error,
        }
    };
    members.fail(number, &error);
}
