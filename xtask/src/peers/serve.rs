//! `cargo xtask peers serve`: what other file servers cost beside haul, in one lab, under one meter, round by round in turn.

use crate::peers::clients;
use crate::peers::crowd::Crowd;
use crate::peers::packets::{Handed, Traffic};
use crate::peers::servers::{Kind, Service, Serving, Setup, make_certificate};
use haul_bench::Figure;
use haul_lab::{Lab, LabError, Settings};
use haul_soak::{Meter, Snapshot};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Everybody's port is this or one of the next.
const FIRST_PORT: u16 = 8001;
/// How long a server may take until it listens.
const LISTEN_MAX: Duration = Duration::from_secs(10);
/// How long the quiet machine is looked at around each measurement.
const CALIBRATION: Duration = Duration::from_millis(100);
/// haul copies files that have changed in the last ten seconds.
const SETTLED: Duration = Duration::from_secs(11);
/// How long a server may take to close many connections, on the CPU that the next one is measured on.
const CLOSED: Duration = Duration::from_secs(3);
/// How long large bodies are taken.
const DRAIN: Duration = Duration::from_secs(1);

/// What is asked of every server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    pub name: &'static str,
    file: &'static str,
    load: Load,
    service: Service,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// One connection takes bodies as fast as they come: CPU time for each MiB.
    Bulk,
    /// So many connections ask again and again for so many seconds; of what lies in the window, requests for each second of CPU time.
    Requests { connections: usize, seconds: u32, window: Window },
    /// So many connections lie idle: memory.
    Idle { connections: usize },
    /// So many clients hold the server up in each of two ways, and others ask meanwhile: how long these wait.
    Slow { of_each: usize, seconds: u32 },
}

/// What is counted of a time in which somebody asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Window {
    All,
    /// Between these two, from the beginning.
    Between(Duration, Duration),
}

/// As many connections as wrk keeps busy with ease.
const FEW_CONNECTIONS: usize = 16;
const FEW: Load = Load::Requests { connections: FEW_CONNECTIONS, seconds: 1, window: Window::All };
/// Many, each of them active. wrk takes a while to open them, and to close them in the end, which are no part of the figure.
const MANY: Load = Load::Requests {
    connections: 10_000,
    seconds: 6,
    window: Window::Between(Duration::from_secs(3), Duration::from_millis(5500)),
};
const IDLE: Load = Load::Idle { connections: 10_000 };
const SLOW: Load = Load::Slow { of_each: 5000, seconds: 3 };
/// What slow readers ask for.
const LARGEST: &str = "256MiB";

/// Everything that can be asked.
pub const TRIALS: [Trial; 9] = [
    Trial { name: "256MiB", file: "256MiB", load: Load::Bulk, service: Service::Plain },
    Trial { name: "1MiB", file: "1MiB", load: FEW, service: Service::Plain },
    Trial { name: "64KiB", file: "64KiB", load: FEW, service: Service::Plain },
    Trial { name: "4KiB", file: "4KiB", load: FEW, service: Service::Plain },
    Trial { name: "4KiB-logged", file: "4KiB", load: FEW, service: Service::Logged },
    Trial { name: "4KiB-10000", file: "4KiB", load: MANY, service: Service::Plain },
    Trial { name: "https-1MiB", file: "1MiB", load: FEW, service: Service::Tls },
    Trial { name: "idle-10000", file: "4KiB", load: IDLE, service: Service::Plain },
    Trial { name: "slow-10000", file: "4KiB", load: SLOW, service: Service::Plain },
];

const FILES: [(&str, usize); 4] =
    [("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20), ("256MiB", 256 << 20)];

/// What to run.
#[derive(Debug)]
pub struct Plan {
    pub trials: Vec<Trial>,
    pub kinds: Vec<Kind>,
    pub rounds: usize,
    pub congestion: String,
    pub haul: PathBuf,
    /// Options with which `haul serve` is measured once more each.
    pub variants: Vec<String>,
}

/// Runs it all and prints a table for each trial.
pub fn run(plan: &Plan) -> Result<(), String> {
    let failed = |error: LabError| error.to_string();
    haul_lab::become_lab_user().map_err(failed)?;
    let lab = Lab::veth(&Settings::default()).map_err(failed)?;
    for host in [&lab.sender, &lab.receiver] {
        host.set_sysctl("net.ipv4.tcp_congestion_control", &plan.congestion).map_err(failed)?;
    }
    // Ten thousand connections a round: with every port in TIME_WAIT each connect would search all of them for one.
    lab.receiver.set_sysctl("net.ipv4.ip_local_port_range", "1024 65535").map_err(failed)?;
    lab.receiver.set_sysctl("net.ipv4.tcp_max_tw_buckets", "0").map_err(failed)?;
    let scratch = tempfile::tempdir().map_err(|error| error.to_string())?;
    // Apache serves as somebody who is not root.
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))
        .map_err(|error| error.to_string())?;
    let root = scratch.path().join("root");
    write_files(&root).map_err(|error| format!("{}: {error}", root.display()))?;
    // As an installed one is, written in one go, like those that it is compared with; a linker's lies here and there.
    let copied = |error: std::io::Error| format!("copying {}: {error}", plan.haul.display());
    let folder = plan.haul.parent().unwrap_or(Path::new("."));
    let haul = tempfile::NamedTempFile::new_in(folder).map_err(copied)?.into_temp_path();
    fs::copy(&plan.haul, &haul).map_err(copied)?;
    let settled = Instant::now() + SETTLED;
    let mut servers = Vec::new();
    make_certificate(scratch.path())?;
    for service in [Service::Plain, Service::Logged, Service::Tls] {
        if !plan.trials.iter().any(|trial| trial.service == service) {
            continue;
        }
        let variants = plan.variants.iter().map(|options| (Kind::Haul, &**options));
        for (kind, options) in plan.kinds.iter().map(|&kind| (kind, "")).chain(variants) {
            if !kind.offers(service) {
                continue;
            }
            let setup = Setup {
                root: &root,
                scratch: scratch.path(),
                haul: &haul,
                address: SocketAddr::new(lab.sender.address(), FIRST_PORT + servers.len() as u16),
                service,
                options,
            };
            let serving = kind.start(&lab.sender, setup)?;
            wait_until_it_listens(&lab, &serving)?;
            servers.push(serving);
        }
    }
    thread::sleep(settled.saturating_duration_since(Instant::now()));
    for trial in &plan.trials {
        let contestants: Vec<_> =
            servers.iter().filter(|serving| serving.service == trial.service).collect();
        run_trial(&lab, trial, &contestants, plan.rounds)?;
    }
    Ok(())
}

fn write_files(root: &Path) -> std::io::Result<()> {
    fs::create_dir(root)?;
    for (name, bytes) in FILES {
        let content: Vec<u8> = (0..bytes).map(|at| ((at * 2_654_435_761) >> 7) as u8).collect();
        fs::write(root.join(name), content)?;
    }
    Ok(())
}

fn wait_until_it_listens(lab: &Lab, serving: &Serving) -> Result<(), String> {
    let deadline = Instant::now() + LISTEN_MAX;
    while Instant::now() < deadline {
        let connected = lab.receiver.run(|| TcpStream::connect(serving.address).is_ok());
        if connected.map_err(|error| error.to_string())? {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err(format!("{} does not listen at {}", serving.name, serving.address))
}

fn run_trial(
    lab: &Lab,
    trial: &Trial,
    contestants: &[&Serving],
    rounds: usize,
) -> Result<(), String> {
    let failed = |error: haul_soak::SoakError| error.to_string();
    let mut all = vec![Vec::new(); contestants.len()];
    let mut kept = all.clone();
    let mut traffic = vec![Vec::new(); contestants.len()];
    if let Load::Slow { of_each, seconds } = trial.load {
        return run_slow_trial(lab, trial, contestants, rounds, of_each, seconds);
    }
    if let Load::Idle { connections } = trial.load {
        for (serving, figures) in contestants.iter().zip(&mut all) {
            figures.push(or_nothing(serving, idle_memory(lab, trial, serving, connections)));
        }
    } else {
        let meter = Meter::start(&[lab.sender.cpu(), lab.receiver.cpu()]).map_err(failed)?;
        for round in 0..rounds {
            // Who comes first changes, so that nobody always follows the same one.
            for turn in 0..contestants.len() {
                let index = (turn + round) % contestants.len();
                let serving = contestants[index];
                eprintln!("{}: round {} of {rounds}: {}", trial.name, round + 1, serving.name);
                let mut measure = |load| {
                    let measured = measure(lab, &meter, trial.file, load, serving);
                    if load == trial.load {
                        traffic[index]
                            .extend(measured.as_ref().ok().map(|measured| measured.traffic));
                    }
                    or_nothing(serving, measured.map(|measured| measured.figure))
                };
                // At once before: the machine is another one a minute later.
                let with_few = (trial.load == MANY).then(|| measure(FEW));
                let figure = measure(trial.load);
                if figure.is_nan() {
                    // It has not waited for that itself.
                    thread::sleep(CLOSED);
                }
                all[index].push(figure);
                kept[index].extend(with_few.map(|with_few| figure / with_few));
            }
        }
    }
    print(trial, contestants, &all, &kept, &traffic);
    Ok(())
}

/// What becomes of honest clients while others hold the server up: without these and with them, in turn.
fn run_slow_trial(
    lab: &Lab,
    trial: &Trial,
    contestants: &[&Serving],
    rounds: usize,
    of_each: usize,
    seconds: u32,
) -> Result<(), String> {
    println!(
        "\n{}: p99 of unhurried requests in µs, alone and beside twice {of_each} slow clients",
        trial.name
    );
    for serving in contestants {
        let (mut alone, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let mut turned_away = 0;
        let mut problem = None;
        for round in 0..rounds {
            eprintln!("{}: round {} of {rounds}: {}", trial.name, round + 1, serving.name);
            let ask = || {
                let until = Instant::now() + Duration::from_secs(u64::from(seconds));
                let p99 = lab.receiver.run(|| clients::p99(serving.address, trial.file, until));
                p99.map_err(|error| error.to_string())?.map(|p99| p99.as_secs_f64() * 1e6)
            };
            let usual = match ask() {
                Ok(p99) => p99,
                Err(error) => {
                    problem = Some(error);
                    break;
                }
            };
            let crowd = lab.receiver.run(|| Crowd::gather(serving.address, LARGEST, of_each));
            let crowd = match crowd.map_err(|error| error.to_string())? {
                Ok(crowd) => crowd,
                Err(error) => {
                    problem = Some(error);
                    break;
                }
            };
            match ask() {
                Ok(p99) => {
                    alone.push(usual);
                    beside.push(p99);
                    ratios.push(p99 / usual);
                }
                Err(error) => problem = Some(error),
            }
            turned_away = turned_away.max(crowd.turned_away());
        }
        let line = Figure::of(&alone).zip(Figure::of(&beside)).zip(Figure::of(&ratios)).map(
            |((alone, beside), ratio)| {
                format!(
                    "{:>8.0} {:>8.0}  {:.2} ({:.2}–{:.2})",
                    alone.median, beside.median, ratio.median, ratio.low, ratio.high
                )
            },
        );
        let line = line.unwrap_or_else(|| "did not do it".into());
        let problem = problem.map_or(String::new(), |problem| format!("; {problem}"));
        println!("{:<24} {line}; {turned_away} slow ones turned away{problem}", serving.name);
    }
    Ok(())
}

/// A server that does not do what it is asked to has no figure, and the others have theirs.
fn or_nothing(serving: &Serving, figure: Result<f64, String>) -> f64 {
    figure.unwrap_or_else(|problem| {
        eprintln!("{}: {problem}", serving.name);
        f64::NAN
    })
}

/// What one measurement gives.
#[derive(Debug)]
struct Measured {
    /// µs of the server's CPU for each MiB, or requests for each second of it.
    figure: f64,
    traffic: Traffic,
}

/// A moment of the lab.
#[derive(Debug)]
struct Moment {
    meter: Snapshot,
    to_client: Handed,
    to_server: Handed,
}

impl Moment {
    fn now(lab: &Lab, meter: &Meter) -> Result<Self, String> {
        Ok(Self {
            meter: meter.snapshot().map_err(|error| error.to_string())?,
            to_client: Handed::to(lab.receiver.cpu())?,
            to_server: Handed::to(lab.sender.cpu())?,
        })
    }
}

fn measure(
    lab: &Lab,
    meter: &Meter,
    file: &str,
    load: Load,
    serving: &Serving,
) -> Result<Measured, String> {
    let calibration = meter.calibrate(CALIBRATION);
    let mut before = Moment::now(lab, meter)?;
    let mut after = None;
    let done = match load {
        Load::Requests { connections, seconds, window } => thread::scope(|scope| {
            let url = serving.url(file);
            let bytes_at_start = received_bytes(lab)?;
            let wrk = scope.spawn(move || clients::wrk(&lab.receiver, &url, connections, seconds));
            let mut bytes_in_window = None;
            if let Window::Between(from, to) = window {
                thread::sleep(from);
                before = Moment::now(lab, meter)?;
                let bytes_before = received_bytes(lab)?;
                thread::sleep(to.saturating_sub(from));
                after = Some(Moment::now(lab, meter)?);
                bytes_in_window = Some(received_bytes(lab)? - bytes_before);
            }
            let count =
                wrk.join().map_err(|_| "wrk's thread has panicked".to_owned())??.count as f64;
            // Every response is as long as every other.
            let bytes = received_bytes(lab)? - bytes_at_start;
            Ok::<f64, String>(count * bytes_in_window.unwrap_or(bytes) / bytes)
        })?,
        Load::Bulk | Load::Idle { .. } | Load::Slow { .. } => {
            let until = Instant::now() + DRAIN;
            let drained = lab.receiver.run(|| clients::drain(serving.address, file, until));
            drained.map_err(|error| error.to_string())?? as f64
        }
    };
    let after = after.map_or_else(|| Moment::now(lab, meter), Ok)?;
    if load == MANY {
        // The quiet machine that is looked at now shall be quiet, and whoever is next shall find it so.
        thread::sleep(CLOSED);
    }
    let interval = after.meter.since(&before.meter);
    let used = interval.load(&calibration.middle(&meter.calibrate(CALIBRATION)));
    let percent = used.of(lab.sender.cpu()).map_or(f64::NAN, |cpu| cpu.load_percent);
    let cpu_seconds = percent / 100.0 * interval.wall.as_secs_f64();
    let mib = done / f64::from(1 << 20);
    let (figure, count) = match load {
        Load::Requests { .. } => (done / cpu_seconds, done),
        _ => (cpu_seconds * 1e6 / mib, mib),
    };
    let to_client = after.to_client - before.to_client;
    let to_server = after.to_server - before.to_server;
    Ok(Measured { figure, traffic: Traffic::of(to_client, to_server, count) })
}

/// What has come in to the host of those who ask, in bytes.
fn received_bytes(lab: &Lab) -> Result<f64, String> {
    let text = lab.receiver.run(|| fs::read_to_string("/proc/thread-self/net/dev"));
    let text = text.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let device = format!("{}:", lab.receiver.device());
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&device));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| format!("the kernel says nothing of {device}"))
}

/// Memory in MiB that the server has while so many connections that have each asked once lie idle.
fn idle_memory(
    lab: &Lab,
    trial: &Trial,
    serving: &Serving,
    connections: usize,
) -> Result<f64, String> {
    let idle = lab.receiver.run(|| clients::ask_once(serving.address, trial.file, connections));
    let idle = idle.map_err(|error| error.to_string())??;
    // Long enough for a server that frees memory on a timer, well within everybody's keep-alive.
    thread::sleep(Duration::from_secs(3));
    let bytes = serving.memory_bytes();
    drop(idle);
    Ok(bytes as f64 / f64::from(1 << 20))
}

/// A line for each: its figure, haul's over that, and what else was measured: what it keeps of its own rate with few connections,
/// what went between the CPUs for each request or MiB.
fn print(
    trial: &Trial,
    contestants: &[&Serving],
    all: &[Vec<f64>],
    kept: &[Vec<f64>],
    traffic: &[Vec<Traffic>],
) {
    let (unit, is_more_better) = match trial.load {
        Load::Bulk => ("server µs/MiB", false),
        Load::Requests { .. } => ("requests per server-CPU-second", true),
        Load::Idle { .. } => ("MiB resident", false),
        Load::Slow { .. } => ("p99 in µs", false),
    };
    println!(
        "\n{}: {unit} ({} is better), and haul over each",
        trial.name,
        if is_more_better { "more" } else { "less" }
    );
    let haul = contestants.iter().position(|serving| serving.kind == Kind::Haul);
    for (index, serving) in contestants.iter().enumerate() {
        let Some(figure) = Figure::of(&all[index]) else {
            println!("{:<24} did not do it", serving.name);
            continue;
        };
        // The ratio of each round, then their median: both servers met the same machine.
        let ratios: Vec<f64> = haul.map_or(Vec::new(), |haul| {
            all[haul].iter().zip(&all[index]).map(|(haul, other)| haul / other).collect()
        });
        let with_spread = |ratios: &[f64]| {
            Figure::of(ratios)
                .map(|ratio| format!("{:.2} ({:.2}–{:.2})", ratio.median, ratio.low, ratio.high))
        };
        let ratio = with_spread(&ratios).unwrap_or_default();
        let kept = with_spread(&kept[index]);
        let kept = kept
            .map_or(String::new(), |kept| format!("; of its own with {FEW_CONNECTIONS}: {kept}"));
        let traffic = Traffic::median(&traffic[index]);
        let traffic = traffic.map_or(String::new(), |traffic| format!("; {traffic}"));
        println!(
            "{:<24} {:>10.1} ({:.1}–{:.1})  {ratio}{kept}{traffic}",
            serving.name, figure.median, figure.low, figure.high
        );
    }
}
