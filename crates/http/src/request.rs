//! The head of a request: what was asked, and how long its body is.
//!
//! The syntax is httparse's. What this adds is what a server must not get wrong: where the request ends, so that
//! nothing of one request is ever taken for another (RFC 9112 section 11.2), and which fields may be there once only.
//! It reads no body and knows no files.

use crate::status::Status;
use std::mem::MaybeUninit;

/// Fields that a head may have. Browsers send about fifteen, proxies add some.
pub const FIELDS_MAX: usize = 100;

/// What is to be done with the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Send it.
    Get,
    /// Send what would be said of it.
    Head,
    /// Say what may be asked.
    Options,
    /// Take the body as its new content.
    Put,
    /// One that is known and never allowed here (RFC 9110 section 9.3, RFC 5789).
    Other,
    /// One that nobody knows.
    Unknown,
}

/// How the end of a request's body is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyLength {
    /// So many bytes.
    Bytes(u64),
    /// It says so itself, chunk by chunk.
    Chunked,
}

/// A request's head, borrowed from the bytes it was read from.
#[derive(Debug, Clone)]
pub struct Request<'b> {
    /// What is to be done.
    pub method: Method,
    /// The method's name as it came.
    pub method_name: &'b str,
    /// The target as it came.
    pub target: &'b str,
    /// 0 for HTTP/1.0, 1 for HTTP/1.1.
    pub minor_version: u8,
    /// Whether the connection goes on after the response.
    pub keeps_alive: bool,
    /// The body that follows; `None` where the head does not speak of one.
    pub body: Option<BodyLength>,
    /// Whether the client waits to be told to go on before it sends its body.
    pub expects_continue: bool,
    /// The fields that matter to a file service.
    pub fields: Fields<'b>,
}

/// The fields that matter to a file service, as they came. A field that is a list may stand there several times, and
/// then its value here has all of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fields<'b> {
    /// RFC 9110 section 12.5.1.
    pub accept: Option<&'b [u8]>,
    /// RFC 9110 section 12.5.3.
    pub accept_encoding: ListField<'b>,
    /// RFC 9110 section 11.6.2.
    pub authorization: Option<&'b [u8]>,
    /// RFC 9110 section 14.4.
    pub content_range: Option<&'b [u8]>,
    /// RFC 9110 section 13.1.1.
    pub if_match: ListField<'b>,
    /// RFC 9110 section 13.1.3.
    pub if_modified_since: Option<&'b [u8]>,
    /// RFC 9110 section 13.1.2.
    pub if_none_match: ListField<'b>,
    /// RFC 9110 section 13.1.5.
    pub if_range: Option<&'b [u8]>,
    /// RFC 9110 section 13.1.4.
    pub if_unmodified_since: Option<&'b [u8]>,
    /// RFC 6454 section 7.
    pub origin: Option<&'b [u8]>,
    /// RFC 9110 section 14.2.
    pub range: Option<&'b [u8]>,
    /// RFC 9110 section 10.1.3.
    pub referer: Option<&'b [u8]>,
    /// RFC 9110 section 10.1.5.
    pub user_agent: Option<&'b [u8]>,
}

/// A field whose value is a list, in as many lines as the client liked (RFC 9110 section 5.3), up to four.
#[derive(Debug, Clone, Copy, Default)]
pub struct ListField<'b> {
    lines: [Option<&'b [u8]>; 4],
}

impl<'b> ListField<'b> {
    /// A field with one line.
    #[cfg(test)]
    pub fn of(line: &'b [u8]) -> Self {
        Self { lines: [Some(line), None, None, None] }
    }

    /// Whether the field is there at all.
    pub fn is_present(&self) -> bool {
        self.lines[0].is_some()
    }

    /// Whether it is `*`, which stands for anything.
    pub fn is_any(&self) -> bool {
        self.lines().any(|line| line.trim_ascii() == b"*")
    }

    /// Its lines.
    pub fn lines(&self) -> impl Iterator<Item = &'b [u8]> + '_ {
        self.lines.iter().flatten().copied()
    }

    fn add(&mut self, line: &'b [u8]) -> Result<(), Status> {
        let free = self.lines.iter_mut().find(|line| line.is_none()).ok_or(Status::BAD_REQUEST)?;
        *free = Some(line);
        Ok(())
    }
}

/// What the beginning of a stream is.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack, and a box would be made for each request"
)]
pub enum Parsed<'b> {
    /// Not all of a head yet.
    Partial,
    /// A head, and how many bytes it takes.
    Whole(Request<'b>, usize),
    /// No head that could be answered otherwise than with this; where the next request begins is not known.
    Refused(Status),
}

/// Reads the head at the beginning of `bytes`, which may take `head_bytes_max`.
pub fn parse(bytes: &[u8], head_bytes_max: usize) -> Parsed<'_> {
    let mut lines = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut head = httparse::Request::new(&mut []);
    let parsed =
        head.parse_with_uninit_headers(&bytes[..bytes.len().min(head_bytes_max)], &mut lines);
    match parsed {
        Ok(httparse::Status::Complete(head_bytes)) => match Request::of(&head) {
            Ok(request) => Parsed::Whole(request, head_bytes),
            Err(status) => Parsed::Refused(status),
        },
        Ok(httparse::Status::Partial) if bytes.len() >= head_bytes_max => {
            Parsed::Refused(Status::HEAD_TOO_LARGE)
        }
        Ok(httparse::Status::Partial) => Parsed::Partial,
        Err(httparse::Error::TooManyHeaders) => Parsed::Refused(Status::HEAD_TOO_LARGE),
        Err(httparse::Error::Version) => Parsed::Refused(version_status(bytes)),
        Err(_) => Parsed::Refused(Status::BAD_REQUEST),
    }
}

/// Whether another version was asked for, or something that is no version at all.
fn version_status(bytes: &[u8]) -> Status {
    let line = bytes
        .split(|&byte| byte == b'\n')
        .find(|line| !line.trim_ascii().is_empty())
        .unwrap_or(&[]);
    let version = line.trim_ascii_end().rsplit(|&byte| byte == b' ').next().unwrap_or(&[]);
    match version {
        [b'H', b'T', b'T', b'P', b'/', major, b'.', minor]
            if major.is_ascii_digit() && minor.is_ascii_digit() =>
        {
            Status::VERSION_NOT_SUPPORTED
        }
        _ => Status::BAD_REQUEST,
    }
}

impl<'b> Request<'b> {
    fn of(head: &httparse::Request<'_, 'b>) -> Result<Self, Status> {
        let (Some(method_name), Some(target), Some(minor_version)) =
            (head.method, head.path, head.version)
        else {
            return Err(Status::BAD_REQUEST);
        };
        let mut fields = Fields::default();
        let mut framing = Framing::default();
        for line in head.headers.iter() {
            framing.note(line.name, line.value)?;
            fields.note(line.name, line.value)?;
        }
        // RFC 9112 section 3.2: exactly one Host, even where it is empty.
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

    /// Whether the client would rather have JSON than a page.
    pub fn accepts_json(&self) -> bool {
        self.fields.accept.is_some_and(|accept| accept.starts_with(b"application/json"))
    }

    /// Whether a body follows.
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

/// What decides where the request ends and whether another may follow.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a word of a field that is there or not")]
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
    fn note(&mut self, name: &str, value: &[u8]) -> Result<(), Status> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        match name.len() {
            4 if is("host") => {
                self.hosts += 1;
                // RFC 9112 section 3.2: a host and perhaps a port, or nothing.
                let is_of_host = |byte: &u8| {
                    byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(byte)
                };
                if !value.iter().all(is_of_host) {
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
                // Twice, or a list: RFC 9112 section 6.3 allows equal ones to be taken for one; nobody needs that.
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

    /// RFC 9112 section 6.3, with every doubt refused: a message that two servers could cut in two ways is how
    /// requests are smuggled.
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

/// Decimal digits and nothing else: no sign, no space, no overflow.
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
    fn note(&mut self, name: &str, value: &'b [u8]) -> Result<(), Status> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        let once = match name.len() {
            5 if is("range") => &mut self.range,
            6 if is("accept") => &mut self.accept,
            6 if is("origin") => &mut self.origin,
            7 if is("referer") => &mut self.referer,
            8 if is("if-match") => return self.if_match.add(value),
            8 if is("if-range") => &mut self.if_range,
            10 if is("user-agent") => &mut self.user_agent,
            13 if is("authorization") => &mut self.authorization,
            13 if is("content-range") => &mut self.content_range,
            13 if is("if-none-match") => return self.if_none_match.add(value),
            15 if is("accept-encoding") => {
                // A wish too many is none.
                let _ = self.accept_encoding.add(value);
                return Ok(());
            }
            17 if is("if-modified-since") => &mut self.if_modified_since,
            19 if is("if-unmodified-since") => &mut self.if_unmodified_since,
            _ => return Ok(()),
        };
        // A second one is nonsense (RFC 9110 section 5.3); Accept may be a list, of which the first line is enough here.
        once.get_or_insert(value);
        Ok(())
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
    fn a_head_that_could_be_cut_in_two_ways_is_refused() {
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
            "HTTP/1.0 knows no chunks"
        );
    }

    #[test]
    fn lengths_and_codings_are_read() {
        let put = |fields: &str| format!("PUT /a HTTP/1.1\r\nhost: h\r\n{fields}\r\n\r\n");
        assert_eq!(whole(&put("content-LENGTH: 012")).body, Some(BodyLength::Bytes(12)));
        assert_eq!(whole(&put("Transfer-Encoding: Chunked")).body, Some(BodyLength::Chunked));
        assert!(!whole(&put("X: y")).has_body());
        assert!(whole(&put("Expect: 100-Continue\r\nContent-Length: 5")).expects_continue);
    }

    #[test]
    fn connections_stay_open_as_the_version_says() {
        let keeps = |version: &str, fields: &str| {
            whole(&format!("GET / HTTP/{version}\r\nHost: h\r\n{fields}\r\n\r\n")).keeps_alive
        };
        assert!(keeps("1.1", "X: y"));
        assert!(!keeps("1.1", "Connection: Close"));
        assert!(!keeps("1.1", "Connection: keep-alive, close"));
        assert!(!keeps("1.0", "X: y"));
        assert!(keeps("1.0", "Connection: Keep-Alive"));
    }

    #[test]
    fn what_is_no_request_gets_the_status_that_says_so() {
        assert_eq!(refused("GET / HTTP/1.1\r\n\r\n"), Some(400), "no Host");
        assert_eq!(refused("GET / HTTP/2.0\r\n\r\n"), Some(505));
        assert_eq!(refused("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(505));
        assert_eq!(refused("GET / HTTX/1.1\r\n\r\n"), Some(400));
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
    fn a_list_may_come_in_several_lines() {
        let text =
            "GET / HTTP/1.1\r\nHost: h\r\nIf-None-Match: \"a\"\r\nIf-None-Match: \"b\"\r\n\r\n";
        let lines: Vec<_> = whole(text).fields.if_none_match.lines().collect();
        assert_eq!(lines, [b"\"a\"", b"\"b\""]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_judged_the_same_however_they_arrive(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 0usize..300) {
            let early = parse(&bytes[..cut.min(bytes.len())], 256);
            let late = parse(&bytes, 256);
            // What was a whole head or a refusal with fewer bytes stays one with more.
            match early {
                Parsed::Whole(_, length) => prop_assert!(matches!(late, Parsed::Whole(_, same) if same == length)),
                Parsed::Refused(_) => prop_assert!(matches!(late, Parsed::Refused(_))),
                Parsed::Partial => {}
            }
        }
    }
}
