//! Timeouts of blocking sockets under periodic signals, each of which interrupts every call.
//!
//! This is a separate test binary because the signals interrupt all threads of the process.

use haul::{
    Error, LoanLimits, Mapping, Memory, ReceiveSettings, Receiver, SendMethod, SendSettings, Sender,
};
use haul_lab_sys::signals::PeriodicSignals;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The timeout of the sockets.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Ends a test whose call never times out.
const LIMIT: Duration = Duration::from_secs(120);

/// The call that waits for completions of earlier loans.
const AT_THE_LIMIT: &str = "lend, at the limit";

type Call = Box<dyn FnOnce() -> Error + Send>;

fn on_loopback() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (from, listener.accept().unwrap().0)
}

/// Interrupts the calls every 50 ms, and checks that each of them times out.
fn under_signals(calls: Vec<(String, Call)>) {
    let signals = PeriodicSignals::start(Duration::from_millis(50)).unwrap();
    let (tx, rx) = mpsc::channel();
    let count = calls.len();
    let mut waiting: Vec<String> = calls.iter().map(|(name, _)| name.clone()).collect();
    for (name, call) in calls {
        let tx = tx.clone();
        thread::spawn(move || tx.send((name, call())));
    }
    let mut others = Vec::new();
    for _ in 0..count {
        let Ok((name, error)) = rx.recv_timeout(LIMIT) else { break };
        waiting.retain(|other| *other != name);
        let is_timeout = match error {
            Error::WouldBlock => name != AT_THE_LIMIT,
            Error::LoanLimit => name == AT_THE_LIMIT,
            _ => false,
        };
        others.extend((!is_timeout).then(|| format!("{name}: {error}")));
    }
    drop(signals);
    assert!(waiting.is_empty(), "no timeout in {LIMIT:?}: {waiting:?}");
    assert!(others.is_empty(), "{others:?}");
}

/// A receiver, and the peer that sends nothing.
fn silent(mapping: Mapping) -> (Receiver<TcpStream>, TcpStream) {
    let (from, to) = on_loopback();
    to.set_read_timeout(Some(TIMEOUT)).unwrap();
    let settings = ReceiveSettings::default().with_mapping(mapping);
    (Receiver::with_settings(to, settings).unwrap(), from)
}

#[test]
fn a_receiver_times_out_under_periodic_signals() {
    type Receive = fn(&mut Receiver<TcpStream>) -> Result<u64, Error>;
    let receives: [(&str, Receive); 5] = [
        ("receive", |receiver| receiver.receive().map(|chunk| chunk.map_or(0, |_| 1))),
        ("receive_into", |receiver| receiver.receive_into(&mut [0; 9]).map(|count| count as u64)),
        ("receive_into_file", |receiver| {
            receiver.receive_into_file(tempfile::tempfile().unwrap(), 0..9)
        }),
        ("discard", |receiver| receiver.discard(9)),
        ("expect", |receiver| {
            receiver.expect(100_000);
            receiver.receive().map(|chunk| chunk.map_or(0, |_| 1))
        }),
    ];
    let mut calls: Vec<(String, Call)> = Vec::new();
    for mapping in [Mapping::Always, Mapping::Never] {
        for (name, receive) in receives {
            let call = move || {
                let (mut receiver, _peer) = silent(mapping);
                receive(&mut receiver).unwrap_err()
            };
            calls.push((format!("{name}, {mapping:?}"), Box::new(call)));
        }
    }
    under_signals(calls);
}

/// A sender to a peer that reads nothing, which sends `memory` by `method`.
fn stalled(method: SendMethod) -> (Sender<TcpStream>, TcpStream) {
    let (from, to) = on_loopback();
    from.set_write_timeout(Some(TIMEOUT)).unwrap();
    let settings = SendSettings::default().with_choice(method);
    (Sender::with_settings(from, settings).unwrap(), to)
}

#[test]
fn a_sender_times_out_under_periodic_signals() {
    const BYTES: usize = 16 << 20;
    let mut calls: Vec<(String, Call)> = Vec::new();
    for method in [
        SendMethod::Sendfile,
        SendMethod::Splice,
        SendMethod::Vmsplice,
        SendMethod::ReadSend,
        SendMethod::ReadWrite,
        SendMethod::Zerocopy,
    ] {
        let call = move || {
            let (mut sender, _peer) = stalled(method);
            let memory = Memory::new(std::io::repeat(7), BYTES).unwrap();
            sender.send_file_all(&memory, 0..BYTES as u64).unwrap_err().error
        };
        calls.push((method.to_string(), Box::new(call)));
    }
    let send = || stalled(SendMethod::Sendfile).0.send_all(&vec![7; BYTES]).unwrap_err().error;
    calls.push(("send".into(), Box::new(send)));
    let lend = || {
        let (mut sender, _peer) = stalled(SendMethod::Sendfile);
        sender.lend(vec![7; BYTES]).unwrap();
        sender.flush().unwrap_err()
    };
    calls.push(("lend".into(), Box::new(lend)));
    let lend_at_the_limit = || {
        const LOAN_BYTES: usize = 32 << 10;
        let (from, peer) = on_loopback();
        from.set_write_timeout(Some(TIMEOUT)).unwrap();
        // Two loans fit into the send buffer. The next waits until the peer has accepted one.
        let limits = LoanLimits::default().with_loans_max(2);
        let settings = SendSettings::default().with_limits(limits);
        let mut sender = Sender::with_settings(from, settings).unwrap();
        // Loans are copied until the first one has completed.
        sender.lend(vec![7; LOAN_BYTES]).unwrap();
        assert_eq!(sender.wait_for_completions(LIMIT).unwrap(), 0);
        rustix::net::sockopt::set_socket_recv_buffer_size(&peer, 4096).unwrap();
        loop {
            if let Err(error) = sender.lend(vec![7; LOAN_BYTES]) {
                return error.error;
            }
        }
    };
    calls.push((AT_THE_LIMIT.into(), Box::new(lend_at_the_limit)));
    under_signals(calls);
}
