//! Owners of processes: the experiment, the kernel, or another program.

use std::collections::HashMap;
use std::fs;

/// `PF_KTHREAD` of include/linux/sched.h, in field 9 of `/proc/PID/stat`.
const PF_KTHREAD: u64 = 0x0020_0000;

/// The owner of a process's work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    /// Part of the flow, or a thread of the kernel.
    Flow,
    /// Another program, of this name.
    Other(String),
}

/// Known owners by process number. They are looked up while the process runs, because `/proc` has
/// no data on a process that has ended.
#[derive(Debug, Default)]
pub(super) struct Owners(HashMap<u32, Owner>);

impl Owners {
    /// Looks up the owner of a process, unless it is known.
    pub(super) fn resolve(&mut self, process: u32) {
        self.0.entry(process).or_insert_with(|| owner_of(process));
    }

    /// The name of another program; `None` for the flow's own work and the kernel's.
    pub(super) fn other_program(&self, process: u32) -> Option<&str> {
        match self.0.get(&process)? {
            Owner::Flow => None,
            Owner::Other(name) => Some(name),
        }
    }
}

fn owner_of(process: u32) -> Owner {
    // 0 is the idle loop. This process starts the workers and runs the meter.
    if process == 0 || process == std::process::id() {
        return Owner::Flow;
    }
    match fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => parse_owner(&stat, std::process::id()),
        Err(_) => Owner::Other("a program that has ended".into()),
    }
}

/// Parses `/proc/PID/stat` (proc_pid_stat(5)); `parent` is the process that starts the workers.
fn parse_owner(stat: &str, parent: u32) -> Owner {
    // The name, in parentheses, may contain any character. After it come the state, the parent, and
    // as seventh field the flags.
    let (head, fields) = stat.rsplit_once(')').unwrap_or((stat, ""));
    let name = head.split_once('(').map_or("?", |(_, name)| name);
    let field = |index: usize| fields.split_ascii_whitespace().nth(index)?.parse::<u64>().ok();
    let is_worker = field(1) == Some(parent.into());
    let is_kernel_thread = field(6).is_some_and(|flags| flags & PF_KTHREAD != 0);
    if is_worker || is_kernel_thread { Owner::Flow } else { Owner::Other(name.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_and_kernel_threads_are_not_other_programs() {
        let kernel = "15 (ksoftirqd/0) S 2 0 0 0 -1 69238848 0 0";
        let worker = "800 (haul (a) b) R 42 42 42 0 -1 4194304 0 0";
        let other = "801 (chromium) R 1 42 42 0 -1 4194304 0 0";
        assert_eq!(parse_owner(kernel, 42), Owner::Flow);
        assert_eq!(parse_owner(worker, 42), Owner::Flow);
        assert_eq!(parse_owner(other, 42), Owner::Other("chromium".into()));
        assert_eq!(parse_owner("", 42), Owner::Other("?".into()));
    }

    #[test]
    fn a_child_belongs_to_the_flow_and_pid_1_does_not() {
        let mut owners = Owners::default();
        let mut child = std::process::Command::new("sleep").arg("9").spawn().unwrap();
        owners.resolve(child.id());
        owners.resolve(1);
        assert_eq!(owners.other_program(child.id()), None);
        assert!(owners.other_program(1).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
