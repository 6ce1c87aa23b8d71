//! Builds the responses of a file server (RFC 9110) from a request and the lookup of its target.
//!
//! It does no I/O: it writes a head and describes the body that follows.

use crate::clock::ResponseClock;
use crate::files::listing::{RenderedListing, escape};
use crate::files::resource::Representation;
use crate::files::service::{LookupResult, Service};
use crate::response::body::{Body, Piece};
use crate::response::head::Head;
use haul_http::conditional::{self, Outcome};
use haul_http::range::{self, SelectedRanges};
use haul_http::request::{BodyLength, Method, Request};
use haul_http::status::Status;
use haul_http::target::Target;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::Arc;

/// The fields that scripts of other origins may read. The Fetch standard lets scripts read a few
/// other fields anyway. PDF.js reads `Accept-Ranges` before it asks for a part.
const EXPOSED_FIELDS: &str =
    "Accept-Ranges, Content-Encoding, Content-Length, Content-Range, Date, ETag, Link, Location";

/// The request fields that scripts of other origins may send: all that the server evaluates.
const HEADERS_ALLOWED: &str = "Authorization, Content-Type, If-Match, If-Modified-Since, \
    If-None-Match, If-Range, If-Unmodified-Since, Range";

/// A response without its head, which is in the builder's buffer.
#[derive(Debug)]
pub struct Response {
    /// The status.
    pub status: Status,
    /// The body.
    pub body: Body,
    /// Whether the connection persists after the response.
    pub keeps_alive: bool,
}

/// Builds the responses of a service.
#[derive(Debug)]
pub struct ResponseBuilder<'a> {
    /// The served directory and the configuration of its responses.
    pub service: &'a Service,
    /// The event loop's clock.
    pub clock: &'a ResponseClock,
    /// The buffer for the response head.
    pub head: &'a mut Vec<u8>,
    /// Whether the response depends on the field `Accept` of the request.
    pub varies_by_accept: bool,
}

impl<'s> ResponseBuilder<'s> {
    /// The response to a request that needs no lookup: one that is refused by its method or its
    /// body, or `OPTIONS`. `None` if the target has to be looked up.
    pub fn without_file(&mut self, request: &Request<'_>) -> Option<Response> {
        match request.method {
            Method::Unknown => Some(self.refuse(request, Status::NOT_IMPLEMENTED)),
            Method::Put if self.service.put_bytes_max.is_some() => None,
            Method::Other | Method::Put => Some(self.refuse(request, Status::METHOD_NOT_ALLOWED)),
            // A proxy that expects no body would take it for the next request. No client needs one.
            _ if request.has_body() => Some(self.refuse(request, Status::BAD_REQUEST)),
            Method::Options if request.target != "*" && Target::parse(request.target).is_err() => {
                Some(self.refuse(request, Status::BAD_REQUEST))
            }
            Method::Options => Some(self.options(request)),
            Method::Get | Method::Head => None,
        }
    }

    /// The response to `GET` or `HEAD`, by the result of the lookup.
    pub fn with_found(&mut self, request: &Request<'_>, found: &LookupResult) -> Response {
        match found {
            // A script or an image that does not exist must not be answered by a page: a browser
            // would report an error in the script, and a cache would keep the page under the
            // script's name.
            LookupResult::Resource(resource) if resource.is_fallback && names_asset(request) => {
                self.varies_by_accept = true;
                if request.asks_for_page() {
                    self.file(request, resource.choose(&request.fields.accept_encoding))
                } else {
                    self.refuse(request, Status::NOT_FOUND)
                }
            }
            LookupResult::Resource(resource) => {
                self.file(request, resource.choose(&request.fields.accept_encoding))
            }
            LookupResult::Listing(listing) => self.listing(request, listing),
            LookupResult::Redirect(location) => self.redirect(request, location),
            LookupResult::Nothing(status) => self.refuse(request, *status),
            // It is listed before.
            LookupResult::Directory(_) => self.refuse(request, Status::INTERNAL_ERROR),
        }
    }

    /// The response to bytes that are not a request. The connection closes after it.
    pub fn refuse_malformed(&mut self, status: Status) -> Response {
        self.page(
            status,
            RequestContext { is_head: false, keeps_alive: false, minor_version: 1, origin: None },
        )
    }

    /// The refusal of an upload; `None` if its body is to be received. `found` is the result of the
    /// target's lookup.
    pub fn refuse_upload(
        &mut self,
        request: &Request<'_>,
        found: &LookupResult,
    ) -> Option<Response> {
        let target = Target::parse(request.target).ok();
        let current = match found {
            LookupResult::Resource(resource) => Some(resource.identity.object.validators()),
            _ => None,
        };
        let bytes_max = self.service.put_bytes_max.unwrap_or(0);
        let status = match (target, request.body) {
            (None, _) => Status::BAD_REQUEST,
            (Some(target), _) if target.is_directory => Status::CONFLICT,
            (Some(target), _) if target.is_hidden() && !self.service.content.hidden => {
                Status::NOT_FOUND
            }
            (_, None) => Status::LENGTH_REQUIRED,
            // A partial `PUT` is not supported (RFC 9110 section 14.5).
            _ if request.fields.content_range.is_some() => Status::BAD_REQUEST,
            // The coding would be lost: the file is sent without it later.
            _ if request.fields.content_encoding.is_some_and(is_coded) => {
                Status::UNSUPPORTED_MEDIA_TYPE
            }
            (_, Some(BodyLength::Bytes(len))) if len > bytes_max => Status::CONTENT_TOO_LARGE,
            _ if conditional::evaluate(request.method, &request.fields, current)
                == Outcome::Failed =>
            {
                Status::PRECONDITION_FAILED
            }
            _ => return None,
        };
        Some(self.refuse(request, status))
    }

    /// The response to an upload that has ended.
    pub fn uploaded(&mut self, status: Status, minor_version: u8, keeps_alive: bool) -> Response {
        let context = RequestContext { is_head: false, keeps_alive, minor_version, origin: None };
        if status.is_error() {
            return self.page(status, context);
        }
        let mut head = self.begin(status, context);
        if status != Status::NO_CONTENT {
            head.content_length(0);
        }
        head.end(keeps_alive, minor_version);
        Response { status, body: Body::empty(), keeps_alive }
    }

    /// The response that refuses a request. If the request has a body, the connection closes after
    /// it.
    pub fn refuse(&mut self, request: &Request<'_>, status: Status) -> Response {
        let mut context = RequestContext::of(request);
        // The body was not read and would be taken for the next request.
        context.keeps_alive &= !request.has_body();
        self.page(status, context)
    }

    /// The media type and the content of an error page: the configured one, or else this text.
    fn error_page(&self, status: Status, text: impl FnOnce() -> String) -> (&'s str, Arc<[u8]>) {
        match self.service.error_pages.iter().find(|page| page.status == status.code) {
            Some(page) => (&page.content_type, Arc::clone(&page.content)),
            None => ("text/plain; charset=utf-8", text().into_bytes().into()),
        }
    }

    /// A response with the error page of a status.
    fn page(&mut self, status: Status, context: RequestContext<'_>) -> Response {
        let (content_type, content) = self.error_page(status, || format!("{status}\n"));
        let (allowed, challenge) = (self.service.allowed(), &self.service.challenge);
        let mut head = self.begin(status, context);
        match status {
            Status::METHOD_NOT_ALLOWED => drop(head.field("Allow", allowed)),
            Status::UNAUTHORIZED => drop(head.field("WWW-Authenticate", challenge)),
            Status::UNAVAILABLE => drop(head.field("Retry-After", "1")),
            _ => {}
        }
        head.field("Content-Type", content_type).content_length(content.len() as u64);
        head.end(context.keeps_alive, context.minor_version);
        let body = if context.is_head { Body::empty() } else { Body::bytes(content) };
        Response { status, body, keeps_alive: context.keeps_alive }
    }

    fn options(&mut self, request: &Request<'_>) -> Response {
        let context = RequestContext::of(request);
        let allowed = self.service.allowed();
        let mut head = self.begin(Status::NO_CONTENT, context);
        head.field("Allow", allowed);
        if request.fields.origin.is_some() {
            head.field("Access-Control-Allow-Methods", allowed)
                .field("Access-Control-Allow-Headers", HEADERS_ALLOWED)
                .field("Access-Control-Max-Age", "86400");
        }
        head.end(context.keeps_alive, context.minor_version);
        Response {
            status: Status::NO_CONTENT,
            body: Body::empty(),
            keeps_alive: context.keeps_alive,
        }
    }

    fn redirect(&mut self, request: &Request<'_>, location: &str) -> Response {
        let context = RequestContext::of(request);
        let status = Status::MOVED_PERMANENTLY;
        let page = format!("<a href=\"{0}\">{0}</a>\n", escape(location)).into_bytes();
        let mut head = self.begin(status, context);
        head.field("Location", location).field("Content-Type", "text/html; charset=utf-8");
        self.finish(status, context, page.into())
    }

    fn listing(&mut self, request: &Request<'_>, listing: &RenderedListing) -> Response {
        let context = RequestContext::of(request);
        let content_type =
            if listing.is_json { "application/json" } else { "text/html; charset=utf-8" };
        let mut head = self.begin(Status::OK, context);
        head.field("Content-Type", content_type)
            .field("Vary", "Accept")
            .field("Cache-Control", "no-cache");
        if let Some(next) = &listing.next_query {
            // RFC 8288.
            head.field("Link", format!("<?{next}>; rel=\"next\""));
        }
        if !listing.is_json {
            head.field("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'");
        }
        let body = Body::listing(&listing.content);
        head.content_length(body.len()).end(context.keeps_alive, context.minor_version);
        let body = if context.is_head { Body::empty() } else { body };
        Response { status: Status::OK, body, keeps_alive: context.keeps_alive }
    }

    /// Ends a head that was begun, for a body in memory.
    fn finish(
        &mut self,
        status: Status,
        context: RequestContext<'_>,
        content: Arc<[u8]>,
    ) -> Response {
        let mut head = Head::resume(self.head);
        head.content_length(content.len() as u64).end(context.keeps_alive, context.minor_version);
        let body = if context.is_head { Body::empty() } else { Body::bytes(content) };
        Response { status, body, keeps_alive: context.keeps_alive }
    }

    fn file(&mut self, request: &Request<'_>, selected: &Arc<Representation>) -> Response {
        let context = RequestContext::of(request);
        let fields = &request.fields;
        match conditional::evaluate(request.method, fields, Some(selected.object.validators())) {
            Outcome::Failed => return self.refuse(request, Status::PRECONDITION_FAILED),
            Outcome::NotModified => {
                let mut head = self.begin(Status::NOT_MODIFIED, context);
                head.lines(&selected.fields).end(context.keeps_alive, context.minor_version);
                return Response {
                    status: Status::NOT_MODIFIED,
                    body: Body::empty(),
                    keeps_alive: context.keeps_alive,
                };
            }
            Outcome::Proceed => {}
        }
        let len = selected.object.len();
        // RFC 9110 section 14.2: `Range` is defined only for `GET`.
        let wanted = fields
            .range
            .filter(|_| request.method == Method::Get)
            .filter(|_| {
                conditional::range_applies(fields, selected.object.validators(), self.clock.now())
            })
            .map_or(SelectedRanges::Everything, |field| range::parse(field, len));
        match wanted {
            SelectedRanges::Everything => self.whole_file(context, selected),
            SelectedRanges::One(range) => self.single_range(context, selected, range),
            SelectedRanges::Many(ranges) => self.multiple_ranges(context, selected, &ranges),
            SelectedRanges::Unsatisfiable => {
                let status = Status::RANGE_NOT_SATISFIABLE;
                let (content_type, content) =
                    self.error_page(status, || format!("{status}: there are {len} bytes\n"));
                let mut head = self.begin(status, context);
                head.field("Content-Range", format!("bytes */{len}"))
                    .field("Content-Type", content_type);
                self.finish(status, context, content)
            }
        }
    }

    fn whole_file(
        &mut self,
        context: RequestContext<'_>,
        selected: &Arc<Representation>,
    ) -> Response {
        let len = selected.object.len();
        let mut head = self.begin(Status::OK, context);
        head.lines(&selected.fields)
            .field("Content-Type", &*selected.content_type)
            .content_length(len);
        head.end(context.keeps_alive, context.minor_version);
        let body = if context.is_head { Body::empty() } else { Body::file(selected, 0..len) };
        Response { status: Status::OK, body, keeps_alive: context.keeps_alive }
    }

    fn single_range(
        &mut self,
        context: RequestContext<'_>,
        selected: &Arc<Representation>,
        range: Range<u64>,
    ) -> Response {
        let status = Status::PARTIAL_CONTENT;
        let mut head = self.begin(status, context);
        head.lines(&selected.fields)
            .field("Content-Type", &*selected.content_type)
            .content_range(&range, selected.object.len())
            .content_length(range.end - range.start)
            .end(context.keeps_alive, context.minor_version);
        Response { status, body: Body::file(selected, range), keeps_alive: context.keeps_alive }
    }

    /// A `multipart/byteranges` response (RFC 9110 section 14.6).
    fn multiple_ranges(
        &mut self,
        context: RequestContext<'_>,
        selected: &Arc<Representation>,
        ranges: &[Range<u64>],
    ) -> Response {
        let len = selected.object.len();
        let boundary = format!("haul{:016x}", RandomState::new().hash_one(len));
        let mut pieces = Vec::with_capacity(2 * ranges.len() + 1);
        let mut part = Vec::new();
        for range in ranges {
            let mut head = Head::resume(&mut part);
            head.lines(b"\r\n--").lines(boundary.as_bytes()).lines(b"\r\n");
            head.field("Content-Type", &*selected.content_type)
                .content_range(range, len)
                .lines(b"\r\n");
            pieces.push(Piece::of_bytes(std::mem::take(&mut part)));
            pieces.push(Piece::of_file(selected, range.clone()));
        }
        pieces.push(Piece::of_bytes(format!("\r\n--{boundary}--\r\n").into_bytes()));
        let body = Body::pieces(pieces);
        let status = Status::PARTIAL_CONTENT;
        let mut head = self.begin(status, context);
        head.lines(&selected.fields)
            .field("Content-Type", format!("multipart/byteranges; boundary={boundary}"))
            .content_length(body.len())
            .end(context.keeps_alive, context.minor_version);
        Response { status, body, keeps_alive: context.keeps_alive }
    }

    /// Begins a head with the fields that all responses share.
    fn begin(&mut self, status: Status, context: RequestContext<'_>) -> Head<'_> {
        let mut head = Head::new(self.head, status, self.clock);
        head.lines(&self.service.common_fields);
        if self.varies_by_accept {
            head.field("Vary", "Accept");
        }
        let allowed = &self.service.cors;
        if allowed.iter().any(|origin| origin == "*") {
            head.field("Access-Control-Allow-Origin", "*");
        } else if !allowed.is_empty() {
            head.field("Vary", "Origin");
            if let Some(origin) = context
                .origin
                .filter(|origin| allowed.iter().any(|other| other.as_bytes() == *origin))
            {
                head.field("Access-Control-Allow-Origin", origin);
            }
        }
        if !allowed.is_empty() {
            head.field("Access-Control-Expose-Headers", EXPOSED_FIELDS);
        }
        head
    }
}

/// Whether a request names a file with an extension, such as a script.
fn names_asset(request: &Request<'_>) -> bool {
    Target::parse(request.target).is_ok_and(|target| target.has_extension())
}

/// The properties of a request that every response needs.
#[derive(Debug, Clone, Copy)]
struct RequestContext<'b> {
    is_head: bool,
    keeps_alive: bool,
    minor_version: u8,
    origin: Option<&'b [u8]>,
}

impl<'b> RequestContext<'b> {
    fn of(request: &Request<'b>) -> Self {
        Self {
            is_head: request.method == Method::Head,
            keeps_alive: request.keeps_alive,
            minor_version: request.minor_version,
            origin: request.fields.origin,
        }
    }
}
/// Whether a `Content-Encoding` names a coding that changes the bytes.
fn is_coded(content_encoding: &[u8]) -> bool {
    !content_encoding.trim_ascii().eq_ignore_ascii_case(b"identity")
}
