//! `/proc/PID/stat` (proc_pid_stat(5)): the state of a process, and its place among the others.

use std::fs;

/// The state of a process. Fails to be read if the process does not exist or `/proc` hides it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessStat {
    /// The name, at most 15 bytes. Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// The state, such as `R` (runs), `T` (stopped by a signal) or `Z` (ended, not waited for).
    pub state: char,
    /// The parent.
    pub parent: u32,
    /// The process group.
    pub group: u32,
    /// The session.
    pub session: u32,
    /// Time in user and kernel mode, in clock ticks.
    pub cpu_ticks: u64,
}

impl ProcessStat {
    /// Reads the state of a process.
    pub fn read(process: u32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{process}/stat")).ok()?)
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The kernel cuts a name without regard to its encoding.
        let stat = String::from_utf8_lossy(stat);
        // The name is in parentheses and may contain any byte.
        let (start, fields) = stat.rsplit_once(')')?;
        let (_, name) = start.split_once('(')?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            name: name.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: number(1)? as u32,
            group: number(2)? as u32,
            session: number(3)? as u32,
            cpu_ticks: number(11)? + number(12)?,
        })
    }

    /// Whether the process ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Lists all processes that `/proc` shows, with their IDs.
    pub fn all() -> impl Iterator<Item = (u32, Self)> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| {
            let process = entry.file_name().to_str()?.parse().ok()?;
            Some((process, Self::read(process)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_contain_any_byte() {
        let stat = b"7 (a) R 1 (\xc3) T 3 4 5 0 -1 4194304 1 0 0 0 20 30 0 0 20 0 1 0\n";
        let parsed = ProcessStat::parse(stat).unwrap();
        assert_eq!(parsed.name, "a) R 1 (\u{fffd}");
        assert_eq!((parsed.state, parsed.parent, parsed.group, parsed.session), ('T', 3, 4, 5));
        assert_eq!(parsed.cpu_ticks, 50);
        assert_eq!(ProcessStat::parse(b"7 (a"), None);
        assert_eq!(ProcessStat::parse(b""), None);
    }

    #[test]
    fn this_process_is_among_all() {
        let own = ProcessStat::read(std::process::id()).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(!own.has_ended());
        assert!(ProcessStat::all().any(|(process, _)| process == std::process::id()));
    }
}
