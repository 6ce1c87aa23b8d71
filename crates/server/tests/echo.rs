//! The example `echo` as a whole: TLS, metrics, the sandbox and draining.

#[path = "../examples/echo.rs"]
mod echo;

mod common {
    pub mod certificate;
}

use common::certificate::make_certificate;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);

/// Set for the process that is the service.
const SERVICE_VARIABLE: &str = "HAUL_TEST_ECHO";

/// The service's process: this program again, with this test alone.
#[test]
fn the_service_runs_in_a_process_of_its_own() {
    if std::env::var_os(SERVICE_VARIABLE).is_some() {
        echo::main().unwrap();
    }
}

fn start(folder: &Path) -> Child {
    let mut echo = Command::new(std::env::current_exe().unwrap());
    echo.args(["--exact", "the_service_runs_in_a_process_of_its_own", "--nocapture"]);
    echo.env(SERVICE_VARIABLE, "1").current_dir(folder);
    echo.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn connect(folder: &Path, address: &str) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join("certificate.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(haul_server::tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), socket)
}

/// A client that ends its direction before it has read gets everything, and then the end.
fn assert_half_closed_client_gets_everything(folder: &Path, address: &str, sent: &[u8]) {
    let mut half_closed = connect(folder, address);
    half_closed.sock.set_nonblocking(true).unwrap();
    let (mut left, mut echoed) = (sent, Vec::new());
    while !left.is_empty() {
        match half_closed.write(left) {
            Ok(count) => left = &left[count..],
            // It reads only as much as it must, so that the service's socket stays full. rustls's
            // own stream would not read before it has written.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let _ = half_closed.conn.read_tls(&mut half_closed.sock);
                half_closed.conn.process_new_packets().unwrap();
                let _ = half_closed.conn.reader().read_to_end(&mut echoed);
            }
            Err(error) => panic!("{error}"),
        }
    }
    half_closed.conn.send_close_notify();
    // The service may send no more until something is read: a blocking write would wait for ever.
    while half_closed.conn.wants_write() {
        match half_closed.conn.write_tls(&mut half_closed.sock) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let _ = half_closed.conn.read_tls(&mut half_closed.sock);
                half_closed.conn.process_new_packets().unwrap();
                let _ = half_closed.conn.reader().read_to_end(&mut echoed);
            }
            Err(error) => panic!("{error}"),
        }
    }
    half_closed.sock.set_nonblocking(false).unwrap();
    half_closed.sock.shutdown(Shutdown::Write).unwrap();
    half_closed.read_to_end(&mut echoed).unwrap();
    assert!(echoed == sent, "{} of {} B", echoed.len(), sent.len());
}

#[test]
fn the_echo_service_echoes_over_tls_counts_connections_and_drains() {
    let folder = tempfile::tempdir().unwrap();
    if !make_certificate(folder.path()) {
        return;
    }
    let mut echo = start(folder.path());
    let mut output = BufReader::new(echo.stdout.take().unwrap()).lines();
    let line = output.find_map(|line| {
        let line = line.unwrap();
        let start = line.find("127.0.0.1:")?;
        Some(line[start..].to_owned())
    });
    let line = line.unwrap();
    let (address, metrics) = line.trim().split_once(' ').unwrap();

    let mut client = connect(folder.path(), address);
    // More than the socket and the session hold at once.
    let sent: Vec<u8> = (0..4u32 << 20).map(|index| (index % 251) as u8).collect();
    let mut received = vec![0; 64 << 10];
    for chunk in sent.chunks(received.len()) {
        client.write_all(chunk).unwrap();
        client.read_exact(&mut received[..chunk.len()]).unwrap();
        assert!(received[..chunk.len()] == *chunk);
    }

    // Landlock demands that the service's threads can gain no privileges.
    let threads = std::fs::read_dir(format!("/proc/{}/task", echo.id())).unwrap();
    let is_confined = threads.map(|thread| thread.unwrap().path().join("status")).any(|status| {
        let status = std::fs::read_to_string(status).unwrap_or_default();
        status.contains("Name:\techo-0\n") && status.contains("NoNewPrivs:\t1\n")
    });
    assert!(is_confined, "the service runs without its sandbox");

    assert_half_closed_client_gets_everything(folder.path(), address, &sent);

    let mut scrape = TcpStream::connect(metrics).unwrap();
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
    let mut page = String::new();
    scrape.read_to_string(&mut page).unwrap();
    assert!(page.contains("\nhaul_connections_accepted_total 2\n"), "{page}");
    assert!(page.contains("\nhaul_connections 1\n"), "{page}");

    // An idle connection does not delay the end, as it would if it were only cut off 30 s later.
    let started = Instant::now();
    drop(echo.stdin.take());
    assert!(echo.wait().unwrap().success());
    assert!(started.elapsed() < Duration::from_secs(20));
    assert!(matches!(client.read(&mut received), Ok(0) | Err(_)));
    assert!(TcpStream::connect(address).is_err());
}
