//! The costs of both hosts: CPU time and interrupts per MiB.

use crate::topology::{HostAccount, HostCpuLoad, Loads};
use haul_units::MIB;

/// The costs of both hosts in a window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    pub bytes_per_second: f64,
    pub sender: HostCpuLoad,
    pub receiver: HostCpuLoad,
    pub sender_us_per_mib: f64,
    pub receiver_us_per_mib: f64,
}

impl Costs {
    /// Computes the costs from the loads and the throughput of a window; `None` if no bytes were
    /// transferred.
    pub(crate) fn of(loads: &Loads, bytes_per_second: f64) -> Option<Self> {
        let Loads { sender, receiver, .. } = *loads;
        // Rates are used instead of sums, because each process measures its window by its own
        // clock.
        let us_per_mib =
            |host: &HostCpuLoad| host.load_percent / 100.0 * 1e6 / (bytes_per_second / MIB);
        (bytes_per_second > 0.0).then(|| Self {
            bytes_per_second,
            sender_us_per_mib: us_per_mib(&sender),
            receiver_us_per_mib: us_per_mib(&receiver),
            sender,
            receiver,
        })
    }
}

impl Costs {
    /// A count per second, of the sending and of the receiving host, converted to one per MiB.
    /// `None` if the hosts are two machines.
    fn each_per_mib(&self, of: impl Fn(&HostAccount) -> f64) -> Option<(f64, f64)> {
        let per_mib =
            |host: &HostCpuLoad| Some(of(host.account.as_ref()?) / (self.bytes_per_second / MIB));
        Some((per_mib(&self.sender)?, per_mib(&self.receiver)?))
    }

    /// Interrupts on the sending and the receiving host's CPU per MiB, without local timer
    /// interrupts.
    pub(crate) fn interrupts_per_mib(&self) -> Option<(f64, f64)> {
        self.each_per_mib(|account| account.interrupts_per_second)
    }

    /// Interrupts on both hosts' CPUs per MiB, without local timer interrupts.
    pub(crate) fn both_interrupts_per_mib(&self) -> Option<f64> {
        self.interrupts_per_mib().map(|(sender, receiver)| sender + receiver)
    }

    /// Local timer interrupts on the sending and the receiving host's CPU per MiB, beyond the tick.
    pub(crate) fn timer_interrupts_per_mib(&self) -> Option<(f64, f64)> {
        self.each_per_mib(|account| account.timer_interrupts_per_second)
    }
}
