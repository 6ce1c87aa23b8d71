//! The configuration of a file server.

use haul::MethodChoice;
use haul_fs::Symlinks;
use haul_server::Address;
use haul_server::proxy_protocol::TrustedProxies;
use haul_server::unix_address::abstract_name;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// The configuration of a file server. [`Config::new`] has the defaults.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The directory whose files are served.
    pub root: PathBuf,
    /// The addresses of listeners for plain HTTP.
    pub listen: Vec<Address>,
    /// The proxies that name the client of each connection by the PROXY protocol. Unix sockets do
    /// not have address, and no proxy is trusted there.
    pub trusted_proxies: TrustedProxies,
    /// The TLS listeners and the server certificate; `None` for no TLS.
    pub tls: Option<Tls>,
    /// The users that may send requests; `None` if no password is required.
    pub basic_auth: Option<BasicAuth>,
    /// The number of event loops, each on its own thread; `None` for one for each CPU that the
    /// process may use.
    pub workers: Option<usize>,
    /// The rules by which targets are mapped to files.
    pub content: ContentRules,
    /// Additional header fields of responses.
    pub fields: ExtraFields,
    /// The size of the largest upload (`PUT`), in bytes; `None` if uploads are not allowed. **With
    /// this, every client that can reach the server may write below the root.**
    pub put_bytes_max: Option<u64>,
    /// The access log; `None` if requests are not logged.
    pub access_log: Option<AccessLog>,
    /// The address of the metrics endpoint for Prometheus (`/metrics`). Port 0 is any free port.
    pub metrics: Option<SocketAddr>,
    /// The file that the configuration was read from; `None` for a configuration without a file. A
    /// reload warns if the file changed after the start.
    pub config_file: Option<PathBuf>,
    /// The path of the control socket, at which [`crate::ControlResponse`] answers commands; `None`
    /// for no control socket.
    pub control: Option<PathBuf>,
    /// Whether the configuration is only checked. [`Server::new`](crate::Server::new) then creates
    /// no file, and an address that is in use is a caveat.
    pub checks_only: bool,
    /// The user to switch to once everything that needs more privileges is open, for a server that
    /// root starts.
    pub user: Option<String>,
    /// Whether to give up access to files that are not served, and the right to bind and connect
    /// TCP sockets (Landlock).
    ///
    /// This and `user` apply to the thread that calls [`Server::new`](crate::Server::new) and to
    /// the threads that it starts afterwards.
    pub confine: bool,
    /// Limits on connections, requests and memory.
    pub limits: Limits,
    /// The method by which files are sent.
    pub choice: MethodChoice,
    /// The congestion control of accepted connections; `None` for the host's default.
    pub congestion: Option<String>,
    /// The mode of the files of listening Unix sockets; `None` for 0666.
    pub socket_mode: Option<u32>,
    /// The version of the program, for metrics.
    pub version: String,
    /// Whether the congestion window of near clients is clamped, which saves interrupts on some
    /// machines ([`haul_server::window_clamp`]).
    pub window_clamp: bool,
}

/// The TLS listeners and the server certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tls {
    /// The addresses of TLS listeners.
    pub listen: Vec<Address>,
    /// The PEM file of the certificate and its intermediate certificates.
    pub certificate: PathBuf,
    /// The PEM file of the certificate's private key.
    pub key: PathBuf,
    /// Whether the kernel encrypts if it supports that (kTLS), so that files do not pass through
    /// the program.
    pub in_kernel: bool,
}

impl Tls {
    /// Listeners for TLS with a certificate and its key.
    pub fn new(listen: Vec<Address>, certificate: PathBuf, key: PathBuf, in_kernel: bool) -> Self {
        Self { listen, certificate, key, in_kernel }
    }
}

/// The users that may send requests, by name and password (RFC 7617).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BasicAuth {
    /// The password file: user names and bcrypt hashes, as `htpasswd -B` writes it.
    pub file: PathBuf,
    /// The realm, which browsers show when they ask for the password.
    pub realm: String,
}

impl BasicAuth {
    /// The users of a password file, for a realm.
    pub fn new(file: PathBuf, realm: impl Into<String>) -> Self {
        Self { file, realm: realm.into() }
    }
}

/// The rules by which targets are mapped to files.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContentRules {
    /// Names of index files. The first that exists is sent for its directory.
    pub index: Vec<String>,
    /// Whether a directory without an index file is listed.
    pub listing: bool,
    /// Whether names that begin with a dot are served. `.well-known` always is.
    pub hidden: bool,
    /// The targets that symbolic links may have.
    pub symlinks: Symlinks,
    /// Whether `x.br`, `x.zst` or `x.gz` is sent for `x` to clients that accept that coding.
    pub precompressed: bool,
    /// How programs change the files.
    pub updates: FileUpdates,
    /// What entity tags are made of.
    pub entity_tags: EntityTags,
    /// A file that is sent for every target that names no file, for single-page applications. Its
    /// path is relative to the root.
    pub fallback: Option<String>,
    /// Files that are sent with an error status: the status, and the path relative to the root.
    pub error_pages: Vec<(u16, String)>,
}

/// Additional header fields of responses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ExtraFields {
    /// Fields of every response: name and value.
    pub headers: Vec<(String, String)>,
    /// `Cache-Control` values by pattern, such as `*.html` or `assets/**`. The first pattern that
    /// matches the path is used.
    pub cache_control: Vec<(String, String)>,
    /// Origins whose scripts may read responses (CORS); `*` for every origin.
    pub cors: Vec<String>,
}

/// The access log.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AccessLog {
    /// The file to append to; `None` for standard output.
    pub path: Option<PathBuf>,
    /// The format of each line.
    pub format: LogFormat,
}

impl AccessLog {
    /// A log in a file, or on standard output.
    pub fn new(path: Option<PathBuf>, format: LogFormat) -> Self {
        Self { path, format }
    }
}

/// The format of the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// The common log format.
    Common,
    /// The combined log format: the common one with referrer and user agent.
    #[default]
    Combined,
    /// One JSON object a line.
    Json,
}

/// Limits on connections, requests and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The number of open connections, over all workers.
    pub connections_max: usize,
    /// The number of accepted connections that may wait until another is closed.
    pub waiting_max: usize,
    /// The number of open connections of one client: of an IPv4 address, or of an IPv6 network of
    /// 64 bits; `None` for no limit.
    pub connections_per_address_max: Option<NonZeroUsize>,
    /// The size of the largest request head, in bytes.
    pub head_bytes_max: usize,
    /// The time in which a request head must arrive, from its first byte (or from the start of the
    /// connection).
    pub head_timeout: Duration,
    /// The time for which a connection may be idle between two requests.
    pub idle_timeout: Duration,
    /// The time for which a client may accept none of the bytes that are being sent.
    pub send_timeout: Duration,
    /// The time in which open responses must be sent when the server drains.
    pub drain_timeout: Duration,
    /// The rate at which each connection is sent data, in bytes per second; `None` for no limit.
    pub rate_bytes_per_second: Option<u64>,
    /// The number of files that are kept open, over all workers.
    pub cached_files_max: usize,
    /// The memory in which small files are kept, in bytes, over all workers.
    pub cached_bytes_max: usize,
}

impl Config {
    /// The default configuration, for the files below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            listen: vec![Address::default()],
            trusted_proxies: TrustedProxies::default(),
            tls: None,
            basic_auth: None,
            workers: None,
            content: ContentRules::default(),
            fields: ExtraFields::default(),
            put_bytes_max: None,
            access_log: None,
            metrics: None,
            config_file: None,
            control: None,
            checks_only: false,
            user: None,
            confine: false,
            limits: Limits::default(),
            choice: MethodChoice::Builtin,
            congestion: None,
            socket_mode: None,
            version: env!("CARGO_PKG_VERSION").into(),
            window_clamp: false,
        }
    }
}

impl Config {
    /// The files of the Unix sockets among the addresses.
    pub(crate) fn unix_sockets(&self) -> impl Iterator<Item = &PathBuf> {
        let all = self.listen.iter().chain(self.tls.iter().flat_map(|tls| &tls.listen));
        all.filter_map(|address| match address {
            Address::Unix(path) if abstract_name(path).is_none() => Some(path),
            _ => None,
        })
    }
}

/// How programs change the served files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FileUpdates {
    /// Some write to a file in place.
    #[default]
    InPlace,
    /// All rename a complete file to its name. Then a file is sent without a copy, and has an
    /// entity tag, from its first request on.
    ByRename,
}

/// What entity tags are made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EntityTags {
    /// The identity of the file on this server, with its time and size.
    #[default]
    OfFile,
    /// The time and the size alone, so that servers with copies of a file give the same tag. A file
    /// whose time does not tell when its content changed has a tag of [`EntityTags::OfFile`].
    OfCopies,
}

impl Default for ContentRules {
    fn default() -> Self {
        Self {
            index: vec!["index.html".into()],
            listing: false,
            hidden: false,
            symlinks: Symlinks::default(),
            precompressed: false,
            updates: FileUpdates::default(),
            entity_tags: EntityTags::default(),
            fallback: None,
            error_pages: Vec::new(),
        }
    }
}

impl Default for Limits {
    /// Limits for a public server, with nginx's timeouts where nginx has the same ones.
    fn default() -> Self {
        Self {
            connections_max: 65_536,
            waiting_max: 8192,
            connections_per_address_max: None,
            head_bytes_max: 16 << 10,
            head_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            send_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(30),
            rate_bytes_per_second: None,
            cached_files_max: 4096,
            cached_bytes_max: 64 << 20,
        }
    }
}
