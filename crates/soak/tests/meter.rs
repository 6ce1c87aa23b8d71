//! Tests of the meter on the real kernel, on a machine that other tests keep busy. They check that
//! busy and idle CPUs are distinguished. `haul soak --self-check` measures the precision.

use haul_soak::{Meter, ProcStat};
use rustix::thread::CpuSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

fn first_cpu() -> usize {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu)).unwrap()
}

#[test]
fn a_busy_cpu_reads_as_busy() {
    let cpu = first_cpu();
    let meter = Meter::start(&[cpu]).unwrap();
    let baseline = meter.calibrate(Duration::from_millis(100));
    let is_done = AtomicBool::new(false);
    let load = thread::scope(|scope| {
        scope.spawn(|| {
            let mut set = CpuSet::new();
            set.set(cpu);
            rustix::thread::sched_setaffinity(None, &set).unwrap();
            while !is_done.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        thread::sleep(Duration::from_millis(50));
        let load = meter.observe(Duration::from_millis(300)).unwrap().load(&baseline);
        is_done.store(true, Relaxed);
        load
    });
    let reading = load.of(cpu).unwrap();
    assert!(reading.load_percent > 90.0, "{reading:?}");
    assert!(reading.taken_percent > 90.0, "{reading:?}");
}

#[test]
fn a_paused_meter_uses_no_cpu() {
    let meter = Meter::start(&[first_cpu()]).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert!(meter.own_cpu_time() > Duration::ZERO);
    let used = meter.paused(|| {
        // The spinner may finish its turn before it reads the flag.
        thread::sleep(Duration::from_millis(100));
        let before = meter.own_cpu_time();
        thread::sleep(Duration::from_millis(100));
        meter.own_cpu_time().saturating_sub(before)
    });
    assert_eq!(used, Duration::ZERO);
}

#[test]
fn the_kernel_accounts_the_spinner_as_nice_time() {
    let cpu = first_cpu();
    let before = ProcStat::read().unwrap().0[&cpu];
    let _meter = Meter::start(&[cpu]).unwrap();
    // Other tests may use the CPU for a while; the spinner gets it eventually.
    for _ in 0..100 {
        thread::sleep(Duration::from_millis(50));
        if ProcStat::read().unwrap().0[&cpu].since(&before).nice >= 5 {
            return;
        }
    }
    panic!("no nice time of the spinner within 5 s");
}
