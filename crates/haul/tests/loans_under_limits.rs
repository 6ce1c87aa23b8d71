//! Loans under resource limits, and loans that are in flight when a process exits or forks.
//!
//! This is a separate test binary because resource limits apply to the whole process.

use haul::{BufferPool, Error, Memory, SendMethod, SendReport, SendSettings, Sender};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

const BUFFERS: usize = 32;
const BUFFER_BYTES: usize = 256 << 10;
/// Environment variable with the peer's address, set for the child process of the second test.
const PEER_VARIABLE: &str = "HAUL_TEST_PEER";

/// Returns the byte that fills a buffer.
fn contents(buffer: usize) -> u8 {
    (7 * buffer + 1) as u8
}

/// Lends every buffer of a pool, reclaims them all and returns the sender's report.
fn lend_all(to: TcpStream) -> SendReport {
    let pool = BufferPool::new(BUFFER_BYTES, BUFFERS).unwrap();
    let mut sender = Sender::new(to).unwrap();
    let mut returned = 0;
    for number in 0..BUFFERS {
        let mut buffer = pool.take().unwrap();
        buffer.resize(BUFFER_BYTES).unwrap();
        buffer.fill(contents(number));
        sender.lend(buffer).unwrap();
        returned += sender.reclaim().unwrap().count();
    }
    assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
    returned += sender.reclaim().unwrap().count();
    assert_eq!((returned, pool.in_use()), (BUFFERS, 0));
    sender.report()
}

/// Receives all buffers and checks their contents and the end of the stream.
fn check_all(mut from: TcpStream) {
    let mut received = vec![0; BUFFER_BYTES];
    for number in 0..BUFFERS {
        from.read_exact(&mut received).unwrap();
        assert!(
            received.iter().all(|&byte| byte == contents(number)),
            "buffer {number} arrived changed"
        );
    }
    assert_eq!(from.read(&mut received).unwrap(), 0);
}

/// Calls `action` with a limit on the memory that the process may pin, in bytes.
fn with_pinned_max<T>(bytes: u64, action: impl FnOnce() -> T) -> T {
    /// The limit is the whole process's.
    static LIMIT: Mutex<()> = Mutex::new(());
    let _guard = LIMIT.lock().unwrap();
    let limit = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), ..limit }).unwrap();
    // CAP_IPC_LOCK overrides the limit. This thread drops it, as an ordinary user does not have it.
    let initial = capabilities(None).unwrap();
    let reduced = initial.effective.difference(CapabilitySet::IPC_LOCK);
    set_capabilities(None, CapabilitySets { effective: reduced, ..initial }).unwrap();
    let result = action();
    set_capabilities(None, initial).unwrap();
    setrlimit(Resource::Memlock, limit).unwrap();
    result
}

/// An ordinary user may pin 8 MiB of memory, and this process only 8 KiB. The kernel refuses
/// zero-copy sends with `ENOBUFS`, and no completion arrives.
#[test]
fn loans_are_copied_without_memory_to_pin() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let to = listener.accept().unwrap().0;
    let receiver = thread::spawn(move || check_all(to));
    let report = with_pinned_max(8192, || lend_all(from));
    assert_eq!(report.loans.bytes, report.loans.copied_bytes);
    assert!(report.enobufs_count > 0, "the limit had no effect: {report:?}");
    receiver.join().unwrap();
}

/// The kernel charges the limit for all bytes that a call offers, also for those that the socket
/// does not accept. So a loan is offered in pieces.
#[test]
fn a_loan_of_more_bytes_than_may_be_pinned_is_not_copied() {
    const LOAN_BYTES: usize = 9 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    // Less is in flight than may be pinned.
    rustix::net::sockopt::set_socket_send_buffer_size(&from, 1 << 20).unwrap();
    let mut to = listener.accept().unwrap().0;
    let receiver = thread::spawn(move || {
        let mut received = Vec::new();
        to.read_to_end(&mut received).unwrap();
        received.len()
    });
    let settings = SendSettings::default().with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    with_pinned_max(8 << 20, || {
        // The first loan shows the kernel's numbers.
        for bytes in [50_000, LOAN_BYTES] {
            sender.lend(vec![7; bytes]).unwrap();
            assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
        }
    });
    assert_eq!(sender.report().enobufs_count, 0, "{sender:?}");
    drop(sender);
    assert_eq!(receiver.join().unwrap(), 50_000 + LOAN_BYTES);
}

/// The method `zerocopy` copies what the kernel lacks memory to track. This is not a sign that the
/// kernel copies zero-copy sends, so the method stays in use.
#[test]
fn a_send_method_is_kept_without_memory_to_pin() {
    const TOTAL: usize = 4 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut to = listener.accept().unwrap().0;
    let receiver = thread::spawn(move || {
        let mut received = Vec::new();
        to.read_to_end(&mut received).unwrap();
        received
    });
    let memory = Memory::new(std::io::repeat(7), TOTAL).unwrap();
    let settings = SendSettings::default().with_choice(SendMethod::Zerocopy);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    with_pinned_max(8192, || sender.send_file_all(&memory, 0..TOTAL as u64).unwrap());
    let report = sender.report();
    assert!(report.fallbacks.is_empty(), "{report:?}");
    assert_eq!(report.files[0].0, SendMethod::Zerocopy);
    assert_eq!(report.files[0].1.copied_bytes, TOTAL as u64, "the limit had no effect");
    drop(sender);
    assert_eq!(receiver.join().unwrap().len(), TOTAL);
}

/// The kernel keeps lent pages until they are sent, even if the process has exited.
#[test]
fn a_process_may_exit_with_loans_in_flight() {
    if let Ok(peer) = std::env::var(PEER_VARIABLE) {
        let pool = BufferPool::new(BUFFER_BYTES, BUFFERS).unwrap();
        let socket = TcpStream::connect(peer).unwrap();
        let mut sender = Sender::new(socket).unwrap();
        for number in 0..BUFFERS {
            let mut buffer = pool.take().unwrap();
            buffer.resize(BUFFER_BYTES).unwrap();
            buffer.fill(contents(number));
            sender.lend(buffer).unwrap();
        }
        std::process::exit(0);
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_may_exit_with_loans_in_flight"])
        .env(PEER_VARIABLE, listener.local_addr().unwrap().to_string())
        .spawn()
        .unwrap();
    let from = listener.accept().unwrap().0;
    check_all(from);
    assert!(child.wait().unwrap().success());
}

/// A forked child inherits the sender and its buffers. It must neither read completions nor free
/// buffers that the kernel reads.
#[test]
fn a_forked_child_cannot_use_its_parents_loans() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let to = listener.accept().unwrap().0;
    from.set_nonblocking(true).unwrap();
    let pool = BufferPool::new(BUFFER_BYTES, BUFFERS).unwrap();
    let mut sender = Sender::new(from).unwrap();
    let mut lent = 0;
    while let Ok(mut buffer) = pool.take() {
        buffer.resize(BUFFER_BYTES).unwrap();
        buffer.fill(contents(lent));
        if sender.lend(buffer).is_err() {
            break;
        }
        lent += 1;
    }
    assert!(sender.report().outstanding_loans > 0);
    let mut sender = Some(sender);
    let code = haul_lab_sys::child::in_forked_child(|| {
        let mut sender = sender.take().unwrap();
        let refused = sender.lend(vec![0xEE; 10_000]).map_err(|refused| refused.error);
        let (reclaimed, waited) =
            (sender.reclaim().map(|_| ()), sender.wait_for_completions(Duration::ZERO));
        drop(sender);
        // The child's loan must be refused as a whole: the parent's unsent bytes come first.
        let is_refused = matches!(refused, Err(Error::Forked));
        i32::from(
            !(is_refused
                && matches!(reclaimed, Err(Error::Forked))
                && matches!(waited, Err(Error::Forked))),
        )
    });
    assert_eq!(code.unwrap(), Some(0), "the child was allowed to lend, reclaim or wait");
    let mut sender = sender.take().unwrap();
    let receiver = thread::spawn(move || {
        let (mut to, mut received) = (to, vec![0; BUFFER_BYTES]);
        for number in 0..lent {
            to.read_exact(&mut received).unwrap();
            assert!(
                received.iter().all(|&byte| byte == contents(number)),
                "buffer {number} arrived changed"
            );
        }
    });
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    while sender.wait_for_completions(Duration::from_millis(10)).unwrap() > 0 {
        assert!(std::time::Instant::now() < deadline);
    }
    receiver.join().unwrap();
    assert_eq!(sender.reclaim().unwrap().count(), lent);
    assert_eq!(pool.in_use(), 0);
}

/// The same without loans: the method `zerocopy` for files lets the kernel read the parent's pages.
#[test]
fn a_forked_child_cannot_read_its_parents_completions() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut to = listener.accept().unwrap().0;
    let settings =
        SendSettings::default().with_choice(haul::MethodChoice::Method(SendMethod::Zerocopy));
    let mut sender = Sender::with_settings(from, settings).unwrap();
    let memory = Memory::new(vec![7; 65536].as_slice(), 65536).unwrap();
    sender.send_file_all(&memory, 0..65536).unwrap();
    let mut received = vec![0; 65536];
    to.read_exact(&mut received).unwrap();
    let code = haul_lab_sys::child::in_forked_child(|| {
        let (waited, reclaimed) =
            (sender.wait_for_completions(Duration::ZERO), sender.reclaim().map(|_| ()));
        let sent = sender.send_file(&memory, 0..1).map(|_| ());
        i32::from(!matches!(
            (waited, reclaimed, sent),
            (Err(Error::Forked), Err(Error::Forked), Err(Error::Forked))
        ))
    });
    assert_eq!(code.unwrap(), Some(0), "the child was allowed to wait, reclaim or send");
    assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
}
