//! Detects whether a TCP socket is paced: whether timers, and not only the windows, decide when its
//! packets leave.
//!
//! Pacing costs CPU where the network is not the limit. Each group of packets waits for a timer,
//! which is an interrupt. Packets also leave in small groups instead of large ones. The kernel
//! paces a socket that has a congestion control such as BBR, or `SO_MAX_PACING_RATE`, **and every
//! socket that ever had one**. If `TCP_CONGESTION` is set after `connect`, it changes the algorithm
//! and leaves the pacing of the first one on (`sk_pacing_status` of include/net/sock.h is never
//! reset). So every program that sets `TCP_CONGESTION` late is affected on a host whose default is
//! BBR.
//!
//! No system call reads that state, so [`PacingMonitor`] infers it. If the default congestion
//! control of the network namespace paces and the socket's own does not, it counts the timer
//! interrupts of the CPU per MiB sent. A paced socket has 2 to 30, another one hardly any
//! (docs/measurements/congestion.md).
//!
//! Limits:
//!
//! * Pacing by the queueing discipline `fq`, which holds packets behind the socket, is not
//!   detected.
//! * Timers that expire on another CPU than the sending thread's are not counted.
//! * A socket that sends less than about 16 MiB is not judged.
//! * Timers of another paced socket that the same CPU serves are attributed to this one.

use haul_sys::tcp_info::tcp_info;
use rustix::net::sockopt;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

/// Congestion controls that pace by themselves (net/ipv4/tcp_bbr.c; `bbr2` and `bbr3` outside the
/// kernel's tree).
const PACING_ALGORITHMS: [&str; 3] = ["bbr", "bbr2", "bbr3"];
/// The default congestion control of the calling thread's network namespace.
const DEFAULT_FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
/// Bytes between two samples. The kernel takes 34 µs to print `/proc/interrupts` on two CPUs
/// (docs/measurements/auto.md), and longer on more.
const SAMPLE_BYTES: u64 = 8 << 20;
/// The fewest bytes that the peer was sent between two samples. Fewer have too few timers to judge
/// by. It is less than [`SAMPLE_BYTES`], because the send buffer may hold more than at the start.
const COMPARED_BYTES_MIN: u64 = 4 << 20;
/// Samples without evidence of pacing after which a socket counts as not paced.
const SAMPLES_MAX: u32 = 16;
/// Timer interrupts per MiB, beyond the tick, from which on a socket counts as paced.
const PACED_TIMERS_PER_MIB_MIN: f64 = 1.0;
/// The fastest tick that kernels are built with (`CONFIG_HZ`).
const TICKS_PER_SECOND_MAX: f64 = 1000.0;
const MIB: f64 = (1u64 << 20) as f64;

/// Whether a congestion control of this name paces by itself.
pub fn is_pacing(congestion: &str) -> bool {
    PACING_ALGORITHMS.contains(&congestion)
}

/// Why the packets of a socket are paced.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pacing {
    /// `SO_MAX_PACING_RATE` is set to this many bytes per second.
    MaxRate(u64),
    /// Its congestion control, of this name, paces.
    CongestionControl(String),
    /// Its congestion control does not pace, but an earlier one has left pacing on.
    Leftover {
        /// The socket's congestion control.
        congestion: String,
        /// The namespace's default, which the socket had at first.
        earlier: String,
    },
}

impl std::fmt::Display for Pacing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MaxRate(bytes) => {
                write!(formatter, "paced to {bytes} bytes a second (SO_MAX_PACING_RATE)")
            }
            Self::CongestionControl(name) => {
                write!(formatter, "paced by its congestion control, {name}")
            }
            Self::Leftover { congestion, earlier } => write!(
                formatter,
                "paced although its congestion control is {congestion}: {earlier} was set up at \
                 the handshake, so set TCP_CONGESTION before connect or listen"
            ),
        }
    }
}

/// Detects the pacing of one socket from counters that are sampled while it sends.
#[derive(Debug, Clone, Copy, Default)]
pub struct PacingMonitor {
    state: State,
    /// Bytes that were sent since the last sample.
    unsampled_bytes: u64,
    start: Option<Reading>,
    /// Samples without evidence of pacing.
    samples_without_evidence: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// No sample was taken yet.
    #[default]
    New,
    /// The socket may be paced by an earlier congestion control.
    Possible,
    /// The timers prove that it is.
    Leftover,
    /// It is not, or for a reason that needs no samples.
    Finished,
}

/// Counters of a CPU and a connection at one time.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    cpu: usize,
    timer_interrupts: u64,
    sent_bytes: u64,
}

impl PacingMonitor {
    /// Records sent bytes. Samples the counters after each 8 MiB until the socket is judged. On a
    /// host whose default congestion control does not pace, only the first sample makes system
    /// calls.
    pub fn record_sent(&mut self, socket: impl AsFd, sent_bytes: u64) -> io::Result<()> {
        if self.is_sample_due(sent_bytes) { self.sample(socket) } else { Ok(()) }
    }

    /// Counts sent bytes. Returns whether a sample is due.
    fn is_sample_due(&mut self, sent_bytes: u64) -> bool {
        self.unsampled_bytes += sent_bytes;
        let is_due = self.unsampled_bytes >= SAMPLE_BYTES;
        if is_due {
            self.unsampled_bytes = 0;
        }
        is_due && matches!(self.state, State::New | State::Possible)
    }

    fn sample(&mut self, socket: impl AsFd) -> io::Result<()> {
        if self.state == State::New {
            let is_possible = default_congestion().is_some_and(|name| is_pacing(&name))
                && !is_pacing(&sockopt::tcp_congestion(&socket)?);
            self.state = if is_possible { State::Possible } else { State::Finished };
        }
        if self.state == State::Possible {
            self.compare(Reading::take(&socket)?);
        }
        Ok(())
    }

    fn compare(&mut self, now: Option<Reading>) {
        let (Some(now), Some(start)) = (now, self.start) else {
            self.start = now;
            return self.count_without_evidence();
        };
        if now.cpu != start.cpu {
            self.start = Some(now);
            return self.count_without_evidence();
        }
        let sent_bytes = now.sent_bytes.saturating_sub(start.sent_bytes);
        if sent_bytes < COMPARED_BYTES_MIN {
            return;
        }
        self.start = Some(now);
        let timers = now.timer_interrupts.saturating_sub(start.timer_interrupts) as f64;
        let ticks = TICKS_PER_SECOND_MAX * (now.at - start.at).as_secs_f64();
        if timers - ticks >= PACED_TIMERS_PER_MIB_MIN * sent_bytes as f64 / MIB {
            self.state = State::Leftover;
        } else {
            // If the receive window holds the sender back, a sample has few timers, paced or not.
            self.count_without_evidence();
        }
    }

    fn count_without_evidence(&mut self) {
        self.samples_without_evidence += 1;
        if self.samples_without_evidence == SAMPLES_MAX {
            self.state = State::Finished;
        }
    }

    /// Why the socket is paced; `None` if nothing indicates that it is.
    pub fn pacing(&self, socket: impl AsFd) -> io::Result<Option<Pacing>> {
        let limit = tcp_info(&socket)?.pacing_rate_bytes_per_second_max;
        if limit != u64::MAX {
            return Ok(Some(Pacing::MaxRate(limit)));
        }
        let congestion = sockopt::tcp_congestion(&socket)?;
        if is_pacing(&congestion) {
            return Ok(Some(Pacing::CongestionControl(congestion)));
        }
        let earlier = default_congestion().unwrap_or_default();
        Ok((self.state == State::Leftover).then_some(Pacing::Leftover { congestion, earlier }))
    }
}

impl Reading {
    /// `None` if the kernel does not count timer interrupts by CPU.
    fn take(socket: impl AsFd) -> io::Result<Option<Self>> {
        let sent_bytes = tcp_info(socket)?.sent_bytes;
        let cpu = rustix::thread::sched_getcpu();
        let table = fs::read_to_string("/proc/interrupts")?;
        let timer_interrupts = timer_interrupts(&table, cpu);
        Ok(timer_interrupts.map(|timer_interrupts| Self {
            at: Instant::now(),
            cpu,
            timer_interrupts,
            sent_bytes,
        }))
    }
}

/// The default congestion control of new sockets in this network namespace.
pub fn default_congestion() -> Option<String> {
    fs::read_to_string(DEFAULT_FILE).ok().map(|name| name.trim().to_owned())
}

/// The local timer interrupts of a CPU, from `/proc/interrupts`: `LOC` on x86, a line of the
/// `arch_timer` on Arm.
pub fn timer_interrupts(table: &str, cpu: usize) -> Option<u64> {
    let mut lines = table.lines();
    let header = format!("CPU{cpu}");
    // CPUs that are offline have no column.
    let column = lines.next()?.split_ascii_whitespace().position(|name| name == header)?;
    let line =
        lines.find(|line| line.trim_start().starts_with("LOC:") || line.ends_with("arch_timer"))?;
    line.split_ascii_whitespace().nth(1 + column)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn after(start: Reading, mib: u64, milliseconds: u64, timers: u64) -> Reading {
        Reading {
            at: start.at + Duration::from_millis(milliseconds),
            timer_interrupts: start.timer_interrupts + timers,
            sent_bytes: start.sent_bytes + (mib << 20),
            ..start
        }
    }

    fn state_after(mib: u64, milliseconds: u64, timers: u64) -> State {
        let start = Reading { at: Instant::now(), cpu: 0, timer_interrupts: 7, sent_bytes: 9 };
        let mut monitor = PacingMonitor { state: State::Possible, ..PacingMonitor::default() };
        monitor.compare(Some(start));
        monitor.compare(Some(after(start, mib, milliseconds, timers)));
        monitor.state
    }

    #[test]
    fn timers_beyond_the_tick_prove_pacing_and_short_samples_do_not() {
        assert_eq!(state_after(10, 10, 200), State::Leftover);
        assert_eq!(state_after(10, 10, 10), State::Possible);
        // As many as the fastest tick makes in that time.
        assert_eq!(state_after(10, 100, 100), State::Possible);
        assert_eq!(state_after(3, 10, 200), State::Possible);
    }

    /// On a machine where a sample took 34 µs, one for each file of 350 kB had raised the cost of
    /// sending by half.
    #[test]
    fn a_sample_is_due_once_for_each_8_mib() {
        let mut monitor = PacingMonitor::default();
        let due = |monitor: &mut PacingMonitor| {
            (0..80).filter(|_| monitor.is_sample_due(1 << 20)).count()
        };
        assert_eq!(due(&mut monitor), 10);
        monitor.state = State::Finished;
        assert_eq!(due(&mut monitor), 0);
    }

    #[test]
    fn a_socket_without_evidence_of_pacing_is_not_sampled_forever() {
        let start = Reading { at: Instant::now(), cpu: 0, timer_interrupts: 7, sent_bytes: 9 };
        let mut monitor = PacingMonitor { state: State::Possible, ..PacingMonitor::default() };
        for sample in 0..u64::from(SAMPLES_MAX) {
            assert_eq!(monitor.state, State::Possible);
            monitor.compare(Some(after(start, 10 * sample, 10 * sample, 0)));
        }
        assert_eq!(monitor.state, State::Finished);
    }

    #[test]
    fn the_timer_interrupts_of_a_cpu_are_parsed() {
        let x86 = "           CPU0       CPU2\n  1:  10  20  IO-APIC  1-edge  i8042\n\
                   LOC:  5  6  Local timer\n";
        assert_eq!((timer_interrupts(x86, 2), timer_interrupts(x86, 1)), (Some(6), None));
        let arm = "    CPU0  CPU1\n 11:  41  42  GICv3  27 Level     arch_timer\n";
        assert_eq!(timer_interrupts(arm, 1), Some(42));
        assert_eq!(timer_interrupts("", 0), None);
    }
}
