//! A proxy under test, its log, and the clients and upstreams on the other host.

use haul_lab::{Kind, Lab, Settings};
use haul_proxy::{Config, GroupConfig, Handle, ListenerConfig, Server, UpstreamConfig};
pub use haul_testing::pattern;
use serde_json::Value;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait of a test.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A running proxy.
pub struct Proxy {
    pub lab: Lab,
    pub address: SocketAddr,
    pub handle: Handle,
    pub config: Config,
    folder: TempDir,
    thread: Option<JoinHandle<()>>,
}

/// A lab in which a listener can be opened before the proxy is started.
pub fn lab() -> Lab {
    Lab::open(&Settings::default()).unwrap()
}

/// Listens on the host of the upstreams.
pub fn listen(lab: &Lab) -> TcpListener {
    let listen = || TcpListener::bind((lab.receiver.address(), 0)).unwrap();
    lab.receiver.run(listen).unwrap()
}

/// The upstream that a listener stands for.
pub fn upstream(listener: &TcpListener) -> UpstreamConfig {
    listener.local_addr().unwrap().to_string().parse().unwrap()
}

/// Starts a proxy to one upstream, with one event loop; returns it and the upstream's listener.
pub fn start_proxy(configure: impl FnOnce(&mut Config)) -> (Proxy, TcpListener) {
    let lab = lab();
    let listener = listen(&lab);
    (Proxy::start(lab, [upstream(&listener)], configure), listener)
}

impl Proxy {
    /// Starts a proxy to these upstreams with one event loop.
    pub fn start(
        lab: Lab,
        upstreams: impl Into<Vec<UpstreamConfig>>,
        configure: impl FnOnce(&mut Config),
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new([GroupConfig::new("servers", upstreams)]);
        let address = SocketAddr::new(lab.sender.address(), 0).to_string().parse().unwrap();
        config.listeners = vec![ListenerConfig::new(address, Some("servers"))];
        config.process.workers = Some(1);
        config.reporting.access_log = Some(folder.path().join("log"));
        configure(&mut config);
        // A thread belongs to the host of the thread that starts it.
        let start = || {
            let server = Server::new(&config).unwrap();
            let addresses = server.addresses().to_vec();
            let handle = server.handle();
            (addresses, handle, std::thread::spawn(move || server.run().unwrap()))
        };
        let (addresses, handle, thread) = lab.sender.run(start).unwrap();
        let haul_proxy::Address::Tcp(address) = addresses[0].address else {
            panic!("no TCP address: {addresses:?}");
        };
        Self { lab, address, handle, config, folder, thread: Some(thread) }
    }

    /// Whether the proxy's host does not have connections but the proxy's, so that they can be
    /// counted.
    pub fn is_alone(&self) -> bool {
        if self.lab.kind() == Kind::Loopback {
            eprintln!("SKIPPED: nothing is counted: {}", self.lab.caveats().join("; "));
        }
        self.lab.kind() != Kind::Loopback
    }

    /// Connects a client.
    pub fn connect(&self) -> TcpStream {
        self.try_connect().unwrap()
    }

    /// Connects a client that the proxy may reset at once: the reset may arrive before the
    /// connection is reported as established.
    pub fn try_connect(&self) -> io::Result<TcpStream> {
        let client = self.lab.receiver.run(|| TcpStream::connect(self.address)).unwrap()?;
        client.set_read_timeout(Some(LIMIT)).unwrap();
        Ok(client)
    }

    /// Connects a client that sends a byte, and waits until its connection has ended or a byte
    /// arrives; true if it has ended.
    pub fn turns_away(&self) -> bool {
        let read = self.try_connect().and_then(|mut client| {
            // A connection that is reset already cannot be written to.
            let _ = client.write_all(b"?");
            client.read(&mut [0])
        });
        match read {
            Ok(count) => count == 0,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
                true
            }
        }
    }

    /// Waits until the proxy has ended by itself. Returns its address, the lab, and the folder with
    /// its log.
    pub fn join(mut self) -> (SocketAddr, Lab, TempDir) {
        self.thread.take().unwrap().join().unwrap();
        (self.address, self.lab, self.folder)
    }

    /// Ends the proxy, and returns the lines of its log.
    pub fn finish(mut self) -> Vec<Value> {
        self.handle.drain();
        self.thread.take().unwrap().join().unwrap();
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap();
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Accepts a connection, within the limit.
pub fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                return stream;
            }
            Err(error) => assert!(Instant::now() < deadline, "no connection arrives: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
