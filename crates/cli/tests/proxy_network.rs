//! `haul proxy` with IPv6, and with clients of several addresses.

mod common {
    pub mod proxy_command;
    pub mod proxy_process;
    pub mod sockets;
}

use common::proxy_command::{haul_proxy, read_log};
use common::proxy_process::ProxyProcess;
use common::sockets::{LOCALHOSTS, accept, connect_from, port};
use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// More than is copied.
const RESPONSE_BYTES: usize = 8 << 20;

/// Whether this machine has IPv6.
fn has_ipv6() -> bool {
    let has_ipv6 = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has_ipv6 {
        eprintln!("SKIPPED: this machine has no IPv6");
    }
    has_ipv6
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
    // IPv6 has only one address of this machine.
    let sources = [Ipv4Addr::new(127, 0, 0, 9).into(), LOCALHOSTS[1]];
    for (upstream, source) in LOCALHOSTS.into_iter().zip(sources) {
        let listener = TcpListener::bind((upstream, 0)).unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let mut command = haul_proxy(&["--listen", "[::]:0", "--to", &to]);
        command.args(["--source", &source.to_string(), "--send-proxy", "v2"]);
        let proxy = ProxyProcess::start(command.arg("--access-log").arg(&log));
        let port = port(&proxy.address);
        let mut clients = Vec::new();
        for address in LOCALHOSTS {
            let mut client = connect_from(address, port);
            let from = client.local_addr().unwrap();
            let server = accept(&listener);
            assert_eq!(server.peer_addr().unwrap().ip(), source, "--source");
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
    let deadline = Instant::now() + Duration::from_secs(120);
    let next = loop {
        if let Some(client) = connect(1) {
            break client;
        }
        assert!(Instant::now() < deadline, "none is accepted");
    };
    drop((second, other, next));
    proxy.finish();
}
