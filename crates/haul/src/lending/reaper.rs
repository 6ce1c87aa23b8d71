//! The reaper: waits for the completions of loans whose senders were dropped.
//!
//! The kernel reads lent pages until it has reported their completion, and reports it only on the
//! socket. If the socket were closed, the completion would be lost while the pages stay in use. So
//! the reaper keeps socket and buffers. It is one thread of the process, which sleeps until the
//! kernel reports an event.
//!
//! What it keeps has a limit, because a peer that reads slowly could otherwise take all memory and
//! descriptors: [`set_abandoned_bytes_max`], and half of the descriptors that the process may have.
//! Beyond it the oldest TCP connections are reset. Sockets of another kind are not.

use super::{Lending, OsSocket};
use crate::loan::Returned;
use crate::socket;
use haul_sys::leaked::Leaked;
use haul_sys::{fork, signal};
use rustix::event::epoll;
use rustix::net::{SocketType, sockopt};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

#[cfg(test)]
use shuttle::sync::Mutex;
#[cfg(not(test))]
use std::sync::Mutex;

/// The longest time that a peer may accept nothing before the kernel closes the connection, in
/// milliseconds, once only the reaper waits for it. Without a limit, a peer that stops reading
/// would keep memory and descriptor forever.
const IDLE_MS_MAX: u32 = 120_000;
/// The most bytes that the connections of dropped senders may hold together.
static HELD_BYTES_MAX: AtomicUsize = AtomicUsize::new(256 << 20);
/// The most events of one wait.
const EVENTS: usize = 64;

/// Keeps `socket` and the loans until the kernel has released them.
pub(super) fn keep_until_complete(socket: impl AsFd + Send + 'static, lending: Lending) {
    let has_timeout = matches!(sockopt::tcp_user_timeout(&socket), Ok(0))
        && sockopt::set_tcp_user_timeout(&socket, IDLE_MS_MAX).is_ok();
    let abandoned = AbandonedLoans { socket: Box::new(socket), lending, has_timeout };
    match reaper() {
        Some(reaper) => reaper.insert(abandoned, ReaperLimits::current()),
        // Without a descriptor or a thread there is no way to wait, so the memory is leaked, not
        // freed early.
        None => std::mem::forget(abandoned),
    }
}

/// The bytes that were in flight when their senders were dropped, and whose completions have not
/// arrived. Those of connections that were reset for the limit do not count.
pub fn abandoned_bytes() -> usize {
    own_reaper().map_or(0, |process| process.reaper.held_bytes())
}

/// Sets how many bytes the connections of dropped senders may have in flight together, 256 MiB by
/// default. Beyond it the oldest of these connections are reset. It is a limit of the whole
/// process, and holds for senders that are dropped from now on.
pub fn set_abandoned_bytes_max(bytes_max: usize) {
    HELD_BYTES_MAX.store(bytes_max, Ordering::Relaxed);
}

/// The limits of what a reaper keeps.
#[derive(Clone, Copy)]
struct ReaperLimits {
    bytes_max: usize,
    items_max: usize,
}

impl ReaperLimits {
    fn current() -> Self {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let descriptors = descriptors.and_then(|limit| usize::try_from(limit).ok());
        Self {
            bytes_max: HELD_BYTES_MAX.load(Ordering::Relaxed),
            items_max: descriptors.map_or(usize::MAX, |limit| limit / 2),
        }
    }
}

/// The reaper of a process.
struct ProcessReaper {
    /// The process: a forked child has the memory of its parent's reaper, but not the thread.
    owner: u64,
    reaper: SocketReaper,
    /// Whether the thread runs, or is about to.
    is_running: AtomicBool,
}

/// The reaper of real sockets.
type SocketReaper = Reaper<Epoll, AbandonedLoans>;

/// The latest reaper.
static REAPER: Leaked<ProcessReaper> = Leaked::new();

/// The reaper of this process, if it has one.
fn own_reaper() -> Option<&'static ProcessReaper> {
    let found = REAPER.get()?;
    let is_own = found.owner == fork::generation() && found.is_running.load(Ordering::Acquire);
    is_own.then_some(found)
}

/// The reaper of this process, started when it is first needed.
fn reaper() -> Option<&'static SocketReaper> {
    loop {
        if let Some(process) = own_reaper() {
            return Some(&process.reaper);
        }
        let earlier = REAPER.get();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        let new = Box::new(ProcessReaper {
            owner: fork::generation(),
            reaper: Reaper::new(Epoll(epoll)),
            is_running: AtomicBool::new(true),
        });
        // If another thread was faster, its reaper is used.
        if let Some(process) = REAPER.replace(earlier, new) {
            return process.start().then_some(&process.reaper);
        }
    }
}

impl ProcessReaper {
    /// Starts the thread; false if the process can have no more.
    fn start(&'static self) -> bool {
        let run = move || {
            while self.reaper.run_once() {}
            self.is_running.store(false, Ordering::Release);
        };
        let spawn = || thread::Builder::new().name("haul-reaper".into()).spawn(run);
        let is_started = signal::with_all_blocked(spawn).is_ok_and(|thread| thread.is_ok());
        self.is_running.store(is_started, Ordering::Release);
        is_started
    }
}

/// The socket and the loans of a dropped sender.
struct AbandonedLoans {
    socket: Box<dyn AsFd + Send>,
    lending: Lending,
    /// Whether the reaper has set `TCP_USER_TIMEOUT`. The socket may be in use elsewhere.
    has_timeout: bool,
}

/// An item that the reaper keeps until it is done.
trait ReapItem {
    /// A part of an item that is not needed any more.
    type Part;

    /// Processes the events of the item; returns whether it is done. Code of the caller's runs when
    /// parts of it are dropped, so they are moved to `parts` instead.
    fn poll_done(&mut self, parts: &mut Vec<Self::Part>) -> bool;
    /// The memory that it holds.
    fn held_bytes(&self) -> usize;
    /// Makes it be done soon; false if that is not possible.
    fn abort(&mut self) -> bool;
    /// Whether its drop may block.
    fn lingers(&self) -> bool;
}

/// Waits for events of items.
trait Poller<I> {
    /// Registers `item`: from now on [`Poller::wait`] returns `key` whenever the item has an event,
    /// beginning with earlier ones. False if the item cannot be registered.
    fn register(&self, key: u64, item: &I) -> bool;
    /// Registers `item` no longer.
    fn unregister(&self, item: &I);
    /// Waits for events and adds the keys of their items; false if it cannot wait any more.
    fn wait(&self, keys: &mut Vec<u64>) -> bool;
}

/// Keeps sockets whose sender was dropped, with the memory of their loans, until the last
/// completion has arrived. Tests replace the items and the poller.
struct Reaper<P, I> {
    poller: P,
    items: Mutex<Items<I>>,
}

struct Items<I> {
    next_key: u64,
    /// The oldest first.
    by_key: BTreeMap<u64, KeptItem<I>>,
    /// The memory of all items that were not aborted.
    held_bytes: usize,
    /// The number of items in `by_key` that were aborted.
    aborted: usize,
    /// Items that cannot be registered; they are checked whenever another item has an event.
    unregistered: Vec<I>,
}

struct KeptItem<I> {
    item: I,
    /// The memory that is counted for it; 0 once it was aborted.
    held_bytes: usize,
    is_aborted: bool,
}

impl<P: Poller<I>, I: ReapItem + Send + 'static> Reaper<P, I> {
    fn new(poller: P) -> Self {
        let items = Items {
            next_key: 0,
            by_key: BTreeMap::new(),
            held_bytes: 0,
            aborted: 0,
            unregistered: Vec::new(),
        };
        Self { poller, items: Mutex::new(items) }
    }

    fn insert(&self, mut item: I, limits: ReaperLimits) {
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        let key = items.next_key;
        items.next_key += 1;
        // Registered under the lock: a thread that an earlier event wakes then finds the item here.
        if self.poller.register(key, &item) {
            let held_bytes = item.held_bytes();
            items.held_bytes += held_bytes;
            items.by_key.insert(key, KeptItem { item, held_bytes, is_aborted: false });
            items.abort_oldest(limits);
        } else {
            item.abort();
            items.unregistered.push(item);
        }
    }

    fn held_bytes(&self) -> usize {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).held_bytes
    }

    /// Waits for an event and drops the items that are done by then; false if it cannot wait any
    /// more.
    fn run_once(&self) -> bool {
        let mut keys = Vec::with_capacity(EVENTS);
        if !self.poller.wait(&mut keys) {
            return false;
        }
        let mut items = self.items.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut done, mut parts) = (Vec::new(), Vec::new());
        for key in keys {
            let kept = items.by_key.get_mut(&key);
            let is_done = kept.is_some_and(|kept| kept.item.poll_done(&mut parts));
            if let Some(kept) = is_done.then(|| items.remove(key)).flatten() {
                // The descriptor may stay open elsewhere, and would go on to have events.
                self.poller.unregister(&kept.item);
                done.push(kept.item);
            }
        }
        let unregistered = std::mem::take(&mut items.unregistered).into_iter();
        for mut item in unregistered {
            let is_done = item.poll_done(&mut parts);
            if is_done { &mut done } else { &mut items.unregistered }.push(item);
        }
        // A caller's buffers and sockets run its code when they are dropped. It may wait for a lock
        // whose holder drops a sender, so this lock is released before. If it panics, the reaper
        // still waits for the others.
        drop(items);
        parts.into_iter().for_each(drop_guarded);
        for item in done {
            if item.lingers() {
                drop_on_a_thread(item);
            } else {
                drop_guarded(item);
            }
        }
        true
    }
}

/// Drops a value on a separate thread, because that may block. Without a thread it blocks here.
fn drop_on_a_thread<T: Send + 'static>(value: T) {
    let drop_value = move || drop_guarded(value);
    let spawn = || thread::Builder::new().name("haul-close".into()).spawn(drop_value);
    let _ = std::panic::catch_unwind(AssertUnwindSafe(|| signal::with_all_blocked(spawn)));
}

/// Drops a value, and stops a panic of that.
fn drop_guarded<T>(value: T) {
    let _ = std::panic::catch_unwind(AssertUnwindSafe(|| drop(value)));
}

impl<I: ReapItem> Items<I> {
    fn remove(&mut self, key: u64) -> Option<KeptItem<I>> {
        let kept = self.by_key.remove(&key)?;
        self.held_bytes -= kept.held_bytes;
        self.aborted -= usize::from(kept.is_aborted);
        Some(kept)
    }

    /// Aborts the oldest items until the others are within the limits.
    fn abort_oldest(&mut self, limits: ReaperLimits) {
        let items = self.by_key.len();
        for kept in self.by_key.values_mut() {
            if self.held_bytes <= limits.bytes_max && items - self.aborted <= limits.items_max {
                return;
            }
            if !kept.is_aborted && kept.item.abort() {
                kept.is_aborted = true;
                self.aborted += 1;
                self.held_bytes -= std::mem::take(&mut kept.held_bytes);
            }
        }
    }
}

impl ReapItem for AbandonedLoans {
    type Part = Returned;

    fn poll_done(&mut self, parts: &mut Vec<Returned>) -> bool {
        // An error here is not a reason to free pages that the kernel may still read.
        let mut socket = OsSocket::of(self.socket.as_fd(), SocketType::STREAM);
        let _ = self.lending.process_completions(&mut socket);
        // A caller that could reclaim the buffers is gone, so the buffers are dropped. Buffers of a
        // pool return to the pool.
        parts.extend(std::iter::from_fn(|| self.lending.take_returned()));
        let is_done = self.lending.sends_in_flight() == 0;
        if is_done && self.has_timeout {
            let _ = sockopt::set_tcp_user_timeout(&self.socket, 0);
        }
        is_done
    }

    fn held_bytes(&self) -> usize {
        self.lending.bytes_in_flight()
    }

    fn abort(&mut self) -> bool {
        // Resets the connection, which frees its send queue. Other sockets, which the program may
        // still use, would only lose their peer's address.
        socket::is_tcp(&self.socket) && rustix::net::connect_unspec(&self.socket).is_ok()
    }

    /// `SO_LINGER`: closing waits until the peer has acknowledged what other calls have sent.
    fn lingers(&self) -> bool {
        matches!(sockopt::socket_linger(&self.socket), Ok(Some(time)) if !time.is_zero())
    }
}

struct Epoll(OwnedFd);

impl Poller<AbandonedLoans> for Epoll {
    fn register(&self, key: u64, abandoned: &AbandonedLoans) -> bool {
        // Edge-triggered: otherwise a hang-up would be reported continuously. Errors are always
        // reported.
        let data = epoll::EventData::new_u64(key);
        epoll::add(&self.0, abandoned.socket.as_fd(), data, epoll::EventFlags::ET).is_ok()
    }

    fn unregister(&self, abandoned: &AbandonedLoans) {
        let _ = epoll::delete(&self.0, abandoned.socket.as_fd());
    }

    fn wait(&self, keys: &mut Vec<u64>) -> bool {
        let mut events = Vec::with_capacity(EVENTS);
        match epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {
                keys.extend(events.iter().map(|event: &epoll::Event| event.data.u64()));
                true
            }
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loan::LoanLimits;
    use shuttle::sync::Condvar;
    use shuttle::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::collections::HashSet;
    use std::sync::Arc;

    const NO_LIMITS: ReaperLimits = ReaperLimits { bytes_max: usize::MAX, items_max: usize::MAX };

    /// Simulates the loans of a dropped sender: one thread completes them while another gives them
    /// to the reaper.
    struct FakeLoans {
        completions: Arc<AtomicUsize>,
        dropped: Arc<AtomicUsize>,
    }

    impl ReapItem for FakeLoans {
        type Part = ();

        fn poll_done(&mut self, _: &mut Vec<()>) -> bool {
            self.completions.load(SeqCst) > 0
        }

        fn held_bytes(&self) -> usize {
            1
        }

        fn abort(&mut self) -> bool {
            false
        }

        fn lingers(&self) -> bool {
            false
        }
    }

    impl Drop for FakeLoans {
        fn drop(&mut self) {
            assert!(self.completions.load(SeqCst) > 0, "dropped before the kernel was done");
            self.dropped.fetch_add(1, SeqCst);
        }
    }

    /// Simulates an edge-triggered epoll: returns the key of each event once.
    #[derive(Default)]
    struct FakeEpoll {
        state: Mutex<FakeEpollState>,
        woken: Condvar,
    }

    #[derive(Default)]
    struct FakeEpollState {
        /// The completion counters of the registered items, with their keys.
        registered: Vec<(Arc<AtomicUsize>, u64)>,
        ready: HashSet<u64>,
    }

    impl FakeEpoll {
        fn complete(&self, completions: &Arc<AtomicUsize>) {
            let mut state = self.state.lock().unwrap();
            completions.fetch_add(1, SeqCst);
            let key = state
                .registered
                .iter()
                .find(|(other, _)| Arc::ptr_eq(other, completions))
                .map(|(_, key)| *key);
            state.ready.extend(key);
            self.woken.notify_all();
        }
    }

    impl Poller<FakeLoans> for Arc<FakeEpoll> {
        fn register(&self, key: u64, loans: &FakeLoans) -> bool {
            let mut state = self.state.lock().unwrap();
            state.registered.push((Arc::clone(&loans.completions), key));
            if loans.completions.load(SeqCst) > 0 {
                state.ready.insert(key);
                self.woken.notify_all();
            }
            true
        }

        fn unregister(&self, _: &FakeLoans) {}

        fn wait(&self, keys: &mut Vec<u64>) -> bool {
            let mut state = self.state.lock().unwrap();
            while state.ready.is_empty() {
                state = self.woken.wait(state).unwrap();
            }
            keys.extend(state.ready.drain());
            true
        }
    }

    /// The program may go on to use the socket, and `connect` to no address would disconnect it.
    #[test]
    fn an_aborted_udp_socket_keeps_its_peer() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(socket.local_addr().unwrap()).unwrap();
        let lending = Lending::new(LoanLimits::default(), 0, fork::generation());
        let other = Box::new(socket.try_clone().unwrap());
        AbandonedLoans { socket: other, lending, has_timeout: false }.abort();
        assert_eq!(socket.peer_addr().unwrap(), socket.local_addr().unwrap());
    }

    /// In every order of threads, no item is dropped early and every item is dropped in the end. A
    /// lost wake-up would be a deadlock, which shuttle reports.
    #[test]
    fn no_item_is_dropped_early_and_no_wake_up_is_lost() {
        const LOANS_COUNT: usize = 3;
        let run = || {
            let fake_epoll = Arc::new(FakeEpoll::default());
            let reaper = Arc::new(Reaper::<_, FakeLoans>::new(Arc::clone(&fake_epoll)));
            let dropped = Arc::new(AtomicUsize::new(0));
            let threads: Vec<_> = (0..LOANS_COUNT)
                .flat_map(|_| {
                    let completions = Arc::new(AtomicUsize::new(0));
                    let loans = FakeLoans {
                        completions: Arc::clone(&completions),
                        dropped: Arc::clone(&dropped),
                    };
                    let (reaper, fake_epoll) = (Arc::clone(&reaper), Arc::clone(&fake_epoll));
                    [
                        shuttle::thread::spawn(move || reaper.insert(loans, NO_LIMITS)),
                        shuttle::thread::spawn(move || fake_epoll.complete(&completions)),
                    ]
                })
                .collect();
            while dropped.load(SeqCst) < LOANS_COUNT {
                assert!(reaper.run_once());
            }
            for thread in threads {
                thread.join().unwrap();
            }
        };
        shuttle::check_random(run, 2000);
        shuttle::check_pct(run, 1000, 3);
    }
}
