//! HTTP clients of the comparison: wrk for many small requests, a simple client for large bodies.
//!
//! The simple client discards bodies in the kernel, so that it does not limit the throughput.

use haul_lab::Host;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum size of a response head.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Timeout of a connection attempt and of each read of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of a run of wrk.
#[derive(Debug, Clone, Copy)]
pub struct WrkReport {
    /// Number of completed requests.
    pub requests: u64,
    /// The 99th percentile of the time to the response, in µs.
    pub p99_us: f64,
}

/// A run of wrk.
#[derive(Debug)]
pub struct Wrk {
    pub url: String,
    pub connections: usize,
    pub seconds: u32,
    pub requests: Requests,
}

/// What the connections of wrk request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    /// Each the same file, many times.
    Same,
    /// Each the file once.
    Once,
    /// The file, and for every tenth request of all connections [`LARGE_FILE`].
    Mixed,
}

/// The large file of mixed requests.
pub const LARGE_FILE: &str = "1MiB";

/// Runs wrk on `host`.
pub fn wrk(host: &Host, run: &Wrk) -> Result<WrkReport, String> {
    let Wrk { url, connections, seconds, requests } = run;
    let mut command = Command::new("wrk");
    command.args(["-t", "1", "-c", &connections.to_string(), "-d", &format!("{seconds}s")]);
    command.args(["--latency", "--timeout", "30s", url]).stdin(Stdio::null());
    let mut script = None;
    match requests {
        Requests::Same => {}
        Requests::Once => drop(command.args(["-H", "Connection: close"])),
        Requests::Mixed => {
            let script = script.insert(mixed_script().map_err(|error| error.to_string())?);
            command.arg("-s").arg(script.path());
        }
    }
    let output = host
        .run(|| haul_lab_sys::child::dies_with_parent(&mut command).output())
        .map_err(|error| error.to_string())?
        .map_err(|error| {
            format!("wrk: {error}: ci/install installs it (Debian: apt-get install wrk)")
        })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let problem =
        text.lines().find(|line| line.contains("Non-2xx") || line.contains("Socket errors"));
    if let Some(problem) = problem {
        return Err(format!("wrk {url}: {}", problem.trim()));
    }
    let requests = text
        .lines()
        .find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok())
        .ok_or_else(|| format!("wrk {url}: no number of requests in {text}"))?;
    let p99_us = text
        .lines()
        .find_map(|line| parse_us(line.trim().strip_prefix("99%")?.trim()))
        .ok_or_else(|| format!("wrk {url}: no 99th percentile in {text}"))?;
    Ok(WrkReport { requests, p99_us })
}

/// The script of mixed requests. All connections of a thread count together.
fn mixed_script() -> std::io::Result<tempfile::NamedTempFile> {
    let mut file = tempfile::NamedTempFile::new()?;
    write!(
        file,
        "local count = 0\n\
         request = function()\n\
         count = count + 1\n\
         if count % 10 == 0 then return wrk.format('GET', '/{LARGE_FILE}') end\n\
         return wrk.format()\n\
         end\n"
    )?;
    Ok(file)
}

/// Parses a time of wrk, such as `1.25ms`, to µs.
fn parse_us(text: &str) -> Option<f64> {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6), ("m", 60e6), ("h", 3600e6)];
    let (number, factor) = units
        .iter()
        .find_map(|(unit, factor)| text.strip_suffix(unit).map(|number| (number, factor)))?;
    Some(number.parse::<f64>().ok()? * factor)
}

/// Requests `file` repeatedly on each connection until `until`; returns the received body bytes.
///
/// One thread receives for all connections, as an event loop does.
pub fn receive_bulk(
    server: SocketAddr,
    file: &str,
    connections: usize,
    until: Instant,
) -> Result<u64, String> {
    let failed = |error: std::io::Error| format!("getting {file} from {server}: {error}");
    let mut downloads = Vec::with_capacity(connections);
    for _ in 0..connections {
        let stream = TcpStream::connect(server).map_err(failed)?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).map_err(failed)?;
        downloads.push(Download { stream, left: 0, bytes: 0 });
    }
    // A call goes on while bytes arrive, so a larger one would keep the others waiting.
    let call_bytes_max = if connections == 1 { 1 << 30 } else { 1 << 20 };
    let timeout = Timespec::try_from(RESPONSE_TIMEOUT).map_err(|error| error.to_string())?;
    while Instant::now() < until {
        for download in downloads.iter_mut().filter(|download| download.left == 0) {
            download.request(server, file).map_err(failed)?;
        }
        let ready: Vec<bool> = if let [_] = &downloads[..] {
            // The receiving call waits by itself.
            vec![true]
        } else {
            let mut descriptors: Vec<_> = downloads
                .iter()
                .map(|download| PollFd::new(&download.stream, PollFlags::IN))
                .collect();
            let count = rustix::event::poll(&mut descriptors, Some(&timeout));
            if count.map_err(|errno| failed(errno.into()))? == 0 {
                return Err(format!("{server} sends nothing"));
            }
            descriptors.iter().map(|one| one.revents().contains(PollFlags::IN)).collect()
        };
        for (download, is_ready) in downloads.iter_mut().zip(ready) {
            if is_ready && download.left > 0 {
                download.receive(call_bytes_max).map_err(failed)?;
            }
        }
    }
    Ok(downloads.iter().map(|download| download.bytes).sum())
}

/// A connection that receives bodies.
struct Download {
    stream: TcpStream,
    /// What is left of the present body, in bytes.
    left: u64,
    /// Received so far.
    bytes: u64,
}

impl Download {
    fn request(&mut self, server: SocketAddr, file: &str) -> std::io::Result<()> {
        send_request(&mut self.stream, server, file)?;
        let (length, received) = read_head(&mut self.stream)?;
        self.left = length.saturating_sub(received);
        self.bytes += received;
        Ok(())
    }

    fn receive(&mut self, call_bytes_max: usize) -> std::io::Result<()> {
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(call_bytes_max);
        let count = haul_sys::sockopt::discard(&self.stream, wanted)? as u64;
        if count == 0 {
            let message = format!("the server closed the connection {} bytes early", self.left);
            return Err(std::io::Error::other(message));
        }
        self.left -= count;
        self.bytes += count;
        Ok(())
    }
}

/// Number of open connections of the clients whose latency is measured.
pub const USUAL: usize = 16;

/// Latency of single requests.
#[derive(Debug, Clone, Copy)]
pub struct Latency {
    pub p99: Duration,
    /// Number of requests that needed another connection, because the server had closed the idle
    /// one that they were sent on.
    pub repeated: usize,
}

/// Measures the latency of single requests until `until`.
///
/// [`USUAL`] open connections send requests in turn, one request at a time, with a pause of 1 ms
/// between two requests. After each such cycle, one request uses a new connection, and its latency
/// includes connecting. If the server has closed an idle connection, the request is sent again on a
/// new one, as browsers do, and its latency includes both. Otherwise a request without a complete
/// response is an error.
pub fn latency(server: SocketAddr, file: &str, until: Instant) -> Result<Latency, String> {
    const PAUSE: Duration = Duration::from_millis(1);
    let mut connections = connect(server, file, USUAL)?;
    let mut latencies = Vec::new();
    let mut repeated = 0;
    while Instant::now() < until {
        let turn = latencies.len() % (USUAL + 1);
        let started = Instant::now();
        match connections.get_mut(turn) {
            Some(connection) => {
                if request_file(connection, server, file).is_err() {
                    repeated += 1;
                    *connection = connect(server, file, 1)?.remove(0);
                }
            }
            None => drop(connect(server, file, 1)?),
        }
        latencies.push(started.elapsed());
        std::thread::sleep(PAUSE);
    }
    latencies.sort_unstable();
    let p99 = latencies.get(latencies.len() * 99 / 100).copied();
    Ok(Latency { p99: p99.ok_or("no request was sent before the deadline")?, repeated })
}

/// Opens connections, requests `file` once on each, and returns the open connections.
pub fn connect(
    server: SocketAddr,
    file: &str,
    connections: usize,
) -> Result<Vec<TcpStream>, String> {
    let failed = |error: std::io::Error| format!("connecting to {server}: {error}");
    let mut opened = Vec::with_capacity(connections);
    for _ in 0..connections {
        let mut stream = TcpStream::connect_timeout(&server, RESPONSE_TIMEOUT).map_err(failed)?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).map_err(failed)?;
        request_file(&mut stream, server, file)?;
        opened.push(stream);
    }
    Ok(opened)
}

/// Requests `file` and receives the whole response.
fn request_file(stream: &mut TcpStream, server: SocketAddr, file: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("getting {file} from {server}: {error}");
    send_request(stream, server, file).map_err(failed)?;
    let (length, received) = read_head(stream).map_err(failed)?;
    let rest = length.saturating_sub(received);
    let copied = std::io::copy(&mut stream.take(rest), &mut std::io::sink()).map_err(failed)?;
    if copied == rest { Ok(()) } else { Err(format!("{server}: the body of {file} ended early")) }
}

/// Sends a GET request for `file` in a single write.
fn send_request(stream: &mut TcpStream, server: SocketAddr, file: &str) -> std::io::Result<()> {
    stream.write_all(format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\n\r\n").as_bytes())
}

/// Reads a response head. Returns the body's length and how many of its bytes came with the head.
fn read_head(stream: &mut TcpStream) -> std::io::Result<(u64, u64)> {
    let invalid = |problem: &str| std::io::Error::other(problem.to_owned());
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 || head.len() > HEAD_BYTES_MAX {
            return Err(invalid("no complete response head"));
        }
        head.extend_from_slice(&buffer[..count]);
        let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        if !text.starts_with("http/1.1 200") {
            return Err(invalid(text.lines().next().unwrap_or_default()));
        }
        let length = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok())
            .ok_or_else(|| invalid("a response without Content-Length"))?;
        return Ok((length, (head.len() - end - 4) as u64));
    }
}
