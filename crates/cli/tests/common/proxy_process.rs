//! A running `haul proxy`.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for a message, or for the end of a process.
const LIMIT: Duration = Duration::from_secs(60);

/// A running proxy, which is killed at the end.
pub struct ProxyProcess {
    pub process: Child,
    /// Where clients connect.
    pub address: String,
    /// The lines of its messages. They are read at once: a full pipe would stop the proxy.
    messages: Receiver<String>,
}

impl ProxyProcess {
    /// Starts a proxy, and waits until it listens.
    pub fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (lines, messages) = mpsc::channel();
        let reader = BufReader::new(process.stderr.take().unwrap());
        thread::spawn(move || {
            // The test may not wait for them any more.
            reader.lines().map_while(Result::ok).try_for_each(|line| lines.send(line))
        });
        let mut proxy = Self { process, address: String::new(), messages };
        let line = proxy.wait_for("clients at ");
        let mut rest = line.split_once("clients at ").unwrap().1.split(' ');
        proxy.address.extend(rest.next());
        proxy
    }

    /// Waits for a message with this text, and returns it.
    pub fn wait_for(&self, text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        let mut before = Vec::new();
        loop {
            let time_left = deadline.saturating_duration_since(Instant::now());
            let line = self.messages.recv_timeout(time_left).unwrap_or_else(|error| {
                panic!("no message with {text:?} ({error}) after these: {before:#?}")
            });
            if line.contains(text) {
                return line;
            }
            before.push(line);
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Waits until it has ended by itself, and returns the messages that were not waited for.
    pub fn join(mut self) -> String {
        let deadline = Instant::now() + LIMIT;
        let mut rest = String::new();
        loop {
            let time_left = deadline.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(time_left) {
                Ok(line) => rest = rest + &line + "\n",
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end: {rest}"),
            }
        }
        assert_eq!(self.process.wait().unwrap().code(), Some(0), "{rest}");
        rest
    }

    /// Ends it by SIGTERM, and returns the messages that were not waited for.
    pub fn finish(self) -> String {
        self.signal(Signal::TERM);
        let rest = self.join();
        assert!(rest.ends_with("ended\n"), "{rest}");
        rest
    }
}

impl Drop for ProxyProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
