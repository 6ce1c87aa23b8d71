//! The processes that a command started, found in `/proc`: which still run, and which did not load
//! the interposer.

use crate::program;
use crate::session::LIBRARY_NAME;
use haul_lab_sys::process_stat::ProcessStat;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::Path;

/// A process that counted nothing.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
pub struct NotLoaded {
    /// Name of the program.
    pub name: String,
    /// Number of processes.
    pub processes: u64,
    /// Why the library was not loaded.
    pub reason: String,
}

/// The descendants of this process without the interposer, collected by repeated looks at `/proc`.
///
/// A process that ends between two looks is not found.
#[derive(Debug, Default)]
pub struct Descendants {
    /// Processes that were there at the last look and counted nothing, with their programs.
    candidates: HashMap<u32, String>,
    not_loaded: BTreeMap<(String, String), HashSet<u32>>,
}

impl Descendants {
    /// Looks at the processes, without the broker. A process that counts nothing at two looks is
    /// remembered. At the first look, the process may still be about to start its program.
    pub fn look(&mut self, counted: &HashSet<u32>, broker: u32) {
        let own = fs::read_link("/proc/self/exe").ok();
        let mut candidates = HashMap::new();
        for (process, stat) in all(std::process::id(), broker) {
            if counted.contains(&process) || stat.has_ended() {
                continue;
            }
            let executable = Path::new("/proc").join(process.to_string()).join("exe");
            let Ok(path) = fs::read_link(&executable) else { continue };
            // The meter and the broker.
            if own.as_ref() == Some(&path) {
                continue;
            }
            let path = path.to_string_lossy().into_owned();
            if self.candidates.get(&process) == Some(&path) && !has_library(process) {
                self.add(process, stat.name, &executable);
            }
            candidates.insert(process, path);
        }
        self.candidates = candidates;
    }

    fn add(&mut self, process: u32, name: String, executable: &Path) {
        let reason = match program::obstacle(executable) {
            Ok(Some(obstacle)) => obstacle.to_string(),
            Ok(None) => "started without the environment of haul run".into(),
            Err(error) => format!("its program cannot be read: {error}"),
        };
        self.not_loaded.entry((name, reason)).or_default().insert(process);
    }

    /// The processes that did not load the interposer, by program.
    pub fn not_loaded(&self) -> Vec<NotLoaded> {
        let entries = self.not_loaded.iter();
        entries
            .map(|((name, reason), processes)| NotLoaded {
                name: name.clone(),
                processes: processes.len() as u64,
                reason: reason.clone(),
            })
            .collect()
    }
}

/// Whether a process has the interposer in its memory. A process of another PID namespace has
/// another number in the counters.
fn has_library(process: u32) -> bool {
    let maps = fs::read(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.windows(LIBRARY_NAME.len()).any(|window| window == LIBRARY_NAME.as_bytes())
}

/// The descendants of a process, without the broker.
fn all(ancestor: u32, broker: u32) -> Vec<(u32, ProcessStat)> {
    let mut of_parent: HashMap<u32, Vec<(u32, ProcessStat)>> = HashMap::new();
    for (process, stat) in ProcessStat::all().filter(|&(process, _)| process != broker) {
        of_parent.entry(stat.parent).or_default().push((process, stat));
    }
    let mut found = of_parent.remove(&ancestor).unwrap_or_default();
    let mut next = 0;
    while next < found.len() {
        let children = of_parent.remove(&found[next].0).unwrap_or_default();
        found.extend(children);
        next += 1;
    }
    found
}

/// The descendants of this process that run, without the broker.
pub fn running(broker: u32) -> Vec<u32> {
    let running = all(std::process::id(), broker).into_iter().filter(|(_, stat)| !stat.has_ended());
    running.map(|(process, _)| process).collect()
}
