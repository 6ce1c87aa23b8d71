//! The old process's part of a handover.

use crate::handover_message::queue::{HandoverReceiver, handover_queue};
use crate::handover_message::{
    self, ConnectionMessage, HandedConnection, HandedOpen, HandedUpstream, Message, VERSION,
};
use crate::mailbox::{Mailboxes, Request};
use crate::upstreams::closing::Closings;
use crate::upstreams::routing::{CurrentTable, RoutingTable};
use crate::upstreams::upstream::Upstream;
use haul_server::Control;
use haul_server::admission::placement::Placement;
use haul_server::command_socket::CommandPause;
use haul_server::fd_channel::FdChannel;
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
/// The numbers of connections that this process keeps for itself, because it still accepts some.
const ID_GAP: u64 = 1 << 20;
/// How long a handover waits for the end of an earlier handover.
const TAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval in which a handover looks for the end of an earlier handover.
const TAKE_INTERVAL: Duration = Duration::from_millis(5);
/// If the new process adopts none of the connections on their way for this time, it failed.
const ADOPTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval of the messages with the number of connections that ended in this process.
const REPORT_INTERVAL: Duration = Duration::from_millis(50);
/// The time in which the event loops must stop accepting. A loop is never busy for long.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that the new process has to take a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Hands a proxy over to another process.
#[derive(Debug)]
pub struct HandoverSource {
    parts: Arc<Parts>,
    /// The thread of the latest handover.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The parts of the proxy that a handover needs.
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
    /// Stops this process from answering at the control socket after the new process took it over.
    pub commands: OnceLock<CommandPause>,
    /// Whether a handover is running.
    pub is_busy: AtomicBool,
    /// Whether the process before this one still runs.
    pub has_predecessor: Arc<AtomicBool>,
}

impl HandoverSource {
    /// The source of a handover from a running proxy.
    pub fn new(parts: Parts) -> Self {
        Self { parts: Arc::new(parts), thread: Mutex::default() }
    }

    /// Begins a handover to the process that asked for a handover through `client`. A thread
    /// continues the handover.
    pub fn begin(&self, client: &UnixStream) -> io::Result<()> {
        if self.parts.control.is_draining() {
            let problem = "it is ending: start without --upgrade once it has";
            return Err(io::Error::other(problem));
        }
        // An operator may hand over twice in a row. The process before ends in a moment, unless it
        // still connects clients.
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
        // A reload would be lost, because the other process already has its configuration.
        self.parts.table.freeze();
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

    /// Sets the value that pauses answers at the control socket.
    pub fn set_commands(&self, commands: CommandPause) {
        // A proxy has one server of commands.
        let _ = self.parts.commands.set(commands);
    }

    /// Whether another process is taking over. A change would be lost with this process.
    pub fn is_busy(&self) -> bool {
        self.parts.is_busy.load(Relaxed)
    }

    /// Whether another process took over.
    pub fn has_handed_over(&self) -> bool {
        self.parts.control.is_handed_over()
    }

    /// Waits until the connections that the event loops gave up are sent.
    pub fn finish(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.parts.control.is_handed_over()
            && let Some(thread) = thread
        {
            // If the thread panicked, the panic message is already printed.
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
        let started = handover_message::receive(channel).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                let seconds = START_TIMEOUT.as_secs();
                io::Error::other(format!("the new process has not started within {seconds} s"))
            }
            _ => error,
        });
        let Some((Message::Started { listeners }, _)) = started? else {
            // The new process only checked, or reported its problem itself.
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
            handover_message::send(channel, &Message::Open(one.handed(one.in_other_process)), &[])?;
        }
        handover_message::send(
            channel,
            &Message::OpenClients(frozen.clients_in_other_process),
            &[],
        )?;
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
        handover_message::send(channel, &Message::Agreed { next_id }, &[])
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

    /// Sends connections until the event loops have given up all of them and the other process
    /// adopted all of them. Returns their number.
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
    /// the other process ends before, this process accepts clients and answers at the control
    /// socket again.
    fn keep_rest(&self, channel: &FdChannel, receiver: &HandoverReceiver) {
        self.mailboxes.send_all(|| Request::HandOver(None));
        // The other process gives up the slots and places that it kept for them.
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

    /// Sends a connection. A connection that cannot be sent comes back to the event loops.
    fn send_connection(&self, channel: &FdChannel, connection: HandedConnection) -> io::Result<()> {
        if let Err(error) = connection.send_message(channel) {
            self.mailboxes.adopt(connection);
            return Err(error);
        }
        connection.send_bytes(channel).inspect_err(|_| {
            // The other process has a part of the connection.
            connection.reset();
        })
    }

    fn send_state(&self, channel: &FdChannel) -> io::Result<()> {
        handover_message::send(channel, &Message::Version(VERSION), &[])?;
        for (address, socket) in &self.sockets {
            let Some(socket) = socket.upgrade() else { continue };
            let message = Message::Listener { address: address.clone() };
            handover_message::send(channel, &message, &[socket.as_fd()])?;
        }
        if let Some(listener) = &self.metrics {
            handover_message::send(channel, &Message::Metrics, &[listener.as_fd()])?;
        }
        if let Some(listener) = &self.control_socket {
            handover_message::send(channel, &Message::Control, &[listener.as_fd()])?;
        }
        for upstream in self.table.get().open_upstreams() {
            if let Some(state) = HandedUpstream::new(&upstream, &self.closings) {
                handover_message::send(channel, &Message::Upstream(state), &[])?;
            }
        }
        handover_message::send(channel, &Message::Clients(self.placement.open()), &[])?;
        handover_message::send(channel, &Message::Ready, &[])
    }
}

/// Returns how many connections the other process adopted, by the messages that arrived; `None` if
/// no message arrived. The first message shows that the other process runs.
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

/// The state of the old process during a handover: it does not accept clients, and does not open
/// connections to an upstream that has a limit. The clients of such an upstream wait, even beyond
/// the limit of the queue, and go to the other process.
#[derive(Debug)]
struct Frozen {
    table: Arc<RoutingTable>,
    upstreams: Vec<FrozenUpstream>,
    placement: Arc<Placement>,
    /// The clients for which the other process keeps places, and which it did not receive yet.
    clients_in_other_process: usize,
}

/// An upstream to which the old process does not open connections.
#[derive(Debug)]
struct FrozenUpstream {
    upstream: Arc<Upstream>,
    /// The connections for which the other process reserves slots, and which it did not receive
    /// yet.
    in_other_process: usize,
}

impl FrozenUpstream {
    fn handed(&self, connections: usize) -> HandedOpen {
        let (group, upstream) = (self.upstream.group().into(), self.upstream.name().into());
        HandedOpen { group, upstream, connections }
    }
}

impl Frozen {
    /// Stops connections to upstreams that have a limit.
    fn freeze(table: Arc<RoutingTable>, placement: Arc<Placement>) -> Self {
        table.groups().iter().for_each(|group| group.queue().set_unlimited(true));
        let freeze = |upstream: Arc<Upstream>| {
            let in_other_process = upstream.counters().freeze_open();
            FrozenUpstream { upstream, in_other_process }
        };
        let upstreams = table.open_upstreams().into_iter().map(freeze).collect();
        Self { table, upstreams, placement, clients_in_other_process: 0 }
    }

    /// The other process receives a connection, which uses one of the places and one of the
    /// reserved slots.
    fn record_handed(&mut self, message: &ConnectionMessage) {
        self.clients_in_other_process = self.clients_in_other_process.saturating_sub(1);
        let is_its = |one: &&mut FrozenUpstream| {
            one.upstream.group() == message.group && one.upstream.name() == message.upstream
        };
        if message.is_established()
            && let Some(one) = self.upstreams.iter_mut().find(is_its)
        {
            one.in_other_process = one.in_other_process.saturating_sub(1);
        }
    }

    /// Sends the number of connections that ended in this process. A connection that was handed
    /// over gives up its slot here at once, and its place soon after.
    fn send_ended(&mut self, channel: &FdChannel) -> io::Result<()> {
        for one in &mut self.upstreams {
            let ended = one.in_other_process.saturating_sub(one.upstream.counters().open());
            if ended > 0 {
                handover_message::send(channel, &Message::Ended(one.handed(ended)), &[])?;
                one.in_other_process -= ended;
            }
        }
        // A message is sent even if the number is 0, because only a message shows that the other
        // process refuses.
        let ended = self.clients_in_other_process.saturating_sub(self.placement.open());
        handover_message::send(channel, &Message::EndedClients(ended), &[])?;
        self.clients_in_other_process -= ended;
        Ok(())
    }

    /// Makes the state permanent, because the other process has everything.
    fn keep(&mut self) {
        self.upstreams.clear();
    }

    /// Opens connections again, because the clients stay in this process.
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
