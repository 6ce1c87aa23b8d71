//! The loans of dropped senders, which a thread of the library keeps.
//!
//! This is a separate test binary because all dropped senders of a process share that thread, and a
//! bound: beyond it the oldest connections are reset.

use haul::{SendSettings, Sender};
use haul_testing::wait_until;
use rustix::net::sockopt;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Time until all completions must have arrived.
const TIMEOUT: Duration = Duration::from_secs(120);
const LOAN_BYTES: usize = 200_000;

/// Drops a sender whose peer has not read its loan. Returns another handle of its socket, the peer
/// and the loan.
fn dropped_in_flight(timeout_ms: u32) -> (TcpStream, TcpStream, Arc<[u8]>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let to = listener.accept().unwrap().0;
    // The sender's socket accepts the whole loan, and the peer's only a part of it.
    sockopt::set_socket_send_buffer_size(&from, 1 << 20).unwrap();
    sockopt::set_socket_recv_buffer_size(&to, 16 << 10).unwrap();
    sockopt::set_tcp_user_timeout(&from, timeout_ms).unwrap();
    let other = from.try_clone().unwrap();
    let lent: Arc<[u8]> = vec![7; LOAN_BYTES].into();
    let settings = SendSettings::default().with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    sender.lend(Arc::clone(&lent)).unwrap();
    assert!(sender.unsent_bytes() == 0 && sender.wants().completion);
    drop(sender);
    (other, to, lent)
}

/// The socket may be in use elsewhere, such as by a receiver.
#[test]
fn a_socket_is_left_as_it_was_after_the_last_completion() {
    for (timeout_ms, meanwhile_ms) in [(0, 120_000), (5000, 5000)] {
        let (other, mut to, lent) = dropped_in_flight(timeout_ms);
        let user_timeout_ms = || sockopt::tcp_user_timeout(&other).unwrap();
        assert_eq!(user_timeout_ms(), meanwhile_ms);
        assert!(is_polled(&other), "the completion would not be noticed");
        to.read_exact(&mut vec![0; LOAN_BYTES]).unwrap();
        wait_until("the loan is returned", || Arc::strong_count(&lent) == 1);
        assert_eq!(user_timeout_ms(), timeout_ms);
        // Every later event would wake the thread.
        assert!(!is_polled(&other));
        (&other).write_all(b"more").unwrap();
        to.read_exact(&mut [0; 4]).unwrap();
    }
}

/// Whether an epoll of this process has registered the socket, by its inode.
fn is_polled(socket: &TcpStream) -> bool {
    let inode = format!(" ino:{:x} ", rustix::fs::fstat(socket).unwrap().st_ino);
    let mut descriptors = fs::read_dir("/proc/self/fdinfo").unwrap();
    descriptors.any(|descriptor| {
        let lines = read(&descriptor.unwrap().path());
        lines.lines().any(|line| line.starts_with("tfd:") && line.contains(&inode))
    })
}

/// The contents of a file of /proc; empty if it is gone, as another test's descriptor may be.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// A program may wait for its signals in threads of its own (`sigwait`, `signalfd`).
#[test]
fn the_thread_that_keeps_the_loans_handles_no_signal() {
    let (_other, mut to, lent) = dropped_in_flight(0);
    let reaper = || {
        let threads = fs::read_dir("/proc/self/task").unwrap();
        let mut threads = threads.map(|thread| thread.unwrap().path());
        threads.find(|thread| read(&thread.join("comm")).trim() == "haul-reaper")
    };
    // A new thread names itself.
    wait_until("the thread has its name", || reaper().is_some());
    let status = read(&reaper().unwrap().join("status"));
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
    let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGALRM, libc::SIGPROF] {
        assert_ne!(blocked & 1 << (signal - 1), 0, "signal {signal}");
    }
    to.read_exact(&mut vec![0; LOAN_BYTES]).unwrap();
    wait_until("the loan is returned", || Arc::strong_count(&lent) == 1);
}

/// Closing a socket with `SO_LINGER` waits for what other calls have sent.
#[test]
fn a_socket_that_lingers_delays_no_other() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut to = listener.accept().unwrap().0;
    sockopt::set_socket_linger(&from, Some(3 * TIMEOUT)).unwrap();
    sockopt::set_socket_send_buffer_size(&from, 4 << 20).unwrap();
    sockopt::set_socket_recv_buffer_size(&to, 16 << 10).unwrap();
    let settings = SendSettings::default().with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    let lent: Arc<[u8]> = vec![7; LOAN_BYTES].into();
    sender.lend(Arc::clone(&lent)).unwrap();
    sender.send(&vec![8; 1 << 20]).unwrap();
    drop(sender);
    // Its loan returns, and its socket is closed, while other bytes are on the way. The packet with
    // the end of the loan may have some of them.
    to.read_exact(&mut vec![0; 2 * LOAN_BYTES]).unwrap();
    wait_until("the first loan is returned", || Arc::strong_count(&lent) == 1);
    thread::sleep(Duration::from_millis(20));
    let (_other, mut peer, other_lent) = dropped_in_flight(0);
    peer.read_exact(&mut vec![0; LOAN_BYTES]).unwrap();
    wait_until("the second loan is returned", || Arc::strong_count(&other_lent) == 1);
}
