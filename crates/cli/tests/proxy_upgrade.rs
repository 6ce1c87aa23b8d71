//! `haul proxy --upgrade`: one process after another takes over from the one before, while clients
//! are busy.

mod common {
    pub mod proxy_process;
}

use common::proxy_process::ProxyProcess;
use haul_testing::wait_until;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait of a test.
const LIMIT: Duration = Duration::from_secs(120);
/// Bytes of a message.
const MESSAGE_BYTES: usize = 4096;
/// The time after which the load is even, once all clients have connected.
const SETTLING_TIME: Duration = Duration::from_millis(500);
/// Stack of a thread that only sends and receives.
const STACK_BYTES: usize = 64 << 10;

/// A number that the environment may set, for a longer run.
fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Starts a proxy, and waits until it accepts clients.
fn start_proxy(command: &mut Command) -> ProxyProcess {
    let proxy = ProxyProcess::start(command);
    proxy.wait_for("accepting clients");
    proxy
}

/// As systemd's `ExecReload=` calls it: the exit status tells whether the upgrade has succeeded.
#[test]
fn a_start_in_the_background_returns_once_clients_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let (config, control) = (folder.path().join("proxy.toml"), folder.path().join("control"));
    let echo = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = echo.local_addr().unwrap();
    let address = folder.path().join("socket");
    let text = format!(
        "listen = [\"unix:{}\"]\nto = [\"{upstream}\"]\ncontrol = \"{}\"\n",
        address.display(),
        control.display()
    );
    let write = |more: &str| std::fs::write(&config, text.clone() + more).unwrap();
    let dropped = folder.path().join("dropped");
    let listen = format!("listen = [\"unix:{}\"]", dropped.display());
    write(&format!("socket-mode = \"600\"\n[[listener]]\n{listen}\ngroup = \"default\"\n"));
    let messages = folder.path().join("messages");
    let start = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
        let file = std::fs::File::options().create(true).append(true).open(&messages).unwrap();
        command.args(["proxy", "--config"]).arg(&config).args(arguments);
        let status = command.stdin(Stdio::null()).stderr(file).status().unwrap();
        (status.code().unwrap(), std::fs::read_to_string(&messages).unwrap())
    };
    let status = || {
        let status = haul_proxy::control::send_command(&control, "status").unwrap();
        serde_json::from_str::<serde_json::Value>(&status).unwrap()["status"].clone()
    };
    let pid = || Pid::from_raw(status()["pid"].as_i64().unwrap() as i32).unwrap();
    let (code, told) = start(&["--background"]);
    assert_eq!(code, 0, "{told}");
    let _first = KillOnDrop::new(pid());
    let mode = || std::fs::metadata(&address).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    let mut client = UnixStream::connect(&address).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let mut server = echo.accept().unwrap().0;
    write("nonsense = 1\n");
    let (code, told) = start(&["--upgrade", "--background"]);
    assert!(code == 2 && told.contains("nonsense"), "{code}: {told}");
    write("socket-mode = \"640\"\n");
    let folder_name = folder.path().to_str().unwrap();
    let (code, told) = start(&["--upgrade", "--background", "--access-log", folder_name]);
    assert!(code == 1 && told.contains("Is a directory"), "{code}: {told}");
    // The echo server's address is not one of those that are taken over.
    let (code, told) = start(&["--upgrade", "--check", "--listen", &upstream.to_string()]);
    assert!(code == 1 && told.contains("another process listens there already"), "{code}: {told}");
    assert_eq!((start(&["--upgrade", "--check"]).0, mode()), (0, 0o600), "a check changes nothing");
    let (code, told) = start(&["--upgrade", "--background"]);
    assert_eq!(code, 0, "{told}");
    assert_eq!(mode(), 0o640);
    let second = pid();
    let _second = KillOnDrop::new(second);
    server.write_all(b"y").unwrap();
    client.read_exact(&mut [0]).unwrap();
    wait_until("one connection", || status()["connections"] == 1);
    kill_process(second, Signal::TERM).unwrap();
    wait_until("the process is ending", || status()["is_ending"] == true);
    let refused = haul_proxy::control::send_command(&control, "reload").unwrap();
    assert!(refused.contains("the process is ending"), "{refused}");
    let has_told = |text: &str| std::fs::read_to_string(&messages).unwrap().contains(text);
    wait_until("the message of the end", || {
        has_told("ending, waiting for 1 connection, at most 30 s; another signal")
    });
    drop((client, server));
    // The first process also ended.
    wait_until("both processes ended", || {
        std::fs::read_to_string(&messages).unwrap().matches("haul: ended\n").count() == 2
    });
    assert!(!address.exists() && !dropped.exists(), "the file of a socket is left");
}

/// systemd ends a service with its main process. With `NotifyAccess=all`, as in haul-proxy.service,
/// `STOPPING=1` of any process counts for the service.
#[test]
fn an_upgrade_notifies_systemd_of_the_main_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let notifications = UnixDatagram::bind(path("notify")).unwrap();
    notifications.set_read_timeout(Some(LIMIT)).unwrap();
    let next = || {
        let mut message = [0; 256];
        let count = notifications.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..count]).into_owned()
    };
    let start = |arguments: &[&str]| {
        let listen = format!("unix:{}", path("socket").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
        command.args(["proxy", "--to", "127.0.0.1:9", "--listen", &listen, "--control"]);
        command.arg(path("control")).args(arguments).env("NOTIFY_SOCKET", path("notify"));
        start_proxy(&mut command)
    };
    let mut current = start(&[]);
    assert_eq!(next(), "READY=1\n");
    for _ in 0..2 {
        let successor = start(&["--upgrade"]);
        let pid = successor.process.id();
        std::mem::replace(&mut current, successor).join();
        // From both: the old process may end before the new one has sent it.
        let mut both = [next(), next()];
        both.sort();
        assert_eq!(both, [format!("MAINPID={pid}\n"), format!("READY=1\nMAINPID={pid}\n")]);
    }
    current.finish();
    assert_eq!(next(), "STOPPING=1\n");
    notifications.set_nonblocking(true).unwrap();
    let error = notifications.recv(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "nothing else was sent");
}

/// A process that is not a child.
struct KillOnDrop(OwnedFd);

impl KillOnDrop {
    fn new(pid: Pid) -> Self {
        Self(pidfd_open(pid, PidfdFlags::empty()).unwrap())
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // It may have ended.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

/// What the clients have seen.
#[derive(Default)]
struct Observations {
    is_over: AtomicBool,
    /// Clients that stay and are connected to the upstream.
    connected: AtomicUsize,
    round_trips: AtomicUsize,
    /// The number of the current period. In the first one, 0, the clients connect. Then there is an
    /// upgrade in each odd one, and none in each even one, to compare with.
    period: AtomicUsize,
    /// The longest round trips of each client, by period.
    longest: Mutex<Vec<Vec<Duration>>>,
    /// New connections that were answered.
    answered: AtomicUsize,
}

impl Observations {
    /// A client with one connection, which sends messages and receives them again.
    fn stay(&self, address: SocketAddr, seed: usize) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // So many connections at once overflow the upstream's queue, and some are tried again
        // after a second.
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        self.connected.fetch_add(1, Relaxed);
        let mut longest = Vec::new();
        let wait_ms = number("HAUL_TEST_WAIT_MS", 100);
        for round in 0.. {
            if self.is_over.load(Relaxed) {
                break;
            }
            let message = [(seed + round) as u8; MESSAGE_BYTES];
            let mut received = [0; MESSAGE_BYTES];
            let period = self.period.load(Relaxed);
            longest.resize(period + 1, Duration::ZERO);
            let started = Instant::now();
            stream.write_all(&message).unwrap();
            stream.read_exact(&mut received).unwrap();
            assert_eq!(message, received);
            longest[period] = started.elapsed().max(longest[period]);
            self.round_trips.fetch_add(1, Relaxed);
            // Clients that wait equally long would come all at once after a pause, for ever.
            let spread_ms = (seed * 7919 + round * 104_729) % wait_ms;
            thread::sleep(Duration::from_millis((wait_ms / 2 + spread_ms) as u64));
        }
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the stream ends, and is not reset");
        self.longest.lock().unwrap().push(longest);
    }

    /// A client with a new connection for each message.
    fn come_and_go(&self, address: SocketAddr) {
        while !self.is_over.load(Relaxed) {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(b"x").unwrap();
            stream.read_exact(&mut [0]).unwrap();
            self.answered.fetch_add(1, Relaxed);
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The longest round trips of the clients in the periods with or without upgrades: in one of them,
/// and in all.
fn summarize(clients: &[Vec<Duration>], is_upgraded: bool) -> String {
    let of = |client: &[Duration]| {
        let first = if is_upgraded { 1 } else { 2 };
        let periods = client.iter().skip(first).step_by(2).copied();
        // A client that waited all the time has none in the period.
        periods.filter(|longest| !longest.is_zero()).collect::<Vec<_>>()
    };
    let at = |mut times: Vec<Duration>, part: usize| {
        times.sort_unstable();
        times.get(times.len() * part / 100).copied().unwrap_or_default()
    };
    let each: Vec<_> = clients.iter().flat_map(|client| of(client)).collect();
    let longest: Vec<_> =
        clients.iter().filter_map(|client| of(client).into_iter().max()).collect();
    format!(
        "in each {:?} (median), {:?} (p99), the longest of each client {:?} (median), {:?} (p99)",
        at(each.clone(), 50),
        at(each, 99),
        at(longest.clone(), 50),
        at(longest, 99)
    )
}

/// The log has a line for each of so many connections, all of which were complete.
fn assert_logged(log: &Path, connections: usize) {
    let lines = std::fs::read_to_string(log).unwrap();
    let incomplete: Vec<_> = lines.lines().filter(|line| !line.contains("\"complete\"")).collect();
    assert!(incomplete.is_empty(), "{incomplete:?}");
    assert_eq!(lines.lines().count(), connections);
}

/// Ends the clients also when an assertion fails: the scope waits for them.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends back what it receives.
fn serve_echo(listener: &TcpListener) {
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        let echo = move || {
            let (mut reader, mut writer) = (&stream, &stream);
            let mut buffer = [0; MESSAGE_BYTES];
            // A client that is killed by a failing test resets its connection.
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                let _ = writer.write_all(&buffer[..count]);
            }
            let _ = stream.shutdown(Shutdown::Write);
        };
        thread::Builder::new().stack_size(STACK_BYTES).spawn(echo).unwrap();
    }
}

#[test]
fn reloads_and_upgrades_are_not_noticed_by_busy_clients() {
    let clients = number("HAUL_TEST_CLIENTS", 100);
    let upgrades = number("HAUL_TEST_UPGRADES", 4);
    let folder = tempfile::tempdir().unwrap();
    let (config, log) = (folder.path().join("proxy.toml"), folder.path().join("log"));
    let control = folder.path().join("control");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap();
    thread::spawn(move || serve_echo(&listener));
    // A port that is free: every process is given the same address.
    let address = TcpListener::bind("127.0.0.3:0").unwrap().local_addr().unwrap();
    let write_config = |balance: &str| {
        let next = folder.path().join("next");
        let text = format!(
            "listen = [\"{address}\"]\nto = [\"{upstream}\"]\ncontrol = {control:?}\n\
             access-log = {log:?}\nbalance = \"{balance}\"\n"
        );
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, &config).unwrap();
    };
    write_config("round-robin");
    let start = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
        start_proxy(command.args(["proxy", "--config"]).arg(&config).args(arguments))
    };
    let mut proxy = start(&[]);
    let observations = Observations::default();
    let mut ended_after = Vec::new();
    thread::scope(|scope| {
        let observations = &observations;
        let _over = SetOnDrop(&observations.is_over);
        scope.spawn(|| observations.come_and_go(address));
        for seed in 0..clients {
            let stay = move || observations.stay(address, seed);
            thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, stay).unwrap();
        }
        wait_until("every client is connected", || observations.connected.load(Relaxed) == clients);
        thread::sleep(SETTLING_TIME);
        for number in 0..upgrades {
            observations.period.fetch_add(1, Relaxed);
            let started = Instant::now();
            write_config(["least-connections", "source-address"][number % 2]);
            proxy.signal(Signal::HUP);
            proxy.wait_for("the configuration was reloaded");
            let next = start(&["--upgrade"]);
            let upgraded = Instant::now();
            let messages = std::mem::replace(&mut proxy, next).join();
            ended_after.push(upgraded.elapsed());
            assert!(messages.contains("another process has taken over"), "{messages}");
            thread::sleep(Duration::from_millis(200));
            observations.period.fetch_add(1, Relaxed);
            thread::sleep(started.elapsed());
        }
    });
    proxy.finish();
    let (round_trips, answered) =
        (observations.round_trips.into_inner(), observations.answered.into_inner());
    assert!(round_trips > clients * upgrades && answered > upgrades);
    let longest = observations.longest.into_inner().unwrap();
    println!(
        "{clients} clients, {upgrades} upgrades and reloads: {round_trips} round trips, \
         {answered} new connections; the old process ended after {:?} at most\n\
         round trips with an upgrade: {}\nin as much time without one: {}",
        ended_after.iter().max(),
        summarize(&longest, true),
        summarize(&longest, false)
    );
    assert_logged(&log, clients + answered);
}

/// The new process has a lower limit of open files than the old one needs, as from another shell.
#[test]
fn an_upgrade_without_enough_descriptors_does_not_begin() {
    const CLIENTS: usize = 150;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap().to_string();
    let command = |descriptors: usize| {
        let script = format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"");
        let mut command = Command::new("bash");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_haul"), "proxy", "--to", &upstream]);
        command.args(["--listen", "127.0.0.1:0", "--control"]).arg(&control);
        command
    };
    let old = ProxyProcess::start(&mut command(1000));
    let mut pairs: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let client = TcpStream::connect(&old.address).unwrap();
            (client, listener.accept().unwrap().0)
        })
        .collect();
    let output = command(200).arg("--upgrade").output().unwrap();
    let transcript = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert!(transcript.contains(&format!("it has {CLIENTS} clients")), "{transcript}");
    let new = ProxyProcess::start(command(1000).arg("--upgrade"));
    for (client, server) in &mut pairs {
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
    }
    drop(pairs);
    old.join();
    new.finish();
}

/// A proxy at a Unix socket and with a control socket in this folder.
fn proxy_in(folder: &Path, upstream: &TcpListener) -> Command {
    let listen = format!("unix:{}", folder.join("socket").display());
    let to = upstream.local_addr().unwrap().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.args(["proxy", "--listen", &listen, "--to", &to, "--control"]);
    command.arg(folder.join("control"));
    command
}

/// A process that is killed at the end.
struct Successor(Child);

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts an upgrade, which the end of the old process may disturb.
fn start_upgrade(folder: &Path, upstream: &TcpListener) -> Successor {
    let mut command = proxy_in(folder, upstream);
    command.arg("--upgrade").stdin(Stdio::null()).stderr(Stdio::piped());
    Successor(command.spawn().unwrap())
}

/// Waits until a client is served; the messages of the process if it ended instead.
fn wait_until_served(
    folder: &Path,
    upstream: &TcpListener,
    successor: &mut Successor,
) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    upstream.set_nonblocking(true).unwrap();
    let mut client = None;
    loop {
        // The file of the killed process refuses clients until the new process replaces it.
        client = client.or_else(|| UnixStream::connect(folder.join("socket")).ok());
        if let (Some(mut client), Ok((mut server, _))) = (client.as_ref(), upstream.accept()) {
            client.write_all(b"x").unwrap();
            server.set_nonblocking(false).unwrap();
            server.read_exact(&mut [0]).unwrap();
            return Ok(());
        }
        if successor.0.try_wait().unwrap().is_some() {
            let mut messages = String::new();
            successor.0.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
            return Err(messages);
        }
        assert!(Instant::now() < deadline, "no process accepts clients");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The old process hangs, and is killed before it answers.
#[test]
fn a_process_that_is_killed_before_it_answers_is_replaced() {
    for wait_ms in [100, 1000, 5000] {
        let folder = tempfile::tempdir().unwrap();
        let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
        let old = ProxyProcess::start(&mut proxy_in(folder.path(), &upstream));
        old.wait_for("accepting clients");
        old.signal(Signal::STOP);
        let mut successor = start_upgrade(folder.path(), &upstream);
        // The kernel connects the new process to the control socket, whose process is stopped.
        thread::sleep(Duration::from_millis(wait_ms));
        old.signal(Signal::KILL);
        // Until its end, the kernel connects clients to the old process.
        drop(old);
        match wait_until_served(folder.path(), &upstream, &mut successor) {
            Ok(()) => return,
            // On a busy machine the new process connects too late.
            Err(messages) => assert!(messages.contains("Connection refused"), "{messages}"),
        }
    }
    panic!("no new process connected in time");
}

/// The old process is killed at some time during the upgrade. If the new process began to take
/// over, the new process accepts clients afterwards.
#[test]
fn a_process_that_is_killed_during_an_upgrade_is_replaced() {
    let mut replaced = 0;
    for delay_us in (0..40).map(|step| step * 500) {
        let (folder, upstream) =
            (tempfile::tempdir().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let old = ProxyProcess::start(&mut proxy_in(folder.path(), &upstream));
        old.wait_for("accepting clients");
        let mut successor = start_upgrade(folder.path(), &upstream);
        thread::sleep(Duration::from_micros(delay_us));
        old.signal(Signal::KILL);
        // A client of the old process is lost, so the first client comes after its end.
        drop(old);
        match wait_until_served(folder.path(), &upstream, &mut successor) {
            Ok(()) => replaced += 1,
            // The new process connects after the end of the old process.
            Err(messages) => {
                let is_refused = messages.contains("Connection refused");
                assert!(is_refused, "killed after {delay_us} us: {messages}");
            }
        }
    }
    assert!(replaced > 0, "every new process started after the end of the old process");
}
