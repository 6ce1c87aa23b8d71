//! Measures the latency of usual clients of a server beside slowhttptest.
//!
//! slowhttptest keeps its own CPU busy, and so delays the usual clients beside it, whatever the
//! server does. A second server of the same kind is therefore the control: both share a CPU, and
//! slowhttptest connects to one or the other. What the attacked server adds is the difference of
//! both, and the CPU time that it uses, which the control would hide.

use crate::peers::clients;
use crate::peers::servers::RunningServer;
use haul_bench::Estimate;
use haul_lab::{Lab, Running};
use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What the clients of slowhttptest do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They send the head of a request slowly (`-H`).
    Head,
    /// They send the body of an upload slowly (`-B`).
    Body,
    /// They request many ranges of a file (`-R`).
    Ranges,
    /// They receive a large body slowly (`-X`).
    Read,
}

/// Number of connections.
pub const CONNECTIONS: usize = 8000;
/// Connections per second.
const RATE: usize = 2000;
/// Processes among which they are divided in [`Mode::Read`]. The kernel does not interrupt a call
/// that polls thousands of sockets, so that one busy process delays the usual clients by a
/// millisecond.
const READING_PROCESSES: usize = 8;
/// Time until slowhttptest has connected, with a reserve: it runs at idle priority.
const CONNECT_PAUSE: Duration = Duration::from_secs(6);
/// The same for [`Mode::Ranges`], whose requests are answered: slowhttptest ends once all are.
const RANGES_PAUSE: Duration = Duration::from_millis(500);
/// Duration of each measurement of latency.
const WINDOW: Duration = Duration::from_secs(3);
/// Time in which a server closes the connections of an ended slowhttptest.
const CLOSE_PAUSE: Duration = Duration::from_secs(2);

/// A server and its control.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'s> {
    pub server: &'s RunningServer,
    pub control: &'s RunningServer,
}

/// What one server did in all rounds. Latencies are the 99th percentile in µs, by round.
#[derive(Debug, Default)]
struct Outcome {
    alone: Vec<f64>,
    /// Beside slowhttptest connected to the control.
    control: Vec<f64>,
    beside: Vec<f64>,
    /// What the attack adds to the latency alone, as a ratio to it: 1 is nothing.
    ratios: Vec<f64>,
    /// CPU time of the attacked server in percent of the time.
    cpu_percent: Vec<f64>,
    /// Connections that the attacked server had at the end of a window, at least.
    connections: Option<usize>,
    /// Number of requests that usual clients had to repeat, in all rounds.
    repeated: usize,
    /// Resident memory with slowhttptest's connections, at most.
    memory_bytes: u64,
}

/// Measures the servers one after another and prints a line for each.
pub fn measure(
    lab: &Lab,
    name: &str,
    mode: Mode,
    pairs: &[Pair<'_>],
    rounds: usize,
) -> Result<(), String> {
    println!(
        "\n{name}: p99 of usual requests in µs: alone, beside slowhttptest with {CONNECTIONS} \
         connections to another server, to this one; 1 + (the last - the second) / the first"
    );
    for pair in pairs {
        let mut outcome = Outcome::default();
        for round in 0..rounds {
            eprintln!("{name}: round {} of {rounds}: {}", round + 1, pair.server.name);
            measure_round(lab, mode, *pair, round, &mut outcome)?;
        }
        println!("{:<24} {}", pair.server.name, outcome.line());
    }
    Ok(())
}

fn measure_round(
    lab: &Lab,
    mode: Mode,
    pair: Pair<'_>,
    round: usize,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let Pair { server, control } = pair;
    let alone_us = latency_us(lab, server, outcome)?;
    let mut figures = [0.0; 2];
    // The order alternates, so that neither is always the later one.
    for turn in 0..2 {
        let index = (round + turn) % 2;
        let target = [control, server][index];
        let processes = if mode == Mode::Read { READING_PROCESSES } else { 1 };
        let generators = (0..processes).map(|_| start(lab, mode, processes, target));
        let generators = generators.collect::<Result<Vec<_>, _>>()?;
        thread::sleep(if mode == Mode::Ranges { RANGES_PAUSE } else { CONNECT_PAUSE });
        let cpu_before = server.running.cpu_time();
        figures[index] = latency_us(lab, server, outcome)?;
        if index == 1 {
            let cpu = server.running.cpu_time().saturating_sub(cpu_before);
            outcome.cpu_percent.push(cpu.as_secs_f64() / WINDOW.as_secs_f64() * 100.0);
            outcome.memory_bytes = outcome.memory_bytes.max(server.memory_bytes());
            let connections = established(lab)?;
            outcome.connections =
                Some(outcome.connections.map_or(connections, |least| least.min(connections)));
        }
        for mut generator in generators {
            if let Some(status) = generator.kill() {
                return Err(format!("slowhttptest has ended early: {status}"));
            }
        }
        thread::sleep(CLOSE_PAUSE);
    }
    let [control_us, beside_us] = figures;
    outcome.alone.push(alone_us);
    outcome.control.push(control_us);
    outcome.beside.push(beside_us);
    outcome.ratios.push(1.0 + (beside_us - control_us) / alone_us);
    Ok(())
}

/// Starts one of so many processes of slowhttptest beside the usual clients. It runs only while
/// they do not (`SCHED_IDLE`).
fn start(
    lab: &Lab,
    mode: Mode,
    processes: usize,
    target: &RunningServer,
) -> Result<Running, String> {
    let of_process = |total: usize| (total / processes).to_string();
    let mut command = Command::new("chrt");
    command.args(["--idle", "0", "slowhttptest", "-c", &of_process(CONNECTIONS)]);
    command.args(["-r", &of_process(RATE), "-l", "60", "-i", "5"]);
    let file = match mode {
        Mode::Head => {
            command.arg("-H");
            "4KiB"
        }
        Mode::Body => {
            command.args(["-B", "-t", "PUT"]);
            "uploaded"
        }
        Mode::Ranges => {
            command.args(["-R", "-t", "GET", "-a", "1", "-b", "1200"]);
            "4KiB"
        }
        Mode::Read => {
            command.args(["-X", "-w", "8", "-y", "16", "-n", "5", "-z", "32"]);
            "256MiB"
        }
    };
    command.args(["-u", &target.url(file)]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    lab.receiver.start_program(command).map_err(|error| error.to_string())
}

fn latency_us(lab: &Lab, server: &RunningServer, outcome: &mut Outcome) -> Result<f64, String> {
    let until = Instant::now() + WINDOW;
    let latency = || clients::latency(server.address, "4KiB", until);
    let latency = lab.receiver.run(latency).map_err(|error| error.to_string())??;
    outcome.repeated += latency.repeated;
    Ok(latency.p99.as_secs_f64() * 1e6)
}

/// Counts the connections of the servers' host.
fn established(lab: &Lab) -> Result<usize, String> {
    let text = lab.sender.run(|| fs::read_to_string("/proc/thread-self/net/sockstat"));
    let text = text.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let mut words = text.split_ascii_whitespace().skip_while(|word| *word != "TCP:");
    words
        .nth(2)
        .and_then(|word| word.parse().ok())
        .ok_or_else(|| format!("no TCP sockets in {text}"))
}

impl Outcome {
    fn line(&self) -> String {
        let median = |figures: &[f64]| Estimate::of(figures).map_or(f64::NAN, |of| of.median);
        let ratio = Estimate::of(&self.ratios).map_or_else(String::new, |ratio| {
            format!("{:.2} ({:.2}–{:.2})", ratio.median, ratio.low, ratio.high)
        });
        format!(
            "{:>8.0} {:>8.0} {:>8.0}  {ratio}; {:.1} % of its CPU; at least {} connections; {} \
             requests repeated; {:.0} MiB resident",
            median(&self.alone),
            median(&self.control),
            median(&self.beside),
            median(&self.cpu_percent),
            self.connections.unwrap_or_default(),
            self.repeated,
            self.memory_bytes as f64 / f64::from(1 << 20)
        )
    }
}
