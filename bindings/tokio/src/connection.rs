//! The state that the two halves of a stream and its loans share.

use crate::reactor::{Direction, Reactor, Tick};
use haul::{Buffer, Error, LendError, LoanId, Returned};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker};

/// A socket with its sender, its loans and its events.
#[derive(Debug)]
pub struct Connection {
    pub socket: Arc<OwnedFd>,
    lender: Mutex<Lender>,
    pub reactor: Reactor,
    /// Completions arrived while a thread used the sender. The thread reads them afterwards.
    has_completions: AtomicBool,
    /// tokio wakes this waker when an event arrived.
    event_waker: Waker,
}

/// Reads the events of a connection when woken, so that only the tasks are woken that wait for
/// these events. tokio calls the waker in the thread that waits for all sockets.
struct EventWaker(Weak<Connection>);

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(connection) = self.0.upgrade() {
            // A buffer or a waker may panic when it is dropped. The panic must not end the thread
            // of tokio that waits for all sockets.
            let _ = catch_unwind(AssertUnwindSafe(move || connection.read_events()));
        }
    }
}

/// The sender of a socket, and the loans whose futures exist.
#[derive(Debug)]
pub struct Lender {
    pub sender: haul::Sender<Arc<OwnedFd>>,
    loans: HashMap<LoanId, LoanState>,
    /// The error of the socket, which the kernel reports once.
    failure: Option<Failure>,
    /// Whether completions were awaited when the lock was last released.
    awaits_completions: bool,
}

/// A loan whose future exists.
#[derive(Debug)]
enum LoanState {
    /// With the waker of the future, once the future was polled.
    Lent(Option<Waker>),
    Returned(Returned),
}

/// The error of the socket, which each half returns once.
#[derive(Debug, Clone, Copy)]
struct Failure {
    errno: i32,
    is_sent_told: bool,
    is_received_told: bool,
}

/// Buffers that came back, outside of the lock.
#[derive(Default)]
struct Delivery {
    has_returned: bool,
    wakers: Vec<Waker>,
    /// The buffers of loans whose futures were dropped.
    orphans: Vec<Returned>,
}

impl Connection {
    pub fn new(
        socket: Arc<OwnedFd>,
        sender: haul::Sender<Arc<OwnedFd>>,
        reactor: Reactor,
    ) -> Arc<Self> {
        let lender =
            Lender { sender, loans: HashMap::new(), failure: None, awaits_completions: false };
        let connection = Arc::new_cyclic(|weak| Self {
            socket,
            lender: Mutex::new(lender),
            reactor,
            has_completions: AtomicBool::new(false),
            event_waker: Waker::from(Arc::new(EventWaker(Weak::clone(weak)))),
        });
        connection.read_events();
        connection
    }

    /// Reads the events that arrived, and the completions that the events announce.
    fn read_events(&self) {
        if self.reactor.read_events(&self.event_waker) {
            self.has_completions.store(true, SeqCst);
            self.process_completions();
        }
    }

    /// Calls the sender. Buffers that came back during the call go to their loans, and the tasks
    /// that wait for them are woken.
    pub fn with_lender<T>(&self, call: impl FnOnce(&mut Lender) -> T) -> T {
        let mut lender = self.lender.lock().unwrap_or_else(PoisonError::into_inner);
        let result = call(&mut lender);
        let orphans = self.deliver(lender);
        self.process_completions();
        // Last, and outside of the lock, because an owner may run code when it is dropped.
        drop(orphans);
        result
    }

    /// Reads the completions that arrived, and keeps the error of the socket. If another thread
    /// uses the sender, that thread does so afterwards.
    fn process_completions(&self) {
        let mut orphans = Vec::new();
        while self.has_completions.load(SeqCst) {
            let mut lender = match self.lender.try_lock() {
                Ok(lender) => lender,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            self.has_completions.store(false, SeqCst);
            lender.read_completions();
            orphans.append(&mut self.deliver(lender));
        }
    }

    /// Releases the sender, and then wakes the loans whose buffers came back. Returns the buffers
    /// of loans whose futures were dropped.
    fn deliver(&self, mut lender: MutexGuard<'_, Lender>) -> Vec<Returned> {
        let mut delivery = lender.take_returned();
        if self.reactor.check_open().is_err() {
            delivery.wakers.extend(lender.wakers());
        }
        // The latest completion may belong to a send that is not a loan.
        let awaits_completions = lender.sender.wants().completion;
        let is_settled = lender.awaits_completions && !awaits_completions;
        lender.awaits_completions = awaits_completions;
        drop(lender);
        if delivery.has_returned || is_settled {
            self.reactor.notify(Direction::Completion);
        }
        delivery.wakers.into_iter().for_each(Waker::wake);
        delivery.orphans
    }

    /// Waits for an event after `seen`.
    pub async fn event(&self, direction: Direction, seen: Tick) -> io::Result<()> {
        std::future::poll_fn(|context| self.reactor.poll_event(context, direction, seen)).await
    }

    /// Waits for the buffer of a loan.
    pub fn poll_loan(&self, context: &mut Context<'_>, id: LoanId) -> Poll<io::Result<Returned>> {
        // A waker may run code when it is cloned or dropped, so the lock is not held then.
        let waker = context.waker().clone();
        let (polled, former) = self.with_lender(|lender| lender.poll_loan(waker, id));
        drop(former);
        match polled {
            Poll::Pending => self
                .reactor
                .check_open()
                .map_or_else(|error| Poll::Ready(Err(error)), |()| Poll::Pending),
            Poll::Ready(returned) => Poll::Ready(Ok(returned)),
        }
    }

    /// The error of the socket for the half that receives, once. Without this, a reset connection
    /// whose error the sending half took would look like the end of the stream.
    pub fn failure_of_receiver(&self) -> io::Result<()> {
        self.with_lender(|lender| {
            // The event of the error may be unread.
            lender.read_completions();
            match &mut lender.failure {
                Some(failure) if !failure.is_received_told => {
                    failure.is_received_told = true;
                    Err(io::Error::from_raw_os_error(failure.errno))
                }
                _ => Ok(()),
            }
        })
    }
}

impl Lender {
    /// Reads the completions that arrived, and keeps the error of the socket.
    fn read_completions(&mut self) {
        if let Err(error) = self.sender.on_error_event() {
            self.keep_failure(&error);
        }
    }

    /// Moves the buffers that came back to their loans.
    fn take_returned(&mut self) -> Delivery {
        let mut delivery = Delivery::default();
        if !self.sender.has_returned_buffers() {
            return delivery;
        }
        let reclaimed = self.sender.reclaim().map(Iterator::collect::<Vec<_>>);
        let all_returned = match reclaimed {
            Ok(all_returned) => all_returned,
            Err(error) => {
                self.keep_failure(&error);
                return delivery;
            }
        };
        delivery.has_returned = true;
        for returned in all_returned {
            match self.loans.get_mut(&returned.id) {
                Some(state) => {
                    if let LoanState::Lent(waker) =
                        std::mem::replace(state, LoanState::Returned(returned))
                    {
                        delivery.wakers.extend(waker);
                    }
                }
                None => delivery.orphans.push(returned),
            }
        }
        delivery
    }

    /// The wakers of all loans.
    fn wakers(&mut self) -> impl Iterator<Item = Waker> + '_ {
        self.loans.values_mut().filter_map(|state| match state {
            LoanState::Lent(waker) => waker.take(),
            LoanState::Returned(_) => None,
        })
    }

    fn keep_failure(&mut self, error: &Error) {
        if let (None, Some(errno)) = (self.failure, error.raw_os_error()) {
            // Other errors belong to a file or to a loan, and not to the half that receives.
            let is_received_told = !ends_connection(errno);
            self.failure = Some(Failure { errno, is_sent_told: false, is_received_told });
        }
    }

    /// Keeps an error that a send took from the socket, for the half that receives.
    pub fn keep_failure_of_send(&mut self, error: &Error) {
        if error.raw_os_error().is_some_and(ends_connection) {
            self.keep_failure(error);
            if let Some(failure) = &mut self.failure {
                failure.is_sent_told = true;
            }
        }
    }

    /// Returns the error of the socket for the half that sends, once.
    pub fn check(&mut self) -> io::Result<()> {
        match &mut self.failure {
            Some(failure) if !failure.is_sent_told => {
                failure.is_sent_told = true;
                Err(io::Error::from_raw_os_error(failure.errno))
            }
            _ => Ok(()),
        }
    }

    /// Lends a buffer, whose future is about to be made.
    pub fn lend(&mut self, buffer: Buffer) -> Result<LoanId, LendError> {
        let id = self.sender.lend(buffer)?;
        // In the same turn of the lock, because the buffer may come back at once.
        self.loans.insert(id, LoanState::Lent(None));
        Ok(id)
    }

    /// The returned buffer of a loan, if it came back. If not, the waker of the future is kept.
    /// Also returns the waker that was kept before.
    fn poll_loan(&mut self, waker: Waker, id: LoanId) -> (Poll<Returned>, Option<Waker>) {
        let former = match self.loans.remove(&id) {
            Some(LoanState::Returned(returned)) => return (Poll::Ready(returned), Some(waker)),
            Some(LoanState::Lent(former)) => former,
            None => None,
        };
        self.loans.insert(id, LoanState::Lent(Some(waker)));
        (Poll::Pending, former)
    }

    /// Forgets a loan whose future was dropped.
    pub fn forget(&mut self, id: LoanId) -> Option<Returned> {
        match self.loans.remove(&id) {
            Some(LoanState::Returned(returned)) => Some(returned),
            _ => None,
        }
    }
}

/// Whether an error of the kernel ends a connection.
fn ends_connection(errno: i32) -> bool {
    use io::ErrorKind::{ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(
        io::Error::from_raw_os_error(errno).kind(),
        ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut
    )
}
