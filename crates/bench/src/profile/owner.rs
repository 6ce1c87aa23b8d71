//! Whose work a process does: the experiment's, the kernel's, or another program's.

use std::collections::HashMap;
use std::fs;

/// `PF_KTHREAD` of include/linux/sched.h, in field 9 of `/proc/PID/stat`.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Whose work a process does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    /// It is a part of the flow, or the kernel's.
    Flow,
    /// It is another program, of this name.
    Other(String),
}

/// What is known of processes. They are asked for while they run, since one that has ended tells nothing.
#[derive(Debug, Default)]
pub(super) struct Owners(HashMap<u32, Owner>);

impl Owners {
    /// Learns whose work a process does, unless that is known.
    pub(super) fn learn(&mut self, process: u32) {
        self.0.entry(process).or_insert_with(|| owner_of(process));
    }

    /// The name of another program; `None` for the flow's own work and the kernel's.
    pub(super) fn other(&self, process: u32) -> Option<&str> {
        match self.0.get(&process)? {
            Owner::Flow => None,
            Owner::Other(name) => Some(name),
        }
    }
}

fn owner_of(process: u32) -> Owner {
    // 0 is the idle loop; this process starts the workers and holds the meter.
    if process == 0 || process == std::process::id() {
        return Owner::Flow;
    }
    match fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => of_stat(&stat, std::process::id()),
        Err(_) => Owner::Other("a program that has ended".into()),
    }
}

/// From `/proc/PID/stat` (proc_pid_stat(5)); `parent` is the process that starts the workers.
fn of_stat(stat: &str, parent: u32) -> Owner {
    // The name, in parentheses, may hold anything. After it come the state, the parent, and as seventh the flags.
    let (head, fields) = stat.rsplit_once(')').unwrap_or((stat, ""));
    let name = head.split_once('(').map_or("?", |(_, name)| name);
    let field = |index: usize| fields.split_ascii_whitespace().nth(index)?.parse::<u64>().ok();
    let is_worker = field(1) == Some(parent.into());
    let is_kernels = field(6).is_some_and(|flags| flags & KERNEL_THREAD != 0);
    if is_worker || is_kernels { Owner::Flow } else { Owner::Other(name.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_and_kernel_threads_are_told_from_other_programs() {
        let kernel = "15 (ksoftirqd/0) S 2 0 0 0 -1 69238848 0 0";
        let worker = "800 (haul (a) b) R 42 42 42 0 -1 4194304 0 0";
        let other = "801 (chromium) R 1 42 42 0 -1 4194304 0 0";
        assert_eq!(of_stat(kernel, 42), Owner::Flow);
        assert_eq!(of_stat(worker, 42), Owner::Flow);
        assert_eq!(of_stat(other, 42), Owner::Other("chromium".into()));
        assert_eq!(of_stat("", 42), Owner::Other("?".into()));
    }

    #[test]
    fn a_child_is_the_flows_and_the_first_process_is_not() {
        let mut owners = Owners::default();
        let mut child = std::process::Command::new("sleep").arg("9").spawn().unwrap();
        owners.learn(child.id());
        owners.learn(1);
        assert_eq!(owners.other(child.id()), None);
        assert!(owners.other(1).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
