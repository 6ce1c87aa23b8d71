//! Self-check of the meter: known loads, and interrupt loads that other tools do not show.

use crate::error::BenchError;
use crate::warning::{Kind, Warning};
use haul_lab::{Lab, Settings};
use haul_lab_sys::rusage::{self, Who};
use haul_soak::{Baseline, CpuLoad, Load, Meter, SoakError};
use rustix::thread::CpuSet;
use schemars::JsonSchema;
use serde::Serialize;
use std::net::UdpSocket;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Name and version of the JSON contract.
pub const SCHEMA: &str = "haul.self-check/1";
/// Loads that a thread generates, in percent.
const DUTIES: [u32; 7] = [5, 20, 35, 50, 65, 80, 95];
/// Length of a duty cycle: one slice of the meter, so that each slice holds the same load. It is
/// long compared with the 60 µs of a wake-up.
const CYCLE: Duration = haul_soak::SLICE;
/// Length of the measurement of each load.
const WINDOW: Duration = Duration::from_secs(1);
/// Length of the measurement of an idle machine.
const IDLE_WINDOW: Duration = Duration::from_secs(3);
/// Length of the calibration before and after each measurement.
const CALIBRATION: Duration = Duration::from_millis(300);
/// Packets per second to a CPU whose processes sleep.
const PACKET_RATES: [u32; 3] = [5_000, 20_000, 50_000];
/// Size of a packet; it needs no fragmentation at any usual MTU.
const PACKET_BYTES: usize = 1000;

/// Result of the self-check.
#[derive(Debug, JsonSchema, Serialize)]
pub struct SelfCheck {
    /// Name and version of the contract.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: &'static str,
    /// Reading of the idle machine, in percent: the mean of its CPUs, including other processes.
    pub idle_percent: f64,
    /// Readings of generated loads, one for each duty cycle.
    pub duties: Vec<DutyCycleReading>,
    /// Readings of loads that consist of interrupt work.
    pub packets: Vec<Packets>,
    /// Warnings about the readings.
    pub warnings: Vec<Warning>,
}

/// The meter's reading of a generated load: a thread that is busy for a part of each period.
#[derive(Debug, JsonSchema, Serialize)]
pub struct DutyCycleReading {
    /// Load that the thread generated, by the wall clock.
    pub made_percent: f64,
    /// CPU time of other processes, from the calibrations before and after.
    pub others_percent: f64,
    /// Both together: other processes run in the time that the thread leaves.
    pub expected_percent: f64,
    /// The meter's reading.
    pub read_percent: f64,
    /// The load according to `/proc/stat`.
    pub proc_stat_percent: f64,
}

/// Reading of packets that arrive at a CPU whose processes sleep.
#[derive(Debug, JsonSchema, Serialize)]
#[schemars(rename = "PacketReading")]
pub struct Packets {
    /// Packets actually sent per second.
    pub per_second: f64,
    /// The meter's reading of that CPU, with its two parts.
    pub read: CpuLoad,
    /// CPU time that `getrusage` charged to this process for work on that CPU.
    pub rusage_percent: f64,
}

/// Runs the self-check on the CPUs that a lab would use. It takes about 20 seconds.
pub fn run(
    is_stopped: &AtomicBool,
    progress: &mut dyn FnMut(&str),
) -> Result<SelfCheck, BenchError> {
    let lab = Lab::open(&Settings::default())?;
    let cpu = lab.receiver.cpu();
    let mut cpus = vec![lab.sender.cpu(), cpu];
    cpus.dedup();
    let meter = Meter::start(&cpus)?;
    let mut check = SelfCheck {
        schema: SCHEMA,
        idle_percent: 0.0,
        duties: Vec::new(),
        packets: Vec::new(),
        warnings: lab.caveats().iter().map(|caveat| Warning::new(Kind::Lab, caveat)).collect(),
    };
    progress("idle");
    check.idle_percent = observe(&meter, IDLE_WINDOW, || || ()).load?.total_percent();
    for percent in DUTIES {
        if is_stopped.load(Relaxed) {
            break;
        }
        progress(&format!("a load of {percent} %"));
        check.duties.push(measure_duty_cycle(&meter, cpu, percent)?);
    }
    for rate in PACKET_RATES {
        if is_stopped.load(Relaxed) {
            break;
        }
        progress(&format!("{rate} packets a second"));
        check.packets.push(packets(&meter, &lab, rate)?);
    }
    Ok(check)
}

/// Result of [`observe`].
struct Observed<T> {
    /// Median of the slices of the window.
    load: Result<Load, SoakError>,
    baseline: Baseline,
    /// The value returned by stopping the load.
    result: T,
}

/// Measures for `window` between two calibrations. `start` starts a load and returns the function
/// that stops it.
fn observe<T, End: FnOnce() -> T>(
    meter: &Meter,
    window: Duration,
    start: impl FnOnce() -> End,
) -> Observed<T> {
    let before = meter.calibrate(CALIBRATION);
    let end = start();
    thread::sleep(CYCLE);
    let first = meter.snapshot();
    let slices = meter.observe_slices(window);
    let last = meter.snapshot();
    let result = end();
    let baseline = before.middle(&meter.calibrate(CALIBRATION));
    let loads: Vec<Load> = slices.iter().map(|slice| slice.load(&baseline)).collect();
    let load =
        first.and_then(|first| Ok(Load::median_of(&loads, &last?.since(&first).load(&baseline))));
    Observed { load, baseline, result }
}

/// Measures the CPU load of a thread with a known duty cycle, pinned to `cpu`: in each cycle it is
/// busy for `percent` of the wall-clock time and then sleeps.
fn measure_duty_cycle(
    meter: &Meter,
    cpu: usize,
    percent: u32,
) -> Result<DutyCycleReading, BenchError> {
    let is_over = AtomicBool::new(false);
    let Observed { load, baseline, result: busy } = thread::scope(|scope| {
        observe(meter, WINDOW, || {
            let worker = scope.spawn(|| run_duty_cycle(cpu, f64::from(percent) / 100.0, &is_over));
            || {
                is_over.store(true, Relaxed);
                worker.join().unwrap_or(f64::NAN)
            }
        })
    });
    let others = baseline.disturbance_percent_of(cpu);
    let cpu = of_cpu(&load?, cpu)?;
    Ok(DutyCycleReading {
        made_percent: 100.0 * busy,
        others_percent: others,
        expected_percent: 100.0 * busy + others * (1.0 - busy),
        read_percent: cpu.load_percent,
        proc_stat_percent: cpu.proc_stat_percent,
    })
}

fn of_cpu(load: &Load, cpu: usize) -> Result<CpuLoad, BenchError> {
    load.of(cpu).copied().ok_or_else(|| BenchError::Failed(format!("CPU {cpu} is not measured")))
}

/// Returns the busy share of wall time. It differs from `share` by the delay of each wake-up.
fn run_duty_cycle(cpu: usize, share: f64, is_over: &AtomicBool) -> f64 {
    let mut set = CpuSet::new();
    set.set(cpu);
    // Errors are ignored: a thread that is not pinned or wakes late shows as a wrong reading.
    let _ = rustix::thread::sched_setaffinity(None, &set);
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let start = Instant::now();
    let mut busy = Duration::ZERO;
    for cycle in 0.. {
        let begin = start + CYCLE * cycle;
        thread::sleep(begin.saturating_duration_since(Instant::now()));
        if is_over.load(Relaxed) {
            break;
        }
        let awake = Instant::now();
        let end = begin + CYCLE.mul_f64(share);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        busy += awake.elapsed();
    }
    busy.as_secs_f64() / start.elapsed().as_secs_f64()
}

/// Sends packets to a socket that is never read, so that all work on the receiving CPU is interrupt
/// work.
fn packets(meter: &Meter, lab: &Lab, rate: u32) -> Result<Packets, BenchError> {
    let failed =
        |error: std::io::Error| BenchError::Failed(format!("sending packets in the lab: {error}"));
    let sink =
        lab.receiver.run(|| UdpSocket::bind((lab.receiver.address(), 0)))?.map_err(failed)?;
    let to = sink.local_addr().map_err(failed)?;
    let is_over = AtomicBool::new(false);
    let Observed { load, result, .. } = thread::scope(|scope| {
        observe(meter, WINDOW, || {
            let before = charged(meter);
            let begin = Instant::now();
            let sender = scope.spawn(|| lab.sender.run(|| send_packets(to, rate, &is_over)));
            let is_over = &is_over;
            move || {
                let (charged, seconds) = (charged(meter).saturating_sub(before), begin.elapsed());
                is_over.store(true, Relaxed);
                let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                (sent, charged, seconds)
            }
        })
    });
    let (sent, charged, observed) = result;
    let (sent, seconds, sender_cpu) = sent?.map_err(failed)?;
    // The sending thread's share of the process's CPU time is work on the other CPU.
    let charged = charged.saturating_sub(sender_cpu);
    Ok(Packets {
        per_second: sent as f64 / seconds,
        read: of_cpu(&load?, lab.receiver.cpu())?,
        rusage_percent: 100.0 * charged.as_secs_f64() / observed.as_secs_f64(),
    })
}

/// CPU time that `getrusage` charges to this process, without its spinners.
fn charged(meter: &Meter) -> Duration {
    let process = rusage::usage(Who::Process).unwrap_or_default().cpu();
    process.saturating_sub(meter.own_cpu_time())
}

/// Returns the number of packets sent, the seconds that it took, and the thread's CPU time.
fn send_packets(
    to: std::net::SocketAddr,
    rate: u32,
    is_over: &AtomicBool,
) -> std::io::Result<(u64, f64, Duration)> {
    let socket = UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    let packet = [0; PACKET_BYTES];
    let start = Instant::now();
    let mut sent = 0;
    while !is_over.load(Relaxed) {
        let due = (start.elapsed().as_secs_f64() * f64::from(rate)) as u64;
        while sent < due {
            socket.send_to(&packet, to)?;
            sent += 1;
        }
        thread::sleep(Duration::from_micros(500));
    }
    let cpu = rusage::usage(Who::Thread)?.cpu();
    Ok((sent, start.elapsed().as_secs_f64(), cpu))
}
