//! Packets between the two hosts' CPUs, and the inter-processor interrupts that announce them.
//!
//! Not every packet needs an interrupt: packets that arrive while the CPU is still processing
//! earlier ones share theirs.

use haul_bench::Estimate;
use std::fmt;
use std::fs;
use std::ops::Sub;

/// Counters of one CPU since boot (`/proc/net/softnet_stat`): packets that other CPUs passed to it,
/// and the interrupts that announced them.
#[derive(Debug, Clone, Copy, Default)]
pub struct PacketCounters {
    packets: u32,
    interrupts: u32,
}

impl PacketCounters {
    /// Reads the counters of a CPU.
    pub fn read(cpu: usize) -> Result<Self, String> {
        const PATH: &str = "/proc/net/softnet_stat";
        let text = fs::read_to_string(PATH).map_err(|error| format!("{PATH}: {error}"))?;
        Self::parse(&text, cpu).ok_or_else(|| format!("{PATH} has no line for CPU {cpu}"))
    }

    /// Parses the line of a CPU. The file has one line for each online CPU.
    ///
    /// The fields are hexadecimal: the first is the number of packets, the tenth is the number of
    /// interrupts, and the thirteenth is the CPU's number.
    fn parse(text: &str, cpu: usize) -> Option<Self> {
        text.lines().find_map(|line| {
            let field =
                |index| u32::from_str_radix(line.split_ascii_whitespace().nth(index)?, 16).ok();
            (field(12)? as usize == cpu)
                .then_some(Self { packets: field(0)?, interrupts: field(9)? })
        })
    }
}

impl Sub for PacketCounters {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        // The kernel counts and prints 32 bits, so the counters wrap around.
        Self {
            packets: self.packets.wrapping_sub(before.packets),
            interrupts: self.interrupts.wrapping_sub(before.interrupts),
        }
    }
}

/// Packets and interrupts per request, or per MiB, in both directions.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    /// Packets to the client, interrupts of its CPU, packets to the server, interrupts of its CPU.
    figures: [f64; 4],
}

impl Traffic {
    /// Divides the counted packets and interrupts by `count` requests or MiB.
    pub fn of(to_client: PacketCounters, to_server: PacketCounters, count: f64) -> Self {
        let all =
            [to_client.packets, to_client.interrupts, to_server.packets, to_server.interrupts];
        Self { figures: all.map(|number| f64::from(number) / count) }
    }

    /// Returns the median of each figure; `None` for an empty slice.
    pub fn median(samples: &[Self]) -> Option<Self> {
        let median = |index: usize| {
            let figures: Vec<_> = samples.iter().map(|traffic| traffic.figures[index]).collect();
            Some(Estimate::of(&figures)?.median)
        };
        Some(Self { figures: [median(0)?, median(1)?, median(2)?, median(3)?] })
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [packets_out, interrupts_out, packets_in, interrupts_in] = self.figures;
        write!(
            formatter,
            "packets {packets_out:.2} out {packets_in:.2} in, \
             interrupts {interrupts_out:.2} out {interrupts_in:.2} in"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_belong_to_a_cpu_number_and_wrap_around() {
        let line = |packets: &str, interrupts: &str, cpu: &str| {
            format!("{packets} 0 0 0 0 0 0 0 0 {interrupts} 0 0 {cpu} 0 0\n")
        };
        let text =
            line("0000ffff", "00000010", "00000000") + &line("00000002", "00000001", "00000003");
        let counters = PacketCounters::parse(&text, 3).unwrap();
        assert_eq!((counters.packets, counters.interrupts), (2, 1));
        assert_eq!(PacketCounters::parse(&text, 0).unwrap().packets, 0xffff);
        assert!(PacketCounters::parse(&text, 1).is_none());
        let later = PacketCounters { packets: 1, interrupts: 5 };
        let difference = later - PacketCounters { packets: u32::MAX, interrupts: 1 };
        let text = Traffic::of(difference, difference, 2.0).to_string();
        assert_eq!(
            text, "packets 1.00 out 1.00 in, interrupts 2.00 out 2.00 in",
            "the counters wrap around"
        );
    }
}
