//! TLS, encrypted by the program or by the kernel (kTLS).

use crate::common::{Client, Service, large_content, wait_until};
use haul_serve::{Tls, Transport};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The port of the TLS listener.
const PORT: u16 = 8443;

/// A client's TLS session over the stream `T`.
type Session<T> = StreamOwned<ClientConnection, T>;

/// Creates a self-signed certificate for `name` in `directory`; `None` if openssl is missing.
fn create_certificate(directory: &Path, name: &str) -> Option<()> {
    // A configuration of its own: a machine need not have OpenSSL's default one.
    fs::write(directory.join("openssl.cnf"), "[req]\ndistinguished_name = name\n[name]\n").unwrap();
    let mut command = Command::new("openssl");
    command.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-config",
        "openssl.cnf",
    ]);
    command.args(["-addext", &format!("subjectAltName=DNS:{name}")]);
    command.args([
        "-subj",
        &format!("/CN={name}"),
        "-out",
        "certificate.pem",
        "-keyout",
        "key.pem",
    ]);
    let output = command.current_dir(directory).stdin(Stdio::null()).output();
    match output {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(())
        }
        Err(error) => {
            eprintln!("SKIPPED: TLS is not tested without openssl (ci/install): {error}");
            None
        }
    }
}

/// Starts a service with a certificate for `first` and a TLS listener on [`PORT`]; `None`, with a
/// message, if openssl is missing.
fn start(directory: &Path, in_kernel: bool) -> Option<Service> {
    create_certificate(directory, "first")?;
    Some(Service::start(
        |_| {},
        |config| {
            // The test has a separate network namespace, so the port is free.
            let host = config.listen[0].to_string().replace(":0", &format!(":{PORT}"));
            config.tls = Some(Tls::new(
                vec![host.parse().unwrap()],
                directory.join("certificate.pem"),
                directory.join("key.pem"),
                in_kernel,
            ));
            config.put_bytes_max = Some(100 << 20);
        },
    ))
}

/// Connects to the service, with its certificate as the only trusted root.
fn connect(
    service: &Service,
    directory: &Path,
    versions: &[&'static SupportedProtocolVersion],
) -> Session<TcpStream> {
    connect_through(service, directory, versions, |socket| socket)
}

/// Like [`connect`], over a stream that `wrap` makes of the socket.
fn connect_through<T: Read + Write>(
    service: &Service,
    directory: &Path,
    versions: &[&'static SupportedProtocolVersion],
    wrap: impl FnOnce(TcpStream) -> T,
) -> Session<T> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(directory.join("certificate.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let address = SocketAddr::new(service.address.ip(), PORT);
    let socket = service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let name = "first".try_into().unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), wrap(socket))
}

/// Bytes that the service has sent by `transport`.
fn sent_bytes(service: &Service, transport: Transport) -> u64 {
    service.handle.counters().iter().map(|counters| counters.by(transport).bytes.get()).sum()
}

/// Whether the kernel lists kTLS among its upper-layer protocols.
fn kernel_has_tls() -> bool {
    let protocols = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_ulp").unwrap_or_default();
    protocols.split_whitespace().any(|name| name == "tls")
}

#[test]
fn files_are_served_over_tls_and_a_reload_changes_the_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let Some(service) = start(directory.path(), true) else { return };
    let curl = |arguments: &[&str]| {
        let mut command = Command::new("curl");
        command.args(["-sSk", "--max-time", "20"]).args(arguments).stdin(Stdio::null());
        service.lab.receiver.run(|| command.output()).unwrap()
    };
    let url = |target: &str| format!("https://{}:{PORT}{target}", service.address.ip());
    let output = match curl(&[
        &url("/large.bin"),
        &url("/ten.txt"),
        "-w",
        "%{http_version} %{num_connects}\n",
    ]) {
        Ok(output) => output,
        Err(error) => {
            return eprintln!("SKIPPED: TLS is not tested without curl (ci/install): {error}");
        }
    };
    let large = large_content();
    assert!(output.stdout.starts_with(&large), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout[large.len()..]),
        "1.1 1\n01234567891.1 0\n",
        "one connection"
    );
    let ranges = curl(&[&url("/large.bin"), "-r", "1000000-1999999", "--tls-max", "1.2"]).unwrap();
    assert!(ranges.stdout == large[1_000_000..2_000_000]);

    let subject = || {
        let output = curl(&[&url("/empty"), "-v"]).unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.lines().find_map(|line| {
            line.trim_start_matches('*').trim().strip_prefix("subject: ").map(str::to_owned)
        })
    };
    assert_eq!(subject().as_deref(), Some("CN=first"));
    create_certificate(directory.path(), "second").unwrap();
    service.handle.reload().unwrap();
    wait_until("the new certificate is sent", || subject().as_deref() == Some("CN=second"));
    fs::write(directory.path().join("key.pem"), "nonsense").unwrap();
    assert!(service.handle.reload().is_err());
    assert_eq!(subject().as_deref(), Some("CN=second"), "an invalid key changes nothing");

    assert_clients_without_tls_are_refused(&service);
}

/// A plain HTTP request at the TLS listener is refused and never gets the file. A silent client and
/// an oversized handshake delay no other.
fn assert_clients_without_tls_are_refused(service: &Service) {
    let address = SocketAddr::new(service.address.ip(), PORT);
    let connect = || service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    let _silent = connect();
    let mut plain_client = Client::new(connect());
    plain_client.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    let refusal = plain_client.response(false).unwrap();
    assert_eq!((refusal.status, refusal.text().contains("0123456789")), (400, false));
    assert!(refusal.text().contains("use https"), "{}", refusal.text());
    assert!(plain_client.is_closed());
    // A handshake that is longer than any real one is not taken for plain HTTP: records of 16 KiB
    // with a ClientHello of 65,535 bytes.
    let mut oversized = Client::new(connect());
    for index in 0..5 {
        let mut record = vec![if index == 0 { 0xFF } else { 0 }; 5 + (16 << 10)];
        record[..5].copy_from_slice(&[22, 3, 1, 0x40, 0]);
        if index == 0 {
            record[5..9].copy_from_slice(&[1, 0, 0xFF, 0xFF]);
        }
        // The service may have closed the connection already.
        let _ = oversized.try_send(&record);
    }
    let mut received = Vec::new();
    let _ = oversized.stream.read_to_end(&mut received);
    assert!(!received.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&received));
    let refused_count: u64 =
        service.handle.counters().iter().map(|counters| counters.responses[3].get()).sum();
    assert_eq!(refused_count, 1, "only the plain HTTP request gets a response");
    assert_eq!(service.get("/ten.txt").text(), "0123456789", "other connections are not affected");
}

#[test]
fn the_program_and_the_kernel_send_the_same_responses() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let Some(program_service) = start(directories[0].path(), false) else { return };
    let Some(kernel_service) = start(directories[1].path(), true) else { return };
    // The last 4 KiB of a response are held back until the last check, and copied.
    let body_bytes = 2 * (large_content().len() as u64 + 1_000_000 - 2 * 4096);
    let services = [(program_service.with_old_files(), false), (kernel_service, true)];
    for ((service, in_kernel), directory) in services.into_iter().zip(&directories) {
        if in_kernel && !kernel_has_tls() {
            return eprintln!(
                "SKIPPED: TLS by the kernel is not tested: the kernel has none (modprobe tls)"
            );
        }
        for version in [&TLS12, &TLS13] {
            let mut session = connect(&service, directory.path(), &[version]);
            // The first two requests arrive with the last message of the handshake. All requests
            // are pipelined.
            let get = |target: &str, fields: &str| {
                format!("GET {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
            };
            let first = [get("/ten.txt", ""), get("/nothing", "")].concat();
            session.conn.writer().write_all(first.as_bytes()).unwrap();
            let large = large_content();
            let length = large.len();
            session
                .write_all(
                    format!("PUT /new HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n")
                        .as_bytes(),
                )
                .unwrap();
            for piece in large.chunks(100_000) {
                session.write_all(piece).unwrap();
            }
            let last = get("/large.bin", "Range: bytes=1000000-1999999\r\nConnection: close\r\n");
            session.write_all((get("/large.bin", "") + &last).as_bytes()).unwrap();
            let mut received = Vec::new();
            session.read_to_end(&mut received).expect("an authenticated end (close_notify)");
            let mut rest = &received[..];
            let mut next = |status: &str, content: &[u8]| {
                let end = rest.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
                let head = String::from_utf8_lossy(&rest[..end]);
                assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
                assert!(rest[end..].starts_with(content), "{status}");
                rest = &rest[end + content.len()..];
            };
            next("200", b"0123456789");
            next("404", b"404 Not Found\n");
            next(if version.version == TLS12.version { "201" } else { "204" }, b"");
            next("200", &large);
            next("206", &large[1_000_000..2_000_000]);
            assert!(rest.is_empty() && fs::read(service.path("new")).unwrap() == large);
        }
        let program_bytes = sent_bytes(&service, Transport::Tls);
        let sendfile_bytes =
            sent_bytes(&service, Transport::KernelTlsMethod(haul::SendMethod::Sendfile));
        assert!(if in_kernel {
            sendfile_bytes == body_bytes && program_bytes == 0
        } else {
            program_bytes > body_bytes
        });
    }
}

#[test]
fn ktls_covers_every_cipher_suite_that_clients_may_choose() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mut service) = start(directory.path(), true).map(Service::with_old_files) else {
        return;
    };
    let url = format!("https://{}:{PORT}/large.bin", service.address.ip());
    let large = large_content();
    for (option, version, ciphers) in [
        (
            "--ciphers",
            "1.2",
            [
                "ECDHE-ECDSA-AES128-GCM-SHA256",
                "ECDHE-ECDSA-AES256-GCM-SHA384",
                "ECDHE-ECDSA-CHACHA20-POLY1305",
            ],
        ),
        (
            "--tls13-ciphers",
            "1.3",
            ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"],
        ),
    ] {
        for cipher in ciphers {
            let mut command = Command::new("curl");
            command.args(["-sSk", "--max-time", "20", "--tls-max", version, option, cipher, &url]);
            let output = match service.lab.receiver.run(|| command.output()).unwrap() {
                Ok(output) => output,
                Err(error) => {
                    return eprintln!(
                        "SKIPPED: cipher suites are not tested without curl (ci/install): {error}"
                    );
                }
            };
            assert!(
                output.stdout == large,
                "{cipher}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    // A client may receive a body before the server counts it.
    service.stop();
    let transport = if kernel_has_tls() {
        Transport::KernelTlsMethod(haul::SendMethod::Sendfile)
    } else {
        Transport::Tls
    };
    // The last 4 KiB of each response are copied by the program.
    assert!(sent_bytes(&service, transport) >= 6 * (large.len() as u64 - 4096));
    if transport == Transport::Tls {
        eprintln!(
            "SKIPPED: ciphers were tested only without kTLS, which the kernel lacks (modprobe tls)"
        );
    }
}

#[test]
fn a_key_update_is_answered_or_closes_the_connection() {
    let directory = tempfile::tempdir().unwrap();
    let Some(service) = start(directory.path(), true) else { return };
    let mut session = connect(&service, directory.path(), &[&TLS13]);
    let request = b"GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n";
    session.write_all(request).unwrap();
    let mut buffer = [0; 1000];
    assert!(session.read(&mut buffer).unwrap() > 0);
    session.conn.refresh_traffic_keys().unwrap();
    let written = session.write_all(request);
    let received = written.and_then(|()| session.read(&mut buffer));
    if kernel_has_tls() {
        assert!(!matches!(received, Ok(count) if count > 0), "kTLS cannot follow a key update");
    } else {
        assert!(received.unwrap() > 0);
    }
    assert_eq!(service.get("/ten.txt").text(), "0123456789", "other connections are not affected");
}

/// A socket that records the received bytes.
struct Tap {
    socket: TcpStream,
    received: Vec<u8>,
}

impl Read for Tap {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.socket.read(buffer)?;
        self.received.extend_from_slice(&buffer[..count]);
        Ok(count)
    }
}

impl Write for Tap {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.socket.flush()
    }
}

/// Each record of TLS 1.2 with AES-GCM carries an explicit nonce (RFC 5288 section 3). A nonce that
/// is used twice with one key reveals the key's secrets, and no client would notice.
#[test]
fn no_two_records_have_the_same_nonce() {
    const CHANGE_CIPHER_SPEC: u8 = 20;
    let directory = tempfile::tempdir().unwrap();
    let Some(service) = start(directory.path(), true) else { return };
    let tap = |socket| Tap { socket, received: Vec::new() };
    let mut session = connect_through(&service, directory.path(), &[&TLS12], tap);
    session.write_all(b"GET /large.bin HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
    let mut received = Vec::new();
    session.read_to_end(&mut received).unwrap();
    let suite = session.conn.negotiated_cipher_suite().unwrap().suite();
    assert!(suite.as_str().unwrap().contains("AES_256_GCM"), "{suite:?}");
    let mut rest = &session.sock.received[..];
    let (mut is_encrypted, mut nonces) = (false, Vec::new());
    while let [content_type, _, _, high, low, ..] = *rest {
        let length = 5 + usize::from(u16::from_be_bytes([high, low]));
        if is_encrypted {
            nonces.push(rest[5..13].to_vec());
        }
        is_encrypted |= content_type == CHANGE_CIPHER_SPEC;
        rest = &rest[length..];
    }
    let count = nonces.len();
    assert!(count > large_content().len() >> 14, "{count} records");
    nonces.sort();
    nonces.dedup();
    assert_eq!(nonces.len(), count);
}

#[test]
fn the_last_bytes_of_the_last_response_reach_a_slow_client() {
    let directory = tempfile::tempdir().unwrap();
    let Some(service) = start(directory.path(), true) else { return };
    let large = large_content();
    for index in 0..40 {
        let end = 200_000 + index * 17_317;
        let mut session = connect(&service, directory.path(), &[&TLS13]);
        rustix::net::sockopt::set_socket_recv_buffer_size(&session.sock, 16 << 10).unwrap();
        let range = format!("Range: bytes=0-{}\r\nConnection: close\r\n", end - 1);
        session
            .write_all(format!("GET /large.bin HTTP/1.1\r\nHost: h\r\n{range}\r\n").as_bytes())
            .unwrap();
        // The socket buffers fill up, so the service closes while they are full.
        std::thread::sleep(Duration::from_millis(5));
        let mut received = Vec::new();
        session.read_to_end(&mut received).expect("an authenticated end (close_notify)");
        let head = received.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        assert!(received[head..] == large[..end], "{} of {end} bytes", received.len() - head);
    }
}

/// Clients of the TLS port that never say a word make room, also for a client of the other port.
#[test]
fn silent_tls_connections_make_room() {
    const PLACES: usize = 20;
    let directory = tempfile::tempdir().unwrap();
    if create_certificate(directory.path(), "first").is_none() {
        return;
    }
    let service = Service::start(
        |_| {},
        |config| {
            let host = config.listen[0].to_string().replace(":0", &format!(":{PORT}"));
            let path = |name: &str| directory.path().join(name);
            let listen = vec![host.parse().unwrap()];
            config.tls = Some(Tls::new(listen, path("certificate.pem"), path("key.pem"), false));
            config.limits.connections_max = PLACES;
        },
    );
    let address = SocketAddr::new(service.address.ip(), PORT);
    let connect = || service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    let _silent: Vec<_> = (0..PLACES).map(|_| connect()).collect();
    let connections = &service.handle.counters()[0].connections;
    // The last sixteenth is for others.
    wait_until("all places but the reserve are taken", || {
        connections.open.get() == (PLACES - PLACES / 16) as u64
    });
    // A response in time: a timeout would take half a minute.
    assert_eq!(service.get("/ten.txt").status, 200);
    assert_eq!((connections.evicted.get() > 0, connections.timed_out.get()), (true, 0));
}
