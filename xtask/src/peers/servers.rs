//! Other file servers beside haul, each in the foreground with a configuration of its own, tuned as its manual says for
//! static files: `sendfile`, one process for one CPU, connections kept open for as many requests as come.

use haul_lab::{Host, Running};
use std::fmt::Write;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
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
}

/// How it is to be started.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'s> {
    /// The folder that it serves.
    pub root: &'s Path,
    /// A folder for its configuration and logs.
    pub scratch: &'s Path,
    /// The `haul` to measure.
    pub haul: &'s Path,
    /// Where it listens.
    pub address: IpAddr,
    pub port: u16,
    /// Whether it writes an access log.
    pub is_logging: bool,
    /// More options for `haul serve`.
    pub options: &'s str,
}

/// A server that runs until it is dropped.
#[derive(Debug)]
pub struct Serving {
    pub kind: Kind,
    pub name: String,
    pub address: SocketAddr,
    running: Running,
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
        }
    }

    /// The program, and the Debian package that has it.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Haul => ("haul", "haul"),
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

    /// Starts it on a host.
    pub fn start(self, host: &Host, setup: Setup<'_>) -> Result<Serving, String> {
        let mut command = self.command(setup).map_err(|error| format!("writing a configuration: {error}"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let log =
            fs::File::create(setup.path(self, "stderr")).map_err(|error| format!("making a log: {error}"))?;
        command.stderr(log);
        let running = host.start_program(command).map_err(|error| error.to_string())?;
        let name = format!("{} {}", self.name(), setup.options).trim_end().to_owned();
        Ok(Serving { kind: self, name, address: SocketAddr::new(setup.address, setup.port), running })
    }

    fn command(self, setup: Setup<'_>) -> io::Result<Command> {
        let Setup { root, haul, address, port, is_logging, .. } = setup;
        let root = root.display();
        let log = setup.path(self, "access.log");
        let log = log.display();
        let configuration = setup.path(self, "conf");
        let mut command = Command::new(if self == Self::Haul { haul } else { Path::new(self.program().0) });
        match self {
            Self::Haul => {
                command.arg("serve").arg(setup.root).args(["--workers", "1"]);
                command.args(["--listen", &SocketAddr::new(address, port).to_string()]);
                command.args(setup.options.split_ascii_whitespace());
                if is_logging {
                    command.args(["--access-log", &log.to_string()]);
                }
            }
            Self::Nginx => {
                let log =
                    if is_logging { format!("{log} combined buffer=32k flush=1s") } else { "off".into() };
                let text = format!(
                    "daemon off; user root; worker_processes 1; pid {pid}; worker_rlimit_nofile 65536;\n\
                     error_log {errors} crit;\n\
                     events {{ worker_connections 20000; multi_accept on; }}\n\
                     http {{\n\
                       include /etc/nginx/mime.types; sendfile on; tcp_nopush on; tcp_nodelay on;\n\
                       keepalive_requests 1000000000; keepalive_timeout 75s; reset_timedout_connection on;\n\
                       open_file_cache max=4096 inactive=60s; open_file_cache_valid 60s;\n\
                       access_log {log};\n\
                       server {{ listen {address}:{port} backlog=4096; root {root}; }}\n\
                     }}\n",
                    pid = setup.path(self, "pid").display(),
                    errors = setup.path(self, "errors").display(),
                );
                fs::write(&configuration, text)?;
                command.arg("-p").arg(setup.scratch).arg("-c").arg(&configuration);
                command.arg("-e").arg(setup.path(self, "errors"));
            }
            Self::Lighttpd => {
                let mut text = format!(
                    "server.document-root = \"{root}\"\nserver.bind = \"{address}\"\nserver.port = {port}\n\
                     server.network-backend = \"sendfile\"\nserver.max-keep-alive-requests = 1000000000\n\
                     server.max-fds = 65536\nserver.max-connections = 30000\nserver.listen-backlog = 4096\n\
                     server.stat-cache-engine = \"simple\"\n"
                );
                if is_logging {
                    let _ = write!(
                        text,
                        "server.modules = ( \"mod_accesslog\" )\naccesslog.filename = \"{log}\"\n"
                    );
                }
                fs::write(&configuration, text)?;
                command.arg("-D").arg("-f").arg(&configuration);
            }
            Self::Caddy => {
                let log = if is_logging { format!("log {{ output file {log} }}") } else { String::new() };
                let text = format!(
                    "{{\n admin off\n auto_https off\n persist_config off\n}}\n\
                     http://{address}:{port} {{\n root * {root}\n file_server\n {log}\n}}\n"
                );
                fs::write(&configuration, text)?;
                command.args(["run", "--adapter", "caddyfile", "--config"]).arg(&configuration);
                command.env("HOME", setup.scratch).env("GOMAXPROCS", "1");
            }
            Self::Apache => {
                let log = if is_logging {
                    format!(
                        "LoadModule log_config_module {APACHE}/mod_log_config.so\nBufferedLogs On\n\
                         LogFormat \"%h %l %u %t \\\"%r\\\" %>s %b \\\"%{{Referer}}i\\\" \\\"%{{User-Agent}}i\\\"\" combined\n\
                         CustomLog {log} combined\n"
                    )
                } else {
                    String::new()
                };
                let text = format!(
                    "ServerRoot {scratch}\nServerName localhost\nListen {address}:{port}\nListenBacklog 4096\n\
                     PidFile {pid}\nErrorLog {errors}\nLogLevel crit\n\
                     LoadModule mpm_event_module {APACHE}/mod_mpm_event.so\n\
                     LoadModule authz_core_module {APACHE}/mod_authz_core.so\n\
                     User root\nGroup root\nDocumentRoot {root}\n<Directory {root}>\nRequire all granted\n</Directory>\n\
                     EnableSendfile On\nKeepAlive On\nMaxKeepAliveRequests 0\nKeepAliveTimeout 75\n\
                     ServerLimit 16\nThreadsPerChild 64\nMaxRequestWorkers 1024\nAsyncRequestWorkerFactor 20\n{log}",
                    scratch = setup.scratch.display(),
                    pid = setup.path(self, "pid").display(),
                    errors = setup.path(self, "errors").display(),
                );
                fs::write(&configuration, text)?;
                command.arg("-DFOREGROUND").arg("-f").arg(&configuration);
            }
        }
        Ok(command)
    }
}

/// Where Debian keeps Apache's modules.
const APACHE: &str = "/usr/lib/apache2/modules";

impl Setup<'_> {
    fn path(&self, kind: Kind, what: &str) -> PathBuf {
        let name = kind.name().replace(' ', "-");
        let kept = if self.is_logging { "-logging" } else { "" };
        self.scratch.join(format!("{name}{kept}.{what}"))
    }
}

impl Serving {
    /// Where it serves a file.
    pub fn url(&self, file: &str) -> String {
        format!("http://{}/{file}", self.address)
    }

    /// Memory that its processes have resident now, in bytes, each shared page counted in part (`Pss`).
    pub fn memory_bytes(&self) -> u64 {
        self.running.memory_bytes()
    }
}
