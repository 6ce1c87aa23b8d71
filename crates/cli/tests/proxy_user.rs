//! `haul proxy` that root starts for another user (`--user`).

mod common {
    pub mod exchange;
    pub mod other_user;
    pub mod proxy_command;
    pub mod proxy_process;
    pub mod sockets;
}

use common::exchange::exchange;
use common::other_user::can_switch_user;
use common::proxy_command::{haul_proxy, read_log};
use common::proxy_process::ProxyProcess;
use common::sockets::{LOCALHOSTS, accept, connect_from, port};
use rustix::process::Signal;
use rustix::thread::CapabilitySet;
use serde_json::Value;
use std::fs;
use std::net::{IpAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::process::Child;

/// A line of a process's status, such as its user's ID.
fn status(process: &Child, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap().trim().to_owned()
}

/// A proxy that root starts for another user forwards, opens its log again when it was renamed, and
/// hands its connections over to another process of that user.
#[test]
fn another_user_logs_again_and_hands_over() {
    if !can_switch_user() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (log, control) = (folder.path().join("log"), folder.path().join("control"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let command = || {
        let mut command = haul_proxy(&["--listen", "127.0.0.1:0", "--to", &to]);
        command.args(["--user", "nobody"]).arg("--access-log").arg(&log);
        command.arg("--control").arg(&control);
        command
    };
    let old = ProxyProcess::start(&mut command());
    assert!(status(&old.process, "Uid").starts_with("65534"));
    assert_eq!(status(&old.process, "CapEff"), "0".repeat(16));
    let connect = || {
        let client = connect_from(LOCALHOSTS[0], port(&old.address));
        let server = accept(&listener);
        exchange(&client, &server);
        (client, server)
    };
    let (first, kept) = (connect(), connect());
    let renamed = folder.path().join("log.1");
    fs::rename(&log, &renamed).unwrap();
    old.signal(Signal::HUP);
    old.wait_for("the log was opened again");
    drop(first);
    let new = ProxyProcess::start(command().arg("--upgrade"));
    old.join();
    exchange(&kept.0, &kept.1);
    drop(kept);
    new.finish();
    assert_eq!(read_log(&renamed), [] as [Value; 0]);
    let ends: Vec<_> = read_log(&log).iter().map(|line| line["end"].clone()).collect();
    assert_eq!(ends, ["complete", "complete"]);
}

/// `--source client` needs a capability for each connection, which is kept, and no other is.
#[test]
fn another_user_connects_from_the_addresses_of_clients() {
    let permitted = rustix::thread::capabilities(None).unwrap().permitted;
    if !permitted.contains(CapabilitySet::NET_ADMIN) {
        return eprintln!("SKIPPED: there is no capability to keep (CAP_NET_ADMIN)");
    }
    if !can_switch_user() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let mut command = haul_proxy(&["--listen", "127.0.0.1:0", "--to", &to]);
    let proxy = ProxyProcess::start(command.args(["--user", "nobody", "--source", "client"]));
    assert!(status(&proxy.process, "Uid").starts_with("65534"));
    let kept = u64::from_str_radix(&status(&proxy.process, "CapEff"), 16).unwrap();
    assert_eq!(kept, CapabilitySet::NET_ADMIN.bits());
    for last in [7, 8] {
        let address: IpAddr = [127, 0, 3, last].into();
        let client = connect_from(address, port(&proxy.address));
        let server = accept(&listener);
        assert_eq!(server.peer_addr().unwrap().ip(), address);
        exchange(&client, &server);
    }
    proxy.finish();
}

/// Files that a user cannot read again, or create, are reported at the start.
#[test]
fn files_that_another_user_cannot_open_are_reported() {
    if !can_switch_user() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [config, log] = ["proxy.toml", "log"].map(|name| folder.path().join(name));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let text = format!("listen = [\"127.0.0.1:0\"]\nto = [\"{to}\"]\nuser = \"nobody\"\n");
    fs::write(&config, text + &format!("access-log = \"{}\"\n", log.display())).unwrap();
    fs::set_permissions(&config, fs::Permissions::from_mode(0o644)).unwrap();
    for is_open in [false, true] {
        let mode = if is_open { 0o777 } else { 0o700 };
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
        let mut command = haul_proxy(&[]);
        let proxy = ProxyProcess::start(command.arg("--config").arg(&config));
        let client = connect_from(LOCALHOSTS[0], port(&proxy.address));
        exchange(&client, &accept(&listener));
        drop(client);
        let messages = proxy.finish();
        for problem in ["nobody cannot read", "nobody cannot create files in"] {
            assert_eq!(messages.contains(problem), !is_open, "{messages}");
        }
    }
    assert_eq!(read_log(&log).len(), 2);
}
