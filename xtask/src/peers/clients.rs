//! Who asks the servers: wrk for many small requests, and a client of our own that takes large bodies without looking at them,
//! so that it is not what limits.

use haul_lab::Host;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest head of a response.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// No answer takes longer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What wrk says it did.
#[derive(Debug, Clone, Copy)]
pub struct Requests {
    pub count: u64,
}

/// Runs wrk against `url` with so many connections for so many seconds.
pub fn wrk(host: &Host, url: &str, connections: usize, seconds: u32) -> Result<Requests, String> {
    let mut command = Command::new("wrk");
    command
        .args([
            "-t",
            "1",
            "-c",
            &connections.to_string(),
            "-d",
            &format!("{seconds}s"),
            "--timeout",
            "30s",
            url,
        ])
        .stdin(Stdio::null());
    let output = host
        .run(|| haul_sys::child::dies_with_parent(&mut command).output())
        .map_err(|error| error.to_string())?
        .map_err(|error| {
            format!("wrk: {error}: ci/install installs it (Debian: apt-get install wrk)")
        })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let problem =
        text.lines().find(|line| line.contains("Non-2xx") || line.contains("Socket errors"));
    if let Some(problem) = problem {
        return Err(format!("wrk {url}: {}", problem.trim()));
    }
    let count = text
        .lines()
        .find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok())
        .ok_or_else(|| format!("wrk {url} says nothing of requests: {text}"))?;
    Ok(Requests { count })
}

/// Gets `file` over and over on one connection until `until`; returns the bytes of bodies that came.
pub fn drain(server: SocketAddr, file: &str, until: Instant) -> Result<u64, String> {
    let failed = |error: std::io::Error| format!("getting {file} from {server}: {error}");
    let mut stream = TcpStream::connect(server).map_err(failed)?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
    let mut bytes = 0;
    while Instant::now() < until {
        ask(&mut stream, server, file).map_err(failed)?;
        let (length, already) = read_head(&mut stream).map_err(failed)?;
        let mut left = length.saturating_sub(already);
        bytes += already;
        while left > 0 && Instant::now() < until {
            let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(1 << 30);
            match haul_sys::sockopt::discard(&stream, wanted).map_err(failed)? {
                0 => return Err(format!("{server} has ended the connection {left} bytes early")),
                count => {
                    left -= count as u64;
                    bytes += count as u64;
                }
            }
        }
    }
    Ok(bytes)
}

/// What one in a hundred of unhurried requests waits, or longer: 16 connections ask in turn, once in a millisecond, and a sixteenth of
/// the requests come on connections of their own. Any request that is not answered is an error.
pub fn p99(server: SocketAddr, file: &str, until: Instant) -> Result<Duration, String> {
    const CONNECTIONS: usize = 16;
    const PAUSE: Duration = Duration::from_millis(1);
    let mut connections = ask_once(server, file, CONNECTIONS)?;
    let mut waits = Vec::new();
    while Instant::now() < until {
        let turn = waits.len() % (CONNECTIONS + 1);
        let started = Instant::now();
        match connections.get_mut(turn) {
            Some(connection) => ask_again(connection, server, file)?,
            None => drop(ask_once(server, file, 1)?),
        }
        waits.push(started.elapsed());
        std::thread::sleep(PAUSE);
    }
    waits.sort_unstable();
    waits.get(waits.len() * 99 / 100).copied().ok_or_else(|| "there was no time to ask".into())
}

/// Opens so many connections, asks for `file` on each and takes the answer; returns them open.
pub fn ask_once(
    server: SocketAddr,
    file: &str,
    connections: usize,
) -> Result<Vec<TcpStream>, String> {
    let failed = |error: std::io::Error| format!("connecting to {server}: {error}");
    let mut idle = Vec::with_capacity(connections);
    for _ in 0..connections {
        let mut stream = TcpStream::connect_timeout(&server, ANSWER_MAX).map_err(failed)?;
        stream.set_read_timeout(Some(ANSWER_MAX)).map_err(failed)?;
        ask_again(&mut stream, server, file)?;
        idle.push(stream);
    }
    Ok(idle)
}

/// Asks for `file` and takes the answer.
fn ask_again(stream: &mut TcpStream, server: SocketAddr, file: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("getting {file} from {server}: {error}");
    ask(stream, server, file).map_err(failed)?;
    let (length, already) = read_head(stream).map_err(failed)?;
    let rest = length.saturating_sub(already);
    let came = std::io::copy(&mut stream.take(rest), &mut std::io::sink()).map_err(failed)?;
    if came == rest { Ok(()) } else { Err(format!("getting {file} from {server}: it ends early")) }
}

/// Asks for `file`, all in one packet.
fn ask(stream: &mut TcpStream, server: SocketAddr, file: &str) -> std::io::Result<()> {
    stream.write_all(format!("GET /{file} HTTP/1.1\r\nHost: {server}\r\n\r\n").as_bytes())
}

/// Reads a head; returns the body's length and how much of it has come with the head.
fn read_head(stream: &mut TcpStream) -> std::io::Result<(u64, u64)> {
    let wrong = |what: &str| std::io::Error::other(what.to_owned());
    let mut head = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 || head.len() > HEAD_BYTES_MAX {
            return Err(wrong("no head of a response"));
        }
        head.extend_from_slice(&buffer[..count]);
        let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        if !text.starts_with("http/1.1 200") {
            return Err(wrong(text.lines().next().unwrap_or_default()));
        }
        let length = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok())
            .ok_or_else(|| wrong("a response without Content-Length"))?;
        return Ok((length, (head.len() - end - 4) as u64));
    }
}
