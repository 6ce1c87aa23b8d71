//! Parses the head of a request: method, target, fields and the length of the body.
//!
//! httparse parses the syntax. This module adds what security depends on: where the request ends,
//! so that no part of one request is taken for another (RFC 9112 section 11.2), and which fields
//! must not be repeated. It reads no body and opens no file.

use crate::accept;
use crate::host::is_host;
use crate::list_field::ListField;
use crate::status::Status;
use std::mem::MaybeUninit;

/// The largest number of fields in a head. Browsers send about fifteen, proxies add some.
pub const FIELDS_MAX: usize = 100;

/// The method of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// `GET`: send a representation of the target.
    Get,
    /// `HEAD`: send the head of the response to `GET`.
    Head,
    /// `OPTIONS`: list the allowed methods.
    Options,
    /// `PUT`: replace the target's content by the body.
    Put,
    /// A standard method that is never allowed here (RFC 9110 section 9.3, RFC 5789).
    Other,
    /// Any other method.
    Unknown,
}

/// How the length of a request's body is determined (RFC 9112 section 6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyLength {
    /// By `Content-Length`: this number of bytes.
    Bytes(u64),
    /// By the chunked transfer coding: the last chunk ends the body.
    Chunked,
}

/// The head of a request, borrowed from the input.
#[derive(Debug, Clone)]
pub struct Request<'b> {
    /// The method.
    pub method: Method,
    /// The method's name as received.
    pub method_name: &'b str,
    /// The request target as received.
    pub target: &'b str,
    /// The minor version: 0 for HTTP/1.0, 1 for HTTP/1.1.
    pub minor_version: u8,
    /// Whether the connection persists after the response.
    pub keeps_alive: bool,
    /// The length of the body; `None` if the head announces no body.
    pub body: Option<BodyLength>,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// The fields that servers evaluate.
    pub fields: Fields<'b>,
}

/// The fields of a request that servers evaluate, as received. All other fields are discarded.
///
/// A [`ListField`] holds all lines of a repeated field.
#[derive(Debug, Clone, Default)]
pub struct Fields<'b> {
    /// `Accept` (RFC 9110 section 12.5.1).
    pub accept: ListField<'b>,
    /// `Accept-Encoding` (RFC 9110 section 12.5.3).
    pub accept_encoding: ListField<'b>,
    /// `Authorization` (RFC 9110 section 11.6.2).
    pub authorization: Option<&'b [u8]>,
    /// `Content-Encoding` (RFC 9110 section 8.4).
    pub content_encoding: Option<&'b [u8]>,
    /// `Content-Range` (RFC 9110 section 14.4).
    pub content_range: Option<&'b [u8]>,
    /// `If-Match` (RFC 9110 section 13.1.1).
    pub if_match: ListField<'b>,
    /// `If-Modified-Since` (RFC 9110 section 13.1.3).
    pub if_modified_since: Option<&'b [u8]>,
    /// `If-None-Match` (RFC 9110 section 13.1.2).
    pub if_none_match: ListField<'b>,
    /// `If-Range` (RFC 9110 section 13.1.5).
    pub if_range: Option<&'b [u8]>,
    /// `If-Unmodified-Since` (RFC 9110 section 13.1.4).
    pub if_unmodified_since: Option<&'b [u8]>,
    /// `Origin` (RFC 6454 section 7).
    pub origin: Option<&'b [u8]>,
    /// `Range` (RFC 9110 section 14.2).
    pub range: Option<&'b [u8]>,
    /// `Referer` (RFC 9110 section 10.1.3).
    pub referer: Option<&'b [u8]>,
    /// `User-Agent` (RFC 9110 section 10.1.5).
    pub user_agent: Option<&'b [u8]>,
}

/// The result of parsing the start of a byte stream.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack, and a box would cost an allocation for each request"
)]
pub enum Parsed<'b> {
    /// The head is not complete yet.
    Partial,
    /// A complete head, and its length in bytes.
    Whole(Request<'b>, usize),
    /// A head that is refused with this status. The position of the next request is not known.
    Refused(Status),
}

/// Parses the head at the start of `bytes`, of at most `head_bytes_max` bytes.
pub fn parse(bytes: &[u8], head_bytes_max: usize) -> Parsed<'_> {
    let mut lines = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut head = httparse::Request::new(&mut []);
    let parsed =
        head.parse_with_uninit_headers(&bytes[..bytes.len().min(head_bytes_max)], &mut lines);
    match parsed {
        Ok(httparse::Status::Complete(head_bytes)) => {
            match (head.method, head.path, head.version) {
                (Some(method), Some(target), Some(minor_version)) => {
                    Parsed::of(Request::of(method, target, minor_version, head.headers), head_bytes)
                }
                _ => Parsed::Refused(Status::BAD_REQUEST),
            }
        }
        Ok(httparse::Status::Partial) => Parsed::unfinished(bytes, head_bytes_max),
        Err(httparse::Error::Version) => parse_other_version(bytes, head_bytes_max),
        Err(error) => Parsed::refused(error),
    }
}

/// Parses a head whose version is not HTTP/1.0 or HTTP/1.1. A later minor version is treated as
/// HTTP/1.1 (RFC 9110 section 2.5).
fn parse_other_version(bytes: &[u8], head_bytes_max: usize) -> Parsed<'_> {
    let limited = &bytes[..bytes.len().min(head_bytes_max)];
    let start = limited.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(0);
    let Some(end) = limited[start..].iter().position(|&byte| byte == b'\n') else {
        return Parsed::unfinished(bytes, head_bytes_max);
    };
    let line = &limited[start..start + end];
    let mut parts = line.strip_suffix(b"\r").unwrap_or(line).split(|&byte| byte == b' ');
    let parts = (parts.next(), parts.next(), parts.next(), parts.next());
    let (Some(method), Some(target), Some(version), None) = parts else {
        return Parsed::Refused(Status::BAD_REQUEST);
    };
    match version {
        b"HTTP/1.2" | b"HTTP/1.3" | b"HTTP/1.4" | b"HTTP/1.5" | b"HTTP/1.6" | b"HTTP/1.7"
        | b"HTTP/1.8" | b"HTTP/1.9" => {}
        [b'H', b'T', b'T', b'P', b'/', major, b'.', minor]
            if major.is_ascii_digit() && minor.is_ascii_digit() =>
        {
            return Parsed::Refused(Status::VERSION_NOT_SUPPORTED);
        }
        _ => return Parsed::Refused(Status::BAD_REQUEST),
    }
    // The line is checked with a version that httparse knows.
    let known = [method, b" ", target, b" HTTP/1.1\r\n\r\n"].concat();
    if let Err(error) = httparse::Request::new(&mut []).parse(&known) {
        return Parsed::refused(error);
    }
    let (Ok(method), Ok(target)) = (std::str::from_utf8(method), std::str::from_utf8(target))
    else {
        return Parsed::Refused(Status::BAD_REQUEST);
    };
    let line_bytes = start + end + 1;
    let mut lines = [httparse::EMPTY_HEADER; FIELDS_MAX];
    match httparse::parse_headers(&limited[line_bytes..], &mut lines) {
        Ok(httparse::Status::Complete((fields_bytes, lines))) => {
            Parsed::of(Request::of(method, target, 1, lines), line_bytes + fields_bytes)
        }
        Ok(httparse::Status::Partial) => Parsed::unfinished(bytes, head_bytes_max),
        Err(error) => Parsed::refused(error),
    }
}

impl<'b> Parsed<'b> {
    fn of(request: Result<Request<'b>, Status>, head_bytes: usize) -> Self {
        match request {
            Ok(request) => Self::Whole(request, head_bytes),
            Err(status) => Self::Refused(status),
        }
    }

    fn unfinished(bytes: &[u8], head_bytes_max: usize) -> Self {
        if bytes.len() >= head_bytes_max {
            Self::Refused(Status::HEAD_TOO_LARGE)
        } else {
            Self::Partial
        }
    }

    fn refused(error: httparse::Error) -> Self {
        Self::Refused(match error {
            httparse::Error::TooManyHeaders => Status::HEAD_TOO_LARGE,
            _ => Status::BAD_REQUEST,
        })
    }
}

impl<'b> Request<'b> {
    fn of(
        method_name: &'b str,
        target: &'b str,
        minor_version: u8,
        lines: &[httparse::Header<'b>],
    ) -> Result<Self, Status> {
        let mut fields = Fields::default();
        let mut framing = Framing::default();
        for line in lines {
            framing.record(line.name, line.value)?;
            fields.record(line.name, line.value);
        }
        // RFC 9112 section 3.2: exactly one `Host`, which may be empty. HTTP/1.0 may omit it.
        if framing.hosts > 1 || (framing.hosts == 0 && minor_version == 1) {
            return Err(Status::BAD_REQUEST);
        }
        let body = framing.body(minor_version)?;
        Ok(Self {
            method: Method::of(method_name),
            method_name,
            target,
            minor_version,
            keeps_alive: !framing.closes && (minor_version == 1 || framing.keeps_alive),
            body,
            expects_continue: framing.expects_continue && minor_version == 1,
            fields,
        })
    }

    /// Whether the client prefers JSON to HTML.
    pub fn prefers_json(&self) -> bool {
        accept::prefers(&self.fields.accept, "application/json", "text/html")
    }

    /// Whether the client asks for a page, as browsers do when a user follows a link.
    pub fn asks_for_page(&self) -> bool {
        accept::names(&self.fields.accept, "text/html")
    }

    /// Whether a body follows the head.
    pub fn has_body(&self) -> bool {
        !matches!(self.body, None | Some(BodyLength::Bytes(0)))
    }
}

impl Method {
    fn of(name: &str) -> Self {
        match name {
            "GET" => Self::Get,
            "HEAD" => Self::Head,
            "OPTIONS" => Self::Options,
            "PUT" => Self::Put,
            "POST" | "DELETE" | "PATCH" | "TRACE" | "CONNECT" => Self::Other,
            _ => Self::Unknown,
        }
    }
}

/// The fields that determine where the request ends and whether the connection persists.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is the presence of an option in a field")]
struct Framing {
    hosts: u32,
    length: Option<u64>,
    transfer_codings: u32,
    is_chunked: bool,
    closes: bool,
    keeps_alive: bool,
    expects_continue: bool,
}

impl Framing {
    fn record(&mut self, name: &str, value: &[u8]) -> Result<(), Status> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        match name.len() {
            4 if is("host") => {
                self.hosts += 1;
                if !is_host(value) {
                    return Err(Status::BAD_REQUEST);
                }
            }
            6 if is("expect") => {
                self.expects_continue = value.eq_ignore_ascii_case(b"100-continue");
                if !self.expects_continue {
                    return Err(Status::EXPECTATION_FAILED);
                }
            }
            10 if is("connection") => {
                for option in value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
                    self.closes |= option.eq_ignore_ascii_case(b"close");
                    self.keeps_alive |= option.eq_ignore_ascii_case(b"keep-alive");
                }
            }
            14 if is("content-length") => {
                // A repeated length and a list of lengths are refused. RFC 9112 section 6.3 allows
                // to accept them if all are equal, but no client needs that.
                let length = parse_digits(value).ok_or(Status::BAD_REQUEST)?;
                if self.length.replace(length).is_some() {
                    return Err(Status::BAD_REQUEST);
                }
            }
            17 if is("transfer-encoding") => {
                self.transfer_codings += 1;
                self.is_chunked = value.eq_ignore_ascii_case(b"chunked");
            }
            _ => {}
        }
        Ok(())
    }

    /// The length of the body by RFC 9112 section 6.3; an ambiguous one is refused. If two servers
    /// disagree about the end of a request, an attacker can smuggle another one.
    fn body(&self, minor_version: u8) -> Result<Option<BodyLength>, Status> {
        if self.transfer_codings == 0 {
            return Ok(self.length.map(BodyLength::Bytes));
        }
        if minor_version == 0 || self.length.is_some() {
            return Err(Status::BAD_REQUEST);
        }
        if self.transfer_codings > 1 || !self.is_chunked {
            return Err(Status::NOT_IMPLEMENTED);
        }
        Ok(Some(BodyLength::Chunked))
    }
}

/// Parses a number of decimal digits only; `None` for a sign, a space or an overflow.
pub(crate) fn parse_digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |sum, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        sum.checked_mul(10)?.checked_add(digit)
    })
}

impl<'b> Fields<'b> {
    fn record(&mut self, name: &str, value: &'b [u8]) {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        let slot = match name.len() {
            5 if is("range") => &mut self.range,
            6 if is("accept") => return self.accept.add(value),
            6 if is("origin") => &mut self.origin,
            7 if is("referer") => &mut self.referer,
            8 if is("if-match") => return self.if_match.add(value),
            8 if is("if-range") => &mut self.if_range,
            10 if is("user-agent") => &mut self.user_agent,
            13 if is("authorization") => &mut self.authorization,
            13 if is("content-range") => &mut self.content_range,
            13 if is("if-none-match") => return self.if_none_match.add(value),
            15 if is("accept-encoding") => return self.accept_encoding.add(value),
            16 if is("content-encoding") => &mut self.content_encoding,
            17 if is("if-modified-since") => &mut self.if_modified_since,
            19 if is("if-unmodified-since") => &mut self.if_unmodified_since,
            _ => return,
        };
        // The first line counts: these fields must not be repeated.
        slot.get_or_insert(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD_BYTES_MAX: usize = 4096;

    fn refused(text: &str) -> Option<u16> {
        match parse(text.as_bytes(), HEAD_BYTES_MAX) {
            Parsed::Refused(status) => Some(status.code),
            _ => None,
        }
    }

    fn whole(text: &str) -> Request<'_> {
        match parse(text.as_bytes(), HEAD_BYTES_MAX) {
            Parsed::Whole(request, length) => {
                assert_eq!(length, text.find("\r\n\r\n").unwrap() + 4);
                request
            }
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn a_head_with_an_ambiguous_end_is_refused() {
        let head = |fields: &str| format!("PUT /a HTTP/1.1\r\nHost: h\r\n{fields}\r\n\r\n");
        for (fields, status) in [
            ("Content-Length: 1\r\nContent-Length: 1", 400),
            ("Content-Length: 1, 1", 400),
            ("Content-Length: +1", 400),
            ("Content-Length: 0x1", 400),
            ("Content-Length: 99999999999999999999", 400),
            ("Content-Length:", 400),
            ("Content-Length: 1\r\nTransfer-Encoding: chunked", 400),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 501),
            ("Transfer-Encoding: gzip, chunked", 501),
            ("Transfer-Encoding: identity", 501),
            ("Transfer-Encoding : chunked", 400),
            ("Content-Length : 1", 400),
            ("X: a\r\n folded", 400),
            ("Host: other", 400),
            ("Content-Length: 1\r\nExpect: x", 417),
            ("X: a\0b", 400),
            ("Expect: something", 417),
        ] {
            assert_eq!(refused(&head(fields)), Some(status), "{fields:?}");
        }
        assert_eq!(
            refused("PUT / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"),
            Some(400),
            "HTTP/1.0 has no chunked coding"
        );
    }

    #[test]
    fn the_length_of_the_body_is_parsed() {
        let put = |fields: &str| format!("PUT /a HTTP/1.1\r\nhost: h\r\n{fields}\r\n\r\n");
        assert_eq!(whole(&put("content-LENGTH: 012")).body, Some(BodyLength::Bytes(12)));
        assert_eq!(whole(&put("Transfer-Encoding: Chunked")).body, Some(BodyLength::Chunked));
        assert!(!whole(&put("X: y")).has_body());
        assert!(whole(&put("Expect: 100-Continue\r\nContent-Length: 5")).expects_continue);
    }

    #[test]
    fn the_version_and_connection_options_decide_whether_a_connection_persists() {
        let persists = |version: &str, fields: &str| {
            whole(&format!("GET / HTTP/{version}\r\nHost: h\r\n{fields}\r\n\r\n")).keeps_alive
        };
        assert!(persists("1.1", "X: y"));
        assert!(!persists("1.1", "Connection: Close"));
        assert!(!persists("1.1", "Connection: keep-alive, close"));
        assert!(!persists("1.0", "X: y"));
        assert!(persists("1.0", "Connection: Keep-Alive"));
    }

    #[test]
    fn an_invalid_head_is_refused_with_its_status() {
        assert_eq!(refused("GET / HTTP/1.1\r\n\r\n"), Some(400), "no Host");
        assert_eq!(refused("GET / HTTP/2.0\r\n\r\n"), Some(505));
        assert_eq!(refused("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(505));
        assert_eq!(refused("GET / HTTX/1.1\r\n\r\n"), Some(400));
        assert_eq!(refused("GET /a b HTTP/1.1\r\nHost: h\r\n\r\n"), Some(400));
        assert_eq!(refused("GET /a  HTTP/1.1\r\nHost: h\r\n\r\n"), Some(400));
        assert_eq!(refused("GET / HTTP/1.2\r\n\r\n"), Some(400), "no Host");
        assert_eq!(refused("GET / HTTP/1.2\r\nHost: h\r\nX : y\r\n\r\n"), Some(400));
        assert_eq!(refused("G\x01T / HTTP/1.2\r\nHost: h\r\n\r\n"), Some(400));
        assert_eq!(refused("GET / HTTP/1.1\r\nHost: h:port\r\n\r\n"), Some(400));
        assert_eq!(refused("\u{16}\u{3}\u{1}"), Some(400), "TLS on a plain port");
        let long = format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "a".repeat(HEAD_BYTES_MAX));
        assert_eq!(refused(&long), Some(431));
        let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "a: b\r\n".repeat(FIELDS_MAX));
        assert_eq!(refused(&many), Some(431));
        assert!(matches!(parse(b"GET / HTTP/1.1\r\nHost: h\r\n", HEAD_BYTES_MAX), Parsed::Partial));
        assert_eq!(whole("BREW / HTTP/1.1\r\nHost: h\r\n\r\n").method, Method::Unknown);
        assert_eq!(whole("DELETE / HTTP/1.0\r\n\r\n").method, Method::Other);
    }

    #[test]
    fn a_list_field_may_have_many_lines() {
        let line = |number| format!("If-None-Match: \"{number}\"\r\n");
        let lines: String = (0..50).map(line).collect();
        let text = format!("GET / HTTP/1.1\r\nHost: h\r\n{lines}\r\n");
        let request = whole(&text);
        let tags: Vec<_> = request.fields.if_none_match.lines().collect();
        assert_eq!(tags.len(), 50);
        assert_eq!((tags[0], tags[49]), (&b"\"0\""[..], &b"\"49\""[..]));
    }

    #[test]
    fn a_later_minor_version_is_treated_as_the_latest_known_one() {
        for version in 2..=9 {
            let text =
                format!("\r\nPUT /a HTTP/1.{version}\r\nHost: h\r\nContent-Length: 3\r\n\r\n");
            let request = whole(&text);
            assert_eq!((request.minor_version, request.keeps_alive), (1, true));
            assert_eq!((request.target, request.body), ("/a", Some(BodyLength::Bytes(3))));
        }
        assert!(matches!(parse(b"GET / HTTP/1.2\r\nHost: h\r\n", HEAD_BYTES_MAX), Parsed::Partial));
    }

    proptest! {
        #[test]
        fn more_input_does_not_change_the_result_of_a_complete_head(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            cut in 0usize..300,
        ) {
            let early = parse(&bytes[..cut.min(bytes.len())], 256);
            let late = parse(&bytes, 256);
            // A complete head stays complete and a refusal stays one when more bytes arrive.
            match early {
                Parsed::Whole(_, length) => {
                    prop_assert!(matches!(late, Parsed::Whole(_, same) if same == length));
                }
                Parsed::Refused(_) => prop_assert!(matches!(late, Parsed::Refused(_))),
                Parsed::Partial => {}
            }
        }
    }
}
