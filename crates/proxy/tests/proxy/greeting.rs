//! Routes by the client's TLS greeting.

use crate::bulk::{assert_bulk_is_spliced, exchange_bulk};
use crate::common::{LIMIT, Proxy, accept, lab, listen, upstream};
use haul_proxy::{Config, GroupConfig, HeaderVersion, Route, RouteCondition, UpstreamConfig};
use haul_server::proxy_protocol::{self, Origin};
use rustix::net::sockopt::set_socket_linger;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// The greeting of Chromium 156 that asks for `www.example.com`, with a post-quantum key share
/// (X25519MLKEM768), which no library of the tests has. A segment holds only a part of it.
const POST_QUANTUM_HELLO: &[u8] = include_bytes!("hello-x25519mlkem768.bin");

/// The greeting of a client that asks for this server. An address stands for no server name.
pub fn hello(server: &str, protocols: &[&str]) -> Vec<u8> {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|one| one.as_bytes().to_vec()).collect();
    let name = ServerName::try_from(server.to_owned()).unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut bytes).unwrap();
    }
    bytes
}

/// The greeting of a client that speaks so many protocols.
fn long_hello(protocols: usize) -> Vec<u8> {
    let names: Vec<_> = (0..protocols).map(|at| format!("protocol-{at}")).collect();
    hello("a.b.example.com", &names.iter().map(String::as_str).collect::<Vec<_>>())
}

fn route(group: &str, condition: impl FnOnce(&mut RouteCondition)) -> Route {
    let mut route = Route::new(RouteCondition::default(), group);
    condition(&mut route.condition);
    route
}

/// Sets a route by which the greeting of each client is waited for. All routes lead to the group of
/// the first listener.
pub fn set_example_route(config: &mut Config) {
    let group = config.groups[0].name.clone();
    config.listeners[0].routes = vec![route(&group, |condition| {
        condition.server_names = vec!["*.example.com".parse().unwrap()];
    })];
}

/// Sets routes to groups of one upstream each, and none for clients that none of them fits.
fn set_routes(config: &mut Config, upstreams: &[UpstreamConfig], routes: Vec<Route>) {
    let group = |(route, upstream): (&Route, &UpstreamConfig)| {
        GroupConfig::new(&route.group, [upstream.clone()])
    };
    config.groups = routes.iter().zip(upstreams).map(group).collect();
    config.listeners[0].group = None;
    config.listeners[0].routes = routes;
}

/// Waits until the proxy has reset the connection.
pub fn assert_reset(mut client: &TcpStream) {
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}

/// The headers of three groups.
const HEADERS: [Option<HeaderVersion>; 3] =
    [Some(HeaderVersion::V2), Some(HeaderVersion::V1), None];

/// Reads a header of this version, of a client of IPv4.
fn read_header(from: &mut TcpStream, version: Option<HeaderVersion>, client: &TcpStream) {
    let mut header = Vec::new();
    let is_whole = |header: &[u8]| match version {
        Some(HeaderVersion::V1) => header.ends_with(b"\n"),
        Some(_) => header.len() == 28,
        None => true,
    };
    while !is_whole(&header) {
        let mut byte = [0];
        from.read_exact(&mut byte).unwrap();
        header.extend(byte);
    }
    if version.is_some() {
        let (header, _) = proxy_protocol::parse(&header).unwrap().unwrap();
        assert_eq!(header.origin, Origin::Client(client.local_addr().unwrap()));
    }
}

/// Each group's upstreams receive its own header.
#[test]
fn tls_clients_are_routed_by_name_and_protocol_and_their_bytes_are_unchanged() {
    let lab = lab();
    let listeners: Vec<_> = (0..3).map(|_| listen(&lab)).collect();
    let upstreams: Vec<_> = listeners.iter().map(upstream).collect();
    let proxy = Proxy::start(lab, upstreams.clone(), |config| {
        let routes = vec![
            route("acme", |condition| condition.protocols = vec!["acme-tls/1".into()]),
            route("sites", |condition| {
                condition.server_names = vec!["*.example.com".parse().unwrap()];
            }),
            route("unnamed", |condition| condition.has_server_name = Some(false)),
        ];
        set_routes(config, &upstreams, routes);
        for (group, version) in config.groups.iter_mut().zip(HEADERS) {
            group.send_header = version;
        }
    });
    let cases = [
        (hello("www.example.com", &["h2", "acme-tls/1"]), Some(0)),
        (hello("WWW.Example.com", &[]), Some(1)),
        // More than a segment, and more than a TLS record.
        (long_hello(700), Some(1)),
        (long_hello(4000), Some(1)),
        (hello("192.0.2.1", &["h2"]), Some(2)),
        (hello("example.com", &["h2"]), None),
        // It announces 128 KiB, more than the parser takes.
        (vec![22, 3, 1, 0, 4, 1, 2, 0, 0], None),
        (b"GET / HTTP/1.1\r\n".to_vec(), None),
        (POST_QUANTUM_HELLO.to_vec(), Some(1)),
    ];
    for (greeting, expected) in &cases {
        // All at once, and byte by byte at its start.
        for first in [0, greeting.len().min(300)] {
            let mut client = proxy.connect();
            client.set_nodelay(true).unwrap();
            let (pieces, rest) = greeting.split_at(first);
            // A client that is reset already cannot write, and the reset is reported once.
            let written =
                pieces.chunks(1).chain([rest]).try_for_each(|piece| client.write_all(piece));
            let Some(expected) = expected else {
                match written {
                    Ok(()) => assert_reset(&client),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
                }
                continue;
            };
            written.unwrap();
            let mut server = accept(&listeners[*expected]);
            read_header(&mut server, HEADERS[*expected], &client);
            let mut received = vec![0; greeting.len()];
            server.read_exact(&mut received).unwrap();
            assert!(received == greeting[..], "the greeting has changed");
            // What follows the greeting, which was copied.
            exchange_bulk(&client, &server);
        }
    }
    let log = proxy.finish();
    assert_eq!(log.len(), 2 * cases.len());
    for (line, (greeting, expected)) in log.iter().zip(cases.iter().flat_map(|case| [case; 2])) {
        let group = expected.map(|index| ["acme", "sites", "unnamed"][index]);
        assert_eq!(line["group"].as_str(), group, "{line}");
        assert_eq!(line["end"] == "no-route", group.is_none(), "{line}");
        if group.is_some() {
            assert!(line["to_upstream"]["copied_bytes"].as_u64() >= Some(greeting.len() as u64));
            assert_bulk_is_spliced(line);
        }
    }
    assert_eq!(log[2]["server_name"], "www.example.com");
    assert!(log[8]["server_name"].is_null());
}

/// The server of such a client may speak first, which it does only once it is connected.
#[test]
fn a_client_that_is_silent_or_speaks_no_tls_takes_a_route_of_its_own() {
    let lab = lab();
    let (tls, plain) = (listen(&lab), listen(&lab));
    let upstreams = [upstream(&tls), upstream(&plain)];
    let proxy = Proxy::start(lab, upstreams.clone(), |config| {
        config.limits.timeouts.greeting = Duration::from_secs(1);
        let routes = vec![
            route("tls", |condition| condition.is_tls = Some(true)),
            route("plain", |condition| condition.is_tls = Some(false)),
        ];
        set_routes(config, &upstreams, routes);
    });
    let greet = |listener: &TcpListener, client: &mut TcpStream, first: &[u8]| {
        let mut server = accept(listener);
        let mut received = vec![0; first.len()];
        server.read_exact(&mut received).unwrap();
        assert_eq!(received, first);
        server.write_all(b"220 ready").unwrap();
        let mut banner = [0; 9];
        client.read_exact(&mut banner).unwrap();
        assert_eq!(banner, *b"220 ready");
    };
    let mut silent = proxy.connect();
    greet(&plain, &mut silent, b"");
    // Half of a greeting is none.
    let half = &hello("example.com", &[])[..100];
    let mut slow = proxy.connect();
    slow.write_all(half).unwrap();
    greet(&plain, &mut slow, half);
    let mut ssh = proxy.connect();
    ssh.write_all(b"SSH-2.0-x\r\n").unwrap();
    greet(&plain, &mut ssh, b"SSH-2.0-x\r\n");
    // One that has ended its stream may wait for the response.
    let mut ended = proxy.connect();
    ended.shutdown(std::net::Shutdown::Write).unwrap();
    greet(&plain, &mut ended, b"");
    let whole = hello("example.com", &[]);
    let mut client = proxy.connect();
    client.write_all(&whole).unwrap();
    greet(&tls, &mut client, &whole);
    drop((silent, slow, ssh, client, ended));
    proxy.finish();
}

#[test]
fn a_client_that_is_gone_before_its_greeting_reaches_no_upstream() {
    let lab = lab();
    let listener = listen(&lab);
    let upstreams = [upstream(&listener)];
    let proxy = Proxy::start(lab, upstreams.clone(), |config| {
        let routes = vec![route("tls", |condition| condition.is_tls = Some(true))];
        set_routes(config, &upstreams, routes);
        config.limits.timeouts.greeting = LIMIT;
    });
    let mut client = proxy.connect();
    client.write_all(&hello("example.com", &[])[..50]).unwrap();
    set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let log = proxy.finish();
    assert_eq!((&log[0]["end"], &log[0]["connect_attempts"]), (&"client-failed".into(), &0.into()));
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}
