//! Connections on their way from the event loops to another process.

use crate::handed::HandedConnection;
use haul_server::waker::Waker;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// The most connections on their way, one more for each event loop. Nothing of a connection is
/// forwarded until the other process has adopted it, and it waits for those before it: so they are
/// few, and the others are forwarded here meanwhile.
const ON_WAY_MAX: usize = 32;
/// The number at which the event loops are asked for more.
const ON_WAY_LOW: usize = ON_WAY_MAX / 4;

/// The time over which the event loops give up established connections, at least. The handover of
/// one takes as much CPU time as some messages do: without pauses, it would delay the messages of
/// all.
const HANDOVER_TIME: Duration = Duration::from_secs(1);
/// The interval in which they may give up more.
const PACING_INTERVAL: Duration = Duration::from_millis(10);

/// The most of the time between two messages that counts as a stall: the process may have been
/// stopped.
const STALL_STEP_MAX: Duration = Duration::from_secs(1);

/// Creates an empty queue for this number of connections.
pub fn handover_queue(connections: usize) -> io::Result<(HandoverSender, HandoverReceiver)> {
    let (sender, receiver) = mpsc::channel();
    let state = Arc::new(State {
        waker: Waker::new()?,
        is_waiting: AtomicBool::new(false),
        on_way: AtomicUsize::new(0),
        given: AtomicUsize::new(0),
        given_max: AtomicUsize::new(given_max(connections, Duration::ZERO)),
        lacked_place: AtomicBool::new(false),
        lacked_time: AtomicBool::new(false),
    });
    let sender = HandoverSender { sender, state: WakeOnDrop(Arc::clone(&state)) };
    let now = Instant::now();
    let receiver = HandoverReceiver {
        receiver,
        connections,
        started: now,
        recorded_at: now,
        stalled_time: Duration::ZERO,
        state,
    };
    Ok((sender, receiver))
}

/// An event loop's end of the queue.
#[derive(Debug, Clone)]
pub struct HandoverSender {
    // Dropped before the other field, which tells the receiver.
    sender: Sender<HandedConnection>,
    state: WakeOnDrop,
}

/// The thread's end of the queue.
#[derive(Debug)]
pub struct HandoverReceiver {
    receiver: Receiver<HandedConnection>,
    /// The number of connections that the event loops had at the start.
    connections: usize,
    started: Instant,
    /// When the state was last recorded.
    recorded_at: Instant,
    /// How long the other process has adopted none of the connections on their way.
    stalled_time: Duration,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    waker: Waker,
    /// Whether the receiver is to be woken by the next connection.
    is_waiting: AtomicBool,
    /// Connections that event loops have given up, and the other process has not adopted.
    on_way: AtomicUsize,
    /// Established connections that event loops have given up.
    given: AtomicUsize,
    /// The most that they may have given up by now.
    given_max: AtomicUsize,
    /// Whether an event loop has found too many connections on their way.
    lacked_place: AtomicBool,
    /// Whether an event loop has a connection whose time has not come.
    lacked_time: AtomicBool,
}

/// Wakes the receiver when dropped.
#[derive(Debug, Clone)]
struct WakeOnDrop(Arc<State>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.waker.wake();
    }
}

/// The most of these connections that may have been given up after this time.
fn given_max(connections: usize, elapsed: Duration) -> usize {
    if elapsed >= HANDOVER_TIME {
        return usize::MAX;
    }
    let intervals = elapsed.as_millis() / PACING_INTERVAL.as_millis();
    let intervals_max = HANDOVER_TIME.as_millis() / PACING_INTERVAL.as_millis();
    // The first ones go at once, and the quotient is below `connections`.
    ON_WAY_MAX + (connections as u128 * intervals / intervals_max) as usize
}

impl HandoverSender {
    /// Whether a connection may go. If not, [`HandoverReceiver::wants_more`] returns true once it
    /// may. Those that are not established are not paced: others would overtake them in the queue.
    pub fn has_room(&self, is_established: bool) -> bool {
        let State { on_way, given, given_max, lacked_place, lacked_time, .. } = &*self.state.0;
        let has_place = || on_way.load(SeqCst) < ON_WAY_MAX;
        let is_time = || !is_established || given.load(SeqCst) < given_max.load(SeqCst);
        is_so_or_set(lacked_place, has_place) && is_so_or_set(lacked_time, is_time)
    }

    /// Sends a connection. It is reset if there is no receiver any more.
    pub fn send(&self, connection: HandedConnection) {
        self.state.0.on_way.fetch_add(1, SeqCst);
        if connection.message.search.is_none() {
            self.state.0.given.fetch_add(1, SeqCst);
        }
        if let Err(error) = self.sender.send(connection) {
            error.0.reset();
        }
        if self.state.0.is_waiting.swap(false, SeqCst) {
            self.state.0.waker.wake();
        }
    }
}

impl HandoverReceiver {
    /// The next connection, if there is one. [`TryRecvError::Disconnected`] once all senders are
    /// gone.
    pub fn try_receive(&self) -> Result<HandedConnection, TryRecvError> {
        self.receiver.try_recv()
    }

    /// The next connection, once there is one; `None` once all senders are gone.
    pub fn receive(&self) -> Option<HandedConnection> {
        self.receiver.recv().ok()
    }

    /// Begins to wait: what is returned is readable once a connection is sent, or a sender is gone.
    /// [`HandoverReceiver::try_receive`] shows whether one came before.
    pub fn begin_wait(&self) -> &Waker {
        self.state.waker.clear();
        self.state.is_waiting.store(true, SeqCst);
        &self.state.waker
    }

    /// The event loops begin to give up connections.
    pub fn start(&mut self) {
        self.started = Instant::now();
        self.recorded_at = self.started;
    }

    /// The other process has adopted so many, since this was called before.
    pub fn record_adopted(&mut self, count: usize) {
        let rest = |on_way: usize| Some(on_way.saturating_sub(count));
        // It always has a value to store.
        let _ = self.state.on_way.fetch_update(SeqCst, SeqCst, rest);
        let step = self.recorded_at.elapsed().min(STALL_STEP_MAX);
        self.recorded_at = Instant::now();
        let has_progressed = count > 0 || self.state.on_way.load(SeqCst) == 0;
        self.stalled_time = if has_progressed { Duration::ZERO } else { self.stalled_time + step };
    }

    /// How long the other process has adopted none of the connections on their way.
    pub fn stalled_time(&self) -> Duration {
        self.stalled_time
    }

    /// The longest time to wait before [`HandoverReceiver::wants_more`] is asked again.
    pub fn wait_max(&self) -> Duration {
        if self.started.elapsed() < HANDOVER_TIME { PACING_INTERVAL } else { Duration::MAX }
    }

    /// Whether event loops are to be asked for more: one has lacked what there is now.
    pub fn wants_more(&self) -> bool {
        let State { on_way, given, given_max: max, lacked_place, lacked_time, .. } = &*self.state;
        max.store(given_max(self.connections, self.started.elapsed()), SeqCst);
        let has_place = on_way.load(SeqCst) <= ON_WAY_LOW;
        let is_time = given.load(SeqCst) < max.load(SeqCst);
        has_place
            && (lacked_place.swap(false, SeqCst) | (is_time && lacked_time.swap(false, SeqCst)))
    }
}

/// Whether a condition holds. If not, the flag is set for the receiver.
fn is_so_or_set(flag: &AtomicBool, is_so: impl Fn() -> bool) -> bool {
    if is_so() {
        return true;
    }
    if !flag.load(SeqCst) {
        flag.store(true, SeqCst);
    }
    // The receiver may have made it hold before the flag was set.
    is_so()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_given_up_evenly() {
        let after = |part: u32| given_max(1000, HANDOVER_TIME * part / 100);
        assert_eq!([after(0), after(50), after(99)], [32, 532, 1022]);
        assert_eq!([after(100), after(1000)], [usize::MAX; 2]);
    }

    #[test]
    fn only_established_connections_wait_for_their_time() {
        let (sender, mut receiver) = handover_queue(1000).unwrap();
        receiver.state.given.store(ON_WAY_MAX, SeqCst);
        assert!(sender.has_room(false) && !sender.has_room(true));
        assert!(sender.has_room(false), "that does not change");
        receiver.started -= HANDOVER_TIME;
        assert!(receiver.wants_more() && sender.has_room(true));
        assert!(!receiver.wants_more(), "none has lacked room since");
    }

    #[test]
    fn all_connections_wait_until_others_are_adopted() {
        let (sender, mut receiver) = handover_queue(0).unwrap();
        receiver.state.on_way.store(ON_WAY_MAX, SeqCst);
        assert!(!sender.has_room(false) && !receiver.wants_more());
        receiver.record_adopted(ON_WAY_MAX - ON_WAY_LOW);
        assert!(receiver.wants_more() && sender.has_room(false));
    }

    #[test]
    fn a_process_that_was_stopped_has_not_stalled() {
        let (_sender, mut receiver) = handover_queue(0).unwrap();
        receiver.state.on_way.store(1, SeqCst);
        receiver.recorded_at -= 100 * STALL_STEP_MAX;
        receiver.record_adopted(0);
        assert_eq!(receiver.stalled_time(), STALL_STEP_MAX);
        receiver.record_adopted(1);
        assert_eq!(receiver.stalled_time(), Duration::ZERO);
    }
}
