//! The process in the middle: accepts a connection, makes one, and passes on what comes from either.

use super::{Message, Outcome, Tally, failed, stopped};
use crate::forward::method::TestedForwardMethod;
use haul::{
    Counts, DirectionReport, ForwardMethod, ForwardPool, ForwardSettings, Forwarder, Readiness,
    Step,
};
use haul_sys::sockmap::Sockmap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

/// How to forward.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Forwarding {
    pub by: TestedForwardMethod,
    /// The pipe's or the buffer's size; `None` for the library's own.
    pub buffer_bytes: Option<usize>,
}

impl Forwarding {
    /// Forwards until both sides have ended.
    pub(super) fn run(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        tally: &Tally,
    ) -> Result<Outcome, Message> {
        for socket in [from, to] {
            super::set_nodelay(socket)?;
        }
        let way = match self.by {
            TestedForwardMethod::Sockmap => {
                join_in_kernel(from, to)?;
                return tally.outcome();
            }
            TestedForwardMethod::Copy => ForwardMethod::Copy,
            TestedForwardMethod::Splice => ForwardMethod::Splice,
            TestedForwardMethod::Auto => ForwardMethod::Adaptive,
        };
        let basis = ForwardSettings::default();
        let settings = ForwardSettings {
            way,
            pipe_bytes: self.buffer_bytes.unwrap_or(basis.pipe_bytes),
            buffer_bytes: self.buffer_bytes.unwrap_or(basis.buffer_bytes),
            ..basis
        };
        let pool = ForwardPool::with(settings).map_err(|error| stopped(&error))?;
        for socket in [from, to] {
            socket
                .set_nonblocking(true)
                .map_err(|error| failed("making a socket non-blocking", error))?;
        }
        let mut forwarder =
            Forwarder::with_pool(from, to, pool).map_err(|error| stopped(&error))?;
        loop {
            let step = forwarder.step().map_err(|error| stopped(&error))?;
            let report = forwarder.report();
            let sum = |of: fn(&DirectionReport) -> Counts| {
                let (there, back) = (of(&report.there), of(&report.back));
                (there.bytes + back.bytes, there.calls + back.calls)
            };
            let ((spliced, splices), (copied, copies)) =
                (sum(|direction| direction.spliced), sum(|direction| direction.copied));
            tally.bytes.store(spliced + copied, Relaxed);
            tally.spliced_bytes.store(spliced, Relaxed);
            tally.calls.store(splices + copies, Relaxed);
            match step {
                Step::Done => return tally.outcome(),
                Step::Again => {}
                Step::Wait { from: one, to: other } => wait([(from, one), (to, other)])?,
            }
        }
    }
}

fn wait(sockets: [(&TcpStream, Readiness); 2]) -> Result<(), Message> {
    let mut wanted: Vec<PollFd<'_>> = sockets
        .iter()
        .filter(|(_, readiness)| *readiness != Readiness::default())
        .map(|(socket, readiness)| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, readiness.read);
            events.set(PollFlags::OUT, readiness.write);
            PollFd::from_borrowed_fd(socket.as_fd(), events)
        })
        .collect();
    poll_for(&mut wanted, None)
}

fn poll_for(wanted: &mut [PollFd<'_>], timeout: Option<&Timespec>) -> Result<(), Message> {
    match poll(wanted, timeout) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(failed("poll", errno)),
    }
}

/// Lets the kernel pass everything on until the one that connected has ended, then ends the other too.
fn join_in_kernel(from: &TcpStream, to: &TcpStream) -> Result<(), Message> {
    /// For what the kernel still has in its own queue when the source ends; nothing is measured any more.
    const REST: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let joined = Sockmap::join(from, to).map_err(|error| {
        Message::Refused(format!("the kernel does not join sockets here: {error} (it takes root)"))
    })?;
    poll_for(&mut [PollFd::new(from, PollFlags::RDHUP)], None)?;
    poll_for(&mut [], Some(&REST))?;
    // A socket that has gone meanwhile needs no end.
    let _ = to.shutdown(Shutdown::Write);
    drop(joined);
    Ok(())
}
