//! Starting a worker process, from the program's other side.

use super::FlowError;
use crate::lines::write_line;
use crate::worker::{ARGUMENT, Job, Message};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A worker that has its job. It is ended when this is dropped, and when the thread that started it ends.
pub(crate) struct Started {
    /// What is written here it reads; it ends when this is closed.
    pub input: Option<ChildStdin>,
    output: Option<ChildStdout>,
    process: Child,
}

impl Started {
    /// Starts this program again as a worker on the host that the calling thread is on.
    pub(crate) fn start(job: &Job) -> Result<Self, FlowError> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        // A group of its own, so that a terminal's Ctrl-C ends the run in order and not the process in the
        // middle of it.
        let mut process = haul_sys::child::dies_with_parent(command.process_group(0))
            .spawn()
            .map_err(FlowError::at("starting a process"))?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let mut started = Self { input, output, process };
        if let Some(input) = &mut started.input {
            write_line(input, job).map_err(FlowError::at("handing its job to a process"))?;
        }
        Ok(started)
    }

    /// Passes on what it says until it ends.
    pub(crate) fn hear(&mut self, mut tell: impl FnMut(Message)) -> Result<(), FlowError> {
        for line in self.output.take().into_iter().flat_map(|output| BufReader::new(output).lines())
        {
            let line = line.map_err(FlowError::at("hearing a process"))?;
            let message = serde_json::from_str(&line);
            tell(
                message
                    .unwrap_or_else(|error| Message::Failed(format!("it said {line:?}: {error}"))),
            );
        }
        self.process.wait().map(drop).map_err(FlowError::at("waiting for a process"))
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Both fail only for a process that has been waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
