//! A running `haul proxy`.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};

/// A running proxy, which is killed at the end.
pub struct ProxyProcess {
    pub process: Child,
    /// Where clients connect.
    pub address: String,
    pub messages: BufReader<ChildStderr>,
}

impl ProxyProcess {
    /// Starts a proxy, and waits until it listens.
    pub fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut messages = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        messages.read_line(&mut line).unwrap();
        let address = line.split_once("clients at ").and_then(|(_, rest)| rest.split_once(' '));
        let address = address.unwrap_or_else(|| panic!("{line}")).0.to_owned();
        Self { process, address, messages }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Ends it by SIGTERM.
    pub fn finish(&mut self) {
        self.signal(Signal::TERM);
        let mut rest = String::new();
        self.messages.read_to_string(&mut rest).unwrap();
        assert_eq!(self.process.wait().unwrap().code(), Some(0), "{rest}");
        assert!(rest.ends_with("ended\n"), "{rest}");
    }
}

impl Drop for ProxyProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
