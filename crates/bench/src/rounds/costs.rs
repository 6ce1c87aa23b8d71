//! What both hosts paid for what was moved, in CPU time and in interrupts.

use crate::MIB;
use crate::topology::{HostAccount, HostLoad, Loads};

/// What both hosts paid for what was moved.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    pub bytes_per_second: f64,
    pub sender: HostLoad,
    pub receiver: HostLoad,
    pub sender_us_per_mib: f64,
    pub receiver_us_per_mib: f64,
}

impl Costs {
    /// From the loads of a window in which so much was moved; `None` where nothing was.
    pub(crate) fn of(loads: &Loads, bytes_per_second: f64) -> Option<Self> {
        let Loads { sender, receiver, .. } = *loads;
        // Rates, not sums: each process has a window by its own clock.
        let us_per_mib =
            |host: &HostLoad| host.load_percent / 100.0 * 1e6 / (bytes_per_second / MIB);
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
    /// A count a second of the sending host, and of the receiving one, for each MiB; `None` where hosts are machines.
    fn each_per_mib(&self, of: impl Fn(&HostAccount) -> f64) -> Option<(f64, f64)> {
        let per_mib =
            |host: &HostLoad| Some(of(host.account.as_ref()?) / (self.bytes_per_second / MIB));
        Some((per_mib(&self.sender)?, per_mib(&self.receiver)?))
    }

    /// Interrupts of both hosts' CPUs for each MiB, other than the local timers'.
    pub(crate) fn interrupts_per_mib(&self) -> Option<(f64, f64)> {
        self.each_per_mib(|account| account.interrupts_per_second)
    }

    /// Of both together.
    pub(crate) fn both_interrupts_per_mib(&self) -> Option<f64> {
        self.interrupts_per_mib().map(|(sender, receiver)| sender + receiver)
    }

    /// Interrupts of the local timer of both hosts' CPUs for each MiB, beyond the tick.
    pub(crate) fn timer_interrupts_per_mib(&self) -> Option<(f64, f64)> {
        self.each_per_mib(|account| account.timer_interrupts_per_second)
    }
}
