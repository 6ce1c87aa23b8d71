//! Starts the file servers of the comparison.
//!
//! Each server runs in the foreground with its own configuration, tuned for static files by its
//! manual: `sendfile`, one process for one CPU, and no limit on the requests of a connection. The
//! minimal server of `bare.rs` is one of them.

use haul_lab::{Host, Running};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerKind {
    Haul,
    Nginx,
    /// nginx with `sendfile off`, which reads and writes pieces of 32 KiB.
    NginxCopying,
    Lighttpd,
    Caddy,
    /// Apache with `EnableSendfile On`.
    Apache,
    /// Apache with its default, which copies from mapped files.
    ApacheDefault,
    /// The minimal server of `bare.rs`.
    Bare,
    /// Another build of `haul`.
    OtherHaul,
}

/// The command that starts a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starter {
    /// The server's program.
    Direct,
    /// `haul run`.
    Run,
    /// `haul run --watch`.
    Watch,
}

impl Starter {
    pub const ALL: [Self; 3] = [Self::Direct, Self::Run, Self::Watch];

    /// What is added to the server's name in tables.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Direct => "",
            Self::Run => "+run",
            Self::Watch => "+watch",
        }
    }

    /// The arguments of `haul`. `None` if haul does not start the server.
    fn arguments(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Direct => None,
            Self::Run => Some(&["run", "--"]),
            Self::Watch => Some(&["run", "--watch", "--"]),
        }
    }
}

/// Additional work of a server besides sending files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    Plain,
    /// The server writes an access log.
    Logged,
    /// The server uses TLS.
    Tls,
    /// The server has [`FEW_PLACES`], also listens for TLS, and accepts uploads if it can.
    FewPlaces,
    /// The server is started twice. The second instance is the control of the first.
    Twice,
    /// The same, and it accepts uploads if it can.
    TwiceWithUploads,
}

impl Service {
    pub const ALL: [Self; 6] = [
        Self::Plain,
        Self::Logged,
        Self::Tls,
        Self::FewPlaces,
        Self::Twice,
        Self::TwiceWithUploads,
    ];

    /// Returns how often a server is started.
    pub fn instances(self) -> usize {
        if matches!(self, Self::Twice | Self::TwiceWithUploads) { 2 } else { 1 }
    }
}

/// The limit on connections of [`Service::FewPlaces`].
pub const FEW_PLACES: usize = 1000;
/// The distance of the TLS port of [`Service::FewPlaces`] from the port of the server.
const TLS_PORT_DISTANCE: u16 = 1000;

/// Options to start a server with.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'s> {
    /// Folder of the files to serve.
    pub root: &'s Path,
    /// Folder for the configuration and logs. It contains the certificate.
    pub scratch: &'s Path,
    /// Path of the `haul` program to measure.
    pub haul: &'s Path,
    /// Address to listen at.
    pub address: SocketAddr,
    pub service: Service,
    pub starter: Starter,
    /// Additional options of `haul serve`, or parameters of nginx's directive `listen`.
    pub options: &'s str,
}

/// A running server, which is killed when this is dropped.
#[derive(Debug)]
pub struct RunningServer {
    pub name: String,
    pub address: SocketAddr,
    pub service: Service,
    pub running: Running,
}

/// File name of the certificate in the scratch folder.
const CERTIFICATE: &str = "certificate.pem";
/// File name of the certificate's private key in the scratch folder.
const KEY: &str = "key.pem";
/// Folder of Apache's modules on Debian.
const APACHE_MODULES: &str = "/usr/lib/apache2/modules";

/// Creates a self-signed certificate and its private key in the scratch folder.
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

impl ServerKind {
    /// Returns the server's name as printed in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Haul => "haul serve",
            Self::Nginx => "nginx",
            Self::NginxCopying => "nginx-copying",
            Self::Lighttpd => "lighttpd",
            Self::Caddy => "caddy",
            Self::Apache => "apache",
            Self::ApacheDefault => "apache-default",
            Self::Bare => "bare",
            Self::OtherHaul => "other haul",
        }
    }

    /// Returns the server's program and the Debian package that contains it.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Haul | Self::OtherHaul => ("haul", "haul"),
            Self::Bare => ("/proc/self/exe", "xtask"),
            Self::Nginx | Self::NginxCopying => ("/usr/sbin/nginx", "nginx-light"),
            Self::Lighttpd => ("/usr/sbin/lighttpd", "lighttpd"),
            Self::Caddy => ("/usr/bin/caddy", "caddy"),
            Self::Apache | Self::ApacheDefault => ("/usr/sbin/apache2", "apache2"),
        }
    }

    fn is_haul(self) -> bool {
        matches!(self, Self::Haul | Self::OtherHaul)
    }

    /// Returns the Debian package to install if the server is not on this machine.
    pub fn missing_package(self) -> Option<&'static str> {
        let (program, package) = self.program();
        (!self.is_haul() && !Path::new(program).exists()).then_some(package)
    }

    /// Returns whether the server supports `service`.
    pub fn supports(self, service: Service) -> bool {
        match service {
            Service::Plain => true,
            Service::Logged | Service::Tls => self != Self::Bare,
            Service::FewPlaces | Service::Twice | Service::TwiceWithUploads => {
                self.is_haul() || self == Self::Nginx
            }
        }
    }

    /// Writes the server's configuration and starts the server on a host.
    pub fn start(self, host: &Host, setup: Setup<'_>) -> Result<RunningServer, String> {
        let name = format!("{}{} {}", self.name(), setup.starter.suffix(), setup.options);
        let name = name.trim_end().to_owned();
        let files = ServerFiles::new(self, &setup);
        fs::write(&files.configuration, self.configuration(&setup, &files))
            .map_err(|error| format!("{}: {error}", files.configuration.display()))?;
        let mut command = self.command(&setup, &files);
        let errors =
            fs::File::create(&files.error_log).map_err(|error| format!("making a log: {error}"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let running = host.start_program(command).map_err(|error| error.to_string())?;
        let Setup { address, service, .. } = setup;
        Ok(RunningServer { name, address, service, running })
    }

    fn command(self, setup: &Setup<'_>, files: &ServerFiles) -> Command {
        let program = if self.is_haul() { setup.haul } else { Path::new(self.program().0) };
        let mut command = match setup.starter.arguments() {
            Some(options) => {
                let mut haul = Command::new(setup.haul);
                haul.args(options).arg(program);
                haul
            }
            None => Command::new(program),
        };
        let configuration = &files.configuration;
        match self {
            Self::Haul | Self::OtherHaul => {
                command.arg("serve").arg("--config").arg(configuration);
                command.args(setup.options.split_ascii_whitespace())
            }
            Self::Nginx | Self::NginxCopying => command
                .arg("-p")
                .arg(setup.scratch)
                .arg("-c")
                .arg(configuration)
                .arg("-e")
                .arg(&files.error_log),
            Self::Lighttpd => command.arg("-D").arg("-f").arg(configuration),
            Self::Caddy => {
                command.args(["run", "--adapter", "caddyfile", "--config"]).arg(configuration);
                command.env("HOME", setup.scratch).env("GOMAXPROCS", "1")
            }
            Self::Apache | Self::ApacheDefault => {
                command.arg("-DFOREGROUND").arg("-f").arg(configuration)
            }
            Self::Bare => {
                command.args(["peers", "bare"]).arg(setup.root).arg(setup.address.to_string())
            }
        };
        command
    }

    fn configuration(self, setup: &Setup<'_>, files: &ServerFiles) -> String {
        match self {
            Self::Haul | Self::OtherHaul => haul_configuration(setup, files),
            Self::Nginx => nginx_configuration(setup, files, "on"),
            Self::NginxCopying => nginx_configuration(setup, files, "off"),
            Self::Lighttpd => lighttpd_configuration(setup, files),
            Self::Caddy => caddy_configuration(setup, files),
            Self::Apache => apache_configuration(setup, files, "EnableSendfile On"),
            Self::ApacheDefault => apache_configuration(setup, files, ""),
            Self::Bare => String::new(),
        }
    }
}

/// Paths of a server's files in the scratch folder.
struct ServerFiles {
    configuration: PathBuf,
    error_log: PathBuf,
    pid: PathBuf,
    access_log: String,
    certificate: String,
    key: String,
}

impl ServerFiles {
    fn new(kind: ServerKind, setup: &Setup<'_>) -> Self {
        let path = |extension: &str| {
            setup.scratch.join(format!("{}-{}.{extension}", kind.name(), setup.address.port()))
        };
        let text = |path: PathBuf| path.display().to_string();
        Self {
            configuration: path("conf"),
            error_log: path("errors"),
            pid: path("pid"),
            access_log: text(path("log")),
            certificate: text(setup.scratch.join(CERTIFICATE)),
            key: text(setup.scratch.join(KEY)),
        }
    }
}

/// Returns `text` if the server offers `service`, else an empty string.
fn text_if_service(setup: &Setup<'_>, service: Service, text: String) -> String {
    if setup.service == service { text } else { String::new() }
}

fn haul_configuration(setup: &Setup<'_>, files: &ServerFiles) -> String {
    let ServerFiles { access_log, certificate, key, .. } = files;
    let listen = match setup.service {
        Service::Tls => "tls-listen",
        _ => "listen",
    };
    let logged =
        text_if_service(setup, Service::Logged, format!("access-log = \"{access_log}\"\n"));
    let tls = text_if_service(
        setup,
        Service::Tls,
        format!("tls-certificate = \"{certificate}\"\ntls-key = \"{key}\"\n"),
    );
    let few_places = text_if_service(
        setup,
        Service::FewPlaces,
        format!(
            "max-connections = {FEW_PLACES}\ntls-listen = [\"{}\"]\nallow-put = true\n\
             tls-certificate = \"{certificate}\"\ntls-key = \"{key}\"\n",
            tls_address(setup.address)
        ),
    );
    let uploads = text_if_service(setup, Service::TwiceWithUploads, "allow-put = true\n".into());
    format!(
        "dir = \"{}\"\n{listen} = [\"{}\"]\nworkers = 1\n{logged}{tls}{few_places}{uploads}",
        setup.root.display(),
        setup.address
    )
}

fn nginx_configuration(setup: &Setup<'_>, files: &ServerFiles, sendfile: &str) -> String {
    let ServerFiles { access_log, certificate, key, .. } = files;
    let access_log = match setup.service {
        Service::Logged => format!("{access_log} combined buffer=32k flush=1s"),
        _ => "off".into(),
    };
    let (ssl, tls) = match setup.service {
        Service::Tls => {
            // Before 1.23.4, nginx did not accept TLS 1.3 by default.
            let tls = format!(
                "ssl_protocols TLSv1.2 TLSv1.3; ssl_certificate {certificate}; \
                 ssl_certificate_key {key};"
            );
            (" ssl", tls)
        }
        _ => ("", String::new()),
    };
    let (places, more) = match setup.service {
        Service::FewPlaces => (
            FEW_PLACES,
            format!(
                "listen {} ssl backlog=4096; ssl_certificate {certificate}; \
                 ssl_certificate_key {key};",
                tls_address(setup.address)
            ),
        ),
        _ => (20_000, String::new()),
    };
    format!(
        "daemon off; user root; worker_processes 1; pid '{pid}'; worker_rlimit_nofile 65536;\n\
         error_log '{errors}' crit;\n\
         events {{ worker_connections {places}; multi_accept on; }}\n\
         http {{\n\
           include /etc/nginx/mime.types; sendfile {sendfile}; tcp_nopush on; tcp_nodelay on;\n\
           keepalive_requests 1000000000; keepalive_timeout 75s;\n\
           open_file_cache max=4096 inactive=60s; open_file_cache_valid 60s;\n\
           access_log {access_log};\n\
           client_body_temp_path '{temporary}'; proxy_temp_path '{temporary}';\n\
           fastcgi_temp_path '{temporary}'; uwsgi_temp_path '{temporary}';\n\
           scgi_temp_path '{temporary}';\n\
           server {{ listen {address}{ssl} backlog=4096 {listen}; {tls} {more} root {root}; }}\n\
         }}\n",
        pid = files.pid.display(),
        errors = files.error_log.display(),
        // An ordinary user may not use the usual directories.
        temporary = setup.scratch.join("nginx-temporary").display(),
        address = setup.address,
        listen = setup.options,
        root = setup.root.display(),
    )
}

fn lighttpd_configuration(setup: &Setup<'_>, files: &ServerFiles) -> String {
    let ServerFiles { access_log, certificate, key, .. } = files;
    let logged = text_if_service(
        setup,
        Service::Logged,
        format!("server.modules = ( \"mod_accesslog\" )\naccesslog.filename = \"{access_log}\"\n"),
    );
    let tls = text_if_service(
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
         server.max-keep-alive-idle = 75\n\
         server.max-fds = 65536\nserver.max-connections = 30000\nserver.listen-backlog = 4096\n\
         server.stat-cache-engine = \"simple\"\n{logged}{tls}",
        root = setup.root.display(),
        address = setup.address.ip(),
        port = setup.address.port(),
    )
}

fn caddy_configuration(setup: &Setup<'_>, files: &ServerFiles) -> String {
    let ServerFiles { access_log, certificate, key, .. } = files;
    let scheme = if setup.service == Service::Tls { "https" } else { "http" };
    let logged = text_if_service(
        setup,
        Service::Logged,
        format!(" log {{\n  output file \"{access_log}\"\n }}\n"),
    );
    let tls = text_if_service(setup, Service::Tls, format!(" tls {certificate} {key}\n"));
    format!(
        "{{\n admin off\n auto_https off\n default_sni haul\n}}\n\
         {scheme}://{address} {{\n root * {root}\n file_server\n{logged}{tls}}}\n",
        address = setup.address,
        root = setup.root.display(),
    )
}

fn apache_configuration(setup: &Setup<'_>, files: &ServerFiles, more: &str) -> String {
    let ServerFiles { access_log, certificate, key, .. } = files;
    let logged = text_if_service(
        setup,
        Service::Logged,
        format!(
            "BufferedLogs On\n\
             LogFormat \"%h %l %u %t \\\"%r\\\" %>s %b \
             \\\"%{{Referer}}i\\\" \\\"%{{User-Agent}}i\\\"\" combined\n\
             CustomLog \"{access_log}\" combined\n"
        ),
    );
    let tls = text_if_service(
        setup,
        Service::Tls,
        format!(
            "LoadModule ssl_module {APACHE_MODULES}/mod_ssl.so\nSSLEngine on\n\
             SSLCertificateFile {certificate}\nSSLCertificateKeyFile {key}\n"
        ),
    );
    format!(
        "ServerRoot {scratch}\nServerName localhost\nListen {address}\nListenBacklog 4096\n\
         PidFile \"{pid}\"\nErrorLog \"{errors}\"\nLogLevel crit\n\
         LoadModule mpm_event_module {APACHE_MODULES}/mod_mpm_event.so\n\
         LoadModule authz_core_module {APACHE_MODULES}/mod_authz_core.so\n\
         User www-data\nGroup www-data\nDocumentRoot {root}\n\
         <Directory {root}>\nRequire all granted\n</Directory>\n\
         {more}\nKeepAlive On\nMaxKeepAliveRequests 0\nKeepAliveTimeout 75\n\
         ServerLimit 16\nThreadsPerChild 64\nMaxRequestWorkers 1024\n\
         AsyncRequestWorkerFactor 20\n{logged}{tls}",
        scratch = setup.scratch.display(),
        address = setup.address,
        pid = files.pid.display(),
        errors = files.error_log.display(),
        root = setup.root.display(),
    )
}

fn tls_address(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port() + TLS_PORT_DISTANCE)
}

impl RunningServer {
    /// Returns the URL of a file on this server.
    pub fn url(&self, file: &str) -> String {
        let scheme = if self.service == Service::Tls { "https" } else { "http" };
        format!("{scheme}://{}/{file}", self.address)
    }

    /// Returns the address of the TLS listener of [`Service::FewPlaces`].
    pub fn tls_address(&self) -> SocketAddr {
        tls_address(self.address)
    }

    /// Returns the resident memory of the server's processes in bytes. Shared pages count
    /// proportionally (`Pss`).
    pub fn memory_bytes(&self) -> u64 {
        self.running.memory_bytes()
    }
}
