//! Programs from Debian under `haul run --watch`. The clients and servers of the tests count the
//! bytes that arrive, so the totals of the reports are compared with counts that share no code with
//! haul.
//!
//! Each server runs a second time without `--watch`, and every download is compared with the file.
//! `HAUL_TEST_DOWNLOADS=1000` makes 1,000 downloads from each server.

mod common {
    pub mod processes;
    pub mod program;
    pub mod running;
}

use common::processes::{children_of, is_running, wait_until};
use common::program::program;
use common::running::Running;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;
use tempfile::TempDir;

/// Length of the file that servers send: three pieces of Apache's mappings, and an odd rest.
const FILE_BYTES: usize = (12 << 20) + 12_345;
/// Downloads of the file from each server that is supervised.
const DOWNLOADS: usize = 3;
/// Downloads from each server without `HAUL_TEST_DOWNLOADS` and `--watch`.
const COMPARED_DOWNLOADS: usize = 24;
/// Clients that download at the same time.
const CLIENTS: usize = 4;
/// Smaller files, whose pieces have other sizes.
const SMALLER_FILES: [(&str, usize); 3] =
    [("100K", 100_000), ("500K", 500 << 10), ("5M", 5_000_001)];

/// A port that is free, below those that the kernel chooses for connections.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let lowest: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
    // Other test programs search from other ports.
    let first = 10_000 + (std::process::id() % 10_000) as u16;
    let ports = (first..lowest).chain(2000..first);
    let mut untaken = ports.skip(usize::from(NEXT.load(Relaxed)));
    untaken
        .find(|&port| {
            NEXT.fetch_add(1, Relaxed);
            TcpListener::bind(("127.0.0.1", port)).is_ok()
        })
        .expect("a free port")
}

/// A directory with the file `big` and smaller files, which every user may read.
fn served_directory() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut random = fastrand::Rng::with_seed(47);
    let bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(FILE_BYTES).collect();
    fs::write(folder.path().join("big"), &bytes).unwrap();
    for (name, length) in SMALLER_FILES {
        fs::write(folder.path().join(name), &bytes[length..2 * length]).unwrap();
    }
    folder
}

/// A program under `haul run`.
struct Supervised {
    haul: Running,
    report: std::path::PathBuf,
}

impl Supervised {
    fn start(options: &[&str], program: &Path, arguments: &[&OsStr], folder: &Path) -> Self {
        let report = folder.join("report.json");
        let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
        haul.arg("run").args(options).arg("--json").arg(&report).arg("--").arg(program);
        haul.args(arguments).current_dir(folder);
        let log = fs::File::create(folder.join("stderr")).unwrap();
        Self { haul: Running::start(haul.stderr(log)), report }
    }

    /// Waits until the program listens.
    fn wait_for(&mut self, port: u16) {
        wait_until(&format!("something listens at port {port}"), || {
            assert!(self.haul.0.try_wait().unwrap().is_none(), "haul run ended");
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
    }

    /// Stops the program, and returns the report. All processes end, also the broker.
    fn stop(self) -> Value {
        let processes = children_of(self.haul.0.id());
        assert!(!processes.is_empty());
        kill_process(Pid::from_child(&self.haul.0), Signal::TERM).unwrap();
        let report = self.end();
        wait_until("all processes ended", || !processes.iter().copied().any(is_running));
        report
    }

    /// Waits for the end of the program, and returns the report.
    fn end(mut self) -> Value {
        self.haul.0.wait().unwrap();
        serde_json::from_slice(&fs::read(&self.report).unwrap()).unwrap()
    }
}

/// Receives everything from a connection, and returns the bytes.
fn receive_all(mut connection: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    connection.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Downloads a file by HTTP, and returns the number of all bytes received, with the head.
fn download(port: u16, folder: &Path, name: &str) -> u64 {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = format!("GET /{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).unwrap();
    let bytes = receive_all(connection);
    assert!(bytes.ends_with(&fs::read(folder.join(name)).unwrap()), "{name}: other bytes");
    bytes.len() as u64
}

/// The share of the bytes that went by a method, in percent.
fn percent(report: &Value, method: &str) -> f64 {
    let rows = report["sent"].as_array().unwrap();
    let row = rows.iter().find(|row| row["method"] == method);
    row.map_or(0.0, |row| row["percent"].as_f64().unwrap())
}

fn assert_exact(report: &Value, bytes: u64) {
    let tcp = &report["tcp"];
    assert_eq!(tcp["bytes"].as_u64(), Some(bytes), "{tcp} {}", report["sent"]);
    let parts: u64 =
        ["seen_bytes", "unseen_bytes"].map(|part| tcp[part].as_u64().unwrap()).iter().sum();
    assert_eq!(parts, bytes);
    let rows = report["sent"].as_array().unwrap().iter();
    let rows: u64 = rows.map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(rows, tcp["seen_bytes"].as_u64().unwrap());
}

/// Runs a server, downloads the file, and checks that the report has every byte and the method.
fn check_server(server: &str, arguments: &[&str], folder: &Path, port: u16, method: &str) {
    let Some(server) = program(server) else { return };
    let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    let mut supervised = Supervised::start(&["--watch"], &server, &arguments, folder);
    supervised.wait_for(port);
    let received: u64 = (0..DOWNLOADS).map(|_| download(port, folder, "big")).sum();
    let report = supervised.stop();
    let (unseen, other) = (report["tcp"]["unseen_bytes"].as_u64(), percent(&report, method));
    println!("{}: {received} bytes, {other:.2} % {method}", server.display());
    assert_exact(&report, received);
    assert_eq!((unseen, other > 99.0), (Some(0), true), "{}", report["sent"]);
    assert!(
        report["warnings"]
            .as_array()
            .unwrap()
            .iter()
            .all(|warning| { warning["kind"] == "built-in-plan" }),
        "{}",
        report["warnings"]
    );
    compare_downloads(&server, &arguments, folder, port, method);
}

/// Runs a server under `haul run`, and compares every download with the file.
fn compare_downloads(server: &Path, arguments: &[&OsStr], folder: &Path, port: u16, method: &str) {
    let downloads = std::env::var("HAUL_TEST_DOWNLOADS")
        .map_or(COMPARED_DOWNLOADS, |number| number.parse().unwrap());
    let mut supervised = Supervised::start(&["--without=trial"], server, arguments, folder);
    supervised.wait_for(port);
    let next = AtomicUsize::new(0);
    let received: u64 = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    let mut received = 0;
                    loop {
                        let number = next.fetch_add(1, Relaxed);
                        if number >= downloads {
                            return received;
                        }
                        let smaller = SMALLER_FILES.get(number % (SMALLER_FILES.len() + 1));
                        received += download(port, folder, smaller.map_or("big", |file| file.0));
                    }
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    let report = supervised.stop();
    println!("{}: {downloads} identical downloads, {received} bytes", server.display());
    assert_exact(&report, received);
    // Apache's mappings are sent by sendfile, and the other servers do not map files.
    let is_elided = percent(&report, "elided") > 0.0;
    let maps_files = method == "copied-from-mapped-file";
    let reasons = report["not_elided"].as_array().unwrap().iter();
    let obstacle = reasons
        .filter_map(|row| row["reason"].as_str())
        .find(|reason| ["old-kernel", "no-broker", "no-leases", "no-file"].contains(reason));
    match obstacle {
        Some(obstacle) if maps_files && !is_elided => {
            eprintln!("SKIPPED: nothing can be elided here, because of {obstacle}");
        }
        _ => assert_eq!(is_elided, maps_files, "{report}"),
    }
}

/// Apache as Debian configures it, but for the port, the directory and the log.
fn check_apache(extra: &str, method: &str) {
    let folder = served_directory();
    let (root, port) = (folder.path().display(), free_port());
    let modules = ["mpm_event", "authz_core"]
        .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"));
    let configuration = format!(
        "{}ServerName localhost\nListen 127.0.0.1:{port}\nDocumentRoot {root}\n\
         PidFile {root}/pid\nErrorLog {root}/log\nUser www-data\nGroup www-data\n{extra}\n",
        modules.concat()
    );
    fs::write(folder.path().join("apache.conf"), configuration).unwrap();
    let file = folder.path().join("apache.conf").display().to_string();
    let arguments = ["-f", &file, "-D", "FOREGROUND"];
    check_server("apache2", &arguments, folder.path(), port, method);
}

#[test]
fn apache_copies_from_mapped_files_by_default() {
    check_apache("", "copied-from-mapped-file");
}

#[test]
fn apache_sends_files_by_sendfile_if_it_is_told_to() {
    check_apache("EnableSendfile On", "sendfile");
}

fn check_nginx(sendfile: &str, method: &str) {
    let folder = served_directory();
    let (root, port) = (folder.path().display(), free_port());
    let configuration = format!(
        "daemon off; worker_processes 2; pid {root}/pid; error_log {root}/log;\n\
         events {{}}\n\
         http {{ access_log off; sendfile {sendfile}; client_body_temp_path {root}/a; \
         proxy_temp_path {root}/b; fastcgi_temp_path {root}/c; uwsgi_temp_path {root}/d; \
         scgi_temp_path {root}/e;\n\
         server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n"
    );
    fs::write(folder.path().join("nginx.conf"), configuration).unwrap();
    let file = folder.path().join("nginx.conf").display().to_string();
    check_server("nginx", &["-c", &file], folder.path(), port, method);
}

#[test]
fn nginx_reads_and_writes_files_by_default() {
    check_nginx("off", "copied-from-file-read");
}

#[test]
fn nginx_sends_files_by_sendfile_if_it_is_told_to() {
    check_nginx("on", "sendfile");
}

#[test]
fn lighttpd_sends_files_by_sendfile() {
    let folder = served_directory();
    let (root, port) = (folder.path().display(), free_port());
    let configuration = format!(
        "server.document-root = \"{root}\"\nserver.port = {port}\nserver.bind = \"127.0.0.1\"\n"
    );
    fs::write(folder.path().join("lighttpd.conf"), configuration).unwrap();
    let file = folder.path().join("lighttpd.conf").display().to_string();
    check_server("lighttpd", &["-D", "-f", &file], folder.path(), port, "sendfile");
}

#[test]
fn a_server_in_python_reads_and_writes_files() {
    let (folder, port) = (served_directory(), free_port());
    let port_text = port.to_string();
    let arguments = ["-m", "http.server", "--bind", "127.0.0.1", &port_text];
    check_server("python3", &arguments, folder.path(), port, "copied-from-file-read");
}

#[test]
fn the_server_of_php_reads_and_writes_files() {
    let (folder, port) = (served_directory(), free_port());
    let address = format!("127.0.0.1:{port}");
    check_server("php", &["-S", &address], folder.path(), port, "copied-from-file-read");
}

/// A server that answers each request with the file, and counts what it receives.
struct Origin {
    port: u16,
    received: Arc<AtomicU64>,
}

impl Origin {
    fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let received = Arc::<AtomicU64>::default();
        let counter = Arc::clone(&received);
        let body = fs::read(folder.join("big")).unwrap();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (mut connection, counter) = (connection.unwrap(), Arc::clone(&counter));
                let mut head = [0; 4096];
                let bytes = connection.read(&mut head).unwrap_or(0);
                counter.fetch_add(bytes as u64, Relaxed);
                if bytes == 0 {
                    continue;
                }
                let status = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length:";
                let head = format!("{status} {}\r\n\r\n", body.len());
                let _ = connection
                    .write_all(head.as_bytes())
                    .and_then(|()| connection.write_all(&body));
                let _ = connection.shutdown(Shutdown::Write);
                let rest = io::copy(&mut connection, &mut io::sink()).unwrap_or(0);
                counter.fetch_add(rest, Relaxed);
            }
        });
        Self { port, received }
    }
}

/// Downloads the file through a proxy, and checks that the report has the bytes of both directions.
fn check_proxy(
    proxy: &str,
    arguments: &[&str],
    folder: &Path,
    port: u16,
    origin: &Origin,
) -> Option<Value> {
    let proxy = program(proxy)?;
    let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    let mut supervised = Supervised::start(&["--watch"], &proxy, &arguments, folder);
    supervised.wait_for(port);
    let received: u64 = (0..DOWNLOADS).map(|_| download(port, folder, "big")).sum();
    let report = supervised.stop();
    assert_exact(&report, received + origin.received.load(Relaxed));
    Some(report)
}

#[test]
fn haproxy_forwards_by_copying_or_by_splice() {
    for (option, method) in [("", "copied-from-socket-read"), ("option splice-response", "splice")]
    {
        let (folder, port) = (served_directory(), free_port());
        let origin = Origin::start(folder.path());
        let configuration = format!(
            "global\n nbthread 1\ndefaults\n mode tcp\n {option}\n timeout connect 5s\n \
             timeout client 60s\n timeout server 60s\n\
             listen a\n bind 127.0.0.1:{port}\n server s 127.0.0.1:{}\n",
            origin.port
        );
        fs::write(folder.path().join("haproxy.cfg"), configuration).unwrap();
        let file = folder.path().join("haproxy.cfg").display().to_string();
        let report = check_proxy("haproxy", &["-db", "-f", &file], folder.path(), port, &origin);
        if let Some(report) = report {
            // A part is spliced, depending on how much is in the sockets.
            assert!(percent(&report, method) > 50.0, "{}", report["sent"]);
        }
    }
}

#[test]
fn socat_forwards_in_forked_processes() {
    let (folder, port) = (served_directory(), free_port());
    let origin = Origin::start(folder.path());
    let listen = format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork");
    let connect = format!("TCP:127.0.0.1:{}", origin.port);
    if let Some(report) = check_proxy("socat", &[&listen, &connect], folder.path(), port, &origin) {
        let small = report["advice"].as_array().unwrap().iter();
        let small = small.filter(|advice| advice["kind"] == "small-sends").count();
        assert_eq!(small, 1, "{}", report["advice"]);
    }
}

/// Accepts one upload, answers it, and returns the number of bytes received.
fn accept_upload(listener: &TcpListener) -> u64 {
    let (mut connection, _) = listener.accept().unwrap();
    let mut received = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    let is_whole = |received: &[u8]| {
        let head = received.windows(4).position(|window| window == b"\r\n\r\n");
        head.is_some_and(|head| received.len() == head + 4 + FILE_BYTES)
    };
    while !is_whole(&received) {
        let bytes = connection.read(&mut buffer).unwrap();
        assert!(bytes > 0, "the upload ended after {} bytes", received.len());
        received.extend_from_slice(&buffer[..bytes]);
    }
    connection.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n").unwrap();
    received.len() as u64 + io::copy(&mut connection, &mut io::sink()).unwrap()
}

#[test]
fn an_upload_of_curl_is_counted() {
    let Some(curl) = program("curl") else { return };
    let folder = served_directory();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/up", listener.local_addr().unwrap());
    let arguments = ["-s", "-o", "/dev/null", "-H", "Expect:", "-T", "big", &url].map(OsStr::new);
    let supervised = Supervised::start(&["--watch"], &curl, &arguments, folder.path());
    let received = accept_upload(&listener);
    let report = supervised.end();
    assert_exact(&report, received);
    assert!(percent(&report, "copied-from-file-read") > 99.0, "{}", report["sent"]);
}

#[test]
fn redis_sends_from_its_own_memory() {
    let Some(redis) = program("redis-server") else { return };
    let (folder, port) = (served_directory(), free_port());
    let port_text = port.to_string();
    let arguments = ["--port", &port_text, "--bind", "127.0.0.1", "--save", ""].map(OsStr::new);
    let mut supervised = Supervised::start(&["--watch"], &redis, &arguments, folder.path());
    supervised.wait_for(port);
    let value = vec![7; 1 << 20];
    let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let set = format!("*3\r\n$3\r\nSET\r\n$1\r\na\r\n${}\r\n", value.len());
    connection.write_all(&[set.as_bytes(), &value, b"\r\n"].concat()).unwrap();
    let get = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n".repeat(10);
    connection.write_all(&[&get[..], b"*1\r\n$4\r\nQUIT\r\n"].concat()).unwrap();
    let received = receive_all(connection);
    let report = supervised.stop();
    assert_exact(&report, received.len() as u64);
    assert!(percent(&report, "copied-from-memory") > 99.0, "{}", report["sent"]);
}
