//! Connections on their way from the event loops to another process.

use crate::handover_message::HandedConnection;
use haul_server::waker::Waker;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// The most connections on their way at first, one more for each event loop. A connection does not
/// forward bytes until the other process has adopted it and the connections before it. So few
/// connections are on their way, and the old process forwards the others until then.
const ON_WAY_MAX_AT_FIRST: usize = 32;
/// The most connections on their way at last. The channel has room for the receipts of all of them.
const ON_WAY_MAX_AT_LAST: usize = 128;
/// The time after which twice as many may be on their way, if the other process adopted more than
/// [`few`] in this time. If all CPUs are busy, a connection waits for the event loops and not for
/// the connections before it.
const DOUBLING_TIME: Duration = Duration::from_millis(250);
/// The most of the time between two calls that counts as a stall, because this process may have
/// been stopped.
const STALL_STEP_MAX: Duration = Duration::from_secs(1);

/// Creates an empty queue.
pub fn handover_queue() -> io::Result<(HandoverSender, HandoverReceiver)> {
    let (sender, receiver) = mpsc::channel();
    let state = Arc::new(State {
        waker: Waker::new()?,
        is_waiting: AtomicBool::new(false),
        on_way: AtomicUsize::new(0),
        on_way_max: AtomicUsize::new(ON_WAY_MAX_AT_FIRST),
        lacked_room: AtomicBool::new(false),
    });
    let sender = HandoverSender { sender, state: WakeOnDrop(Arc::clone(&state)) };
    let (now, stalled_time) = (Instant::now(), Duration::ZERO);
    let (counted_since, adopted, recorded_at) = (now, 0, now);
    let receiver =
        HandoverReceiver { receiver, counted_since, adopted, recorded_at, stalled_time, state };
    Ok((sender, receiver))
}

/// The end of the queue at which an event loop sends.
#[derive(Debug, Clone)]
pub struct HandoverSender {
    // This field is dropped before the other field, whose drop tells the receiver.
    sender: Sender<HandedConnection>,
    state: WakeOnDrop,
}

/// The end of the queue at which the thread of the handover receives.
#[derive(Debug)]
pub struct HandoverReceiver {
    receiver: Receiver<HandedConnection>,
    /// When the count in `adopted` began. The count starts again after [`DOUBLING_TIME`].
    counted_since: Instant,
    /// The connections that the other process adopted since `counted_since`.
    adopted: usize,
    /// When [`HandoverReceiver::record_adopted`] was last called.
    recorded_at: Instant,
    /// How long the other process has not adopted a connection that is on its way.
    stalled_time: Duration,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    waker: Waker,
    /// Whether the receiver is to be woken by the next connection.
    is_waiting: AtomicBool,
    /// The connections that event loops gave up and the other process did not adopt yet.
    on_way: AtomicUsize,
    /// The most connections on their way.
    on_way_max: AtomicUsize,
    /// Whether an event loop asked for room and did not get it.
    lacked_room: AtomicBool,
}

/// Wakes the receiver when dropped.
#[derive(Debug, Clone)]
struct WakeOnDrop(Arc<State>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.waker.wake();
    }
}

impl HandoverSender {
    /// Whether another connection may be on its way. If not, [`HandoverReceiver::wants_more`]
    /// returns true once it may.
    pub fn has_room(&self) -> bool {
        let State { on_way, on_way_max, lacked_room, .. } = &*self.state.0;
        let is_full = || on_way.load(SeqCst) >= on_way_max.load(SeqCst);
        if !is_full() {
            return true;
        }
        lacked_room.store(true, SeqCst);
        // The receiver may make room between the two looks.
        !is_full()
    }

    /// Sends a connection. If the receiver is gone, the connection is reset.
    pub fn send(&self, connection: HandedConnection) {
        self.state.0.on_way.fetch_add(1, SeqCst);
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

    /// Begins to wait. The returned waker is readable once a connection is sent or a sender is
    /// gone. [`HandoverReceiver::try_receive`] shows whether a connection came before.
    pub fn begin_wait(&self) -> &Waker {
        self.state.waker.clear();
        self.state.is_waiting.store(true, SeqCst);
        &self.state.waker
    }

    /// Records how many connections the other process adopted since the last call. As long as the
    /// other process adopts connections, more may be on their way after a time.
    pub fn record_adopted(&mut self, count: usize) {
        let rest = |on_way: usize| Some(on_way.saturating_sub(count));
        // The closure always returns a value.
        let _ = self.state.on_way.fetch_update(SeqCst, SeqCst, rest);
        let now = Instant::now();
        self.adopted += count;
        if now - self.counted_since >= DOUBLING_TIME {
            let on_way_max = self.state.on_way_max.load(SeqCst);
            if self.adopted > few(on_way_max) {
                self.state.on_way_max.store((on_way_max * 2).min(ON_WAY_MAX_AT_LAST), SeqCst);
            }
            (self.counted_since, self.adopted) = (now, 0);
        }
        let step = (now - self.recorded_at).min(STALL_STEP_MAX);
        self.recorded_at = now;
        let has_progressed = count > 0 || self.state.on_way.load(SeqCst) == 0;
        self.stalled_time = if has_progressed { Duration::ZERO } else { self.stalled_time + step };
    }

    /// Restarts the count of the time in which the other process does not adopt a connection.
    pub fn restart_clock(&mut self) {
        (self.recorded_at, self.stalled_time) = (Instant::now(), Duration::ZERO);
    }

    /// How long the other process has not adopted a connection that is on its way.
    pub fn stalled_time(&self) -> Duration {
        self.stalled_time
    }

    /// Whether no connection is on its way.
    pub fn is_empty(&self) -> bool {
        self.state.on_way.load(SeqCst) == 0
    }

    /// Whether to ask the event loops for more connections: a loop lacked room, and now there is
    /// room.
    pub fn wants_more(&self) -> bool {
        let State { on_way, on_way_max, lacked_room, .. } = &*self.state;
        on_way.load(SeqCst) <= few(on_way_max.load(SeqCst)) && lacked_room.swap(false, SeqCst)
    }
}

/// The number of connections on their way at which the event loops are asked for more.
fn few(on_way_max: usize) -> usize {
    on_way_max / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_wait_until_others_are_adopted() {
        let (sender, mut receiver) = handover_queue().unwrap();
        receiver.state.on_way.store(ON_WAY_MAX_AT_FIRST, SeqCst);
        assert!(!sender.has_room() && !receiver.wants_more());
        receiver.record_adopted(ON_WAY_MAX_AT_FIRST - few(ON_WAY_MAX_AT_FIRST));
        assert!(receiver.wants_more() && sender.has_room());
    }

    #[test]
    fn a_long_handover_has_more_on_their_way() {
        let (sender, mut receiver) = handover_queue().unwrap();
        let mut on_way_max_after = |adopted: usize| {
            receiver.counted_since -= DOUBLING_TIME;
            receiver.record_adopted(adopted);
            let on_way_max = receiver.state.on_way_max.load(SeqCst);
            for (on_way, has_room) in [(on_way_max - 1, true), (on_way_max, false)] {
                receiver.state.on_way.store(on_way, SeqCst);
                assert_eq!(sender.has_room(), has_room);
            }
            on_way_max
        };
        for _ in 0..2 {
            assert_eq!(on_way_max_after(few(ON_WAY_MAX_AT_FIRST)), ON_WAY_MAX_AT_FIRST);
        }
        assert_eq!(on_way_max_after(few(ON_WAY_MAX_AT_FIRST) + 1), 2 * ON_WAY_MAX_AT_FIRST);
        assert_eq!(on_way_max_after(ON_WAY_MAX_AT_LAST), ON_WAY_MAX_AT_LAST);
        assert_eq!(on_way_max_after(ON_WAY_MAX_AT_LAST), ON_WAY_MAX_AT_LAST);
    }

    #[test]
    fn a_process_that_was_stopped_has_not_stalled() {
        let (_sender, mut receiver) = handover_queue().unwrap();
        receiver.state.on_way.store(1, SeqCst);
        receiver.recorded_at -= 2 * STALL_STEP_MAX;
        receiver.record_adopted(0);
        assert_eq!(receiver.stalled_time(), STALL_STEP_MAX);
        receiver.record_adopted(1);
        assert_eq!(receiver.stalled_time(), Duration::ZERO);
    }
}
