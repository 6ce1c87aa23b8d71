//! The same over TLS, whether the program encrypts or the kernel.

use crate::common::{Client, Service, eventually, large};
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

/// Where it is spoken.
const PORT: u16 = 8443;

type Session<T> = StreamOwned<ClientConnection, T>;

/// A certificate in `folder`, or `None` without openssl.
fn certificate(folder: &Path, name: &str) -> Option<()> {
    // A machine without OpenSSL's own configuration has to do.
    fs::write(folder.join("openssl.cnf"), "[req]\ndistinguished_name = name\n[name]\n").unwrap();
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
    let made = command.current_dir(folder).stdin(Stdio::null()).output();
    match made {
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

/// A service with a certificate for `first`, over TLS at [`PORT`]; `None`, and says so, without openssl.
fn start(folder: &Path, in_kernel: bool) -> Option<Service> {
    certificate(folder, "first")?;
    Some(Service::start(
        |_| {},
        |config| {
            // The namespace is this test's own: the port is free.
            let host = config.listen[0].to_string().replace(":0", &format!(":{PORT}"));
            config.tls = Some(Tls {
                listen: vec![host.parse().unwrap()],
                certificate: folder.join("certificate.pem"),
                key: folder.join("key.pem"),
                in_kernel,
            });
            config.put_bytes_max = Some(100 << 20);
        },
    ))
}

/// A connection to it that trusts its certificate.
fn connect(
    service: &Service,
    folder: &Path,
    versions: &[&'static SupportedProtocolVersion],
) -> Session<TcpStream> {
    connect_through(service, folder, versions, |socket| socket)
}

/// The same, through something of the caller's.
fn connect_through<T: Read + Write>(
    service: &Service,
    folder: &Path,
    versions: &[&'static SupportedProtocolVersion],
    through: impl FnOnce(TcpStream) -> T,
) -> Session<T> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join("certificate.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let address = SocketAddr::new(service.address.ip(), PORT);
    let socket = service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let name = "first".try_into().unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), through(socket))
}

/// Bytes that went so.
fn sent(service: &Service, way: Transport) -> u64 {
    service.handle.counters().iter().map(|counters| counters.by(way).bytes.get()).sum()
}

/// Whether this kernel says that it knows TLS.
fn kernel_has_tls() -> bool {
    let known = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_ulp").unwrap_or_default();
    known.split_whitespace().any(|name| name == "tls")
}

#[test]
fn the_same_comes_encrypted_and_the_certificate_can_be_changed() {
    let folder = tempfile::tempdir().unwrap();
    let Some(service) = start(folder.path(), true) else { return };
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
    let large = large();
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
    certificate(folder.path(), "second").unwrap();
    service.handle.reload().unwrap();
    eventually(|| subject().as_deref() == Some("CN=second"));
    fs::write(folder.path().join("key.pem"), "nonsense").unwrap();
    assert!(service.handle.reload().is_err());
    assert_eq!(subject().as_deref(), Some("CN=second"), "what cannot be read changes nothing");

    // Somebody who does not speak TLS hears so, and never gets what he asks for; somebody who says nothing holds nobody up.
    let address = SocketAddr::new(service.address.ip(), PORT);
    let connect = || service.lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    let _silent = connect();
    let mut plain = Client::of(connect());
    plain.send("GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n");
    let refusal = plain.response(false).unwrap();
    assert_eq!((refusal.status, refusal.text().contains("0123456789")), (400, false));
    assert!(refusal.text().contains("use https"), "{}", refusal.text());
    assert!(plain.is_closed());
    // A handshake that is longer than any is not taken for plain HTTP: records of 16 KiB, a hello of 65,535 bytes.
    let mut endless = Client::of(connect());
    for at in 0..5 {
        let mut record = vec![if at == 0 { 0xFF } else { 0 }; 5 + (16 << 10)];
        record[..5].copy_from_slice(&[22, 3, 1, 0x40, 0]);
        if at == 0 {
            record[5..9].copy_from_slice(&[1, 0, 0xFF, 0xFF]);
        }
        // It may be gone already.
        let _ = endless.try_send(&record);
    }
    let mut came = Vec::new();
    let _ = endless.stream.read_to_end(&mut came);
    assert!(!came.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&came));
    let answered: u64 =
        service.handle.counters().iter().map(|counters| counters.responses[3].get()).sum();
    assert_eq!(answered, 1, "only who spoke HTTP was answered");
    assert_eq!(service.get("/ten.txt").text(), "0123456789", "the others are served on");
}

#[test]
fn whoever_encrypts_the_bytes_are_the_same() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let Some(by_program) = start(folders[0].path(), false) else { return };
    let Some(by_kernel) = start(folders[1].path(), true) else { return };
    let bodies = 2 * (large().len() as u64 + 1_000_000);
    let services = [(by_program.settled(), false), (by_kernel, true)];
    for ((service, in_kernel), folder) in services.into_iter().zip(&folders) {
        if in_kernel && !kernel_has_tls() {
            return eprintln!(
                "SKIPPED: TLS in the kernel is not tested, which has none (modprobe tls)"
            );
        }
        for version in [&TLS12, &TLS13] {
            let mut session = connect(&service, folder.path(), &[version]);
            // The first request comes with the last words of the handshake, and many at once.
            let ask = |target: &str, fields: &str| {
                format!("GET {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
            };
            let first = [ask("/ten.txt", ""), ask("/nothing", "")].concat();
            session.conn.writer().write_all(first.as_bytes()).unwrap();
            let large = large();
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
            let last = ask("/large.bin", "Range: bytes=1000000-1999999\r\nConnection: close\r\n");
            session.write_all((ask("/large.bin", "") + &last).as_bytes()).unwrap();
            let mut came = Vec::new();
            session.read_to_end(&mut came).expect("an end that nobody else can have made");
            let mut rest = &came[..];
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
        let by_program = sent(&service, Transport::Tls);
        let sendfile = sent(&service, Transport::KernelTlsMethod(haul::SendMethod::Sendfile));
        assert!(if in_kernel {
            sendfile == bodies && by_program == 0
        } else {
            by_program > bodies
        });
    }
}

#[test]
fn the_kernel_knows_every_cipher_that_clients_may_choose() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut service) = start(folder.path(), true).map(Service::settled) else { return };
    let url = format!("https://{}:{PORT}/large.bin", service.address.ip());
    let large = large();
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
                        "SKIPPED: ciphers are not tested without curl (ci/install): {error}"
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
    // A client may have a body before the server has counted it.
    service.stop();
    let used = if kernel_has_tls() {
        Transport::KernelTlsMethod(haul::SendMethod::Sendfile)
    } else {
        Transport::Tls
    };
    assert!(sent(&service, used) >= 6 * large.len() as u64);
    if used == Transport::Tls {
        eprintln!(
            "SKIPPED: ciphers were tested in the program; the kernel has no TLS (modprobe tls)"
        );
    }
}

#[test]
fn a_client_that_renews_its_keys_is_answered_or_hears_of_an_end() {
    let folder = tempfile::tempdir().unwrap();
    let Some(service) = start(folder.path(), true) else { return };
    let mut session = connect(&service, folder.path(), &[&TLS13]);
    let request = b"GET /ten.txt HTTP/1.1\r\nHost: h\r\n\r\n";
    session.write_all(request).unwrap();
    let mut first = [0; 1000];
    assert!(session.read(&mut first).unwrap() > 0);
    session.conn.refresh_traffic_keys().unwrap();
    let asked = session.write_all(request);
    let answered = asked.and_then(|()| session.read(&mut first));
    if kernel_has_tls() {
        assert!(!matches!(answered, Ok(count) if count > 0), "this kernel cannot follow");
    } else {
        assert!(answered.unwrap() > 0);
    }
    assert_eq!(service.get("/ten.txt").text(), "0123456789", "the others are served on");
}

/// A socket that keeps what has come.
struct Tap {
    socket: TcpStream,
    came: Vec<u8>,
}

impl Read for Tap {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.socket.read(buffer)?;
        self.came.extend_from_slice(&buffer[..count]);
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

/// TLS 1.2 with AES-GCM says each record's number itself (RFC 5288 section 3). One that comes twice under the same key gives
/// the key's secrets away, and no client would notice.
#[test]
fn no_record_has_the_number_of_another() {
    const CHANGE_CIPHER_SPEC: u8 = 20;
    let folder = tempfile::tempdir().unwrap();
    let Some(service) = start(folder.path(), true) else { return };
    let tap = |socket| Tap { socket, came: Vec::new() };
    let mut session = connect_through(&service, folder.path(), &[&TLS12], tap);
    session.write_all(b"GET /large.bin HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
    let mut came = Vec::new();
    session.read_to_end(&mut came).unwrap();
    let suite = session.conn.negotiated_cipher_suite().unwrap().suite();
    assert!(suite.as_str().unwrap().contains("AES_256_GCM"), "{suite:?}");
    let mut rest = &session.sock.came[..];
    let (mut is_encrypted, mut numbers) = (false, Vec::new());
    while let [content_type, _, _, high, low, ..] = *rest {
        let length = 5 + usize::from(u16::from_be_bytes([high, low]));
        if is_encrypted {
            numbers.push(rest[5..13].to_vec());
        }
        is_encrypted |= content_type == CHANGE_CIPHER_SPEC;
        rest = &rest[length..];
    }
    let count = numbers.len();
    assert!(count > large().len() >> 14, "{count} records");
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), count);
}

#[test]
fn the_last_bytes_of_the_last_response_reach_whoever_is_slow() {
    let folder = tempfile::tempdir().unwrap();
    let Some(service) = start(folder.path(), true) else { return };
    let large = large();
    for at in 0..40 {
        let end = 200_000 + at * 17_317;
        let mut session = connect(&service, folder.path(), &[&TLS13]);
        rustix::net::sockopt::set_socket_recv_buffer_size(&session.sock, 16 << 10).unwrap();
        let range = format!("Range: bytes=0-{}\r\nConnection: close\r\n", end - 1);
        session
            .write_all(format!("GET /large.bin HTTP/1.1\r\nHost: h\r\n{range}\r\n").as_bytes())
            .unwrap();
        // The socket between fills, and the end comes upon it full.
        std::thread::sleep(Duration::from_millis(5));
        let mut came = Vec::new();
        session.read_to_end(&mut came).expect("an end that nobody else can have made");
        let head = came.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        assert!(came[head..] == large[..end], "{} of {end} bytes", came.len() - head);
    }
}
