//! Other file servers beside haul, each in the foreground with a configuration of its own, tuned as its manual says for
//! static files: `sendfile`, one process for one CPU, connections kept open for as many requests as come. And the barest one.

use haul_lab::{Host, Running};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Haul,
    Nginx,
    Lighttpd,
    Caddy,
    Apache,
    /// About the least that a program can do: see bare.rs.
    Bare,
}

/// What a server does beside sending files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    Plain,
    /// It writes an access log.
    Logged,
    /// It encrypts.
    Tls,
}

/// How it is to be started.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'s> {
    /// The folder that it serves.
    pub root: &'s Path,
    /// A folder for its configuration and logs, with the certificate.
    pub scratch: &'s Path,
    /// The `haul` to measure.
    pub haul: &'s Path,
    /// Where it listens.
    pub address: SocketAddr,
    pub service: Service,
    /// More options for `haul serve`.
    pub options: &'s str,
}

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Serving {
    pub kind: Kind,
    pub name: String,
    pub address: SocketAddr,
    pub service: Service,
    running: Running,
}

/// The certificate and its key in the scratch folder.
const CERTIFICATE: &str = "certificate.pem";
const KEY: &str = "key.pem";
/// Where Debian keeps Apache's modules.
const APACHE: &str = "/usr/lib/apache2/modules";

/// Makes a certificate that nobody has to believe.
pub fn make_certificate(scratch: &Path) -> Result<(), String> {
    let mut command = Command::new("openssl");
    command.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ]);
    command.args(["-days", "2", "-subj", "/CN=haul", "-out"]).arg(scratch.join(CERTIFICATE));
    command.arg("-keyout").arg(scratch.join(KEY)).stdin(Stdio::null());
    let output =
        command.output().map_err(|error| format!("openssl: {error}: ci/install installs it"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

impl Kind {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Haul => "haul serve",
            Self::Nginx => "nginx",
            Self::Lighttpd => "lighttpd",
            Self::Caddy => "caddy",
            Self::Apache => "apache",
            Self::Bare => "bare",
        }
    }

    /// The program, and the Debian package that has it.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Haul => ("haul", "haul"),
            Self::Bare => ("/proc/self/exe", "xtask"),
            Self::Nginx => ("/usr/sbin/nginx", "nginx-light"),
            Self::Lighttpd => ("/usr/sbin/lighttpd", "lighttpd"),
            Self::Caddy => ("/usr/bin/caddy", "caddy"),
            Self::Apache => ("/usr/sbin/apache2", "apache2"),
        }
    }

    /// Whether it is on this machine; if not, what to install.
    pub fn is_missing(self) -> Option<&'static str> {
        let (program, package) = self.program();
        (self != Self::Haul && !Path::new(program).exists()).then_some(package)
    }

    /// Whether it can do that.
    pub fn offers(self, service: Service) -> bool {
        self != Self::Bare || service == Service::Plain
    }

    /// Starts it on a host.
    pub fn start(self, host: &Host, setup: Setup<'_>) -> Result<Serving, String> {
        let name = format!("{} {}", self.name(), setup.options).trim_end().to_owned();
        let files = Files::of(self, &setup);
        fs::write(&files.configuration, self.configuration(&setup, &files))
            .map_err(|error| format!("{}: {error}", files.configuration.display()))?;
        let mut command = self.command(&setup, &files);
        let errors =
            fs::File::create(&files.errors).map_err(|error| format!("making a log: {error}"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let running = host.start_program(command).map_err(|error| error.to_string())?;
        Ok(Serving { kind: self, name, address: setup.address, service: setup.service, running })
    }

    fn command(self, setup: &Setup<'_>, files: &Files) -> Command {
        let program = if self == Self::Haul { setup.haul } else { Path::new(self.program().0) };
        let mut command = Command::new(program);
        let configuration = &files.configuration;
        match self {
            Self::Haul => {
                command.arg("serve").arg("--config").arg(configuration);
                command.args(setup.options.split_ascii_whitespace())
            }
            Self::Nginx => command
                .arg("-p")
                .arg(setup.scratch)
                .arg("-c")
                .arg(configuration)
                .arg("-e")
                .arg(&files.errors),
            Self::Lighttpd => command.arg("-D").arg("-f").arg(configuration),
            Self::Caddy => {
                command.args(["run", "--adapter", "caddyfile", "--config"]).arg(configuration);
                command.env("HOME", setup.scratch).env("GOMAXPROCS", "1")
            }
            Self::Apache => command.arg("-DFOREGROUND").arg("-f").arg(configuration),
            Self::Bare => {
                command.args(["peers", "bare"]).arg(setup.root).arg(setup.address.to_string())
            }
        };
        command
    }

    fn configuration(self, setup: &Setup<'_>, files: &Files) -> String {
        match self {
            Self::Haul => haul(setup, files),
            Self::Nginx => nginx(setup, files),
            Self::Lighttpd => lighttpd(setup, files),
            Self::Caddy => caddy(setup, files),
            Self::Apache => apache(setup, files),
            Self::Bare => String::new(),
        }
    }
}

/// A server's files in the scratch folder.
struct Files {
    configuration: PathBuf,
    errors: PathBuf,
    pid: PathBuf,
    log: String,
    certificate: String,
    key: String,
}

impl Files {
    fn of(kind: Kind, setup: &Setup<'_>) -> Self {
        let path = |what: &str| {
            setup.scratch.join(format!("{}-{}.{what}", kind.name(), setup.address.port()))
        };
        let text = |path: PathBuf| path.display().to_string();
        Self {
            configuration: path("conf"),
            errors: path("errors"),
            pid: path("pid"),
            log: text(path("log")),
            certificate: text(setup.scratch.join(CERTIFICATE)),
            key: text(setup.scratch.join(KEY)),
        }
    }
}

/// `text` for a service of this kind, else nothing.
fn only(setup: &Setup<'_>, service: Service, text: String) -> String {
    if setup.service == service { text } else { String::new() }
}

fn haul(setup: &Setup<'_>, files: &Files) -> String {
    let Files { log, certificate, key, .. } = files;
    let listen = match setup.service {
        Service::Tls => "tls-listen",
        _ => "listen",
    };
    let logged = only(setup, Service::Logged, format!("access-log = \"{log}\"\n"));
    let tls = only(
        setup,
        Service::Tls,
        format!("tls-certificate = \"{certificate}\"\ntls-key = \"{key}\"\n"),
    );
    format!(
        "dir = \"{}\"\n{listen} = [\"{}\"]\nworkers = 1\n{logged}{tls}",
        setup.root.display(),
        setup.address
    )
}

fn nginx(setup: &Setup<'_>, files: &Files) -> String {
    let Files { log, certificate, key, .. } = files;
    let log = match setup.service {
        Service::Logged => format!("{log} combined buffer=32k flush=1s"),
        _ => "off".into(),
    };
    let (ssl, tls) = match setup.service {
        Service::Tls => {
            (" ssl", format!("ssl_certificate {certificate}; ssl_certificate_key {key};"))
        }
        _ => ("", String::new()),
    };
    format!(
        "daemon off; user root; worker_processes 1; pid '{pid}'; worker_rlimit_nofile 65536;\n\
         error_log '{errors}' crit;\n\
         events {{ worker_connections 20000; multi_accept on; }}\n\
         http {{\n\
           include /etc/nginx/mime.types; sendfile on; tcp_nopush on; tcp_nodelay on;\n\
           keepalive_requests 1000000000; keepalive_timeout 75s;\n\
           open_file_cache max=4096 inactive=60s; open_file_cache_valid 60s;\n\
           access_log {log};\n\
           server {{ listen {address}{ssl} backlog=4096; {tls} root {root}; }}\n\
         }}\n",
        pid = files.pid.display(),
        errors = files.errors.display(),
        address = setup.address,
        root = setup.root.display(),
    )
}

fn lighttpd(setup: &Setup<'_>, files: &Files) -> String {
    let Files { log, certificate, key, .. } = files;
    let logged = only(
        setup,
        Service::Logged,
        format!("server.modules = ( \"mod_accesslog\" )\naccesslog.filename = \"{log}\"\n"),
    );
    let tls = only(
        setup,
        Service::Tls,
        format!(
            "server.modules = ( \"mod_openssl\" )\nssl.engine = \"enable\"\n\
             ssl.pemfile = \"{certificate}\"\nssl.privkey = \"{key}\"\n"
        ),
    );
    format!(
        "server.document-root = \"{root}\"\nserver.bind = \"{address}\"\nserver.port = {port}\n\
         server.network-backend = \"sendfile\"\nserver.max-keep-alive-requests = 1000000000\n\
         server.max-fds = 65536\nserver.max-connections = 30000\nserver.listen-backlog = 4096\n\
         server.stat-cache-engine = \"simple\"\n{logged}{tls}",
        root = setup.root.display(),
        address = setup.address.ip(),
        port = setup.address.port(),
    )
}

fn caddy(setup: &Setup<'_>, files: &Files) -> String {
    let Files { log, certificate, key, .. } = files;
    let scheme = if setup.service == Service::Tls { "https" } else { "http" };
    let logged = only(setup, Service::Logged, format!(" log {{\n  output file \"{log}\"\n }}\n"));
    let tls = only(setup, Service::Tls, format!(" tls {certificate} {key}\n"));
    format!(
        "{{\n admin off\n auto_https off\n default_sni haul\n}}\n\
         {scheme}://{address} {{\n root * {root}\n file_server\n{logged}{tls}}}\n",
        address = setup.address,
        root = setup.root.display(),
    )
}

fn apache(setup: &Setup<'_>, files: &Files) -> String {
    let Files { log, certificate, key, .. } = files;
    let logged = only(
        setup,
        Service::Logged,
        format!(
            "BufferedLogs On\n\
             LogFormat \"%h %l %u %t \\\"%r\\\" %>s %b \\\"%{{Referer}}i\\\" \\\"%{{User-Agent}}i\\\"\" combined\n\
             CustomLog \"{log}\" combined\n"
        ),
    );
    let tls = only(
        setup,
        Service::Tls,
        format!(
            "LoadModule ssl_module {APACHE}/mod_ssl.so\nSSLEngine on\n\
             SSLCertificateFile {certificate}\nSSLCertificateKeyFile {key}\n"
        ),
    );
    format!(
        "ServerRoot {scratch}\nServerName localhost\nListen {address}\nListenBacklog 4096\n\
         PidFile \"{pid}\"\nErrorLog \"{errors}\"\nLogLevel crit\n\
         LoadModule mpm_event_module {APACHE}/mod_mpm_event.so\n\
         LoadModule authz_core_module {APACHE}/mod_authz_core.so\n\
         User www-data\nGroup www-data\nDocumentRoot {root}\n<Directory {root}>\nRequire all granted\n</Directory>\n\
         EnableSendfile On\nKeepAlive On\nMaxKeepAliveRequests 0\nKeepAliveTimeout 75\n\
         ServerLimit 16\nThreadsPerChild 64\nMaxRequestWorkers 1024\nAsyncRequestWorkerFactor 20\n{logged}{tls}",
        scratch = setup.scratch.display(),
        address = setup.address,
        pid = files.pid.display(),
        errors = files.errors.display(),
        root = setup.root.display(),
    )
}

impl Serving {
    /// Where it serves a file.
    pub fn url(&self, file: &str) -> String {
        let scheme = if self.service == Service::Tls { "https" } else { "http" };
        format!("{scheme}://{}/{file}", self.address)
    }

    /// Memory that its processes have resident now, in bytes, each shared page counted in part (`Pss`).
    pub fn memory_bytes(&self) -> u64 {
        self.running.memory_bytes()
    }
}
