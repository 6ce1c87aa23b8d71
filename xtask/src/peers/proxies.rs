//! Starts the proxies of the comparison.
//!
//! Each proxy runs in the foreground, in one thread, and forwards TCP connections to one server.

use crate::peers::servers::{RunningServer, Service};
use haul_lab::Host;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

/// nginx's module for TCP on Debian.
const STREAM_MODULE: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";
/// systemd's proxy on Debian.
const SOCKET_PROXYD: &str = "/lib/systemd/systemd-socket-proxyd";

/// A layer-4 proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyKind {
    Haul,
    /// Another build of `haul`.
    OtherHaul,
    /// HAProxy that splices in both directions, with pipes of 1 MiB.
    HaproxySplice,
    /// HAProxy that copies, its default.
    Haproxy,
    Nginx,
    Socat,
    /// A process for each connection.
    Redir,
    Rinetd,
    /// `systemd-socket-proxyd`, which splices.
    SocketProxyd,
}

/// Options to start a proxy with.
#[derive(Debug, Clone, Copy)]
pub struct ProxySetup<'s> {
    /// Folder for the configuration and messages.
    pub scratch: &'s Path,
    /// Path of the `haul` program to measure.
    pub haul: &'s Path,
    /// Address to listen at.
    pub address: SocketAddr,
    /// The server to forward to.
    pub upstream: SocketAddr,
    /// Additional options of `haul proxy`, or a directive of HAProxy's section `global`.
    pub options: &'s str,
}

impl ProxyKind {
    /// All proxies but another build of haul; the others are compared with the first.
    pub const ALL: [Self; 8] = [
        Self::Haul,
        Self::HaproxySplice,
        Self::Haproxy,
        Self::Nginx,
        Self::Socat,
        Self::Redir,
        Self::Rinetd,
        Self::SocketProxyd,
    ];

    /// The name in tables and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Haul => "haul proxy",
            Self::OtherHaul => "other haul",
            Self::HaproxySplice => "haproxy-splice",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Socat => "socat",
            Self::Redir => "redir",
            Self::Rinetd => "rinetd",
            Self::SocketProxyd => "socket-proxyd",
        }
    }

    /// A file that the proxy needs, and the Debian package that contains it.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Haul | Self::OtherHaul => ("haul", "haul"),
            Self::HaproxySplice | Self::Haproxy => ("/usr/sbin/haproxy", "haproxy"),
            Self::Nginx => (STREAM_MODULE, "libnginx-mod-stream"),
            Self::Socat => ("/usr/bin/socat", "socat"),
            Self::Redir => ("/usr/bin/redir", "redir"),
            Self::Rinetd => ("/usr/sbin/rinetd", "rinetd"),
            Self::SocketProxyd => (SOCKET_PROXYD, "systemd"),
        }
    }

    /// The Debian package to install if the proxy is not on this machine.
    pub fn missing_package(self) -> Option<&'static str> {
        let (program, package) = self.program();
        let is_haul = matches!(self, Self::Haul | Self::OtherHaul);
        (!is_haul && !Path::new(program).exists()).then_some(package)
    }

    /// The most connections of a trial. redir's queue of clients has ten places, others wait for a
    /// second. socat has a process for each, and systemd's proxy six descriptors of 20,000.
    pub fn connections_max(self) -> usize {
        match self {
            Self::Redir => 10,
            Self::Socat => 200,
            Self::SocketProxyd => 3000,
            _ => usize::MAX,
        }
    }

    /// Writes the proxy's configuration and starts the proxy on a host.
    pub fn start(self, host: &Host, setup: ProxySetup<'_>) -> Result<RunningServer, String> {
        let address = setup.address;
        let path = |extension: &str| {
            setup.scratch.join(format!("{}-{}.{extension}", self.name(), address.port()))
        };
        let (configuration, messages) = (path("conf"), path("messages"));
        let failed = |error: std::io::Error| format!("{}: {error}", configuration.display());
        fs::write(&configuration, self.configuration(&setup)).map_err(failed)?;
        let mut command = self.command(&setup, &configuration, &messages);
        let messages = File::create(&messages).map_err(failed)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
        let running = host.start_program(command).map_err(|error| error.to_string())?;
        let name = format!("{} {}", self.name(), setup.options).trim_end().to_owned();
        Ok(RunningServer { name, address, service: Service::Plain, running })
    }

    /// The command that runs the proxy in the foreground.
    fn command(self, setup: &ProxySetup<'_>, configuration: &Path, messages: &Path) -> Command {
        let ProxySetup { address, upstream, .. } = setup;
        let program = match self {
            Self::Haul | Self::OtherHaul => setup.haul,
            Self::Nginx => Path::new("/usr/sbin/nginx"),
            // Opens the listening socket as systemd does, and becomes the proxy.
            Self::SocketProxyd => Path::new("/usr/bin/systemd-socket-activate"),
            _ => Path::new(self.program().0),
        };
        let mut command = Command::new(program);
        match self {
            Self::Haul | Self::OtherHaul => command
                .args(["proxy", "--workers", "1", "--listen", &address.to_string()])
                .args(["--to", &upstream.to_string()])
                .args(setup.options.split_ascii_whitespace()),
            Self::HaproxySplice | Self::Haproxy => command.arg("-db").arg("-f").arg(configuration),
            Self::Nginx => {
                command.arg("-c").arg(configuration).arg("-e").arg(messages);
                command.arg("-p").arg(setup.scratch)
            }
            Self::Socat => {
                let (ip, port) = (address.ip(), address.port());
                command.args([
                    format!("TCP-LISTEN:{port},bind={ip},fork,reuseaddr,backlog=4096"),
                    format!("TCP:{upstream}"),
                ])
            }
            Self::Redir => {
                // Its buffers have 8 KiB otherwise.
                command.args(["-n", "-z", "65536", &address.to_string(), &upstream.to_string()])
            }
            Self::Rinetd => command.arg("-f").arg("-c").arg(configuration),
            Self::SocketProxyd => {
                command.args(["-l", &address.to_string(), SOCKET_PROXYD, "-c", "9600"]);
                command.arg(upstream.to_string())
            }
        };
        command
    }

    fn configuration(self, setup: &ProxySetup<'_>) -> String {
        let ProxySetup { scratch, address, upstream, options, .. } = setup;
        match self {
            Self::Haul | Self::OtherHaul | Self::Socat | Self::Redir | Self::SocketProxyd => {
                String::new()
            }
            Self::Rinetd => format!(
                "{} {} {} {}\n",
                address.ip(),
                address.port(),
                upstream.ip(),
                upstream.port()
            ),
            Self::HaproxySplice | Self::Haproxy => {
                let (pipes, splice) = if self == Self::HaproxySplice {
                    ("tune.pipesize 1048576", "option splice-request\n  option splice-response")
                } else {
                    ("", "")
                };
                format!(
                    "global\n  nbthread 1\n  maxconn 9600\n  maxpipes 190\n  {pipes}\n  {options}\n\
                     defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  \
                     timeout server 1h\n  {splice}\n\
                     listen proxy\n  bind {address} backlog 4096\n  server upstream {upstream}\n"
                )
            }
            Self::Nginx => format!(
                "load_module {STREAM_MODULE};\n\
                 daemon off; user root; worker_processes 1; worker_rlimit_nofile 20000;\n\
                 pid '{scratch}/stream.pid'; error_log stderr crit;\n\
                 events {{ worker_connections 19900; multi_accept on; }}\n\
                 stream {{ server {{ listen {address} backlog=4096; proxy_pass {upstream}; }} }}\n",
                scratch = scratch.display(),
            ),
        }
    }
}
