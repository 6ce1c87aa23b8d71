//! The access log: a line for each request, in the formats that log tools read.
//!
//! A [`LogEntry`] keeps the fields of a request that the line needs until its response is sent.
//! [`haul_server::log_writer`] writes the lines to the file.

use crate::clock::ResponseClock;
use crate::config::LogFormat;
use haul_http::credentials::Credentials;
use haul_http::request::Request;
use haul_http::status::Status;
use haul_server::log_writer::LogBuffer;
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// The logged beginning of a malformed request, in bytes.
const MALFORMED_BYTES_MAX: usize = 1024;

/// One request and the result of its response.
#[derive(Debug, Clone)]
pub struct LogEntry {
    peer: Option<SocketAddr>,
    request: LoggedRequest,
    status: Status,
    body_bytes: u64,
    received: Instant,
}

/// The fields of a request that a log line needs. They lie in one piece of memory, each from the
/// end of the one before.
#[derive(Debug, Clone)]
struct LoggedRequest {
    bytes: Box<[u8]>,
    /// The ends of method, target, referrer, user agent and user; `None` for a missing field.
    ends: [Option<u32>; 5],
    /// `None` for a malformed request, whose first line stands where the method would.
    minor_version: Option<u8>,
}

const METHOD: usize = 0;
const TARGET: usize = 1;
const REFERER: usize = 2;
const USER_AGENT: usize = 3;
const USER: usize = 4;

impl LoggedRequest {
    fn new(fields: [Option<&[u8]>; 5], minor_version: Option<u8>) -> Self {
        let len = fields.iter().flatten().map(|field| field.len()).sum();
        let mut bytes = Vec::with_capacity(len);
        let ends = fields.map(|field| {
            bytes.extend_from_slice(field?);
            Some(bytes.len() as u32)
        });
        Self { bytes: bytes.into(), ends, minor_version }
    }

    fn field(&self, index: usize) -> Option<&[u8]> {
        let end = self.ends[index]? as usize;
        let start = self.ends[..index].iter().rev().find_map(|&end| end).unwrap_or(0);
        self.bytes.get(start as usize..end)
    }
}

impl LogEntry {
    /// A request with its response's status and body length.
    pub fn new(
        peer: Option<SocketAddr>,
        request: &Request<'_>,
        status: Status,
        body_bytes: u64,
        received: Instant,
    ) -> Self {
        let fields = &request.fields;
        let credentials = fields.authorization.and_then(Credentials::parse);
        let user = credentials.as_ref().map(|credentials| credentials.user.as_bytes());
        let kept = [
            Some(request.method_name.as_bytes()),
            Some(request.target.as_bytes()),
            fields.referer,
            fields.user_agent,
            user.filter(|user| !user.is_empty()),
        ];
        let request = LoggedRequest::new(kept, Some(request.minor_version));
        Self { peer, request, status, body_bytes, received }
    }

    /// A malformed request, of which `line` is the first line.
    pub fn malformed(
        peer: Option<SocketAddr>,
        line: &[u8],
        status: Status,
        body_bytes: u64,
        received: Instant,
    ) -> Self {
        let line = Some(line).filter(|line| !line.is_empty());
        let request = LoggedRequest::new([line, None, None, None, None], None);
        Self { peer, request, status, body_bytes, received }
    }

    /// The same request with another result.
    pub fn with_result(&self, status: Status, body_bytes: u64) -> Self {
        Self { status, body_bytes, ..self.clone() }
    }

    /// Subtracts body bytes that were not sent.
    pub fn cut_short(&mut self, bytes: u64) {
        self.body_bytes = self.body_bytes.saturating_sub(bytes);
    }

    fn text(&self, field: usize) -> Option<Cow<'_, str>> {
        self.request.field(field).map(String::from_utf8_lossy)
    }

    fn address(&self) -> Option<IpAddr> {
        self.peer.map(|peer| peer.ip())
    }
}

/// The access log of one event loop.
#[derive(Debug, Default)]
pub struct AccessLog {
    format: LogFormat,
    buffer: LogBuffer,
}

impl AccessLog {
    /// A log in this format.
    pub fn new(format: LogFormat, buffer: LogBuffer) -> Self {
        Self { format, buffer }
    }

    /// Whether requests are logged. [`AccessLog::default`] logs none.
    pub fn is_on(&self) -> bool {
        self.buffer.is_on()
    }

    /// Hands the lines to the writer; returns how many were dropped since the last call.
    pub fn flush(&mut self) -> u64 {
        self.buffer.flush()
    }

    /// Logs a request whose response is sent.
    pub fn write(&mut self, entry: &LogEntry, clock: &ResponseClock) {
        let format = self.format;
        self.buffer.line(|out| match format {
            LogFormat::Json => write_json(out, entry, clock),
            LogFormat::Common => write_common(out, entry, clock),
            LogFormat::Combined => {
                write_common(out, entry, clock);
                for field in [REFERER, USER_AGENT] {
                    out.extend_from_slice(b" \"");
                    escape(out, entry.request.field(field).unwrap_or(b"-"));
                    out.push(b'"');
                }
            }
        });
    }
}

/// The common log format: address, user, date, request line, status, body length.
fn write_common(out: &mut Vec<u8>, entry: &LogEntry, clock: &ResponseClock) {
    match entry.address() {
        Some(address) => drop(write!(out, "{address}")),
        None => out.push(b'-'),
    }
    out.extend_from_slice(b" - ");
    // The user is not quoted, so it must not contain what separates the fields.
    let user = entry.text(USER).unwrap_or("-".into());
    escape(out, user.replace([' ', '['], "_").as_bytes());
    out.extend_from_slice(b" [");
    out.extend_from_slice(clock.log_date().as_bytes());
    out.extend_from_slice(b"] \"");
    escape(out, entry.request.field(METHOD).unwrap_or(b"-"));
    if let Some(minor_version) = entry.request.minor_version {
        out.push(b' ');
        escape(out, entry.request.field(TARGET).unwrap_or_default());
        out.extend_from_slice(if minor_version == 0 { b" HTTP/1.0" } else { b" HTTP/1.1" });
    }
    out.extend_from_slice(b"\" ");
    out.extend_from_slice(itoa::Buffer::new().format(entry.status.code).as_bytes());
    out.push(b' ');
    out.extend_from_slice(itoa::Buffer::new().format(entry.body_bytes).as_bytes());
}

fn write_json(out: &mut Vec<u8>, entry: &LogEntry, clock: &ResponseClock) {
    let version = entry.request.minor_version;
    let of_request = |field| version.and_then(|_| entry.text(field));
    let line = JsonLine {
        time: jiff::Timestamp::try_from(clock.now()).map(|now| now.to_string()).unwrap_or_default(),
        peer: entry.address().map(|address| address.to_string()),
        user: entry.text(USER),
        method: of_request(METHOD),
        target: of_request(TARGET),
        version: version.map(|minor| ["1.0", "1.1"][usize::from(minor == 1)]),
        status: entry.status.code,
        body_bytes: entry.body_bytes,
        duration_us: entry.received.elapsed().as_micros() as u64,
        referer: entry.text(REFERER),
        user_agent: entry.text(USER_AGENT),
        refused_line: if version.is_none() { entry.text(METHOD) } else { None },
    };
    let _ = serde_json::to_writer(out, &line);
}

/// The first line of a malformed request, or a beginning of it.
pub fn first_line(head: &[u8]) -> &[u8] {
    let line = head.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
    line[..line.len().min(MALFORMED_BYTES_MAX)].trim_ascii_end()
}

/// Appends text for a quoted field: quotes, backslashes, control characters and all that is not
/// ASCII as `\xHH`.
fn escape(out: &mut Vec<u8>, text: &[u8]) {
    for &byte in text {
        if byte == b'"' || byte == b'\\' || !(0x20..0x7f).contains(&byte) {
            let _ = write!(out, "\\x{byte:02X}");
        } else {
            out.push(byte);
        }
    }
}

/// A line of the access log in JSON. A field of the request is `null` if the request has none or is
/// malformed.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "LogLine")]
pub struct JsonLine<'l> {
    /// Time of the response, RFC 3339.
    time: String,
    /// The client's address; `null` for a Unix socket.
    peer: Option<String>,
    /// The user, if the request was authenticated.
    user: Option<Cow<'l, str>>,
    /// The request's method.
    method: Option<Cow<'l, str>>,
    /// The request's target.
    target: Option<Cow<'l, str>>,
    /// The HTTP version: `1.0` or `1.1`.
    version: Option<&'static str>,
    /// The status code.
    status: u16,
    /// Bytes of the response's body that were sent.
    body_bytes: u64,
    /// Time from the request to the end of the response, in µs.
    duration_us: u64,
    /// The field `Referer`.
    referer: Option<Cow<'l, str>>,
    /// The field `User-Agent`.
    user_agent: Option<Cow<'l, str>>,
    /// The first line of a malformed request.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_line: Option<Cow<'l, str>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_http::request::{self, Parsed};

    fn line(format: LogFormat, head: &[u8]) -> String {
        let mut log = AccessLog::new(format, LogBuffer::default());
        let peer = Some("192.0.2.1:4000".parse().unwrap());
        let now = Instant::now();
        let entry = match request::parse(head, usize::MAX) {
            Parsed::Whole(request, _) => LogEntry::new(peer, &request, Status::OK, 42, now),
            _ => LogEntry::malformed(peer, first_line(head), Status::OK, 42, now),
        };
        log.write(&entry, &ResponseClock::new());
        String::from_utf8(log.buffer.pending().to_vec()).unwrap()
    }

    const HEAD: &[u8] =
        b"GET /a\"b HTTP/1.1\r\nHost: h\r\nReferer: r\r\nUser-Agent: a\\\x1b[31m\"\r\n\r\n";

    #[test]
    fn each_format_has_its_fields_and_no_field_escapes_its_quotes() {
        let common = line(LogFormat::Common, b"GET /a HTTP/1.0\r\n\r\n");
        assert!(common.starts_with("192.0.2.1 - - ["), "{common}");
        assert!(common.ends_with("] \"GET /a HTTP/1.0\" 200 42\n"), "{common}");
        // A head with a control character is malformed: only its first line is logged.
        let combined = line(LogFormat::Combined, HEAD);
        assert!(
            combined.ends_with("] \"GET /a\\x22b HTTP/1.1\" 200 42 \"-\" \"-\"\n"),
            "{combined}"
        );
        let empty = line(LogFormat::Combined, b"\r\n\r\n");
        assert!(empty.ends_with("] \"-\" 200 42 \"-\" \"-\"\n"), "{empty}");
        let json = line(LogFormat::Json, b"\x16\x03 hello\r\nx");
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&json["target"], &json["refused_line"]),
            (&serde_json::Value::Null, &"\x16\x03 hello".into())
        );
        let head = b"GET /a\"b HTTP/1.1\r\nHost: h\r\nUser-Agent: \\\"\xe4\r\n\r\n";
        let combined = line(LogFormat::Combined, head);
        assert!(
            combined.ends_with("\"GET /a\\x22b HTTP/1.1\" 200 42 \"-\" \"\\x5C\\x22\\xE4\"\n"),
            "{combined}"
        );
        let head = b"GET /a\"b HTTP/1.1\r\nHost: h\r\nReferer: r\r\nUser-Agent: \"\r\n\r\n";
        let json: serde_json::Value = serde_json::from_str(&line(LogFormat::Json, head)).unwrap();
        assert_eq!(
            (&json["target"], &json["status"], &json["peer"], &json["user_agent"]),
            (&"/a\"b".into(), &200.into(), &"192.0.2.1".into(), &"\"".into())
        );
        assert_eq!((&json["referer"], &json["user"]), (&"r".into(), &serde_json::Value::Null));
    }

    #[test]
    fn the_user_is_logged_with_every_combination_of_other_fields() {
        // ann:sesame
        let auth = "Authorization: Basic YW5uOnNlc2FtZQ==\r\n";
        for (others, end) in [
            ("", "\"-\" \"-\""),
            ("Referer: r\r\n", "\"r\" \"-\""),
            ("User-Agent: u\r\n", "\"-\" \"u\""),
            ("User-Agent: u\r\nReferer: r\r\n", "\"r\" \"u\""),
        ] {
            let head = format!("GET / HTTP/1.1\r\nHost: h\r\n{others}{auth}\r\n");
            let line = line(LogFormat::Combined, head.as_bytes());
            assert!(line.starts_with("192.0.2.1 - ann ["), "{line}");
            assert!(line.ends_with(&format!("200 42 {end}\n")), "{line}");
        }
    }
}
