//! The client's end of a stream with TLS, in this program and in the kernel.

mod common {
    pub mod certificate;
}

use common::certificate::make_certificate;
use haul_server::ktls::KtlsSupport;
use haul_server::stream::Stream;
use haul_server::tls::{TlsSettings, provider};
use haul_server::{Sent, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, RootCertStore, ServerConnection, StreamOwned, SupportedProtocolVersion,
};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

/// A client with its own event loop, of one connection, and what it received with the end of the
/// handshake.
struct Client(Stream, Vec<u8>);

/// What encrypts, and by which version of TLS.
#[derive(Clone, Copy)]
struct Kind {
    version: &'static SupportedProtocolVersion,
    ktls: KtlsSupport,
    /// Whether rustls may hand the session's keys out.
    has_extraction: bool,
}

impl Client {
    /// Connects and makes the handshake. `early` is sent before it ends.
    fn connect(address: SocketAddr, folder: &Path, kind: Kind, early: &[u8]) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(folder.join("certificate.pem")).unwrap()).unwrap();
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[kind.version])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.enable_secret_extraction = kind.has_extraction;
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nonblocking(true).unwrap();
        let tls = Some((&Arc::new(config), "localhost".try_into().unwrap()));
        let mut client = Self(
            Stream::connect(socket.into(), tls, kind.ktls, &Arc::default()).unwrap(),
            Vec::new(),
        );
        assert_ne!(client.0.flush(), Sent::Broken);
        if !early.is_empty() {
            let sent = client.0.send(&[IoSlice::new(early)], false);
            assert_eq!(sent, Sent::Bytes(early.len() as u64));
        }
        while client.0.is_handshaking() {
            client.wait(PollFlags::IN);
            let mut received = Vec::with_capacity(100);
            client.receive_some(&mut received);
            client.1 = received;
        }
        client
    }

    fn wait(&self, events: PollFlags) {
        let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.0, events)], Some(&timeout)).unwrap();
        assert_eq!(ready, 1, "nothing happened");
    }

    /// Receives once; `None` if nothing is there, or only more of a session ticket.
    fn receive_some(&mut self, buffer: &mut Vec<u8>) -> Option<usize> {
        match self.0.receive(buffer) {
            Ok(count) => Some(count),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => None,
                _ => panic!("{error}"),
            },
        }
    }

    /// Receives up to the end of the stream or so many bytes.
    fn receive(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.1);
        buffer.reserve_exact(bytes - buffer.len());
        while buffer.len() < bytes {
            match self.receive_some(&mut buffer) {
                Some(0) => break,
                Some(_) => {}
                None => self.wait(PollFlags::IN),
            }
        }
        buffer
    }

    /// Repeats a send of what follows the bytes sent so far, until `bytes` are.
    fn send(&mut self, bytes: u64, mut send: impl FnMut(&mut Stream, u64) -> Sent) {
        let mut sent = 0;
        while sent < bytes {
            match send(&mut self.0, sent) {
                Sent::Bytes(count) => sent += count,
                Sent::Blocked => self.wait(PollFlags::OUT),
                broken => panic!("{broken:?} after {sent} B"),
            }
        }
        while self.0.flush() == Sent::Blocked {
            self.wait(PollFlags::OUT);
        }
    }
}

/// Runs a test with TLS 1.2 and 1.3, in this program and, if it can, in the kernel.
fn for_each_kind(test: impl Fn(Kind)) {
    let ktls = KtlsSupport::probe();
    if let Err(error) = &ktls {
        eprintln!("SKIPPED: clients are tested only without kTLS (modprobe tls): {error}");
    }
    for version in [&TLS12, &TLS13] {
        test(Kind { version, ktls: KtlsSupport::default(), has_extraction: false });
        if let Ok(ktls) = ktls {
            test(Kind { version, ktls, has_extraction: false });
            test(Kind { version, ktls, has_extraction: true });
        }
    }
}

/// Asserts that the expected one of program and kernel encrypts.
fn assert_encryption(client: &Client, kind: Kind) {
    let in_kernel = kind.ktls.is_any() && kind.has_extraction;
    let expected = if in_kernel { Transport::KernelTls } else { Transport::Tls };
    assert_eq!(client.0.transport(Transport::Memory), expected);
}

/// A server that is killed at the end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// OpenSSL sends two session tickets after the handshake of TLS 1.3.
#[test]
fn a_client_understands_openssl_and_its_session_tickets() {
    let folder = tempfile::tempdir().unwrap();
    if !make_certificate(folder.path()) {
        return;
    }
    let mut server = Command::new("openssl");
    server.args("s_server -accept 127.0.0.1:0 -cert certificate.pem -key key.pem -rev".split(' '));
    server.current_dir(folder.path()).stdin(Stdio::null()).stderr(Stdio::null());
    let mut server = Server(server.stdout(Stdio::piped()).spawn().unwrap());
    let mut output = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let address =
        output.find_map(|line| Some(line.unwrap().strip_prefix("ACCEPT ")?.parse().unwrap()));
    // OpenSSL reports each connection, and would block on a full pipe.
    thread::spawn(move || output.for_each(drop));
    for_each_kind(|kind| {
        // The first line takes record numbers that the kernel must not use again.
        let mut client = Client::connect(address.unwrap(), folder.path(), kind, b"first\n");
        assert_encryption(&client, kind);
        assert_eq!(client.receive(6), b"tsrif\n");
        for (line, reversed) in [("second\n", "dnoces\n"), ("third\n", "driht\n")] {
            client.send(line.len() as u64, |stream, sent| {
                stream.send(&[IoSlice::new(&line.as_bytes()[sent as usize..])], false)
            });
            assert_eq!(client.receive(line.len()), reversed.as_bytes());
        }
    });
}

/// A server that closes without `close_notify` may have been cut off by an attacker.
#[test]
fn a_client_notices_a_truncated_stream() {
    let folder = tempfile::tempdir().unwrap();
    if !make_certificate(folder.path()) {
        return;
    }
    let path = |name: &str| folder.path().join(name);
    let config = TlsSettings::new(path("certificate.pem"), path("key.pem")).load().unwrap();
    for_each_kind(|kind| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let config = Arc::clone(&config);
        let server = thread::spawn(move || {
            let session = ServerConnection::new(config).unwrap();
            let mut stream = StreamOwned::new(session, listener.accept().unwrap().0);
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(b"before").unwrap();
        });
        let mut client = Client::connect(address, folder.path(), kind, b"?");
        assert_eq!(client.receive(6), b"before");
        server.join().unwrap();
        let error = loop {
            match client.0.receive(&mut Vec::with_capacity(1000)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => client.wait(PollFlags::IN),
                Err(error) => break error,
                Ok(count) => panic!("{count} B more"),
            }
        };
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    });
}

/// A file reaches the server whole, and a reply larger than the sockets' buffers comes back.
#[test]
fn a_client_sends_a_file_and_receives_until_close_notify() {
    let folder = tempfile::tempdir().unwrap();
    if !make_certificate(folder.path()) {
        return;
    }
    let content: Vec<u8> = (0..9_000_001u32).map(|index| (index % 251) as u8).collect();
    std::fs::write(folder.path().join("content"), &content).unwrap();
    let file = File::open(folder.path().join("content")).unwrap();
    let path = |name: &str| folder.path().join(name);
    let config = TlsSettings::new(path("certificate.pem"), path("key.pem")).load().unwrap();
    for_each_kind(|kind| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (config, bytes) = (Arc::clone(&config), content.len());
        let server = thread::spawn(move || {
            let session = ServerConnection::new(config).unwrap();
            let mut stream = StreamOwned::new(session, listener.accept().unwrap().0);
            let mut received = vec![0; bytes];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
            stream.conn.send_close_notify();
            stream.flush().unwrap();
            received
        });
        let mut client = Client::connect(address, folder.path(), kind, b"");
        assert_encryption(&client, kind);
        let mut copy = vec![0; 64 << 10];
        let end = content.len() as u64;
        client.send(end, |stream, sent| stream.send_file(&file, sent..end, &mut copy));
        if kind.ktls.is_any() && kind.has_extraction {
            let expected = Transport::KernelTlsMethod(haul::SendMethod::Sendfile);
            assert_eq!(client.0.latest_file_transport(), expected);
        }
        // One more than there is: the end of the stream follows.
        assert!(client.receive(content.len() + 1) == content);
        assert!(server.join().unwrap() == content);
    });
}
