//! Whether a TCP socket is paced: whether timers, and not only the windows, decide when its packets leave.
//!
//! Pacing costs CPU where the network is not the limit: each group of packets waits for a timer, which is an interrupt, and
//! packets leave in small groups instead of large ones. The kernel paces a socket that has a congestion control such as BBR,
//! or `SO_MAX_PACING_RATE`, **and every socket that ever had one**: `TCP_CONGESTION` set after `connect` changes the
//! algorithm and leaves the pacing of the first one on (`sk_pacing_status` of include/net/sock.h is never reset). Every
//! program that sets `TCP_CONGESTION` late on a host whose default is BBR has this fault.
//!
//! No call reads that state. [`Watch`] concludes it: where the default congestion control of the network namespace paces and
//! the socket's own does not, it counts the timer interrupts of the CPU for each MiB that is sent. A paced socket has 2 to 30,
//! another one hardly any (docs/findings.md).
//!
//! What this cannot see: pacing by the queueing discipline `fq`, which holds packets behind the socket; timers that expire on
//! another CPU than the sending thread's; and a socket that sends too little to be judged. What it takes for this socket's
//! timers may be those of another paced socket that the same CPU serves.

use haul_sys::tcp_info::tcp_info;
use rustix::net::sockopt;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

/// Congestion controls that pace by themselves (net/ipv4/tcp_bbr.c; `bbr2` and `bbr3` outside the kernel's tree).
const PACING_ALGORITHMS: [&str; 3] = ["bbr", "bbr2", "bbr3"];
/// The default of the calling thread's network namespace.
const DEFAULT_FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
/// A stretch of less than this has too few timers to judge by.
const STRETCH_BYTES: u64 = 8 << 20;
/// After so many stretches without a sign the socket is taken for one that is not paced.
const STRETCHES_MAX: u32 = 16;
/// Timer interrupts for each MiB, beyond the tick, from which on a socket is paced.
const TIMERS_PER_MIB: f64 = 1.0;
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
    /// `SO_MAX_PACING_RATE` is set to this many bytes a second.
    MaxRate(u64),
    /// Its congestion control, of this name, paces.
    CongestionControl(String),
    /// Its congestion control does not pace, and an earlier one has left pacing on.
    Leftover {
        /// The socket's congestion control.
        congestion: String,
        /// The namespace's default, which the socket began with.
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
                "paced although its congestion control is {congestion}: {earlier} was set up at the handshake, so set \
                 TCP_CONGESTION before connect or listen"
            ),
        }
    }
}

/// Readings of one socket while it sends.
#[derive(Debug, Clone, Copy, Default)]
pub struct Watch {
    state: State,
    begin: Option<Reading>,
    /// Stretches that showed nothing.
    stretches: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Nothing was looked at yet.
    #[default]
    New,
    /// It could be paced by an earlier congestion control.
    Possible,
    /// Timers show that it is.
    Leftover,
    /// It is not, or for a reason that needs no watch.
    Settled,
}

/// What a CPU and a connection have done so far.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    cpu: usize,
    timer_interrupts: u64,
    sent_bytes: u64,
}

impl Watch {
    /// Takes a reading. Worth taking after each MiB or so; on a host whose default congestion control does not pace only the
    /// first reading makes system calls.
    pub fn look(&mut self, socket: impl AsFd) -> io::Result<()> {
        match self.state {
            State::New => {
                let is_possible = default_congestion().is_some_and(|name| is_pacing(&name))
                    && !is_pacing(&sockopt::tcp_congestion(&socket)?);
                self.state = if is_possible { State::Possible } else { State::Settled };
            }
            State::Possible => self.compare(Reading::take(&socket)?),
            State::Leftover | State::Settled => {}
        }
        Ok(())
    }

    fn compare(&mut self, now: Option<Reading>) {
        let (Some(now), Some(begin)) = (now, self.begin) else {
            self.begin = now;
            return self.shows_nothing();
        };
        if now.cpu != begin.cpu {
            self.begin = Some(now);
            return self.shows_nothing();
        }
        let sent_bytes = now.sent_bytes.saturating_sub(begin.sent_bytes);
        if sent_bytes < STRETCH_BYTES {
            return;
        }
        self.begin = Some(now);
        let timers = now.timer_interrupts.saturating_sub(begin.timer_interrupts) as f64;
        let ticks = TICKS_PER_SECOND_MAX * (now.at - begin.at).as_secs_f64();
        if timers - ticks >= TIMERS_PER_MIB * sent_bytes as f64 / MIB {
            self.state = State::Leftover;
        } else {
            // A stretch that the receive window holds back has few timers, paced or not.
            self.shows_nothing();
        }
    }

    fn shows_nothing(&mut self) {
        self.stretches += 1;
        if self.stretches == STRETCHES_MAX {
            self.state = State::Settled;
        }
    }

    /// Why the socket is paced; `None` where nothing shows that it is.
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
    /// `None` where the kernel does not count timer interrupts by CPU.
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

/// The congestion control that sockets of this network namespace begin with.
pub fn default_congestion() -> Option<String> {
    fs::read_to_string(DEFAULT_FILE).ok().map(|name| name.trim().to_owned())
}

/// The local timer's interrupts of a CPU, from `/proc/interrupts`: `LOC` on x86, a line of the `arch_timer` on Arm.
pub fn timer_interrupts(table: &str, cpu: usize) -> Option<u64> {
    let mut lines = table.lines();
    let head = format!("CPU{cpu}");
    // CPUs that are offline have no column.
    let column = lines.next()?.split_ascii_whitespace().position(|name| name == head)?;
    let line =
        lines.find(|line| line.trim_start().starts_with("LOC:") || line.ends_with("arch_timer"))?;
    line.split_ascii_whitespace().nth(1 + column)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn after(begin: Reading, mib: u64, milliseconds: u64, timers: u64) -> Reading {
        Reading {
            at: begin.at + Duration::from_millis(milliseconds),
            timer_interrupts: begin.timer_interrupts + timers,
            sent_bytes: begin.sent_bytes + (mib << 20),
            ..begin
        }
    }

    fn judged(mib: u64, milliseconds: u64, timers: u64) -> State {
        let begin = Reading { at: Instant::now(), cpu: 0, timer_interrupts: 7, sent_bytes: 9 };
        let mut watch = Watch { state: State::Possible, ..Watch::default() };
        watch.compare(Some(begin));
        watch.compare(Some(after(begin, mib, milliseconds, timers)));
        watch.state
    }

    #[test]
    fn timers_beyond_the_tick_are_pacing_and_too_little_is_nothing() {
        assert_eq!(judged(10, 10, 200), State::Leftover);
        assert_eq!(judged(10, 10, 10), State::Possible);
        // As many as the fastest tick makes in that time.
        assert_eq!(judged(10, 100, 100), State::Possible);
        assert_eq!(judged(7, 10, 200), State::Possible);
    }

    #[test]
    fn a_socket_that_shows_nothing_is_not_looked_at_for_ever() {
        let begin = Reading { at: Instant::now(), cpu: 0, timer_interrupts: 7, sent_bytes: 9 };
        let mut watch = Watch { state: State::Possible, ..Watch::default() };
        for stretch in 0..u64::from(STRETCHES_MAX) {
            assert_eq!(watch.state, State::Possible);
            watch.compare(Some(after(begin, 10 * stretch, 10 * stretch, 0)));
        }
        assert_eq!(watch.state, State::Settled);
    }

    #[test]
    fn the_timers_of_a_cpu_are_found() {
        let x86 = "           CPU0       CPU2\n  1:  10  20  IO-APIC  1-edge  i8042\nLOC:  5  6  Local timer\n";
        assert_eq!((timer_interrupts(x86, 2), timer_interrupts(x86, 1)), (Some(6), None));
        let arm = "    CPU0  CPU1\n 11:  41  42  GICv3  27 Level     arch_timer\n";
        assert_eq!(timer_interrupts(arm, 1), Some(42));
        assert_eq!(timer_interrupts("", 0), None);
    }
}
