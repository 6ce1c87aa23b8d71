//! Starts a worker process and reads its messages.

use super::FlowError;
use haul_workers::lines::write_line;
use haul_workers::worker::{ARGUMENT, Job, Message};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A worker process that has received its job. It is killed when this is dropped, and when the
/// thread that started it ends.
pub(crate) struct WorkerProcess {
    /// Standard input of the process, which exits when this is closed.
    pub input: Option<ChildStdin>,
    output: Option<ChildStdout>,
    process: Child,
}

impl WorkerProcess {
    /// Starts a program as a worker, on the host of the calling thread: another build of haul, or
    /// this program again.
    pub(crate) fn start(job: &Job, program: Option<&Path>) -> Result<Self, FlowError> {
        let mut command = Command::new(program.unwrap_or(Path::new("/proc/self/exe")));
        command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
        // The worker has its own process group, so that Ctrl-C on a terminal stops the run in order
        // instead of killing a worker within it.
        let mut process = haul_lab_sys::child::dies_with_parent(command.process_group(0))
            .spawn()
            .map_err(FlowError::at("starting a process"))?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let mut worker = Self { input, output, process };
        if let Some(input) = &mut worker.input {
            write_line(input, job).map_err(|error| match error.kind() {
                ErrorKind::BrokenPipe => FlowError::Worker("it ended without a report".into()),
                _ => FlowError::at("sending the job to a worker process")(error),
            })?;
        }
        Ok(worker)
    }

    /// Passes each of its messages on until it exits.
    pub(crate) fn read_messages(
        &mut self,
        mut on_message: impl FnMut(Message),
    ) -> Result<(), FlowError> {
        for line in self.output.take().into_iter().flat_map(|output| BufReader::new(output).lines())
        {
            let line = line.map_err(FlowError::at("reading from a worker process"))?;
            let message = serde_json::from_str(&line);
            on_message(message.unwrap_or_else(|error| {
                Message::Failed(format!("invalid message {line:?}: {error}"))
            }));
        }
        self.process.wait().map(drop).map_err(FlowError::at("waiting for a process"))
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // Both fail only if the process has already been waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
