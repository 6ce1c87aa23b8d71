//! Trials: the cost of servers under a load, measured by the same meter in interleaved rounds.
//!
//! The servers run on the sending host of a lab, the clients on the receiving host.

use crate::peers::LabArguments;
use crate::peers::attack::{Attack, CrowdAddress};
use crate::peers::clients::{self, Requests, Wrk};
use crate::peers::crowd::{Behaviour, Crowd, Target};
use crate::peers::packets::{PacketCounters, Traffic};
use crate::peers::servers::{FEW_PLACES, RunningServer, Service};
use crate::peers::slowhttptest::{self, Mode, Pair};
use haul_bench::Estimate;
use haul_lab::{Lab, LabError, Settings};
use haul_soak::{Meter, Snapshot};
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout until a started server listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Duration of the calibration of the idle machine, before and after each measurement.
const CALIBRATION: Duration = Duration::from_millis(100);
/// Age of the served files at the first measurement. `haul serve` sends some files that were
/// written within the last ten seconds by copying (crates/serve/src/files/opener.rs).
const FILE_AGE: Duration = Duration::from_secs(11);
/// Pause in which a server closes many connections. It uses the CPU on which the next server is
/// measured.
const CLOSE_PAUSE: Duration = Duration::from_secs(3);
/// Time in which the buffers of clients that do not read fill.
const STALL_PAUSE: Duration = Duration::from_secs(2);
/// Duration of a measurement of large bodies.
const BULK_WINDOW: Duration = Duration::from_secs(1);
/// The time between the publication of a file and its measurement.
const PUBLISHED_FOR: Duration = Duration::from_secs(1);

/// A trial: a file, a load, and the additional work of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    pub name: &'static str,
    pub file: &'static str,
    pub load: Load,
    pub service: Service,
}

/// The load of the clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Connections receive bodies at full speed. Figure: CPU time per MiB.
    Bulk { connections: usize },
    /// One connection receives the body of a file that was renamed into place a second ago. Figure:
    /// CPU time per MiB.
    Published,
    /// All connections send requests repeatedly. Figure: requests per second of CPU time within
    /// the window.
    Requests { connections: usize, seconds: u32, window: Window },
    /// Requests of which each has a separate connection, so many at a time. Figure: requests per
    /// second of CPU time.
    Connections { at_a_time: usize, seconds: u32 },
    /// Every tenth request is for a large body ([`Requests::Mixed`]). Figure: requests per second
    /// of CPU time.
    Mixed { connections: usize, seconds: u32 },
    /// Idle connections. Figure: resident memory.
    Idle { connections: usize },
    /// A crowd that occupies connections, beside normal clients. Figure: latency of the normal
    /// clients.
    Crowd { behaviour: Behaviour, connections: usize, seconds: u32, address: CrowdAddress },
    /// One connection receives bodies at full speed beside others that have requested bodies and
    /// do not read them. Figure: CPU time per MiB.
    BesideStalled { stalled: usize },
    /// slowhttptest beside normal clients. Figure: latency of the normal clients.
    SlowHttpTest(Mode),
}

impl Load {
    /// The load whose figure is measured before, to compare with.
    fn reference(self) -> Option<Self> {
        match self {
            MANY => Some(FEW),
            Self::BesideStalled { .. } => Some(ONE_BULK),
            _ => None,
        }
    }

    /// The connections to a server at a time.
    pub fn connections(self) -> usize {
        match self {
            Self::Bulk { connections }
            | Self::Requests { connections, .. }
            | Self::Mixed { connections, .. }
            | Self::Idle { connections }
            | Self::Crowd { connections, .. } => connections,
            Self::Connections { at_a_time, .. } => at_a_time,
            Self::BesideStalled { stalled } => stalled + 1,
            Self::Published => 1,
            Self::SlowHttpTest(_) => slowhttptest::CONNECTIONS,
        }
    }
}

/// Part of a request load that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// The whole run of wrk.
    All,
    /// From the first to the second time after wrk's start.
    Between(Duration, Duration),
}

/// Number of connections that wrk keeps busy easily.
const FEW_CONNECTIONS: usize = 16;
/// Large bodies over one connection.
pub const ONE_BULK: Load = Load::Bulk { connections: 1 };
/// Large bodies over 64 connections.
pub const MANY_BULK: Load = Load::Bulk { connections: 64 };
/// A few busy connections.
pub const FEW: Load =
    Load::Requests { connections: FEW_CONNECTIONS, seconds: 1, window: Window::All };
/// Many active connections. The window excludes the time in which wrk opens and closes them.
pub const MANY: Load = Load::Requests {
    connections: 10_000,
    seconds: 6,
    window: Window::Between(Duration::from_secs(3), Duration::from_millis(5500)),
};
/// Idle connections.
pub const IDLE: Load = Load::Idle { connections: 10_000 };
/// Slow clients, for all of whom the server has room.
pub const SLOW: Load = Load::Crowd {
    behaviour: Behaviour::Slow,
    connections: 10_000,
    seconds: 3,
    address: CrowdAddress::Shared,
};

/// Returns an attack by six clients for each place of the server
/// ([`crate::peers::servers::FEW_PLACES`]).
pub const fn attack(behaviour: Behaviour, address: CrowdAddress) -> Load {
    Load::Crowd { behaviour, connections: 6 * FEW_PLACES, seconds: 3, address }
}

/// File that slow clients request.
const LARGEST_FILE: &str = "256MiB";

/// File that clients request which do not read. Thousands of larger ones in socket buffers would
/// exceed the memory that TCP has before it shrinks all windows (`net.ipv4.tcp_mem`).
const STALLED_FILE: &str = "256KiB";

/// The files that are served, and their sizes in bytes.
const FILES: [(&str, usize); 9] = [
    ("100B", 100),
    ("1KiB", 1 << 10),
    ("4KiB", 4 << 10),
    ("16KiB", 16 << 10),
    ("64KiB", 64 << 10),
    (STALLED_FILE, 256 << 10),
    ("1MiB", 1 << 20),
    ("256MiB", 256 << 20),
    ("published", 256 << 20),
];

/// A lab with files to serve.
pub struct Comparison {
    pub lab: Lab,
    pub scratch: tempfile::TempDir,
    /// The folder of the files, in the scratch folder.
    pub root: PathBuf,
    /// When the files are old enough.
    ready_at: Instant,
    pub rounds: usize,
}

impl Comparison {
    /// Creates the lab and the files.
    pub fn new(arguments: &LabArguments) -> Result<Self, String> {
        let LabArguments { rounds, congestion, mtu, no_segmentation, delay_ms, haul: _ } =
            arguments;
        let delay = delay_ms.map(Duration::from_millis);
        let failed = |error: LabError| error.to_string();
        haul_lab::enter_user_namespace().map_err(failed)?;
        let lab =
            Lab::veth(&Settings::default().with_mtu(*mtu).with_delay(delay)).map_err(failed)?;
        if *no_segmentation {
            lab.set_segmentation_both(false).map_err(failed)?;
        }
        // A round opens ten thousand connections. If all ports were in TIME_WAIT, each connect(2)
        // would search all of them for a free one. The servers' ports are below the range.
        for host in [&lab.sender, &lab.receiver] {
            host.set_sysctl("net.ipv4.tcp_congestion_control", congestion).map_err(failed)?;
            host.set_sysctl("net.ipv4.ip_local_port_range", "10000 65535").map_err(failed)?;
            host.set_sysctl("net.ipv4.tcp_max_tw_buckets", "0").map_err(failed)?;
        }
        let scratch = tempfile::tempdir().map_err(|error| error.to_string())?;
        // Apache's workers do not run as root and must be able to read the folder.
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))
            .map_err(|error| error.to_string())?;
        let root = scratch.path().join("root");
        write_files(&root).map_err(|error| format!("{}: {error}", root.display()))?;
        Ok(Self { lab, scratch, root, ready_at: Instant::now() + FILE_AGE, rounds: *rounds })
    }

    /// Waits until a server accepts connections of the receiving host.
    pub fn wait_until_listening(&self, server: &RunningServer) -> Result<(), String> {
        let deadline = Instant::now() + LISTEN_TIMEOUT;
        while Instant::now() < deadline {
            let connected = self.lab.receiver.run(|| TcpStream::connect(server.address).is_ok());
            if connected.map_err(|error| error.to_string())? {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(50));
        }
        Err(format!("{} does not listen at {}", server.name, server.address))
    }

    /// Runs a trial and prints its table. The first server is the one that the others are compared
    /// with.
    pub fn run(&self, trial: &Trial, servers: &[&RunningServer]) -> Result<(), String> {
        thread::sleep(self.ready_at.saturating_duration_since(Instant::now()));
        run_trial(&self.lab, &self.root, trial, servers, self.rounds)
    }
}

/// Copies a program beside it; the copy is removed when the path is dropped.
///
/// A copy is written sequentially, as the other servers' installed programs are. The linker writes
/// its output in scattered pieces, which changes the cost
/// (docs/measurements/file-server-tuning.md).
pub fn copy_program(program: &Path) -> Result<tempfile::TempPath, String> {
    let copied = |error: std::io::Error| format!("copying {}: {error}", program.display());
    let folder = program.parent().unwrap_or(Path::new("."));
    let copy = tempfile::NamedTempFile::new_in(folder).map_err(copied)?.into_temp_path();
    fs::copy(program, &copy).map_err(copied)?;
    Ok(copy)
}

fn write_files(root: &Path) -> std::io::Result<()> {
    fs::create_dir(root)?;
    for (name, bytes) in FILES {
        let content: Vec<u8> = (0..bytes).map(|at| ((at * 2_654_435_761) >> 7) as u8).collect();
        fs::write(root.join(name), content)?;
    }
    Ok(())
}

/// Replaces a file by a copy of itself, as a publication does.
fn publish(path: &Path) -> std::io::Result<()> {
    let new = path.with_extension("new");
    fs::copy(path, &new)?;
    fs::rename(&new, path)?;
    thread::sleep(PUBLISHED_FOR);
    Ok(())
}

fn run_trial(
    lab: &Lab,
    root: &Path,
    trial: &Trial,
    servers: &[&RunningServer],
    rounds: usize,
) -> Result<(), String> {
    let failed = |error: haul_soak::SoakError| error.to_string();
    let mut figures = vec![Vec::new(); servers.len()];
    let mut ratios_to_reference = figures.clone();
    let mut details = vec![Details::default(); servers.len()];
    if let Load::Crowd { behaviour, connections, seconds, address } = trial.load {
        let attack = Attack {
            behaviour,
            address,
            connections,
            seconds,
            file: trial.file,
            large_file: LARGEST_FILE,
            close_pause: CLOSE_PAUSE,
        };
        attack.measure(lab, trial.name, servers, rounds);
        return Ok(());
    }
    if let Load::SlowHttpTest(mode) = trial.load {
        let pairs = servers.chunks_exact(2).map(|two| Pair { server: two[0], control: two[1] });
        return slowhttptest::measure(lab, trial.name, mode, &pairs.collect::<Vec<_>>(), rounds);
    }
    if let Load::Idle { connections } = trial.load {
        for (server, figures) in servers.iter().zip(&mut figures) {
            figures.push(or_nan(server, idle_memory(lab, trial, server, connections)));
        }
    } else {
        let meter = Meter::start(&[lab.sender.cpu(), lab.receiver.cpu()]).map_err(failed)?;
        for round in 0..rounds {
            // Each round starts with another server, so that positions in a round alternate.
            for turn in 0..servers.len() {
                let index = (turn + round) % servers.len();
                let server = servers[index];
                eprintln!("{}: round {} of {rounds}: {}", trial.name, round + 1, server.name);
                if trial.load == Load::Published {
                    publish(&root.join(trial.file)).map_err(|error| error.to_string())?;
                }
                let mut measure_load = |load| {
                    let measurement = measure(lab, &meter, trial.file, load, server);
                    if load == trial.load {
                        details[index].extend(measurement.as_ref().ok());
                    }
                    or_nan(server, measurement.map(|measured| measured.figure))
                };
                // Measure the reference immediately before: the speed of the machine drifts within
                // a minute.
                let reference = trial.load.reference().map(&mut measure_load);
                let figure = measure_load(trial.load);
                if figure.is_nan() {
                    // A failed measurement has skipped this pause.
                    thread::sleep(CLOSE_PAUSE);
                }
                figures[index].push(figure);
                ratios_to_reference[index].extend(reference.map(|reference| figure / reference));
            }
        }
    }
    print(trial, servers, &figures, &ratios_to_reference, &details);
    Ok(())
}

/// Prints the error of a failed measurement and returns NaN, so that the comparison goes on.
fn or_nan(server: &RunningServer, figure: Result<f64, String>) -> f64 {
    figure.unwrap_or_else(|problem| {
        eprintln!("{}: {problem}", server.name);
        f64::NAN
    })
}

/// Result of one measurement.
#[derive(Debug)]
struct Measurement {
    /// CPU time of the server in µs per MiB, or requests per second of CPU time.
    figure: f64,
    traffic: Traffic,
    /// The 99th percentile of the time to a response, in µs, if the load has one.
    p99_us: Option<f64>,
}

/// What the rounds have measured beside the figure.
#[derive(Debug, Clone, Default)]
struct Details {
    traffic: Vec<Traffic>,
    p99_us: Vec<f64>,
}

impl Details {
    fn extend(&mut self, measurement: Option<&Measurement>) {
        self.traffic.extend(measurement.map(|measured| measured.traffic));
        self.p99_us.extend(measurement.and_then(|measured| measured.p99_us));
    }

    fn line(&self) -> String {
        let p99 = Estimate::of(&self.p99_us);
        let p99 = p99.map(|p99| format!("; p99 {:.0}{} µs", p99.median, range(p99, 0)));
        let traffic = Traffic::median(&self.traffic).map(|traffic| format!("; {traffic}"));
        p99.unwrap_or_default() + &traffic.unwrap_or_default()
    }
}

/// Counters of the meter and of both hosts' CPUs at one time.
#[derive(Debug)]
struct LabSnapshot {
    meter: Snapshot,
    to_client: PacketCounters,
    to_server: PacketCounters,
}

impl LabSnapshot {
    fn take(lab: &Lab, meter: &Meter) -> Result<Self, String> {
        Ok(Self {
            meter: meter.snapshot().map_err(|error| error.to_string())?,
            to_client: PacketCounters::read(lab.receiver.cpu())?,
            to_server: PacketCounters::read(lab.sender.cpu())?,
        })
    }
}

/// Measures one server under a load. If it has many connections, waits afterwards until they are
/// closed.
fn measure(
    lab: &Lab,
    meter: &Meter,
    file: &str,
    load: Load,
    server: &RunningServer,
) -> Result<Measurement, String> {
    let stalled = match load {
        Load::BesideStalled { stalled } => Some(stall(lab, server, stalled)?),
        _ => None,
    };
    let calibration = meter.calibrate(CALIBRATION);
    let mut before = LabSnapshot::take(lab, meter)?;
    let (mut after, mut p99_us) = (None, None);
    let url = server.url(file);
    let wrk = |connections, seconds, requests| Wrk { url, connections, seconds, requests };
    let amount = match load {
        Load::Requests { connections, seconds, window } => {
            let wrk = wrk(connections, seconds, Requests::Same);
            let requests = measure_requests(lab, meter, wrk, window)?;
            (before, after) = (requests.before.unwrap_or(before), requests.after);
            p99_us = Some(requests.p99_us);
            requests.amount
        }
        Load::Connections { at_a_time, seconds } => {
            let wrk = wrk(at_a_time, seconds, Requests::Once);
            clients::wrk(&lab.receiver, &wrk)?.requests as f64
        }
        Load::Mixed { connections, seconds } => {
            let wrk = wrk(connections, seconds, Requests::Mixed);
            let report = clients::wrk(&lab.receiver, &wrk)?;
            p99_us = Some(report.p99_us);
            report.requests as f64
        }
        Load::Bulk { .. }
        | Load::Published
        | Load::BesideStalled { .. }
        | Load::Idle { .. }
        | Load::Crowd { .. }
        | Load::SlowHttpTest(_) => {
            let connections = if let Load::Bulk { connections } = load { connections } else { 1 };
            receive_bulk(lab, server, file, connections)? as f64
        }
    };
    let after = after.map_or_else(|| LabSnapshot::take(lab, meter), Ok)?;
    let is_crowded = stalled.is_some();
    drop(stalled);
    if load == MANY || is_crowded {
        // The server must not close connections during the calibration or the next measurement.
        thread::sleep(CLOSE_PAUSE);
    }
    let interval = after.meter.since(&before.meter);
    let usage = interval.load(&calibration.middle(&meter.calibrate(CALIBRATION)));
    let percent = usage.of(lab.sender.cpu()).map_or(f64::NAN, |cpu| cpu.load_percent);
    let cpu_seconds = percent / 100.0 * interval.wall.as_secs_f64();
    let mib = amount / f64::from(1 << 20);
    let (figure, count) = match load {
        Load::Requests { .. } | Load::Connections { .. } | Load::Mixed { .. } => {
            (amount / cpu_seconds, amount)
        }
        _ => (cpu_seconds * 1e6 / mib, mib),
    };
    let to_client = after.to_client - before.to_client;
    let to_server = after.to_server - before.to_server;
    Ok(Measurement { figure, traffic: Traffic::of(to_client, to_server, count), p99_us })
}

/// What was measured of repeated requests.
struct MeasuredRequests {
    /// The number of requests in the window.
    amount: f64,
    p99_us: f64,
    /// The counters at the beginning and the end of the window; `None` if it is the whole run.
    before: Option<LabSnapshot>,
    after: Option<LabSnapshot>,
}

fn measure_requests(
    lab: &Lab,
    meter: &Meter,
    wrk: Wrk,
    window: Window,
) -> Result<MeasuredRequests, String> {
    thread::scope(|scope| {
        let bytes_at_start = received_bytes(lab)?;
        let wrk = scope.spawn(move || clients::wrk(&lab.receiver, &wrk));
        let (mut before, mut after, mut bytes_in_window) = (None, None, None);
        if let Window::Between(from, to) = window {
            thread::sleep(from);
            before = Some(LabSnapshot::take(lab, meter)?);
            let bytes_before = received_bytes(lab)?;
            thread::sleep(to.saturating_sub(from));
            after = Some(LabSnapshot::take(lab, meter)?);
            bytes_in_window = Some(received_bytes(lab)? - bytes_before);
        }
        let wrk = wrk.join().map_err(|_| "wrk's thread has panicked".to_owned())??;
        // All responses have the same size, so the bytes are proportional to the requests.
        let bytes = received_bytes(lab)? - bytes_at_start;
        let amount = wrk.requests as f64 * bytes_in_window.unwrap_or(bytes) / bytes;
        Ok(MeasuredRequests { amount, p99_us: wrk.p99_us, before, after })
    })
}

/// Receives large bodies for a while. Returns their bytes.
fn receive_bulk(
    lab: &Lab,
    server: &RunningServer,
    file: &str,
    connections: usize,
) -> Result<u64, String> {
    let until = Instant::now() + BULK_WINDOW;
    let receive = || clients::receive_bulk(server.address, file, connections, until);
    lab.receiver.run(receive).map_err(|error| error.to_string())?
}

/// Connects clients that request a body and do not read it.
fn stall(lab: &Lab, server: &RunningServer, stalled: usize) -> Result<Crowd, String> {
    let target = Target {
        server: server.address,
        tls_server: server.tls_address(),
        file: STALLED_FILE.into(),
        behaviour: Behaviour::UnreadResponses,
    };
    let crowd = lab.receiver.run(|| Crowd::connect(target, stalled));
    let crowd = crowd.map_err(|error| error.to_string())??;
    thread::sleep(STALL_PAUSE);
    Ok(crowd)
}

/// Returns the bytes that the clients' network device has received.
fn received_bytes(lab: &Lab) -> Result<f64, String> {
    let text = lab.receiver.run(|| fs::read_to_string("/proc/thread-self/net/dev"));
    let text = text.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let device = format!("{}:", lab.receiver.device());
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&device));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| format!("/proc/thread-self/net/dev does not list {device}"))
}

/// Measures the server's resident memory in MiB with idle connections that have each sent one
/// request.
fn idle_memory(
    lab: &Lab,
    trial: &Trial,
    server: &RunningServer,
    connections: usize,
) -> Result<f64, String> {
    let idle = lab.receiver.run(|| clients::connect(server.address, trial.file, connections));
    let idle = idle.map_err(|error| error.to_string())??;
    // Long enough for servers that free memory on a timer, and shorter than the keep-alive timeout
    // of every server.
    thread::sleep(Duration::from_secs(3));
    let bytes = server.memory_bytes();
    drop(idle);
    Ok(bytes as f64 / f64::from(1 << 20))
}

/// Prints the table of a trial, with a line for each server.
///
/// A line has the server's figure, the ratio of the first server's figure to the server's, the
/// ratio to the server's own rate with few connections, and the traffic between the CPUs for each
/// request or MiB.
fn print(
    trial: &Trial,
    servers: &[&RunningServer],
    figures: &[Vec<f64>],
    ratios_to_reference: &[Vec<f64>],
    details: &[Details],
) {
    let (unit, is_more_better) = match trial.load {
        Load::Bulk { .. } | Load::Published | Load::BesideStalled { .. } => {
            ("server µs/MiB", false)
        }
        Load::Requests { .. } | Load::Connections { .. } | Load::Mixed { .. } => {
            ("requests per server-CPU-second", true)
        }
        Load::Idle { .. } => ("MiB resident", false),
        Load::Crowd { .. } | Load::SlowHttpTest(_) => ("p99 in µs", false),
    };
    println!(
        "\n{}: {unit} ({} is better), then the ratio of {} to each server",
        trial.name,
        if is_more_better { "more" } else { "less" },
        servers.first().map_or("", |first| &first.name),
    );
    for (index, server) in servers.iter().enumerate() {
        let Some(figure) = Estimate::of(&figures[index]) else {
            println!("{:<24} did not do it", server.name);
            continue;
        };
        // Ratios are taken within a round, because both servers met the same machine state there.
        let both = figures[0].iter().zip(&figures[index]);
        let ratios: Vec<f64> = both.map(|(first, other)| first / other).collect();
        let with_spread = |ratios: &[f64]| {
            Estimate::of(ratios).map(|ratio| format!("{:.2}{}", ratio.median, range(ratio, 2)))
        };
        let ratio = with_spread(&ratios).unwrap_or_default();
        let to_reference = match trial.load {
            Load::BesideStalled { .. } => "; ratio to its cost without the others",
            _ => "; ratio to its rate with few connections",
        };
        let ratio_to_reference = with_spread(&ratios_to_reference[index])
            .map_or(String::new(), |ratio| format!("{to_reference}: {ratio}"));
        let details = details[index].line();
        let range = range(figure, 1);
        println!(
            "{:<24} {:>10.1}{range}  {ratio}{ratio_to_reference}{details}",
            server.name, figure.median
        );
    }
}

/// The interval of an estimate in brackets; nothing if it has none.
fn range(estimate: Estimate, digits: usize) -> String {
    if estimate.has_interval() {
        format!(" ({:.digits$}–{:.digits$})", estimate.low, estimate.high)
    } else {
        String::new()
    }
}
