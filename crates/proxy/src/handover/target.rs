//! The new process's part of a handover.

use super::COMMAND;
use crate::handover_message::{self, HandedConnection, HandedUpstream, Message, Receipts, VERSION};
use crate::loop_state::Shared;
use crate::mailbox::Mailboxes;
use haul_server::fd_channel::FdChannel;
use haul_server::unix_address::abstract_name;
use haul_server::{Address, Control};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// The time in which the old process must send each message until it agrees, and the bytes of a
/// connection.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The time between the end of a process's sockets and the end of the process.
const END_TIME_MAX: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The time in which the kernel closes the sockets of a killed process.
pub const CLOSE_TIME_MAX: Duration = Duration::from_secs(1);
/// The interval in which the end of a listening socket is noticed.
pub const CLOSE_INTERVAL: Duration = Duration::from_millis(5);

/// The message if the old process ends during an upgrade.
pub const SOURCE_ENDED: &str = "the old process ended during the upgrade: its connections are \
                                lost, and this process accepts clients";

/// Takes a proxy over from another process.
#[derive(Debug)]
pub struct HandoverTarget {
    channel: Arc<FdChannel>,
    source: SourceProcess,
    room: ClientRoom,
}

/// The process that hands over.
#[derive(Debug)]
enum SourceProcess {
    Running(OwnedFd),
    Ended,
    /// The process is not visible from this PID namespace.
    Unknown,
}

impl SourceProcess {
    fn of(channel: &FdChannel) -> Self {
        let pid = channel.creator().ok().flatten();
        let Some(pid) = pid.and_then(|pid| Pid::from_raw(pid.get().cast_signed())) else {
            return Self::Unknown;
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => Self::Running(process),
            Err(Errno::SRCH) => Self::Ended,
            Err(_) => Self::Unknown,
        }
    }

    /// Whether this error is the consequence of the process's end. A process that is killed closes
    /// its sockets just before its end.
    fn has_ended_by(&self, error: &io::Error) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        if !matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) {
            return false;
        }
        match self {
            Self::Running(process) => {
                let mut waited = [PollFd::new(process, PollFlags::IN)];
                let polled = retry_on_intr(|| poll(&mut waited, Some(&END_TIME_MAX)));
                polled.is_ok_and(|count| count > 0)
            }
            Self::Ended => true,
            Self::Unknown => false,
        }
    }
}

/// The state of the old process, which arrives before the new process starts.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    /// The listening sockets, by the addresses that the other process was given.
    pub listeners: Vec<(Address, Arc<OwnedFd>)>,
    /// The listening socket of the metrics.
    pub metrics: Option<Arc<TcpListener>>,
    /// The listening control socket.
    pub control: Option<OwnedFd>,
    pub upstreams: Vec<HandedUpstream>,
    /// The number of clients that were connected to the other process.
    pub clients: usize,
}

/// The number of clients for which this process has descriptors.
#[derive(Debug, Clone, Copy)]
pub struct ClientRoom(pub usize);

impl ClientRoom {
    /// Returns an error if the process lacks descriptors for this number of clients.
    pub fn check(self, clients: usize) -> io::Result<()> {
        if clients <= self.0 {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "it has {clients} clients, and the limit of open files allows this process {}: raise \
             the limit (ulimit -n, LimitNOFILE=)",
            self.0
        )))
    }
}

impl InheritedSockets {
    /// Forgets the sockets whose files the other process removed at its end, because no client can
    /// connect to these sockets. The control socket has the file `control`.
    fn forget_removed(&mut self, control: &Path) {
        self.listeners.retain(|(address, _)| match address {
            Address::Unix(path) => abstract_name(path).is_some() || path.exists(),
            _ => true,
        });
        self.control.take_if(|_| !control.exists());
    }

    /// A sentence about the addresses at which only the other process listens.
    pub fn given_up(&self, addresses: &[&Address]) -> Option<String> {
        let listeners = self.listeners.iter().map(|(address, _)| address);
        let given_up = listeners.filter(|address| !addresses.contains(address));
        let given_up: Vec<_> = given_up.map(ToString::to_string).collect();
        (!given_up.is_empty()).then(|| {
            let given_up = given_up.join(", ");
            format!(
                "the proxy that is taken over also listens at {given_up}, and this one does not"
            )
        })
    }

    /// A sentence about the congestion control that the listening sockets of these addresses keep,
    /// if the operator wants another congestion control; `wanted` is `None` for the host's default.
    pub fn kept_congestion(&self, addresses: &[&Address], wanted: Option<&str>) -> Option<String> {
        let default = || fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").ok();
        let wanted = wanted.map(str::to_owned).or_else(default)?;
        let listeners = self.listeners.iter();
        let mut kept = listeners.filter(|(address, _)| addresses.contains(&address));
        let kept = kept.find_map(|(_, socket)| {
            // A Unix socket does not have a congestion control.
            sockopt::tcp_congestion(socket).ok().filter(|kept| kept != wanted.trim())
        })?;
        Some(format!(
            "connections of clients keep the congestion control {kept}: the listening sockets are \
             taken over, and only a restart changes it"
        ))
    }
}

/// Whether no process listens at a control socket soon. A process that refuses an upgrade goes on
/// listening. The kernel closes the sockets of a killed process one after the other, so the
/// listening socket may be closed later than a connection.
fn stops_listening(path: &Path) -> bool {
    let deadline = Instant::now() + CLOSE_TIME_MAX;
    loop {
        if UnixStream::connect(path).is_err() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(CLOSE_INTERVAL);
    }
}

impl HandoverTarget {
    /// Asks the proxy with this control socket for a handover. The target is `None` if that proxy
    /// ended while it sent its state. Then the listening sockets that arrived are still returned,
    /// because clients may be connected to these sockets. The error is
    /// [`io::ErrorKind::ConnectionAborted`] if that proxy ended before it sent anything.
    pub fn connect(path: &Path, room: ClientRoom) -> io::Result<(Option<Self>, InheritedSockets)> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let asked = writeln!(stream, "{COMMAND}");
        let channel = asked.and_then(|()| FdChannel::receive_through(&stream));
        let channel = channel.map_err(|error| {
            use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
            let is_end = matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
            let has_ended = is_end && stops_listening(path);
            if has_ended { io::ErrorKind::ConnectionAborted.into() } else { error }
        })?;
        channel.set_timeouts(Some(ANSWER_TIMEOUT), Some(ANSWER_TIMEOUT))?;
        let source = SourceProcess::of(&channel);
        let target = Self { channel: Arc::new(channel), source, room };
        let mut inherited = InheritedSockets::default();
        match target.receive_state(&mut inherited) {
            Ok(()) => {
                room.check(inherited.clients)?;
                Ok((Some(target), inherited))
            }
            Err(error) if target.source.has_ended_by(&error) => {
                inherited.forget_removed(path);
                Ok((None, inherited))
            }
            Err(error) => Err(error),
        }
    }

    /// Receives what this process needs to start.
    fn receive_state(&self, inherited: &mut InheritedSockets) -> io::Result<()> {
        let channel = &self.channel;
        match handover_message::receive(channel)?.ok_or(io::ErrorKind::UnexpectedEof)?.0 {
            Message::Version(VERSION) => {}
            Message::Version(version) => {
                let problem =
                    format!("it hands over by version {version}, and this one by {VERSION}");
                return Err(io::Error::other(problem));
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        loop {
            let (message, descriptors) =
                handover_message::receive(channel)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let descriptor = descriptors.into_iter().next();
            match message {
                Message::Listener { address } => {
                    let address = address.parse().map_err(io::Error::other)?;
                    inherited.listeners.extend(descriptor.map(|one| (address, Arc::new(one))));
                }
                Message::Metrics => inherited.metrics = descriptor.map(|one| Arc::new(one.into())),
                Message::Control => inherited.control = descriptor,
                Message::Upstream(upstream) => inherited.upstreams.push(upstream),
                Message::Clients(clients) => inherited.clients = clients,
                Message::Ready => return Ok(()),
                Message::Version(_)
                | Message::Started { .. }
                | Message::Open(_)
                | Message::Ended(_)
                | Message::OpenClients(_)
                | Message::EndedClients(_)
                | Message::Agreed { .. }
                | Message::Adopted(_)
                | Message::Connection(_) => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    /// Tells the other process that this process is about to accept connections. A thread then
    /// receives the connections for the event loops, until the other process ends.
    ///
    /// After an error the other process goes on as before. If the other process was killed, its
    /// connections are lost, and this process serves without them. `files` are the files of the
    /// Unix sockets that this process took over: a process that ends in order removes the files,
    /// and then this process does not go on.
    pub fn start(
        self,
        shared: Shared,
        mailboxes: Arc<Mailboxes>,
        control: Arc<Control>,
        listeners: Vec<String>,
        files: &[PathBuf],
    ) -> io::Result<()> {
        if let Err(error) = self.agree(&shared, listeners) {
            if self.source.has_ended_by(&error) && files.iter().all(|file| file.exists()) {
                shared.give_up_reserved();
                warn!("{SOURCE_ENDED}");
                return Ok(());
            }
            return Err(match error.kind() {
                io::ErrorKind::BrokenPipe => {
                    io::Error::other("it has ended, or has not waited for this start any longer")
                }
                io::ErrorKind::UnexpectedEof => io::Error::other("it does not hand over any more"),
                _ => error,
            });
        }
        // The other process may take any time for a connection that it cannot give up yet.
        self.channel.set_timeouts(None, None)?;
        mailboxes.set_expects_connections(true);
        shared.has_predecessor.store(true, SeqCst);
        control.set_has_predecessor(true);
        thread::Builder::new().name("haul-handover".into()).spawn(move || {
            let adopted = self.take(&shared, &mailboxes);
            match &adopted {
                Ok(count) => info!(connections = count, "connections taken over: {count}"),
                Err(error) => error!(%error, "taking over connections has failed: {error}"),
            }
            // If a process failed, the other process keeps the connections that were not sent. It
            // leaves the control socket to this process until the channel is closed.
            let _ = self.channel.refuse();
            shared.give_up_reserved();
            mailboxes.set_expects_connections(false);
            let _ = self.channel.wait_for_end(None);
            shared.has_predecessor.store(false, SeqCst);
            control.set_has_predecessor(false);
        })?;
        Ok(())
    }

    /// Agrees with the other process that this process accepts from now on.
    fn agree(&self, shared: &Shared, listeners: Vec<String>) -> io::Result<()> {
        handover_message::send(&self.channel, &Message::Started { listeners }, &[])?;
        loop {
            match handover_message::receive(&self.channel)? {
                Some((Message::Open(open), _)) => shared.reserve(&open),
                Some((Message::OpenClients(clients), _)) => {
                    self.room.check(clients)?;
                    shared.placement.keep(clients);
                }
                Some((Message::Agreed { next_id }, _)) => {
                    shared.next_id.store(next_id, Relaxed);
                    return Ok(());
                }
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(_) => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    fn take(&self, shared: &Shared, mailboxes: &Mailboxes) -> io::Result<usize> {
        // The old process does not send connections before this message.
        handover_message::send(&self.channel, &Message::Adopted(0), &[])?;
        let mut count = 0;
        let receipts = Receipts::new(&self.channel);
        while let Some((message, sockets)) = handover_message::receive(&self.channel)? {
            match message {
                Message::Connection(connection) => {
                    // The bytes of the connection follow at once.
                    let has_bytes = connection.has_bytes();
                    if has_bytes {
                        self.channel.set_timeouts(None, Some(ANSWER_TIMEOUT))?;
                    }
                    let mut connection =
                        HandedConnection::receive(&self.channel, *connection, sockets)?;
                    if has_bytes {
                        self.channel.set_timeouts(None, None)?;
                    }
                    connection.slot = shared.take_reserved(&connection.message);
                    connection.place = Some(shared.placement.occupy_kept());
                    connection.receipt = Some(receipts.next());
                    mailboxes.adopt(connection);
                    count += 1;
                }
                Message::Ended(ended) => {
                    shared.reserved.release(&ended.group, &ended.upstream, ended.connections);
                }
                Message::EndedClients(clients) => shared.placement.give_up_kept(clients),
                _ => {}
            }
        }
        Ok(count)
    }
}
