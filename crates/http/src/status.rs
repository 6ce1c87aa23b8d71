//! The status codes of responses (RFC 9110 section 15), each with its reason phrase.

use std::fmt;

/// A status code with its reason phrase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status {
    /// The status code, three digits.
    pub code: u16,
    /// The reason phrase.
    pub phrase: &'static str,
}

macro_rules! statuses {
    ($($name:ident = $code:literal $phrase:literal;)*) => {
        impl Status {
            $(#[doc = $phrase] pub const $name: Self = Self { code: $code, phrase: $phrase };)*
        }
    };
}

statuses! {
    OK = 200 "OK";
    CREATED = 201 "Created";
    NO_CONTENT = 204 "No Content";
    PARTIAL_CONTENT = 206 "Partial Content";
    MOVED_PERMANENTLY = 301 "Moved Permanently";
    NOT_MODIFIED = 304 "Not Modified";
    BAD_REQUEST = 400 "Bad Request";
    TLS_REQUIRED = 400 "Bad Request (TLS is spoken here: use https)";
    UNAUTHORIZED = 401 "Unauthorized";
    FORBIDDEN = 403 "Forbidden";
    NOT_FOUND = 404 "Not Found";
    METHOD_NOT_ALLOWED = 405 "Method Not Allowed";
    REQUEST_TIMEOUT = 408 "Request Timeout";
    LENGTH_REQUIRED = 411 "Length Required";
    CONFLICT = 409 "Conflict";
    PRECONDITION_FAILED = 412 "Precondition Failed";
    CONTENT_TOO_LARGE = 413 "Content Too Large";
    URI_TOO_LONG = 414 "URI Too Long";
    UNSUPPORTED_MEDIA_TYPE = 415 "Unsupported Media Type";
    RANGE_NOT_SATISFIABLE = 416 "Range Not Satisfiable";
    EXPECTATION_FAILED = 417 "Expectation Failed";
    HEAD_TOO_LARGE = 431 "Request Header Fields Too Large";
    INTERNAL_ERROR = 500 "Internal Server Error";
    NOT_IMPLEMENTED = 501 "Not Implemented";
    UNAVAILABLE = 503 "Service Unavailable";
    INSUFFICIENT_STORAGE = 507 "Insufficient Storage";
    VERSION_NOT_SUPPORTED = 505 "HTTP Version Not Supported";
}

impl Status {
    /// Whether it reports an error of the client (4xx) or of the server (5xx).
    pub fn is_error(self) -> bool {
        self.code >= 400
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.code, self.phrase)
    }
}
