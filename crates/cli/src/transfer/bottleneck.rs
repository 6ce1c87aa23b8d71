//! What a transfer waits for, from the times of both ends.

use haul_transfer::Times;

/// The least time of all threads that says something.
const SECONDS_MIN: f64 = 1.0;
/// The share of the time above which one cause is named as the bottleneck.
const MOST: f64 = 0.5;
/// A destination that spends this share of its time in files is slower than its streams.
const SLOW_STORAGE: f64 = 0.6;
/// From this share of the time on, a thread or a process of ssh is limited by its CPU.
const BUSY_CPU: f64 = 0.7;

/// One of the two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The host of the user.
    Here,
    /// The other host.
    There,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Here => Self::There,
            Self::There => Self::Here,
        }
    }
}

/// What a transfer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    Disk(Side),
    Cpu(Side),
    /// The encryption of ssh, by one CPU.
    Ssh(Side),
    Network,
    /// The source looks for files, or the destination answers lists.
    Lists,
    /// The limit of the rate that the user set.
    Limit,
}

/// What is known of a transfer.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    pub source: Times,
    pub destination: Times,
    pub source_side: Side,
    /// The time of the transfer, in seconds.
    pub seconds: f64,
    /// Whether ssh carries most of the content.
    pub is_through_ssh: bool,
}

/// A bottleneck, and the share of the time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wait {
    pub bottleneck: Bottleneck,
    pub share: f64,
}

impl Observed {
    /// What the transfer waits for; `None` if it is too short to know.
    pub fn wait(&self) -> Option<Wait> {
        let Self { source, destination, source_side, .. } = *self;
        let all = source.idle + source.storage + source.stream + source.limit;
        if all < SECONDS_MIN {
            return None;
        }
        let of_storage = |times: &Times, side| {
            let is_busy = times.storage_cpu > BUSY_CPU * times.storage;
            if is_busy { Bottleneck::Cpu(side) } else { Bottleneck::Disk(side) }
        };
        let found = |bottleneck, seconds: f64| Some(Wait { bottleneck, share: seconds / all });
        if source.limit > MOST * all {
            return found(Bottleneck::Limit, source.limit);
        }
        if source.storage > MOST * all {
            return found(of_storage(&source, source_side), source.storage);
        }
        // The source waits for answers or for room in the streams.
        let waited = source.idle.max(source.stream);
        let there = destination.storage + destination.stream;
        if destination.storage > SLOW_STORAGE * there {
            return found(of_storage(&destination, source_side.other()), waited);
        }
        if source.idle > source.stream {
            return found(Bottleneck::Lists, source.idle);
        }
        found(self.of_streams(), source.stream)
    }

    fn of_streams(&self) -> Bottleneck {
        let Self { source, destination, source_side, seconds, is_through_ssh } = *self;
        let ends = [(source, source_side), (destination, source_side.other())];
        for (times, side) in ends {
            if is_through_ssh && times.ssh_cpu > BUSY_CPU * seconds {
                return Bottleneck::Ssh(side);
            }
            if times.stream_cpu > BUSY_CPU * times.stream {
                return Bottleneck::Cpu(side);
            }
        }
        Bottleneck::Network
    }
}

impl Bottleneck {
    /// As a part of a sentence. The other host has this name.
    pub fn text(self, host: &str) -> String {
        let place = |side| match side {
            Side::Here => "here".to_owned(),
            Side::There => format!("of {host}"),
        };
        match self {
            Self::Disk(side) => format!("the disk {}", place(side)),
            Self::Cpu(side) => format!("the CPU {}", place(side)),
            Self::Ssh(side) => format!("ssh and one CPU {}", place(side)),
            Self::Network => "the network".into(),
            Self::Lists => "the lists of files".into(),
            Self::Limit => "the limit of --bwlimit".into(),
        }
    }

    /// As a word for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Disk(Side::Here) => "disk_here",
            Self::Disk(Side::There) => "disk_there",
            Self::Cpu(Side::Here) => "cpu_here",
            Self::Cpu(Side::There) => "cpu_there",
            Self::Ssh(Side::Here) => "ssh_here",
            Self::Ssh(Side::There) => "ssh_there",
            Self::Network => "network",
            Self::Lists => "lists",
            Self::Limit => "limit",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds idle, in files and in streams, each of the last two with the part of the CPU.
    fn times(idle: f64, storage: (f64, f64), stream: (f64, f64)) -> Times {
        let mut times = Times::default();
        (times.idle, times.storage, times.storage_cpu) = (idle, storage.0, storage.1);
        (times.stream, times.stream_cpu) = stream;
        times
    }

    fn found(source: Times, destination: Times) -> Option<Bottleneck> {
        let (seconds, is_through_ssh) = (10.0, true);
        let observed =
            Observed { source, destination, source_side: Side::Here, seconds, is_through_ssh };
        observed.wait().map(|wait| wait.bottleneck)
    }

    #[test]
    fn the_slowest_part_is_found() {
        let waits = times(0.0, (0.5, 0.4), (9.5, 0.5));
        let receives = times(0.0, (1.0, 0.5), (9.0, 1.0));
        let disk = times(0.0, (9.0, 1.0), (1.0, 0.1));
        let cpu = times(0.0, (9.0, 8.0), (1.0, 0.1));
        assert_eq!(found(disk, receives), Some(Bottleneck::Disk(Side::Here)));
        assert_eq!(found(cpu, receives), Some(Bottleneck::Cpu(Side::Here)));
        assert_eq!(found(waits, disk), Some(Bottleneck::Disk(Side::There)));
        assert_eq!(found(waits, cpu), Some(Bottleneck::Cpu(Side::There)));
        assert_eq!(found(waits, receives), Some(Bottleneck::Network));
        let encrypts = times(0.0, (1.0, 0.9), (9.0, 8.0));
        assert_eq!(found(encrypts, receives), Some(Bottleneck::Cpu(Side::Here)));
        assert_eq!(found(times(9.0, (0.5, 0.5), (0.5, 0.1)), receives), Some(Bottleneck::Lists));
        let mut limited = times(0.0, (0.5, 0.5), (0.5, 0.1));
        limited.limit = 9.0;
        assert_eq!(found(limited, receives), Some(Bottleneck::Limit));
        let mut ssh = waits;
        ssh.ssh_cpu = 9.5;
        assert_eq!(found(ssh, receives), Some(Bottleneck::Ssh(Side::Here)));
        let mut sshd = receives;
        sshd.ssh_cpu = 9.5;
        assert_eq!(found(waits, sshd), Some(Bottleneck::Ssh(Side::There)));
        assert_eq!(found(times(0.1, (0.1, 0.1), (0.1, 0.1)), receives), None);
    }
}
