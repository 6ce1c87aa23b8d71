//! The PROXY protocol: the headers that upstreams receive, and the headers of proxies in front.

use crate::bulk::{assert_bulk_is_spliced, exchange_bulk};
use crate::common::{LIMIT, accept, start_proxy};
use crate::greeting::hello;
use haul_proxy::{
    CheckConfig, GroupConfig, HeaderField, HeaderVersion, ListenerConfig, TrustedProxies,
};
use haul_server::proxy_protocol::{self, FieldType, Header, Origin};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

/// A proxy in front on the same host connects to a Unix socket.
#[test]
fn a_header_is_received_at_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("listen");
    let (proxy, listener) = start_proxy(|config| {
        let address = format!("unix:{}", path.display()).parse().unwrap();
        config.listeners.push(ListenerConfig::new(address, Some("servers")));
        config.groups[0].send_header = Some(HeaderVersion::V1);
        config.trusted_proxies = TrustedProxies::new(["unix".parse().unwrap()]);
    });
    let header = b"PROXY TCP4 192.0.2.7 10.0.0.1 51234 443\r\n";
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(&[&header[..], b"x"].concat()).unwrap();
    let mut received = vec![0; header.len() + 1];
    accept(&listener).read_exact(&mut received).unwrap();
    assert_eq!(
        received.escape_ascii().to_string(),
        [&header[..], b"x"].concat().escape_ascii().to_string()
    );
    drop(client);
    let log = proxy.finish();
    assert_eq!(log[0]["client"], "192.0.2.7:51234", "{log:?}");
}

/// The networks of the lab's clients, also of a lab without namespaces.
fn trusted_clients() -> TrustedProxies {
    TrustedProxies::new(["10.77.0.2", "127.0.0.1"].map(|text| text.parse().unwrap()))
}

/// Reads until the end of the header's line.
fn line(mut from: &TcpStream) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        from.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

#[test]
fn the_upstream_is_told_the_clients_address() {
    let (proxy, listener) = start_proxy(|config| {
        config.groups[0].send_header = Some(HeaderVersion::V1);
    });
    let mut client = proxy.connect();
    let server = accept(&listener);
    let (from, to) = (client.local_addr().unwrap(), proxy.address);
    let expected =
        format!("PROXY TCP4 {} {} {} {}\r\n", from.ip(), to.ip(), from.port(), to.port());
    assert_eq!(line(&server), expected);
    client.write_all(b"request").unwrap();
    (&server).read_exact(&mut [0; 7]).unwrap();
    drop((client, server));
    proxy.finish();
}

/// A proxy in front of this one names the client, and its header is passed on as version 2.
#[test]
fn the_client_that_a_trusted_proxy_names_is_passed_on() {
    let (proxy, listener) = start_proxy(|config| {
        config.trusted_proxies = trusted_clients();
        config.groups[0].send_header = Some(HeaderVersion::V2);
    });
    let mut front = proxy.connect();
    for piece in [&b"PROXY TCP4 192.0.2.7 10.0"[..], b".0.1 5000 80\r\nrequest"] {
        front.write_all(piece).unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    let mut server = accept(&listener);
    let mut header = [0; 28];
    server.read_exact(&mut header).unwrap();
    assert_eq!(header[..12], *b"\r\n\r\n\0\r\nQUIT\n");
    assert_eq!((header[12], header[13]), (0x21, 0x11));
    assert_eq!(header[16..20], [192, 0, 2, 7]);
    assert_eq!(header[24..26], 5000u16.to_be_bytes());
    let mut request = [0; 7];
    server.read_exact(&mut request).unwrap();
    assert_eq!(request, *b"request");
    drop((front, server));
    let log = proxy.finish();
    assert_eq!(log[0]["client"], "192.0.2.7:5000", "{log:?}");
}

/// A field of the header: its type, the length of its value, and the value.
fn field(kind: u8, value: &[u8]) -> Vec<u8> {
    [&[kind][..], &u16::try_from(value.len()).unwrap().to_be_bytes(), value].concat()
}

/// A header, version 2, of a client of 192.0.2.7 that has connected to 198.51.100.1.
fn header_with(fields: &[u8]) -> Vec<u8> {
    let mut header = b"\r\n\r\n\0\r\nQUIT\n\x21\x11".to_vec();
    header.extend(u16::try_from(12 + fields.len()).unwrap().to_be_bytes());
    header.extend([192, 0, 2, 7, 198, 51, 100, 1, 0, 80, 1, 187]);
    header.extend(fields);
    header
}

/// Reads a header of version 2. A checksum is verified, and so are the lengths.
fn read_header(mut from: &TcpStream) -> Header {
    let mut header = vec![0; 16];
    from.read_exact(&mut header).unwrap();
    let rest = u16::from_be_bytes([header[14], header[15]]);
    header.resize(16 + usize::from(rest), 0);
    from.read_exact(&mut header[16..]).unwrap();
    let (parsed, len) = proxy_protocol::parse(&header).unwrap().unwrap();
    assert_eq!(len, header.len());
    parsed
}

/// Fields of a proxy in front are passed on, and those that it lacks are added.
#[test]
fn the_fields_of_a_header_are_passed_on_and_added() {
    let (proxy, listener) = start_proxy(|config| {
        config.trusted_proxies = trusted_clients();
        config.groups[0].send_header = Some(HeaderVersion::V2);
        config.send_fields = vec![HeaderField::UniqueId, HeaderField::Crc32c];
    });
    let endpoint = field(0xEA, b"vpce-1");
    let mut ids = Vec::new();
    for received_id in [None, Some("front-7")] {
        let mut fields = endpoint.clone();
        fields.extend(received_id.map_or(Vec::new(), |id| field(5, id.as_bytes())));
        let mut front = proxy.connect();
        front.write_all(&header_with(&fields)).unwrap();
        front.write_all(b"request").unwrap();
        let mut server = accept(&listener);
        let parsed = read_header(&server);
        assert_eq!(parsed.destination, Some("198.51.100.1:443".parse().unwrap()));
        assert_eq!(parsed.fields.get(FieldType(0xEA)), Some(&b"vpce-1"[..]));
        assert!(parsed.fields.get(FieldType::CRC32C).is_some());
        let id = parsed.fields.get(FieldType::UNIQUE_ID).unwrap().to_vec();
        assert!(received_id.is_none_or(|received| received.as_bytes() == id));
        ids.push(String::from_utf8(id).unwrap());
        let mut request = [0; 7];
        server.read_exact(&mut request).unwrap();
        assert_eq!(request, *b"request");
    }
    // A header whose checksum is wrong closes the connection.
    let mut front = proxy.connect();
    let wrong = field(3, &[1, 2, 3, 4]);
    let mut sent = b"\r\n\r\n\0\r\nQUIT\n\x20\0".to_vec();
    sent.extend(u16::try_from(wrong.len()).unwrap().to_be_bytes());
    sent.extend(wrong);
    front.write_all(&sent).unwrap();
    assert!(matches!(front.read(&mut [0]), Ok(0) | Err(_)));
    let log = proxy.finish();
    let logged: Vec<_> = log.iter().map(|line| line["unique_id"].as_str().unwrap()).collect();
    assert_eq!(logged, ids, "{log:?}");
    assert!(log.iter().all(|line| line["loop_us"].as_u64().unwrap() > 0), "{log:?}");
}

/// The server name and the protocols of a TLS client are added, unless a proxy in front has named
/// others: the protocols as the TLS extension lists them (RFC 7301). The greeting stays the same.
#[test]
fn the_names_in_a_greeting_are_sent_to_the_upstream() {
    for is_behind_a_proxy in [false, true] {
        let (proxy, listener) = start_proxy(|config| {
            if is_behind_a_proxy {
                config.trusted_proxies = trusted_clients();
            }
            config.groups[0].send_header = Some(HeaderVersion::V2);
            config.send_fields = vec![HeaderField::Authority, HeaderField::Alpn];
        });
        let tls = hello("www.example.com", &["h2", "http/1.1"]);
        let (name, protocols) = (&b"www.example.com"[..], &b"\0\x0c\x02h2\x08http/1.1"[..]);
        let front = field(2, b"front.example");
        let cases = [
            (&tls[..], &[][..], Some(name), Some(protocols)),
            (
                &tls,
                &front,
                Some(if is_behind_a_proxy { b"front.example" } else { name }),
                Some(protocols),
            ),
            (&hello("192.0.2.1", &[]), &[], None, None),
            (b"GET / HTTP/1.1\r\n\r\n", &[], None, None),
        ];
        for (greeting, front_fields, authority, alpn) in cases {
            let mut client = proxy.connect();
            client.set_nodelay(true).unwrap();
            if is_behind_a_proxy {
                client.write_all(&header_with(front_fields)).unwrap();
            }
            // A greeting in two segments.
            let (start, rest) = greeting.split_at(greeting.len() / 2);
            client.write_all(start).unwrap();
            thread::sleep(Duration::from_millis(5));
            client.write_all(rest).unwrap();
            let mut server = accept(&listener);
            let header = read_header(&server);
            let authority = authority.map(|name| (FieldType::AUTHORITY, name));
            let alpn = alpn.map(|protocols| (FieldType::ALPN, protocols));
            let expected: Vec<_> = authority.into_iter().chain(alpn).collect();
            assert_eq!(header.fields.iter().collect::<Vec<_>>(), expected);
            let mut received = vec![0; greeting.len()];
            server.read_exact(&mut received).unwrap();
            assert!(received == greeting, "the greeting has changed");
            let named = is_behind_a_proxy.then(|| "192.0.2.7:80".parse().unwrap());
            let client = named.unwrap_or(client.local_addr().unwrap());
            assert_eq!(header.origin, Origin::Client(client));
        }
        proxy.finish();
    }
}

/// A client that waits for its server to speak first is connected at once, unless the header of its
/// own group has what its greeting names.
#[test]
fn only_the_clients_of_a_group_with_a_header_wait_for_their_greeting() {
    for is_own in [true, false] {
        let (proxy, listener) = start_proxy(|config| {
            let upstreams = config.groups[0].upstreams.clone();
            config.groups.push(GroupConfig::new("others", upstreams));
            config.groups[usize::from(!is_own)].send_header = Some(HeaderVersion::V2);
            config.send_fields = vec![HeaderField::Authority];
            config.limits.timeouts.greeting = 2 * LIMIT;
        });
        let mut client = proxy.connect();
        if is_own {
            thread::sleep(Duration::from_millis(300));
            listener.set_nonblocking(true).unwrap();
            let waiting = listener.accept().map(|(_, address)| address);
            assert_eq!(waiting.unwrap_err().kind(), ErrorKind::WouldBlock);
            client.write_all(b"greeting").unwrap();
        }
        let mut server = accept(&listener);
        if is_own {
            assert_eq!(read_header(&server).fields.iter().count(), 0);
            server.read_exact(&mut [0; 8]).unwrap();
        }
        server.write_all(b"x").unwrap();
        client.read_exact(&mut [0]).unwrap();
        drop((client, server));
        proxy.finish();
    }
}

/// A header of a client that is no trusted proxy is the upstream's: the client is the connection's.
#[test]
fn the_header_of_another_client_is_payload() {
    const SENT: &[u8] = b"PROXY TCP4 192.0.2.7 10.0.0.1 5000 80\r\nrequest";
    let (proxy, listener) = start_proxy(|config| {
        config.trusted_proxies = TrustedProxies::new(["192.0.2.0/24".parse().unwrap()]);
    });
    let mut client = proxy.connect();
    client.write_all(SENT).unwrap();
    let mut server = accept(&listener);
    let mut received = [0; SENT.len()];
    server.read_exact(&mut received).unwrap();
    assert_eq!(received, SENT);
    let address = client.local_addr().unwrap().to_string();
    drop((client, server));
    assert_eq!(proxy.finish()[0]["client"], address);
}

/// A header may arrive in two segments, cut anywhere.
#[test]
fn a_header_may_be_cut_at_each_of_its_bytes() {
    let (proxy, listener) = start_proxy(|config| {
        config.trusted_proxies = trusted_clients();
    });
    let line = b"PROXY TCP4 192.0.2.7 10.0.0.1 80 443\r\n".to_vec();
    let mut connections = 0;
    for header in [line, header_with(&field(5, b"front-7"))] {
        for cut in 1..header.len() {
            let mut front = proxy.connect();
            front.set_nodelay(true).unwrap();
            front.write_all(&header[..cut]).unwrap();
            thread::sleep(Duration::from_millis(5));
            front.write_all(&[&header[cut..], b"request"].concat()).unwrap();
            let mut request = [0; 7];
            let mut server = accept(&listener);
            server.read_exact(&mut request).unwrap();
            assert_eq!(request, *b"request", "cut at {cut}");
            connections += 1;
            if cut == header.len() - 1 {
                exchange_bulk(&front, &server);
            }
        }
    }
    let log = proxy.finish();
    assert_eq!(log.len(), connections);
    assert!(log.iter().all(|line| line["client"] == "192.0.2.7:80"), "{log:?}");
    assert_bulk_is_spliced(&log[connections - 1]);
}

/// A proxy in front that checks this one says that it has no client (`LOCAL`, `UNKNOWN`).
#[test]
fn a_proxy_in_front_may_have_no_client() {
    let (proxy, listener) = start_proxy(|config| {
        config.trusted_proxies = trusted_clients();
    });
    let mut addresses = Vec::new();
    // The addresses of such a header are to be ignored.
    let mut with_addresses = header_with(&[]);
    with_addresses[12] = 0x20;
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
    for header in [&local[..], b"PROXY UNKNOWN\r\n", &with_addresses] {
        let mut front = proxy.connect();
        front.write_all(&[header, b"request"].concat()).unwrap();
        let mut server = accept(&listener);
        let mut request = [0; 7];
        server.read_exact(&mut request).unwrap();
        assert_eq!(request, *b"request");
        addresses.push(front.local_addr().unwrap().to_string());
    }
    let log = proxy.finish();
    let clients: Vec<_> = log.iter().map(|line| line["client"].clone()).collect();
    assert_eq!(clients, addresses, "{log:?}");
}

/// An upstream that expects a header takes a check without one for an error.
#[test]
fn a_check_begins_with_a_header_that_names_no_client() {
    const HEADERS: [(Option<HeaderVersion>, &[u8]); 3] = [
        (Some(HeaderVersion::V1), b"PROXY UNKNOWN\r\n"),
        (Some(HeaderVersion::V2), b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0"),
        (None, b""),
    ];
    for (version, expected) in HEADERS {
        let (proxy, listener) = start_proxy(|config| {
            config.groups[0].send_header = version;
            config.groups[0].check = Some(CheckConfig::new(Duration::from_millis(100)));
        });
        let mut received = Vec::new();
        accept(&listener).read_to_end(&mut received).unwrap();
        assert_eq!(received, expected, "{version:?}");
        proxy.finish();
    }
}
