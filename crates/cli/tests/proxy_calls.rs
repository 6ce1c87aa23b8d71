//! The system calls of `haul proxy`: few for each message, and none without cause.

mod common {
    pub mod exchange;
    pub mod proxy_command;
    pub mod proxy_process;
}

use common::exchange::exchange;
use common::proxy_command::{haul_proxy, read_log};
use common::proxy_process::ProxyProcess;
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Counts the system calls of a process during a piece of work; `None` if they cannot be traced.
fn count_calls(process: &Child, meanwhile: impl FnOnce()) -> Option<usize> {
    let text = trace_calls(process, &["-c", "-U", "calls,name"], meanwhile)?;
    // The largest number is the total. There is none if nothing was called.
    let numbers = text.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok());
    Some(numbers.max().unwrap_or(0))
}

/// What strace has written of a process during a piece of work; `None` without strace, or where it
/// may not trace the process.
fn trace_calls(process: &Child, options: &[&str], meanwhile: impl FnOnce()) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    let mut strace = Command::new("strace");
    strace.arg("-f").args(options).arg("-o").arg(&output);
    strace.args(["-p", &process.id().to_string()]).stderr(Stdio::piped());
    let Ok(mut strace) = strace.spawn() else {
        eprintln!("SKIPPED: system calls are not traced: no strace (ci/install)");
        return None;
    };
    let mut messages = BufReader::new(strace.stderr.take().unwrap());
    let mut text = String::new();
    messages.read_line(&mut text).unwrap();
    if !text.contains("attached") {
        eprintln!("SKIPPED: system calls are not traced: {text}");
        return None;
    }
    meanwhile();
    kill_process(Pid::from_child(&strace), Signal::INT).unwrap();
    strace.wait().unwrap();
    Some(fs::read_to_string(&output).unwrap())
}

/// Waiting, receiving and sending: a small message needs no other call in a loop of one connection.
#[test]
fn a_small_message_takes_at_most_three_system_calls() {
    const MESSAGES: usize = 2000;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = start_proxy(&listener, &[]);
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    let mut server = listener.accept().unwrap().0;
    let mut exchange = |count: usize| {
        let mut message = [7; 100];
        for _ in 0..count {
            client.write_all(&message).unwrap();
            server.read_exact(&mut message).unwrap();
            server.write_all(&message).unwrap();
            client.read_exact(&mut message).unwrap();
        }
    };
    // The connection is established, and its first messages have passed.
    exchange(10);
    let Some(calls) = count_calls(&proxy.process, || exchange(MESSAGES)) else { return };
    // Both directions, and what the other threads do in the meantime.
    assert!(calls <= 3 * 2 * MESSAGES + MESSAGES / 20, "{calls}");
    assert!(calls >= 2 * 2 * MESSAGES, "they were counted: {calls}");
    drop((client, server));
    proxy.finish();
}

/// Starts a proxy with one loop to a listener.
fn start_proxy(listener: &TcpListener, options: &[&str]) -> ProxyProcess {
    let upstream = listener.local_addr().unwrap().to_string();
    let mut command = haul_proxy(&["--listen", "127.0.0.1:0", "--to", &upstream, "--workers", "1"]);
    ProxyProcess::start(command.args(options))
}

/// A keep-alive below ten seconds is set at once. A longer keep-alive is spread over some seconds,
/// of which the trace of a busy machine may have one.
#[test]
fn a_short_keep_alive_is_set_at_once() {
    for (options, are_all_set) in [(&[][..], false), (&["--keepalive", "5s"], true)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = start_proxy(&listener, options);
        let connect = || {
            let client = TcpStream::connect(&proxy.address).unwrap();
            let mut server = listener.accept().unwrap().0;
            (&client).write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
            (client, server)
        };
        let mut connections = Vec::new();
        let trace = trace_calls(&proxy.process, &["-e", "trace=setsockopt"], || {
            connections.extend((0..10).map(|_| connect()));
        });
        let Some(trace) = trace else { return };
        let count = trace.lines().filter(|line| line.contains("SO_KEEPALIVE, [1]")).count();
        assert_eq!(count == 10, are_all_set, "{trace}");
        drop(connections);
        proxy.finish();
    }
}

/// Writes until the socket and everything behind it are full; returns the number of bytes.
fn fill(mut stream: &TcpStream) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let bytes = vec![1; 1 << 16];
    let mut written = 0;
    while let Ok(count) = stream.write(&bytes) {
        written += count;
    }
    written
}

/// Reads what [`fill`] has written.
fn read_filled(mut stream: &TcpStream, len: usize) {
    let mut received = vec![0; len];
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream.read_exact(&mut received).unwrap();
    assert!(received.iter().all(|&byte| byte == 1), "the bytes have changed");
}

/// The last packets of connections that end at the same time leave close together, and share an
/// interrupt of the other side: the sockets are closed after them.
#[test]
fn sockets_close_after_the_last_packets_of_all_connections() {
    const CONNECTIONS: usize = 8;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = start_proxy(&listener, &[]);
    let connect = |_| {
        let mut client = TcpStream::connect(&proxy.address).unwrap();
        let server = listener.accept().unwrap().0;
        for socket in [&client, &server] {
            socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        }
        server.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        (client, server)
    };
    let (clients, servers): (Vec<_>, Vec<_>) = (0..CONNECTIONS).map(connect).unzip();
    let trace = trace_calls(&proxy.process, &["-e", "trace=shutdown,close"], || {
        let pid = Pid::from_child(&proxy.process);
        kill_process(pid, Signal::STOP).unwrap();
        drop(clients);
        kill_process(pid, Signal::CONT).unwrap();
        for mut server in servers {
            assert_eq!(server.read(&mut [0]).unwrap(), 0);
        }
    });
    proxy.finish();
    let Some(trace) = trace else { return };
    let calls = trace.lines().filter(|line| line.contains("shutdown(") || line.contains("close("));
    let calls: Vec<_> = calls.map(|line| line.contains("shutdown(")).collect();
    assert_eq!(calls.iter().filter(|is_shutdown| **is_shutdown).count(), CONNECTIONS, "{trace}");
    // A turn ends after 100 µs, which the trace takes up, but always drives two ready connections.
    assert!(calls.windows(2).any(|two| two == [true, true]), "{trace}");
}

/// Connections that wait for a peer do not keep the loop busy, whatever has happened to them.
#[test]
fn connections_that_wait_take_no_calls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let proxy = start_proxy(&listener, &["--access-log", log.to_str().unwrap()]);
    let connect = || {
        let client = TcpStream::connect(&proxy.address).unwrap();
        let mut server = listener.accept().unwrap().0;
        (&client).write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
        (client, server)
    };
    let [idle, half_closed, stalled, stalled_and_ended, stalled_and_reset, sent_and_reset] =
        [(); 6].map(|()| connect());
    half_closed.0.shutdown(Shutdown::Write).unwrap();
    half_closed.1.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    assert_eq!((&half_closed.1).read(&mut [0]).unwrap(), 0);
    let filled = [&stalled, &stalled_and_ended, &stalled_and_reset].map(|(client, _)| fill(client));
    stalled_and_ended.0.shutdown(Shutdown::Write).unwrap();
    // The whole stream is in the socket to the server, which does not acknowledge it.
    (&sent_and_reset.0).write_all(&vec![1; 1 << 20]).unwrap();
    sent_and_reset.0.shutdown(Shutdown::Write).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    // What they have sent is still delivered for a while.
    let servers = [stalled_and_reset, sent_and_reset].map(|(client, server)| {
        rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
        server
    });
    std::thread::sleep(Duration::from_millis(500));
    let wait = || {
        exchange(&idle.0, &idle.1);
        std::thread::sleep(Duration::from_secs(3));
    };
    let Some(calls) = count_calls(&proxy.process, wait) else { return };
    assert!(calls >= 4, "those of the exchange were counted: {calls}");
    // Each thread may look after something once a second.
    assert!(calls < 100, "{calls} calls in three seconds");
    // They go on.
    read_filled(&stalled.1, filled[0]);
    read_filled(&stalled_and_ended.1, filled[1]);
    assert_eq!((&stalled_and_ended.1).read(&mut [0]).unwrap(), 0);
    drop((idle, half_closed, stalled, stalled_and_ended, servers));
    proxy.finish();
    let log = read_log(&log);
    for (id, filled) in [(3, filled[0]), (4, filled[1])] {
        let line = log.iter().find(|line| line["id"] == id).unwrap();
        assert!(line["to_upstream"]["spliced_bytes"].as_u64().unwrap() > filled as u64 / 2);
        assert_eq!(line["end"], "complete", "{line}");
    }
}

/// The descriptors of a process that are pipes, two for each.
fn pipe_descriptors(process: &Child) -> usize {
    let entries = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap();
    let links = entries.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("pipe:")).count()
}

/// Of the readers that stall after a large transfer has begun, eight hold a pipe, and four may be
/// idle. The others have what the proxy has received for them in their sockets, or in memory.
#[test]
fn stalled_readers_of_a_loop_hold_eight_pipes() {
    const READERS: usize = 16;
    const PIPES_MAX: usize = 8 + 4;
    /// More than a transfer has spliced before it may hold a pipe.
    const FIRST: usize = 3 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let proxy = start_proxy(&listener, &["--access-log", log.to_str().unwrap()]);
    let before = pipe_descriptors(&proxy.process);
    let mut held = 0;
    let readers: Vec<_> = (0..READERS)
        .map(|_| {
            let client = TcpStream::connect(&proxy.address).unwrap();
            let server = listener.accept().unwrap().0;
            server.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| (&server).write_all(&vec![1; FIRST]).unwrap());
                read_filled(&client, FIRST);
            });
            let filled = fill(&server);
            held = held.max(pipe_descriptors(&proxy.process) - before);
            (client, server, filled)
        })
        .collect();
    assert!(held >= 2 * 2, "some are held: {held}");
    assert!(held <= 2 * PIPES_MAX, "{held} descriptors of pipes");
    for (client, server, filled) in readers {
        read_filled(&client, filled);
        exchange(&client, &server);
    }
    let idle = pipe_descriptors(&proxy.process) - before;
    assert!(idle <= 2 * 4, "{idle} descriptors of idle pipes");
    proxy.finish();
    for line in read_log(&log) {
        assert!(line["to_client"]["spliced_bytes"].as_u64().unwrap() > FIRST as u64, "{line}");
    }
}

/// What arrives for a client that does not read wakes the loop a few times, not for each packet.
#[test]
fn what_cannot_be_forwarded_wakes_the_loop_a_few_times() {
    const PIECE: usize = 1000;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let proxy = start_proxy(&listener, &["--access-log", log.to_str().unwrap()]);
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    let server = listener.accept().unwrap().0;
    server.set_nodelay(true).unwrap();
    server.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut sent = Vec::new();
    let trace = trace_calls(&proxy.process, &[], || {
        loop {
            let piece = [(sent.len() / PIECE) as u8; PIECE];
            // The last one may fit in part.
            match (&server).write(&piece) {
                Ok(count) => sent.extend_from_slice(&piece[..count]),
                Err(_) => break,
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    let mut received = vec![0; sent.len()];
    client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    client.read_exact(&mut received).unwrap();
    assert!(received == sent, "the bytes have changed");
    drop((client, server));
    proxy.finish();
    let log = read_log(&log);
    let bytes = |method: &str| log[0]["to_client"][method].as_u64().unwrap() as usize;
    // Most are small messages, until they wait for the reader.
    assert_eq!(bytes("copied_bytes") + bytes("spliced_bytes"), sent.len(), "{log:?}");
    assert!(bytes("copied_bytes") > 0, "{log:?}");
    let Some(trace) = trace else { return };
    // All events of a large transfer are left out, and the events of bytes of a smaller transfer.
    let leaves_bytes_out =
        |line: &str| line.contains("_DEL") || line.contains("_MOD") && !line.contains("EPOLLIN");
    assert!(trace.lines().any(leaves_bytes_out), "{trace}");
    // Once a second the loop looks after something, without an event. Calls of several threads are
    // written in two parts, of which the second has the result.
    let calls = trace.lines().filter(|line| !line.ends_with(" = 0") && !line.ends_with("...>"));
    let calls: Vec<_> = calls.map(|line| line.contains("epoll_pwait")).collect();
    let waits_in_a_row = calls.chunk_by(|a, b| a == b).filter(|run| run[0]).map(<[_]>::len).max();
    assert!(waits_in_a_row.is_some_and(|waits| waits <= 10), "{waits_in_a_row:?} for nothing");
}

/// The kernel reports a slow reader often, each time with little room. It has large splices all the
/// same, fewer than it reads pieces, and the bytes are not lost.
#[test]
fn a_slow_reader_takes_fewer_calls_than_its_own() {
    /// More than the proxy's socket to the client has room for (`tcp_wmem`).
    const LEN: usize = 16 << 20;
    const PIECE: usize = 4 << 10;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let proxy = start_proxy(&listener, &["--access-log", log.to_str().unwrap()]);
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 2 * PIECE).unwrap();
    rustix::net::connect(&socket, &proxy.address.parse::<SocketAddr>().unwrap()).unwrap();
    let mut client = TcpStream::from(socket);
    client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let server = listener.accept().unwrap().0;
    server.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    let content: Vec<u8> = (0..LEN).map(|at| (at / 1000) as u8).collect();
    let mut reads = 0;
    let mut read_all = || {
        let (mut received, mut piece) = (0, [0; PIECE]);
        while received < LEN {
            let count = client.read(&mut piece).unwrap();
            assert_ne!(count, 0, "the stream has ended");
            assert!(piece[..count] == content[received..][..count], "the bytes have changed");
            received += count;
            reads += 1;
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    let send_and_receive = || {
        std::thread::scope(|scope| {
            // It fails if the client does not read.
            scope.spawn(|| drop((&server).write_all(&content)));
            read_all();
        });
    };
    let Some(calls) = count_calls(&proxy.process, send_and_receive) else { return };
    drop((client, server));
    proxy.finish();
    let log = read_log(&log);
    let spliced = log[0]["to_client"]["spliced_bytes"].as_u64().unwrap() as usize;
    assert!(spliced >= LEN / 100 * 99, "{log:?}");
    assert!(calls >= 20, "they were counted: {calls}");
    assert!(calls <= reads, "{calls} calls for {reads} reads");
}

/// The length of bulk data.
const BULK: usize = 8 << 20;

/// Sends bulk data to the server, and checks it.
fn send_bulk(mut client: &TcpStream, server: &TcpStream) {
    client.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| client.write_all(&vec![1; BULK]).unwrap());
        read_filled(server, BULK);
    });
}

/// The first number that no descriptor of a process has: with this limit it can open none.
fn free_descriptor(process: &Child) -> u64 {
    let open = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap();
    let open: Vec<u64> =
        open.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    (0..=open.len() as u64).find(|number| !open.contains(number)).unwrap()
}

/// Clients wait in the kernel's queue while the process lacks descriptors. The loop does not try
/// again and again, and logs the error once.
#[test]
fn without_descriptors_clients_wait_and_the_loop_sleeps() {
    const CLIENTS: usize = 30;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let proxy = start_proxy(&listener, &["--access-log", log.to_str().unwrap()]);
    let connect = || {
        let client = TcpStream::connect(&proxy.address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        client
    };
    let first = connect();
    let first_server = listener.accept().unwrap().0;
    exchange(&first, &first_server);
    let pid = Some(Pid::from_child(&proxy.process));
    let set_limit = |current| {
        let limit = Rlimit { current: Some(current), maximum: Some(20_000) };
        prlimit(pid, Resource::Nofile, limit).unwrap()
    };
    // None is left, as if other files of the process had taken them.
    let before = set_limit(free_descriptor(&proxy.process));
    let clients: Vec<_> = (0..CLIENTS).map(|_| connect()).collect();
    std::thread::sleep(Duration::from_millis(200));
    let wait = || {
        exchange(&first, &first_server);
        std::thread::sleep(Duration::from_secs(3));
    };
    let calls = count_calls(&proxy.process, wait);
    // The connection that is established goes on, without a pipe.
    send_bulk(&first, &first_server);
    let is_expected = |calls| (4..200).contains(&calls);
    assert!(calls.is_none_or(is_expected), "{calls:?} calls in three seconds");
    exchange(&first, &first_server);
    set_limit(before.current.unwrap_or(20_000));
    let deadline = Instant::now() + Duration::from_secs(120);
    listener.set_nonblocking(true).unwrap();
    // The connections to the server may come in another order, so each client sends its number.
    for (number, mut client) in clients.iter().enumerate() {
        client.write_all(&[number as u8]).unwrap();
    }
    for _ in &clients {
        let mut server = loop {
            match listener.accept() {
                Ok((server, _)) => break server,
                Err(error) => assert!(Instant::now() < deadline, "clients still wait: {error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        server.set_nonblocking(false).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let (mut number, mut answer) = ([0], [0]);
        server.read_exact(&mut number).unwrap();
        server.write_all(&number).unwrap();
        (&clients[usize::from(number[0])]).read_exact(&mut answer).unwrap();
        assert_eq!(answer, number);
    }
    send_bulk(&first, &first_server);
    drop((first, first_server, clients));
    let messages = proxy.finish();
    let log = read_log(&log);
    let direction = &log.iter().find(|line| line["id"] == 1).unwrap()["to_upstream"];
    let bytes = |method: &str| direction[method].as_u64().unwrap() as usize;
    assert!(bytes("copied_bytes") >= BULK && bytes("spliced_bytes") >= BULK / 2, "{direction}");
    let fallback = direction["fallbacks"][0].as_str().unwrap();
    assert!(fallback.contains("Too many open files"), "{fallback}");
    let complaints = messages.lines().filter(|line| line.contains("Too many open files"));
    assert_eq!(complaints.count(), 1, "{messages}");
}
