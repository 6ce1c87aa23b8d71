//! The forwarding worker: accepts a connection, opens another, and forwards bytes both ways.

use super::{Message, Outcome, WorkCounters, failed, failure_message, tls_forwarder};
use crate::forward_method::TestedForwardMethod;
use crate::tls_records;
use haul::{
    Counts, DirectionReport, ForwardMethod, ForwardPool, ForwardSettings, Forwarder, Readiness,
    Step,
};
use haul_lab_sys::sockmap::Sockmap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

/// Parameters of a forwarding task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ForwardTask {
    /// The forward method.
    pub by: TestedForwardMethod,
    /// Size of the pipe or the buffer; `None` for the library's default.
    pub buffer_bytes: Option<usize>,
}

impl ForwardTask {
    /// Forwards until both directions have ended.
    pub fn run(
        &self,
        from: &TcpStream,
        to: &TcpStream,
        counters: &WorkCounters,
    ) -> Result<Outcome, Message> {
        for socket in [from, to] {
            super::set_nodelay(socket)?;
        }
        let defaults = ForwardSettings::default();
        let method = match self.by {
            TestedForwardMethod::Sockmap => {
                join_in_kernel(from, to)?;
                return counters.outcome();
            }
            TestedForwardMethod::TlsCopy => {
                let buffer_bytes = self.buffer_bytes.unwrap_or(defaults.buffer_bytes);
                return tls_forwarder::run(from, to, buffer_bytes, counters);
            }
            TestedForwardMethod::Copy | TestedForwardMethod::KtlsCopy => ForwardMethod::Copy,
            TestedForwardMethod::Splice | TestedForwardMethod::KtlsSplice => ForwardMethod::Splice,
            TestedForwardMethod::Auto => ForwardMethod::Adaptive,
        };
        if self.by.ends_tls() {
            tls_records::open_in_kernel(from).map_err(|error| {
                Message::Refused(format!(
                    "the kernel cannot decrypt: {error} (load the kernel module tls)"
                ))
            })?;
        }
        let settings = defaults
            .with_method(method)
            .with_pipe_bytes(self.buffer_bytes.unwrap_or(defaults.pipe_bytes))
            .with_buffer_bytes(self.buffer_bytes.unwrap_or(defaults.buffer_bytes));
        let pool = ForwardPool::with_settings(settings).map_err(|error| failure_message(&error))?;
        for socket in [from, to] {
            socket
                .set_nonblocking(true)
                .map_err(|error| failed("making a socket non-blocking", error))?;
        }
        let mut forwarder =
            Forwarder::with_pool(from, to, pool).map_err(|error| failure_message(&error))?;
        loop {
            let step = forwarder.step().map_err(|error| failure_message(&error))?;
            let report = forwarder.report();
            let sum = |of: fn(&DirectionReport) -> Counts| {
                let (forward, reverse) = (of(&report.a_to_b), of(&report.b_to_a));
                (forward.bytes + reverse.bytes, forward.calls + reverse.calls)
            };
            let ((spliced, splices), (copied, copies)) =
                (sum(|direction| direction.spliced), sum(|direction| direction.copied));
            counters.bytes.store(spliced + copied, Relaxed);
            counters.spliced_bytes.store(spliced, Relaxed);
            counters.calls.store(splices + copies, Relaxed);
            match step {
                Step::Done => return counters.outcome(),
                Step::Yield => {}
                Step::Wait { a: from_readiness, b: to_readiness } => {
                    wait([(from, from_readiness), (to, to_readiness)])?;
                }
            }
        }
    }
}

fn wait(sockets: [(&TcpStream, Readiness); 2]) -> Result<(), Message> {
    let mut poll_fds: Vec<PollFd<'_>> = sockets
        .iter()
        .filter(|(_, readiness)| *readiness != Readiness::default())
        .map(|(socket, readiness)| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, readiness.read);
            events.set(PollFlags::OUT, readiness.write);
            PollFd::from_borrowed_fd(socket.as_fd(), events)
        })
        .collect();
    poll_for(&mut poll_fds, None)
}

fn poll_for(poll_fds: &mut [PollFd<'_>], timeout: Option<&Timespec>) -> Result<(), Message> {
    match poll(poll_fds, timeout) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(failed("poll", errno)),
    }
}

/// Joins the sockets in the kernel (sockmap) until the peer that connected closes its end, then
/// shuts down the other connection.
fn join_in_kernel(from: &TcpStream, to: &TcpStream) -> Result<(), Message> {
    /// Time for the kernel to deliver the rest of its own queue after the source has ended. The
    /// window is over by then.
    const DRAIN_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let sockmap = Sockmap::join(from, to).map_err(|error| {
        Message::Refused(format!("the kernel refuses to join the sockets: {error} (run as root)"))
    })?;
    poll_for(&mut [PollFd::new(from, PollFlags::RDHUP)], None)?;
    poll_for(&mut [], Some(&DRAIN_TIME))?;
    // Shutdown fails if the peer has already closed the connection, which needs no handling.
    let _ = to.shutdown(Shutdown::Write);
    drop(sockmap);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls_records::RecordSealer;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// Sends the plaintext as records of mixed sizes. None is empty: splice(2) returns 0 for an
    /// empty record, as at the end of the stream, and the library then receives once.
    fn send_records(source: &mut TcpStream, plaintext: &[u8]) {
        let mut sealer = RecordSealer::default();
        let sizes = [1, 700, 1 << 14, 5, 1 << 14].into_iter().cycle();
        let mut rest = plaintext;
        for size in sizes {
            let (part, behind) = rest.split_at(size.min(rest.len()));
            source.write_all(&sealer.seal(part).unwrap()).unwrap();
            rest = behind;
            if rest.is_empty() {
                return;
            }
        }
    }

    #[test]
    fn every_method_that_ends_tls_forwards_the_plaintext() {
        let plaintext: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        let has_ktls = tls_records::open_in_kernel(connection().0);
        for by in TestedForwardMethod::ALL.into_iter().filter(|method| method.ends_tls()) {
            if let (true, Err(error)) = (by != TestedForwardMethod::TlsCopy, &has_ktls) {
                eprintln!("SKIPPED: {by}: this kernel has no TLS: {error}");
                continue;
            }
            let ((mut source, from), (to, mut sink)) = (connection(), connection());
            let counters = WorkCounters::default();
            let received = thread::scope(|scope| {
                let forwarding = scope.spawn(|| {
                    let task = ForwardTask { by, buffer_bytes: Some(64 << 10) };
                    task.run(&from, &to, &counters)
                });
                scope.spawn(|| {
                    send_records(&mut source, &plaintext);
                    source.shutdown(Shutdown::Write).unwrap();
                });
                let mut received = Vec::new();
                sink.read_to_end(&mut received).unwrap();
                sink.shutdown(Shutdown::Write).unwrap();
                // No window is measured here.
                let Err(Message::Failed(reason)) = forwarding.join().unwrap() else {
                    panic!("{by} has measured a window");
                };
                assert!(reason.contains("before the window"), "{by}: {reason}");
                received
            });
            assert!(received == plaintext, "{by}: {} bytes", received.len());
            let spliced = counters.spliced_bytes.load(Relaxed);
            let is_spliced = by == TestedForwardMethod::KtlsSplice;
            assert_eq!(counters.bytes.load(Relaxed), plaintext.len() as u64, "{by}");
            assert_eq!(spliced, if is_spliced { plaintext.len() as u64 } else { 0 }, "{by}");
        }
    }
}
