//! `haul proxy` with IPv6, with clients of several addresses, and as another user.

mod common {
    pub mod other_user;
    pub mod proxy_process;
}

use common::other_user::can_switch_user;
use common::proxy_process::ProxyProcess;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const LOCALHOSTS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
/// More than is copied.
const RESPONSE_BYTES: usize = 8 << 20;

/// The command `haul proxy`.
fn haul_proxy(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.arg("proxy").args(arguments);
    command
}

/// Whether this machine has IPv6.
fn has_ipv6() -> bool {
    let has_ipv6 = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has_ipv6 {
        eprintln!("SKIPPED: this machine has no IPv6");
    }
    has_ipv6
}

/// Connects to a port of this machine from an address.
fn connect_from(source: IpAddr, port: u16) -> TcpStream {
    let (family, to) = match source {
        IpAddr::V4(_) => (AddressFamily::INET, LOCALHOSTS[0]),
        IpAddr::V6(_) => (AddressFamily::INET6, LOCALHOSTS[1]),
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::new(source, 0)).unwrap();
    rustix::net::connect(&socket, &SocketAddr::new(to, port)).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn accept(listener: &TcpListener) -> TcpStream {
    let deadline = Instant::now() + Duration::from_secs(20);
    listener.set_nonblocking(true).unwrap();
    let server = loop {
        match listener.accept() {
            Ok((server, _)) => break server,
            Err(error) => assert!(Instant::now() < deadline, "no connection arrives: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    server.set_nonblocking(false).unwrap();
    server.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    server.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    server
}

fn port(address: &str) -> u16 {
    address.parse::<SocketAddr>().unwrap().port()
}

fn read_log(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The header of the PROXY protocol, version 2, of a client that has connected to an address.
fn header(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let octets = |address: SocketAddr| match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let ports = [from, to].map(|address| address.port().to_be_bytes());
    let addresses = [octets(from), octets(to), ports.concat()].concat();
    let family = if from.is_ipv4() { 0x11 } else { 0x21 };
    let start = [&b"\r\n\r\n\0\r\nQUIT\n\x21"[..], &[family, 0, addresses.len() as u8]].concat();
    [start, addresses].concat()
}

/// One listener accepts clients of both protocols. Upstreams of both receive the client's own
/// address, and bulk data is spliced.
#[test]
fn clients_and_upstreams_of_ipv4_and_ipv6_are_connected() {
    if !has_ipv6() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    for upstream in LOCALHOSTS {
        let listener = TcpListener::bind((upstream, 0)).unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let mut command = haul_proxy(&["--listen", "[::]:0", "--to", &to]);
        command.args(["--source", &upstream.to_string(), "--send-proxy", "v2"]);
        let proxy = ProxyProcess::start(command.arg("--access-log").arg(&log));
        let port = port(&proxy.address);
        let mut clients = Vec::new();
        for address in LOCALHOSTS {
            let mut client = connect_from(address, port);
            let from = client.local_addr().unwrap();
            let server = accept(&listener);
            assert_eq!(server.peer_addr().unwrap().ip(), upstream, "--source");
            let expected = header(from, SocketAddr::new(address, port));
            let mut header = vec![0; expected.len()];
            (&server).read_exact(&mut header).unwrap();
            assert_eq!(header, expected, "{from} to {upstream}");
            let response = vec![7; RESPONSE_BYTES];
            let mut received = Vec::new();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    (&server).write_all(&response).unwrap();
                    server.shutdown(std::net::Shutdown::Write).unwrap();
                });
                client.read_to_end(&mut received).unwrap();
            });
            assert!(received == response, "{address} to {upstream}");
            clients.push(from);
        }
        proxy.finish();
        let lines = read_log(&log);
        fs::remove_file(&log).unwrap();
        for client in clients {
            let line = lines.iter().find(|line| line["client"] == client.to_string()).unwrap();
            assert_eq!(line["end"], "complete", "{line}");
            assert_eq!(line["upstream"], to, "{line}");
            let spliced = line["to_client"]["spliced_bytes"].as_u64().unwrap();
            assert!(spliced > RESPONSE_BYTES as u64 / 2, "{line}");
        }
        assert_eq!(lines.len(), 2);
    }
}

/// `source-address` takes each client's address to one upstream, and different ones to both.
#[test]
fn clients_of_one_address_reach_the_same_upstream() {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let to = listeners.each_ref().map(|one| one.local_addr().unwrap().to_string()).join(",");
    let options = ["--listen", "127.0.0.1:0", "--balance", "source-address", "--to", &to];
    let proxy = ProxyProcess::start(&mut haul_proxy(&options));
    for (index, listener) in listeners.iter().enumerate() {
        let (index, listener) = (index as u8, listener.try_clone().unwrap());
        std::thread::spawn(move || {
            for server in listener.incoming() {
                // It ends with the test.
                let _ = server.and_then(|mut server| server.write_all(&[index]));
            }
        });
    }
    let mut used = HashSet::new();
    for last in 1..=40 {
        let chosen = [(); 3].map(|()| {
            let mut chosen = [9];
            let mut client = connect_from([127, 0, 1, last].into(), port(&proxy.address));
            client.read_exact(&mut chosen).unwrap();
            chosen[0]
        });
        assert_eq!(chosen, [chosen[0]; 3], "127.0.1.{last}");
        used.insert(chosen[0]);
    }
    assert_eq!(used, HashSet::from([0, 1]));
    proxy.finish();
}

/// A client beyond the limit of its address is refused. One of another address is not, and another
/// one is accepted once one has left.
#[test]
fn an_address_has_as_many_clients_as_it_may() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let limit = ["--max-connections-per-address", "2"];
    let mut command = haul_proxy(&["--listen", "127.0.0.1:0", "--to", &to]);
    let proxy = ProxyProcess::start(command.args(limit));
    std::thread::spawn(move || {
        for server in listener.incoming() {
            // They end with the test.
            std::thread::spawn(move || {
                let mut server = server.unwrap();
                server.write_all(b"y").and_then(|()| server.read(&mut [0]))
            });
        }
    });
    let connect = |last| {
        let client = connect_from([127, 0, 2, last].into(), port(&proxy.address));
        let is_accepted = matches!((&client).read(&mut [0]), Ok(1));
        is_accepted.then_some(client)
    };
    let [first, second, other] = [1, 1, 2].map(|last| connect(last).unwrap());
    assert!(connect(1).is_none(), "the third one");
    drop(first);
    // Until the proxy has closed the connection, the address still has two.
    let deadline = Instant::now() + Duration::from_secs(20);
    let next = loop {
        if let Some(client) = connect(1) {
            break client;
        }
        assert!(Instant::now() < deadline, "none is accepted");
    };
    drop((second, other, next));
    proxy.finish();
}

/// A proxy that root starts for another user forwards, opens its log again when it was renamed, and
/// hands its connections over to another process of that user.
#[test]
fn another_user_logs_again_and_hands_over() {
    if !can_switch_user() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (log, control) = (folder.path().join("log"), folder.path().join("control"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let command = || {
        let mut command = haul_proxy(&["--listen", "127.0.0.1:0", "--to", &to]);
        command.args(["--user", "nobody"]).arg("--access-log").arg(&log);
        command.arg("--control").arg(&control);
        command
    };
    let old = ProxyProcess::start(&mut command());
    let status = fs::read_to_string(format!("/proc/{}/status", old.process.id())).unwrap();
    assert!(!status.contains("Uid:\t0"), "{status}");
    let exchange = |client: &TcpStream, server: &TcpStream| {
        for (from, to) in [(client, server), (server, client)] {
            (&mut &*from).write_all(b"x").unwrap();
            (&mut &*to).read_exact(&mut [0]).unwrap();
        }
    };
    let connect = || {
        let client = connect_from(LOCALHOSTS[0], port(&old.address));
        let server = accept(&listener);
        exchange(&client, &server);
        (client, server)
    };
    let (first, kept) = (connect(), connect());
    let renamed = folder.path().join("log.1");
    fs::rename(&log, &renamed).unwrap();
    old.signal(Signal::HUP);
    old.wait_for("the log was opened again");
    drop(first);
    let new = ProxyProcess::start(command().arg("--upgrade"));
    old.join();
    exchange(&kept.0, &kept.1);
    drop(kept);
    new.finish();
    assert_eq!(read_log(&renamed), [] as [Value; 0]);
    let ends: Vec<_> = read_log(&log).iter().map(|line| line["end"].clone()).collect();
    assert_eq!(ends, ["complete", "complete"]);
}
