//! Where an experiment runs: between two hosts of a lab on this machine, or between this machine and another.

use crate::endpoint::Endpoint;
use crate::flow::{CpuAccount, Sample};
use crate::pair::Pair;
use haul_lab::{CpuPair, Kind, Lab, LabError};
use haul_soak::{Baseline, CpuLoad, Load};
use std::time::Duration;

/// Two hosts that bytes go between.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Topology<'a> {
    /// Both on this machine.
    Lab(&'a Lab),
    /// This machine sends, the other one receives.
    Pair(&'a Pair),
    /// The other way round.
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
            Self::Pair(pair) => Endpoint::Here(pair.here()),
            Self::TurnedPair(pair) => Endpoint::There(pair),
        }
    }

    /// The host that receives.
    pub(crate) fn receiver(self) -> Endpoint<'a> {
        match self {
            Self::Lab(lab) => Endpoint::Lab(&lab.receiver),
            Self::Pair(pair) => Endpoint::There(pair),
            Self::TurnedPair(pair) => Endpoint::Here(pair.here()),
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

    /// The hosts' CPUs, where each has one to itself.
    pub(crate) fn cpus(self) -> Option<CpuPair> {
        self.lab().map(Lab::cpus)
    }

    /// Whether each host's load can be told from the other's.
    pub(crate) fn has_two_hosts(self) -> bool {
        self.cpus().is_none_or(|cpus| cpus.sender != cpus.receiver)
    }

    /// What is not as it would be with two machines, one sentence each.
    pub(crate) fn caveats(self) -> &'a [String] {
        self.lab().map_or(&[], Lab::caveats)
    }

    /// How far the hosts' CPUs are apart, where they are on one machine.
    pub(crate) fn cache_line_round_trip(self) -> Result<Option<Duration>, LabError> {
        self.lab().map_or(Ok(None), Lab::cache_line_round_trip)
    }

    /// The hosts' loads in a window, between what quiet machines showed before and after; `None` where a host was not
    /// measured.
    pub(crate) fn loads(self, sample: &Sample, quiet: &Quiet) -> Option<Loads> {
        let here = sample.interval.as_ref()?.load(&quiet.here);
        let there = || Some(sample.there.as_ref()?.load(&quiet.there));
        match self {
            Self::Lab(lab) => Loads::of_cpus(lab.cpus(), &here, quiet.ticks_per_second, &|cpu| {
                sample.account_of(cpu).copied()
            }),
            Self::Pair(_) => {
                Some(Loads::of_machines((&here, &quiet.here), (&there()?, &quiet.there)))
            }
            Self::TurnedPair(_) => {
                Some(Loads::of_machines((&there()?, &quiet.there), (&here, &quiet.here)))
            }
        }
    }
}

/// What quiet machines show.
#[derive(Debug, Clone, Default)]
pub(crate) struct Quiet {
    /// This one, or both hosts of a lab.
    pub here: Baseline,
    /// The other one; nothing in a lab.
    pub there: Baseline,
    /// Interrupts of the local timer a second of this machine's CPU where that is most: the tick.
    pub ticks_per_second: f64,
}

impl Quiet {
    pub(crate) fn middle(&self, other: &Self) -> Self {
        Self {
            here: self.here.middle(&other.here),
            there: self.there.middle(&other.there),
            ticks_per_second: f64::midpoint(self.ticks_per_second, other.ticks_per_second),
        }
    }
}

/// How busy a host was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostLoad {
    /// 100 is one CPU. Of a lab's host that is all it has; of a machine it is the sum over all.
    pub load_percent: f64,
    /// How much slower the meter's spinner went in what was left, where a host has one CPU.
    pub interference_percent: Option<f64>,
    /// What a CPU of a lab did besides; `None` of a machine.
    pub account: Option<HostAccount>,
}

/// What a lab's host did in a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HostAccount {
    /// Interrupts a second, other than the local timer's.
    pub interrupts_per_second: f64,
    /// Interrupts of the local timer a second, beyond the tick that a quiet CPU has.
    pub timer_interrupts_per_second: f64,
    /// The share of the CPU that neither the flow's processes nor the kernel's threads used and that was not left to the
    /// meter: other programs. It is no part of the load; 0 where it cannot be told.
    pub others_percent: f64,
}

/// How busy both hosts were.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loads {
    pub sender: HostLoad,
    pub receiver: HostLoad,
    /// What the hypervisor took, of the CPU that it took most of.
    pub steal_percent: f64,
}

impl Loads {
    /// Of a lab's hosts.
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
                // What the hypervisor took is load, and reported as steal.
                others_percent: account
                    .used_percent
                    .map_or(0.0, |used| (taken_percent - used - steal_percent).max(0.0)),
            });
            let others_percent = account.map_or(0.0, |account| account.others_percent);
            let load_percent = (load_percent - others_percent).max(0.0);
            Some(HostLoad { load_percent, interference_percent, account })
        };
        Some(Self {
            sender: of(cpus.sender)?,
            receiver: of(cpus.receiver)?,
            steal_percent: load.steal_percent(),
        })
    }

    /// Of two machines.
    fn of_machines(sender: (&Load, &Baseline), receiver: (&Load, &Baseline)) -> Self {
        // What a quiet machine does besides (half a percent of each CPU) adds up over many.
        let of = |(load, quiet): (&Load, &Baseline)| HostLoad {
            load_percent: (load.whole_percent() - quiet.taken_percent()).max(0.0),
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
    fn a_labs_hosts_have_a_cpu_each() {
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
    fn a_machines_load_is_the_sum_and_noise_does_not_add_up() {
        let quiet = Baseline::default();
        let busy = load(&[(90.0, 5.0), (30.0, 0.0)]);
        let idle = load(&[(0.5, -0.4), (0.1, -0.3), (0.2, 0.1)]);
        let loads = Loads::of_machines((&busy, &quiet), (&idle, &quiet));
        assert!((loads.sender.load_percent - 125.0).abs() < 1e-9);
        assert!((loads.receiver.load_percent - 0.2).abs() < 1e-9, "{loads:?}");
    }
}
