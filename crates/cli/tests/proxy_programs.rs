//! Programs from Debian through `haul proxy`, each with its own client.

mod common {
    pub mod program;
    pub mod running;
    pub mod ssh_server;
}

use common::program::program;
use common::running::Running;
use common::ssh_server::SshServer;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest wait of a test.
const LIMIT: Duration = Duration::from_secs(60);

/// The user and the group that own no files.
const UNPRIVILEGED_ID: u32 = 65534;

/// A port that is free.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Waits until a program listens.
fn wait_for(port: u16) {
    let deadline = Instant::now() + LIMIT;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "nothing listens at port {port}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A proxy to a port, and the port that it listens at.
fn proxy_to(port: u16, folder: &TempDir) -> (Running, u16) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_haul"));
    command.args(["proxy", "--listen", "127.0.0.1:0", "--to", &format!("127.0.0.1:{port}")]);
    command.arg("--access-log").arg(folder.path().join("log")).stderr(Stdio::piped());
    let mut proxy = Running::start(&mut command);
    let mut messages = BufReader::new(proxy.0.stderr.take().unwrap());
    let mut line = String::new();
    messages.read_line(&mut line).unwrap();
    let address = line.split_once("clients at ").and_then(|(_, rest)| rest.split_once(' '));
    let port = address.and_then(|(address, _)| address.rsplit_once(':')).unwrap().1;
    let port = port.parse().unwrap();
    // It would stop at a closed pipe.
    thread::spawn(move || std::io::copy(&mut messages, &mut std::io::sink()));
    (proxy, port)
}

/// Waits until the log of a proxy has so many bytes that were spliced, in both directions together.
fn wait_until_spliced(folder: &TempDir, bytes: u64) {
    let deadline = Instant::now() + LIMIT;
    let mut counts = [0; 2];
    while counts[0] < bytes {
        assert!(Instant::now() < deadline, "{counts:?} bytes were spliced and copied");
        thread::sleep(Duration::from_millis(50));
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        let lines: Vec<Value> =
            log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        counts = ["spliced_bytes", "copied_bytes"].map(|method| {
            let directions =
                lines.iter().flat_map(|line| [&line["to_upstream"], &line["to_client"]]);
            directions.map(|direction| direction[method].as_u64().unwrap()).sum::<u64>()
        });
    }
    println!("{counts:?} bytes were spliced and copied");
}

fn output(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
    output
}

/// A command that runs as this user, or as one that PostgreSQL accepts.
fn as_ordinary_user(program: &Path, folder: &Path) -> Command {
    let is_root = rustix::process::getuid().is_root();
    if !is_root {
        return Command::new(program);
    }
    chown(folder, Some(UNPRIVILEGED_ID), Some(UNPRIVILEGED_ID)).unwrap();
    let mut command = Command::new("setpriv");
    let ids = [format!("--reuid={UNPRIVILEGED_ID}"), format!("--regid={UNPRIVILEGED_ID}")];
    command.args(ids).args(["--clear-groups", "--"]).arg(program);
    command
}

#[test]
fn postgresql_answers_queries_and_copies_tables() {
    let (Some(initdb), Some(postgres), Some(pgbench), Some(psql)) =
        (program("initdb"), program("postgres"), program("pgbench"), program("psql"))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    let mut create = as_ordinary_user(&initdb, &data);
    output(create.args(["-A", "trust", "-U", "haul", "--no-sync", "-D"]).arg(&data));
    let port = free_port();
    let mut server = as_ordinary_user(&postgres, &data);
    server.arg("-D").arg(&data).args(["-h", "127.0.0.1", "-k", "", "-F", "-p"]);
    let _server = Running::start(server.arg(port.to_string()).stderr(Stdio::null()));
    wait_for(port);
    let (_proxy, port) = proxy_to(port, &folder);
    let port = port.to_string();
    let connection = ["-h", "127.0.0.1", "-p", &port, "-U", "haul"];
    let query = |text: &str| {
        let mut command = Command::new(&psql);
        let output = output(command.args(connection).args(["-Atc", text, "postgres"]));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let deadline = Instant::now() + LIMIT;
    // It listens before it accepts queries.
    while !Command::new(&psql)
        .args(connection)
        .args(["-c", "select 1", "postgres"])
        .output()
        .unwrap()
        .status
        .success()
    {
        assert!(Instant::now() < deadline, "it accepts no queries");
        thread::sleep(Duration::from_millis(50));
    }
    let rows = "generate_series(1, 20000) as i";
    query(&format!("create table t as select i, repeat(md5(i::text), 30) as x from {rows}"));
    // 20 MB to the client, and back.
    let table = folder.path().join("table");
    query(&format!("\\copy t to '{}'", table.display()));
    query("create table u (i int, x text)");
    query(&format!("\\copy u from '{}'", table.display()));
    assert_eq!(query("select count(*) from t join u using (i, x)"), "20000");
    output(Command::new(&pgbench).args(connection).args(["-i", "-q", "postgres"]));
    let mut bench = Command::new(&pgbench);
    bench.args(connection).args(["-c", "8", "-t", "50", "-n", "postgres"]);
    let printed = String::from_utf8(output(&mut bench).stdout).unwrap();
    assert!(printed.contains("number of transactions actually processed: 400/400"), "{printed}");
    // How much of it depends on the pace of psql and of the server.
    wait_until_spliced(&folder, 4 << 20);
}

#[test]
fn redis_answers_pipelines_and_large_values() {
    let (Some(server), Some(client), Some(benchmark)) =
        (program("redis-server"), program("redis-cli"), program("redis-benchmark"))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut command = Command::new(server);
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"]);
    let _server = Running::start(command.arg(folder.path()));
    wait_for(port);
    let (_proxy, port) = proxy_to(port, &folder);
    let port = port.to_string();
    let value: String = (0..5_000_000).map(|at| char::from(b'a' + (at % 23) as u8)).collect();
    let mut command = Command::new(&client);
    command.args(["-p", &port, "-x", "set", "large"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut set = command.spawn().unwrap();
    set.stdin.take().unwrap().write_all(value.as_bytes()).unwrap();
    assert_eq!(set.wait_with_output().unwrap().stdout, b"OK\n");
    let got = output(Command::new(&client).args(["-p", &port, "get", "large"])).stdout;
    assert!(got.strip_suffix(b"\n") == Some(value.as_bytes()));
    let mut command = Command::new(benchmark);
    command.args(["-p", &port, "-c", "50", "-n", "20000", "-P", "16", "-t", "set,get", "-q"]);
    let printed = String::from_utf8(output(&mut command).stdout).unwrap();
    assert_eq!(printed.matches("requests per second").count(), 2, "{printed}");
    // The large value, in both directions.
    wait_until_spliced(&folder, 8_000_000);
}

#[test]
fn ssh_runs_commands_and_carries_files() {
    let Some(server) = SshServer::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (_proxy, port) = proxy_to(server.port, &folder);
    let user = String::from_utf8(output(Command::new("id").arg("-un")).stdout).unwrap();
    let content: Vec<u8> =
        (0..8_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = folder.path().join("file");
    fs::write(&file, &content).unwrap();
    let words = server.client(port);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command.arg(format!("{}@127.0.0.1", user.trim())).arg("cat");
    // To the server and back at the same time.
    let output = command.stdin(fs::File::open(&file).unwrap()).output().unwrap();
    assert!(output.stdout == content, "{}", String::from_utf8_lossy(&output.stderr));
    wait_until_spliced(&folder, content.len() as u64);
}

#[test]
fn iperf3_sends_in_both_directions() {
    let Some(iperf3) = program("iperf3") else { return };
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let _server = Running::start(Command::new(&iperf3).args(["-s", "-p", &port.to_string()]));
    wait_for(port);
    let (_proxy, port) = proxy_to(port, &folder);
    // Not both at the same time: the server takes streams for the client's by the order in which
    // they arrive, and a proxy with several loops does not keep it.
    for direction in [&[][..], &["-R"]] {
        let mut command = Command::new(&iperf3);
        command.args(["-c", "127.0.0.1", "-p", &port.to_string(), "-P", "3", "-t", "1"]);
        let printed = output(command.args(direction).arg("-J")).stdout;
        let report: Value = serde_json::from_slice(&printed).unwrap();
        let streams = report["end"]["streams"].as_array().unwrap();
        assert_eq!(streams.len(), 3, "{report}");
        // The client ends the test while bytes are under way.
        for stream in streams {
            assert!(stream["receiver"]["bytes"].as_u64() > Some(1 << 20), "{stream}");
        }
    }
    wait_until_spliced(&folder, 4 << 20);
}
