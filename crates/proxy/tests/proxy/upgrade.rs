//! A second proxy takes over the sockets and connections of a running one.

use crate::common::{LIMIT, Proxy, accept, lab, listen, pattern, upstream};
use haul_lab::Lab;
use haul_proxy::{CheckConfig, Config, ListenerConfig, Server};
use haul_server::command_socket::send_command;
use haul_server::fd_channel::FdChannel;
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A proxy with a control socket, and its upstream.
pub struct Upgradable {
    pub proxy: Proxy,
    pub listener: TcpListener,
    pub control: PathBuf,
    pub folder: TempDir,
}

impl Upgradable {
    pub fn start(configure: impl FnOnce(&mut Config)) -> Self {
        Self::start_in(lab(), configure)
    }

    pub fn start_in(lab: Lab, configure: impl FnOnce(&mut Config)) -> Self {
        let listener = listen(&lab);
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let proxy = Proxy::start(lab, [upstream(&listener)], |config| {
            config.reporting.control = Some(control.clone());
            config.process.workers = Some(2);
            configure(config);
        });
        Self { proxy, listener, control, folder }
    }

    /// Starts a second proxy that takes over, with the same log.
    pub fn upgrade(&self) -> Successor {
        Successor::start(&self.proxy.lab, &self.proxy.config)
    }
}

/// A proxy that has taken over.
pub struct Successor {
    pub handle: haul_proxy::Handle,
    pub thread: JoinHandle<()>,
}

impl Successor {
    pub fn start(lab: &Lab, config: &Config) -> Self {
        let mut config = config.clone();
        config.process.upgrades = true;
        let start = || {
            let server = Server::new(&config).unwrap();
            let handle = server.handle();
            Self { handle, thread: thread::spawn(move || server.run().unwrap()) }
        };
        lab.sender.run(start).unwrap()
    }

    /// Waits until the proxy has ended by itself.
    pub fn join(self) {
        self.thread.join().unwrap();
    }

    pub fn finish(self) {
        self.handle.drain();
        self.thread.join().unwrap();
    }
}

/// A proxy, and those that take over one after another.
pub struct Succession {
    pub address: SocketAddr,
    pub config: Config,
    first: Option<Proxy>,
    kept: Option<(Lab, TempDir)>,
    current: Option<Successor>,
}

impl Succession {
    pub fn new(proxy: Proxy) -> Self {
        let (address, config) = (proxy.address, proxy.config.clone());
        Self { address, config, first: Some(proxy), kept: None, current: None }
    }

    pub fn lab(&self) -> &Lab {
        let lab = self.first.as_ref().map(|proxy| &proxy.lab);
        lab.or(self.kept.as_ref().map(|(lab, _)| lab)).unwrap()
    }

    /// Starts another proxy, which takes over, and calls `meanwhile` before it waits for the end of
    /// the one before.
    pub fn upgrade(&mut self, meanwhile: impl FnOnce(&Lab)) {
        let next = Successor::start(self.lab(), &self.config);
        meanwhile(self.lab());
        if let Some(old) = self.current.replace(next) {
            old.join();
        } else {
            let (_, lab, log_folder) = self.first.take().unwrap().join();
            self.kept = Some((lab, log_folder));
        }
    }

    /// Ends the last proxy, and returns the lines of all logs. There was an upgrade.
    pub fn finish(self) -> Vec<Value> {
        self.current.unwrap().finish();
        read_log(&self.kept.unwrap().1.path().join("log"))
    }
}

pub fn read_log(path: &Path) -> Vec<Value> {
    let log = std::fs::read_to_string(path).unwrap();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Sends until pipes and sockets are full, and returns the number of bytes.
fn fill(stream: &TcpStream, content: &[u8]) -> usize {
    stream.set_nonblocking(true).unwrap();
    let (mut sent, mut attempts) = (0, 0);
    while attempts < 50 {
        if let Ok(count) = (&*stream).write(&content[sent..]) {
            (sent, attempts) = (sent + count, 0);
        } else {
            attempts += 1;
            thread::sleep(Duration::from_millis(2));
        }
    }
    assert!(sent < content.len(), "all of it has room");
    sent
}

/// Waits until the list of connections has a value.
pub fn wait_for(control: &Path, is_there: impl Fn(&Value) -> bool) -> Value {
    wait_for_answer(control, "connections", is_there)
}

/// Waits until a command's answer has a value.
pub fn wait_for_answer(control: &Path, command: &str, is_there: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = send_command(control, command);
        let answer = answer.ok().and_then(|text| serde_json::from_str(&text).ok());
        if let Some(answer) = answer.filter(|answer| is_there(answer)) {
            return answer;
        }
        assert!(Instant::now() < deadline, "what is waited for does not happen");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a handover has succeeded or failed: no process carries out commands before.
pub fn wait_for_takeover(control: &Path, listener: &TcpListener) {
    let command = format!("weight {} default", listener.local_addr().unwrap());
    let deadline = Instant::now() + LIMIT;
    loop {
        let answer = send_command(control, &command).unwrap();
        if answer.contains("changed") {
            return;
        }
        assert!(answer.contains("another process is taking over"), "{answer}");
        assert!(Instant::now() < deadline);
    }
}

pub fn bytes(direction: &Value) -> u64 {
    direction["spliced_bytes"].as_u64().unwrap() + direction["copied_bytes"].as_u64().unwrap()
}

/// A weight of the operator outlasts an upgrade to another configuration, which a check tells.
#[test]
fn an_upgrade_warns_of_weights_of_the_operator() {
    let upgradable = Upgradable::start(|_| {});
    let name = upgradable.listener.local_addr().unwrap();
    send_command(&upgradable.control, &format!("weight {name} 7")).unwrap();
    let mut config = upgradable.proxy.config.clone();
    (config.process.upgrades, config.process.checks_only) = (true, true);
    config.groups[0].upstreams[0].weight = 3;
    let checked = upgradable.proxy.lab.sender.run(move || Server::new(&config).unwrap()).unwrap();
    let is_weight = |caveat: &String| caveat.contains("keeps the weight 7 of haul proxy control");
    assert!(checked.caveats().iter().any(is_weight), "{:?}", checked.caveats());
    drop(checked);
    upgradable.proxy.finish();
}

/// The lines of four connections have what both processes have forwarded: small messages were
/// copied, and `sent` bytes at once spliced.
fn check_log_of_both(log: &[Value], sent: u64) {
    let of = |line: &Value| bytes(&line["to_upstream"]);
    let mut to_upstream: Vec<_> = log.iter().map(of).collect();
    to_upstream.sort_unstable();
    assert_eq!(to_upstream, [3, 7, 11, sent], "{log:?}");
    for line in log {
        assert_eq!(line["end"], "complete", "{line}");
        let spliced = line["to_upstream"]["spliced_bytes"].as_u64().unwrap();
        assert!(if of(line) == sent { spliced > sent / 2 } else { spliced == 0 }, "{line}");
        assert_eq!(line["to_client"]["spliced_bytes"], 0, "{line}");
    }
}

#[test]
fn established_connections_go_on_in_another_process() {
    let upgradable = Upgradable::start(|_| {});
    let mut idle = upgradable.proxy.connect();
    idle.write_all(b"before").unwrap();
    let mut idle_server = accept(&upgradable.listener);
    idle_server.read_exact(&mut [0; 6]).unwrap();
    // A client whose stream has ended, and that still receives.
    let mut ended = upgradable.proxy.connect();
    ended.write_all(b"request").unwrap();
    ended.shutdown(Shutdown::Write).unwrap();
    let mut ended_server = accept(&upgradable.listener);
    let mut request = String::new();
    ended_server.read_to_string(&mut request).unwrap();
    assert_eq!(request, "request");
    // One whose upstream does not read.
    let stalled = upgradable.proxy.connect();
    let stalled_server = accept(&upgradable.listener);
    let content = pattern(1, 64 << 20);
    let sent = fill(&stalled, &content);

    let name = upgradable.listener.local_addr().unwrap();
    send_command(&upgradable.control, &format!("weight {name} 7")).unwrap();
    let before = wait_for(&upgradable.control, |_| true)["connections"].clone();
    let successor = upgradable.upgrade();
    // The first one ends by itself.
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    let (address, lab, log_folder) = proxy.join();
    let has_all = |answer: &Value| answer["connections"].as_array().unwrap().len() == 3;
    let after = wait_for(&control, has_all)["connections"].clone();
    for (before, after) in before.as_array().unwrap().iter().zip(after.as_array().unwrap()) {
        for field in ["client", "listener", "upstream", "upstream_address", "source", "group"] {
            assert!(before[field].is_string() && before[field] == after[field], "{after}");
        }
        assert_eq!(before["id"], after["id"]);
        assert!(before["age_ms"].as_f64() < after["age_ms"].as_f64());
    }
    let upstreams: Value =
        serde_json::from_str(&send_command(&control, "upstreams").unwrap()).unwrap();
    assert_eq!(upstreams["upstreams"][0]["weight"], 7);
    assert_eq!(upstreams["upstreams"][0]["open_connections"], 3);

    // All three go on.
    idle.write_all(b"after").unwrap();
    let mut received = [0; 5];
    idle_server.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"after");
    ended_server.write_all(b"response").unwrap();
    drop(ended_server);
    let mut response = String::new();
    ended.read_to_string(&mut response).unwrap();
    assert_eq!(response, "response");
    stalled.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    (&stalled_server).read_to_end(&mut received).unwrap();
    assert!(received == content[..sent], "the stream is the same");
    // New clients are accepted, at the same address.
    let mut new = lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
    new.write_all(b"new").unwrap();
    let mut new_server = accept(&listener);
    new_server.read_exact(&mut [0; 3]).unwrap();
    drop((idle, idle_server, stalled, stalled_server, new, new_server));
    successor.finish();
    check_log_of_both(&read_log(&log_folder.path().join("log")), sent as u64);
    assert!(!control.exists());
}

/// A new process needs three failed checks to find an upstream down.
#[test]
fn an_upstream_that_is_down_is_down_in_the_next_process() {
    let check_every = |interval| Some(CheckConfig::new(interval));
    let every_20_ms = check_every(Duration::from_millis(20));
    let upgradable = Upgradable::start(|config| config.groups[0].check = every_20_ms);
    let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
    drop(listener);
    let is_up = |answer: &Value| answer["upstreams"][0]["is_up"].as_bool();
    wait_for_answer(&control, "upstreams", |answer| is_up(answer) == Some(false));
    let mut config = proxy.config.clone();
    // The first check would be after an hour.
    config.groups[0].check = check_every(Duration::from_secs(3600));
    let second = Successor::start(&proxy.lab, &config);
    let (_, lab, _log_folder) = proxy.join();
    let answer = wait_for_answer(&control, "upstreams", |answer| is_up(answer).is_some());
    assert_eq!(is_up(&answer), Some(false), "{answer}");
    // Without a check nothing would find it up again.
    config.groups[0].check = None;
    let third = Successor::start(&lab, &config);
    second.join();
    let answer = wait_for_answer(&control, "upstreams", |answer| is_up(answer).is_some());
    assert_eq!(is_up(&answer), Some(true), "{answer}");
    third.finish();
}

#[test]
fn a_proxy_that_fails_to_start_takes_nothing() {
    let upgradable = Upgradable::start(listen_at_a_unix_socket);
    let mut config = upgradable.proxy.config.clone();
    config.process.upgrades = true;
    config.sockets.congestion = Some("no-such-control".into());
    let start = || Server::new(&config).map(|_| ()).unwrap_err().to_string();
    let error = upgradable.proxy.lab.sender.run(start).unwrap();
    assert!(error.contains("no-such-control"), "{error}");
    let mut client = upgradable.proxy.connect();
    client.write_all(b"hello").unwrap();
    accept(&upgradable.listener).read_exact(&mut [0; 5]).unwrap();
    let mut local = UnixStream::connect(upgradable.folder.path().join("listen")).unwrap();
    local.write_all(b"hello").unwrap();
    accept(&upgradable.listener).read_exact(&mut [0; 5]).unwrap();
    wait_for(&upgradable.control, |answer| answer["connections"].is_array());
    let mut other = upgradable.proxy.config.clone();
    other.process.upgrades = true;
    other.reporting.control = Some(upgradable.folder.path().join("none"));
    let start = || Server::new(&other).map(|_| ()).unwrap_err().to_string();
    let error = upgradable.proxy.lab.sender.run(start).unwrap();
    assert!(error.contains("start without --upgrade"), "{error}");
    other.reporting.control = None;
    assert!(Server::new(&other).is_err_and(|error| error.is_bad_input()));
}

/// The kernel lets nothing change it for connections to come.
#[test]
fn an_upgrade_says_that_clients_keep_the_congestion_control() {
    let upgradable = Upgradable::start(|config| config.sockets.congestion = Some("reno".into()));
    let mut config = upgradable.proxy.config.clone();
    config.process.upgrades = true;
    let file = "/proc/sys/net/ipv4/tcp_congestion_control";
    let default = upgradable.proxy.lab.sender.run(|| std::fs::read_to_string(file).unwrap());
    let is_other = default.unwrap().trim() != "reno";
    for (wanted, is_named) in [(Some("reno"), false), (Some("cubic"), true), (None, is_other)] {
        config.sockets.congestion = wanted.map(Into::into);
        let start = || Server::new(&config).unwrap().caveats().to_vec();
        let caveats = upgradable.proxy.lab.sender.run(start).unwrap();
        // The old process goes on without the new one.
        wait_for_takeover(&upgradable.control, &upgradable.listener);
        let is_about = |text: &String| text.contains("keep the congestion control reno");
        assert_eq!(caveats.iter().any(is_about), is_named, "{caveats:?}");
    }
    upgradable.proxy.finish();
}

/// A typing error in the configuration would close an address without a word.
#[test]
fn an_upgrade_names_the_addresses_that_it_gives_up() {
    let upgradable = Upgradable::start(listen_at_a_unix_socket);
    let mut config = upgradable.proxy.config.clone();
    (config.process.upgrades, config.process.checks_only) = (true, true);
    for is_given_up in [false, true] {
        config.listeners.truncate(if is_given_up { 1 } else { 2 });
        let start = || Server::new(&config).unwrap().caveats().to_vec();
        let caveats = upgradable.proxy.lab.sender.run(start).unwrap();
        wait_for_takeover(&upgradable.control, &upgradable.listener);
        let path = upgradable.folder.path().join("listen");
        let expected = format!("also listens at unix:{}, and this one", path.display());
        assert_eq!(caveats.concat().contains(&expected), is_given_up, "{caveats:?}");
    }
    upgradable.proxy.finish();
}

/// Adds a Unix socket next to the control socket.
pub fn listen_at_a_unix_socket(config: &mut Config) {
    let path = config.reporting.control.as_ref().unwrap().with_file_name("listen");
    let address = format!("unix:{}", path.display()).parse().unwrap();
    config.listeners.push(ListenerConfig::new(address, Some("servers")));
}

#[test]
fn a_unix_socket_is_taken_over_and_removed_by_the_last_process() {
    let upgradable = Upgradable::start(listen_at_a_unix_socket);
    let successor = upgradable.upgrade();
    let path = upgradable.folder.path().join("listen");
    let Upgradable { proxy, listener, control, folder } = upgradable;
    let (_, _lab, _log_folder) = proxy.join();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"hello").unwrap();
    accept(&listener).read_exact(&mut [0; 5]).unwrap();
    wait_for(&control, |answer| answer["connections"].is_array());
    drop(client);
    successor.finish();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Asks for a handover, as a new process does.
pub fn ask(control: &Path) -> FdChannel {
    let mut stream = UnixStream::connect(control).unwrap();
    writeln!(stream, "upgrade").unwrap();
    let channel = FdChannel::receive_through(&stream).unwrap();
    channel.set_timeouts(Some(LIMIT), Some(LIMIT)).unwrap();
    channel
}

/// Plays a new process until it says that it runs.
pub fn agree(control: &Path) -> FdChannel {
    let channel = agree_without_answer(control);
    channel.send(br#"{"adopted":0}"#, &[]).unwrap();
    channel
}

/// Plays a new process until the old one has agreed.
pub fn agree_without_answer(control: &Path) -> FdChannel {
    let channel = ask(control);
    while receive_text(&channel) != "\"ready\"" {}
    channel.send(br#"{"started":{"listeners":[]}}"#, &[]).unwrap();
    while !receive_text(&channel).contains("agreed") {}
    channel
}

/// Receives a message, and drops the sockets that come with it.
pub fn receive_text(channel: &FdChannel) -> String {
    String::from_utf8(channel.receive().unwrap().unwrap().bytes).unwrap()
}

/// An upstream that an operator has drained or disabled stays so, and can be enabled again.
#[test]
fn what_an_operator_has_set_holds_in_the_next_process() {
    for (command, administration) in [("drain", "draining"), ("disable", "disabled")] {
        let upgradable = Upgradable::start(|config| config.limits.connect_attempts_max = 1);
        let name = upgradable.listener.local_addr().unwrap();
        send_command(&upgradable.control, &format!("{command} {name}")).unwrap();
        let successor = upgradable.upgrade();
        let Upgradable { proxy, listener, control, folder: _folder } = upgradable;
        let (address, lab, _log_folder) = proxy.join();
        let upstreams = wait_for_answer(&control, "upstreams", |_| true);
        assert_eq!(upstreams["upstreams"][0]["administration"], administration);
        let connect = || lab.receiver.run(|| TcpStream::connect(address)).unwrap();
        // The reset may arrive before the connection is reported as established.
        let read = connect().and_then(|mut client| {
            client.set_read_timeout(Some(LIMIT))?;
            client.read(&mut [0])
        });
        assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
        send_command(&control, &format!("enable {name}")).unwrap();
        let mut client = connect().unwrap();
        client.write_all(b"x").unwrap();
        accept(&listener).read_exact(&mut [0]).unwrap();
        drop(client);
        successor.finish();
    }
}

#[test]
fn a_reload_during_a_handover_is_refused() {
    let upgradable = Upgradable::start(|_| {});
    let reload = || upgradable.proxy.handle.reload(&upgradable.proxy.config);
    let channel = ask(&upgradable.control);
    assert!(matches!(reload(), Err(haul_proxy::Error::HandedOver)));
    drop(channel);
    // The end of a handover that was none is waited for.
    reload().unwrap();
    // It would be lost with this process.
    let _channel = agree(&upgradable.control);
    for _ in 0..2 {
        assert!(matches!(reload(), Err(haul_proxy::Error::HandedOver)));
        thread::sleep(Duration::from_millis(100));
    }
    upgradable.proxy.finish();
}

/// Clients that send and receive all the time, over one connection or many, see neither a reset nor
/// a refusal, and no byte is lost.
#[test]
fn busy_connections_notice_nothing_of_many_upgrades() {
    const CLIENTS: usize = 200;
    const UPGRADES: usize = 10;
    /// The sizes of the clients' messages.
    const SIZES: [usize; 3] = [64, 4 << 10, 200 << 10];
    let upgradable = Upgradable::start(|_| {});
    let is_over = AtomicBool::new(false);
    let is_server_over = Arc::new(AtomicBool::new(false));
    let listener = upgradable.listener.try_clone().unwrap();
    let echo = {
        let is_over = Arc::clone(&is_server_over);
        thread::spawn(move || serve_echo(&listener, &is_over))
    };
    let (rounds, longest) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let Upgradable { proxy, listener: _, control, folder: _folder } = upgradable;
    let address = proxy.address;
    let log = thread::scope(|scope| {
        let _over = [SetOnDrop(&is_over), SetOnDrop(&is_server_over)];
        for number in 0..CLIENTS {
            let (is_over, rounds, longest) = (&is_over, &rounds, &longest);
            // The clients are on the other host.
            let connect = move || TcpStream::connect(address).unwrap();
            let mut client = proxy.lab.receiver.run(connect).unwrap();
            let content = pattern(number as u64, SIZES[number % SIZES.len()]);
            scope.spawn(move || {
                let pause = send_and_receive(&mut client, &content, rounds, is_over);
                longest.lock().unwrap().push(pause);
            });
        }
        let mut succession = Succession::new(proxy);
        for _ in 0..UPGRADES {
            // A new client while the sockets change hands.
            succession.upgrade(|lab| {
                drop(lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap());
            });
        }
        is_over.store(true, Relaxed);
        // The clients end before the proxy, and before the server: it closes the last connections.
        wait_for(&control, |answer| answer["connections"].as_array().unwrap().is_empty());
        succession.finish()
    });
    echo.join().unwrap();
    assert!(rounds.load(Relaxed) > CLIENTS * UPGRADES, "the clients were busy");
    check_echoes(&log, CLIENTS + UPGRADES);
    let mut longest = longest.into_inner().unwrap();
    longest.sort_unstable();
    let [median, last] = [CLIENTS / 2, CLIENTS - 1].map(|at| longest[at]);
    println!("the longest round trip of each client: {median:?} (median), {last:?} at most");
}

/// Checks the log of clients that received all bytes that they sent. Nearly all bytes belong to
/// large messages, which are spliced before and after an upgrade.
fn check_echoes(log: &[Value], connections: usize) {
    assert_eq!(log.len(), connections);
    let (mut spliced, mut total) = (0, 0);
    for line in log {
        assert_eq!(line["end"], "complete", "{line}");
        let sent = bytes(&line["to_upstream"]);
        assert_eq!(sent, bytes(&line["to_client"]), "{line}");
        spliced += line["to_upstream"]["spliced_bytes"].as_u64().unwrap();
        total += sent;
    }
    println!("{spliced} of {total} bytes were spliced to the upstream");
    // A direction begins with copies, also in another process. One that only copied after an
    // upgrade would have spliced a tenth.
    assert!(spliced > total / 4);
}

/// The kernel tells only one of the processes that share a socket of each client.
#[test]
fn a_client_that_connects_during_an_upgrade_is_accepted_before_another_comes() {
    const UPGRADES: u32 = 20;
    let Upgradable { proxy, listener, control: _, folder: _folder } = Upgradable::start(|_| {});
    let mut succession = Succession::new(proxy);
    let address = succession.address;
    for number in 0..UPGRADES {
        succession.upgrade(|lab| {
            thread::sleep(Duration::from_micros(100) * (number % 4));
            let client = lab.receiver.run(|| TcpStream::connect(address)).unwrap().unwrap();
            drop((accept(&listener), client));
        });
    }
    succession.finish();
}

/// Sends content and receives it again, until it is over. Returns the longest time that took.
fn send_and_receive(
    client: &mut TcpStream,
    content: &[u8],
    rounds: &AtomicUsize,
    is_over: &AtomicBool,
) -> Duration {
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let mut longest = Duration::ZERO;
    while !is_over.load(Relaxed) {
        let started = Instant::now();
        let mut writer = client.try_clone().unwrap();
        let mut received = vec![0; content.len()];
        thread::scope(|scope| {
            scope.spawn(|| writer.write_all(content).unwrap());
            client.read_exact(&mut received).unwrap();
        });
        assert!(received == content);
        longest = longest.max(started.elapsed());
        rounds.fetch_add(1, Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
    longest
}

/// Ends the clients also when an assertion fails: the scope waits for them.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Sends back what it receives, on a thread for each connection.
fn serve_echo(listener: &TcpListener, is_over: &AtomicBool) {
    listener.set_nonblocking(true).unwrap();
    let mut threads = Vec::new();
    while !is_over.load(Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => threads.push(thread::spawn(move || {
                stream.set_nonblocking(false).unwrap();
                let (mut reader, mut writer) = (&stream, &stream);
                std::io::copy(&mut reader, &mut writer).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            })),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
}
