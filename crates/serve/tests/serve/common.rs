//! A file service for each test, on one host of a separate lab. Clients are on the other host.

use haul_lab::{Lab, Settings};
use haul_serve::{Address, Config, Handle, ListenAddress, Server};
pub use haul_testing::wait_until;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// The upper bound of every wait for a response or a condition, also on a busy machine.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

/// A running file service.
pub struct Service {
    pub lab: Lab,
    /// The served directory.
    pub directory: TempDir,
    /// The first TCP listener without TLS.
    pub address: SocketAddr,
    pub handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// A received HTTP response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Names in lower case.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// A client's connection to a service.
pub struct Client {
    pub stream: TcpStream,
    /// Bytes received after the last response.
    unparsed: Vec<u8>,
}

impl Service {
    /// Serves a directory with a few files. `fill` adds files, `configure` changes the settings.
    pub fn start(fill: impl FnOnce(&PathBuf), configure: impl FnOnce(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().to_path_buf();
        fs::write(root.join("ten.txt"), "0123456789").unwrap();
        fs::write(root.join("empty"), "").unwrap();
        fs::write(root.join("large.bin"), large_content()).unwrap();
        fill(&root);
        let lab = Lab::open(&Settings::default()).unwrap();
        let mut config = Config::new(&root);
        config.listen = vec![SocketAddr::new(lab.sender.address(), 0).to_string().parse().unwrap()];
        config.workers = Some(1);
        configure(&mut config);
        let server = lab.sender.run(|| Server::new(&config)).unwrap().unwrap();
        let address = server.addresses().iter().find_map(|address| match address {
            ListenAddress { address: Address::Tcp(address), is_tls: false } => Some(*address),
            _ => None,
        });
        let handle = server.handle();
        let thread = std::thread::spawn(move || server.run().unwrap());
        Self { lab, directory, address: address.unwrap(), handle, thread: Some(thread) }
    }

    /// Waits until its files are old enough (2 s) to have entity tags.
    pub fn wait_for_tags(self) -> Self {
        std::thread::sleep(Duration::from_millis(2100));
        self
    }

    /// Dates its files back, so that they have entity tags and are sent without a copy.
    pub fn with_old_files(self) -> Self {
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        for entry in fs::read_dir(self.directory.path()).unwrap() {
            let file = fs::File::options().write(true).open(entry.unwrap().path()).unwrap();
            file.set_modified(hour_ago).unwrap();
        }
        self
    }

    /// Serves the few files with the default settings.
    pub fn start_default() -> Self {
        Self::start(|_| {}, |_| {})
    }

    /// The path of a file in the served directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Connects from the other host.
    pub fn connect(&self) -> Client {
        let stream = self.lab.receiver.run(|| TcpStream::connect(self.address)).unwrap().unwrap();
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
        Client::new(stream)
    }

    /// Sends `method target` with these field lines on a new connection and returns the response.
    pub fn request(&self, method: &str, target: &str, fields: &str) -> Response {
        let mut client = self.connect();
        client.send(&format!("{method} {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        client.response(method == "HEAD").unwrap()
    }

    /// Sends a `GET` without further fields.
    pub fn get(&self, target: &str) -> Response {
        self.request("GET", target, "")
    }

    /// Drains the service and waits until it has stopped.
    pub fn stop(&mut self) {
        self.handle.drain();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

impl Client {
    /// A client on an established connection.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream, unparsed: Vec::new() }
    }

    /// Sends these bytes; returns the error if the connection fails.
    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends this text.
    pub fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    /// The next response; `None` if the connection ends instead. `Content-Length` delimits its
    /// body. Panics if the connection ends within the response.
    pub fn response(&mut self, has_no_body: bool) -> Option<Response> {
        match self.receive(has_no_body) {
            Ok(response) => response,
            Err(received) => panic!("the response ends after {received} bytes"),
        }
    }

    /// The next response; `None` if the connection ends before the response is complete.
    pub fn try_response(&mut self) -> Option<Response> {
        self.receive(false).ok().flatten()
    }

    /// The next response; `None` if the connection ends instead. The error is the number of bytes
    /// of an incomplete head or body.
    fn receive(&mut self, has_no_body: bool) -> Result<Option<Response>, usize> {
        let head = loop {
            if let Some(end) = self.unparsed.windows(4).position(|window| window == b"\r\n\r\n") {
                let rest = self.unparsed.split_off(end + 4);
                break std::mem::replace(&mut self.unparsed, rest);
            }
            if self.read_more() == 0 {
                return if self.unparsed.is_empty() { Ok(None) } else { Err(self.unparsed.len()) };
            }
        };
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap();
        assert!(status.starts_with("HTTP/1.1 "), "{status}");
        let fields: Vec<_> = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let mut response =
            Response { status: status[9..12].parse().unwrap(), fields, body: Vec::new() };
        let has_no_body = has_no_body || matches!(response.status, 100..=199 | 204 | 304);
        let length = response.field("content-length").map_or(0, |length| length.parse().unwrap());
        let length: usize = if has_no_body { 0 } else { length };
        while self.unparsed.len() < length {
            if self.read_more() == 0 {
                return Err(self.unparsed.len());
            }
        }
        let rest = self.unparsed.split_off(length);
        response.body = std::mem::replace(&mut self.unparsed, rest);
        Ok(Some(response))
    }

    /// Whether the service closes the connection without sending another byte.
    pub fn is_closed(&mut self) -> bool {
        self.unparsed.is_empty() && self.read_more() == 0
    }

    /// Reads once and returns the number of bytes; 0 if the connection was closed or reset.
    fn read_more(&mut self) -> usize {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(count) => {
                self.unparsed.extend_from_slice(&buffer[..count]);
                count
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
            Err(error) => {
                panic!("{error}; received so far: {:?}", String::from_utf8_lossy(&self.unparsed))
            }
        }
    }
}

impl Response {
    /// The value of a field; its name is given in lower case.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// The content of `large.bin`: 3 MiB and 123 bytes, more than a socket accepts at once. It does not
/// repeat, so a misplaced part is noticed.
pub fn large_content() -> Vec<u8> {
    (0..(3u64 << 20) + 123).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}
