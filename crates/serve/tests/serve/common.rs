//! A file service of its own for each test, on one host of a lab of its own; who asks is on the other.

use haul_lab::{Lab, Settings};
use haul_serve::{Address, Config, Handle, ListenAddress, Server};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// No answer takes longer, however busy the machine is.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Waits for what another thread or program has to do first, and panics where it does not.
#[track_caller]
pub fn eventually(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < ANSWER_MAX, "it never came to that");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A running service.
pub struct Service {
    pub lab: Lab,
    pub folder: TempDir,
    pub address: SocketAddr,
    pub handle: Handle,
    running: Option<JoinHandle<()>>,
}

/// A response as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Names in lower case.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// A connection to a service.
pub struct Client {
    pub stream: TcpStream,
    /// What came after the last response.
    rest: Vec<u8>,
}

impl Service {
    /// Serves a folder with a few files; `fill` puts more there, `configure` changes how.
    pub fn start(fill: impl FnOnce(&PathBuf), configure: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_path_buf();
        fs::write(root.join("ten.txt"), "0123456789").unwrap();
        fs::write(root.join("empty"), "").unwrap();
        fs::write(root.join("large.bin"), large()).unwrap();
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
        let running = std::thread::spawn(move || server.run().unwrap());
        Self { lab, folder, address: address.unwrap(), handle, running: Some(running) }
    }

    /// Waits until its files are old enough to have tags.
    pub fn aged(self) -> Self {
        std::thread::sleep(Duration::from_millis(2100));
        self
    }

    /// Waits until its files are old enough for their pages to travel.
    pub fn settled(self) -> Self {
        std::thread::sleep(Duration::from_millis(10_100));
        self
    }

    /// Serves the few files as they are.
    pub fn plain() -> Self {
        Self::start(|_| {}, |_| {})
    }

    /// Where a file of it lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A connection from the other host.
    pub fn connect(&self) -> Client {
        let stream = self.lab.receiver.run(|| TcpStream::connect(self.address)).unwrap().unwrap();
        stream.set_read_timeout(Some(ANSWER_MAX)).unwrap();
        stream.set_write_timeout(Some(ANSWER_MAX)).unwrap();
        Client::of(stream)
    }

    /// The response to `method target` with these lines of fields, on a connection of its own.
    pub fn ask(&self, method: &str, target: &str, fields: &str) -> Response {
        let mut client = self.connect();
        client.send(&format!("{method} {target} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        client.response(method == "HEAD").unwrap()
    }

    /// `GET` without more.
    pub fn get(&self, target: &str) -> Response {
        self.ask("GET", target, "")
    }

    /// Has it end, and waits until it has.
    pub fn stop(&mut self) {
        self.handle.drain();
        if let Some(running) = self.running.take() {
            running.join().unwrap();
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
    /// A client over a connection that there is already.
    pub fn of(stream: TcpStream) -> Self {
        Self { stream, rest: Vec::new() }
    }

    /// Sends these bytes, or says why it cannot.
    pub fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends these bytes.
    pub fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    /// The next response; `None` where the connection ends instead. A body ends where its length says.
    pub fn response(&mut self, has_no_body: bool) -> Option<Response> {
        match self.receive(has_no_body) {
            Ok(response) => response,
            Err(came) => panic!("the response ends after {came} bytes"),
        }
    }

    /// The next response, or `None` where the connection ends before the response does.
    pub fn response_or_cut(&mut self) -> Option<Response> {
        self.receive(false).ok().flatten()
    }

    /// The next response; `None` where the connection ends instead, an error where it ends within.
    fn receive(&mut self, has_no_body: bool) -> Result<Option<Response>, usize> {
        let head = loop {
            if let Some(end) = self.rest.windows(4).position(|window| window == b"\r\n\r\n") {
                let rest = self.rest.split_off(end + 4);
                break std::mem::replace(&mut self.rest, rest);
            }
            if self.more() == 0 {
                return if self.rest.is_empty() { Ok(None) } else { Err(self.rest.len()) };
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
        while self.rest.len() < length {
            if self.more() == 0 {
                return Err(self.rest.len());
            }
        }
        let rest = self.rest.split_off(length);
        response.body = std::mem::replace(&mut self.rest, rest);
        Ok(Some(response))
    }

    /// Whether the service has ended the connection, having sent nothing more.
    pub fn is_closed(&mut self) -> bool {
        self.rest.is_empty() && self.more() == 0
    }

    fn more(&mut self) -> usize {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(count) => {
                self.rest.extend_from_slice(&buffer[..count]);
                count
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
            Err(error) => panic!("{error}; so far {:?}", String::from_utf8_lossy(&self.rest)),
        }
    }
}

impl Response {
    /// A field, by its name in lower case.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// The content of `large.bin`: more than a socket takes at once, and no part like another.
pub fn large() -> Vec<u8> {
    (0..(3u64 << 20) + 123).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}
