//! The control socket: commands of an operator to a running proxy.
//!
//! A command is one line of words, and its answer one line of JSON ([`ControlResponse`]):
//!
//! | command | effect |
//! |---|---|
//! | `connections` | lists the open connections |
//! | `upstreams` | lists the upstreams |
//! | `status` | the process as a whole: version, listeners, latest reload |
//! | `reload` | reads the configuration file again, and puts it in force |
//! | `check` | reads the configuration file, tells what a reload would but for names |
//! | `drain UPSTREAM [TIME]` | no new connection to it; after the time, established ones are closed |
//! | `disable UPSTREAM` | no new connection to it, and established ones are closed |
//! | `enable UPSTREAM` | the opposite of both |
//! | `weight UPSTREAM N` | its share of new connections; `default` for the configured one |
//! | `kill ID` | closes a connection by a reset |
//! | `kill upstream UPSTREAM` | closes all connections to it |
//! | `kill client NETWORK` | closes all connections of these clients |
//! | `upgrade` | of a new process: hands everything over to it ([`crate::ProcessConfig::upgrades`]) |
//!
//! UPSTREAM is an address as configured, in all groups, or `GROUP/ADDRESS`.

use crate::config::upstream_address::WEIGHT_MAX;
use crate::handover::{self, HandoverSource};
use crate::loop_state::Shared;
use crate::mailbox::{Mailboxes, Request};
use crate::operate::process::Process;
use crate::operate::status::{self, ControlResponse};
use crate::upstreams::closing::{ClosingReason, Closings};
use crate::upstreams::routing::CurrentTable;
use crate::upstreams::selection::{ConnectionSelection, UpstreamSelection};
use crate::upstreams::upstream::{AdminState, Upstream};
pub use haul_server::command_socket::send_command;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;

const OPERATOR: ClosingReason = ClosingReason::Operator;
/// The time in which all event loops have to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The limits of the time of `drain`.
const DRAIN_TIMES: std::ops::RangeInclusive<Duration> =
    Duration::ZERO..=Duration::from_secs(7 * 24 * 3600);
/// The most upstreams that an error names.
const UPSTREAMS_NAMED_MAX: usize = 8;

/// A command of an operator.
#[derive(Debug, Clone)]
enum Command {
    Connections,
    Upstreams,
    Status,
    Reload,
    Check,
    Drain(UpstreamSelection, Option<Duration>),
    Disable(UpstreamSelection),
    Enable(UpstreamSelection),
    Weight(UpstreamSelection, Option<u32>),
    KillId(u64),
    KillUpstream(UpstreamSelection),
    KillClients(haul_server::IpRange),
}

impl FromStr for Command {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<_> = text.split_ascii_whitespace().collect();
        let upstream = |name: &str| UpstreamSelection(name.to_owned());
        Ok(match words[..] {
            ["connections"] => Self::Connections,
            ["upstreams"] => Self::Upstreams,
            ["status"] => Self::Status,
            ["reload"] => Self::Reload,
            ["check"] => Self::Check,
            ["drain", name] => Self::Drain(upstream(name), None),
            ["drain", name, time] => {
                let time = haul_units::parse_time(time, DRAIN_TIMES);
                Self::Drain(upstream(name), Some(time.map_err(|error| error.to_string())?))
            }
            ["disable", name] => Self::Disable(upstream(name)),
            ["enable", name] => Self::Enable(upstream(name)),
            ["weight", name, "default"] => Self::Weight(upstream(name), None),
            ["weight", name, weight] => match weight.parse() {
                Ok(weight @ 1..=WEIGHT_MAX) => Self::Weight(upstream(name), Some(weight)),
                _ => return Err(format!("{weight} is no weight: write 1 to {WEIGHT_MAX}")),
            },
            ["kill", "upstream", name] => Self::KillUpstream(upstream(name)),
            ["kill", "client", network] => Self::KillClients(network.parse()?),
            ["kill", id] => Self::KillId(id.parse().map_err(|_| {
                format!("{id} is no connection's number: kill upstream and kill client take others")
            })?),
            _ => return Err(misuse(text, words.first().copied())),
        })
    }
}

/// Why a line is not a command: the use of its first word, or all uses if the first word is
/// unknown.
fn misuse(line: &str, first_word: Option<&str>) -> String {
    const USES: [&str; 12] = [
        "connections",
        "upstreams",
        "status",
        "reload",
        "check",
        "drain UPSTREAM [TIME]",
        "disable UPSTREAM",
        "enable UPSTREAM",
        "weight UPSTREAM N|default",
        "kill ID",
        "kill upstream UPSTREAM",
        "kill client NETWORK",
    ];
    let of_word = USES.into_iter().filter(|one| one.split(' ').next() == first_word);
    match of_word.collect::<Vec<_>>()[..] {
        [] => format!("unknown command {line:?}: known are {}", USES.join(", ")),
        ref uses => format!("{line:?} is not complete or has too much: write {}", uses.join(", ")),
    }
}

/// Runs commands.
#[derive(Debug)]
pub struct Controller {
    table: Arc<CurrentTable>,
    closings: Arc<Closings>,
    mailboxes: Arc<Mailboxes>,
    source: Arc<HandoverSource>,
    process: Arc<Process>,
}

impl Controller {
    /// The controller of a proxy.
    pub fn new(
        shared: &Shared,
        mailboxes: Arc<Mailboxes>,
        source: Arc<HandoverSource>,
        process: Arc<Process>,
    ) -> Self {
        let (table, closings) = (Arc::clone(&shared.table), Arc::clone(&shared.closings));
        Self { table, closings, mailboxes, source, process }
    }

    /// Runs the command of a line, and returns the line of its answer.
    pub fn answer(&self, line: &str, client: &UnixStream) -> Vec<u8> {
        if line == handover::COMMAND {
            let begun = self.source.begin(client);
            // An answer instead of a channel is the refusal.
            return begun.map_or_else(|error| error.to_string().into_bytes(), |()| Vec::new());
        }
        let response = line.parse().and_then(|command| self.carry_out(command, client));
        let Some(response) = response.unwrap_or_else(|error| Some(ControlResponse::Error(error)))
        else {
            return Vec::new();
        };
        if let ControlResponse::Changed(_) | ControlResponse::Killed(_) = &response {
            info!(command = line, "carried out {line:?} for an operator");
        }
        line_of(&response)
    }

    /// Reloads on a new thread, which answers, because names that are not resolved must not delay
    /// other commands.
    fn reload_for(&self, client: &UnixStream) -> Result<(), String> {
        if self.process.is_ending() {
            return Err("the process is ending, and accepts no clients".into());
        }
        let process = Arc::clone(&self.process);
        let mut client = client.try_clone().map_err(|error| error.to_string())?;
        let reload = move || {
            // The server of commands does not wait for its clients.
            let _ = client.set_nonblocking(false);
            let reloaded = process.reloader.reload_from_source();
            let response = match reloaded {
                Ok(caveats) => ControlResponse::Reloaded(caveats),
                Err(error) => ControlResponse::Error(error.to_string()),
            };
            // A client that left loses its answer.
            let _ = client.write_all(&line_of(&response));
        };
        let thread = thread::Builder::new().name("haul-reload".into());
        thread.spawn(reload).map(drop).map_err(|error| error.to_string())
    }

    fn refuse_if_busy(&self) -> Result<(), String> {
        if self.source.is_busy() {
            return Err("another process is taking over: try again once it has".into());
        }
        Ok(())
    }

    /// Runs a command. Returns `None` if another thread will send the answer.
    fn carry_out(
        &self,
        command: Command,
        client: &UnixStream,
    ) -> Result<Option<ControlResponse>, String> {
        let is_question = matches!(
            command,
            Command::Connections | Command::Upstreams | Command::Status | Command::Check
        );
        if !is_question {
            self.refuse_if_busy()?;
        }
        let response = match command {
            Command::Reload => return self.reload_for(client).map(|()| None),
            Command::Connections => {
                let lists = self.ask(Request::List)?;
                let mut connections: Vec<_> = lists.into_iter().flatten().collect();
                connections.sort_unstable_by_key(|connection| connection.id);
                Ok(ControlResponse::Connections(connections))
            }
            Command::Upstreams => {
                let upstreams = status::upstreams(&self.table.get(), &self.closings, |_| true);
                Ok(ControlResponse::Upstreams(upstreams))
            }
            Command::Status => Ok(ControlResponse::Status(Box::new(self.process.status()))),
            Command::Check => {
                let checked = self.process.reloader.check_source();
                checked.map(ControlResponse::Checked).map_err(|error| error.to_string())
            }
            Command::Drain(selection, time) => self.change(&selection, |upstream| {
                self.administer(upstream, AdminState::Draining);
                match time {
                    Some(time) => self.closings.close_after(time, upstream, OPERATOR),
                    None => self.closings.cancel(upstream, OPERATOR),
                }
            }),
            Command::Disable(selection) => self.change(&selection, |upstream| {
                self.administer(upstream, AdminState::Disabled);
                self.closings.close_after(Duration::ZERO, upstream, OPERATOR);
            }),
            Command::Enable(selection) => self.change(&selection, |upstream| {
                self.administer(upstream, AdminState::Enabled);
                self.closings.cancel(upstream, OPERATOR);
            }),
            Command::Weight(selection, weight) => self.set_weight(&selection, weight),
            Command::KillId(id) => {
                let killed = self.kill(&ConnectionSelection::Id(id))?;
                if killed == 0 { Err(format!("there is no connection {id}")) } else { Ok(killed) }
                    .map(ControlResponse::Killed)
            }
            Command::KillUpstream(selection) => {
                let killed = self.kill(&ConnectionSelection::Upstream(selection.clone()))?;
                if killed == 0 {
                    // A wrong name must not look like success.
                    self.selected(&selection)?;
                }
                Ok(ControlResponse::Killed(killed))
            }
            Command::KillClients(range) => {
                self.kill(&ConnectionSelection::Clients(range)).map(ControlResponse::Killed)
            }
        };
        response.map(Some)
    }

    /// Sets whether an upstream gets new connections. A removed upstream does not get connections,
    /// and would come back like a new upstream.
    fn administer(&self, upstream: &Arc<Upstream>, administration: AdminState) {
        if self.table.get().has(upstream) {
            upstream.set_administration(administration);
        }
    }

    /// The upstreams that the operator means, at least one.
    fn selected(&self, selection: &UpstreamSelection) -> Result<Vec<Arc<Upstream>>, String> {
        let upstreams = self.table.get().open_upstreams();
        let is_meant = |upstream: &&Arc<Upstream>| selection.admits(upstream);
        let selected: Vec<_> = upstreams.iter().filter(is_meant).cloned().collect();
        if !selected.is_empty() {
            return Ok(selected);
        }
        let known = upstreams.iter().take(UPSTREAMS_NAMED_MAX + 1);
        let known: Vec<_> =
            known.map(|upstream| format!("{}/{}", upstream.group(), upstream.name())).collect();
        let hint = match known.len() {
            0..=UPSTREAMS_NAMED_MAX => format!("known are {}", known.join(", ")),
            _ => "the command upstreams lists them".to_owned(),
        };
        Err(format!("there is no upstream {}: {hint}", selection.0))
    }

    /// Sets the weight of upstreams in place of the configured weight. A removed upstream does not
    /// have a weight.
    fn set_weight(
        &self,
        selection: &UpstreamSelection,
        weight: Option<u32>,
    ) -> Result<ControlResponse, String> {
        let table = self.table.get();
        if self.selected(selection)?.iter().all(|upstream| !table.has(upstream)) {
            let name = &selection.0;
            return Err(format!("{name} was removed from the configuration, and has no weight"));
        }
        self.change(selection, |upstream| {
            if table.has(upstream) {
                upstream.set_weight(weight);
            }
        })
    }

    fn change(
        &self,
        selection: &UpstreamSelection,
        change: impl Fn(&Arc<Upstream>),
    ) -> Result<ControlResponse, String> {
        self.selected(selection)?.iter().for_each(change);
        let is_changed = |upstream: &Upstream| selection.admits(upstream);
        let changed = status::upstreams(&self.table.get(), &self.closings, is_changed);
        // Connections that are to be closed are closed now.
        self.mailboxes.send_all(|| Request::Close);
        Ok(ControlResponse::Changed(changed))
    }

    fn kill(&self, selection: &ConnectionSelection) -> Result<usize, String> {
        let killed = self.ask(|answer| Request::Kill(selection.clone(), answer))?;
        Ok(killed.into_iter().sum())
    }

    /// Sends a request to every event loop, and waits for their answers.
    fn ask<A>(&self, request: impl Fn(Sender<A>) -> Request) -> Result<Vec<A>, String> {
        let (tx, rx) = mpsc::channel();
        self.mailboxes.send_all(|| request(tx.clone()));
        drop(tx);
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut answers = Vec::new();
        loop {
            match rx.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(answer) => answers.push(answer),
                // Each loop answered, or ended.
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(answers),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    return Err("an event loop has not answered in time: try again".into());
                }
            }
        }
    }
}

/// An answer as a line of JSON.
fn line_of(response: &ControlResponse) -> Vec<u8> {
    // Writing these types to memory does not fail.
    let mut text = serde_json::to_vec(response).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_cannot_be_meant_is_refused() {
        for (line, expected) in [
            ("", "unknown command"),
            ("drain", "write drain UPSTREAM [TIME]"),
            ("upstreams all", "write upstreams"),
            ("kill", "write kill ID, kill upstream UPSTREAM, kill client NETWORK"),
            ("weight a:1", "write weight UPSTREAM N|default"),
            ("drain a:1 soon", "soon"),
            ("weight a:1 0", "0 is no weight"),
            ("kill everything", "everything is no connection's number"),
            ("kill client 10.0.0.0/99", "10.0.0.0/99"),
        ] {
            let error = line.parse::<Command>().unwrap_err();
            assert!(error.contains(expected), "{line:?}: {error}");
        }
        for line in ["kill 7", "kill client 10.0.0.0/8", "weight a:1 default", "drain a:1 30s"] {
            assert!(line.parse::<Command>().is_ok(), "{line}");
        }
    }
}
