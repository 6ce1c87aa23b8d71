//! Loans of dropped senders: what the reaper keeps, its limits, and the code of callers that it
//! runs.

use haul::{Buffer, SendSettings, Sender};
use haul_testing::wait_until;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// More than a peer accepts that does not read.
const LOAN_BYTES: usize = 500_000;
/// Time until all completions must have arrived.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The limits hold for the process, so one test at a time drops senders.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lends a buffer to a peer that does not read it. The peer reads the loan before it, which shows
/// the kernel's numbers.
fn lend_unread(buffer: Buffer) -> (Sender<TcpStream>, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut to, _) = listener.accept().unwrap();
    from.set_nonblocking(true).unwrap();
    // The socket accepts a loan, and the peer does not. Loopback copies what it takes to the peer.
    rustix::net::sockopt::set_socket_send_buffer_size(&from, 2 << 20).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&to, 64 << 10).unwrap();
    let settings = SendSettings::default().with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    sender.lend(vec![1; 16_000]).unwrap();
    to.read_exact(&mut [0; 16_000]).unwrap();
    assert_eq!(sender.wait_for_completions(TIMEOUT).unwrap(), 0);
    sender.reclaim().unwrap().for_each(drop);
    sender.lend(buffer).unwrap();
    assert_eq!(sender.unsent_bytes(), 0, "the socket has accepted all");
    assert!(sender.reclaim().unwrap().next().is_none(), "the peer has not accepted all");
    (sender, to)
}

/// Peers that do not read keep the loans of dropped senders in memory, but not without bound.
#[test]
fn the_loans_of_dropped_senders_have_a_bound_and_can_be_aborted() {
    let _guard = one_at_a_time();
    let shared: Arc<[u8]> = vec![5; LOAN_BYTES].into();
    let lend = || lend_unread(Buffer::from(Arc::clone(&shared)));
    haul::set_abandoned_bytes_max(10 * LOAN_BYTES);
    let mut peers = Vec::new();
    for _ in 0..24 {
        let (sender, peer) = lend();
        drop(sender);
        peers.push(peer);
    }
    let held = haul::abandoned_bytes();
    assert!(held > 5 * LOAN_BYTES && held <= 10 * LOAN_BYTES, "{held}");
    let is_reset = |mut peer: &TcpStream| peer.read_to_end(&mut Vec::new()).is_err();
    assert!(is_reset(&peers[0]), "the oldest connection is reset");
    assert!(!is_reset(&peers[23]), "the latest one is not");
    let (sender, peer) = lend();
    let held = Arc::strong_count(&shared);
    sender.abort();
    wait_until("an aborted sender returns its loans", || Arc::strong_count(&shared) < held);
    assert!(is_reset(&peer), "the peer sees a reset");
    drop(peers);
    wait_until("no loan is left", || Arc::strong_count(&shared) == 1);
    haul::set_abandoned_bytes_max(256 << 20);
}

/// Descriptors are used up before memory if the loans are small.
#[test]
fn dropped_senders_keep_at_most_half_of_the_descriptors() {
    let _guard = one_at_a_time();
    let resource = rustix::process::Resource::Nofile;
    let before = rustix::process::getrlimit(resource);
    let shared: Arc<[u8]> = vec![5; LOAN_BYTES].into();
    let mut peers = Vec::new();
    for _ in 0..20 {
        let (sender, peer) = lend_unread(Buffer::from(Arc::clone(&shared)));
        peers.push(peer);
        let limit = rustix::process::Rlimit { current: Some(16), ..before };
        rustix::process::setrlimit(resource, limit).unwrap();
        drop(sender);
        rustix::process::setrlimit(resource, before).unwrap();
    }
    wait_until("the others are reset", || haul::abandoned_bytes() <= 8 * LOAN_BYTES);
    drop(peers);
    wait_until("no loan is left", || Arc::strong_count(&shared) == 1);
}

/// Bytes whose owner runs code when it is dropped.
struct Owner<F: Fn()> {
    bytes: Vec<u8>,
    on_drop: F,
}

impl<F: Fn()> AsRef<[u8]> for Owner<F> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl<F: Fn()> Drop for Owner<F> {
    fn drop(&mut self) {
        (self.on_drop)();
    }
}

fn owned(on_drop: impl Fn() + Send + Sync + 'static) -> Buffer {
    Buffer::owned(Owner { bytes: vec![5; LOAN_BYTES], on_drop })
}

/// The reaper drops the buffers of callers, and so runs their code.
#[test]
fn the_drop_of_a_buffer_may_panic_wait_and_drop_a_sender() {
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    static LOCK: Mutex<()> = Mutex::new(());
    let _guard = one_at_a_time();
    let count = || {
        DROPPED.fetch_add(1, SeqCst);
    };
    // The first panics. The second drops a sender with a loan in flight.
    let (panicking, peer) = lend_unread(owned(move || {
        count();
        assert!(thread::panicking(), "expected by this test");
    }));
    drop(panicking);
    drop(peer);
    wait_until("the panic has passed", || DROPPED.load(SeqCst) == 1);
    let (inner, inner_peer) = lend_unread(owned(count));
    let inner = Mutex::new(Some(inner));
    let (outer, peer) = lend_unread(owned(move || {
        drop(inner.lock().unwrap().take());
        assert!(haul::abandoned_bytes() < usize::MAX);
        count();
    }));
    drop(outer);
    drop(peer);
    wait_until("a sender is dropped by a buffer", || DROPPED.load(SeqCst) == 2);
    drop(inner_peer);
    wait_until("its loan returns too", || DROPPED.load(SeqCst) == 3);
    // A buffer waits for a lock, whose holder drops another sender.
    let (waiting, peer) = lend_unread(owned(move || {
        drop(LOCK.lock());
        count();
    }));
    let (other, other_peer) = lend_unread(owned(count));
    let locked = LOCK.lock().unwrap();
    drop(waiting);
    drop(peer);
    // The reaper is waiting for the lock by now, or soon.
    thread::sleep(Duration::from_millis(50));
    drop(other);
    drop(locked);
    drop(other_peer);
    wait_until("both have returned", || DROPPED.load(SeqCst) == 5);
}
