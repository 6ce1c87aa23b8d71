//! The access log: a line for each request, in the formats that tools read.
//!
//! A loop writes lines into memory of its own; a thread of its own writes them to the file, so that a slow disk or a stuck
//! pipe holds nobody up. If that thread is far behind, lines are dropped, and the metrics say how many.

use crate::clock::Clock;
use crate::config::{AccessLog, LogFormat};
use crate::counters::Counter;
use crate::error::Error;
use crate::join::join_soon;
use haul_http::credentials::Credentials;
use haul_http::request::{self, Parsed};
use haul_http::status::Status;
use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::warn;

/// Lines are handed to the file once there are so many bytes of them, and each second.
const BATCH_BYTES: usize = 32 << 10;
/// Batches that may wait to be written.
const BATCHES_MAX: usize = 256;

/// What is to be said of a request.
#[derive(Debug)]
pub struct Logged {
    peer: Option<SocketAddr>,
    /// The request's head, or the first line of what could not be read as one.
    head: Vec<u8>,
    status: Status,
    body_bytes: u64,
    started: Instant,
}

/// One loop's end of the log.
#[derive(Debug)]
pub struct Log {
    format: LogFormat,
    lines: Vec<u8>,
    /// How many.
    count: u64,
    dropped: u64,
    sink: Option<SyncSender<Order>>,
}

/// The log's thread.
#[derive(Debug)]
pub struct Writer {
    sink: SyncSender<Order>,
    log: AccessLog,
    unwritten: Arc<Counter>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the log's thread is told.
#[derive(Debug)]
enum Order {
    Write(Vec<u8>, u64),
    Reopen(File),
    End,
}

impl Logged {
    /// A request that was answered so; `head` is its head, or what is to be said of something that could not be read as one.
    pub fn new(
        peer: Option<SocketAddr>,
        head: &[u8],
        status: Status,
        body_bytes: u64,
        started: Instant,
    ) -> Self {
        Self { peer, head: head.to_vec(), status, body_bytes, started }
    }

    /// Of the body, so many bytes were not sent.
    pub fn cut_short(&mut self, bytes: u64) {
        self.body_bytes = self.body_bytes.saturating_sub(bytes);
    }
}

impl Writer {
    /// Starts the thread of a log that is open.
    pub fn start(log: &AccessLog, file: File) -> Result<Self, Error> {
        let unwritten: Arc<Counter> = Arc::default();
        let counter = Arc::clone(&unwritten);
        let (sink, orders) = sync_channel(BATCHES_MAX);
        let thread = std::thread::Builder::new()
            .name("haul-log".into())
            .spawn(move || write_all(&orders, file, &counter))
            .map_err(|source| Error::Failed { step: "starting the log's thread", source })?;
        Ok(Self { sink, log: log.clone(), unwritten, thread: Mutex::new(Some(thread)) })
    }

    /// An end for a loop.
    pub fn log(&self) -> Log {
        Log {
            format: self.log.format,
            lines: Vec::new(),
            count: 0,
            dropped: 0,
            sink: Some(self.sink.clone()),
        }
    }

    /// Opens the file again by its name: it was moved away by whoever rotates logs.
    pub fn reopen(&self) -> Result<(), Error> {
        let file = open(&self.log)?;
        // A thread that is stuck has this waiting behind what it is stuck with, or not at all.
        let _ = self.sink.try_send(Order::Reopen(file));
        Ok(())
    }

    /// Lines that could not be written, because the disk is full or nobody reads the pipe any more.
    pub fn unwritten(&self) -> &Arc<Counter> {
        &self.unwritten
    }

    /// Writes what there is, and ends.
    pub fn end(&self) {
        // With a pipe that nobody reads it may be stuck, and full: then its lines are lost, and nobody waits for them.
        let _ = self.sink.try_send(Order::End);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            join_soon(thread);
        }
    }
}

/// Opens a log, or says why it cannot be written.
pub fn open(log: &AccessLog) -> Result<File, Error> {
    let path = log.path.as_ref();
    open_path(path)
        .map_err(|source| Error::Log { path: path.cloned().unwrap_or_else(|| "-".into()), source })
}

fn open_path(path: Option<&PathBuf>) -> io::Result<File> {
    match path {
        None => Ok(rustix::io::fcntl_dupfd_cloexec(io::stdout(), 0)?.into()),
        Some(path) => {
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOCTTY;
            Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP)?.into())
        }
    }
}

fn write_all(orders: &Receiver<Order>, mut file: File, unwritten: &Counter) {
    let mut is_failing = false;
    for order in orders {
        match order {
            // A full disk costs lines of the log and no more.
            Order::Write(lines, count) => match file.write_all(&lines) {
                Ok(()) => is_failing = false,
                Err(error) => {
                    unwritten.add(count);
                    if !std::mem::replace(&mut is_failing, true) {
                        warn!(%error, "the access log cannot be written, its lines are lost: {error}");
                    }
                }
            },
            Order::Reopen(again) => file = again,
            Order::End => break,
        }
    }
}

impl Log {
    /// A log that nobody reads.
    pub fn off() -> Self {
        Self { format: LogFormat::default(), lines: Vec::new(), count: 0, dropped: 0, sink: None }
    }

    /// Whether anybody reads it.
    pub fn is_on(&self) -> bool {
        self.sink.is_some()
    }

    /// Notes a request.
    pub fn write(&mut self, logged: &Logged, clock: &Clock) {
        let request = match request::parse(&logged.head, usize::MAX) {
            Parsed::Whole(request, _) => Some(request),
            _ => None,
        };
        let user =
            request.as_ref().and_then(|request| Credentials::parse(request.fields.authorization?));
        let user = user.map(|credentials| credentials.user).filter(|user| !user.is_empty());
        let refused_line =
            Some(first_line(&logged.head)).filter(|line| request.is_none() && !line.is_empty());
        let out = &mut self.lines;
        let peer = logged.peer.map(|peer| peer.ip());
        match self.format {
            LogFormat::Json => {
                let text = |value: Option<&[u8]>| {
                    value.map(|value| String::from_utf8_lossy(value).into_owned())
                };
                let line = JsonLine {
                    time: jiff::Timestamp::try_from(clock.now())
                        .map(|now| now.to_string())
                        .unwrap_or_default(),
                    peer: peer.map(|peer| peer.to_string()),
                    user,
                    method: request.as_ref().map(|request| request.method_name),
                    target: request.as_ref().map(|request| request.target),
                    version: request
                        .as_ref()
                        .map(|request| ["1.0", "1.1"][usize::from(request.minor_version == 1)]),
                    status: logged.status.code,
                    body_bytes: logged.body_bytes,
                    duration_us: logged.started.elapsed().as_micros() as u64,
                    referer: text(request.as_ref().and_then(|request| request.fields.referer)),
                    user_agent: text(
                        request.as_ref().and_then(|request| request.fields.user_agent),
                    ),
                    refused_line: text(refused_line),
                };
                let _ = serde_json::to_writer(&mut *out, &line);
            }
            LogFormat::Common | LogFormat::Combined => {
                match peer {
                    Some(peer) => drop(write!(out, "{peer}")),
                    None => out.push(b'-'),
                }
                out.extend_from_slice(b" - ");
                // It stands there without quotes, so what separates the fields is not for it.
                quote(out, user.as_deref().unwrap_or("-").replace([' ', '['], "_").as_bytes());
                out.extend_from_slice(b" [");
                out.extend_from_slice(clock.log_date().as_bytes());
                out.extend_from_slice(b"] \"");
                if let Some(request) = &request {
                    quote(out, request.method_name.as_bytes());
                    out.push(b' ');
                    quote(out, request.target.as_bytes());
                    out.extend_from_slice(if request.minor_version == 0 {
                        b" HTTP/1.0"
                    } else {
                        b" HTTP/1.1"
                    });
                } else {
                    quote(out, refused_line.unwrap_or(b"-"));
                }
                out.extend_from_slice(b"\" ");
                out.extend_from_slice(itoa::Buffer::new().format(logged.status.code).as_bytes());
                out.push(b' ');
                out.extend_from_slice(itoa::Buffer::new().format(logged.body_bytes).as_bytes());
                if self.format == LogFormat::Combined {
                    for value in [
                        request.as_ref().and_then(|request| request.fields.referer),
                        request.as_ref().and_then(|request| request.fields.user_agent),
                    ] {
                        out.extend_from_slice(b" \"");
                        quote(out, value.unwrap_or(b"-"));
                        out.push(b'"');
                    }
                }
            }
        }
        out.push(b'\n');
        self.count += 1;
        if self.lines.len() >= BATCH_BYTES {
            self.dropped = self.flush();
        }
    }

    /// Hands the lines on; returns how many were dropped since the last time because nobody wrote them fast enough.
    pub fn flush(&mut self) -> u64 {
        let lines = std::mem::take(&mut self.lines);
        let count = std::mem::take(&mut self.count);
        if let Some(sink) = self.sink.as_ref().filter(|_| !lines.is_empty()) {
            self.lines.reserve(BATCH_BYTES + 1024);
            if let Err(TrySendError::Full(_)) = sink.try_send(Order::Write(lines, count)) {
                self.dropped += count;
            }
        }
        std::mem::take(&mut self.dropped)
    }
}

/// The first line of what could not be read, or a beginning of it: it says who tried what.
pub fn first_line(head: &[u8]) -> &[u8] {
    let line = head.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
    line[..line.len().min(UNREAD_BYTES_MAX)].trim_ascii_end()
}

/// Text for a quoted place: what could end the quotes, or a terminal's blocking, as `\xHH`.
fn quote(out: &mut Vec<u8>, text: &[u8]) {
    for &byte in text {
        if byte == b'"' || byte == b'\\' || !(0x20..0x7f).contains(&byte) {
            let _ = write!(out, "\\x{byte:02X}");
        } else {
            out.push(byte);
        }
    }
}

#[derive(Serialize)]
struct JsonLine<'l> {
    time: String,
    peer: Option<String>,
    user: Option<String>,
    method: Option<&'l str>,
    target: Option<&'l str>,
    version: Option<&'static str>,
    status: u16,
    body_bytes: u64,
    duration_us: u64,
    referer: Option<String>,
    user_agent: Option<String>,
    /// The first line of what could not be read as a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_line: Option<String>,
}

/// Bytes of what could not be read as a request that are logged.
const UNREAD_BYTES_MAX: usize = 1024;

/// How long lines may wait in memory.
pub const FLUSHED_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn line(format: LogFormat, head: &[u8]) -> String {
        let mut log = Log { format, ..Log::off() };
        let peer = Some("192.0.2.1:4000".parse().unwrap());
        log.write(&Logged::new(peer, head, Status::OK, 42, Instant::now()), &Clock::new());
        String::from_utf8(log.lines).unwrap()
    }

    const HEAD: &[u8] =
        b"GET /a\"b HTTP/1.1\r\nHost: h\r\nReferer: r\r\nUser-Agent: a\\\x1b[31m\"\r\n\r\n";

    #[test]
    fn lines_are_what_the_formats_say_and_nothing_breaks_out_of_them() {
        let common = line(LogFormat::Common, b"GET /a HTTP/1.0\r\n\r\n");
        assert!(common.starts_with("192.0.2.1 - - ["), "{common}");
        assert!(common.ends_with("] \"GET /a HTTP/1.0\" 200 42\n"), "{common}");
        // httparse refuses a control character, so only the first line of such a head is written.
        let combined = line(LogFormat::Combined, HEAD);
        assert!(
            combined.ends_with("] \"GET /a\\x22b HTTP/1.1\" 200 42 \"-\" \"-\"\n"),
            "{combined}"
        );
        let nothing = line(LogFormat::Combined, b"\r\n\r\n");
        assert!(nothing.ends_with("] \"-\" 200 42 \"-\" \"-\"\n"), "{nothing}");
        let json = line(LogFormat::Json, b"\x16\x03 hello\r\nx");
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&json["target"], &json["refused_line"]),
            (&serde_json::Value::Null, &"\x16\x03 hello".into())
        );
        let combined = line(
            LogFormat::Combined,
            b"GET /a\"b HTTP/1.1\r\nHost: h\r\nUser-Agent: \\\"\xe4\r\n\r\n",
        );
        assert!(
            combined.ends_with("\"GET /a\\x22b HTTP/1.1\" 200 42 \"-\" \"\\x5C\\x22\\xE4\"\n"),
            "{combined}"
        );
        let json =
            line(LogFormat::Json, b"GET /a\"b HTTP/1.1\r\nHost: h\r\nUser-Agent: \"\r\n\r\n");
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&json["target"], &json["status"], &json["peer"]),
            (&"/a\"b".into(), &200.into(), &"192.0.2.1".into())
        );
    }
}
