//! Names of upstreams whose addresses change, from a name server in the lab.

mod common {
    pub mod program;
    pub mod proxy_process;
}

use common::program::{Running, program};
use common::proxy_process::ProxyProcess;
use haul_lab::{Lab, Settings};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Ends a test that waits in vain. The interval of the resolution is much longer.
const LIMIT: Duration = Duration::from_secs(60);

/// A name server that answers from a file like `/etc/hosts`, with a time to live of a second, and
/// refuses questions for which the file has no answer. It reads the file again at SIGHUP.
fn name_server(program: &Path, address: IpAddr, hosts: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file", "--user=root"]);
    command.args(["--no-resolv", "--no-hosts", "--bind-interfaces", "--local-ttl=1"]);
    command.arg(format!("--listen-address={address}"));
    command.arg(format!("--addn-hosts={}", hosts.display()));
    command
}

/// `haul` with this name server, and no name in `/etc/hosts`.
fn haul_with_name_server(configuration: &Path) -> Command {
    let script = "mount --bind \"$0\" /etc/resolv.conf && mount --bind /dev/null /etc/hosts && \
                  exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(configuration).arg(env!("CARGO_BIN_EXE_haul"));
    command
}

/// Waits until a client of the proxy arrives at a server, other than those that wait there already.
fn wait_for_client(proxy: &SocketAddr, server: &TcpListener) {
    server.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + LIMIT;
    loop {
        let _client = TcpStream::connect(proxy).unwrap();
        thread::sleep(Duration::from_millis(100));
        if server.accept().is_ok() {
            return;
        }
        assert!(Instant::now() < deadline, "no client has arrived");
    }
}

#[test]
fn a_name_is_resolved_again_when_its_time_to_live_is_over() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can give a process a name server of its own");
        return;
    }
    let Some(dnsmasq) = program("dnsmasq") else { return };
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error) => {
            eprintln!("SKIPPED: there is no lab: {error}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let (hosts, resolver) = (folder.path().join("hosts"), folder.path().join("resolv.conf"));
    let (near, far) = (lab.sender.address(), lab.receiver.address());
    fs::write(&hosts, format!("{near} app.test\n")).unwrap();
    fs::write(&resolver, format!("nameserver {near}\n")).unwrap();
    let first = lab.sender.run(|| TcpListener::bind((near, 0)).unwrap()).unwrap();
    let port = first.local_addr().unwrap().port();
    let second = lab.receiver.run(|| TcpListener::bind((far, port)).unwrap()).unwrap();
    lab.sender
        .run(|| {
            let names = Running::start(&mut name_server(&dnsmasq, near, &hosts));
            let mut command = haul_with_name_server(&resolver);
            command.args(["proxy", "--listen", "127.0.0.1:0", "--resolve-interval", "1h", "--to"]);
            let proxy = ProxyProcess::start(command.arg(format!("app.test:{port}")));
            let address = proxy.address.parse().unwrap();
            wait_for_client(&address, &first);
            fs::write(&hosts, format!("{far} app.test\n")).unwrap();
            kill_process(Pid::from_child(&names.0), Signal::HUP).unwrap();
            wait_for_client(&address, &second);
            // Clients that were not accepted are closed.
            drop((first, second));
            proxy.finish();
        })
        .unwrap();
}
