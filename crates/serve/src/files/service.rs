//! Looks up targets: index files, precompressed files, listings, the fallback.
//!
//! All event loops share one [`Service`]. Only the served directory changes, if another one gets
//! its name, and the time of the last log message.

use crate::config::{BasicAuth, Config, ContentRules};
use crate::error::Error;
use crate::files::listing::{ListingStore, PageRequest, RenderedListing};
use crate::files::object::Object;
use crate::files::opener::{Opened, Opener};
use crate::files::resource::{Representation, Resource};
use crate::files::served_root::ServedRoot;
use crate::pattern::PathPattern;
use haul_fs::Blocking;
use haul_fs::Root;
use haul_http::encoding::Coding;
use haul_http::status::Status;
use haul_http::target::{Target, TargetError, encode_path};
use httpdate::HttpDate;
use rustix::io::Errno;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, UNIX_EPOCH};
use tracing::warn;

/// The size in bytes up to which files are kept in memory and sent with their head in one call. Of
/// larger files the pages are sent; docs/measurements has the size at which that becomes cheaper.
pub const CONTENT_BYTES_MAX: u64 = 16 << 10;
/// The size of the largest error page, in bytes.
const ERROR_PAGE_BYTES_MAX: u64 = 1 << 20;

/// The result of looking up a target.
#[derive(Debug)]
pub enum LookupResult {
    /// A file.
    Resource(Arc<Resource>),
    /// A directory that was named without the slash at its end, so that relative links in it would
    /// not work. Holds the location to redirect to.
    Redirect(String),
    /// A directory that is to be listed ([`Service::list`]).
    Directory(Arc<File>),
    /// A directory listing.
    Listing(RenderedListing),
    /// No resource; the status of the response.
    Nothing(Status),
}

/// The served directory, and the configuration of its responses.
#[derive(Debug)]
pub struct Service {
    pub(crate) opener: Opener,
    pub(crate) content: ContentRules,
    cache_control: Vec<(PathPattern, String)>,
    /// The field lines of every response.
    pub(crate) common_fields: Vec<u8>,
    pub(crate) cors: Vec<String>,
    /// The value of `WWW-Authenticate` (RFC 7617).
    pub(crate) challenge: String,
    pub(crate) error_pages: Vec<ErrorPage>,
    /// The size of the largest upload, in bytes; `None` if uploads are not allowed.
    pub(crate) put_bytes_max: Option<u64>,
    listings: ListingStore,
    started: Instant,
    /// The second since `started`, counted from 1, in which an unreadable file was last logged.
    unreadable_at: AtomicU64,
    /// The same for a file that cannot be written.
    unwritable_at: AtomicU64,
}

/// The content of responses with one error status.
#[derive(Debug)]
pub struct ErrorPage {
    pub(crate) status: u16,
    pub(crate) content_type: Box<str>,
    pub(crate) content: Arc<[u8]>,
}

impl Service {
    /// Opens the served directory and reads the error pages.
    pub fn new(config: &Config) -> Result<Self, Error> {
        let root = ServedRoot::open(&config.root, config.content.symlinks)
            .map_err(|error| Error::Root { path: config.root.clone(), error })?
            .with_confined(config.confine);
        let mut cache_control = Vec::new();
        for (pattern, value) in &config.fields.cache_control {
            check_field("Cache-Control", value)?;
            let pattern = PathPattern::new(pattern)
                .map_err(|error| Error::Pattern { pattern: pattern.clone(), error })?;
            cache_control.push((pattern, value.clone()));
        }
        let mut common_fields = String::new();
        for (name, value) in &config.fields.headers {
            check_field(name, value)?;
            let _ = write!(common_fields, "{name}: {value}\r\n");
        }
        for origin in &config.fields.cors {
            check_field("Access-Control-Allow-Origin", origin)?;
        }
        let mut service = Self {
            opener: Opener::new(root, &config.content),
            content: config.content.clone(),
            cache_control,
            common_fields: common_fields.into_bytes(),
            cors: config.fields.cors.clone(),
            challenge: config.basic_auth.as_ref().map_or(Ok(String::new()), challenge)?,
            error_pages: Vec::new(),
            put_bytes_max: config.put_bytes_max,
            listings: ListingStore::default(),
            started: Instant::now(),
            unreadable_at: AtomicU64::new(0),
            unwritable_at: AtomicU64::new(0),
        };
        for (status, path) in &config.content.error_pages {
            service.error_pages.push(service.read_error_page(*status, path)?);
        }
        if service.put_bytes_max.is_some() && service.content.fallback.is_some() {
            return Err(Error::PutWithFallback);
        }
        if let Some(fallback) = &service.content.fallback {
            let found =
                service.find_file(fallback.trim_start_matches('/').as_bytes(), Blocking::Disk);
            let problem = match found {
                Ok(Some(_)) => None,
                Ok(None) => Some("it is no regular file".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem {
                return Err(Error::Fallback { path: fallback.clone(), problem });
            }
        }
        Ok(service)
    }

    /// Looks up a target.
    ///
    /// The only error is [`io::ErrorKind::WouldBlock`]: the lookup may not block and would wait for
    /// the disk.
    pub fn find(&self, target: &Target<'_>, blocking: Blocking) -> io::Result<LookupResult> {
        self.opener.root().follow(blocking)?;
        if target.is_hidden() && !self.content.hidden {
            return self.find_fallback_file(blocking);
        }
        match self.find_below(target, blocking) {
            Ok(LookupResult::Nothing(Status::NOT_FOUND)) => self.find_fallback_file(blocking),
            Ok(found) => Ok(found),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
            Err(error) => match status_of(&error) {
                Status::NOT_FOUND => self.find_fallback_file(blocking),
                status => {
                    self.log_unreadable(&target.path, status, &error);
                    Ok(LookupResult::Nothing(status))
                }
            },
        }
    }

    /// Logs a file that cannot be read, at most once a second: any client can request it.
    fn log_unreadable(&self, path: &[u8], status: Status, error: &io::Error) {
        if self.is_log_due(&self.unreadable_at) {
            let path = path.escape_ascii();
            warn!(%path, status = status.code, %error, "{path} cannot be served: {error}");
        }
    }

    /// Logs a file that cannot be written, at most once a second: any client that may upload can
    /// cause it.
    pub fn log_unwritable(&self, path: &[u8], status: Status, error: &io::Error) {
        if self.is_log_due(&self.unwritable_at) {
            let path = path.escape_ascii();
            warn!(%path, status = status.code, %error, "{path} cannot be put here: {error}");
        }
    }

    fn is_log_due(&self, logged_at: &AtomicU64) -> bool {
        let now = self.started.elapsed().as_secs() + 1;
        logged_at.swap(now, Relaxed) != now
    }

    /// The served directory.
    pub fn root(&self) -> Arc<Root> {
        self.opener.root().get()
    }

    /// The allowed methods, as the value of `Allow`.
    pub fn allowed(&self) -> &'static str {
        if self.put_bytes_max.is_some() { "GET, HEAD, OPTIONS, PUT" } else { "GET, HEAD, OPTIONS" }
    }

    /// The result for a target that is invalid.
    pub fn refuse(error: TargetError) -> LookupResult {
        LookupResult::Nothing(match error {
            TargetError::Malformed => Status::BAD_REQUEST,
            TargetError::InvalidPath => Status::NOT_FOUND,
        })
    }

    /// Lists a directory, which may wait for the disk. The listing is JSON if `prefers_json` is set
    /// and the query does not request another format. [`Status::UNAVAILABLE`] if the listings that
    /// clients have not received yet have all the memory that they may have.
    pub fn list(&self, directory: &File, target: &Target<'_>, prefers_json: bool) -> LookupResult {
        let page = PageRequest::parse(target, prefers_json);
        let hidden = self.content.hidden;
        match self.listings.render(&self.root(), directory, &target.path, page, hidden) {
            Ok(Some(listing)) => LookupResult::Listing(listing),
            Ok(None) => LookupResult::Nothing(Status::UNAVAILABLE),
            Err(error) => {
                let status = status_of(&error);
                self.log_unreadable(&target.path, status, &error);
                LookupResult::Nothing(status)
            }
        }
    }

    fn find_below(&self, target: &Target<'_>, blocking: Blocking) -> io::Result<LookupResult> {
        if !target.is_directory {
            return Ok(match self.opener.open(&target.path, CONTENT_BYTES_MAX, blocking)? {
                Opened::File(object) => LookupResult::Resource(Arc::new(self.resource(
                    &target.path,
                    object,
                    blocking,
                )?)),
                Opened::Directory(_) => LookupResult::Redirect(match target.query {
                    "" => format!("{}/", encode_path(&target.path)),
                    query => format!("{}/?{query}", encode_path(&target.path)),
                }),
                Opened::Other => LookupResult::Nothing(Status::NOT_FOUND),
            });
        }
        for name in &self.content.index {
            let path = join(&target.path, name.as_bytes());
            match self.find_file(&path, blocking) {
                Ok(Some(resource)) => return Ok(LookupResult::Resource(Arc::new(resource))),
                Ok(None) => {}
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        match self.opener.open(&target.path, 0, blocking)? {
            Opened::Directory(_) if !self.content.listing => {
                Ok(LookupResult::Nothing(Status::NOT_FOUND))
            }
            Opened::Directory(directory) => Ok(LookupResult::Directory(Arc::new(directory))),
            _ => Ok(LookupResult::Nothing(Status::NOT_FOUND)),
        }
    }

    fn find_fallback_file(&self, blocking: Blocking) -> io::Result<LookupResult> {
        let Some(path) = &self.content.fallback else {
            return Ok(LookupResult::Nothing(Status::NOT_FOUND));
        };
        let path = path.trim_start_matches('/').as_bytes();
        match self.find_file(path, blocking) {
            Ok(Some(resource)) => {
                Ok(LookupResult::Resource(Arc::new(Resource { is_fallback: true, ..resource })))
            }
            Ok(None) => Ok(LookupResult::Nothing(Status::NOT_FOUND)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
            Err(error) => Ok(LookupResult::Nothing(status_of(&error))),
        }
    }

    fn find_file(&self, path: &[u8], blocking: Blocking) -> io::Result<Option<Resource>> {
        match self.opener.open(path, CONTENT_BYTES_MAX, blocking)? {
            Opened::File(object) => self.resource(path, object, blocking).map(Some),
            _ => Ok(None),
        }
    }

    fn resource(&self, path: &[u8], identity: Object, blocking: Blocking) -> io::Result<Resource> {
        let content_type = content_type(path);
        let mut encoded = Vec::new();
        if self.content.precompressed {
            for coding in Coding::ALL {
                let path = [path, coding.extension().as_bytes()].concat();
                match self.opener.open(&path, CONTENT_BYTES_MAX, blocking) {
                    // A precompressed file that is older has the content of an earlier version.
                    Ok(Opened::File(object)) if object.is_as_new_as(&identity) => {
                        encoded.push((coding, object));
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
                    Ok(_) | Err(_) => {}
                }
            }
        }
        let represent = |mut object: Object, coding: Option<Coding>| {
            if let Some(coding) = coding {
                // Tags of copies name the time and the size, which two codings may share.
                object.add_to_tag(coding.extension());
            }
            let fields = self.fields(path, &object, coding).into_bytes().into();
            Arc::new(Representation { object, content_type: content_type.clone(), fields })
        };
        Ok(Resource {
            identity: represent(identity, None),
            is_fallback: false,
            encoded: encoded
                .into_iter()
                .map(|(coding, object)| (coding, represent(object, Some(coding))))
                .collect(),
        })
    }

    fn fields(&self, path: &[u8], object: &Object, coding: Option<Coding>) -> String {
        let mut fields = String::from("Accept-Ranges: bytes\r\n");
        let validators = object.validators();
        if let Some(seconds) = validators.modified {
            let _ = write!(
                fields,
                "Last-Modified: {}\r\n",
                HttpDate::from(UNIX_EPOCH + Duration::from_secs(seconds))
            );
        }
        if let Some(etag) = &validators.etag {
            let _ = write!(fields, "ETag: {etag}\r\n");
        }
        if let Some(coding) = coding {
            let _ = write!(fields, "Content-Encoding: {}\r\n", coding.name());
        }
        if self.content.precompressed {
            fields.push_str("Vary: Accept-Encoding\r\n");
        }
        let path = String::from_utf8_lossy(path);
        if let Some((_, value)) = self.cache_control.iter().find(|(glob, _)| glob.matches(&path)) {
            let _ = write!(fields, "Cache-Control: {value}\r\n");
        }
        fields
    }

    fn read_error_page(&self, status: u16, path: &str) -> Result<ErrorPage, Error> {
        let wrong = |problem: String| Error::ErrorPage { status, path: path.into(), problem };
        if !(400..=599).contains(&status) {
            return Err(wrong("only statuses from 400 to 599 have error pages".into()));
        }
        let below = path.trim_start_matches('/').as_bytes();
        match self.opener.open(below, ERROR_PAGE_BYTES_MAX, Blocking::Disk) {
            Ok(Opened::File(object)) => match object.content() {
                Some(content) => Ok(ErrorPage {
                    status,
                    content_type: content_type(below),
                    content: content.into(),
                }),
                None => Err(wrong("it is larger than 1 MiB".into())),
            },
            Ok(_) => Err(wrong("it is no regular file".into())),
            Err(error) => Err(wrong(error.to_string())),
        }
    }
}

/// The value of `WWW-Authenticate` with the configured realm (RFC 7617).
fn challenge(auth: &BasicAuth) -> Result<String, Error> {
    let realm = &auth.realm;
    if realm.chars().any(|character| matches!(character, '"' | '\\') || character.is_control()) {
        return Err(Error::Field(format!(
            "WWW-Authenticate: the realm {realm:?} has quotes or control characters"
        )));
    }
    Ok(format!("Basic realm=\"{realm}\", charset=\"UTF-8\""))
}

/// Checks a configured field before it becomes part of every response.
fn check_field(name: &str, value: &str) -> Result<(), Error> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err(Error::Field(format!("{name:?} is not a valid field name")));
    }
    let reserved = [
        "accept-ranges",
        "allow",
        "connection",
        "content-encoding",
        "content-length",
        "content-range",
        "content-type",
        "date",
        "etag",
        "keep-alive",
        "last-modified",
        "location",
        "server",
        "transfer-encoding",
        "vary",
        "www-authenticate",
    ];
    if reserved.iter().any(|other| name.eq_ignore_ascii_case(other)) {
        return Err(Error::Field(format!("{name} is set by the server itself")));
    }
    if value.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
        return Err(Error::Field(format!("{name} has a control character in its value")));
    }
    Ok(())
}

/// The media type by the name's extension. Text is assumed to be UTF-8.
fn content_type(path: &[u8]) -> Box<str> {
    let name = String::from_utf8_lossy(path);
    // mime_guess returns a rare type of video for this extension.
    if name.ends_with(".ts") {
        return "video/mp2t".into();
    }
    let guess =
        mime_guess::from_path(Path::new(&*name)).first_raw().unwrap_or("application/octet-stream");
    let is_text = guess.starts_with("text/")
        || matches!(guess, "application/javascript" | "application/json");
    if is_text { format!("{guess}; charset=utf-8").into() } else { guess.into() }
}

/// The status for a file that cannot be opened.
pub(crate) fn status_of(error: &io::Error) -> Status {
    match Errno::from_io_error(error) {
        Some(Errno::ACCESS | Errno::PERM) => Status::FORBIDDEN,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Status::UNAVAILABLE,
        Some(
            Errno::NOENT
            | Errno::NOTDIR
            | Errno::LOOP
            | Errno::XDEV
            | Errno::NAMETOOLONG
            | Errno::INVAL
            | Errno::NXIO
            | Errno::NODEV,
        ) => Status::NOT_FOUND,
        _ => Status::INTERNAL_ERROR,
    }
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}
