//! What went between the two hosts' CPUs: packets, and the interrupts with which one told the other of them. Not every packet
//! needs one: those that come while the other is still busy with packets before share it.

use haul_bench::Figure;
use std::fmt;
use std::fs;
use std::ops::Sub;

/// What one CPU was handed by others since the machine started (`/proc/net/softnet_stat`).
#[derive(Debug, Clone, Copy, Default)]
pub struct Handed {
    packets: u32,
    interrupts: u32,
}

impl Handed {
    /// What this CPU has been handed until now.
    pub fn to(cpu: usize) -> Result<Self, String> {
        const PATH: &str = "/proc/net/softnet_stat";
        let text = fs::read_to_string(PATH).map_err(|error| format!("{PATH}: {error}"))?;
        Self::parse(&text, cpu).ok_or_else(|| format!("{PATH} says nothing of CPU {cpu}"))
    }

    /// A line for each CPU that is there. Hexadecimal: packets first, interrupts tenth, the CPU's number thirteenth.
    fn parse(text: &str, cpu: usize) -> Option<Self> {
        text.lines().find_map(|line| {
            let field =
                |index| u32::from_str_radix(line.split_ascii_whitespace().nth(index)?, 16).ok();
            (field(12)? as usize == cpu)
                .then_some(Self { packets: field(0)?, interrupts: field(9)? })
        })
    }
}

impl Sub for Handed {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        // The kernel counts and prints 32 bits.
        Self {
            packets: self.packets.wrapping_sub(before.packets),
            interrupts: self.interrupts.wrapping_sub(before.interrupts),
        }
    }
}

/// What went to and fro for each request, or for each MiB.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    /// Packets and interrupts: to the client, and to the server.
    figures: [f64; 4],
}

impl Traffic {
    /// That of so many requests or MiB.
    pub fn of(to_client: Handed, to_server: Handed, count: f64) -> Self {
        let all =
            [to_client.packets, to_client.interrupts, to_server.packets, to_server.interrupts];
        Self { figures: all.map(|number| f64::from(number) / count) }
    }

    /// The middle of several.
    pub fn median(several: &[Self]) -> Option<Self> {
        let middle = |index: usize| {
            let figures: Vec<_> = several.iter().map(|traffic| traffic.figures[index]).collect();
            Some(Figure::of(&figures)?.median)
        };
        Some(Self { figures: [middle(0)?, middle(1)?, middle(2)?, middle(3)?] })
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [packets_out, interrupts_out, packets_in, interrupts_in] = self.figures;
        write!(
            formatter,
            "packets {packets_out:.2} out {packets_in:.2} in, interrupts {interrupts_out:.2} out {interrupts_in:.2} in"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_found_by_its_number_and_not_by_its_line() {
        let line = |packets: &str, interrupts: &str, cpu: &str| {
            format!("{packets} 0 0 0 0 0 0 0 0 {interrupts} 0 0 {cpu} 0 0\n")
        };
        let text =
            line("0000ffff", "00000010", "00000000") + &line("00000002", "00000001", "00000003");
        let handed = Handed::parse(&text, 3).unwrap();
        assert_eq!((handed.packets, handed.interrupts), (2, 1));
        assert_eq!(Handed::parse(&text, 0).unwrap().packets, 0xffff);
        assert!(Handed::parse(&text, 1).is_none());
        let later = Handed { packets: 1, interrupts: 5 };
        let since = later - Handed { packets: u32::MAX, interrupts: 1 };
        let text = Traffic::of(since, since, 2.0).to_string();
        assert_eq!(
            text, "packets 1.00 out 1.00 in, interrupts 2.00 out 2.00 in",
            "counters wrap around"
        );
    }
}
