//! `haul proxy` as a program: its options, its configuration file, its signals and its messages.

mod common {
    pub mod command;
    pub mod proxy_process;
    pub mod schema;
}

use common::command::{haul, run};
use common::proxy_process::ProxyProcess;
use common::schema::assert_valid;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest wait of a test.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn it_forwards_logs_and_ends_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let (log, config) = (folder.path().join("log"), folder.path().join("proxy.toml"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().to_string();
    let text = format!(
        "listen = [\"127.0.0.1:0\"]\nto = [\"{upstream}\"]\naccess-log = {log:?}\nworkers = 1\n"
    );
    fs::write(&config, text).unwrap();
    let proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    client.write_all(b"request").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut server = listener.accept().unwrap().0;
    let mut request = String::new();
    server.read_to_string(&mut request).unwrap();
    assert_eq!(request, "request");
    server.write_all(b"response").unwrap();
    drop(server);
    let mut response = String::new();
    client.read_to_string(&mut response).unwrap();
    assert_eq!(response, "response");
    proxy.finish();
    let line = fs::read_to_string(log).unwrap();
    let line = serde_json::from_str(&line).unwrap();
    assert_valid("proxy-log", &line);
    assert_eq!((&line["end"], &line["upstream"]), (&"complete".into(), &upstream.into()));
    assert_eq!(line["to_client"]["copied_bytes"], 8);
}

/// `unix:@name` is what systemd, `ss` and other proxies call an abstract socket.
#[test]
fn abstract_sockets_are_listened_at_and_connected_to() {
    let name = |role: &str| format!("haul-test-{role}-{}", std::process::id());
    let address = |role: &str| unix::net::SocketAddr::from_abstract_name(name(role)).unwrap();
    let listener = UnixListener::bind_addr(&address("back")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (front, back) = (format!("unix:@{}", name("front")), format!("unix:@{}", name("back")));
    let arguments = ["proxy", "--listen", &front, "--to", &back];
    let proxy = ProxyProcess::start(haul(&arguments).current_dir(folder.path()));
    let mut client = UnixStream::connect_addr(&address("front")).unwrap();
    client.write_all(b"x").unwrap();
    listener.accept().unwrap().0.read_exact(&mut [0]).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "there is no file");
    drop(client);
    proxy.finish();
    let arguments = ["proxy", "--socket-mode", "660", "--listen", &front, "--to", &back];
    let (output, transcript) = run(&mut haul(&arguments));
    assert!(!output.status.success() && transcript.contains("no mode"), "{transcript}");
}

/// One of an upstream's two addresses does not answer, also if the other one is of the other
/// protocol. The other one is tried long before the connect timeout.
#[test]
fn a_silent_address_delays_a_client_by_a_second_or_two() {
    const ADDRESSES: [(&str, [&str; 2]); 2] =
        [("two.test", ["127.0.0.2", "127.0.0.3"]), ("six.test", ["::1", "127.0.0.6"])];
    let folder = tempfile::tempdir().unwrap();
    let lines = ADDRESSES.map(|(name, [one, other])| format!("{one} {name}\n{other} {name}\n"));
    let Some(hosts) = hosts_file(folder.path(), &lines.concat()) else { return };
    let has_ipv6 = TcpListener::bind("[::1]:0").is_ok();
    if !has_ipv6 {
        eprintln!("SKIPPED: this machine has no IPv6");
    }
    for (name, addresses) in &ADDRESSES[..if has_ipv6 { 2 } else { 1 }] {
        // The resolver may sort the addresses, so each is the silent one once.
        let [one, other] = *addresses;
        let mut attempts = [(one, other), (other, one)]
            .map(|(silent, answering)| attempts(&hosts, name, silent, answering));
        attempts.sort_unstable();
        assert_eq!(attempts, [1, 2], "the silent address of {name} was first once");
    }
}

/// The addresses of an upstream that are tried for a client, of which one is silent.
fn attempts(hosts: &Path, name: &str, silent: &str, answering: &str) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind((answering, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let _silent = silent_listener(SocketAddr::new(silent.parse().unwrap(), port));
    let log = folder.path().join("log");
    let mut command = haul_with_hosts(hosts);
    command.args(["proxy", "--listen", "127.0.0.1:0", "--connect-timeout", "60s"]);
    command.args(["--to", &format!("{name}:{port}"), "--access-log"]).arg(&log);
    let proxy = ProxyProcess::start(&mut command);
    let client = TcpStream::connect(&proxy.address).unwrap();
    let server = listener.accept().unwrap().0;
    drop((client, server));
    proxy.finish();
    let line: Value = serde_json::from_str(&fs::read_to_string(&log).unwrap()).unwrap();
    assert_eq!(line["end"], "complete", "{line}");
    assert!(line["connect_ms"].as_f64().unwrap() < 20_000.0, "{line}");
    line["connect_attempts"].as_u64().unwrap()
}

/// Writes a file for [`haul_with_hosts`], if this user can use it.
fn hosts_file(folder: &Path, text: &str) -> Option<PathBuf> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can give a name two addresses for one process");
        return None;
    }
    let hosts = folder.join("hosts");
    fs::write(&hosts, text).unwrap();
    Some(hosts)
}

/// `haul` with this file as `/etc/hosts`.
fn haul_with_hosts(hosts: &Path) -> Command {
    let script = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(hosts).arg(env!("CARGO_BIN_EXE_haul"));
    command
}

/// The connections of a process to this port that are being established.
fn connecting(process: &Child, port: u16) -> usize {
    let folder = format!("/proc/{}/fd", process.id());
    let inode = |entry: io::Result<fs::DirEntry>| {
        let link = fs::read_link(entry.ok()?.path()).ok()?;
        Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    let inodes: HashSet<String> = fs::read_dir(folder).unwrap().filter_map(inode).collect();
    let (sockets, port) = (fs::read_to_string("/proc/net/tcp").unwrap(), format!(":{port:04X}"));
    let inode_if_connecting = |line| {
        let columns: Vec<&str> = str::split_whitespace(line).collect();
        // The state of a connection without an answer (`TCP_SYN_SENT`).
        let is_one =
            columns[2].ends_with(&port) && columns[3] == "02" && inodes.contains(columns[9]);
        is_one.then_some(columns[9])
    };
    // The kernel may list a socket twice while others come and go.
    sockets.lines().skip(1).filter_map(inode_if_connecting).collect::<HashSet<_>>().len()
}

/// Both addresses of an upstream are being tried for a client when another process takes over. The
/// old process goes on with both, and hands the established connection over.
#[test]
fn an_upgrade_waits_for_both_attempts_to_connect() {
    let folder = tempfile::tempdir().unwrap();
    let Some(hosts) = hosts_file(folder.path(), "127.0.0.4 two.test\n127.0.0.5 two.test\n") else {
        return;
    };
    for answering in 0..2 {
        let mut free = SocketAddr::from(([127, 0, 0, 4], 0));
        free.set_port(TcpListener::bind(free).unwrap().local_addr().unwrap().port());
        let port = free.port();
        let mut silent = [4, 5].map(|last| Some(silent_listener(([127, 0, 0, last], port).into())));
        let (log, control) = (folder.path().join("log"), folder.path().join("control"));
        let command = || {
            let mut command = haul_with_hosts(&hosts);
            command.args(["proxy", "--listen", "127.0.0.1:0", "--connect-timeout", "60s"]);
            command.args(["--to", &format!("two.test:{port}"), "--access-log"]).arg(&log);
            command.arg("--control").arg(&control);
            command
        };
        let mut old = ProxyProcess::start(&mut command());
        let mut client = TcpStream::connect(&old.address).unwrap();
        client.write_all(b"x").unwrap();
        let wait_for_both = |process: &Child, expectation: &str| {
            let deadline = Instant::now() + Duration::from_secs(120);
            while connecting(process, port) < 2 {
                assert!(Instant::now() < deadline, "{expectation}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        wait_for_both(&old.process, "both addresses are tried");
        let new = ProxyProcess::start(command().arg("--upgrade"));
        // The kernel lists sockets in pieces, so that a list may lack one while others are closed.
        // A third attempt would be in the log.
        wait_for_both(&old.process, "both attempts go on");
        // Now there is room at one of the two. The kernel sends to it again within seconds.
        let (listener, filling) = silent[answering].take().unwrap();
        drop(filling);
        let listener = TcpListener::from(listener);
        let deadline = Instant::now() + Duration::from_secs(120);
        let accept = || {
            let (mut server, _) = listener.accept().ok()?;
            server.set_nonblocking(false).unwrap();
            (server.read(&mut [0]).unwrap() == 1).then_some(server)
        };
        let mut server = loop {
            if let Some(server) = accept() {
                break server;
            }
            assert!(Instant::now() < deadline, "one attempt succeeds");
            std::thread::sleep(Duration::from_millis(10));
        };
        old.process.wait().unwrap();
        server.write_all(b"y").unwrap();
        client.read_exact(&mut [0]).unwrap();
        drop((client, server));
        new.finish();
        let line: Value = serde_json::from_str(&fs::read_to_string(&log).unwrap()).unwrap();
        assert_eq!((&line["end"], &line["connect_attempts"]), (&"complete".into(), &2.into()));
        fs::remove_file(&log).unwrap();
    }
}

/// A listener whose queue is full: the kernel drops what connects to it. With the connections that
/// fill it.
fn silent_listener(address: SocketAddr) -> (OwnedFd, Vec<OwnedFd>) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, listen, socket_with};
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socket_with(family, SocketType::STREAM, flags, None).unwrap()
    };
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let connect = |_| {
        let socket = socket();
        let _ = connect(&socket, &address);
        socket
    };
    (listener, (0..8).map(connect).collect())
}

/// The bytes that the first connection to a listener sends, once its peer has ended the stream.
fn received(listener: &TcpListener) -> String {
    let mut text = String::new();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn sighup_puts_the_changed_file_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("proxy.toml");
    let (old, new) = (TcpListener::bind("127.0.0.1:0"), TcpListener::bind("127.0.0.2:0"));
    let (old, new) = (old.unwrap(), new.unwrap());
    let write = |text: String| {
        // As an editor or a deployment does it.
        let next = folder.path().join("next");
        fs::write(&next, format!("listen = [\"127.0.0.1:0\"]\n{text}")).unwrap();
        fs::rename(&next, &config).unwrap();
    };
    write(format!(
        "to = [\"{0}\", \"{1} backup\"]",
        old.local_addr().unwrap(),
        new.local_addr().unwrap()
    ));
    let log = folder.path().join("log");
    let mut command = haul(&["proxy", "--config"]);
    let proxy = ProxyProcess::start(command.arg(&config).arg("--access-log").arg(&log));
    let send = |text: &str| TcpStream::connect(&proxy.address).unwrap().write_all(text.as_bytes());
    send("one").unwrap();
    assert_eq!(received(&old), "one");
    write(format!("to = [\"{}\"]", new.local_addr().unwrap()));
    // That is for the log alone.
    fs::rename(&log, folder.path().join("rotated")).unwrap();
    proxy.signal(Signal::USR1);
    proxy.wait_for("the log was opened again");
    assert!(log.exists());
    send("still").unwrap();
    assert_eq!(received(&old), "still");
    proxy.signal(Signal::HUP);
    proxy.wait_for("the configuration was reloaded");
    let send = |text: &str| TcpStream::connect(&proxy.address).unwrap().write_all(text.as_bytes());
    send("two").unwrap();
    assert_eq!(received(&new), "two");
    let text = format!("to = [\"{}\"]\n", new.local_addr().unwrap());
    let port = new.local_addr().unwrap().port();
    write(text + &format!("message-format = \"json\"\n[group.spare]\nto = [\"127.0.0.3:{port}\"]"));
    proxy.signal(Signal::HUP);
    // In the order in which they are printed.
    proxy.wait_for("haul: warning: no listener or route leads to the group spare");
    proxy.wait_for("the change of message-format needs --upgrade or a restart");
    write("to = [\"127.0.0.1:0\"]".into());
    proxy.signal(Signal::HUP);
    proxy.wait_for("haul: error: the configuration was not reloaded, the old one is in force");
    let send = |text: &str| TcpStream::connect(&proxy.address).unwrap().write_all(text.as_bytes());
    send("three").unwrap();
    assert_eq!(received(&new), "three");
    proxy.finish();
}

/// Without a command, whose exit status tells, automation would have to read the messages.
#[test]
fn a_command_reloads_and_tells_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let (config, control) = (folder.path().join("proxy.toml"), folder.path().join("control"));
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [port, other_port] = listeners.map(|listener| listener.local_addr().unwrap().port());
    let write = |text: &str| {
        let control = control.display();
        let listen = "listen = [\"127.0.0.1:0\"]\nmetrics-listen = \"127.0.0.1:0\"";
        fs::write(&config, format!("{listen}\ncontrol = \"{control}\"\n{text}")).unwrap();
    };
    write(&format!("to = [\"127.0.0.1:{port}\"]"));
    let proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    let line = proxy.wait_for("accepting clients");
    let metrics = line.split_once("http://").and_then(|(_, rest)| rest.split_once('/')).unwrap().0;
    let page = || {
        let mut stream = TcpStream::connect(metrics).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page
    };
    assert!(page().contains("haul_proxy_reloads_total{result=\"success\"} 0\n"), "{}", page());
    let command = |command: &str| {
        let (output, transcript) = run(haul(&["proxy", "control"]).arg(&control).arg(command));
        (output.status.code().unwrap(), transcript)
    };
    let has = |(code, transcript): (i32, String), expected: (i32, &str)| {
        assert!(code == expected.0 && transcript.contains(expected.1), "{code}: {transcript}");
    };
    has(command("status"), (0, "none since the start"));
    has(command("status"), (0, &format!("{}, for ", proxy.process.id())));
    write(&format!("to = [\"127.0.0.2:{port}\"]\nlifetime = \"9s\""));
    has(command("check"), (0, "warning: the changes of lifetime need --upgrade"));
    has(command("reload"), (0, "the configuration was reloaded\nwarning: the changes of lifetime"));
    has(command("status"), (0, ", in force (warning: the changes of lifetime need --upgrade"));
    has(command("upstreams"), (0, "127.0.0.2:"));
    let given_up = format!("to = [\"127.0.0.1:{other_port}\"]");
    for (text, problem, before) in [
        (&given_up[..], "no upstream had this port at the start", ", in force"),
        ("to = [7]", "proxy.toml: line 4", ", failed: "),
    ] {
        write(text);
        has(command("check"), (1, problem));
        has(command("status"), (0, before));
        has(command("reload"), (1, problem));
        has(command("status"), (0, ", failed: "));
    }
    has(command("upstreams"), (0, "127.0.0.2:"));
    let page = page();
    for line in [
        "haul_proxy_reloads_total{result=\"success\"} 1\n",
        "haul_proxy_reloads_total{result=\"failure\"} 2\n",
        "haul_proxy_last_reload_successful 0\n",
        "haul_build_info{version=\"",
        "process_start_time_seconds 1",
    ] {
        assert!(page.contains(line), "{line}: {page}");
    }
    proxy.finish();
    let without = ProxyProcess::start(
        haul(&["proxy", "--listen", "127.0.0.1:0", "--to", "127.0.0.1:1", "--control"])
            .arg(&control),
    );
    has(command("reload"), (1, "was started without --config"));
    without.finish();
}

/// Two groups have the same upstream, and only one of them is checked.
#[test]
fn messages_name_the_group_of_an_upstream() {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("proxy.toml");
    // It refuses connections until it listens, and no other program can have its port.
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let upstream = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap();
    let text = format!(
        "listen = [\"127.0.0.1:0\"]\nto = [\"{upstream}\"]\n[group.mail]\nto = [\"{upstream}\"]\n\
         check-interval = \"1s\"\ncheck-fall = 1\n"
    );
    fs::write(&config, text).unwrap();
    let proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    proxy.wait_for(&format!("upstream {upstream} of group mail is down: Connection refused"));
    // The proxy tries the upstream three times, and resets or closes the client's connection.
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    match client.read(&mut [0]) {
        Ok(0) => (),
        other => assert_eq!(other.unwrap_err().kind(), ErrorKind::ConnectionReset),
    }
    proxy.wait_for(&format!("upstream {upstream} of group default accepts no connections"));
    listen(&socket, 9).unwrap();
    proxy.wait_for(&format!("upstream {upstream} of group mail is up"));
    proxy.finish();
}

/// Clients beyond `--max-connections` wait, which a message tells.
#[test]
fn a_full_proxy_tells_that_others_wait() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let options = ["--max-connections", "2", "--workers", "2"];
    let mut command = haul(&["proxy", "--listen", "127.0.0.1:0", "--to", &to]);
    let proxy = ProxyProcess::start(command.args(options));
    let connect = || {
        let client = TcpStream::connect(&proxy.address).unwrap();
        (client, listener.accept().unwrap().0)
    };
    let [first, second] = [connect(), connect()];
    let third = TcpStream::connect(&proxy.address).unwrap();
    proxy.wait_for("2 connections are open, as many as there may be (max-connections)");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    listener.set_nonblocking(false).unwrap();
    drop(first);
    let server = listener.accept().unwrap().0;
    drop((second, third, server));
    // There is one such message in a minute, however many loops there are.
    let rest = proxy.finish();
    assert!(!rest.contains("as many as there may be"), "{rest}");
}

/// What the proxy has kept of greetings goes back to the kernel.
#[test]
fn memory_of_ended_connections_is_returned() {
    const CLIENTS: usize = 200;
    const GREETING_BYTES: usize = 15_000;
    const GREETINGS_KIB: u64 = (CLIENTS * GREETING_BYTES / 1024) as u64;
    if cfg!(not(target_env = "gnu")) {
        return eprintln!("SKIPPED: this C library does not return memory when it is asked to");
    }
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("proxy.toml");
    let text = "listen = [\"127.0.0.1:0\"]\ngreeting-timeout = \"2min\"\nworkers = 1\n\
                [group.web]\nto = [\"127.0.0.1:9\"]\n\
                [[route]]\nserver-name = [\"example.com\"]\ngroup = \"web\"\n";
    fs::write(&config, text).unwrap();
    let proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    // A record of TLS with a ClientHello that lacks its end.
    let mut greeting = vec![0; GREETING_BYTES];
    greeting[..9].copy_from_slice(&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc]);
    let connect = || {
        let mut client = TcpStream::connect(&proxy.address).unwrap();
        client.write_all(&greeting).unwrap();
        client
    };
    let resident_kib = || {
        let status = fs::read_to_string(format!("/proc/{}/status", proxy.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
    };
    let wait_until = |is_so: &dyn Fn(u64) -> bool| {
        let deadline = Instant::now() + LIMIT;
        while !is_so(resident_kib()) {
            assert!(Instant::now() < deadline, "{} KiB are resident", resident_kib());
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let before = resident_kib();
    let clients: Vec<_> = (0..CLIENTS).map(|_| connect()).collect();
    wait_until(&|now| now > before + GREETINGS_KIB);
    // The end of the heap is in use: memory before it is not returned without cause.
    let last = connect();
    drop(clients);
    wait_until(&|now| now < before + GREETINGS_KIB / 2);
    drop(last);
    proxy.finish();
}

/// With few open files there are few connections, which a message tells.
#[test]
fn a_low_limit_of_open_files_is_told() {
    let script = "ulimit -n 64; exec \"$0\" proxy --listen 127.0.0.1:0 --to 127.0.0.1:1";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_haul")]);
    let proxy = ProxyProcess::start(&mut command);
    let rest = proxy.finish();
    assert!(rest.contains("max-connections is"), "{rest}");
}

/// Lets a process open so many more files, and returns its limit before.
fn leave_descriptors(process: &Child, count: usize) -> Rlimit {
    let open: HashSet<u64> = fs::read_dir(format!("/proc/{}/fd", process.id()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    let free = (0..).filter(|number| !open.contains(number)).nth(count);
    // It has this process's limits.
    let before = getrlimit(Resource::Nofile);
    let limit = Rlimit { current: free, maximum: before.maximum };
    prlimit(Some(Pid::from_child(process)), Resource::Nofile, limit).unwrap();
    before
}

/// Clients are accepted, and no descriptor is left for their upstreams: of both event loops.
#[test]
fn a_shortage_of_descriptors_is_told_once_and_passes() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().to_string();
    let arguments = ["proxy", "--listen", "127.0.0.1:0", "--to", &upstream, "--workers", "2"];
    let proxy = ProxyProcess::start(&mut haul(&arguments));
    let exchange = || {
        let mut client = TcpStream::connect(&proxy.address).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        listener.accept().unwrap().0.write_all(b"x").unwrap();
        client.read_exact(&mut [0]).unwrap();
    };
    // All that it needs itself is open then.
    proxy.wait_for("accepting clients with 2 loops");
    let before = leave_descriptors(&proxy.process, 1);
    for _ in 0..6 {
        // The reset may arrive before the connection is reported as established.
        let read = TcpStream::connect(&proxy.address).and_then(|mut client| {
            client.set_read_timeout(Some(LIMIT))?;
            client.read(&mut [0])
        });
        assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    proxy.wait_for("the limit of open files is reached (ulimit -n");
    prlimit(Some(Pid::from_child(&proxy.process)), Resource::Nofile, before).unwrap();
    exchange();
    let rest = proxy.finish();
    assert!(!rest.contains("open files"), "{rest}");
}

/// A client and the attempt at a silent address are all that there are descriptors for. The other
/// address is tried once the attempt has failed.
#[test]
fn a_shortage_of_descriptors_delays_the_second_address() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = "127.0.0.7 short.test\n127.0.0.8 short.test\n";
    let Some(hosts) = hosts_file(folder.path(), hosts) else { return };
    let addresses = ["127.0.0.7", "127.0.0.8"];
    let one_client = |silent: &str, answering: &str, log: &str| {
        let listener = TcpListener::bind((answering, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let _silent = silent_listener(SocketAddr::new(silent.parse().unwrap(), port));
        let log = folder.path().join(log);
        let mut command = haul_with_hosts(&hosts);
        command.args(["proxy", "--listen", "127.0.0.1:0", "--connect-timeout", "3s"]);
        command.args(["--to", &format!("short.test:{port}"), "--workers", "1", "--access-log"]);
        let proxy = ProxyProcess::start(command.arg(&log));
        proxy.wait_for("accepting clients");
        leave_descriptors(&proxy.process, 2);
        let mut client = TcpStream::connect(&proxy.address).unwrap();
        client.set_nonblocking(true).unwrap();
        listener.set_nonblocking(true).unwrap();
        let deadline = Instant::now() + LIMIT;
        while listener.accept().is_err() {
            let waits =
                client.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            if !waits {
                // The proxy had no descriptor for an attempt, because a descriptor that it closed
                // later was counted.
                proxy.finish();
                return (0, false);
            }
            assert!(Instant::now() < deadline, "the other address is not tried");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(client);
        let messages = proxy.finish();
        let line: Value = serde_json::from_str(&fs::read_to_string(&log).unwrap()).unwrap();
        let attempts = line["connect_attempts"].as_u64().unwrap();
        (attempts, messages.contains("the limit of open files is reached"))
    };
    // A descriptor that the proxy closes right after the open ones were counted is left for the
    // second address, so descriptors are not short.
    let attempts = |silent: &str, answering: &str, name: &str| {
        for number in 0..20 {
            match one_client(silent, answering, &format!("{name}-{number}")) {
                (attempts, is_short) if is_short || attempts == 1 => return attempts,
                _ => {}
            }
        }
        panic!("descriptors do not become short");
    };
    // The resolver may sort the addresses, so each is the silent one once.
    let [one, other] = addresses;
    let mut attempts = [attempts(one, other, "one"), attempts(other, one, "other")];
    attempts.sort_unstable();
    assert_eq!(attempts, [1, 2]);
}

#[test]
fn a_second_signal_cuts_off_what_is_open() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().to_string();
    let proxy =
        ProxyProcess::start(&mut haul(&["proxy", "--listen", "127.0.0.1:0", "--to", &upstream]));
    let mut client = TcpStream::connect(&proxy.address).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let mut server = listener.accept().unwrap().0;
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    proxy.signal(Signal::TERM);
    proxy.wait_for("ending, waiting for 1 connection, at most 30 s; another signal ends at once");
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    proxy.signal(Signal::TERM);
    proxy.wait_for("another signal: cutting off what is open");
    assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let rest = proxy.join();
    assert!(rest.contains("connections of a loop that are cut off: 1\n"), "{rest}");
}

/// A client that waits for an upstream and ends its stream is given up if the flag or the file says
/// so.
#[test]
fn abort_on_close_gives_up_a_client_that_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let (config, log) = (folder.path().join("proxy.toml"), folder.path().join("log"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("{} max-connections=1", listener.local_addr().unwrap());
    for (is_flag, text) in [(true, ""), (false, "abort-on-close = true\n")] {
        fs::write(&config, text).unwrap();
        let mut command = haul(&["proxy", "--listen", "127.0.0.1:0", "--to", &to]);
        command.arg("--config").arg(&config).arg("--access-log").arg(&log);
        command.args(is_flag.then_some("--abort-on-close"));
        let proxy = ProxyProcess::start(&mut command);
        let first = TcpStream::connect(&proxy.address).unwrap();
        let server = listener.accept().unwrap().0;
        let mut second = TcpStream::connect(&proxy.address).unwrap();
        second.shutdown(std::net::Shutdown::Write).unwrap();
        second.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        assert_eq!(second.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        drop((first, server));
        proxy.finish();
        let lines = fs::read_to_string(&log).unwrap();
        let ends =
            lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["end"].clone());
        assert!(ends.into_iter().any(|end| end == "client-failed"), "{lines}");
        fs::remove_file(&log).unwrap();
    }
}

/// A TLS site: OpenSSL's server, which serves the files of a folder.
struct TlsSite {
    process: Child,
    address: String,
}

impl TlsSite {
    /// Starts a site of which `/name` is `name`.
    fn start(folder: &Path, name: &str) -> Self {
        let folder = folder.join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("name"), name).unwrap();
        let status = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj"])
            .args([&format!("/CN={name}"), "-keyout", "key.pem", "-out", "certificate.pem"])
            .current_dir(&folder)
            .stderr(Stdio::null())
            .status();
        assert!(status.unwrap().success());
        // It cannot report the port that the kernel chooses.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let process = Command::new("openssl")
            .args(["s_server", "-accept", &address, "-WWW", "-quiet"])
            .args(["-cert", "certificate.pem", "-key", "key.pem"])
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        while TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < deadline, "openssl s_server does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { process, address }
    }
}

impl Drop for TlsSite {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn curl_reaches_the_tls_site_that_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let sites = ["one.example", "two.example"].map(|name| TlsSite::start(folder.path(), name));
    let config = folder.path().join("proxy.toml");
    let text = format!(
        "listen = ['127.0.0.1:0']
         group.one.to = ['{}']
         group.two.to = ['{}']
         route = [
             {{ server-name = ['one.example'], group = 'one' }},
             {{ server-name = ['*.example'], alpn = ['http/1.1'], group = 'two' }},
         ]",
        sites[0].address, sites[1].address
    );
    fs::write(&config, text).unwrap();
    let proxy = ProxyProcess::start(haul(&["proxy", "--config"]).arg(&config));
    let port = proxy.address.rsplit_once(':').unwrap().1.to_owned();
    let fetch = |site: &str| {
        Command::new("curl")
            .args(["-sS", "--max-time", "20", "--cacert"])
            .arg(folder.path().join(site).join("certificate.pem"))
            .args(["--resolve", &format!("{site}:{port}:127.0.0.1")])
            .arg(format!("https://{site}:{port}/name"))
            .output()
            .unwrap()
    };
    for site in ["one.example", "two.example"] {
        let output = fetch(site);
        let body = String::from_utf8_lossy(&output.stdout);
        assert!(body.contains(site), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let refused = Command::new("curl")
        .args(["-sSk", "--max-time", "20", &format!("https://127.0.0.1:{port}/name")])
        .status();
    // 35: the connection is reset in the handshake.
    assert_eq!(refused.unwrap().code(), Some(35));
    proxy.finish();
}

#[test]
fn a_check_names_what_is_wrong_and_opens_nothing_for_long() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let unix = format!("unix:{}", folder.path().join("socket").display());
    let before = fs::metadata(folder.path()).unwrap().modified().unwrap();
    for (listen, to, code, expected) in [
        ("127.0.0.1:0", "127.0.0.1:9", 0, "are connected to 127.0.0.1:9"),
        ("127.0.0.1:0", "no-such-host.invalid:9", 0, "is resolved: no-such-host.invalid:9: "),
        // Beside the running proxy, whose address it may be.
        (&taken, "127.0.0.1:9", 0, "warning: another process listens at 127.0.0.1:"),
        (&taken, "127.0.0.1", 2, "is no upstream"),
    ] {
        let arguments = ["proxy", "--listen", listen, "--to", to, "--check", "--listen", &unix];
        let mut command = haul(&arguments);
        command.arg("--access-log").arg(&log).arg("--control").arg(folder.path().join("control"));
        let (output, transcript) = run(&mut command);
        // A service of another user could not use a file of the user who checks.
        let modified = fs::metadata(folder.path()).unwrap().modified().unwrap();
        assert_eq!(modified, before, "a file was created: {transcript}");
        assert_eq!(output.status.code(), Some(code), "{transcript}");
        assert!(transcript.contains(expected), "{transcript}");
    }
}

#[test]
fn bad_options_are_one_line_each() {
    for (arguments, problem) in [
        (&["proxy"][..], "listen is missing"),
        (&["proxy", "--listen", "0"], "to is missing"),
        (&["proxy", "--listen", "0", "--to", "host"], "is no upstream"),
        (
            &["proxy", "--listen", "0", "--to", "h:1", "--workers", "0"],
            "whole number of at least 1",
        ),
        (&["proxy", "--listen", "0", "--to", "h:99999"], "write a port from 1 to 65535"),
        (&["proxy", "--listen", "0", "--to", "10.0.0.1:0"], "write a port from 1 to 65535"),
        (
            &["proxy", "--listen", "0", "--to", "h:1", "--allow", "10.0.0.1/8"],
            "write that, or 10.0.0.1",
        ),
        (&["proxy", "--listen", "0", "--to", "h:1", "--upgrade"], "name it (--control)"),
        (&["proxy", "--listen", "0", "--to", "h:1", "--check-rise", "1"], "add check-interval"),
        (
            &["proxy", "--listen", "0", "--to", "h:1", "--socket-mode", "0888"],
            "in octal, such as 660",
        ),
        (
            &["proxy", "--listen", "0.0.0.0:9", "--listen", "[::]:9", "--to", "h:1"],
            "has 0.0.0.0:9, and [::] includes IPv4",
        ),
        (
            &["proxy", "--listen", "unix:/nonexistent/a", "--to", "h:1"],
            "its directory does not exist",
        ),
        (
            &["proxy", "--listen", "0", "--to", "h:1", "--access-log", "/nonexistent/a"],
            "its directory does not exist",
        ),
        (&["proxy", "--listen", "0", "--to", "h:1 weight=0"], "weight 0 is not between"),
        (&["proxy", "--listen", "0", "--to", "h:1 wieght=3"], "\"wieght=3\" is unknown"),
        (&["proxy", "--listen", "0", "--to", "h:1,h:1"], "has the upstream h:1 twice"),
        (&["proxy", "--config", "/nonexistent"], "/nonexistent: No such file"),
    ] {
        let (output, transcript) = run(&mut haul(arguments));
        assert_eq!(output.status.code(), Some(2), "{transcript}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(problem) && message.lines().count() == 1, "{transcript}");
    }
}
