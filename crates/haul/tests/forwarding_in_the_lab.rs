//! Forwarders to a sink that refuses bytes for which its buffer has room (`TCP_NOTSENT_LOWAT`), so
//! that they stay in a pipe.

use haul::{Error, ForwardMethod, ForwardPool, ForwardReport, ForwardSettings, Forwarder, Step};
use haul_lab::{Lab, LabError};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const STREAM_BYTES: usize = 8 << 20;

/// Bytes that have arrived before the first step: several times what the sink accepts.
const QUEUED_BYTES: u64 = 56 << 10;

/// The longest wait of a test.
const LIMIT: Duration = Duration::from_secs(120);

/// The client's socket, the forwarder's two, and the server's.
type Chain = (TcpStream, TcpStream, TcpStream, TcpStream);

fn lab() -> Option<Lab> {
    let lab = match Lab::veth(&haul_lab::Settings::default()) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: there is no lab: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    lab.sender.set_sysctl("net.ipv4.tcp_notsent_lowat", "16384").unwrap();
    Some(lab)
}

fn chain(lab: &Lab) -> Chain {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let from = listener.accept().unwrap().0;
    let (to, server) = lab.connect().unwrap();
    for socket in [&from, &to] {
        socket.set_nonblocking(true).unwrap();
    }
    (client, from, to, server)
}

fn stream() -> Vec<u8> {
    (0..STREAM_BYTES as u64)
        .map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0])
        .collect()
}

fn settings() -> ForwardSettings {
    ForwardSettings::default().with_method(ForwardMethod::Splice)
}

/// Steps until the sink accepts no more. The server does not read.
fn fill(forwarder: &mut Forwarder<TcpStream, TcpStream>) {
    let deadline = Instant::now() + LIMIT;
    // More than the sink accepts, so that the first step leaves some of it in the pipe.
    while haul_sys::sockopt::bytes_to_read(forwarder.sockets().0).unwrap() < QUEUED_BYTES {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_micros(200));
    }
    while !matches!(forwarder.step().unwrap(), Step::Wait { b, .. } if b.write) {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_micros(200));
    }
}

/// Sends the stream on a separate thread, and ends it.
fn send(client: TcpStream) -> thread::JoinHandle<TcpStream> {
    thread::spawn(move || {
        // It fails if the test ends before; a loss shows at the server.
        let _ = (&client).write_all(&stream());
        let _ = client.shutdown(Shutdown::Write);
        client
    })
}

/// Receives the rest on a separate thread.
fn receive(mut server: TcpStream) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut received = Vec::new();
        server.read_to_end(&mut received).unwrap();
        received
    })
}

/// The bytes that a forwarder holds in a pipe are delivered by the process that has received them.
#[test]
fn a_forked_child_delivers_no_bytes_of_its_parents_forwarder() {
    let Some(lab) = lab() else { return };
    let (client, from, to, server) = chain(&lab);
    let pool = ForwardPool::with_settings(settings()).unwrap();
    let mut forwarder = Forwarder::one_way_with_pool(from, to, pool).unwrap();
    let sending = send(client);
    fill(&mut forwarder);
    let code = haul_lab_sys::child::in_forked_child(|| {
        i32::from(!matches!(forwarder.step(), Err(Error::Forked)))
    });
    assert_eq!(code.unwrap(), Some(0), "the child was allowed to forward");
    let receiving = receive(server);
    forwarder.forward().unwrap();
    drop(sending.join().unwrap());
    assert!(receiving.join().unwrap() == stream());
}

/// The bytes that a forwarder holds in a pipe are among its parts: another one goes on with them.
#[test]
fn bytes_in_a_pipe_are_taken_out_of_it_and_none_is_lost() {
    let Some(lab) = lab() else { return };
    let (client, from, to, server) = chain(&lab);
    let pool = ForwardPool::with_settings(settings()).unwrap();
    let mut forwarder = Forwarder::one_way_with_pool(from, to, pool.clone()).unwrap();
    let sending = send(client);
    fill(&mut forwarder);
    assert_eq!(pool.idle_pipes(), 0, "the pipe holds bytes");
    assert_eq!(forwarder.report().a_to_b.copied.bytes, 0);
    let parts = forwarder.into_parts().unwrap();
    assert!(!parts.a_to_b.is_empty() && parts.b_to_a.is_empty());
    let continued = Forwarder::one_way_with_pool(parts.a, parts.b, pool).unwrap();
    let mut continued = continued.with_first_bytes_to_b(&parts.a_to_b).unwrap();
    let receiving = receive(server);
    continued.forward().unwrap();
    drop(sending.join().unwrap());
    assert!(receiving.join().unwrap() == stream());
    let report = continued.report().a_to_b;
    assert!(report.spliced.bytes > 0 && report.fallbacks.is_empty(), "{report:?}");
}

#[test]
fn pipes_beyond_the_limit_give_their_bytes_to_memory_and_none_is_lost() {
    let Some(lab) = lab() else { return };
    for held_pipes_max in [0, 1] {
        let settings = settings().with_held_pipes_max(held_pipes_max).with_idle_pipes_max(4);
        let pool = ForwardPool::with_settings(settings).unwrap();
        let mut running: Vec<_> = (0..2)
            .map(|_| {
                let (client, from, to, server) = chain(&lab);
                let mut forwarder = Forwarder::one_way_with_pool(from, to, pool.clone()).unwrap();
                let sending = send(client);
                fill(&mut forwarder);
                (forwarder, sending, server, pool.idle_pipes())
            })
            .collect();
        // The first one holds its pipe, if one may; the other has given its pipe back.
        let idle: Vec<_> = running.iter().map(|(.., idle)| *idle).collect();
        assert_eq!(idle, [1 - held_pipes_max, 1], "{held_pipes_max} held at most");
        for (mut forwarder, sending, server, _) in running.drain(..) {
            let receiving = receive(server);
            forwarder.forward().unwrap();
            drop(sending.join().unwrap());
            assert!(receiving.join().unwrap() == stream(), "{held_pipes_max}");
            let report = forwarder.report().a_to_b;
            assert!(report.spliced.bytes > 0 && report.fallbacks.is_empty(), "{report:?}");
        }
        // The permits are back: a pipe may hold bytes again.
        let (client, from, to, _server) = chain(&lab);
        let mut forwarder = Forwarder::one_way_with_pool(from, to, pool.clone()).unwrap();
        let idle = pool.idle_pipes();
        let _sending = send(client);
        fill(&mut forwarder);
        assert_eq!(pool.idle_pipes(), idle - held_pipes_max, "{held_pipes_max} held at most");
        drop(forwarder);
    }
}

/// A stream whose other direction has ended survives a link that is down for a moment. The kernel
/// reports the missing route like the failure of the socket, if it is asked.
#[test]
fn a_half_closed_stream_survives_a_link_that_is_down_for_a_moment() {
    let Some(lab) = lab() else { return };
    if ["nft", "ip"].iter().any(|tool| Command::new(tool).arg("-V").output().is_err()) {
        eprintln!("SKIPPED: no link is down: nft (nftables) or ip (iproute2) is missing");
        return;
    }
    let (mut client, from, to, mut server) = chain(&lab);
    let mut forwarder = Forwarder::new(from, to).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let deadline = Instant::now() + LIMIT;
    let mut step_until = |is_done: &dyn Fn(Step, ForwardReport) -> bool| loop {
        let step = forwarder.step().unwrap();
        if is_done(step, forwarder.report()) {
            break;
        }
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(5));
    };
    step_until(&|step, _| matches!(step, Step::Wait { b, .. } if !b.read));
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    let set_link = |state| {
        let mut command = Command::new("ip");
        let command = command.args(["link", "set", lab.sender.device(), state]);
        let status = lab.sender.run_program(command).unwrap();
        assert!(status.is_ok_and(|status| status.success()), "ip link set {state}");
    };
    // The bytes are lost, and have no route when they are sent again.
    lab.set_loss("100%".parse().unwrap()).unwrap();
    client.write_all(b"late").unwrap();
    step_until(&|_, report| report.a_to_b.copied.bytes == 4);
    set_link("down");
    let until = Instant::now() + Duration::from_secs(2);
    step_until(&|_, _| Instant::now() >= until);
    lab.set_loss("0".parse().unwrap()).unwrap();
    set_link("up");
    client.shutdown(Shutdown::Write).unwrap();
    forwarder.forward().unwrap();
    drop(forwarder);
    let mut received = Vec::new();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    server.read_to_end(&mut received).unwrap();
    assert_eq!(received, b"late");
}
