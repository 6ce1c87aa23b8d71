//! `haul proxy` at a socket of systemd, and without what it does not need.

mod common {
    pub mod exchange;
    pub mod proxy_command;
    pub mod proxy_process;
    pub mod sockets;
}

use common::exchange::exchange;
use common::proxy_command::{haul_proxy, read_log};
use common::proxy_process::ProxyProcess;
use common::sockets::{LOCALHOSTS, accept, connect_from, port};
use rustix::io::{FdFlags, fcntl_setfd};
use std::fs;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The socket of systemd is handed over in an upgrade, and with it the connections.
#[test]
fn a_socket_of_systemd_outlasts_an_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let (control, log) = (folder.path().join("control"), folder.path().join("log"));
    let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = upstream.local_addr().unwrap().to_string();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let options = |command: &mut Command| {
        command.args(["proxy", "--listen", "systemd", "--to", &to]);
        command.arg("--control").arg(&control).arg("--access-log").arg(&log);
    };
    let script = format!(
        "exec 3<&{}; LISTEN_FDS=1 LISTEN_PID=$$ exec {} \"$@\"",
        socket.as_raw_fd(),
        env!("CARGO_BIN_EXE_haul"),
    );
    let mut command = Command::new("bash");
    options(command.args(["-c", &script, "bash"]).process_group(0));
    fcntl_setfd(&socket, FdFlags::empty()).unwrap();
    let old = ProxyProcess::start(&mut command);
    fcntl_setfd(&socket, FdFlags::CLOEXEC).unwrap();
    assert_eq!(old.address, address);
    let kept = connect_from(LOCALHOSTS[0], port(&address));
    let kept_server = accept(&upstream);
    exchange(&kept, &kept_server);
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    options(&mut command);
    let new = ProxyProcess::start(command.arg("--upgrade"));
    old.join();
    // systemd also has the socket, and does not accept.
    drop(socket);
    exchange(&kept, &kept_server);
    let next = connect_from(LOCALHOSTS[0], port(&address));
    exchange(&next, &accept(&upstream));
    drop((kept, kept_server, next));
    new.finish();
    let ends: Vec<_> = read_log(&log).iter().map(|line| line["end"].clone()).collect();
    assert_eq!(ends, ["complete", "complete"]);
}

/// The process gives up files and ports where the kernel has Landlock, and with it the right to
/// gain privileges.
#[test]
fn a_confined_process_gains_no_privileges() {
    let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = upstream.local_addr().unwrap().to_string();
    for (confine, expected) in [("--confine=true", "1"), ("--confine=false", "0")] {
        let options = ["--listen", "127.0.0.1:0", "--to", &to, confine];
        let proxy = ProxyProcess::start(&mut haul_proxy(&options));
        let client = connect_from(LOCALHOSTS[0], port(&proxy.address));
        exchange(&client, &accept(&upstream));
        // The threads that the restriction is for, and not the one that resolves names.
        let tasks = format!("/proc/{}/task", proxy.process.id());
        let tasks = fs::read_dir(tasks).unwrap().map(|task| task.unwrap().path());
        let loops: Vec<_> = tasks
            .map(|task| fs::read_to_string(task.join("status")).unwrap())
            .filter(|status| status.contains("Name:\thaul-proxy-"))
            .collect();
        assert!(!loops.is_empty());
        drop(client);
        if proxy.finish().contains("has no Landlock") {
            return eprintln!("SKIPPED: this kernel has no Landlock");
        }
        let line = format!("NoNewPrivs:\t{expected}\n");
        assert!(loops.iter().all(|status| status.contains(&line)), "{confine}: {loops:?}");
    }
}
