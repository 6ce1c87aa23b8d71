//! Where an experiment runs: between two hosts of a lab on this machine, or between two machines.

use crate::endpoint::Endpoint;
use crate::flow::{CpuAccount, Sample};
use crate::pair::Pair;
use haul_lab::{CpuPair, Kind, Lab, LabError};
use haul_soak::{Baseline, CpuLoad, Load};
use std::time::Duration;

/// The two hosts of an experiment.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Topology<'a> {
    /// Both hosts are on this machine.
    Lab(&'a Lab),
    /// This machine sends, the other one receives.
    Pair(&'a Pair),
    /// The other machine sends, this one receives.
    TurnedPair(&'a Pair),
}

impl<'a> From<&'a Lab> for Topology<'a> {
    fn from(lab: &'a Lab) -> Self {
        Self::Lab(lab)
    }
}

impl<'a> Topology<'a> {
    /// The host that sends, or forwards.
    pub(crate) fn sender(self) -> Endpoint<'a> {
        match self {
            Self::Lab(lab) => Endpoint::Lab(&lab.sender),
            Self::Pair(pair) => Endpoint::Local(pair.local_address()),
            Self::TurnedPair(pair) => Endpoint::Remote(pair),
        }
    }

    /// The host that receives.
    pub(crate) fn receiver(self) -> Endpoint<'a> {
        match self {
            Self::Lab(lab) => Endpoint::Lab(&lab.receiver),
            Self::Pair(pair) => Endpoint::Remote(pair),
            Self::TurnedPair(pair) => Endpoint::Local(pair.local_address()),
        }
    }

    pub(crate) fn lab(self) -> Option<&'a Lab> {
        match self {
            Self::Lab(lab) => Some(lab),
            Self::Pair(_) | Self::TurnedPair(_) => None,
        }
    }

    pub(crate) fn pair(self) -> Option<&'a Pair> {
        match self {
            Self::Lab(_) => None,
            Self::Pair(pair) | Self::TurnedPair(pair) => Some(pair),
        }
    }

    /// `veth`, `loopback` or `remote`.
    pub(crate) fn kind(self) -> &'static str {
        match self.lab().map(Lab::kind) {
            Some(Kind::Veth) => "veth",
            Some(Kind::DelayLine) => "delay line",
            Some(Kind::Loopback) => "loopback",
            None => "remote",
        }
    }

    /// The link's MTU in bytes.
    pub(crate) fn mtu(self) -> u32 {
        match self {
            Self::Lab(lab) => lab.mtu(),
            Self::Pair(pair) | Self::TurnedPair(pair) => pair.mtu(),
        }
    }

    /// CPUs of the lab's hosts; `None` for two machines.
    pub(crate) fn cpus(self) -> Option<CpuPair> {
        self.lab().map(Lab::cpus)
    }

    /// Whether the load of each host can be measured separately.
    pub(crate) fn has_two_hosts(self) -> bool {
        self.cpus().is_none_or(|cpus| cpus.sender != cpus.receiver)
    }

    /// Differences between the lab and two machines, one sentence each.
    pub(crate) fn caveats(self) -> &'a [String] {
        self.lab().map_or(&[], Lab::caveats)
    }

    /// Distance between the CPUs of the lab's hosts, as the round trip of a cache line; `None` for
    /// two machines.
    pub(crate) fn cache_line_round_trip(self) -> Result<Option<Duration>, LabError> {
        self.lab().map_or(Ok(None), Lab::cache_line_round_trip)
    }

    /// The hosts' loads in a window, with the baselines of the quiet machines subtracted. `None` if
    /// a host was not measured.
    pub(crate) fn loads(self, sample: &Sample, quiet: &Quiet) -> Option<Loads> {
        let local = sample.interval.as_ref()?.load(&quiet.here);
        let remote = || Some(sample.remote_interval.as_ref()?.load(&quiet.there));
        match self {
            Self::Lab(lab) => Loads::of_cpus(lab.cpus(), &local, quiet.ticks_per_second, &|cpu| {
                sample.account_of(cpu).copied()
            }),
            Self::Pair(_) => {
                Some(Loads::of_machines((&local, &quiet.here), (&remote()?, &quiet.there)))
            }
            Self::TurnedPair(_) => {
                Some(Loads::of_machines((&remote()?, &quiet.there), (&local, &quiet.here)))
            }
        }
    }
}

/// Baselines of the quiet machines.
#[derive(Debug, Clone, Default)]
pub(crate) struct Quiet {
    /// Baseline of this machine, or of both hosts of a lab.
    pub here: Baseline,
    /// Baseline of the other machine; empty in a lab.
    pub there: Baseline,
    /// Local timer interrupts per second of the quiet CPU that has most of them: the tick.
    pub ticks_per_second: f64,
}

impl Quiet {
    /// Mean share that other programs took of the CPUs of the busier machine during the
    /// calibrations, in percent.
    pub(crate) fn background_percent(&self) -> f64 {
        self.here.mean_background_percent().max(self.there.mean_background_percent())
    }

    pub(crate) fn middle(&self, other: &Self) -> Self {
        Self {
            here: self.here.middle(&other.here),
            there: self.there.middle(&other.there),
            ticks_per_second: f64::midpoint(self.ticks_per_second, other.ticks_per_second),
        }
    }
}

/// CPU load of one host in a window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostCpuLoad {
    /// Load in percent of one CPU. A lab's host has one CPU; a machine's load is the sum over its
    /// CPUs.
    pub load_percent: f64,
    /// Slowdown of the meter's spinner in the CPU time that was left, in percent; `None` for a
    /// machine.
    pub interference_percent: Option<f64>,
    /// Interrupts and other programs on the CPU of a lab's host; `None` for a machine.
    pub account: Option<HostAccount>,
}

/// Interrupts and other programs on a lab's host during a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HostAccount {
    /// Interrupts per second, other than the local timer's.
    pub interrupts_per_second: f64,
    /// Local timer interrupts per second, beyond the tick of a quiet CPU.
    pub timer_interrupts_per_second: f64,
    /// CPU time of other programs, in percent of the CPU: not used by the flow's processes or the
    /// kernel's threads, and not left to the meter. It is not part of the load; 0 if unknown.
    pub others_percent: f64,
}

/// Loads of both hosts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loads {
    pub sender: HostCpuLoad,
    pub receiver: HostCpuLoad,
    /// The highest steal time that was measured on any of the CPUs, in percent.
    pub steal_percent: f64,
}

impl Loads {
    /// The loads of a lab's hosts.
    pub(crate) fn of_cpus(
        cpus: CpuPair,
        load: &Load,
        ticks_per_second: f64,
        account_of: &dyn Fn(usize) -> Option<CpuAccount>,
    ) -> Option<Self> {
        let of = |cpu| {
            let CpuLoad {
                load_percent, interference_percent, taken_percent, steal_percent, ..
            } = *load.of(cpu)?;
            let account = account_of(cpu).map(|account| HostAccount {
                interrupts_per_second: account.counters.interrupts as f64 / account.seconds,
                timer_interrupts_per_second: (account.counters.timer_interrupts as f64
                    / account.seconds
                    - ticks_per_second)
                    .max(0.0),
                // Time that the hypervisor took counts as load and is reported as steal.
                others_percent: account
                    .used_percent
                    .map_or(0.0, |used| (taken_percent - used - steal_percent).max(0.0)),
            });
            // Noise may make the difference negative. Cut off at 0, it would look exact.
            let load_percent = load_percent - account.map_or(0.0, |account| account.others_percent);
            Some(HostCpuLoad { load_percent, interference_percent, account })
        };
        Some(Self {
            sender: of(cpus.sender)?,
            receiver: of(cpus.receiver)?,
            steal_percent: load.steal_percent(),
        })
    }

    /// The loads of two machines.
    fn of_machines(sender: (&Load, &Baseline), receiver: (&Load, &Baseline)) -> Self {
        // Background work takes about half a percent of each CPU of a quiet machine, which adds up
        // over many CPUs.
        let of = |(load, quiet): (&Load, &Baseline)| HostCpuLoad {
            // May be negative, as in the lab.
            load_percent: load.whole_percent() - quiet.background_percent(),
            interference_percent: None,
            account: None,
        };
        Self {
            sender: of(sender),
            receiver: of(receiver),
            steal_percent: sender.0.steal_percent().max(receiver.0.steal_percent()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(cpus: &[(f64, f64)]) -> Load {
        let cpus =
            cpus.iter().enumerate().map(|(cpu, &(taken_percent, interrupted_percent))| CpuLoad {
                cpu,
                load_percent: (taken_percent + interrupted_percent).clamp(0.0, 100.0),
                taken_percent,
                interrupted_percent,
                interference_percent: Some(1.0),
                proc_stat_percent: 0.0,
                steal_percent: taken_percent / 10.0,
            });
        Load { seconds: 1.0, cpus: cpus.collect() }
    }

    #[test]
    fn loads_in_the_lab_are_per_cpu() {
        let cpus = CpuPair { sender: 1, receiver: 0 };
        let loads =
            Loads::of_cpus(cpus, &load(&[(20.0, 5.0), (70.0, 10.0)]), 0.0, &|_| None).unwrap();
        assert!(
            (loads.sender.load_percent - 80.0).abs() < 1e-9
                && (loads.receiver.load_percent - 25.0).abs() < 1e-9
        );
        assert!((loads.steal_percent - 7.0).abs() < 1e-9);
        assert!(
            Loads::of_cpus(CpuPair { sender: 0, receiver: 7 }, &load(&[(1.0, 1.0)]), 0.0, &|_| {
                None
            })
            .is_none()
        );
    }

    #[test]
    fn the_load_of_a_machine_is_a_sum_in_which_noise_cancels() {
        let quiet = Baseline::default();
        let busy = load(&[(90.0, 5.0), (30.0, 0.0)]);
        let idle = load(&[(0.5, -0.4), (0.1, -0.3), (0.2, 0.1)]);
        let loads = Loads::of_machines((&busy, &quiet), (&idle, &quiet));
        assert!((loads.sender.load_percent - 125.0).abs() < 1e-9);
        assert!((loads.receiver.load_percent - 0.2).abs() < 1e-9, "{loads:?}");
    }
}
