//! Names of upstreams whose addresses change, from a name server in the lab.

mod common {
    pub mod program;
    pub mod proxy_process;
    pub mod running;
}

use common::program::program;
use common::proxy_process::ProxyProcess;
use common::running::Running;
use haul_lab::{Lab, Settings};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait of a test. The interval of the resolution is much longer.
const LIMIT: Duration = Duration::from_secs(60);

/// A name server that answers from a file like `/etc/hosts`, with a time to live of a second, and
/// refuses questions for which the file does not have an answer. It reads the file again at SIGHUP.
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

/// A lab in which a process can have a name server; `None`, and a message, if there is none here.
fn lab() -> Option<Lab> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can give a process another name server");
        return None;
    }
    Lab::veth(&Settings::default())
        .inspect_err(|error| eprintln!("SKIPPED: there is no lab: {error}"))
        .ok()
}

/// A hook of logrotate may signal while the proxy waits for a name server.
#[test]
fn signals_during_the_start_are_acted_on_after_the_start() {
    let Some(lab) = lab() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (resolver, config) = (folder.path().join("resolv.conf"), folder.path().join("proxy.toml"));
    let near = lab.sender.address();
    fs::write(&resolver, format!("nameserver {near}\noptions timeout:2 attempts:1\n")).unwrap();
    let listen = format!("{near}:7100");
    fs::write(&config, format!("listen = [\"{listen}\"]\nto = [\"app.test:80\"]\n")).unwrap();
    lab.sender
        .run(|| {
            let _silent = UdpSocket::bind((near, 53)).unwrap();
            let mut command = haul_with_name_server(&resolver);
            command.args(["proxy", "--config"]).arg(&config);
            let signaller = thread::spawn({
                let listen = listen.clone();
                move || {
                    let deadline = Instant::now() + LIMIT;
                    while TcpStream::connect(&listen).is_err() {
                        assert!(Instant::now() < deadline, "the proxy does not listen");
                        thread::sleep(Duration::from_millis(1));
                    }
                    listening_process()
                }
            });
            let started = thread::spawn(move || ProxyProcess::start(&mut command));
            let process = signaller.join().unwrap();
            for signal in [Signal::HUP, Signal::USR1, Signal::HUP] {
                kill_process(process, signal).unwrap();
            }
            let proxy = started.join().unwrap();
            proxy.wait_for("reloaded");
            proxy.finish();
        })
        .unwrap();
}

/// The process that listens on the host of this thread: haul, because nothing else does.
fn listening_process() -> Pid {
    let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
    let is_haul = |pid: &i32| {
        let in_process = |name: &str| format!("/proc/{pid}/{name}");
        fs::read_link(in_process("ns/net")).is_ok_and(|namespace| namespace == own)
            && fs::read_link(in_process("exe"))
                .is_ok_and(|program| program == Path::new(env!("CARGO_BIN_EXE_haul")))
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Pid::from_raw(pids.find(is_haul).unwrap()).unwrap()
}

#[test]
fn a_name_is_resolved_again_when_its_time_to_live_is_over() {
    let Some(dnsmasq) = program("dnsmasq") else { return };
    let Some(lab) = lab() else { return };
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
