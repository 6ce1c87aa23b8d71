//! Compares haul with iperf3: the CPU use that each reports, and the meter's reading.

use crate::endpoint::Endpoint;
use crate::error::BenchError;
use crate::flow::Flow;
use crate::rounds::{CALIBRATION, Costs};
use crate::stats::Estimate;
use crate::topology::Loads;
use haul::SendMethod;
use haul_lab::{Lab, Running, Settings};
use haul_soak::{Interval, Meter};
use haul_units::Size;
use haul_workers::worker::socket::SocketOptions;
use haul_workers::worker::{receiver::ReceiveTask, sender::SendTask};
use haul_workers::workload::Workload;
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// Chunk that every program sends: iperf3's default for TCP.
const CHUNK: Size = Size(128 * 1024);
/// Length of the window of each program in each round.
const WINDOW: Duration = Duration::from_millis(500);
/// Run time of iperf3, which takes whole seconds. It needs some of it to connect, and the window
/// lies in the middle.
const IPERF_SECONDS: &str = "2";
const IPERF_WARM_UP: Duration = Duration::from_millis(700);
/// Timeout of the server's start.
const LISTEN_MAX: Duration = Duration::from_secs(5);
const IPERF_PORT: u16 = 5201;

/// A row of the comparison: one program or send method.
#[derive(Debug, Clone)]
pub struct PeerRow {
    /// The program or method that sent.
    pub name: String,
    /// Throughput at the receiver.
    pub throughput_bits_per_second: Option<Estimate>,
    /// CPU use that the program reports, in percent of one CPU; for haul, the time of `getrusage`.
    pub reported_percent: Option<Estimate>,
    /// The meter's reading of the sending host's CPU.
    pub sender_load_percent: Option<Estimate>,
    /// Cost of the sending host, by the meter.
    pub sender_us_per_mib: Option<Estimate>,
    /// Cost of the receiving host, by the meter.
    pub receiver_us_per_mib: Option<Estimate>,
}

/// A program that sends.
enum TestedProgram {
    Haul(SendMethod),
    Iperf { name: &'static str, flags: &'static [&'static str] },
}

/// One round of one program.
#[derive(Clone, Copy)]
struct Round {
    throughput: f64,
    reported: f64,
    load: f64,
    sender_us: f64,
    receiver_us: f64,
}

/// Runs iperf3 with and without its zero-copy flag and the corresponding methods of haul,
/// interleaved, in one lab.
pub fn send(
    rounds: usize,
    congestion: &str,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<PeerRow>, BenchError> {
    let programs = [
        TestedProgram::Iperf { name: "iperf3", flags: &[] },
        TestedProgram::Haul(SendMethod::ReadSend),
        TestedProgram::Iperf { name: "iperf3 -Z", flags: &["-Z"] },
        TestedProgram::Haul(SendMethod::Sendfile),
    ];
    // iperf3 sends one buffer repeatedly; with -Z it sends the file that backs this buffer.
    let workload = Workload::Memory(CHUNK).open()?;
    let lab = Lab::veth(&Settings::default())?;
    let meter = Meter::start(&[lab.sender.cpu(), lab.receiver.cpu()])?;
    let _server = start_iperf_server(&lab)?;
    let mut all: Vec<Vec<Round>> = programs.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for (program, rounds) in programs.iter().zip(&mut all) {
            progress(&format!("round {}: {}", round + 1, program.name()));
            let before = meter.calibrate(CALIBRATION);
            let (interval, bytes_per_second, reported) = match program {
                TestedProgram::Haul(method) => {
                    let sending = SendTask {
                        path: method.name().into(),
                        chunk_bytes: CHUNK.0 as usize,
                        cork: false,
                        rate_bits_per_second: None,
                        pieces: workload.handed_over(),
                        plan: None,
                    };
                    let to = (Endpoint::Lab(&lab.receiver), ReceiveTask::plainly());
                    let flow = Flow::stream(
                        (Endpoint::Lab(&lab.sender), sending),
                        to,
                        SocketOptions::with_congestion(congestion),
                        WINDOW,
                    );
                    let sample = flow.run(Some(&meter))?;
                    let [received, sent] = sample.outcomes.as_slice() else { continue };
                    let reported = 100.0 * sent.cpu_seconds() / sent.seconds;
                    (sample.interval, received.bytes_per_second(), reported)
                }
                TestedProgram::Iperf { flags, .. } => iperf(&lab, &meter, congestion, flags)?,
            };
            let baseline = before.middle(&meter.calibrate(CALIBRATION));
            let Some(load) = interval.map(|interval| interval.load(&baseline)) else { continue };
            let Some(loads) = Loads::of_cpus(lab.cpus(), &load, 0.0, &|_| None) else { continue };
            let Some(costs) = Costs::of(&loads, bytes_per_second) else { continue };
            rounds.push(Round {
                throughput: bytes_per_second * 8.0,
                reported,
                load: costs.sender.load_percent,
                sender_us: costs.sender_us_per_mib,
                receiver_us: costs.receiver_us_per_mib,
            });
        }
    }
    Ok(programs.iter().zip(&all).map(|(program, rounds)| row(program, rounds)).collect())
}

impl TestedProgram {
    fn name(&self) -> String {
        match self {
            Self::Haul(SendMethod::ReadSend) => "haul read+send (memory)".into(),
            Self::Haul(method) => format!("haul {method} (memory)"),
            Self::Iperf { name, .. } => (*name).into(),
        }
    }
}

fn row(program: &TestedProgram, rounds: &[Round]) -> PeerRow {
    let estimate = |of: fn(&Round) -> f64| Estimate::of(&rounds.iter().map(of).collect::<Vec<_>>());
    PeerRow {
        name: program.name(),
        throughput_bits_per_second: estimate(|round| round.throughput),
        reported_percent: estimate(|round| round.reported),
        sender_load_percent: estimate(|round| round.load),
        sender_us_per_mib: estimate(|round| round.sender_us),
        receiver_us_per_mib: estimate(|round| round.receiver_us),
    }
}

fn program_error(program: &str, problem: impl std::fmt::Display) -> BenchError {
    BenchError::Failed(format!("{program}: {problem}"))
}

/// Starts the server and waits until it listens.
fn start_iperf_server(lab: &Lab) -> Result<Running, BenchError> {
    let is_missing =
        Command::new("iperf3").arg("--version").stdout(Stdio::null()).status().is_err();
    if is_missing {
        return Err(program_error(
            "iperf3",
            "is missing: ci/install installs it (Debian: apt-get install iperf3)",
        ));
    }
    let mut command = Command::new("iperf3");
    command.arg("-s").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let server = lab.receiver.start_program(command)?;
    let deadline = Instant::now() + LISTEN_MAX;
    while !lab.receiver.run(is_listening)? {
        if Instant::now() > deadline {
            return Err(program_error("iperf3", "its server does not listen"));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(server)
}

/// Whether a socket listens on iperf3's port in the calling thread's network namespace.
fn is_listening() -> bool {
    const LISTEN: &str = "0A";
    let port = format!(":{IPERF_PORT:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
        text.lines().any(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            fields.get(1).is_some_and(|address| address.ends_with(&port))
                && fields.get(3) == Some(&LISTEN)
        })
    })
}

/// Runs one client and measures a window within its run time. Returns the counters, the bytes per
/// second that arrived at the receiver's device, and the CPU use that iperf3 reports, in percent.
/// The bytes include headers of at most 0.1 %.
fn iperf(
    lab: &Lab,
    meter: &Meter,
    congestion: &str,
    flags: &[&str],
) -> Result<(Option<Interval>, f64, f64), BenchError> {
    let mut command = Command::new("iperf3");
    command
        .args([
            "-J",
            "-c",
            &lab.receiver.address().to_string(),
            "-t",
            IPERF_SECONDS,
            "-C",
            congestion,
        ])
        .args(["-l", &CHUNK.0.to_string()])
        .args(flags)
        .stdin(Stdio::null());
    let received = || lab.receiver.run(|| received_bytes(lab.receiver.device()));
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            lab.sender.run(|| haul_lab_sys::child::dies_with_parent(&mut command).output())
        });
        thread::sleep(IPERF_WARM_UP);
        let received_before = received()?;
        let before = meter.snapshot()?;
        thread::sleep(WINDOW);
        let after = meter.snapshot()?;
        let received_after = received()?;
        let output = client
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?
            .map_err(|error| program_error("iperf3", error))?;
        let reported = reported_percent(&output)?;
        let interval = after.since(&before);
        let bytes_per_second =
            (received_after - received_before) as f64 / interval.wall.as_secs_f64();
        Ok((Some(interval), bytes_per_second, reported))
    })
}

fn reported_percent(output: &Output) -> Result<f64, BenchError> {
    let report: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| program_error("iperf3", error))?;
    if let Some(error) = report["error"].as_str() {
        return Err(program_error("iperf3", error));
    }
    report["end"]["cpu_utilization_percent"]["host_total"]
        .as_f64()
        .ok_or_else(|| program_error("iperf3", "reports no CPU utilisation"))
}

/// Bytes received by a device in the calling thread's network namespace; 0 if it is not listed.
fn received_bytes(device: &str) -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
    text.lines()
        .find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':'))
        .and_then(|counters| counters.split_ascii_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
