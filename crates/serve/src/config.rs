//! How a file service is to work.

use haul::MethodChoice;
use haul_fs::Symlinks;
use haul_server::Address;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How a file service is to work. [`Config::new`] has the defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The folder whose files are served.
    pub root: PathBuf,
    /// Where to listen.
    pub listen: Vec<Address>,
    /// Where to listen for TLS, and with which certificate.
    pub tls: Option<Tls>,
    /// Who may ask at all; `None` for everybody.
    pub basic_auth: Option<BasicAuth>,
    /// Event loops, each on a thread of its own; `None` for one for each CPU that the process may use.
    pub workers: Option<usize>,
    /// What files are sent for.
    pub content: Content,
    /// What is said beside files.
    pub fields: ExtraFields,
    /// The largest file that clients may put here (`PUT`), in bytes; `None` where they may put none. **Whoever reaches the service may
    /// then write below the root.**
    pub put_bytes_max: Option<u64>,
    /// Where and how requests are logged; `None` for nowhere.
    pub access_log: Option<AccessLog>,
    /// Where Prometheus may ask what the service does (`/metrics`); port 0 takes any that is free.
    pub metrics: Option<SocketAddr>,
    /// Who to be once everything is open that needs more, for a service that is started by root.
    pub user: Option<String>,
    /// Whether to give up every file that is not served (Landlock) and every new connection. Both this and `user` hold for the
    /// thread that makes the service and for those it starts from then on.
    pub confine: bool,
    /// What a client may take.
    pub limits: Limits,
    /// The path that file bodies take to the socket.
    pub choice: MethodChoice,
    /// The sockets' congestion control; `None` for the machine's own.
    pub congestion: Option<String>,
}

/// Where to listen for TLS, and who to say that one is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// Where to listen.
    pub listen: Vec<Address>,
    /// The certificate and those that lead from it to a known one: a PEM file.
    pub certificate: PathBuf,
    /// The certificate's key: a PEM file.
    pub key: PathBuf,
    /// Whether the kernel encrypts where it can (kTLS), so that files go to the socket without passing through the program.
    pub in_kernel: bool,
}

/// Who may ask, by name and password (RFC 7617).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BasicAuth {
    /// Users and bcrypt hashes of their passwords, as `htpasswd -B` writes them.
    pub file: PathBuf,
    /// What people are told that the password is for.
    pub realm: String,
}

/// Which file a target stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Names that stand for their folder; the first that is there is sent.
    pub index: Vec<String>,
    /// Whether a folder without such a file is listed.
    pub listing: bool,
    /// Whether names that begin with a dot are served.
    pub hidden: bool,
    /// Where symbolic links may lead.
    pub symlinks: Symlinks,
    /// Whether `x.br`, `x.zst` or `x.gz` is sent for `x` to whoever accepts it.
    pub precompressed: bool,
    /// A file, by its path below the root, that is sent for every target that names none: for applications that live in
    /// one page.
    pub fallback: Option<String>,
    /// Files to show with a status, by their paths below the root.
    pub error_pages: Vec<(u16, String)>,
}

/// What responses say beside what they must.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExtraFields {
    /// Fields of every response, name and value.
    pub headers: Vec<(String, String)>,
    /// `Cache-Control` by pattern: the first that fits the path, such as `*.html` or `assets/**`.
    pub cache_control: Vec<(String, String)>,
    /// Origins whose scripts may read responses; `*` is everybody's.
    pub cors: Vec<String>,
}

/// Where and how requests are logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLog {
    /// The file to append to; `None` is standard output.
    pub path: Option<PathBuf>,
    /// How each request is written.
    pub format: LogFormat,
}

/// How a request is written to the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// The common log format.
    Common,
    /// The same with referrer and user agent.
    #[default]
    Combined,
    /// One JSON object a line.
    Json,
}

/// What clients may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time, over all workers.
    pub connections_max: usize,
    /// The longest head of a request, in bytes.
    pub head_bytes_max: usize,
    /// How long a head may take to arrive, from its first byte (or from the connection's beginning).
    pub head_timeout: Duration,
    /// How long a connection may lie idle between two requests.
    pub idle_timeout: Duration,
    /// How long a client may take nothing of what is being sent.
    pub send_timeout: Duration,
    /// How long responses under way may take once the server is to stop.
    pub drain_timeout: Duration,
    /// The most that one connection is sent in a second, in bytes.
    pub rate_bytes_per_second: Option<u64>,
    /// Files that each worker keeps open.
    pub cached_files_max: usize,
    /// Memory that each worker keeps small files in, in bytes.
    pub cached_bytes_max: usize,
}

impl Config {
    /// The defaults, for the files below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            listen: vec![Address::default()],
            tls: None,
            basic_auth: None,
            workers: None,
            content: Content::default(),
            fields: ExtraFields::default(),
            put_bytes_max: None,
            access_log: None,
            metrics: None,
            user: None,
            confine: false,
            limits: Limits::default(),
            choice: MethodChoice::Builtin,
            congestion: None,
        }
    }
}

impl Config {
    /// The Unix sockets among the addresses.
    pub(crate) fn unix_sockets(&self) -> impl Iterator<Item = &PathBuf> {
        let all = self.listen.iter().chain(self.tls.iter().flat_map(|tls| &tls.listen));
        all.filter_map(|address| match address {
            Address::Unix(path) => Some(path),
            _ => None,
        })
    }
}

impl Default for Content {
    fn default() -> Self {
        Self {
            index: vec!["index.html".into()],
            listing: false,
            hidden: false,
            symlinks: Symlinks::default(),
            precompressed: false,
            fallback: None,
            error_pages: Vec::new(),
        }
    }
}

impl Default for Limits {
    /// What a public server can live with: nginx's timeouts where it has such.
    fn default() -> Self {
        Self {
            connections_max: 65_536,
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
