//! The old process's part of a handover.

use crate::closing::Closings;
use crate::handed::{
    self, ConnectionMessage, HandedConnection, HandedOpen, HandedUpstream, Message, VERSION,
};
use crate::handover_queue::{HandoverReceiver, handover_queue};
use crate::mailbox::{Mailboxes, Request};
use crate::routing::{CurrentTable, RoutingTable};
use crate::upstream::Upstream;
use haul_server::Control;
use haul_server::command_socket::CommandPause;
use haul_server::fd_channel::FdChannel;
use haul_server::placement::Placement;
use haul_sys::sockopt::peer_process;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{error, info};

/// The time that the new process has to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Numbers of connections that this process still accepts.
const ID_GAP: u64 = 1 << 20;
/// The time for which a handover waits until an earlier one is over.
const TAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it asks for that.
const TAKE_INTERVAL: Duration = Duration::from_millis(5);
/// The new process has failed once it has adopted none of the connections on their way for so long.
const ADOPTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval in which the new process receives the number of connections that have ended here.
const REPORT_INTERVAL: Duration = Duration::from_millis(50);
/// The time that event loops have to stop accepting: they are never busy for long.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that the new process has to take a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Hands a proxy over to another process.
#[derive(Debug)]
pub struct Giver {
    parts: Arc<Parts>,
    /// The thread of the latest handover.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a handover needs of the proxy.
#[derive(Debug)]
pub struct Parts {
    /// The listening sockets, by their configured addresses.
    pub sockets: Vec<(String, Weak<OwnedFd>)>,
    pub metrics: Option<TcpListener>,
    /// The listening control socket.
    pub control_socket: Option<OwnedFd>,
    pub closings: Arc<Closings>,
    pub table: Arc<CurrentTable>,
    /// The places of all clients.
    pub placement: Arc<Placement>,
    pub next_id: Arc<AtomicU64>,
    pub mailboxes: Arc<Mailboxes>,
    pub control: Arc<Control>,
    /// Pauses serving the control socket, which is the other process's then.
    pub commands: OnceLock<CommandPause>,
    /// Whether a handover is under way.
    pub is_busy: AtomicBool,
    /// Whether the process that this one has taken over from has not ended.
    pub has_predecessor: Arc<AtomicBool>,
}

impl Giver {
    /// The giver of a running proxy.
    pub fn new(parts: Parts) -> Self {
        Self { parts: Arc::new(parts), thread: Mutex::default() }
    }

    /// Begins a handover to the process that has asked for it through `client`. The handover goes
    /// on on a thread of its own.
    pub fn begin(&self, client: &UnixStream) -> io::Result<()> {
        if self.parts.control.is_draining() {
            let problem = "it is ending: start without --upgrade once it has";
            return Err(io::Error::other(problem));
        }
        // The process before has ended, or is about to: an operator may hand over twice in a row.
        let deadline = Instant::now() + TAKE_TIMEOUT;
        let begins = || {
            if self.parts.has_predecessor.load(SeqCst) {
                Err("it is taking over from another process: try again once that has ended")
            } else if self.parts.is_busy.swap(true, Relaxed) {
                Err("another process is taking over: try again once it has")
            } else {
                Ok(())
            }
        };
        while let Err(problem) = begins() {
            if Instant::now() >= deadline {
                return Err(io::Error::other(problem));
            }
            std::thread::sleep(TAKE_INTERVAL);
        }
        // A reload would be lost: the other process has its configuration already.
        self.parts.table.fix();
        let parts = Arc::clone(&self.parts);
        let begun = (|| {
            let (channel, other_end) = FdChannel::pair()?;
            parts.control.set_successor(peer_process(client)?);
            channel.set_timeouts(Some(SEND_TIMEOUT), Some(START_TIMEOUT))?;
            other_end.send_through(client)?;
            std::thread::Builder::new().name("haul-handover".into()).spawn(move || {
                if let Err(error) = parts.hand_over(&channel) {
                    error!(%error, "the handover has failed, and this process goes on: {error}");
                }
                if !parts.control.is_handed_over() {
                    parts.end_handover();
                }
            })
        })();
        match begun {
            Ok(thread) => {
                *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
                Ok(())
            }
            Err(error) => {
                self.parts.end_handover();
                Err(error)
            }
        }
    }

    /// Sets what pauses serving the control socket.
    pub fn set_commands(&self, commands: CommandPause) {
        // There is one server of commands.
        let _ = self.parts.commands.set(commands);
    }

    /// Whether another process is taking over: a change would be lost with this one.
    pub fn is_busy(&self) -> bool {
        self.parts.is_busy.load(Relaxed)
    }

    /// Whether another process has taken over.
    pub fn has_given(&self) -> bool {
        self.parts.control.is_handed_over()
    }

    /// Waits until connections that event loops have given up are sent.
    pub fn finish(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.parts.control.is_handed_over()
            && let Some(thread) = thread
        {
            // If it has panicked, the panic message is already printed.
            let _ = thread.join();
        }
    }
}

impl Parts {
    /// Commands and a reload may change something again.
    fn end_handover(&self) {
        self.table.release();
        self.is_busy.store(false, Relaxed);
        if let Some(commands) = self.commands.get() {
            commands.resume();
        }
    }

    fn hand_over(&self, channel: &FdChannel) -> io::Result<()> {
        self.send_state(channel)?;
        let started = handed::receive(channel).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                let seconds = START_TIMEOUT.as_secs();
                io::Error::other(format!("the new process has not started within {seconds} s"))
            }
            _ => error,
        });
        let Some((Message::Started { listeners }, _)) = started? else {
            // It has only checked, or has reported its problem itself.
            info!("another process could take over, and has only checked that, or has not started");
            return Ok(());
        };
        if self.control.is_draining() {
            return Err(io::Error::other("this process was ended meanwhile"));
        }
        let mut frozen = Frozen::freeze(self.table.get(), Arc::clone(&self.placement));
        if !self.placement.pause(PAUSE_TIMEOUT) {
            return Err(io::Error::other("an event loop does not stop accepting"));
        }
        frozen.clients_in_other_process = self.placement.open();
        self.control.set_kept_addresses(listeners);
        let given = self.give(channel, &mut frozen);
        if given.is_ok() {
            frozen.keep();
        }
        given
    }

    /// Sends the connections to the other process, which accepts from now on.
    fn give(&self, channel: &FdChannel, frozen: &mut Frozen) -> io::Result<()> {
        let (sender, mut receiver) = handover_queue()?;
        for one in &frozen.upstreams {
            handed::send(channel, &Message::Open(one.handed(one.in_other_process)), &[])?;
        }
        handed::send(channel, &Message::OpenClients(frozen.clients_in_other_process), &[])?;
        self.control.set_handed_over(true);
        if self.control.is_draining() {
            self.control.set_handed_over(false);
            return Err(io::Error::other("this process was ended meanwhile"));
        }
        // The other process takes commands from then on.
        if let Some(commands) = self.commands.get() {
            commands.pause();
        }
        let next_id = self.next_id.load(Relaxed) + ID_GAP;
        handed::send(channel, &Message::Agreed { next_id }, &[])
            .inspect_err(|_| self.control.set_handed_over(false))?;
        self.table.give();
        // Connections that cannot be sent come back.
        self.mailboxes.set_expects_connections(true);
        self.mailboxes.send_all(|| Request::HandOver(Some(sender.clone())));
        drop(sender);
        self.control.drain_resumably();
        match self.send_connections(channel, frozen, &mut receiver) {
            Ok(count) => {
                info!(connections = count, "another process has taken over; connections: {count}");
                self.control.complete_drain();
            }
            Err(error) => {
                error!(%error, "the handover has failed, and the rest stays here: {error}");
                frozen.end();
                self.keep_rest(channel, &receiver);
            }
        }
        self.mailboxes.set_expects_connections(false);
        Ok(())
    }

    /// Sends connections until no event loop has any, and the other process, which runs, has
    /// adopted them. Returns their number.
    fn send_connections(
        &self,
        channel: &FdChannel,
        frozen: &mut Frozen,
        receiver: &mut HandoverReceiver,
    ) -> io::Result<usize> {
        let (mut count, mut has_answered) = (0, false);
        let begun = Instant::now();
        let mut report_at = begun + REPORT_INTERVAL;
        loop {
            let waker = receiver.begin_wait();
            loop {
                if !has_answered {
                    // The new process may still refuse.
                    break;
                }
                match receiver.try_receive() {
                    Ok(connection) => {
                        frozen.record_handed(&connection.message);
                        self.send_connection(channel, connection)?;
                        count += 1;
                    }
                    Err(TryRecvError::Disconnected) if receiver.is_empty() => {
                        return Ok(count);
                    }
                    Err(_) => break,
                }
            }
            let until_report = report_at.saturating_duration_since(Instant::now());
            channel.wait_for_message_or(waker, until_report)?;
            let adopted = receive_adopted(channel)?;
            if adopted.is_some() && !has_answered {
                has_answered = true;
                receiver.restart_clock();
            }
            receiver.record_adopted(adopted.unwrap_or(0));
            let is_silent = !has_answered && begun.elapsed() >= ADOPTION_TIMEOUT;
            if is_silent || receiver.stalled_time() >= ADOPTION_TIMEOUT {
                let seconds = ADOPTION_TIMEOUT.as_secs();
                let problem = format!("the new process has adopted no connection for {seconds} s");
                return Err(io::Error::other(problem));
            }
            if receiver.wants_more() {
                self.mailboxes.send_all(|| Request::ContinueHandover);
            }
            if report_at <= Instant::now() {
                frozen.send_ended(channel)?;
                report_at = Instant::now() + REPORT_INTERVAL;
            }
        }
    }

    /// Returns the connections in the queue to the event loops, where they stay until they end. If
    /// the other process ends before, this one accepts clients and serves the control socket again.
    fn keep_rest(&self, channel: &FdChannel, receiver: &HandoverReceiver) {
        self.mailboxes.send_all(|| Request::HandOver(None));
        // The other process gives up what it has kept for them.
        let _ = channel.end_messages();
        while let Some(connection) = receiver.receive() {
            connection.reset_on_close();
            self.mailboxes.adopt(connection);
        }
        while !channel.wait_for_end(Some(REPORT_INTERVAL)).unwrap_or(true) {
            if self.placement.open() == 0 {
                self.control.drain();
            }
            if !self.control.may_resume() {
                self.mailboxes.set_expects_connections(false);
            }
            if self.mailboxes.are_closed() {
                return;
            }
        }
        self.control.set_successor(None);
        self.control.set_handed_over(false);
        if self.control.resume() {
            info!("the process that was taking over has ended: clients are accepted here again");
        }
    }

    /// Sends a connection. One that cannot be sent comes back to the event loops.
    fn send_connection(&self, channel: &FdChannel, connection: HandedConnection) -> io::Result<()> {
        if let Err(error) = connection.send_message(channel) {
            self.mailboxes.adopt(connection);
            return Err(error);
        }
        connection.send_bytes(channel).inspect_err(|_| {
            // The other process has a part of it.
            connection.reset();
        })
    }

    fn send_state(&self, channel: &FdChannel) -> io::Result<()> {
        handed::send(channel, &Message::Version(VERSION), &[])?;
        for (address, socket) in &self.sockets {
            let Some(socket) = socket.upgrade() else { continue };
            let message = Message::Listener { address: address.clone() };
            handed::send(channel, &message, &[socket.as_fd()])?;
        }
        if let Some(listener) = &self.metrics {
            handed::send(channel, &Message::Metrics, &[listener.as_fd()])?;
        }
        if let Some(listener) = &self.control_socket {
            handed::send(channel, &Message::Control, &[listener.as_fd()])?;
        }
        for upstream in self.table.get().open_upstreams() {
            if let Some(state) = HandedUpstream::new(&upstream, &self.closings) {
                handed::send(channel, &Message::Upstream(state), &[])?;
            }
        }
        handed::send(channel, &Message::Clients(self.placement.open()), &[])?;
        handed::send(channel, &Message::Ready, &[])
    }
}

/// The number of connections that the other process has adopted, by the messages that have come;
/// `None` without any. The first one says that it runs.
fn receive_adopted(channel: &FdChannel) -> io::Result<Option<usize>> {
    let mut adopted = None;
    loop {
        let message = match channel.try_receive() {
            Ok(Some(message)) => message,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(adopted),
            Ok(None) => return Err(io::Error::other("the new process has ended")),
            Err(error) => return Err(error),
        };
        if let Message::Adopted(count) = serde_json::from_slice(&message.bytes)? {
            *adopted.get_or_insert(0) += count;
        }
    }
}

/// The time in which no client is accepted, and no connection is opened to an upstream that has a
/// limit: the clients for it wait, however many they are, and go to the other process.
#[derive(Debug)]
struct Frozen {
    table: Arc<RoutingTable>,
    upstreams: Vec<FrozenUpstream>,
    placement: Arc<Placement>,
    /// The clients that the other process keeps places for, and has not received.
    clients_in_other_process: usize,
}

/// An upstream to which no connection is opened.
#[derive(Debug)]
struct FrozenUpstream {
    upstream: Arc<Upstream>,
    /// The connections that the other process has reserved slots for, and has not received.
    in_other_process: usize,
}

impl FrozenUpstream {
    fn handed(&self, connections: usize) -> HandedOpen {
        let (group, upstream) = (self.upstream.group().into(), self.upstream.name().into());
        HandedOpen { group, upstream, connections }
    }
}

impl Frozen {
    /// Begins it.
    fn freeze(table: Arc<RoutingTable>, placement: Arc<Placement>) -> Self {
        table.groups().iter().for_each(|group| group.queue().set_unlimited(true));
        let freeze = |upstream: Arc<Upstream>| {
            let in_other_process = upstream.counters().freeze_open();
            FrozenUpstream { upstream, in_other_process }
        };
        let upstreams = table.open_upstreams().into_iter().map(freeze).collect();
        Self { table, upstreams, placement, clients_in_other_process: 0 }
    }

    /// The other process gets a connection, and with it one of the places, and of the reserved
    /// slots.
    fn record_handed(&mut self, message: &ConnectionMessage) {
        self.clients_in_other_process = self.clients_in_other_process.saturating_sub(1);
        let is_its = |one: &&mut FrozenUpstream| {
            one.upstream.group() == message.group && one.upstream.name() == message.upstream
        };
        if message.has_slot()
            && let Some(one) = self.upstreams.iter_mut().find(is_its)
        {
            one.in_other_process = one.in_other_process.saturating_sub(1);
        }
    }

    /// Sends the number of connections that have ended in this process. All connections that were
    /// handed over have given up their slots here, and their places, if not at once.
    fn send_ended(&mut self, channel: &FdChannel) -> io::Result<()> {
        for one in &mut self.upstreams {
            let ended = one.in_other_process.saturating_sub(one.upstream.counters().open());
            if ended > 0 {
                handed::send(channel, &Message::Ended(one.handed(ended)), &[])?;
                one.in_other_process -= ended;
            }
        }
        // Also if there are none: only a message shows that the other process refuses them.
        let ended = self.clients_in_other_process.saturating_sub(self.placement.open());
        handed::send(channel, &Message::EndedClients(ended), &[])?;
        self.clients_in_other_process -= ended;
        Ok(())
    }

    /// Keeps it: the other process has everything.
    fn keep(&mut self) {
        self.upstreams.clear();
    }

    /// Ends it: the clients stay in this process.
    fn end(&mut self) {
        if self.upstreams.is_empty() {
            return;
        }
        for one in self.upstreams.drain(..) {
            one.upstream.counters().unfreeze_open();
        }
        for group in self.table.groups() {
            group.queue().set_unlimited(false);
            group.queue().serve();
        }
        self.placement.resume();
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.end();
    }
}
