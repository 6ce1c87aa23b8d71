//! Who waits for the loans of senders that were dropped.
//!
//! The kernel reads lent pages until it has said that it is done, and says so to whoever holds the socket:
//! closing it would lose the notice while the pages stay in use. So socket and buffers stay here, with one
//! thread of the process that sleeps until the kernel speaks.

use super::{Lending, OsSocket};
use rustix::event::epoll;
use rustix::net::SocketType;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;

#[cfg(test)]
use shuttle::sync::Mutex;
#[cfg(not(test))]
use std::sync::Mutex;

/// How long a peer may take nothing before the kernel gives the connection up, once nobody but the reaper
/// waits for it. Without a bound a peer that stops reading would keep memory and descriptor for ever.
const IDLE_MS_MAX: u32 = 120_000;
/// Events taken at a time.
const EVENTS: usize = 64;

/// Keeps `socket` and the loans until the kernel has let go of them.
pub(super) fn keep(socket: impl AsFd + Send + 'static, lending: Lending) {
    if let Ok(0) = rustix::net::sockopt::tcp_user_timeout(&socket) {
        let _ = rustix::net::sockopt::set_tcp_user_timeout(&socket, IDLE_MS_MAX);
    }
    let left = Left { socket: Box::new(socket), lending };
    match reaper() {
        Some(reaper) => reaper.keep(left),
        // No descriptor or no thread to be had: nobody can wait, so the memory stays with the process.
        None => std::mem::forget(left),
    }
}

/// The reaper of real sockets.
type SocketReaper = Reaper<Epoll, Left>;

/// This process's reaper, started when it is first needed.
fn reaper() -> Option<Arc<SocketReaper>> {
    /// With the process it runs in: a forked child has the memory and not the thread.
    static REAPER: RwLock<Option<(u32, Arc<SocketReaper>)>> = RwLock::new(None);
    let mut reaper = REAPER.write().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((_, reaper)) = reaper.as_ref().filter(|(owner, _)| *owner == process) {
        return Some(Arc::clone(reaper));
    }
    let fresh = Arc::new(Reaper::new(Epoll(epoll::create(epoll::CreateFlags::CLOEXEC).ok()?)));
    let working = Arc::clone(&fresh);
    thread::Builder::new()
        .name("haul-reaper".into())
        .spawn(move || while working.turn() {})
        .ok()?;
    *reaper = Some((process, Arc::clone(&fresh)));
    Some(fresh)
}

/// What a sender leaves behind.
struct Left {
    socket: Box<dyn AsFd + Send>,
    lending: Lending,
}

/// Something to be kept until it is done.
trait Keep {
    /// Looks at what has happened; whether that was all.
    fn is_done(&mut self) -> bool;
}

/// Says when to look.
trait Watch<K> {
    /// From now on `key` is named whenever something happens to `kept`, beginning with what has happened
    /// already. False where that cannot be.
    fn add(&self, key: u64, kept: &K) -> bool;
    /// Waits until something has happened; false when it cannot wait any more.
    fn wait(&self, keys: &mut Vec<u64>) -> bool;
}

/// Keeps things until they are done.
struct Reaper<W, K> {
    watch: W,
    kept: Mutex<Kept<K>>,
}

struct Kept<K> {
    next_key: u64,
    by_key: HashMap<u64, K>,
    /// Those that cannot be watched are looked at whenever something happens to another.
    unwatched: Vec<K>,
}

impl<W: Watch<K>, K: Keep> Reaper<W, K> {
    fn new(watch: W) -> Self {
        let kept = Kept { next_key: 0, by_key: HashMap::new(), unwatched: Vec::new() };
        Self { watch, kept: Mutex::new(kept) }
    }

    fn keep(&self, left: K) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let key = kept.next_key;
        kept.next_key += 1;
        // Watched under the lock: whoever is woken by what has happened already then finds it here.
        if self.watch.add(key, &left) {
            kept.by_key.insert(key, left);
        } else {
            kept.unwatched.push(left);
        }
    }

    /// Waits for something to happen and lets go of what is done by then.
    fn turn(&self) -> bool {
        let mut keys = Vec::with_capacity(EVENTS);
        if !self.watch.wait(&mut keys) {
            return false;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = Vec::new();
        for key in keys {
            if kept.by_key.get_mut(&key).is_some_and(Keep::is_done) {
                done.extend(kept.by_key.remove(&key));
            }
        }
        done.extend(kept.unwatched.extract_if(.., Keep::is_done));
        // Closing a socket may take a while; nobody has to wait for that. And whatever a program's own socket does
        // when it is dropped, the others are still waited for.
        drop(kept);
        let _ = std::panic::catch_unwind(AssertUnwindSafe(|| drop(done)));
        true
    }
}

impl Keep for Left {
    fn is_done(&mut self) -> bool {
        // A failed look is no reason to free what the kernel may still read.
        let _ = self.lending.hear(&mut OsSocket::of(self.socket.as_fd(), SocketType::STREAM));
        // Nobody reclaims any more: what has come back is free, and a pool has it again.
        while self.lending.take_returned().is_some() {}
        self.lending.open_sends() == 0
    }
}

struct Epoll(OwnedFd);

impl Watch<Left> for Epoll {
    fn add(&self, key: u64, left: &Left) -> bool {
        // Edge-triggered: a hang-up would be reported for ever otherwise. Errors are always reported.
        let data = epoll::EventData::new_u64(key);
        epoll::add(&self.0, left.socket.as_fd(), data, epoll::EventFlags::ET).is_ok()
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
    use shuttle::sync::Condvar;
    use shuttle::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::collections::HashSet;

    /// Something that happens in the kernel while senders come and go: each thing kept is finished by one
    /// thread while another keeps it.
    struct Thing {
        notices: Arc<AtomicUsize>,
        dropped: Arc<AtomicUsize>,
    }

    impl Keep for Thing {
        fn is_done(&mut self) -> bool {
            self.notices.load(SeqCst) > 0
        }
    }

    impl Drop for Thing {
        fn drop(&mut self) {
            assert!(self.notices.load(SeqCst) > 0, "let go before the kernel was done");
            self.dropped.fetch_add(1, SeqCst);
        }
    }

    /// As an edge-triggered epoll: names what has happened since, once.
    #[derive(Default)]
    struct Edges {
        state: Mutex<EdgeState>,
        woken: Condvar,
    }

    #[derive(Default)]
    struct EdgeState {
        /// The notices of what is watched, with the key.
        watched: Vec<(Arc<AtomicUsize>, u64)>,
        ready: HashSet<u64>,
    }

    impl Edges {
        fn happen(&self, notices: &Arc<AtomicUsize>) {
            let mut state = self.state.lock().unwrap();
            notices.fetch_add(1, SeqCst);
            let key = state
                .watched
                .iter()
                .find(|(other, _)| Arc::ptr_eq(other, notices))
                .map(|(_, key)| *key);
            state.ready.extend(key);
            self.woken.notify_all();
        }
    }

    impl Watch<Thing> for Arc<Edges> {
        fn add(&self, key: u64, thing: &Thing) -> bool {
            let mut state = self.state.lock().unwrap();
            state.watched.push((Arc::clone(&thing.notices), key));
            if thing.notices.load(SeqCst) > 0 {
                state.ready.insert(key);
                self.woken.notify_all();
            }
            true
        }

        fn wait(&self, keys: &mut Vec<u64>) -> bool {
            let mut state = self.state.lock().unwrap();
            while state.ready.is_empty() {
                state = self.woken.wait(state).unwrap();
            }
            keys.extend(state.ready.drain());
            true
        }
    }

    /// Whatever the order of threads, nothing is let go early and everything is let go in the end; a lost
    /// wake-up would be a deadlock, which shuttle reports.
    #[test]
    fn nothing_is_let_go_early_and_no_wake_up_is_lost() {
        const THINGS: usize = 3;
        let run = || {
            let edges = Arc::new(Edges::default());
            let reaper = Arc::new(Reaper::<_, Thing>::new(Arc::clone(&edges)));
            let dropped = Arc::new(AtomicUsize::new(0));
            let threads: Vec<_> = (0..THINGS)
                .flat_map(|_| {
                    let notices = Arc::new(AtomicUsize::new(0));
                    let thing =
                        Thing { notices: Arc::clone(&notices), dropped: Arc::clone(&dropped) };
                    let (reaper, edges) = (Arc::clone(&reaper), Arc::clone(&edges));
                    [
                        shuttle::thread::spawn(move || reaper.keep(thing)),
                        shuttle::thread::spawn(move || edges.happen(&notices)),
                    ]
                })
                .collect();
            while dropped.load(SeqCst) < THINGS {
                assert!(reaper.turn());
            }
            for thread in threads {
                thread.join().unwrap();
            }
        };
        shuttle::check_random(run, 2000);
        shuttle::check_pct(run, 1000, 3);
    }
}
